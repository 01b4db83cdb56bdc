"""A bound on what Python code prints: a reward that prints every completion would fill the disk."""

from __future__ import annotations

import sys
from io import TextIOWrapper

MOST_OUTPUT = 16 << 20
"""Most characters that each stream of a rank adds to its log, besides what the rank itself logs."""


class BoundedOutput(TextIOWrapper):
    """A stream that drops what comes after ``most`` characters, and says so once."""

    def __init__(self, stream: TextIOWrapper, most: int) -> None:
        super().__init__(stream.buffer, stream.encoding, stream.errors, line_buffering=True)
        self._left = most

    def write(self, text: str) -> int:
        """Write a text or drop it; what is dropped counts as written."""
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
    """Bound what is printed from here on. Log messages are not bounded."""
    sys.stdout, sys.stderr = (
        BoundedOutput(stream, MOST_OUTPUT) if isinstance(stream, TextIOWrapper) else stream
        for stream in (sys.stdout, sys.stderr)
    )
