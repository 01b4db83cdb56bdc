"""Asks Slurm, and parses what squeue and scontrol say of a run's job.

``run.owners`` alone asks squeue by itself: it lies below this room.
"""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tba_hpc.launch import LaunchError
from tba_hpc.report.run_state import AT_WORK, FORGOTTEN, UNKNOWN, WAITING
from tba_hpc.run.directory import RunDir

ANSWER_SECONDS = 30.0
"""Timeout of a command of Slurm."""

SQUEUE_SECONDS = 5.0
"""Timeout of squeue when a status is asked for."""

WATCH_SECONDS = 10.0
"""Pause between two looks at a job."""

SQUEUE_FIELDS = {
    "id": "%i",
    "state": "%T",
    "reason": "%r",
    "nodes": "%N",
    "start": "%S",
    "left": "%L",
    "comment": "%k",
}
"""What squeue says of a component → its code; ``start`` may be a guess, ``left`` is of the wall time."""

MEBIBYTES = {"K": 1 / 1024, "M": 1, "G": 1024, "T": 1024**2}
"""Size of the units of ``--mem``."""


class SlurmError(LaunchError):
    """Slurm does not answer; the message is one sentence with its own words."""


def ask(*command: str) -> str:
    """What a command of Slurm prints. Raises SlurmError."""
    done = _run(command, ANSWER_SECONDS)
    if done.returncode:
        raise SlurmError(f"'{' '.join(command[:3])}' failed: {' '.join(done.stderr.split())}")
    return done.stdout or done.stderr  # old versions list plugins on standard error


def _run(command: tuple[str, ...], seconds: float) -> subprocess.CompletedProcess[str]:
    """Raises SlurmError if there is no answer."""
    # The user's own formats would change what is printed.
    plain = {key: value for key, value in os.environ.items() if not key.startswith(("SQUEUE_", "SINFO_"))}
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=seconds, env=plain)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SlurmError(f"{command[0]} does not answer ({error}): is this a node of the cluster?") from None


def fields(line: str) -> dict[str, str]:
    """``Key=Value Key=Value …``, as ``scontrol --oneliner`` prints a record; a value ends at a blank."""
    return dict(re.findall(r"(\S+?)=(\S*)", line))


def mebibytes(memory: str) -> float:
    """Size of ``480G`` or ``3000`` as for ``sbatch --mem``, in MiB."""
    match = re.fullmatch(r"(\d+)([KMGT]?)B?", memory.upper())
    return int(match[1]) * MEBIBYTES[match[2] or "M"] if match else 0


def job_fields(job: str) -> dict[str, str]:
    """What ``scontrol show job`` says of a job, of a het job's leader; empty once Slurm has forgotten it."""
    shown = _run(("scontrol", "--oneliner", "show", "job", job), ANSWER_SECONDS)
    return fields(shown.stdout.partition("\n")[0])


@dataclass(frozen=True, slots=True)
class ActiveJob:
    """A job in Slurm that is queued or has nodes."""

    number: str
    state: str

    @property
    def waiting(self) -> bool:
        """Whether it has no nodes."""
        return self.state in WAITING

    def __str__(self) -> str:
        return f"job {self.number} ({self.state.lower()})"


def active_job(run: RunDir) -> ActiveJob | None:
    """The run's job while Slurm has it queued or running."""
    return active(job_states(run))


def active(components: Sequence[Mapping[str, str]]) -> ActiveJob | None:
    """A job by its components; the state is that of one with nodes, if one has some."""
    for states in (AT_WORK, WAITING):
        for row in components:
            if row["state"] in states:
                return ActiveJob(row["job"], row["state"])
    return None


def await_job(run: RunDir) -> str:
    """Wait until the run's job is neither queued nor running; the state in which it ended.

    Silence of Slurm is no end.
    """
    while True:
        states = [row["state"] for row in job_states(run)]
        if not {*states} & {*WAITING, *AT_WORK, UNKNOWN}:
            return next((state for state in states if state != "COMPLETED"), "COMPLETED")
        time.sleep(WATCH_SECONDS)


def jobs_of(run: RunDir) -> list[str]:
    """Ids of the run's job and of those that follow it in its chain; none if it was never submitted."""
    job, chain = (
        file.read_text().split() if file.exists() else []
        for file in (run.path / "slurm/job", run.path / "slurm/chain")
    )
    return chain[chain.index(job[0]) :] if job and job[0] in chain else job


def job_states(run: RunDir) -> list[dict[str, str]]:
    """How squeue sees the components of the run's job, ``job`` and SQUEUE_FIELDS; none if never submitted.

    Of a chain it is the first job that is queued or running. ``state`` is UNKNOWN if squeue is missing or
    silent, FORGOTTEN if it knows the job no more.
    """
    jobs = jobs_of(run)
    if not jobs:
        return []
    nothing = {"job": jobs[0], **dict.fromkeys(SQUEUE_FIELDS, "")}
    layout = "|".join(SQUEUE_FIELDS.values())
    command = ("squeue", "--noheader", f"--jobs={','.join(jobs)}", "--states=all", f"--format={layout}")
    try:
        seen = _run(command, SQUEUE_SECONDS)
    except SlurmError:
        return [{**nothing, "state": UNKNOWN}]
    if seen.returncode and "Invalid job id" not in seen.stderr:
        return [{**nothing, "state": UNKNOWN}]
    lines = [line.split("|", len(SQUEUE_FIELDS) - 1) for line in sorted(seen.stdout.splitlines())]
    seen_rows = (dict(zip(SQUEUE_FIELDS, line, strict=True)) for line in lines)
    rows = [{"job": row["id"].partition("+")[0], **row} for row in seen_rows]
    by_job = [[row for row in rows if row["job"] == job] for job in jobs]
    own = next(filter(active, by_job), by_job[0])
    if any(names(row["comment"], run) for row in own):  # ids come back after years
        return own
    return [{**nothing, "state": FORGOTTEN}]


def names(comment: str, run: RunDir) -> bool:
    """Whether a job's comment names the run, by whatever path."""
    return Path(comment).exists() and run.path.samefile(comment)
