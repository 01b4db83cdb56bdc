"""Work that a thread does beside its caller, or that is done at once: either leaves a future.

It must not know what the work is.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


def beside(task: Callable[[], T]) -> Future[T]:
    """Begin it in a thread of its own. A process that comes to its end waits for it."""
    pool = ThreadPoolExecutor(1, thread_name_prefix="beside")
    done = pool.submit(task)
    pool.shutdown(wait=False)  # the thread ends with its task
    return done


def at_once(task: Callable[[], T]) -> Future[T]:
    """Do it now; what it raises is raised here."""
    done: Future[T] = Future()
    done.set_result(task())
    return done
