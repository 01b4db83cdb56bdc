"""Run a callable now or in a thread. Both return a future, which raises what the callable raised."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


def in_background(task: Callable[[], T]) -> Future[T]:
    """Start ``task`` in a new thread. The process waits for the thread before it exits."""
    pool = ThreadPoolExecutor(1, thread_name_prefix="background")
    done = pool.submit(task)
    pool.shutdown(wait=False)  # the thread ends with its task
    return done


def at_once(task: Callable[[], T]) -> Future[T]:
    """Run ``task`` now; return its future, which is already done."""
    done: Future[T] = Future()
    try:
        done.set_result(task())
    except Exception as error:
        done.set_exception(error)
    return done
