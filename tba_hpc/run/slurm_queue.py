"""Queries Slurm, and parses the output of squeue and scontrol about a run's job."""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tba_hpc.run.directory import RunDir

QUEUED = frozenset({"PENDING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT", "RESV_DEL_HOLD"})
"""States of a job that waits for nodes, for the first time or again."""

WITH_PROCESSES = frozenset({"RUNNING", "SUSPENDED", "STOPPED"})
"""States of a job whose processes may write."""

WITH_NODES = WITH_PROCESSES | {"CONFIGURING", "COMPLETING", "SIGNALING", "STAGE_OUT", "RESIZING"}
"""States of a job that has nodes."""

NO_ANSWER = "UNKNOWN"
"""State of a job if Slurm cannot be asked, or does not answer."""

FORGOTTEN = "FORGOTTEN"
"""State of a job that Slurm no longer knows."""

ANSWER_SECONDS = 30.0
"""Timeout of a Slurm command, in seconds."""

SQUEUE_SECONDS = 5.0
"""Timeout of squeue, in seconds."""

JOB_CHECK_SECONDS = 10.0
"""Seconds between two looks at a job."""

SQUEUE_FIELDS = {
    "id": "%i",
    "state": "%T",
    "reason": "%r",
    "nodes": "%N",
    "start": "%S",
    "left": "%L",
    "comment": "%k",
}
"""squeue's codes of a job component's fields. ``start`` may be estimated; ``left``: wall time left."""

MEBIBYTES = {"K": 1 / 1024, "M": 1, "G": 1024, "T": 1024**2}
"""Units of ``--mem``, in MiB."""


class SlurmError(RuntimeError):
    """Error if Slurm does not answer or refuses; the message is one sentence with Slurm's own words."""


def ask(*command: str) -> str:
    """Run a Slurm command and return its output. Raises SlurmError."""
    done = _run(command, ANSWER_SECONDS)
    if done.returncode:
        raise SlurmError(f"'{' '.join(command[:3])}' failed: {' '.join(done.stderr.split())}")
    return done.stdout or done.stderr  # old versions print the list of plugins on standard error


def _run(command: tuple[str, ...], seconds: float) -> subprocess.CompletedProcess[str]:
    """Run a Slurm command. Raises SlurmError if there is no answer."""
    # The user's own formats would change what is printed.
    plain = {key: value for key, value in os.environ.items() if not key.startswith(("SQUEUE_", "SINFO_"))}
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=seconds, env=plain)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SlurmError(f"{command[0]} does not answer ({error}): is this a node of the cluster?") from None


def fields(line: str) -> dict[str, str]:
    """Parse a record of ``scontrol --oneliner``, ``Key=Value Key=Value …``; a value ends at a blank."""
    return dict(re.findall(r"(\S+?)=(\S*)", line))


def mebibytes(memory: str) -> float:
    """Convert a size of ``sbatch --mem``, such as ``480G`` or ``3000``, to MiB; 0 if it is no size."""
    match = re.fullmatch(r"(\d+)([KMGT]?)B?", memory.upper())
    return int(match[1]) * MEBIBYTES[match[2] or "M"] if match else 0


def job_fields(job: str) -> dict[str, str]:
    """Read ``scontrol show job`` for a job, or a het job's leader; empty once Slurm has forgotten it."""
    shown = _run(("scontrol", "--oneliner", "show", "job", job), ANSWER_SECONDS)
    return fields(shown.stdout.partition("\n")[0])


@dataclass(frozen=True, slots=True)
class ActiveJob:
    """Slurm job that is queued or has nodes."""

    number: str
    state: str

    @property
    def waiting(self) -> bool:
        """True if the job has no nodes yet."""
        return self.state in QUEUED

    def __str__(self) -> str:
        return f"job {self.number} ({self.state.lower()})"


def active_job(run: RunDir) -> ActiveJob | None:
    """Return the run's job while it is queued or running, or None."""
    return active(job_states(run))


def active(components: Sequence[Mapping[str, str]]) -> ActiveJob | None:
    """Return the job with these components, None if it has ended. Components with nodes decide its state."""
    for states in (WITH_NODES, QUEUED):
        for row in components:
            if row["state"] in states:
                return ActiveJob(row["job"], row["state"])
    return None


def await_job(run: RunDir) -> str:
    """Wait until the run's job is neither queued nor running; return the state in which it ended.

    If Slurm does not answer, the wait goes on.
    """
    while True:
        states = [row["state"] for row in job_states(run)]
        if not {*states} & {*QUEUED, *WITH_NODES, NO_ANSWER}:
            return next((state for state in states if state != "COMPLETED"), "COMPLETED")
        time.sleep(JOB_CHECK_SECONDS)


def jobs_of(run: RunDir) -> list[str]:
    """List the ids of the run's job and of its successors in the chain; empty if it was never submitted."""
    job, chain = (
        file.read_text().split() if file.exists() else []
        for file in (run.path / "slurm/job", run.path / "slurm/chain")
    )
    return chain[chain.index(job[0]) :] if job and job[0] in chain else job


def job_states(run: RunDir) -> list[dict[str, str]]:
    """List the components of the run's job as squeue sees them; empty if it was never submitted.

    Each has the keys ``job`` and SQUEUE_FIELDS. In a chain it is the first job that is queued or running.
    ``state`` is NO_ANSWER if squeue is missing or silent, and FORGOTTEN if Slurm no longer knows the job.
    """
    jobs = jobs_of(run)
    if not jobs:
        return []
    nothing = {"job": jobs[0], **dict.fromkeys(SQUEUE_FIELDS, "")}
    if (rows := components(*jobs)) is None:
        return [{**nothing, "state": NO_ANSWER}]
    by_job = [[row for row in rows if row["job"] == job] for job in jobs]
    own = next(filter(active, by_job), by_job[0])
    if any(names(row["comment"], run) for row in own):  # Slurm reuses ids after years
        return own
    return [{**nothing, "state": FORGOTTEN}]


def components(*jobs: str) -> list[dict[str, str]] | None:
    """List the components of these jobs, as ``job_states`` does; None if Slurm does not answer."""
    layout = "|".join(SQUEUE_FIELDS.values())
    command = ("squeue", "--noheader", f"--jobs={','.join(jobs)}", "--states=all", f"--format={layout}")
    try:
        seen = _run(command, SQUEUE_SECONDS)
    except SlurmError:
        return None
    if seen.returncode and "Invalid job id" not in seen.stderr:
        return None
    lines = [line.split("|", len(SQUEUE_FIELDS) - 1) for line in sorted(seen.stdout.splitlines())]
    rows = [dict(zip(SQUEUE_FIELDS, line, strict=True)) for line in lines]
    return [{"job": row["id"].partition("+")[0], **row} for row in rows]


def names(comment: str, run: RunDir) -> bool:
    """Return whether a job's comment names the run, by any path."""
    return Path(comment).exists() and run.path.samefile(comment)
