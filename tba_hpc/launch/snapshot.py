"""A copy of this package beside a run, for its job: what is edited later changes no running job.

Copies are never deleted: jobs in the queue, and scripts that somebody keeps, start with theirs.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from pathlib import Path

PACKAGE = Path(__file__).parents[1]

LEFT_OUT = shutil.ignore_patterns("__pycache__", "*.pyc")


def place(run: Path) -> Path:
    """The folder that ``take`` would return: its name is a digest of all files of the package."""
    return run / "code" / _digest(PACKAGE)


def take(run: Path, job: str = "") -> Path:
    """Copy the package, unless it is there already; the folder to put on ``PYTHONPATH``.

    job: id of a Slurm job that gets the same copy at each of its starts; "" if its script names the copy.
    """
    note = run / "code" / f"job-{job}"
    if job and note.exists() and (run / "code" / note.read_text()).is_dir():
        return run / "code" / note.read_text()
    folder = place(run)
    if not folder.is_dir() or _digest(folder / PACKAGE.name) != folder.name:
        _copy(folder)
    if job:
        note.write_text(folder.name)
    return folder


def _copy(folder: Path) -> None:
    """Make a copy visible at once, whole; of two at the same time one wins."""
    part = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
    shutil.rmtree(folder, ignore_errors=True)  # half a copy, of a machine that went down
    shutil.copytree(PACKAGE, part / PACKAGE.name, ignore=LEFT_OUT)
    try:
        part.rename(folder)
    except OSError:
        shutil.rmtree(part)
        if not folder.is_dir():
            raise


def _digest(package: Path) -> str:
    """Of the names and contents of a package's files, those below links included; "" where there are none."""
    known = hashlib.sha256()
    for parent, folders, files in os.walk(package, followlinks=True):
        folders[:] = sorted(name for name in folders if name not in LEFT_OUT(parent, folders))
        for name in sorted(set(files) - LEFT_OUT(parent, files)):
            path = Path(parent, name)
            data = path.read_bytes()
            known.update(f"{path.relative_to(package)} {len(data)}\n".encode() + data)
    return known.hexdigest()[:16]
