"""Stops a run, after a checkpoint (``tba stop``) or at once (``tba cancel``), here or as a Slurm job.

``supervise.py`` reads the file that tells a job to end and not to requeue.
"""

from __future__ import annotations

import os
import shlex
import signal
import time
from contextlib import suppress

import psutil

from tba_hpc.core.wording import count
from tba_hpc.launch import LaunchError
from tba_hpc.run.directory import RunDir
from tba_hpc.run.events import log_event, read_events
from tba_hpc.run.files import write_atomic
from tba_hpc.run.owners import Owner, holders, keeps_open, owner_at_work
from tba_hpc.run.slurm_queue import JOB_CHECK_SECONDS, NO_ANSWER, ActiveJob, active, ask, job_states, jobs_of

LAUNCHER_END_SECONDS = 10.0
"""Seconds that a launcher on this machine has to kill its ranks before it is killed itself."""

KILLED_SECONDS = 10.0
"""Seconds within which a killed process must be gone."""

STOP_CHECK_SECONDS = 0.25
"""Pause before the second check for a running owner, s; it doubles up to JOB_CHECK_SECONDS."""


def stop(run: RunDir) -> str:
    """Ask the run to checkpoint at its next safe point and end; return what was done, in a sentence.

    Raises LaunchError if the run is running elsewhere, or cannot be reached.
    """
    match at_work(run):
        case None:
            return _nobody(run)
        case ActiveJob() as job:
            return _stop_job(run, job)
        case owner:
            _refuse_stranger(run, owner)
            _signal(owner, signal.SIGUSR1)
            return f"{owner} is asked to checkpoint and end; to resume then: {_again(run)}{_staying(run)}"


def cancel(run: RunDir) -> str:
    """End the run at once; return what was done, in a sentence. Raises LaunchError like ``stop``."""
    match at_work(run):
        case None:
            return _nobody(run)
        case ActiveJob() as job:
            ask("scancel", *_of_chain(run, job))
            said = f"job {job.number} is cancelled"
        case owner:
            _refuse_stranger(run, owner)
            _end(run, owner)
            said = f"{owner} is ended"
    resumed = f"it resumes from its last checkpoint: {_again(run)}{_staying(run)}"
    return f"{said}; nothing sealed is lost, and {resumed}"


def await_end(run: RunDir, *, seconds: float) -> None:
    """Wait until the run has no owner. Raises LaunchError, which names the owner, after ``seconds``."""
    end, pause = time.monotonic() + seconds, STOP_CHECK_SECONDS
    while who := at_work(run):
        left = end - time.monotonic()
        if left <= 0:
            raise LaunchError(
                f"{who} is at work on {run.path} after {seconds:g} s still: wait longer, or end "
                f"it at once: {shlex.join(['tba', 'cancel', str(run.path)])}"
            )
        time.sleep(min(pause, left))
        pause = min(2 * pause, JOB_CHECK_SECONDS)


def at_work(run: RunDir) -> Owner | ActiveJob | None:
    """Return the process of this machine, or the Slurm job, that runs the run; None if it is not running.

    Raises LaunchError if it is a process on another machine, or if Slurm cannot be asked.
    """
    owner = owner_at_work(run)
    if owner and owner.is_here:
        return owner
    if owner and owner.pid:
        raise LaunchError(
            f"{run.path} is at work elsewhere, in {owner}: log in to {owner.host} and type the same there"
        )
    components = job_states(run)
    if components and components[0]["state"] == NO_ANSWER and (owner or not run.finished):
        raise LaunchError(
            f"job {components[0]['job']} may be at work on {run.path}, and squeue does not answer here: log "
            "in to its cluster and type the same there"
        )
    return active(components)


def _nobody(run: RunDir) -> str:
    done = "it is finished" if run.finished else f"to resume it: {_again(run)}{_staying(run)}"
    return f"nobody is at work on {run.path}; {done}"


def _stop_job(run: RunDir, job: ActiveJob) -> str:
    # The file comes first, so that a job that starts meanwhile reads it.
    write_atomic(run.path / "slurm/stop", f"{job.number}\n")
    jobs = _of_chain(run, job)
    if job.waiting:
        ask("scancel", "--state=PENDING", *jobs)
        then = f"to resume: {_again(run)}{_staying(run)}"
        return f"job {job.number} was waiting in the queue, and is cancelled; {then}"
    if jobs[1:]:
        ask("scancel", *jobs[1:])
    ask("scancel", "--batch", "--signal=USR1", job.number)
    then = f"to resume then: {_again(run)}{_staying(run)}"
    return f"job {job.number} is asked to checkpoint and end, not to requeue; {then}"


def _staying(run: RunDir) -> str:
    """Name the elastic searchers, which keep their nodes, and how to end them; empty if there are none."""
    names = {file.stem for file in run.owners.glob("searcher-*.*")}
    there = [claim.owner for claim in holders(run, names).values() if claim.owner.elastic]
    jobs = sorted({owner.job for owner in there if owner.job}, key=int)
    ends = [shlex.join(["scancel", *jobs])] if jobs else []
    ends += [f"kill -USR1 {owner.pid} (on {owner.host})" for owner in there if not owner.job]
    who = count(len(there), "elastic searcher")
    return f"; {who} will wait for that on nodes of their own; to end them: {'; '.join(ends)}" if ends else ""


def _of_chain(run: RunDir, job: ActiveJob) -> list[str]:
    """List the ids of the job and of those that would continue after it."""
    jobs = jobs_of(run)
    return jobs[jobs.index(job.number) :]


def _refuse_stranger(run: RunDir, owner: Owner) -> None:
    """Raise LaunchError if the owner is a process of ours that does not have the run's folder open.

    A file in a stranger's run directory may name any of our processes.
    """
    with suppress(psutil.NoSuchProcess):
        is_ours = os.getuid() in (0, psutil.Process(owner.pid).uids().real)  # else the kernel refuses
        if is_ours and not keeps_open(run, owner.pid):
            raise LaunchError(
                f"{owner} does not seem to be at work on {run.path}, though a file there says so: look with "
                f"ps, then end it yourself with kill -USR1 {owner.pid}"
            )


def _signal(owner: Owner, number: signal.Signals) -> None:
    """Send the owner a signal, unless it has ended meanwhile. Raises LaunchError if that is not allowed."""
    try:
        os.kill(owner.pid, number)
    except ProcessLookupError:
        return
    except PermissionError:
        raise LaunchError(f"{owner} is another user's: ask them, or be root") from None


def _end(run: RunDir, owner: Owner) -> None:
    """Make a launcher on this machine kill its ranks, as two Ctrl-C do; if that fails, kill it and the ranks.

    Raises LaunchError if the launcher still does not end.
    """
    if _goes(run, owner, signal.SIGINT, LAUNCHER_END_SECONDS):
        return
    gone = _goes(run, owner, signal.SIGKILL, KILLED_SECONDS)
    log_event(run, "aborted")
    if not gone:
        raise LaunchError(f"{owner} was killed, but still exists {KILLED_SECONDS:g} s later: look with ps")


def _goes(run: RunDir, owner: Owner, number: signal.Signals, seconds: float) -> bool:
    """Send a process a signal repeatedly; return whether it ends within ``seconds``."""
    end = time.monotonic() + seconds
    while owner_at_work(run) == owner:
        if time.monotonic() > end:
            return False
        _signal(owner, number)
        time.sleep(STOP_CHECK_SECONDS)
    return True


def _again(run: RunDir) -> str:
    """Return the command that resumes the run: its ``tba submit``, or ``tba run`` if that came last."""
    events = read_events(run)
    if not events or not events[-1]["job"]:
        return shlex.join(["tba", "run", str(run.path)])
    typed = [str(event["command"]) for event in events if event["event"] == "submitted"]
    return typed[-1] if typed else shlex.join(["tba", "submit", "--config", str(run.path), "--nodes", "N"])
