"""The socket and the memory between a rank and its engine: nothing is lost, nothing waits."""

from __future__ import annotations

import socket
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import numpy as np

from tba_hpc.core.types import Sampling
from tba_hpc.engine.engine_channel import (
    ANSWERS,
    COMMANDS,
    Answer,
    Channel,
    Command,
    Finished,
    Load,
    Progress,
    Submit,
)
from tba_hpc.engine.vllm_engine import _finished

if TYPE_CHECKING:
    from vllm import RequestOutput

SAMPLING = Sampling(temperature=0.7, top_p=0.9, max_tokens=5)


def _channels() -> tuple[Channel[Answer], Channel[Command]]:
    rank, engine = socket.socketpair()
    return Channel(rank, ANSWERS), Channel(engine, COMMANDS)


def test_messages_arrive_whole_and_in_order_before_the_end() -> None:
    rank, engine = _channels()
    commands = [Submit(1, b"\x01\x00", 4, SAMPLING), Load(7, "/proc/1/fd/3", "[]")]
    for command in commands:
        rank.send(command)
    rank.close()
    assert engine.receive(10) == commands and engine.closed
    assert engine.receive(10) == []


def test_sending_to_a_reader_that_sleeps_does_not_wait() -> None:
    """5 MB, far more than the socket takes; what is kept follows when the reader wakes."""
    rank, engine = _channels()
    finished = [
        Finished(number, b"t" * 50_000, b"l" * 50_000, b"n", bytes(number % 2), b"v") for number in range(50)
    ]
    for one in finished:
        engine.send(Progress(0.25, 1, [one]))
    received: list[Answer] = []
    while len(received) < 50:
        received += rank.receive(0)
        assert engine.receive(0) == []
    assert received == [Progress(0.25, 1, [one]) for one in finished]


def test_log_probabilities_that_are_not_numbers_reach_the_rank() -> None:
    """It has them sampled again."""
    versions = [SimpleNamespace(version="0")] * 2
    sample = SimpleNamespace(finish_reason="stop", token_ids=[5, 6], weight_versions=versions)

    def finished(*logprobs: float) -> Finished:
        sample.logprobs = SimpleNamespace(logprobs=list(logprobs), token_ids=[5, 6])
        return _finished(cast("RequestOutput", SimpleNamespace(request_id="1", outputs=[sample])))

    assert finished(-1.0, -np.inf).logprobs == np.array([-1, -np.inf], np.float32).tobytes()
    assert finished(-1.0, np.nan).logprobs == np.array([-1, np.nan], np.float32).tobytes()
