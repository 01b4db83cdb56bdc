"""Calls a task's code in a separate thread, so that the run goes on if a call never ends."""

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

NICENESS = 5
"""Unix niceness of the threads. On two cores, it shortened 80 steps of the quickstart from 43 to 34 s."""

MOST_HANGING = 3
"""Number of hanging calls after which a searcher ends."""

LEAVING_SECONDS = 5.0
"""Longest time that an ending process waits for a thread's current call, in seconds."""


class OverranError(Exception):
    """Raised if a call exceeds its time limit. The message says how long it ran, and where it is now."""


class TaskCalls:
    """Makes all calls in one thread. If a call hangs, its thread is left behind and replaced.

    task: name of the task's class, for errors. seconds: time limit of a call, halved after each call that
    hangs. All hanging calls together thus take less than twice ``seconds``, so that the searcher reports the
    cause before other ranks give up on it. noted: function from a call's name to a context manager, in which
    the call runs, such as an object of ``run.underway``, which keeps the name on disk in case the call ends
    the process.
    """

    def __init__(
        self, task: str, seconds: float, noted: Callable[[str], AbstractContextManager[Any]] = nullcontext
    ) -> None:
        self._task, self._seconds = task, min(seconds, threading.TIMEOUT_MAX)
        self._noted = noted
        self._hanging = 0
        self._worker = background_worker("task")

    def __call__(self, what: str, call: Callable[[], T], more: str = "") -> T:
        """Make a call, and return its result or raise its exception.

        Raises OverranError if the call exceeds its time limit, but ConfigError if MOST_HANGING calls have
        done so. what: name of the call. more: words that follow the name in errors.
        """
        with self._noted(what):
            done = self._worker.submit(call)
            late = wait([done], self._seconds).not_done
        if late:
            self._abandon(f"{what}{more}")
        return done.result()

    def close(self) -> None:
        """End the thread. Make no call afterwards."""
        self._worker.close(0)

    def _abandon(self, what: str) -> None:
        """Leave the thread of a hanging call behind, and raise the error of this call.

        It is an OverranError, or a ConfigError for hanging call number MOST_HANGING. what: the call in words.
        """
        line, stack = where_is(self._worker.ident)
        error = OverranError(f"ran for {self._seconds:g} s, last at {line}")
        error.add_note(stack)
        self._hanging += 1
        self._seconds /= 2
        if self._hanging == MOST_HANGING:
            raise ConfigError(
                f"the task {self._task} had {MOST_HANGING} calls that do not end; the last, {what}, {error}: "
                f"{IN_TIME}"
            ) from error
        self._worker.close(0)
        self._worker = background_worker("task")
        raise error


def background_worker(name: str) -> Worker:
    """Make a worker thread of low priority. An ending process waits LEAVING_SECONDS for its current call."""
    worker = Worker(name, exit_seconds=LEAVING_SECONDS)
    worker.submit(_yield_to_trainer)
    return worker


def _yield_to_trainer() -> None:
    """Lower the calling thread's priority: on shared cores, a late sample is better than a late step."""
    thread = threading.get_native_id()
    # A job may run at a lower priority already, and only root may raise it.
    os.setpriority(os.PRIO_PROCESS, thread, max(NICENESS, os.getpriority(os.PRIO_PROCESS, thread)))
