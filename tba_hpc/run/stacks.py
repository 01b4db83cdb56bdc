"""Writes the call stacks of a rank's threads to its log if the rank hangs, crashes, or gets SIGUSR2.

``tba run`` reads them there, to tell the user where a rank hangs.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

log = logging.getLogger(__name__)

HEADER = b"Timeout ("
"""First bytes that ``faulthandler`` writes when its timer runs out, because the rank seems to hang."""

THREAD = "Thread 0x"
"""Beginning of the first line of each thread's stack. The main thread's stack is the last."""

WENT_ON = "reached a safe point again"
"""Words that a rank logs if it seemed to hang, but has continued."""

FRAMES = 8
"""Number of frames of the main thread that are reported, the innermost ones."""

TAIL_BYTES = 1 << 18
"""Number of bytes at the end of a log that are searched for stacks."""


def write_stacks_to_log() -> None:
    """Have SIGUSR2, and fatal signals such as SIGSEGV, write the stacks of all threads to standard error."""
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR2)


def watched(stop_asked: Callable[[], bool], seconds: float) -> Callable[[], bool]:
    """Wrap a function that a loop calls once per iteration, so that a hanging loop shows in the log.

    The loop calls the returned function instead of ``stop_asked``, which returns whether the loop must stop.
    If no call comes for ``seconds``, the stacks of all threads go to standard error, even if the main thread
    holds Python's lock.
    """
    armed = time.monotonic()
    faulthandler.dump_traceback_later(seconds)

    def asked() -> bool:
        nonlocal armed
        if (passed := time.monotonic() - armed) > seconds:
            _say_that_it_went_on(passed)
        if passed > seconds / 100:  # not at each call, since setting the timer starts a thread
            faulthandler.dump_traceback_later(seconds)
            armed = time.monotonic()
        return stop_asked()

    return asked


@contextmanager
def watched_inside() -> Iterator[None]:
    """End the watch of ``watched`` with the block, so that a later pause of this process is no hang."""
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


@contextmanager
def stacks_if_late(seconds: float) -> Iterator[None]:
    """Write the stacks of all threads to standard error if the block takes longer than ``seconds``."""
    began = time.monotonic()
    faulthandler.dump_traceback_later(seconds)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()
    if (passed := time.monotonic() - began) > seconds:
        _say_that_it_went_on(passed)


def _say_that_it_went_on(seconds: float) -> None:
    log.warning("this rank %s, after %.0f s", WENT_ON, seconds)


def late_ranks(logs: Path) -> Iterator[tuple[str, list[str]]]:
    """Yield the name and the innermost frames of each rank that hangs, according to its log.

    A rank that has continued since then is left out. logs: folder of an attempt.
    """
    for file in sorted(logs.glob("*-[0-9]*.log")):
        _, found, stacks = _tail(file).rpartition(HEADER)
        lines = stacks.decode(errors="replace").splitlines()
        begins = [place for place, line in enumerate(lines) if line.startswith(THREAD)]
        if found and begins and not any(WENT_ON in line for line in lines):
            frames = [line for line in lines[begins[-1] + 1 :] if line.startswith("  File ")]
            yield file.stem, frames[:FRAMES]


def _tail(file: Path) -> bytes:
    with file.open("rb") as opened:
        opened.seek(max(0, opened.seek(0, os.SEEK_END) - TAIL_BYTES))
        return opened.read()
