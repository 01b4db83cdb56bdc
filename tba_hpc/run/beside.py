"""Work that a thread does beside its caller, or that is done at once: either leaves a future, which raises.

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
    """Do it now; whoever asks for the result is told what it raised."""
    done: Future[T] = Future()
    try:
        done.set_result(task())
    except Exception as error:
        done.set_exception(error)
    return done
