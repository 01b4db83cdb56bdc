"""Submits batch scripts to Slurm, through submitit.

This is the only module that imports submitit, which runs sbatch and reads the job's id. submitit writes no
scripts for het jobs, so ``sbatch.py`` writes the script. submitit reads the states of jobs from Slurm's
accounting, which not all clusters have, so ``slurm_queue`` asks squeue instead.
"""

from __future__ import annotations

import io
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Callable, Mapping
from contextlib import redirect_stderr
from pathlib import Path

from submitit import SlurmExecutor
from submitit.core.utils import FailedJobError

from tba_hpc.core.wording import first_words
from tba_hpc.launch import LaunchError
from tba_hpc.run.directory import RunDir
from tba_hpc.run.files import write_atomic
from tba_hpc.run.slurm_queue import SlurmError, active_job, ask

REMEDIES = {
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
    "node configuration": "gpus_per_node, cpus_per_node, memory or constraint (see sinfo -o '%c %m %G')",
}
"""Site key to change, by words in Slurm's error message. The first match counts."""

LIMITS = ("accounting/qos policy", "maxsubmit", "maxjobs")
"""Words in Slurm's error message for a limit that the user's jobs in the queue may have reached."""

UNAVAILABLE = "node configuration"
"""Words in the output of ``sbatch --test-only`` if no nodes have what a job requests.

The command ignores nodes that are down or drained, although sbatch accepts a job that waits for them."""

NEVER = (
    UNAVAILABLE,
    "invalid partition",
    "invalid account",
    "invalid qos",
    "invalid feature",
    "memory specification",
)
"""Words in Slurm's error message for a request that will fail again, however long the user waits."""

UNANSWERED = ("timed out", "zero bytes were transmitted", "unexpected message")
"""Words in Slurm's error message if Slurm may have accepted a job, but its answer was lost."""

JOB_IDS = (r"Submitted batch job (\d+)", r"^\s*(\d+)(?:;\S+)?\s*$", r"(?i)\bjob (\d+)")
"""Patterns of how sbatch names a submitted job; the first that matches counts. The sbatch of some sites
prints the id alone, words of its own, or other lines with numbers in them."""

YOURS = {
    "SBATCH_ACCOUNT": "--account",
    "SBATCH_PARTITION": "--partition",
    "SBATCH_QOS": "--qos",
    "SBATCH_CONSTRAINT": "--constraint",
    "SBATCH_RESERVATION": "--reservation",
    "SBATCH_CLUSTERS": "--clusters",
}
"""Environment variables with the user's defaults for options of sbatch, by which they override the script.
Each is therefore passed on only if the script does not set its option."""

WHICH_SLURM = ("SLURM_CONF", "SLURM_CLUSTERS", "SLURM_JWT", "SLURM_SACK", "SLURM_MPI_TYPE")
"""Prefixes of variables that select the Slurm installation and the defaults of its srun."""


LOOK = "look with 'squeue --me' whether there is a new job, and submit again only if there is none"
"""Remedy for a job that may have been submitted."""


class SubmitError(LaunchError):
    """Error for a run that was not submitted. The message is one sentence for the user."""


class _Executor(SlurmExecutor):
    """Executor of submitit that submits a finished batch script. It pickles nothing."""

    def __init__(self, folder: Path, script: str) -> None:
        super().__init__(folder)
        self._script = script

    @classmethod
    def name(cls) -> str:
        """Return the name of this kind of executor in submitit."""
        return "slurm"

    def submit_script(self) -> str:
        """Submit the script; return the job's id. Raises SubmitError with Slurm's message and a remedy."""
        try:
            with redirect_stderr(io.StringIO()):  # submitit prints the message, too
                return str(self._submit_command("").job_id)
        except FailedJobError as error:
            raise SubmitError(refusal(str(error))) from None
        finally:
            for leftover in self.folder.glob(".submission_file_*"):
                leftover.unlink()

    def _make_submission_file_text(self, command: str, uid: str) -> str:
        return self._script

    def _make_submission_command(self, submission_file_path: Path) -> list[str]:
        unset = [word for name in foreign(self._script, os.environ) for word in ("-u", name)]
        return ["env", *unset, "sbatch", str(submission_file_path)]

    @staticmethod
    def _get_job_id_from_submission_command(string: str | bytes) -> str:
        said = string.decode(errors="replace") if isinstance(string, bytes) else string
        for pattern in JOB_IDS:
            if found := re.findall(pattern, said, re.MULTILINE):
                return str(found[-1])
        raise SubmitError(f"sbatch names no job ({first_words(said) or 'it printed nothing'}): {LOOK}")

    def _num_tasks(self) -> int:
        return 1  # the batch script, which starts the ranks


def require_slurm() -> None:
    """Raise SubmitError if sbatch is not on PATH."""
    if shutil.which("sbatch") is None:
        raise SubmitError(
            "no Slurm here (sbatch is not on PATH): log in to the cluster or load its Slurm module; "
            "to train on this machine alone: tba run CONFIG"
        )


def refusal(message: str, *, test_only: bool = False) -> str:
    """Return a sentence with Slurm's error about a submission, and a remedy if one is known.

    message: output of sbatch. test_only: whether sbatch was only asked if Slurm would accept the job.
    """
    last_line = "error: Batch job submission failed: |allocation failure: "  # of sbatch, and with --test-only
    found = re.findall(rf"(?:({last_line})|error: )(.*\S)", message)
    errors = list(dict.fromkeys(line for last, line in found if not last))
    # Slurm's last line may repeat one of sbatch: "Invalid partition name …" "invalid partition specified: x".
    begun = [line.lower().split()[:2] for line in errors]
    errors += [line for last, line in found if last and line.lower().split()[:2] not in begun]
    said = "; ".join(errors) or message
    if any(words in said.lower() for words in UNANSWERED):
        if test_only:
            return f"Slurm did not answer ({said}): try again"
        return f"Slurm did not answer ({said}), but may have accepted the job: {LOOK}"
    if any(words in said.lower() for words in LIMITS):
        return (
            f"Slurm refused the job: {said}; wait for your other jobs, ask for fewer --nodes, or change the "
            "site key (or --sbatch option) qos or time"
        )
    key = next((key for word, key in REMEDIES.items() if word in said.lower()), None)
    return f"Slurm refused the job: {said}" + (
        f"; change the site key (or --sbatch option) {key}" if key else ""
    )


def foreign(script: str, environment: Mapping[str, str]) -> list[str]:
    """List the names of environment variables that must not reach a job.

    Such variables would override options of the script or confuse the job's steps. Among them are those of an
    allocation in which the user's shell runs.
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
    """Return Slurm's words on when and where a batch script would start. Submits nothing.

    Raises SubmitError if Slurm would refuse the script.
    """
    command = ["sbatch", "--test-only"]
    plain = {key: value for key, value in os.environ.items() if key not in foreign(script, os.environ)}
    done = subprocess.run(command, input=script, capture_output=True, text=True, env=plain)
    if done.returncode:
        raise SubmitError(refusal(done.stderr, test_only=True))
    said = [line.removeprefix("sbatch: ") for line in done.stderr.strip().splitlines()]
    return "; ".join(line for line in said if " to start at " in line) or "; ".join(said)


def refuse_impossible(script: str) -> str:
    """Raise SubmitError if the script requests what the cluster, or this user's account, does not have.

    Slurm would keep a het job with such a request in the queue for ever. Other reasons for a refusal are
    ignored, since they may pass, such as a limit that the user's other jobs have reached. Returns "", or a
    warning if perhaps only nodes that are down or drained could satisfy the request.
    """
    try:
        would_take(script)
    except SubmitError as error:
        if UNAVAILABLE in str(error).lower() and unavailable_nodes():
            return "Slurm cannot say when the job starts: nodes for it are down or drained, or do not exist"
        if any(words in str(error).lower() for words in NEVER):
            raise
    return ""


def unavailable_nodes() -> str:
    """Return sinfo's list of nodes that are down, drained or failing; "" for none or without an answer."""
    try:
        return ask("sinfo", "--noheader", "--list-reasons").strip()
    except SlurmError:
        return ""


def submit(run: RunDir, script: str) -> str:
    """Submit a run's batch script; return the job's id.

    Raises SubmitError if Slurm refuses the script, or if the run already has a job. If two jobs of a run are
    submitted at the same moment, the second one ends when it starts (``job_supervisor.sh``).
    """
    refuse_active(run)
    job = send(run, script)
    (run.path / "slurm/chain").unlink(missing_ok=True)
    write_atomic(run.path / "slurm/job", f"{job}\n")
    return job


def send(run: RunDir, script: str) -> str:
    """Submit any batch script of a run, such as that of elastic searchers; return the job's id.

    Raises SubmitError if Slurm refuses the script.
    """
    folder = run.path / "slurm"
    folder.mkdir(exist_ok=True)
    return _Executor(folder, script).submit_script()


def chain(run: RunDir, job: str, script: Callable[[str], str], *, length: int) -> str:
    """Submit jobs that continue the run, each after the one before it.

    job: id of the first job, which has been submitted. script: function from the id of a job to the batch
    script of the job after it. length: number of jobs in the chain, the first included. Returns "", or a
    warning if Slurm has refused a job; the chain then ends before that job.
    """
    jobs = [job]
    while len(jobs) < length:
        try:
            jobs.append(send(run, script(jobs[-1])))
        except SubmitError as error:  # keep the jobs that are in the queue
            return f"the chain has {len(jobs)} of {length} jobs: {error}"
        write_atomic(run.path / "slurm/chain", "".join(f"{each}\n" for each in jobs))
    return ""


def refuse_active(run: RunDir) -> None:
    """Raise SubmitError if the run has a job that is queued or running."""
    if job := active_job(run):
        raise SubmitError(
            f"job {job.number} of this run is {job.state.lower()} already: let it finish, or end it first: "
            f"{shlex.join(['tba', 'stop', str(run.path), '--wait', '600'])}"
        )
