"""A file that names the call of a task's code that a searcher is making, in case the call ends the process.

If a task's code calls ``os._exit`` or has a segmentation fault, nothing else says in which call. The file is
cleared when a call returns, and when the process ends by an error or on request. A kill from outside cannot
be told from a crash, so a call is blamed only after the searcher's process has ended in it twice. If the call
returns in a later attempt, the process's earlier ends in it no longer count.
"""

from __future__ import annotations

import atexit
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from tba_hpc.config import ConfigError
from tba_hpc.run.directory import RunDir
from tba_hpc.run.notes import rank_name

log = logging.getLogger(__name__)

HEAD = 256
"""Number of bytes at the beginning of the file that hold the attempt and the present call. After them comes a
line with attempt and call for each time that the process has ended in a call."""

MOST_BYTES = 1 << 16
"""Largest number of bytes that are read from the file."""

MOST_ENDS = 2
"""Number of times that the process must end in the same call for the run to end with an error."""


class Underway:
    """File in which a searcher notes which call of the task's code is in progress.

    ends: for each call during which the searcher's process has ended, the numbers of the attempts in which
    that happened.

    The constructor logs a warning for each such call. If the process has ended MOST_ENDS times during the
    same call, the constructor empties the file, so that the user can start the run again, and raises
    ConfigError.
    """

    def __init__(self, run: RunDir, searcher: int) -> None:
        path = run.logs / f"{rank_name('searcher', searcher)}.call"
        self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        self._attempt, self._open = run.newest_attempt, True
        self.ends: dict[str, list[str]] = {}
        found = os.pread(self._file, MOST_BYTES, 0)
        for line in (*found[HEAD:].splitlines(), found[:HEAD]):
            attempt, _, call = line.decode(errors="replace").strip().partition(" ")
            if call:
                self.ends.setdefault(call, []).append(attempt)
        refusal = next(filter(None, [_judged(searcher, *end) for end in self.ends.items()]), None)
        self._write({} if refusal else self.ends)
        if refusal:
            raise refusal
        atexit.register(self.close)

    @contextmanager
    def __call__(self, call: str) -> Iterator[None]:
        """Keep ``call`` in the file while the block, which makes the call, runs."""
        self._note(f"{self._attempt} {call}")
        yield
        self._note("")
        if self.ends.pop(call, None):
            self._write(self.ends)

    def close(self) -> None:
        """Erase the record of the call that is under way, and record no more: the process is about to end."""
        if self._open:
            self._note("")
            self._open = False

    def _note(self, text: str) -> None:
        if self._open:
            with suppress(OSError):  # on a full disk the call is made all the same
                os.pwrite(self._file, text.encode()[: HEAD - 1].ljust(HEAD - 1) + b"\n", 0)

    def _write(self, ends: dict[str, list[str]]) -> None:
        """Write to the file in which calls the process has ended, and that no call is in progress."""
        lines = "".join(f"{attempt} {call}\n" for call, attempts in ends.items() for attempt in attempts)
        self._note("")
        with suppress(OSError):
            os.ftruncate(self._file, HEAD)
            os.pwrite(self._file, lines.encode(), HEAD)


def _judged(searcher: int, call: str, attempts: list[str]) -> ConfigError | None:
    """Log a warning about a call in which the searcher ended, or return an error if it did so too often.

    attempts: numbers of the attempts in which the searcher's process has ended in this call.
    """
    found = f"searcher {searcher} ended without an error message during {call}, in attempt"
    if len(attempts) < MOST_ENDS:
        log.warning("%s %s: if that happens again, the run ends", found, attempts[0])
        return None
    return ConfigError(
        f"{found}s {' and '.join(attempts)}: correct the task's code, which may end or crash its process "
        "there or use up the memory, then start from the config file: the run directory has the old code"
    )
