"""Stacks of a rank's threads in its log: where it hangs, on request, or where it was when it died.

``kill -USR2 PID`` writes those of a rank that is at work.
"""

from __future__ import annotations

import faulthandler
import math
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

HEADER = b"Timeout ("
"""Begins what ``faulthandler`` writes about a process that is late."""

THREAD = "Thread 0x"
"""Begins the stack of each thread; the main thread's is the last."""

FRAMES = 8
"""Innermost frames of the main thread that are told."""

TAIL_BYTES = 1 << 18
"""End of a log that is searched."""


def write_stacks_to_log() -> None:
    """Have a fatal signal, such as SIGSEGV, and SIGUSR2 write the stacks of all threads to standard error."""
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR2)


def watched(stop_asked: Callable[[], bool], seconds: float) -> Callable[[], bool]:
    """Watch a loop that calls ``stop_asked`` at every safe point.

    If it does not come to one for ``seconds``, the stacks of all threads go to standard error, even while
    the main thread holds Python's lock. Call the result instead.
    """
    armed = -math.inf

    def asked() -> bool:
        nonlocal armed
        if (now := time.monotonic()) - armed > seconds / 100:  # arming starts a thread
            faulthandler.dump_traceback_later(seconds)
            armed = now
        return stop_asked()

    return asked


def late_ranks(logs: Path) -> Iterator[tuple[str, list[str]]]:
    """Ranks that came to no safe point for too long, by the logs of an attempt: name, innermost frames."""
    for log in sorted(logs.glob("*-[0-9]*.log")):
        _, found, stacks = _tail(log).rpartition(HEADER)
        lines = stacks.decode(errors="replace").splitlines()
        begins = [place for place, line in enumerate(lines) if line.startswith(THREAD)]
        if found and begins:
            frames = [line for line in lines[begins[-1] + 1 :] if line.startswith("  File ")]
            yield log.stem, frames[:FRAMES]


def _tail(log: Path) -> bytes:
    with log.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES))
        return file.read()
