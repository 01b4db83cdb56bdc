"""The searcher's side of a vLLM engine, which runs in a separate process.

Because of that process, engine and searcher do not compete for Python's global interpreter lock (GIL), and
the searcher survives if the engine dies.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from functools import partial

import numpy as np

from tba_hpc.config import ConfigError, GeneratorSection, LaunchSection, ModelSection
from tba_hpc.core import system_libraries
from tba_hpc.core.ports import EngineError
from tba_hpc.core.types import TOP_LOGPROBS, Completion, Group, Request, WeightLayout, WeightUpdate
from tba_hpc.core.weight_files import WeightFile
from tba_hpc.engine.engine_channel import (
    ANSWERS,
    Answer,
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
from tba_hpc.run.background import in_background
from tba_hpc.run.caches import pack_caches

log = logging.getLogger(__name__)

ENGINE = "tba_hpc.engine.engine_process"
"""Main module of the engine's process."""

STEP_SECONDS = 0.05
"""Longest wait of ``step`` for a message from the engine, in seconds."""

REBUILDS_WITHOUT_RESULT = 3
"""Largest number of times in a row that a failed engine is replaced without a finished group in between."""

TRIES = 4
"""Number of times that a request gets NaN log-probabilities before the searcher gives up."""

FEWER_GRAPHS = {"NONE": "", "PIECEWISE": "NONE"}
"""Value of vLLM's cudagraph_mode to try next, by the value that gave NaN log-probabilities. Empty: there is
no other to try. After any other value PIECEWISE is tried, which computes attention without CUDA graphs."""

FAILED, EXITED = "failed", "ended with exit status"
"""First words of ``EngineProcess.failure`` for an engine that ended by itself: after an exception that it
reported, or with nothing but an exit status."""

TRANSIENT = re.compile(
    r"\b(memory|CUDA|NCCL|timeout|timed out)\b|MemoryError|initialization failed", re.IGNORECASE
)
"""Words in failures that may not happen again in another engine. vLLM reports any failure of an engine's
workers only as "initialization failed"."""

PERMANENT = re.compile(r"failed: (Assertion|Attribute|Index|Key|Name|Type|NotImplemented)Error\b")
"""Failures by an exception that shows a programming error, which would happen in any other engine, too."""

NO_GRAPHS = "generator.engine={compilation_config: {cudagraph_mode: NONE}}"
"""Setting, for a message, that turns CUDA graphs off."""

LONGEST_COUNTED = 1.0
"""Longest silence of the engine, in seconds, that is counted between two calls of ``receive``. If more time
has passed, the searcher itself was suspended, and its engine is not to blame."""

EXIT_SECONDS, WORKERS_SECONDS, KILL_SECONDS = 1.0, 15.0, 30.0
"""Time limits, in seconds, for the end of an engine that has closed its socket, for the end of a dead
engine's workers, and for the end of a process that was killed."""

KEYS = (
    "model.path",
    "model.context_length",
    "generator.kv_cache_mb",
    "generator.gpu_memory_utilization",
    "generator.tensor_parallel",
)
"""Default for ``keys`` of VllmGenerator: the policy's config keys, which error messages name."""

BEFORE_TORCH = {
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # torch must not start CUDA when asked whether there is a GPU
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # a process that uses CUDA cannot fork workers
}
"""Environment variables that must be set before an engine's process imports torch or vLLM."""

IGNORE_SIGNALS = ("sh", "-c", 'trap "" INT TERM USR1; exec "$@"', "sh")
"""Prefix that makes a command ignore the signals to stop a run, which Slurm sends to every process."""

MPI_VARIABLES = ("OMPI_", "PMIX_", "PRTE_", "PMI_")
"""Prefixes of environment variables that an engine must not inherit. They mark a process as an MPI rank, and
an engine that takes itself for one hangs when it ends."""


class VllmGenerator:
    """A ports.Generator on vLLM that loads weights in place and replaces a dead engine.

    Up to ``prompts_in_flight`` × ``completions_per_prompt`` sequences are sampled at once; further requests
    wait in the engine's queue. The first weights are those of ``model.path``, version 0.

    The engine computes without pause; calls only send commands to it or fetch results. The constructor
    returns while the engine is still being built, and commands are kept until it is ready. All calls must
    come from one thread, because the kernel ends the engine with the thread that started it.
    """

    def __init__(
        self,
        model: ModelSection,
        generator: GeneratorSection,
        *,
        seed: int,
        keys: Sequence[str] = KEYS,
        start_seconds: float = LaunchSection().start_seconds,
        silence_seconds: float = LaunchSection().silence_seconds,
        top_logprobs: int = 0,
    ) -> None:
        """Start the engine.

        seed: should differ between searchers, and between attempts of one searcher. keys: config keys that
        error messages name: first the key of the model's path, then those to check if vLLM refuses the
        settings. start_seconds, silence_seconds: as in EngineProcess. top_logprobs: as in EngineSettings.
        """
        self._top_logprobs = top_logprobs
        self._limits = {"start_seconds": start_seconds, "silence_seconds": silence_seconds}
        self._model = model
        self._keys = (*keys, "generator.engine") if generator.engine else keys
        self._generator = generator
        self._seed = seed
        self._load: Load | None = None
        self._weights: WeightFile | None = None  # keeps the file of _load open for a rebuilt engine
        self._requests: dict[int, Request] = {}
        self._open = 0  # unfinished completions of _requests
        self._submitted = 0
        self._finished: list[Group] = []
        self._rebuilds_in_a_row = 0
        self._was_ready = False
        self._failure = ""  # how the last engine failed
        self._graphs, self._graphs_asked = "NONE", ""  # cudagraph_mode in use, and the one asked for, if any
        self._sound: Load | None = None  # the last load whose weights were found to be finite
        self._tried: Counter[int] = Counter()  # number of NaN results by request
        self._nan = ""  # why the engine must be replaced by one with fewer CUDA graphs; empty: it need not
        self.version = 0
        self._loading = False
        self.load_seconds = 0.0
        self.busy_seconds = 0.0
        self.rebuilds = 0
        self.nan_groups = 0
        self.stage = ""
        self._computed = self._recomputed = 0  # tokens
        self._engine = self._start()

    @property
    def in_flight(self) -> int:
        """Number of completions that ``step`` has yet to return, finished ones included."""
        return self._open + sum(group.request.n for group in self._finished)

    @property
    def loading(self) -> bool:
        """True while a ready engine loads weights; False while an engine is being built."""
        return self._loading and self._engine.ready

    @property
    def recompute_share(self) -> float:
        """Share of all computed tokens that were computed again, because a load discarded keys and values."""
        return self._recomputed / max(1, self._computed)

    def submit(self, request: Request) -> None:
        """Queue a request. Raises ValueError if prompt and longest completion exceed the context length."""
        prompt, completion = len(request.prompt.tokens), request.sampling.max_tokens
        if prompt + completion > self._model.context_length:
            raise ValueError(
                f"prompt {request.prompt.id} has {prompt} tokens and its answer may have {completion}, "
                f"together more than model.context_length={self._model.context_length}: raise that or "
                "lower generator.max_tokens"
            )
        self._submitted += 1
        self._requests[self._submitted] = request
        self._open += request.n
        if self._engine.ready:
            self._pass_on(self._submitted)

    def step(self) -> list[Group]:
        """Return the groups finished since the last call. Waits up to STEP_SECONDS for a message.

        An engine is replaced, and its requests start again, if it died, was silent for ``silence_seconds``,
        or was not built within ``start_seconds``. A group with NaN log-probabilities is sampled again.

        Raises EngineError after REBUILDS_WITHOUT_RESULT replacements without a finished group, if weights are
        not finite, or if a request gets NaN log-probabilities TRIES times. It is also raised if two engines
        in a row end by themselves in the same way before any has been ready, see ``is_permanent``.

        Raises ConfigError if vLLM cannot be imported, refuses the settings, or does not accept all of the
        weights. It is also raised if an engine ends before any has been ready, with an exception that shows a
        programming error (PERMANENT), or if a system library or program is missing.
        """
        self._listen()
        groups, self._finished = self._finished, []
        return groups

    def load(self, update: WeightUpdate) -> None:
        """Replace the weights once the engine's current step is over. Waits until earlier loads are complete.

        Unfinished completions continue with the new weights. Tokens already sampled keep their
        log-probabilities and versions. The KV cache is computed again, unless ``generator.keep_kv`` is set.
        """
        while self.loading:
            self._listen()
        self._weights = file = update.file or WeightFile.copy_of(update.data)
        version, layout = update.publication.version, update.layout.to_json()
        self._load = Load(version, file.path, layout, file.generation)
        self._loading = True
        if self._engine.ready:
            self._engine.send(self._load)

    def close(self) -> None:
        """Shut down the engine. No other method may be called afterwards."""
        self._engine.end()

    def _listen(self) -> None:
        for answer in self._engine.receive(STEP_SECONDS):
            self._take(answer)
        if failure := self._engine.failure() or self._nan:
            self._rebuild(failure)

    def _take(self, answer: Answer) -> None:
        match answer:
            case Progress():
                self.busy_seconds += answer.busy_seconds
                self._computed += answer.computed
                self._recomputed += answer.recomputed
                self._open -= answer.ended
                for finished in answer.finished:
                    self._finish(finished)
            case Loaded():
                self.version, self.load_seconds, self._loading = answer.version, answer.seconds, False
            case Building():
                self._reach(answer.stage)
            case Ready():
                if not self._was_ready:
                    in_background(partial(pack_caches, os.environ))
                self._reach("")
                self._was_ready, self._graphs = True, answer.graphs
                if self._load is not None:
                    self._engine.send(self._load)
                for number in self._requests:  # from a dead engine, or submitted while this one was built
                    self._pass_on(number)
            case Refused() if not self._was_ready:
                raise ConfigError(
                    f"vLLM cannot serve {self._keys[0]}={self._model.path} with this configuration: "
                    f"{answer.reason}; {remedy(answer.reason, self._keys)}"
                )
            case Broken():
                raise ConfigError(
                    f"vLLM cannot start on {socket.gethostname()}: {answer.reason}; "
                    f"{system_libraries.remedy(answer.reason) or 'install the pinned versions: make install'}"
                )
            case Misfit():
                raise ConfigError(
                    f"vLLM cannot follow the training of {self._keys[0]}={self._model.path}: its model "
                    f"{answer.reason}"
                )

    def _reach(self, stage: str) -> None:
        self.stage = stage
        log.info("engine: %s", stage or "ready")

    def _finish(self, finished: Finished) -> None:
        group = _group(self._requests[finished.request], finished)
        if any(np.isnan(one.logprobs).any() for one in group.completions):
            self._sample_again(finished.request)
            return
        self._rebuilds_in_a_row = 0
        del self._requests[finished.request]
        self._finished.append(group)

    def _sample_again(self, number: int) -> None:
        """Sample the request with this number again, because it got NaN log-probabilities.

        An engine with CUDA graphs is first replaced by one with fewer. Raises EngineError if the newest
        weights are not finite, or if the request has got NaN log-probabilities TRIES times.
        """
        self.nan_groups += 1
        self._require_finite_weights()
        request = self._requests[number]
        self._tried[number] += 1
        if self._tried[number] == TRIES:
            raise EngineError(
                f"log-probabilities of completions of prompt {request.prompt.id} were NaN {TRIES} times, the "
                "last time without CUDA graphs, though the weights are finite: leave the prompt out, or "
                "check model.dtype and generator.engine"
            )
        if self._fewer_graphs:
            self._nan = (
                "gave NaN log-probabilities, though its weights are finite; CUDA graphs may be the cause "
                f"({NO_GRAPHS} turns them off)"
            )
            return
        self._open += request.n
        self._pass_on(number)

    @property
    def _fewer_graphs(self) -> str:
        """vLLM's cudagraph_mode to try after NaN log-probabilities, with fewer CUDA graphs than now.

        Empty if the present engine uses no CUDA graphs.
        """
        return FEWER_GRAPHS.get(self._graphs_asked or self._graphs, "PIECEWISE")

    def _require_finite_weights(self) -> None:
        """Check the newest weights once. Raises EngineError, which names a tensor, if they are not finite."""
        if self._load is self._sound or self._load is None or self._weights is None:
            return
        from tba_hpc.learner.adapter import tensors_in  # imports torch, which is otherwise not needed here

        layout = WeightLayout.from_json(self._load.layout)
        for name, tensor in tensors_in(self._weights.map("c"), layout):
            if not tensor.isfinite().all():
                raise EngineError(
                    f"the weights of version {self._load.version} are damaged ({name} has values that are "
                    "not finite): start the run again, which resumes it from its last checkpoint; if this "
                    "happens again, lower train.learning_rate.peak"
                )
        self._sound = self._load

    def _pass_on(self, number: int) -> None:
        request = self._requests[number]
        prompt = request.prompt.tokens.astype(np.int32).tobytes()
        self._engine.send(Submit(number, prompt, request.n, request.sampling))

    def _rebuild(self, failure: str) -> None:
        """Replace a failed engine; ``failure`` says how it failed, as the end of a sentence.

        Raises EngineError or ConfigError if another engine would fail, too.
        """
        log.warning("the vLLM engine (process %d) %s", self._engine.pid, failure)
        self._engine.end()
        if way := system_libraries.remedy(failure):
            raise ConfigError(f"vLLM cannot start on {socket.gethostname()}: it {failure}; {way}")
        final = not self._was_ready and is_permanent(failure)
        if final and PERMANENT.match(failure):
            raise ConfigError(
                f"vLLM cannot start on {socket.gethostname()}: it {failure}, as another one would; see the "
                f"traceback in this searcher's log, {remedy(failure, self._keys)}, or install the pinned "
                "versions: make install"
            )
        never_starts = final and failure == self._failure
        self._failure = failure
        if never_starts or self._rebuilds_in_a_row == REBUILDS_WITHOUT_RESULT:
            share, cache = _key("gpu_memory", self._keys), _key("kv_cache_mb", self._keys)
            of_memory = f"lower {share} and {cache}, or let fewer ranks share a GPU; "
            advice = of_memory if "out of memory" in failure else ""
            raise EngineError(
                f"the vLLM engine died {self._rebuilds_in_a_row + 1} times without finishing a completion "
                f"(the last one {failure}): {advice}see this searcher's log"
            )
        if self._nan:
            self._graphs_asked, self._nan = self._fewer_graphs, ""
        log.warning("starting another engine, CUDA graphs: %s", self._graphs_asked or "as configured")
        self._rebuilds_in_a_row += 1
        self.rebuilds += 1
        self._open = sum(request.n for request in self._requests.values())
        self._loading = self._load is not None
        self._engine = self._start()

    def _start(self) -> EngineProcess:
        self._reach("importing")
        seed = self._seed + self.rebuilds
        settings = EngineSettings(
            model=self._model,
            generator=self._generator,
            seed=seed,
            graphs=self._graphs_asked,
            top_logprobs=self._top_logprobs,
        )
        return EngineProcess(settings, **self._limits)


def is_permanent(failure: str) -> bool:
    """Return whether another engine would repeat a ``failure`` that came before the engine was ready."""
    by_itself = failure.startswith((FAILED, EXITED))  # neither killed nor silent
    return by_itself and not TRANSIENT.search(failure)


def remedy(reason: str, keys: Sequence[str]) -> str:
    """Return a remedy in terms of config keys for an error of vLLM, which names its own arguments instead."""
    share, cache, length = (_key(part, keys) for part in ("gpu_memory", "kv_cache_mb", "context_length"))
    if "desired GPU memory utilization" in reason:
        return f"lower {share}, or let fewer ranks share a GPU"
    if "cache" in reason and ("No available memory" in reason or "is needed" in reason):
        return f"raise {cache} or, where it is not set, {share}, or lower {length}"
    _, *others, last = keys
    return f"check {', '.join(others)} and {last}"


def _key(part: str, keys: Sequence[str]) -> str:
    """Return the first of ``keys`` whose name contains ``part``."""
    return next(key for key in keys if part in key)


class EngineProcess:
    """The process of an engine, in a session of its own. Its output goes to the searcher's log.

    Signals to the searcher's process group do not reach it. It ends when it is killed, or when the thread
    that started it ends. start_seconds: longest time until the engine is ready, in seconds. silence_seconds:
    longest time without a message from a ready engine, in seconds. pid: id of the process.
    """

    def __init__(self, settings: EngineSettings, *, start_seconds: float, silence_seconds: float) -> None:
        ours, theirs = socket.socketpair()
        environment = {name: text for name, text in os.environ.items() if not name.startswith(MPI_VARIABLES)}
        with theirs:
            arguments = [str(os.getpid()), str(theirs.fileno())]
            self._process = subprocess.Popen(
                [*IGNORE_SIGNALS, sys.executable, "-P", "-m", ENGINE, *arguments],
                stdin=subprocess.PIPE,
                pass_fds=[theirs.fileno()],
                env=environment | BEFORE_TORCH,
                start_new_session=True,
            )
        assert self._process.stdin is not None, "it is a pipe"
        with contextlib.suppress(BrokenPipeError), self._process.stdin as pipe:
            pipe.write(settings.model_dump_json().encode())  # all users of the node could see arguments
        self._channel = Channel(ours, ANSWERS)
        self._start_seconds = start_seconds
        self._silence_seconds = silence_seconds
        self._silence = 0.0
        self._looked = time.monotonic()
        self._last_word = ""
        self.pid = self._process.pid
        self.ready = False
        """True once the engine is built and accepts commands."""

    def send(self, command: Command) -> None:
        """Send a command, which the engine carries out between two of its steps."""
        self._channel.send(command)

    def receive(self, seconds: float) -> list[Answer]:
        """Return the engine's answers since the last call; wait up to ``seconds`` if there are none."""
        answers = self._channel.receive(seconds)
        for answer in answers:
            self.ready |= isinstance(answer, Ready)
            if isinstance(answer, Died | Refused):
                self._last_word = answer.reason
        now = time.monotonic()
        heard = answers and self.ready  # start_seconds limits the whole start, whatever is heard meanwhile
        self._silence = 0.0 if heard else self._silence + min(now - self._looked, LONGEST_COUNTED)
        self._looked = now
        return answers

    def failure(self) -> str | None:
        """Return how the engine failed, as the end of a sentence, or None if it has not."""
        if self._last_word:
            return f"{FAILED}: {self._last_word}"
        if self._channel.closed:
            return self._exit()
        if not self.ready and self._silence > self._start_seconds:
            return f"was not built within {self._start_seconds:g} s, a limit from launch.timeout_seconds"
        if self.ready and self._silence > self._silence_seconds:
            return f"was silent for over {self._silence_seconds:g} s, a limit from launch.timeout_seconds"
        return None

    def end(self) -> None:
        """Kill the engine and its workers. Raises EngineError if the process does not end."""
        self._channel.close()
        self._process.kill()
        try:
            self._process.wait(KILL_SECONDS)
        except subprocess.TimeoutExpired:
            raise EngineError(
                f"the vLLM engine (process {self.pid} on {socket.gethostname()}) cannot be killed, perhaps "
                "because its GPU does not answer: leave out this node and start the same run again"
            ) from None
        # Workers of tensor parallelism clean up and end after their engine. One that hangs is killed.
        end = time.monotonic() + WORKERS_SECONDS
        with contextlib.suppress(ProcessLookupError):  # raised when no worker is left
            while time.monotonic() < end:
                os.killpg(self.pid, 0)
                time.sleep(0.02)
            os.killpg(self.pid, signal.SIGKILL)

    def _exit(self) -> str:
        try:
            code = self._process.wait(EXIT_SECONDS)
        except subprocess.TimeoutExpired:
            return "closed its connection"
        return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"{EXITED} {code}"


def _group(request: Request, finished: Finished) -> Group:
    lengths = np.frombuffer(finished.lengths, np.int32)
    ends = np.cumsum(lengths)[:-1]
    tokens = np.split(np.frombuffer(finished.tokens, np.int32), ends)
    logprobs = np.split(np.frombuffer(finished.logprobs, np.float32), ends)
    top_TC = np.frombuffer(finished.top_logprobs, TOP_LOGPROBS).reshape(lengths.sum(), -1)
    rows = zip(tokens, logprobs, finished.stopped, np.split(top_TC, ends), strict=True)
    completions = tuple(
        Completion(row, logprobs_T, "stop" if stopped else "length", top_logprobs=top)
        for row, logprobs_T, stopped, top in rows
    )
    return Group(request, completions, np.frombuffer(finished.versions, np.int32).reshape(-1, 2))
