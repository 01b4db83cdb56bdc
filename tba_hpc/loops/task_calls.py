"""Calls a task's code in a separate thread, so that a call that never ends costs a thread, not the run."""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager, nullcontext
from queue import SimpleQueue
from typing import Any, TypeVar

from tba_hpc.config import ConfigError
from tba_hpc.core.own_code import IN_TIME, where_is

T = TypeVar("T")

YIELDS = 5
"""Niceness of the threads. On two cores 80 steps of the quickstart took 34 s with it, and 43 s without."""

MOST_HANGING = 3
"""Number of hanging calls at which a searcher ends."""

LEAVING_SECONDS = 5.0
"""Longest wait of an ending process for a thread's current call."""


class OverranError(Exception):
    """Raised if a call exceeds its time limit; the message says how long it ran, and where it is."""


class Worker:
    """A daemon thread that makes calls in order. Unlike a pool's threads, it may be left behind."""

    def __init__(self, name: str) -> None:
        self._given: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, daemon=True, name=name)
        self._thread.start()
        atexit.register(self.close, LEAVING_SECONDS)  # libraries may abort a process whose threads still run

    @property
    def ident(self) -> int:
        """Python's identifier of the thread."""
        return self._thread.ident or 0

    def submit(self, call: Callable[[], T]) -> Future[T]:
        """Queue a call; return the future of its result."""
        done: Future[T] = Future()
        self._given.put((done, call))
        return done

    def close(self, seconds: float) -> None:
        """End the thread after all queued calls; wait for that up to ``seconds``."""
        atexit.unregister(self.close)
        self._given.put(None)
        self._thread.join(seconds)

    def _run(self) -> None:
        _yield_to_trainer()
        while given := self._given.get():
            done, call = given
            try:
                done.set_result(call())
            except BaseException as error:  # passed on to the caller
                done.set_exception(error)
            del given, done, call  # frees what they hold, which may be large


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
        self._worker = Worker("task")

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
        self._worker = Worker("task")
        raise error


def _yield_to_trainer() -> None:
    """Lower the thread's priority: on shared cores, late samples are better than a late step."""
    thread = threading.get_native_id()
    # A job may run at a lower priority already, and only root may raise it.
    os.setpriority(os.PRIO_PROCESS, thread, max(YIELDS, os.getpriority(os.PRIO_PROCESS, thread)))
