"""Child processes of a test, which speak with it; forks, because an interpreter starts slowly."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

from fork_server import Server

SERVER = Server("children", ("pytest", "tba_hpc.exchange.hdf5_shards", "tba_hpc.loops.elastic"), {})

PATIENCE = 120.0
"""Seconds that a test waits for what such a process says, and for its end, on a busy machine."""


class Child:
    """A process at work on ``target(told, *arguments)``, where ``told`` is its end of a connection.

    environment: variables that it has besides this process's own. server: with what it needs imported.
    """

    def __init__(
        self,
        target: Callable[..., None],
        *arguments: object,
        environment: Mapping[str, str] = {},
        server: Server = SERVER,
    ) -> None:
        self._channel, theirs = multiprocessing.Pipe()
        variables = {**os.environ, **environment}
        self._process = server.fork(_live, target, variables, theirs, *arguments)
        theirs.close()
        assert self._process.pid is not None
        self.pid = self._process.pid

    def said(self) -> str:
        """Return the next sentence that it says."""
        assert self._channel.poll(PATIENCE), "it says nothing"
        return str(self._channel.recv())

    def tell(self, sentence: str) -> None:
        """Say something to it."""
        self._channel.send(sentence)

    def send(self, number: signal.Signals) -> None:
        """Send it a signal."""
        os.kill(self.pid, number)

    def let_go(self) -> int | None:
        """Tell it to leave if it still stays, and return its exit status."""
        self._channel.close()
        return self.ended()

    def kill(self) -> None:
        """End it by SIGKILL, and wait until it is gone."""
        self._process.kill()
        self.ended()

    def ended(self) -> int | None:
        """Wait for its end, and return its exit status; None if it lives on."""
        self._process.join(PATIENCE)
        return self._process.exitcode

    @property
    def alive(self) -> bool:
        """Whether it is still there."""
        return self._process.is_alive()


@contextmanager
def children() -> Iterator[Callable[..., Child]]:
    """Make children that are killed in the end, frozen ones too."""
    made: list[Child] = []

    def make(target: Callable[..., None], *arguments: object, **options: Any) -> Child:
        made.append(Child(target, *arguments, **options))
        return made[-1]

    try:
        yield make
    finally:
        for child in made:
            child.kill()


def stay(told: Connection, sentence: object) -> None:
    """Say something, and stay until the test lets go."""
    told.send(sentence)
    told.poll(None)


def _live(
    target: Callable[..., None], variables: dict[str, str], told: Connection, *arguments: object
) -> None:
    os.environ.clear()
    os.environ.update(variables)
    target(told, *arguments)
