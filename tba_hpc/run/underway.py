"""A file that names the call of a task's code under way in a searcher, in case the process ends in it.

``os._exit`` and a segmentation fault leave no message. Ends that announce themselves clear the file: errors,
and signals that ask to stop. A kill from outside looks like a crash. So a call is blamed only after the
process has ended in it twice. Once the process survives such a call, its earlier ends are forgotten.
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
"""Number of bytes at the beginning of the file that hold the call under way. After them comes a line for each
earlier end of the process in a call."""

MOST_BYTES = 1 << 16
"""Largest number of bytes that are read from the file."""

MOST_ENDS = 2
"""Number of times that the process may end in the same call; at this number the run ends."""


class Underway:
    """The file in which a searcher names the call under way.

    ends: for each call in which the searcher has ended, the names of the attempts in which it did so. The
    constructor logs a warning for each of these calls. It raises ConfigError if the searcher has ended in one
    of them MOST_ENDS times. It then also empties the file, because the user has to start the run again.
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
        """Keep ``call`` in the file as the call under way while the block runs."""
        self._note(f"{self._attempt} {call}")
        yield
        self._note("")
        if self.ends.pop(call, None):
            self._write(self.ends)

    def close(self) -> None:
        """Clear the call under way, and keep no later one, because the process is about to end."""
        if self._open:
            self._note("")
            self._open = False

    def _note(self, text: str) -> None:
        if self._open:
            with suppress(OSError):  # a full disk costs no reward
                os.pwrite(self._file, text.encode()[: HEAD - 1].ljust(HEAD - 1) + b"\n", 0)

    def _write(self, ends: dict[str, list[str]]) -> None:
        """Write earlier ends to the file, with no call under way."""
        lines = "".join(f"{attempt} {call}\n" for call, attempts in ends.items() for attempt in attempts)
        self._note("")
        with suppress(OSError):
            os.ftruncate(self._file, HEAD)
            os.pwrite(self._file, lines.encode(), HEAD)


def _judged(searcher: int, call: str, attempts: list[str]) -> ConfigError | None:
    """Warn of a call in which the searcher ended, or return the error if it did so too often."""
    found = f"searcher {searcher} ended without a word during {call}, in attempt"
    if len(attempts) < MOST_ENDS:
        log.warning("%s %s: if it does so again, the run ends", found, attempts[0])
        return None
    return ConfigError(
        f"{found}s {' and '.join(attempts)}: see that the task's code neither ends nor crashes its process "
        "there, nor takes all memory, and start from the config again (the run keeps a copy of the code)"
    )
