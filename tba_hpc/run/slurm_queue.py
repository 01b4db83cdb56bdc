"""Asks Slurm about a run's job, by squeue and scontrol."""

from __future__ import annotations

import math
import os
import re
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from tba_hpc.run.directory import RunDir

QUEUED = frozenset({"PENDING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT", "RESV_DEL_HOLD"})
"""States of a job that waits for nodes, for the first time or after a requeue."""

WITH_PROCESSES = frozenset({"RUNNING", "SUSPENDED", "STOPPED"})
"""States of a job that has processes, which may write files."""

WITH_NODES = WITH_PROCESSES | {"CONFIGURING", "COMPLETING", "SIGNALING", "STAGE_OUT", "RESIZING"}
"""States of a job that has nodes."""

NO_ANSWER = "UNKNOWN"
"""State that is reported for a job if Slurm is not installed here or does not answer."""

FORGOTTEN = "FORGOTTEN"
"""State that is reported for a job that Slurm no longer knows."""

ANSWER_SECONDS = 30.0
"""Timeout of all Slurm commands but squeue, in seconds."""

SQUEUE_SECONDS = 5.0
"""Timeout of squeue for displays, in seconds. On a busy cluster squeue may take longer."""

JOB_CHECK_SECONDS = 10.0
"""Seconds between two queries about a job whose end is awaited."""

SQUEUE_FIELDS = {
    "id": "%i",
    "state": "%T",
    "reason": "%r",
    "nodes": "%N",
    "start": "%S",
    "left": "%L",
    "elapsed": "%M",
    "comment": "%k",
}
"""Fields of a job component (a het job has several), with squeue's format code of each.

``start`` is an estimate while the job waits. ``elapsed`` and ``left`` are used and remaining wall time.
"""

MEBIBYTES = {"K": 1 / 1024, "M": 1, "G": 1024, "T": 1024**2}
"""Units of ``sbatch --mem``, in MiB."""


class SlurmError(RuntimeError):
    """Error if a Slurm command gets no answer or fails; the message is one sentence with Slurm's words."""


def ask(*command: str) -> str:
    """Run a Slurm command and return its output. Raises SlurmError if it fails or does not answer."""
    done = _run(command, ANSWER_SECONDS)
    if done.returncode:
        raise SlurmError(f"'{' '.join(command[:3])}' failed: {' '.join(done.stderr.split())}")
    return done.stdout or done.stderr  # old versions print lists of plugins on standard error


def _run(command: tuple[str, ...], seconds: float, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a Slurm command for at most ``seconds``. Raises SlurmError if it cannot start or does not end."""
    # The command must not see variables in which users set their own output formats.
    own = ("SQUEUE_", "SINFO_", "SLURM_TIME_FORMAT")
    plain = {key: value for key, value in os.environ.items() if not key.startswith(own)} | environment
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=seconds, env=plain)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SlurmError(f"{command[0]} does not answer ({error}): is this a node of the cluster?") from None


def fields(line: str) -> dict[str, str]:
    """Parse a line of ``scontrol --oneliner``, such as ``JobId=7 JobName=tba``; values end at a space."""
    return dict(re.findall(r"(\S+?)=(\S*)", line))


def mebibytes(memory: str) -> float:
    """Convert a size for ``sbatch --mem``, such as ``480G`` or ``3000``, to MiB; 0 if it is not a size."""
    match = re.fullmatch(r"(\d+)([KMGT]?)B?", memory.upper())
    return int(match[1]) * MEBIBYTES[match[2] or "M"] if match else 0


def job_fields(job: str) -> dict[str, str]:
    """Return what ``scontrol show job`` says of a job, or of a het job's first component.

    Empty once Slurm has forgotten the job. Raises SlurmError.
    """
    shown = _run(("scontrol", "--oneliner", "show", "job", job), ANSWER_SECONDS)
    return fields(shown.stdout.partition("\n")[0])


def job_end() -> float:
    """Return when the Slurm job of this process will end, in unix seconds.

    Infinity outside Slurm, for a job that does not run any more or has no time limit, and if this is unknown.
    """
    job, end = os.environ.get("SLURM_JOB_ID", ""), ""
    if not job:
        return math.inf
    try:
        shown = _run(("scontrol", "--oneliner", "show", "job", job), ANSWER_SECONDS, TZ="UTC").stdout
        known = [row for row in map(fields, shown.splitlines()) if row.get("JobId") == job]
        end = next((f"{row['EndTime']}+00:00" for row in known if row["JobState"] == "RUNNING"), "")
        seconds = datetime.fromisoformat(end).timestamp()
    except SlurmError:  # as in a container without Slurm's commands
        seconds = float(os.environ.get("SLURM_JOB_END_TIME") or "inf")
    except ValueError:  # it may be Unknown
        return math.inf
    return seconds if seconds > time.time() else math.inf


@dataclass(frozen=True, slots=True)
class ActiveJob:
    """Slurm job that is queued or has nodes. number: its id. state: Slurm's word, such as RUNNING."""

    number: str
    state: str

    @property
    def waiting(self) -> bool:
        """True if the job has no nodes yet."""
        return self.state in QUEUED

    def __str__(self) -> str:
        return f"job {self.number} ({self.state.lower()})"


def active_job(run: RunDir) -> ActiveJob | None:
    """Return the run's job if it is queued or has nodes, otherwise None."""
    return active(job_states(run, seconds=ANSWER_SECONDS))


def active(components: Sequence[Mapping[str, str]]) -> ActiveJob | None:
    """Return the job with these components, as listed by ``job_states``; None if all of them have ended.

    If some components have nodes and others are queued, the job counts as having nodes.
    """
    for states in (WITH_NODES, QUEUED):
        for row in components:
            if row["state"] in states:
                return ActiveJob(row["job"], row["state"])
    return None


def await_job(run: RunDir) -> str:
    """Wait until the run's job has ended; return its last state, such as COMPLETED or FORGOTTEN.

    Waits without a limit, also while Slurm does not answer.
    """
    while True:
        states = [row["state"] for row in job_states(run)]
        if not {*states} & {*QUEUED, *WITH_NODES, NO_ANSWER}:
            return next((state for state in states if state != "COMPLETED"), "COMPLETED")
        time.sleep(JOB_CHECK_SECONDS)


def jobs_of(run: RunDir) -> list[str]:
    """List the ids of the run's job and, if it was submitted as a chain, of the jobs that follow it.

    Empty if the run was never submitted.
    """
    job, chain = (
        file.read_text().split() if file.exists() else []
        for file in (run.path / "slurm/job", run.path / "slurm/chain")
    )
    return chain[chain.index(job[0]) :] if job and job[0] in chain else job


def next_job(run: RunDir) -> str:
    """Return the id of the job that continues the run's chain once its present job has ended; "" for none.

    If squeue is missing or does not answer, all later jobs of the chain count as queued.
    """
    links = jobs_of(run)[1:]
    rows = components(*links) if links else []
    waiting = (link for link in links if rows is None or active([row for row in rows if row["job"] == link]))
    return next(waiting, "")


def searchers_queued(run: RunDir) -> list[str]:
    """List the ids of this user's queued jobs of elastic searchers for the run; empty if squeue fails.

    The id of an array includes the tasks that are queued, such as ``7_[0-3]``.
    """
    try:
        rows = ask("squeue", "--me", "--noheader", "--states=PENDING", "--format=%i|%k").splitlines()
    except SlurmError:
        return []
    found = [row.partition("|") for row in rows]
    jobs = (job for job, _, comment in found if "_" in job and comment_names(comment, run))
    return sorted(re.sub(r"%\d+", "", job) for job in jobs)  # scancel takes no limit of an array


def job_states(run: RunDir, *, seconds: float | None = None) -> list[dict[str, str]]:
    """List the components of the run's job as squeue sees them; empty if the run was never submitted.

    Each component has the keys ``job`` (its job's id) and SQUEUE_FIELDS. Of a chain, the first job that
    is queued or has nodes is listed. ``state`` is NO_ANSWER if squeue is missing or does not answer, and
    FORGOTTEN if Slurm no longer knows the job. seconds: timeout of squeue; None: SQUEUE_SECONDS.
    """
    jobs = jobs_of(run)
    if not jobs:
        return []
    nothing = {"job": jobs[0], **dict.fromkeys(SQUEUE_FIELDS, "")}
    if (rows := components(*jobs, seconds=seconds)) is None:
        return [{**nothing, "state": NO_ANSWER}]
    by_job = [[row for row in rows if row["job"] == job] for job in jobs]
    own = next(filter(active, by_job), by_job[0])
    if any(comment_names(row["comment"], run) for row in own):  # an id may be reused after years
        return own
    return [{**nothing, "state": FORGOTTEN}]


def bracketed(reason: str) -> str:
    """Return Slurm's reason for a job's state in brackets, after a space; "" if Slurm gives no reason."""
    return "" if reason in ("", "None") else f" ({reason})"


def components(*jobs: str, seconds: float | None = None) -> list[dict[str, str]] | None:
    """List the components of the jobs with these ids, as far as Slurm knows them; None if squeue fails.

    Each component has the keys ``job`` (its job's id) and SQUEUE_FIELDS. seconds: timeout of squeue; None:
    SQUEUE_SECONDS.
    """
    layout = "|".join(SQUEUE_FIELDS.values())
    command = ("squeue", "--noheader", f"--jobs={','.join(jobs)}", "--states=all", f"--format={layout}")
    try:
        seen = _run(command, seconds or SQUEUE_SECONDS)
    except SlurmError:
        return None
    if seen.returncode and "Invalid job id" not in seen.stderr:
        return None
    lines = [line.split("|", len(SQUEUE_FIELDS) - 1) for line in sorted(seen.stdout.splitlines())]
    rows = [dict(zip(SQUEUE_FIELDS, line, strict=True)) for line in lines]
    return [{"job": row["id"].partition("+")[0], **row} for row in rows]


def comment_names(comment: str, run: RunDir) -> bool:
    """Return whether a job's comment is the path of the run, in any spelling."""
    with suppress(OSError):  # other jobs have long texts as comments, or paths of other users
        return Path(comment).exists() and run.path.samefile(comment)
    return False
