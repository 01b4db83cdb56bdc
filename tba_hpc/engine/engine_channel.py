"""Messages between a searcher's rank and the process of its engine, and the socket that carries them.

Nothing here needs vLLM or torch, so that the rank's end stays light. A message is sent as its length and then
its content as msgpack. Arrays travel as raw bytes.
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
"""Size of the length that precedes each message, bytes."""

READ_BYTES = 1 << 20
"""Most bytes that are read from the socket at once."""


class EngineSettings(Section):
    """Settings of an engine. Its process gets them as JSON on standard input."""

    model: ModelSection
    generator: GeneratorSection
    seed: int
    graphs: str = ""
    """vLLM's name for the kind of CUDA graphs; empty: as in generator.engine, or else as vLLM chooses."""
    top_logprobs: int = 0
    """Highest number of likeliest tokens per place that a request asks for."""


class Message(msgspec.Struct, tag=True, array_like=True):
    """Base class of all messages."""


class Submit(Message):
    """Command to sample ``n`` completions of a prompt, int32 [P]."""

    request: int
    prompt: bytes
    n: int
    sampling: Sampling


class Load(Message):
    """Command to use the weights at the end of the file at ``path``. generation: as WeightFile has it."""

    version: int
    path: str
    layout: str
    generation: int = 0


class Building(Message):
    """Answer while the engine is being built: the stage that now begins."""

    stage: str


class Ready(Message):
    """Answer once the engine is built. graphs: vLLM's name for the kind of its CUDA graphs."""

    graphs: str = "NONE"


class Refused(Message):
    """Answer that vLLM does not accept the settings."""

    reason: str


class Broken(Message):
    """Answer that a part of vLLM cannot be loaded on this machine, at the start or later; which, and why."""

    reason: str


class Died(Message):
    """Last answer of an engine that raised an exception, which ``reason`` tells in one sentence."""

    reason: str


class Loaded(Message):
    """Answer that the weights of ``version`` are in use, after a pause of ``seconds``."""

    version: int
    seconds: float


class Misfit(Message):
    """Answer that its model cannot take the weights given last, or not all of them; why, and what to do."""

    reason: str


class Finished(Message):
    """All completions of a request, K of them with T tokens in all, as flat arrays.

    tokens: int32 [T]. logprobs: float32 [T], may be NaN. lengths: int32 [K]. stopped: uint8 [K], 1 where EOS
    or a stop string ended it. versions: int32 [K, 2], oldest and newest. top_logprobs: TOP_LOGPROBS [T, C].
    """

    request: int
    tokens: bytes
    logprobs: bytes
    lengths: bytes
    stopped: bytes
    versions: bytes
    top_logprobs: bytes = b""


class Progress(Message):
    """Answer when groups are complete, and many times a second as a sign that the engine works.

    All figures count from the Progress before. busy_seconds: time inside the engine's step. ended:
    completions that have ended, of complete and other groups. computed: tokens computed. recomputed: those
    of them that were computed again because a load of weights had made them worthless.
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

    Sending never waits. Later calls send what the socket does not take now.
    """

    def __init__(self, end: socket.socket, decoder: msgspec.msgpack.Decoder[T]) -> None:
        end.setblocking(False)
        self._socket = end
        self._decoder = decoder
        self._outgoing = bytearray()
        self._incoming = bytearray()
        self.closed = False
        """True once the other end is gone and all that it sent was received."""

    def send(self, message: Message) -> None:
        """Send a message, or keep it for a later call to send."""
        payload = msgspec.msgpack.encode(message)
        self._outgoing += len(payload).to_bytes(LENGTH_BYTES, "little") + payload
        self._write()

    def receive(self, seconds: float) -> list[T]:
        """Return the messages that have come; wait up to ``seconds`` if there is nothing to read."""
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
        """Hang up."""
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
    """Tell the rank at the other end of a socket, as the last message, what cannot be imported here."""
    Channel(socket.socket(fileno=descriptor), COMMANDS).send(Broken(str(error).split("\n")[0]))
