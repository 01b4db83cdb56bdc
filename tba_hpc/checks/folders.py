"""Checks of the folder of runs, of the clocks that stamp its files, and of other files that all nodes need.

A function ``check_X`` collects facts about this machine; ``judge_X`` turns them into findings.
"""

from __future__ import annotations

import errno
import os
import re
import stat
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

import psutil

from tba_hpc.checks.facts import Facts, Finding, Level, login_python, ok, problem, warning
from tba_hpc.checks.resources import is_path, resources
from tba_hpc.core.wording import size
from tba_hpc.run.directory import RunDir
from tba_hpc.run.files import publish
from tba_hpc.run.owners import BEAT_SECONDS, SILENT_OWNER_SECONDS

LOCAL = re.compile(r"tmpfs|ramfs|ext[234]|xfs|btrfs|zfs|f2fs|overlay|squashfs")
"""Pattern of the types of file systems that only one machine sees, unless it exports them."""

IN_MEMORY = ("tmpfs", "ramfs")
"""Types of file systems whose files are lost when the machine restarts."""

NODES_SHARE_MEMORY = "TBA_NODES_SHARE_TMPFS"
"""Environment variable that is set, to anything, where all nodes are one machine and share its tmpfs, as on
simulated clusters."""

UNKNOWN = "an unknown file system"
"""Type of a file system that the kernel does not list among its mounts."""

OWN_FOLDERS = ("/tmp", "/var/tmp", "/dev/shm", "/run")
"""Folders that every machine has for itself."""

RUN_ROOT, FILE_SYSTEM, CLOCKS = "run root", "file system", "clocks"
"""Names of findings."""

LEASE_SECONDS = SILENT_OWNER_SECONDS - BEAT_SECONDS
"""Largest safe difference between the clocks of two nodes, in seconds.

If it is larger, ranks may seem dead to other nodes although they send heartbeats."""

LITTLE_DISK, LITTLE_INODES = 10 << 30, 10_000
"""Amounts below which a run may fail: bytes for its checkpoints, and number of files for its shards."""


def check_folder(facts: Facts) -> Iterator[Finding]:
    """Check that the folder of runs is writable and private, is seen by all nodes, and has space.

    If the folder does not exist, its nearest existing parent is checked.
    """
    if facts.root is None:
        return
    root, parent, kind = _folder(facts.root)
    try:
        yield from judge_folder(root, parent, kind)
    except OSError as error:
        found = f"cannot write to {root}: {error.strerror or error}"
        yield problem(RUN_ROOT, found, _remedy_for_folder(facts, error))
        return
    yield from check_file_system(facts)
    space = os.statvfs(parent)
    yield judge_space(space.f_bavail * space.f_frsize, space.f_favail if space.f_files else None)


def _remedy_for_folder(facts: Facts, error: OSError) -> str:
    """Return what to do if the folder of runs cannot be written. An existing run must stay in its folder."""
    if facts.config is None or not RunDir(facts.config.run_dir).config_file.exists():
        return "choose another folder with --run-root"
    no_space = error.errno in (errno.ENOSPC, errno.EDQUOT)
    first = "free space there or raise the quota" if no_space else "make it writable"
    return f"{first}, then type this again"


def check_file_system(facts: Facts) -> Iterator[Finding]:
    """Check that the folder of runs is on a file system that is persistent and seen by all nodes."""
    if facts.root is None:
        return
    root, _, kind = _folder(facts.root)
    one_machine = facts.alone or (kind in IN_MEMORY and NODES_SHARE_MEMORY in facts.environment)
    several = facts.split is None or facts.split.nodes > 1
    shared = facts.shared and not one_machine
    yield judge_kind(root, kind, shared=shared, several=several, seen=shared and _seen_by_a_job(root))


def _seen_by_a_job(root: Path) -> bool:
    """Return whether a run in ``root`` holds the log of a job, which proves that nodes can see ``root``."""
    return any(root.glob("*/slurm/job-*.log"))


def _folder(root: Path) -> tuple[Path, Path, str]:
    """Return a folder's absolute path, its nearest existing parent, and the file system of that parent."""
    root = root.absolute()
    parent = next(folder for folder in (root, *root.parents) if folder.exists())
    return root, parent, mount_kind(parent.resolve())


def _links(path: Path) -> bool:
    """Return whether the file system of ``path`` makes hard links, but refuses a name that exists."""
    other = path.with_name("link")
    try:
        os.link(path, other)
    except OSError:
        return False
    with suppress(FileExistsError):
        os.link(path, other)
        return False
    return True


def judge_folder(root: Path, parent: Path, kind: str) -> Iterator[Finding]:
    """Write files as a run does, in a temporary folder in ``parent``, and yield findings.

    root: folder of runs. kind: its file system. Raises OSError if a file cannot be written.
    """
    elsewhere = "choose another folder with --run-root"
    with tempfile.TemporaryDirectory(prefix=".doctor-", dir=parent) as name:
        file, began = Path(name) / "file", time.monotonic()
        publish(file, b"text")
        took = time.monotonic() - began
        private = not stat.S_IMODE(Path(name).stat().st_mode) & 0o077
        links = _links(file)
    if private:
        yield ok(RUN_ROOT, f"{root}: writable, private; flushing a file takes {1000 * took:.1f} ms")
    else:
        found = f"{root} ({kind}) does not keep file modes, so that other users may read a run"
        yield warning(RUN_ROOT, found, elsewhere)
    if not links:
        found = f"{kind} has no atomic hard links, without which a run could be started twice at once"
        yield problem("hard links", found, elsewhere)


def judge_clocks(stamps: Mapping[str, float]) -> Iterator[Finding]:
    """Yield the finding about the clocks of nodes.

    stamps: timestamps, in unix seconds, of files that the nodes wrote at the same moment, by host. Leases
    depend on such timestamps.
    """
    if len(stamps) < 2:
        return
    late, *_, early = sorted(stamps, key=lambda host: stamps[host])
    if (apart := stamps[early] - stamps[late]) > LEASE_SECONDS:
        found = f"{early} stamps its files {apart:.0f} s ahead of {late}, so that ranks on {late} seem dead"
        yield problem(CLOCKS, found, "synchronise the nodes' clocks (NTP, chrony), or leave out one node")
    else:
        more = "with more, ranks would seem dead"
        yield ok(
            CLOCKS, f"the clocks of {len(stamps)} nodes differ by less than {LEASE_SECONDS:g} s ({more})"
        )


def judge_kind(root: Path, kind: str, *, shared: bool, several: bool = True, seen: bool = False) -> Finding:
    """Return the finding on whether the file system of ``root`` is persistent, and may be seen by all nodes.

    kind: type of the file system, such as nfs or tmpfs. shared: whether other machines must see ``root``.
    several: whether the job has several nodes. If both are true, a ``root`` in the memory of one machine is a
    problem, not only a warning. seen: whether a node is known to see ``root``. Then a file system
    that is local to this machine, such as ext4, causes no warning, since it must be exported to the nodes.
    """
    remedy = "put runs on a file system that all nodes share: --run-root"
    if shared and kind in IN_MEMORY:
        level: Level = "problem" if several else "warning"
        return Finding(FILE_SYSTEM, level, f"{root} is on {kind}, which other nodes do not see", remedy)
    if shared and not seen and LOCAL.fullmatch(kind):
        found = f"{root} is on {kind}, a local file system, which nodes see only if this machine exports it"
        return warning(FILE_SYSTEM, found, f"if it does not, {remedy}")
    if kind in IN_MEMORY:
        found = f"{root} is on {kind}, which uses memory and is lost at a reboot"
        return warning(FILE_SYSTEM, found, "put runs on a disk: run.root")
    return ok(FILE_SYSTEM, kind)


def judge_space(free: int, inodes: int | None) -> Finding:
    """Return the finding about the space for checkpoints and shards.

    free: bytes. inodes: number of files that may still be created, or None for no limit.
    """
    found = f"{size(free)} free" + ("" if inodes is None else f", {inodes:,} more files possible")
    if inodes is not None and inodes < LITTLE_INODES:
        remedy = "delete files or raise the quota: a run seals a shard every few seconds"
        return warning("disk space", found, remedy)
    if free < LITTLE_DISK:
        return warning("disk space", found, "free space, or choose another --run-root: checkpoints are large")
    return ok("disk space", found)


def mount_kind(path: Path) -> str:
    """Return the file system type of an absolute, resolved path; UNKNOWN if no mount is listed for it."""
    kinds = {Path(mount.mountpoint): mount.fstype for mount in psutil.disk_partitions(all=True)}
    return next((kinds[folder] for folder in (path, *path.parents) if folder in kinds), UNKNOWN)


def check_interpreter(facts: Facts) -> Iterator[Finding]:
    """Check on a login node that all nodes see the Python and the files that jobs need.

    The package itself is not checked, since jobs have a copy in the run directory.
    """
    if facts.in_container or facts.alone:
        return
    python = Path(login_python(facts.site))
    if own := _own_folder(python, facts) or _own_folder(python.resolve(), facts):
        found = f"jobs use the Python {python}, but each node has {own} of its own"
        remedy = "install on a file system that all nodes see, or name another Python with the site key venv"
        yield warning("interpreter", found, remedy)
    for one in resources(facts.config, of_custom_task=False) if facts.config else []:
        if is_path(one) and (own := _own_folder(Path(one.name).absolute(), facts)):
            remedy = "move it to a file system that all nodes see"
            yield warning("files", f"{one} is on this machine, but each node has {own} of its own", remedy)


def _own_folder(path: Path, facts: Facts) -> str | None:
    """Return the kind of place of ``path``, "a /tmp" or "memory", if every machine has its own; else None."""
    folders = filter(None, (*OWN_FOLDERS, facts.environment.get("TMPDIR")))
    if own := next((folder for folder in folders if path.is_relative_to(folder)), None):
        return f"a {own}"
    return "memory" if mount_kind(path) in IN_MEMORY else None
