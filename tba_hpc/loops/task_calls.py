"""Calls a task's code in a separate thread, so that a call that never ends costs a thread, not the run."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import wait
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

from tba_hpc.config import ConfigError
from tba_hpc.core.own_code import IN_TIME, where_is
from tba_hpc.run.background import Worker

T = TypeVar("T")

YIELDS = 5
"""Niceness of the threads. On two cores 80 steps of the quickstart took 34 s with it, and 43 s without."""

MOST_HANGING = 3
"""Number of hanging calls at which a searcher ends."""

LEAVING_SECONDS = 5.0
"""Longest wait of an ending process for a thread's current call."""


class OverranError(Exception):
    """Raised if a call exceeds its time limit; the message says how long it ran, and where it is."""


class TaskCalls:
    """Makes all calls in one thread. If a call hangs, its thread is left behind and replaced.

    task: name of the task's class. seconds: time limit of a call, halved after each hanging call. All hanging
    calls together then take less than twice as long, so that the searcher reports the cause before others
    give up on it. noted: records calls (see run.underway), to know which one ended the process.
    """

    def __init__(
        self, task: str, seconds: float, noted: Callable[[str], AbstractContextManager[Any]] = nullcontext
    ) -> None:
        self._task, self._seconds = task, min(seconds, threading.TIMEOUT_MAX)
        self._noted = noted
        self._hanging = 0
        self._worker = background_worker("task")

    def __call__(self, what: str, call: Callable[[], T], more: str = "") -> T:
        """Make a call. Raises OverranError after its time limit, or ConfigError at MOST_HANGING.

        what, more: name of the call, and further words for errors.
        """
        with self._noted(what):
            done = self._worker.submit(call)
            late = wait([done], self._seconds).not_done
        if late:
            self._leave(f"{what}{more}")
        return done.result()

    def close(self) -> None:
        """End the thread. No call may be made afterwards."""
        self._worker.close(0)

    def _leave(self, what: str) -> None:
        line, stack = where_is(self._worker.ident)
        error = OverranError(f"ran for {self._seconds:g} s, last at {line}")
        error.add_note(stack)
        self._hanging += 1
        self._seconds /= 2
        if self._hanging == MOST_HANGING:
            raise ConfigError(
                f"the task {self._task} had {MOST_HANGING} calls that do not end, now {what} {error}: "
                f"{IN_TIME}"
            ) from error
        self._worker.close(0)
        self._worker = background_worker("task")
        raise error


def background_worker(name: str) -> Worker:
    """Make a worker of low priority, which an ending process gives LEAVING_SECONDS for its current call."""
    worker = Worker(name, exit_seconds=LEAVING_SECONDS)
    worker.submit(_yield_to_trainer)
    return worker


def _yield_to_trainer() -> None:
    """Lower the thread's priority: on shared cores, late samples are better than a late step."""
    thread = threading.get_native_id()
    # A job may run at a lower priority already, and only root may raise it.
    os.setpriority(os.PRIO_PROCESS, thread, max(YIELDS, os.getpriority(os.PRIO_PROCESS, thread)))
