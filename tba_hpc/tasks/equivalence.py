"""Compares mathematical answers in a process of its own.

The time for the algebra is limited by signals, which only a main thread may take, and rewards are computed in
another thread. No signal ends a power tower of integers, either. So one worker process does the algebra,
within bounded memory. A worker that outlasts its deadline is replaced.
"""

from __future__ import annotations

import logging
import multiprocessing
import resource
from contextlib import suppress
from multiprocessing.pool import Pool

from tba_hpc.tasks import comparison

log = logging.getLogger(__name__)

STEP_SECONDS = 3
"""Longest time for an answer within the worker, s."""

DEADLINE_SECONDS = 30.0
"""Longest wait for the worker, its start included, s; after it the answer counts as wrong."""

WORKER_BYTES = 8 << 30
"""Limit of the worker's address space, bytes."""


class Equivalence:
    """Compares answers one at a time; the worker starts with the first."""

    def __init__(self) -> None:
        self._pool: Pool | None = None

    def __call__(self, answer: str, target: str) -> bool:
        r"""Tell whether ``answer`` equals ``target``; both LaTeX or plain, no dollar signs or ``\boxed``."""
        if self._pool is None:
            # Spawned, because an MPI rank must not be forked.
            self._pool = multiprocessing.get_context("spawn").Pool(1, initializer=_begin)
        try:
            return self._pool.apply_async(_equal, (answer, target)).get(DEADLINE_SECONDS)
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


def _begin() -> None:
    """Bound the worker's memory, and load what the first answer would otherwise wait for."""
    resource.setrlimit(resource.RLIMIT_AS, (WORKER_BYTES, WORKER_BYTES))
    # The first answer will say what is wrong; if raised here, the pool would start workers without end.
    with suppress(Exception):
        _equal(r"\frac{1}{\pi}", "x^2", seconds=0)


def _equal(answer: str, target: str, seconds: int = STEP_SECONDS) -> bool:
    """Compare by the rules, in the worker; False for what cannot be read or takes too long."""
    from math_verify.errors import TimeoutException
    from math_verify.utils import timeout  # slow to import

    try:
        return timeout(seconds)(comparison.equal)(answer, target)
    except (Exception, TimeoutException):  # parser and algebra may raise anything
        return False
