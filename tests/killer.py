"""Kills a process by SIGKILL just before any of the changes that it makes to files."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

CHANGES = {"os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.link", "open"}
"""Audit events of what changes a directory; ``os.fsync`` has none."""


class Killer:
    """Ends this process by SIGKILL just before it changes ``folder`` for the ``nth`` time, or flushes it."""

    def __init__(self, folder: Path, nth: int) -> None:
        self._folder, self._left = str(folder), nth
        self._lock = threading.Lock()
        for name in ("fsync", "fdatasync"):
            setattr(os, name, partial(self._flush, getattr(os, name)))
        sys.addaudithook(self._hook)

    def _hook(self, event: str, arguments: tuple[object, ...]) -> None:
        if event in CHANGES and self._folder in str(arguments[0]):
            if event == "open" and (arguments[1] or "r") not in ("w", "wb", "xb"):  # opened to read
                return
            self._count()

    def _flush(self, flush: Callable[[int], None], descriptor: int) -> None:
        if self._folder in str(Path(f"/proc/self/fd/{descriptor}").readlink()):
            self._count()
        flush(descriptor)

    def _count(self) -> None:
        with self._lock:
            self._left -= 1
            if self._left == 0:
                os.kill(os.getpid(), signal.SIGKILL)


def in_a_process(target: Callable[..., None], *arguments: object) -> int | None:
    """Its exit code."""
    context = multiprocessing.get_context("fork")
    process = context.Process(target=target, args=arguments)
    process.start()
    process.join(240)
    return process.exitcode
