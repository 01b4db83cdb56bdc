"""What a searcher's rank and the process of its engine share: messages, and their socket.

Nothing here needs vLLM or torch, so that the rank's end stays light. A message is its length and msgpack;
arrays travel as raw bytes.
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
"""Size of the number before each message."""

READ_BYTES = 1 << 20
"""Most that is read from the socket at once."""


class EngineSettings(Section):
    """The engine wanted; as JSON it stands on the command line of its process."""

    model: ModelSection
    generator: GeneratorSection
    seed: int
    graphs: str = ""
    """vLLM's name of the kind of CUDA graphs; empty: as generator.engine says, or else as vLLM chooses."""


class Message(msgspec.Struct, tag=True, array_like=True):
    """Base of all messages."""


class Submit(Message):
    """To the engine: a request. ``prompt`` is int32 [P]."""

    request: int
    prompt: bytes
    n: int
    sampling: Sampling


class Load(Message):
    """To the engine: weights to use from now on, at the end of the file at ``path``, of that generation."""

    version: int
    path: str
    layout: str
    generation: int = 0


class Building(Message):
    """From the engine, while it is built: what it does from now on."""

    stage: str


class Ready(Message):
    """From the engine: it is built. graphs: vLLM's name of the kind of its CUDA graphs."""

    graphs: str = "NONE"


class Refused(Message):
    """From the engine: vLLM does not take its settings."""

    reason: str


class Broken(Message):
    """From the engine: a part of vLLM cannot be loaded on this machine, now or later; which, and why."""

    reason: str


class Died(Message):
    """From the engine, as its last word: an exception, in one sentence."""

    reason: str


class Loaded(Message):
    """From the engine: the weights of ``version`` are in use; it stood still for ``seconds``."""

    version: int
    seconds: float


class Misfit(Message):
    """From the engine: the weights given last are not, or not all, for its model; why, and what to do."""

    reason: str


class Finished(Message):
    """All completions of a request, K of them with T tokens in all, as flat arrays.

    tokens: int32 [T]. logprobs: float32 [T], perhaps NaN. lengths: int32 [K]. stopped: uint8 [K], 1 where EOS
    or a stop string ended it. versions: int32 [K, 2], oldest and newest.
    """

    request: int
    tokens: bytes
    logprobs: bytes
    lengths: bytes
    stopped: bytes
    versions: bytes


class Progress(Message):
    """From the engine, when groups are whole, and many times a second: a sign that it works.

    All count from the message of this kind before. busy_seconds: inside the engine's step. ended:
    completions that have ended, of whole and of other groups. computed: tokens; recomputed: those that a load
    of weights had made worthless.
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

    Sending never waits: what the socket does not take now follows with the calls to come.
    """

    def __init__(self, end: socket.socket, decoder: msgspec.msgpack.Decoder[T]) -> None:
        end.setblocking(False)
        self._socket = end
        self._decoder = decoder
        self._outgoing = bytearray()
        self._incoming = bytearray()
        self.closed = False
        """Whether the other end is gone, and all that it sent received."""

    def send(self, message: Message) -> None:
        """Send a message, or keep it to follow."""
        payload = msgspec.msgpack.encode(message)
        self._outgoing += len(payload).to_bytes(LENGTH_BYTES, "little") + payload
        self._write()

    def receive(self, seconds: float) -> list[T]:
        """The messages that have come; waits up to ``seconds`` for news if there are none."""
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
        # The end of a broken connection is found when reading, after the peer's last messages.
        with contextlib.suppress(BlockingIOError, ConnectionError):
            while self._outgoing:
                del self._outgoing[: self._socket.send(self._outgoing)]

    def _read(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while not self.closed:
                try:
                    data = self._socket.recv(READ_BYTES)
                except ConnectionResetError:  # it left without reading everything
                    data = b""
                self._incoming += data
                self.closed = not data


def tell_broken(descriptor: int, error: ImportError) -> None:
    """Send the rank at the other end of a socket, as the last word, what cannot be imported here."""
    Channel(socket.socket(fileno=descriptor), COMMANDS).send(Broken(str(error).split("\n")[0]))
