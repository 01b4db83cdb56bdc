"""Runs a callable now or in a thread, and returns a future that raises whatever the callable raised."""

from __future__ import annotations

import atexit
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from queue import SimpleQueue
from typing import Any, TypeVar

T = TypeVar("T")


def in_background(task: Callable[[], T]) -> Future[T]:
    """Start ``task`` in a new thread. The process waits for the thread before it exits."""
    pool = ThreadPoolExecutor(1, thread_name_prefix="background")
    done = pool.submit(task)
    pool.shutdown(wait=False)  # the thread ends with its task
    return done


def at_once(task: Callable[[], T]) -> Future[T]:
    """Run ``task`` in this thread, and return a future that is already done."""
    done: Future[T] = Future()
    try:
        done.set_result(task())
    except Exception as error:
        done.set_exception(error)
    return done


class Worker:
    """Daemon thread that makes the submitted calls one after another.

    exit_seconds: longest time that an exiting process waits for unfinished calls, in seconds; 0: no wait.
    """

    def __init__(self, name: str, *, exit_seconds: float = 0) -> None:
        self._given: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, daemon=True, name=name)
        self._thread.start()
        if exit_seconds:  # some libraries abort a process that exits while a thread runs
            atexit.register(self.close, exit_seconds)

    @property
    def ident(self) -> int:
        """Identifier of the thread, as in ``threading.get_ident``."""
        return self._thread.ident or 0

    def submit(self, call: Callable[[], T]) -> Future[T]:
        """Queue a call, and return the future of its result."""
        done: Future[T] = Future()
        self._given.put((done, call))
        return done

    def close(self, seconds: float) -> None:
        """Let the thread end after all queued calls, and wait up to ``seconds`` for it."""
        atexit.unregister(self.close)
        self._given.put(None)
        self._thread.join(seconds)

    def _run(self) -> None:
        while given := self._given.get():
            done, call = given
            try:
                done.set_result(call())
            except BaseException as error:  # passed on to the caller
                done.set_exception(error)
            del given, done, call  # frees what they hold, which may be large
