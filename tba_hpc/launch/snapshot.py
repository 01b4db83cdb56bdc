"""Copies this package into a run directory, so that later edits of the code do not reach the run's job.

The folder of a copy is ``RUN/code/DIGEST``. Copies are never deleted, since queued jobs and saved batch
scripts use them.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from pathlib import Path

PACKAGE = Path(__file__).parents[1]

LEFT_OUT = shutil.ignore_patterns("__pycache__", "*.pyc")
"""Files that are not copied."""


def place(run: Path) -> Path:
    """Return the folder for a copy of the package as it is now, named by a digest of all its files."""
    return run / "code" / _digest(PACKAGE)


def take(run: Path, job: str = "") -> Path:
    """Return the folder of a copy of the package, for ``PYTHONPATH``. Makes the copy if it does not exist.

    run: run directory. job: id of the Slurm job that calls this, or "". All starts of a job get the copy that
    was made at the first one. With "" the copy is of the package as it is now.
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
    """Copy the package to ``folder`` by way of a temporary folder. The first of several processes wins."""
    part = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
    shutil.rmtree(folder, ignore_errors=True)  # an incomplete copy from a machine that crashed
    # Timestamps are not copied: by old ones a cluster may soon delete files from its scratch file system.
    shutil.copytree(PACKAGE, part / PACKAGE.name, ignore=LEFT_OUT, copy_function=shutil.copy)
    try:
        part.rename(folder)
    except OSError:
        shutil.rmtree(part)
        if not folder.is_dir():
            raise


def _digest(package: Path) -> str:
    """Return a digest of the names and contents of a package's files, following symbolic links."""
    known = hashlib.sha256()
    for parent, folders, files in os.walk(package, followlinks=True):
        folders[:] = sorted(name for name in folders if name not in LEFT_OUT(parent, folders))
        for name in sorted(set(files) - LEFT_OUT(parent, files)):
            path = Path(parent, name)
            data = path.read_bytes()
            known.update(f"{path.relative_to(package)} {len(data)}\n".encode() + data)
    return known.hexdigest()[:16]
