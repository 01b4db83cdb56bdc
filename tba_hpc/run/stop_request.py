"""A request to a run's Slurm job to end for good instead of queueing again, in the file ``RUN/slurm/stop``.

``tba stop`` writes it, on any machine that sees the run directory. It names the job, so that a later job of
the run is not meant.
"""

from __future__ import annotations

from pathlib import Path

from tba_hpc.run.events import this_job
from tba_hpc.run.files import listing, write_atomic


def ask_job_to_end(run: Path, job: str) -> None:
    """Ask the job with this id to end for good. run: the run directory."""
    folder = run / "slurm"
    folder.mkdir(exist_ok=True)
    write_atomic(folder / "stop", f"{job}\n")


def is_to_end(run: Path) -> bool:
    """Return whether this process's job is asked to end for good, and delete the request if it is.

    run: the run directory. False outside Slurm.
    """
    folder, job = run / "slurm", this_job()
    if not job or not folder.is_dir():
        return False
    request = folder / "stop"
    found = request.name in listing(folder) and request.read_text().strip() == job  # a listing is up to date
    if found:
        request.unlink()
    return found
