"""Limits what Python code may print, because a reward that prints every completion would fill the disk."""

from __future__ import annotations

import sys
from io import TextIOWrapper

MOST_OUTPUT = 16 << 20
"""Number of characters that a rank's stdout or stderr may add to its log. Log messages do not count."""


class BoundedOutput(TextIOWrapper):
    """A stream that drops all text after ``most`` characters, with one message about it."""

    def __init__(self, stream: TextIOWrapper, most: int) -> None:
        super().__init__(stream.buffer, stream.encoding, stream.errors, line_buffering=True)
        self._left = most

    def write(self, text: str) -> int:
        """Write or drop a text. Dropped text counts as written."""
        before, self._left = self._left, max(0, self._left - len(text))
        if self._left:
            return super().write(text)
        if before:
            super().write(f"{text[:before]}\n[what is printed from here on is dropped]\n")
        return len(text)

    def close(self) -> None:
        """Flush, and leave the buffer open for the stream that owns it."""
        self.flush()


def bound_output() -> None:
    """Limit what this process prints from now on. Log messages are not limited."""
    sys.stdout, sys.stderr = (
        BoundedOutput(stream, MOST_OUTPUT) if isinstance(stream, TextIOWrapper) else stream
        for stream in (sys.stdout, sys.stderr)
    )
