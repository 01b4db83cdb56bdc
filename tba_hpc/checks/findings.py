"""What a check found, in a sentence, and what to do about it.

It must not know any check.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Level = Literal["ok", "warning", "problem"]


@dataclass(frozen=True, slots=True)
class Finding:
    """problem: a run would fail; warning: it may, or loses something. Both say what to do in ``remedy``."""

    name: str
    level: Level
    found: str
    remedy: str = ""

    @property
    def sentence(self) -> str:
        """Both in one."""
        return f"{self.found}: {self.remedy}" if self.remedy else self.found


def ok(name: str, found: str) -> Finding:
    """Nothing to do."""
    return Finding(name, "ok", found)


def warning(name: str, found: str, remedy: str) -> Finding:
    """A run may fail, or loses something."""
    return Finding(name, "warning", found, remedy)


def problem(name: str, found: str, remedy: str) -> Finding:
    """A run would fail."""
    return Finding(name, "problem", found, remedy)
