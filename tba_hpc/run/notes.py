"""What a rank leaves to its launcher: its log, a sign that all are at work, the sentence of its end."""

from __future__ import annotations

import os
import sys
from enum import IntEnum
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from tba_hpc.run.files import write_atomic

if TYPE_CHECKING:  # they import config and numpy, which batch scripts do without
    from tba_hpc.core.types import Role
    from tba_hpc.run.directory import RunDir


class Exit(IntEnum):
    """Exit statuses of ranks, ``tba run`` and Slurm jobs, on which scripts may rely (``docs/slurm.md``)."""

    DONE = 0
    """The run is finished, or it was stopped on request."""
    FAILED = 1
    """Something broke that another start may not meet: a peer is missing, an engine died."""
    REFUSED = 2
    """Only the user can fix it."""
    NO_SLOT = 3
    """All slots for elastic searchers are taken."""
    NO_PROGRESS = 4
    """Given up: it failed again and again, and got no further."""
    UNFINISHED = 75
    """Preempted or out of time, with a checkpoint: the same command goes on."""


AT_WORK = "at-work"
"""Name of a file in an attempt's folder."""

Kind = Literal["refused", "failed"]
"""How a rank ended: by something that only the user can fix, or otherwise."""


def rank_name(role: Role, index: int) -> str:
    """Stem of the files of a rank: ``searcher-0003``."""
    return f"{role}-{index:04d}"


def log_file(logs: Path, name: str) -> Path:
    """Log of a rank, or of mpiexec, in an attempt's folder."""
    return logs / f"{name}.log"


def redirect_output(run: RunDir, role: Role, index: int) -> None:
    """Write standard output and error, from here on, to this rank's own log of the attempt."""
    sys.stdout.flush()
    sys.stderr.flush()
    with log_file(run.attempt, rank_name(role, index)).open("ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)


def write_note(run: RunDir, role: Role, index: int, sentence: str, kind: Kind) -> None:
    """Leave the sentence that the launcher shows to the user; a ``refused`` rank is not started again."""
    try:
        write_atomic(run.attempt / f"{kind}-{rank_name(role, index)}.txt", sentence.strip() + "\n")
    except OSError as error:  # a full disk may be what is to be reported
        print(f"cannot leave a note for the launcher ({error}): {sentence}", file=sys.stderr)


def first_note(logs: Path, kind: Kind | Literal["*"]) -> str | None:
    """The sentence that was left first in an attempt's folder, if any was; ``*``: of whichever kind."""
    notes = sorted(logs.glob(f"{kind}-*-*.txt"), key=lambda path: path.stat().st_mtime_ns)
    return notes[0].read_text(encoding="utf-8").strip() if notes else None


def note_at_work(run: RunDir) -> None:
    """Say, as the leading trainer, that all ranks of this attempt have come together."""
    (run.attempt / AT_WORK).touch()


def at_work(logs: Path) -> bool:
    """Whether all ranks of an attempt have come together."""
    return (logs / AT_WORK).exists()
