"""Messages between a searcher's rank and its engine's process, and the socket that carries them.

A message is sent as its length, then its content as msgpack; arrays are raw bytes. Imports neither vLLM nor
torch, so that ranks stay light.
"""

from __future__ import annotations

import contextlib
import select
import socket
from typing import Generic, TypeVar

import msgspec

from tba_hpc.config import GeneratorSection, ModelSection, Section
from tba_hpc.core.types import Sampling

LENGTH_BYTES = 4
"""Bytes of the length that precedes each message."""

READ_BYTES = 1 << 20
"""Largest number of bytes read from the socket at once."""


class EngineSettings(Section):
    """Settings of an engine, sent to its process as JSON on standard input."""

    model: ModelSection
    generator: GeneratorSection
    seed: int
    graphs: str = ""
    """cudagraph_mode for vLLM; empty: that of generator.engine, or else vLLM's default."""
    top_logprobs: int = 0
    """Largest number of likeliest tokens per position that a request may ask for."""


class Message(msgspec.Struct, tag=True, array_like=True):
    """Base class of all messages."""


class Submit(Message):
    """Command to sample ``n`` completions.

    request: number that the answer repeats. prompt: tokens of the prompt, int32 [P].
    """

    request: int
    prompt: bytes
    n: int
    sampling: Sampling


class Load(Message):
    """Command to load the weights at the end of the file at ``path``.

    version: version of the weights. layout: their WeightLayout as JSON. generation: see WeightFile.
    """

    version: int
    path: str
    layout: str
    generation: int = 0


class Building(Message):
    """Answer at the beginning of each stage while the engine is being built."""

    stage: str


class Ready(Message):
    """Answer once the engine is built. graphs: the cudagraph_mode that vLLM uses."""

    graphs: str = "NONE"


class Refused(Message):
    """Answer that vLLM does not accept the settings."""

    reason: str


class Broken(Message):
    """Answer that a part of vLLM cannot be loaded on this machine, at the start or later."""

    reason: str


class Died(Message):
    """Last answer of an engine that raised an exception. reason: the exception in one sentence."""

    reason: str


class Loaded(Message):
    """Answer that the weights of ``version`` are in use, after a pause of ``seconds``."""

    version: int
    seconds: float


class Misfit(Message):
    """Answer that the model cannot take the last weights, or not all of them. reason: cause and remedy."""

    reason: str


class Finished(Message):
    """All K completions of a request as flat arrays with T tokens.

    tokens: int32 [T]. logprobs: float32 [T], may be NaN. lengths: int32 [K]. stopped: uint8 [K], 1 if EOS or
    a stop string ended the completion. versions: int32 [K, 2], of the oldest and newest weights that sampled
    the completion. top_logprobs: TOP_LOGPROBS [T, C], of the C likeliest tokens; empty unless requested.
    """

    request: int
    tokens: bytes
    logprobs: bytes
    lengths: bytes
    stopped: bytes
    versions: bytes
    top_logprobs: bytes = b""


class Progress(Message):
    """Answer when groups are complete, and many times a second as a sign of life.

    All figures are since the last Progress. busy_seconds: time inside vLLM's step. ended: number of
    completions that ended, in complete and other groups. computed: number of tokens computed. recomputed:
    number of them that repeated earlier work because weights were loaded.
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
    """One end of the socket, which receives messages of type T.

    Sending never blocks: later calls send what the socket does not accept now.
    """

    def __init__(self, end: socket.socket, decoder: msgspec.msgpack.Decoder[T]) -> None:
        end.setblocking(False)
        self._socket = end
        self._decoder = decoder
        self._outgoing = bytearray()
        self._incoming = bytearray()
        self.closed = False
        """True once the other end is gone and everything that it sent has been received."""

    def send(self, message: Message) -> None:
        """Send a message, or queue it for a later call."""
        payload = msgspec.msgpack.encode(message)
        self._outgoing += len(payload).to_bytes(LENGTH_BYTES, "little") + payload
        self._write()

    def receive(self, seconds: float) -> list[T]:
        """Return the messages that have arrived; wait up to ``seconds`` if there is nothing to read."""
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
        # A broken connection is noticed when reading, after the peer's last messages.
        with contextlib.suppress(BlockingIOError, ConnectionError):
            while self._outgoing:
                del self._outgoing[: self._socket.send(self._outgoing)]

    def _read(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while not self.closed:
                try:
                    data = self._socket.recv(READ_BYTES)
                except ConnectionResetError:  # the peer left without reading everything
                    data = b""
                self._incoming += data
                self.closed = not data


def tell_broken(descriptor: int, error: ImportError) -> None:
    """Send a last message, that ``error`` stops this process, to the rank at the other end of a socket."""
    Channel(socket.socket(fileno=descriptor), COMMANDS).send(Broken(str(error).split("\n")[0]))
