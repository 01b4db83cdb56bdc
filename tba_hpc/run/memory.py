"""Computes how much memory a process may still allocate, and counts processes killed for lack of it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil

V1 = ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
V2 = ("", "memory.max", "memory.current", "inactive_file")
"""Names in control groups of versions 1 and 2: folder of the memory controller, file of the limit, file of
the usage, and field of ``memory.stat`` with the bytes of cached files that can be dropped."""


def free_memory(process: Path = Path("/proc/self"), groups: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the bytes that this process may still allocate; memory of cached files counts as free.

    process: folder of this process below /proc. groups: folder of the control groups.
    """
    return min([psutil.virtual_memory().available, *_left_by_groups(process / "cgroup", groups)])


def oom_kills(process: Path = Path("/proc/self"), groups: Path = Path("/sys/fs/cgroup")) -> int:
    """Return how many processes of this process's control group the kernel has killed for lack of memory.

    Processes of groups inside this group count, too, but no others of the machine. Returns 0 if the kernel
    keeps no count, as for the outermost group. process, groups: as in ``free_memory``.
    """
    for _, controllers, group in _control_groups(process / "cgroup"):
        hierarchy, file = ("memory", "memory.oom_control") if controllers else ("", "memory.events")
        top = groups / hierarchy  # in a container, this is its own group
        for place in (top / group.lstrip("/"), top):
            with suppress(OSError):
                if found := re.search(r"^oom_kill (\d+)$", (place / file).read_text(), re.MULTILINE):
                    return int(found[1])
    return 0


def _control_groups(listing: Path) -> list[list[str]]:
    """Return [number, controllers, path] of each control group that can limit the memory of a process.

    listing: the process's file ``cgroup`` below /proc.
    """
    lines = listing.read_text().splitlines() if listing.exists() else []
    return [line.split(":", 2) for line in lines if line.split(":", 2)[1] in ("", "memory")]


def _left_by_groups(listing: Path, groups: Path) -> Iterator[int]:
    """Yield the bytes left in each limited control group of a process; Slurm sets a limit for each job.

    listing: the process's file ``cgroup`` below /proc. groups: folder of the control groups.
    """
    for _, controllers, group in _control_groups(listing):
        hierarchy, *names = V1 if controllers else V2
        place = groups / hierarchy / group.lstrip("/")
        for folder in (place, *place.parents):
            yield from _left(folder, *names)


def _left(group: Path, limit: str, usage: str, cached: str) -> Iterator[int]:
    """Yield the bytes left in a control group, or nothing if it has no limit.

    limit, usage, cached: names of two files and a field, see V2.
    """
    if not (group / limit).exists() or (most := (group / limit).read_text().strip()) == "max":
        return
    found = re.search(rf"^{cached} (\d+)$", (group / "memory.stat").read_text(), re.MULTILINE)
    yield int(most) - int((group / usage).read_text()) + (int(found[1]) if found else 0)
