"""Submits batch scripts through submitit and waits for their end, het jobs included.

The only module that imports submitit, of which three things are left: it runs sbatch, reads the job's id, and
polls its state at bearable intervals for all waiting jobs at once. It knows no het jobs and needs accounting,
so the script's text is ours (``sbatch.py``), nothing is pickled, and states come from ``scontrol``.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from submitit import SlurmExecutor, SlurmJob
from submitit.core.utils import FailedJobError
from submitit.slurm.slurm import SlurmInfoWatcher

from tba_hpc.launch import LaunchError
from tba_hpc.launch.slurm_queue import active_job, fields
from tba_hpc.report.run_state import FORGOTTEN
from tba_hpc.run.directory import RunDir
from tba_hpc.run.files import write_atomic

ENDED = frozenset(
    {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "BOOT_FAIL", "DEADLINE"}
)
"""States after which a job does not run again."""

WATCH_SECONDS = 10
"""Longest pause between two looks at a job."""

REMEDIES = {
    "accounting/qos policy": "qos or time, ask for fewer --nodes, or wait for your other jobs",
    "account": "account",  # "Invalid account or account/partition combination"
    "partition": "partition",
    "qos": "qos",
    "time limit": "time",
    "feature": "constraint",
    "constraint": "constraint",
    "generic resource": "gpu_request",
    "gres": "gpu_request",
    "memory": "memory",
    "cpu count": "cpus_per_node",
    "node count": "partition, or ask for fewer --nodes",
    "node configuration": "gpus_per_node, cpus_per_node, memory or constraint",
}
"""Words of Slurm's complaint, and the site key to change."""


YOURS = {
    "SBATCH_ACCOUNT": "--account",
    "SBATCH_PARTITION": "--partition",
    "SBATCH_QOS": "--qos",
    "SBATCH_CONSTRAINT": "--constraint",
    "SBATCH_RESERVATION": "--reservation",
    "SBATCH_CLUSTERS": "--clusters",
}
"""What a shell may say of jobs → the option; it would override the script, so only where that is silent."""

WHICH_SLURM = ("SLURM_CONF", "SLURM_CLUSTERS", "SLURM_JWT", "SLURM_SACK", "SLURM_MPI_TYPE")
"""Beginnings of what says which Slurm there is, and what a cluster's srun does where we say nothing."""


class SubmitError(LaunchError):
    """The run was not submitted; the message is for the user."""


class Watcher(SlurmInfoWatcher):
    """States from ``scontrol``: no accounting, no lag, components of a het job folded into one state."""

    def _make_command(self) -> list[str] | None:
        return ["scontrol", "-o", "show", "jobs"] if self._registered - self._finished else None

    def read_info(self, string: bytes | str) -> dict[str, dict[str, str]]:
        """Info by job id, a het job under its leader's; jobs that Slurm has forgotten have ended."""
        text = string if isinstance(string, str) else string.decode()
        components: dict[str, list[dict[str, str]]] = {}
        for line in text.splitlines():
            values = fields(line)
            if "JobId" in values:
                components.setdefault(values.get("HetJobId", values["JobId"]), []).append(values)
        found = {job: _fold(parts) for job, parts in components.items()}
        return {job: {"JobID": job, "State": FORGOTTEN} for job in self._registered} | found

    def is_done(self, job_id: str, mode: str = "standard") -> bool:
        """Whether the job will not run again."""
        return self.get_state(job_id, mode=mode) in ENDED | {FORGOTTEN}


def _fold(components: list[dict[str, str]]) -> dict[str, str]:
    """One job out of its components: not over before all are, and failed if one is."""
    states = [component["JobState"] for component in components]
    going_on = [state for state in states if state not in ENDED]
    worst = [state for state in states if state != "COMPLETED"]
    nodes = [component.get("NodeList", "") for component in components]
    return {
        "JobID": components[0].get("HetJobId", components[0]["JobId"]),
        "State": (going_on or worst or states)[0],
        "NodeList": ",".join(node for node in nodes if node and node != "(null)"),
    }


class BatchJob(SlurmJob[None]):
    """A submitted batch script: ``state``, ``done()``, ``wait()``, ``cancel()``; it has no result."""

    watcher = Watcher(delay_s=WATCH_SECONDS)


class HetSlurmExecutor(SlurmExecutor):
    """Submits batch scripts of ours, with any number of components."""

    job_class = BatchJob

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._script = ""

    @classmethod
    def name(cls) -> str:
        """As submitit calls its Slurm executor."""
        return "slurm"

    def submit_script(self, script: str) -> BatchJob:
        """Submit the text. Raises SubmitError with Slurm's own message and what to change."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self._script = script
        try:
            job = self._submit_command("")
        except FailedJobError as error:
            raise SubmitError(refusal(str(error))) from None
        finally:
            for leftover in self.folder.glob(".submission_file_*"):
                leftover.unlink()
        assert isinstance(job, BatchJob)
        return job

    def _make_submission_file_text(self, command: str, uid: str) -> str:
        return self._script

    def _make_submission_command(self, submission_file_path: Path) -> list[str]:
        unset = [word for name in foreign(self._script, os.environ) for word in ("-u", name)]
        return ["env", *unset, "sbatch", str(submission_file_path)]

    def _num_tasks(self) -> int:
        return 1  # the batch script; its ranks are its own affair


def require_slurm() -> None:
    """Raise SubmitError if sbatch is not on PATH."""
    if shutil.which("sbatch") is None:
        raise SubmitError(
            "no Slurm here (sbatch is not on PATH): log in to the cluster or load its Slurm module; "
            "to train on this machine alone: tba run CONFIG"
        )


def refusal(message: str) -> str:
    """Slurm's own words about a submission it refused, and the site key to change."""
    lines = re.findall(r"(?:error|failure): (.*)", message)
    said = (
        "; ".join(dict.fromkeys(line.removeprefix("Batch job submission failed: ") for line in lines))
        or message
    )
    key = next((key for word, key in REMEDIES.items() if word in said.lower()), None)
    return f"Slurm refused the job: {said}" + (f"; change the site key {key}" if key else "")


def foreign(script: str, environment: Mapping[str, str]) -> list[str]:
    """Variables of a shell that would override the script, or go with the job and confuse its steps.

    Those of an allocation that the shell is in are among them.
    """
    said = re.findall(r"^#SBATCH (--[\w-]+)", script, re.MULTILINE)
    yours = {name for name, option in YOURS.items() if option not in said}
    return [
        name
        for name in environment
        if name.startswith(("SBATCH_", "SLURM_", "SRUN_"))
        and not name.startswith(WHICH_SLURM)
        and name not in yours
    ]


def would_take(script: str) -> str:
    """Slurm's answer to a script that is not submitted: when and where it would start. Raises SubmitError."""
    command = ["sbatch", "--test-only"]
    plain = {key: value for key, value in os.environ.items() if key not in foreign(script, os.environ)}
    done = subprocess.run(command, input=script, capture_output=True, text=True, env=plain)
    if done.returncode:
        raise SubmitError(refusal(done.stderr))
    return done.stderr.strip().removeprefix("sbatch: ")


def submit(run: RunDir, script: str) -> BatchJob:
    """Submit a run's batch script, unless a job of the run is queued or running. Raises SubmitError."""
    folder = run.path / "slurm"
    folder.mkdir(exist_ok=True)
    with _alone(folder):
        refuse_active(run)
        submitted = HetSlurmExecutor(folder).submit_script(script)
        write_atomic(folder / "job", f"{submitted.job_id}\n")
    return submitted


def submit_elastic(run: RunDir, script: str) -> str:
    """Submit jobs of elastic searchers, beside the run's own job; their id. Raises SubmitError."""
    folder = run.path / "slurm"
    folder.mkdir(exist_ok=True)
    return str(HetSlurmExecutor(folder).submit_script(script).job_id)


def refuse_active(run: RunDir) -> None:
    """Raise SubmitError if a job of the run is queued or running."""
    if job := active_job(run):
        number, state = job
        raise SubmitError(
            f"job {number} of this run is {state.lower()} already: let it finish "
            f"('squeue --job {number}'), or cancel it first: scancel {number}"
        )


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Hold the lock on submissions of a run. Raises SubmitError if another submission holds it."""
    with (folder / "submit.lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise SubmitError("this run is being submitted by another process: wait for it") from None
        except OSError:
            pass  # a file system without locks, as ``tba doctor`` says
        yield
