"""Computes how much memory a process may still allocate, and counts processes killed for lack of it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import psutil

V1 = ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
V2 = ("", "memory.max", "memory.current", "inactive_file")
"""Names in control groups of versions 1 and 2: folder of the memory controller, file of the limit, file of
the usage, and field of ``memory.stat`` with the bytes of cached files that can be dropped."""


def free_memory(process: Path = Path("/proc/self"), groups: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the bytes that this process may still allocate; memory of cached files counts as free.

    process: its folder below /proc. groups: folder of the control groups.
    """
    return min([psutil.virtual_memory().available, *_left_by_groups(process / "cgroup", groups)])


def oom_kills(counters: Path = Path("/proc/vmstat")) -> int:
    """Return how many processes of this machine the kernel has killed for lack of memory since it started.

    Kills for the limit of a control group, such as that of a container or a Slurm job, are included.
    counters: the kernel's counters, with lines ``oom_kill 3``. Returns 0 if it does not count them.
    """
    found = re.search(r"^oom_kill (\d+)$", counters.read_text(), re.MULTILINE) if counters.exists() else None
    return int(found[1]) if found else 0


def _left_by_groups(listing: Path, groups: Path) -> Iterator[int]:
    """Yield the bytes left in each limited control group of the process; Slurm sets a limit for each job."""
    for line in listing.read_text().splitlines() if listing.exists() else []:
        _, controllers, group = line.split(":", 2)
        hierarchy, *names = V1 if controllers == "memory" else V2
        place = groups / hierarchy / group.lstrip("/")
        for folder in (place, *place.parents) if controllers in ("", "memory") else ():
            yield from _left(folder, *names)


def _left(group: Path, limit: str, usage: str, cached: str) -> Iterator[int]:
    """Yield the bytes left in a control group, or nothing if it has no limit."""
    if not (group / limit).exists() or (most := (group / limit).read_text().strip()) == "max":
        return
    found = re.search(rf"^{cached} (\d+)$", (group / "memory.stat").read_text(), re.MULTILINE)
    yield int(most) - int((group / usage).read_text()) + (int(found[1]) if found else 0)
