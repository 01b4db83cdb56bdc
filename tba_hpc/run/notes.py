"""Files that ranks leave in an attempt's folder for their launcher.

They are logs, notes that say why a rank failed, and a mark that all ranks are at work.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from enum import IntEnum
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from tba_hpc.run.files import is_full, write_atomic

if TYPE_CHECKING:  # slow to import, and batch scripts call this module often
    from tba_hpc.core.types import Role
    from tba_hpc.run.directory import RunDir


class Exit(IntEnum):
    """Exit statuses of ranks, ``tba run`` and Slurm jobs. Scripts may rely on them (``docs/slurm.md``)."""

    DONE = 0
    """The run is finished, or it was stopped on request."""
    FAILED = 1
    """Failure that may not happen again at another start, such as a missing rank or a dead engine."""
    REFUSED = 2
    """Failure that only the user can fix."""
    NO_SLOT = 3
    """All slots for elastic searchers are taken."""
    NO_PROGRESS = 4
    """Given up after repeated failures without progress."""
    UNFINISHED = 75
    """Preempted or out of time, with a checkpoint: the same command resumes the run."""


AT_WORK_FILE = "at-work"
"""Name of the file in an attempt's folder that says: all ranks have joined, and obey requests to stop."""

Kind = Literal["refused", "failed"]
"""Kind of a rank's failure: ``refused`` if only the user can fix the cause, otherwise ``failed``."""


def rank_name(role: Role, index: int) -> str:
    """Return the beginning of the names of a rank's files, such as ``searcher-0003``."""
    return f"{role}-{index:04d}"


def log_file(logs: Path, name: str) -> Path:
    """Path of a log in an attempt's folder. name: a ``rank_name``, or mpiexec."""
    return logs / f"{name}.log"


def redirect_output(run: RunDir, role: Role, index: int) -> None:
    """Redirect this process's standard output and error to the rank's log of the present attempt."""
    sys.stdout.flush()
    sys.stderr.flush()
    with log_file(run.attempt, rank_name(role, index)).open("ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)


def write_note(run: RunDir, role: Role, index: int, sentence: str, kind: Kind) -> None:
    """Write a note with the reason why a rank failed, a ``sentence`` that the launcher shows to the user.

    kind: after ``refused`` the launcher does not start the ranks again. If the note cannot be written, it is
    printed to stderr. No error is raised, so that the rank's exit status remains.
    """
    try:
        write_atomic(run.attempt / f"{kind}-{rank_name(role, index)}.txt", sentence.strip() + "\n")
    except OSError as error:  # the disk may be full, and stderr may be a log on the same disk
        with suppress(OSError):
            print(f"cannot leave a note for the launcher ({error}): {sentence}", file=sys.stderr)


def first_note(logs: Path, kind: Kind | Literal["*"]) -> str | None:
    """Return the earliest note of a kind in the attempt's folder ``logs``, or None. kind: ``*`` for both."""
    notes = sorted(logs.glob(f"{kind}-*-*.txt"), key=lambda path: path.stat().st_mtime_ns)
    return notes[0].read_text(encoding="utf-8").strip() if notes else None


def refusal(logs: Path) -> str | None:
    """Return a sentence about a failure that only the user can fix, or None. logs: folder of the attempt."""
    if (refused := first_note(logs, "refused")) or not is_full(logs):
        return refused
    return disk_full(logs)  # on a full disk no rank can write a note


def disk_full(path: Path) -> str:
    """Return a sentence that tells the user that the file system of ``path``, a path in a run, is full."""
    return (
        f"the file system of {path} is full: free space or raise the quota, then start the same run again; "
        "nothing sealed is lost"
    )


def note_at_work(run: RunDir) -> None:
    """Record that all ranks of this attempt have joined, and obey requests to stop.

    The leading trainer calls this. A request that ends it earlier is no failure, as nothing has been trained.
    """
    (run.attempt / AT_WORK_FILE).touch()


def at_work(logs: Path) -> bool:
    """Return whether all ranks of the attempt with this folder have joined, and obey requests to stop."""
    return (logs / AT_WORK_FILE).exists()
