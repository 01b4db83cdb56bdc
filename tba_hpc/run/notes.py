"""Files that a rank leaves for its launcher: its log, a mark that all ranks have joined, and why it ended."""

from __future__ import annotations

import os
import sys
from enum import IntEnum
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from tba_hpc.run.files import write_atomic

if TYPE_CHECKING:  # they import config and numpy, which batch scripts avoid
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
"""Name of the file in an attempt's folder that marks that all ranks have joined."""

Kind = Literal["refused", "failed"]
"""Kind of a rank's failure: ``refused`` if only the user can fix it, otherwise ``failed``."""


def rank_name(role: Role, index: int) -> str:
    """Return the stem of a rank's files: ``searcher-0003``."""
    return f"{role}-{index:04d}"


def log_file(logs: Path, name: str) -> Path:
    """Path of the log of a rank, or of mpiexec, in an attempt's folder."""
    return logs / f"{name}.log"


def redirect_output(run: RunDir, role: Role, index: int) -> None:
    """Redirect standard output and error to this rank's log of the attempt."""
    sys.stdout.flush()
    sys.stderr.flush()
    with log_file(run.attempt, rank_name(role, index)).open("ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)


def write_note(run: RunDir, role: Role, index: int, sentence: str, kind: Kind) -> None:
    """Write a rank's note, ``sentence``, which the launcher shows to the user.

    kind: with ``refused`` the launcher does not start the rank again. If the note cannot be written, it is
    printed on stderr.
    """
    try:
        write_atomic(run.attempt / f"{kind}-{rank_name(role, index)}.txt", sentence.strip() + "\n")
    except OSError as error:  # the note may be about a full disk
        print(f"cannot leave a note for the launcher ({error}): {sentence}", file=sys.stderr)


def first_note(logs: Path, kind: Kind | Literal["*"]) -> str | None:
    """Read the earliest note in an attempt's folder, or return None; ``*`` means either kind."""
    notes = sorted(logs.glob(f"{kind}-*-*.txt"), key=lambda path: path.stat().st_mtime_ns)
    return notes[0].read_text(encoding="utf-8").strip() if notes else None


def note_at_work(run: RunDir) -> None:
    """Record that all ranks of this attempt have joined; called by the leading trainer."""
    (run.attempt / AT_WORK_FILE).touch()


def at_work(logs: Path) -> bool:
    """Return whether all ranks of an attempt have joined."""
    return (logs / AT_WORK_FILE).exists()
