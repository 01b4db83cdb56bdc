"""What a check found, in a sentence, and what to do about it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Level = Literal["ok", "warning", "problem"]

LEVELS: tuple[Level, ...] = ("ok", "warning", "problem")
"""From good to bad."""


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


def worst(findings: Sequence[Finding]) -> Finding | None:
    """One finding for those of the worst level among findings of one name; None for none."""
    level = max((finding.level for finding in findings), key=LEVELS.index, default=None)
    if level is None:
        return None
    chosen = [finding for finding in findings if finding.level == level]
    found = "; ".join(dict.fromkeys(finding.found for finding in chosen))
    remedy = "; ".join(dict.fromkeys(finding.remedy for finding in chosen if finding.remedy))
    return Finding(chosen[0].name, level, found, remedy)
