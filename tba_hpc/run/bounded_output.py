"""Limits how much a process may print, because a reward that prints every completion would fill the disk."""

from __future__ import annotations

import sys
from io import TextIOWrapper

MOST_OUTPUT = 16 << 20
"""Maximum number of characters that a rank may print to each of stdout and stderr. Logs do not count."""


class BoundedOutput(TextIOWrapper):
    """Text stream that passes on its first ``most`` characters, adds a remark, and drops the rest."""

    def __init__(self, stream: TextIOWrapper, most: int) -> None:
        super().__init__(stream.buffer, stream.encoding, stream.errors, line_buffering=True)
        self._left = most

    def write(self, text: str) -> int:
        """Write a text as far as the limit allows. Returns its whole length, as if all had been written."""
        before, self._left = self._left, max(0, self._left - len(text))
        if self._left:
            return super().write(text)
        if before:
            super().write(f"{text[:before]}\n[what is printed from here on is dropped]\n")
        return len(text)

    def close(self) -> None:
        """Flush, but leave the buffer open, because it belongs to the stream that this one replaces."""
        self.flush()


def bound_output() -> None:
    """Limit what this process prints from now on. Logs are exempt if ``logging`` was set up before."""
    sys.stdout, sys.stderr = (
        BoundedOutput(stream, MOST_OUTPUT) if isinstance(stream, TextIOWrapper) else stream
        for stream in (sys.stdout, sys.stderr)
    )
