"""Messages between a searcher and its engine, which run in separate processes, and the socket for them.

The searcher sends commands, the engine answers. A message is sent as its length, then its content as msgpack;
arrays are raw bytes. Imports neither vLLM nor torch, so that searchers start quickly.
"""

from __future__ import annotations

import contextlib
import select
import socket
from typing import Generic, TypeVar

import msgspec
from pydantic import ValidationError

from tba_hpc.config import GeneratorSection, ModelSection, Section
from tba_hpc.core.types import Sampling

LENGTH_BYTES = 4
"""Size of the number that precedes each message and gives the message's length, bytes."""

READ_BYTES = 1 << 20
"""Largest number of bytes read from the socket at once."""


class EngineSettings(Section):
    """Settings of an engine, which its process reads as JSON from standard input.

    seed: seed of vLLM's sampler.
    """

    model: ModelSection
    generator: GeneratorSection
    seed: int
    graphs: str = ""
    """vLLM's cudagraph_mode; empty: the one in generator.engine, otherwise vLLM's default."""
    top_logprobs: int = 0
    """Largest ``Sampling.top_logprobs`` of any request."""


class Message(msgspec.Struct, tag=True, array_like=True):
    """Base class of all messages."""


class Submit(Message):
    """Command to sample ``n`` completions of a prompt.

    request: number that the answer repeats. prompt: the prompt's tokens, int32.
    """

    request: int
    prompt: bytes
    n: int
    sampling: Sampling


class Load(Message):
    """Command to load the weights of ``version`` from the file at ``path``.

    layout: the weights' WeightLayout, as JSON. generation: counter that changes whenever the file gets new
    memory pages, after which earlier mappings of the file are outdated.
    """

    version: int
    path: str
    layout: str
    generation: int = 0


class Building(Message):
    """Answer when a stage of the engine's start begins. stage: words for people, such as "compiling"."""

    stage: str


class Ready(Message):
    """Answer when the engine can sample. graphs: the cudagraph_mode that vLLM uses."""

    graphs: str = "NONE"


class Refused(Message):
    """Last answer of an engine whose settings vLLM does not accept. reason: vLLM's error, in one sentence."""

    reason: str


class Broken(Message):
    """Last answer of an engine that could not import a part of vLLM, at the start or later.

    reason: the ImportError, in one sentence.
    """

    reason: str


class Died(Message):
    """Last answer of an engine in which an exception was raised. reason: the exception, in one sentence."""

    reason: str


class Loaded(Message):
    """Answer when the weights of ``version`` are in use. seconds: how long sampling was interrupted."""

    version: int
    seconds: float


class Misfit(Message):
    """Answer when vLLM's model did not accept all of the last weights.

    reason: cause and remedy, as the rest of a sentence that begins with "its model".
    """

    reason: str


class Finished(Message):
    """Part of Progress: all K completions of a request, whose T tokens are joined in flat arrays.

    tokens: int32 [T]. logprobs: float32 [T]; a fault of the engine can make them NaN. lengths: int32 [K],
    tokens of each completion. stopped: uint8 [K], 1 if EOS or a stop string ended the completion. versions:
    int32 [K, 2], as in Group. top_logprobs: [T, C], the C likeliest tokens at each position, with their
    log-probabilities (dtype TOP_LOGPROBS); empty unless requested.
    """

    request: int
    tokens: bytes
    logprobs: bytes
    lengths: bytes
    stopped: bytes
    versions: bytes
    top_logprobs: bytes = b""


class Progress(Message):
    """Answer with finished requests; also sent many times a second as a sign of life.

    All figures are for the time since the last Progress. busy_seconds: time inside vLLM's step. ended: number
    of completions that ended, including those of unfinished requests. computed: number of tokens computed.
    recomputed: how many of these had been computed before, but a load of weights discarded their keys and
    values.
    """

    busy_seconds: float
    ended: int
    finished: list[Finished]
    computed: int = 0
    recomputed: int = 0


Command = Submit | Load
Answer = Building | Ready | Refused | Broken | Died | Loaded | Misfit | Progress

COMMANDS: msgspec.msgpack.Decoder[Command] = msgspec.msgpack.Decoder(Command)
ANSWERS: msgspec.msgpack.Decoder[Answer] = msgspec.msgpack.Decoder(Answer)

T = TypeVar("T")


class Channel(Generic[T]):
    """One end of the socket, at which messages of type T arrive.

    Sending never blocks. Later calls send whatever the socket does not accept at once.
    """

    def __init__(self, end: socket.socket, decoder: msgspec.msgpack.Decoder[T]) -> None:
        end.setblocking(False)
        self._socket = end
        self._decoder = decoder
        self._outgoing = bytearray()
        self._incoming = bytearray()
        self.closed = False
        """True once the other process has closed its end and all that it sent has been received."""

    def send(self, message: Message) -> None:
        """Send a message, or as much of it as the socket accepts now."""
        payload = msgspec.msgpack.encode(message)
        self._outgoing += len(payload).to_bytes(LENGTH_BYTES, "little") + payload
        self._write()

    def receive(self, seconds: float) -> list[T]:
        """Return the messages that have arrived. If nothing can be read, wait up to ``seconds`` first."""
        poll = select.poll()
        poll.register(self._socket, select.POLLIN | (select.POLLOUT if self._outgoing else 0))
        poll.poll(seconds * 1000)
        self._write()
        self._read()
        messages: list[T] = []
        while (start := LENGTH_BYTES) <= len(self._incoming):
            end = start + int.from_bytes(self._incoming[:start], "little")
            if end > len(self._incoming):
                break
            messages.append(self._decoder.decode(self._incoming[start:end]))
            del self._incoming[:end]
        return messages

    def close(self) -> None:
        """Close the connection."""
        self._socket.close()

    def _write(self) -> None:
        # A broken connection is noticed by _read, after the last messages of the other end.
        with contextlib.suppress(BlockingIOError, ConnectionError):
            while self._outgoing:
                del self._outgoing[: self._socket.send(self._outgoing)]

    def _read(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while not self.closed:
                try:
                    data = self._socket.recv(READ_BYTES)
                except ConnectionResetError:  # the other end left without reading everything
                    data = b""
                self._incoming += data
                self.closed = not data


class RefusedError(Exception):
    """Raised in an engine's process if vLLM does not accept the settings. The message is vLLM's."""


def last_word(error: Exception) -> Refused | Broken | Died:
    """Return the last answer to the searcher from an engine that ``error`` ends."""
    reason = first_sentence(error)
    if isinstance(error, RefusedError):
        return Refused(reason)
    return Broken(reason) if isinstance(error, ImportError) else Died(f"{type(error).__name__}: {reason}")


def first_sentence(error: Exception) -> str:
    """Return the first sentence of an error that vLLM raised, or that pydantic raised in vLLM."""
    text = error.errors()[0]["msg"] if isinstance(error, ValidationError) else str(error)
    return text.split("\n")[0].split(". ")[0]
