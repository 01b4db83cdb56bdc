"""Which call of a task's code a searcher makes, in a file that tells of it if the process ends in its midst.

``os._exit`` and a segmentation fault leave no word. Ends that announce themselves clear the file: errors, and
signals that ask to stop. One that is killed from outside looks like the first, so only a call in which the
process ended twice is taken for the cause, and once such a call is survived, that is forgotten.
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
"""Bytes at the beginning of the file for the call that is under way; lines for ends before come after it."""

MOST_BYTES = 1 << 16
"""Of the file that are read."""

MOST_ENDS = 2
"""Ends of the process in one call at which the run ends."""


class Underway:
    """The file of a searcher. Its log says in which call it ended before.

    ends: the attempts in which it did, by call. Raises ConfigError if one was the same MOST_ENDS times; as
    somebody must start the run again then, the file begins anew.
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
        """Note a call of the task while it is made."""
        self._note(f"{self._attempt} {call}")
        yield
        self._note("")
        if self.ends.pop(call, None):
            self._write(self.ends)

    def close(self) -> None:
        """Note nothing more: the process ends, or is asked to."""
        if self._open:
            self._note("")
            self._open = False

    def _note(self, text: str) -> None:
        if self._open:
            with suppress(OSError):  # a full disk costs no reward
                os.pwrite(self._file, text.encode()[: HEAD - 1].ljust(HEAD - 1) + b"\n", 0)

    def _write(self, ends: dict[str, list[str]]) -> None:
        """Nothing is under way; these are the ends before."""
        lines = "".join(f"{attempt} {call}\n" for call, attempts in ends.items() for attempt in attempts)
        self._note("")
        with suppress(OSError):
            os.ftruncate(self._file, HEAD)
            os.pwrite(self._file, lines.encode(), HEAD)


def _judged(searcher: int, call: str, attempts: list[str]) -> ConfigError | None:
    """Warn of a call; the error if it was the same too often."""
    found = f"searcher {searcher} ended without a word during {call}, in attempt"
    if len(attempts) < MOST_ENDS:
        log.warning("%s %s: if it does so again, the run ends", found, attempts[0])
        return None
    return ConfigError(
        f"{found}s {' and '.join(attempts)}: see that the task's code neither ends nor crashes its process "
        "there, nor takes all memory, and start from the config again (the run keeps a copy of the code)"
    )
