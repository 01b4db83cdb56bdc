"""Servers that fork processes with all imports done, each started once for all workers of a test run."""

from __future__ import annotations

import fcntl
import multiprocessing
import os
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import forkserver
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import pytest

NOTES = "TBA_TEST_FORKS"
"""Variable with the folder in which the workers of a test run note their servers; not set without workers."""


class Server(forkserver.ForkServer):
    """A fork server that the first worker to need it starts, and that the others find by a note."""

    def __init__(self, name: str, imported: Sequence[str], environment: Mapping[str, str]) -> None:
        super().__init__()
        self._name, self._environment = name, environment
        self.set_forkserver_preload([*imported])

    def ensure_running(self) -> None:
        """Find the server or start it. It runs until every worker that has found it is gone."""
        if self._forkserver_address is not None and self._forkserver_pid is None:
            return  # another worker's, which this one keeps running
        if (folder := os.environ.get(NOTES)) is None:
            return self._start()
        with Path(folder, self._name).open("a+") as note:
            fcntl.flock(note, fcntl.LOCK_EX)
            note.seek(0)
            address, _, pipe = note.read().partition("\n")
            if Path(address).is_socket() and self._forkserver_pid is None:
                self._forkserver_alive_fd = os.open(pipe, os.O_WRONLY)
                self._forkserver_address = address
                return None
            self._start()
            note.truncate(0)
            note.write(f"{self._forkserver_address}\n/proc/{os.getpid()}/fd/{self._forkserver_alive_fd}")
        return None

    def _start(self) -> None:
        """Start it, or see that it is still there."""
        with pytest.MonkeyPatch.context() as patch:
            for name, value in self._environment.items():
                patch.setenv(name, value)
            super().ensure_running()

    def fork(self, target: Callable[..., object], *arguments: object) -> ForkServerProcess:
        """Start a process at work on ``target``."""
        process = multiprocessing.get_context("forkserver").Process(target=target, args=arguments)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(forkserver, "connect_to_new_process", self.connect_to_new_process)
            process.start()
        return process
