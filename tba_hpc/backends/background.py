"""Procedures that wait by yielding, and a thread that runs one beside the main thread.

It must not know what is waited for. A procedure yields the seconds to pause wherever it has to wait: so
one and the same runs on a thread of its own, or bit by bit in the main thread where there can be none.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Generator, Iterator

from tba_hpc.ports import ExchangeError

Waiting = Generator[float, None, None]
"""A procedure that yields the seconds to pause wherever it has to wait."""

IDLE_PAUSE = 2e-3
"""The pause, s, of a procedure that expects nothing of a peer for now."""


def run(procedure: Waiting) -> None:
    """Go through a procedure to its end."""
    for pause in procedure:
        time.sleep(pause)


class Background:
    """A procedure on a thread of its own or, where there can be none, inside ``advance``."""

    def __init__(self, procedure: Waiting | Iterator[float], *, threaded: bool) -> None:
        self.finished = False
        self._procedure = procedure
        self._threaded = threaded
        self._error: Exception | None = None
        if threaded:
            # A daemon: a process that ends by an error must not wait for a peer first.
            threading.Thread(target=self._run, name="exchange", daemon=True).start()

    def advance(self) -> None:
        """Raise what went wrong. Without a thread, go on until there is nothing to expect of a peer."""
        if not self._threaded and not self.finished:
            self._run()
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            for pause in self._procedure:
                if not self._threaded and pause == IDLE_PAUSE:
                    return
                time.sleep(pause)
        except ExchangeError as error:
            self._error = error
        except Exception as error:
            self._error = ExchangeError(
                f"the exchange failed ({error}): a rank has probably died, see the logs"
            )
            self._error.__cause__ = error
        self.finished = True
