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
"""Bytes at the beginning of the file for the call under way. Lines for earlier ends follow."""

MOST_BYTES = 1 << 16
"""Most bytes of the file that are read."""

MOST_ENDS = 2
"""Number of ends of the process in one call at which the run ends."""


class Underway:
    """The file of a searcher. The log names the calls in which the searcher ended before.

    ends: by call, the attempts that ended in it. Raises ConfigError if one call has MOST_ENDS of them. The
    file then begins anew, because somebody must start the run again.
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
