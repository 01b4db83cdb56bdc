"""Procedures that wait by yielding, and a thread that runs them beside the main thread.

It must not know what is waited for. A procedure yields the seconds to pause wherever it has to wait: so
one and the same runs on a thread of its own, or bit by bit in the main thread where there can be none.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Generator, Iterator
from queue import SimpleQueue

from tba_hpc.core.ports import ExchangeError

Waiting = Generator[float, None, None]
"""A procedure that yields the seconds to pause wherever it has to wait."""

IDLE_PAUSE = 2e-3
"""The pause, s, of a procedure that expects nothing of a peer for now."""

LOOK_SECONDS, PYTHONS_SECONDS = 5e-5, sys.getswitchinterval()
"""Longest that a main thread busy with Python keeps the other from its next look, while a peer is about to
answer and while none is: MPI moves data only while someone looks, and Python's own 5 ms are long for that."""


def run(procedure: Waiting) -> None:
    """Go through a procedure to its end."""
    for pause in procedure:
        time.sleep(pause)


class Background:
    """Procedures, one at a time, on a thread of their own or, where there can be none, inside ``advance``."""

    def __init__(self, *, threaded: bool) -> None:
        self.finished = True
        self._procedure: Iterator[float] = iter(())
        self._error: Exception | None = None
        self._given: SimpleQueue[Iterator[float]] | None = SimpleQueue() if threaded else None
        if self._given is not None:
            # One for all procedures: where every core is busy, the start of a thread may take half a second.
            # A daemon: a process that ends by an error must not wait for a peer first.
            threading.Thread(target=self._work, args=(self._given,), name="exchange", daemon=True).start()

    def start(self, procedure: Iterator[float]) -> None:
        """Begin a procedure; the one before is finished."""
        self.finished = False
        self._procedure = procedure
        if self._given is not None:
            sys.setswitchinterval(LOOK_SECONDS)
            self._given.put(procedure)

    def advance(self) -> None:
        """Raise what went wrong. Without a thread, go on until there is nothing to expect of a peer."""
        if self._given is None and not self.finished:
            self._run(self._procedure)
        if self._error is not None:
            raise self._error

    def _work(self, given: SimpleQueue[Iterator[float]]) -> None:
        while True:
            self._run(given.get())

    def _run(self, procedure: Iterator[float]) -> None:
        try:
            for pause in procedure:
                if self._given is None and pause == IDLE_PAUSE:
                    return
                sys.setswitchinterval(LOOK_SECONDS if pause < IDLE_PAUSE else PYTHONS_SECONDS)
                time.sleep(pause)
        except ExchangeError as error:
            self._error = error
        except Exception as error:
            self._error = ExchangeError(
                f"the exchange failed ({error}): a rank has probably died, see the logs"
            )
            self._error.__cause__ = error
        sys.setswitchinterval(PYTHONS_SECONDS)
        self.finished = True
