"""Compares mathematical answers in a worker process, with limits on time and memory.

math-verify limits its time by signals, which only a main thread can handle. But rewards are computed in
another thread, and some computations, such as power towers of integers, cannot be interrupted by a signal at
all. A worker that exceeds its deadline is therefore replaced.
"""

from __future__ import annotations

import logging
import multiprocessing
import resource
from contextlib import suppress
from multiprocessing.pool import Pool

log = logging.getLogger(__name__)

STEP_SECONDS = 3
"""Time limit of a comparison within the worker, in seconds."""

DEADLINE_SECONDS = 30.0
"""Longest wait for the result of a comparison, in seconds. After it, the answer counts as wrong."""

START_SECONDS = 300.0
"""Longest wait for a worker to start, in seconds."""

WORKER_BYTES = 8 << 30
"""Limit on the worker's address space, in bytes."""


class Equivalence:
    """Compares answers, one at a time, in a worker process that starts with the first comparison."""

    def __init__(self) -> None:
        self._pool: Pool | None = None

    def __call__(self, answer: str, target: str) -> bool:
        r"""Return whether two answers, LaTeX or plain text without ``$`` or ``\boxed``, are equal.

        An answer that takes too long to compare is wrong. Raises TimeoutError if no worker can be started.
        """
        pool = self._pool = self._pool or _start()
        try:
            return pool.apply_async(_equal, (answer, target)).get(DEADLINE_SECONDS)
        except multiprocessing.TimeoutError:
            log.warning(
                "an answer of %d characters took too long to compare; it counts as wrong", len(answer)
            )
            self.close()
            return False

    def close(self) -> None:
        """End the worker."""
        if self._pool is not None:
            self._pool.terminate()
        self._pool = None


def _start() -> Pool:
    """Start a worker and wait until it can compare, which may take long on a busy machine.

    Raises TimeoutError after START_SECONDS.
    """
    pool = multiprocessing.get_context("spawn").Pool(1, initializer=_begin)  # an MPI rank must not be forked
    try:
        pool.apply_async(len, ("",)).get(START_SECONDS)
    except multiprocessing.TimeoutError:
        pool.terminate()
        raise TimeoutError(
            f"the process that compares answers was not ready within {START_SECONDS:g} s: free some cores of "
            "this machine"
        ) from None
    return pool


def _begin() -> None:
    """Limit the worker's memory, and import slow libraries before the first answer."""
    resource.setrlimit(resource.RLIMIT_AS, (WORKER_BYTES, WORKER_BYTES))
    # An error raised here would make the pool start workers forever. The first comparison raises it again.
    with suppress(Exception):
        _equal(r"\frac{1}{\pi}", "x^2", seconds=0)


def _equal(answer: str, target: str, seconds: int = STEP_SECONDS) -> bool:
    """Return, in the worker, whether two answers are equal.

    False if an answer cannot be read, or if the comparison takes longer than ``seconds``.
    """
    from math_verify.errors import TimeoutException
    from math_verify.utils import timeout

    from tba_hpc.tasks import comparison  # slow to import, like math_verify

    try:
        return timeout(seconds)(comparison.equal)(answer, target)
    except (Exception, TimeoutException):  # parser and algebra may raise anything
        return False
