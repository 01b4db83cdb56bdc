"""An engine without vLLM, over the real protocol: what a searcher's rank does about its engine needs no more.

A completion is as many tokens 1 as it may have, of the log-probability that the first weight says (0 before
there are any). ``generator.engine`` says how it behaves; ``vllm_generator.ENGINE`` names it.
"""

from __future__ import annotations

import signal
import socket
import sys
import time

import msgspec
import numpy as np

from tba_hpc.core.types import WeightLayout
from tba_hpc.core.weight_files import WeightFile
from tba_hpc.engine.engine_channel import (
    COMMANDS,
    Broken,
    Building,
    Channel,
    Command,
    Died,
    EngineSettings,
    Finished,
    Load,
    Loaded,
    Misfit,
    Progress,
    Ready,
    Refused,
    Submit,
)
from tba_hpc.run.signals import die_with

BEAT_SECONDS = 0.02


class Behaviour(msgspec.Struct):
    """How long it takes to be built, and to complete a request; its last word; what it lacks of weights."""

    build_seconds: float = 0.0
    request_seconds: float = 0.0
    refuse: str = ""
    die: str = ""
    misfit: str = ""
    broken: str = ""
    graphs: str = "NONE"  # unless the rank asks for others
    nan: dict[str, int] = {}  # by the kind of its graphs: how many groups, the first ones, are not numbers


def main() -> None:
    """Serve the rank that started this process until it hangs up."""
    parent, descriptor = sys.argv[1:]
    die_with(int(parent), signal.SIGKILL)
    asked = EngineSettings.model_validate_json(sys.stdin.read())
    behaviour = msgspec.convert(asked.generator.engine, Behaviour)
    behaviour.graphs = asked.graphs or behaviour.graphs
    channel = Channel(socket.socket(fileno=int(descriptor)), COMMANDS)
    build(channel, behaviour.build_seconds)
    for word, reason in ((Refused, behaviour.refuse), (Broken, behaviour.broken), (Died, behaviour.die)):
        if reason:
            channel.send(word(reason))
            sys.exit(1)
    channel.send(Ready(behaviour.graphs))
    serve(channel, behaviour)


def build(channel: Channel[Command], seconds: float) -> None:
    """Say every so often what it does, as an engine does at each stage."""
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:
        channel.send(Building("compiling"))
        time.sleep(min(0.05, left))


def serve(channel: Channel[Command], behaviour: Behaviour) -> None:
    """Complete one request after the other."""
    waiting: list[Submit] = []
    version, logprob, nan = 0, 0.0, behaviour.nan.get(behaviour.graphs, 0)
    while not channel.closed:
        for command in channel.receive(0 if waiting else BEAT_SECONDS):
            match command:
                case Submit():
                    waiting.append(command)
                case Load() if behaviour.misfit:
                    channel.send(Misfit(behaviour.misfit))
                case Load():
                    nbytes = WeightLayout.from_json(command.layout).nbytes
                    weights = WeightFile.open(command.path, nbytes).map("r")
                    version, logprob = command.version, float(weights[:4].view("f4")[0])
                    channel.send(Loaded(version, 0.0))
        time.sleep(behaviour.request_seconds if waiting else 0)
        said = np.nan if nan > 0 else logprob
        nan -= bool(waiting)
        finished = [completed(waiting.pop(0), version, said)] if waiting else []
        channel.send(Progress(0.0, sum(len(one.stopped) for one in finished), finished))


def completed(request: Submit, version: int, logprob: float) -> Finished:
    """All of a request's completions."""
    length = request.sampling.max_tokens
    return Finished(
        request=request.request,
        tokens=np.ones(request.n * length, np.int32).tobytes(),
        logprobs=np.full(request.n * length, logprob, np.float32).tobytes(),
        lengths=np.full(request.n, length, np.int32).tobytes(),
        stopped=bytes(request.n),
        versions=np.full((request.n, 2), version, np.int32).tobytes(),
    )


if __name__ == "__main__":
    main()
