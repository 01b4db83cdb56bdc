"""Computes how much memory a process may still allocate on its machine and in its control groups."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import psutil

V1 = ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
V2 = ("", "memory.max", "memory.current", "inactive_file")
"""Names for control groups: hierarchy folder, limit file, usage file, field of the cached files' bytes."""


def free_memory(process: Path = Path("/proc/self"), groups: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the bytes that this process may still allocate; cached files count as free."""
    return min([psutil.virtual_memory().available, *_left_by_groups(process / "cgroup", groups)])


def _left_by_groups(listing: Path, groups: Path) -> Iterator[int]:
    """Yield the bytes left in each of this process's groups that has a limit; Slurm sets one per job."""
    for line in listing.read_text().splitlines() if listing.exists() else []:
        _, controllers, group = line.split(":", 2)
        hierarchy, *names = V1 if controllers == "memory" else V2
        place = groups / hierarchy / group.lstrip("/")
        for folder in (place, *place.parents) if controllers in ("", "memory") else ():
            yield from _left(folder, *names)


def _left(group: Path, limit: str, usage: str, cached: str) -> Iterator[int]:
    """Yield the bytes left in a group, if it has a limit."""
    if not (group / limit).exists() or (most := (group / limit).read_text().strip()) == "max":
        return
    found = re.search(rf"^{cached} (\d+)$", (group / "memory.stat").read_text(), re.MULTILINE)
    yield int(most) - int((group / usage).read_text()) + (int(found[1]) if found else 0)
