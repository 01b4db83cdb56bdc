"""Ends a run: ``tba stop`` after a checkpoint, ``tba cancel`` at once.

The run may be a process on this machine or a Slurm job. For a job, ``stop`` writes the file
``RUN/slurm/stop``, which tells the job's script to end rather than requeue (``supervise.py``).
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
from tba_hpc.report.run_state import RunMonitor, run_state
from tba_hpc.run.checkpoints import latest_checkpoint
from tba_hpc.run.directory import RunDir
from tba_hpc.run.events import log_event, read_events, resume_command
from tba_hpc.run.files import write_atomic
from tba_hpc.run.owners import Owner, ask_to_end, holders, keeps_open, owner_at_work
from tba_hpc.run.slurm_queue import (
    ANSWER_SECONDS,
    JOB_CHECK_SECONDS,
    NO_ANSWER,
    ActiveJob,
    active,
    ask,
    components,
    job_states,
    jobs_of,
    searchers_queued,
)

LAUNCHER_END_SECONDS = 10.0
"""Seconds in which a launcher must kill its ranks and end. If it does not, it is killed."""

LAUNCHER_KILLED_SECONDS = 10.0
"""Seconds in which a killed process must disappear."""

STOP_CHECK_SECONDS = 0.25
"""First pause between two checks of whether the run has ended, in seconds. Each later pause is twice as
long, up to JOB_CHECK_SECONDS."""


def stop(run: RunDir) -> str:
    """Ask the run to write a checkpoint at its next safe point and end; return a sentence on what was done.

    Raises LaunchError if the run is a process on another machine that does not listen, or if Slurm does not
    answer.
    """
    match at_work(run):
        case None:
            return _nobody(run)
        case ActiveJob() as job:
            return _stop_job(run, job)
        case owner:
            if owner.is_here:
                _refuse_stranger(run, owner)
            if owner.listens:  # a signal would be Slurm's, after which a job may queue again
                ask_to_end(run)
            else:
                _signal(owner, signal.SIGUSR1)
            return f"{owner} is asked to checkpoint and end; to resume then: {_again(run)}{_staying(run)}"


def cancel(run: RunDir) -> str:
    """End the run at once; return a sentence on what was done.

    Raises LaunchError if the run is a process on another machine, or if Slurm does not answer.
    """
    match at_work(run):
        case None:
            return _nobody(run)
        case ActiveJob() as job:
            ask("scancel", *_of_chain(run, job))
            said = f"job {job.number} is cancelled"
            later = "" if job.waiting else ", or from one that its ranks still save"
        case owner:
            if not owner.is_here:
                raise LaunchError(_elsewhere(run, owner))
            _refuse_stranger(run, owner)
            _end(run, owner)
            said, later = f"{owner} is ended", ""
    saved, none = latest_checkpoint(run), "starts from step 0, as it has no checkpoint yet"
    resumes = "resumes from its last checkpoint" if saved else none
    return f"{said}; nothing sealed is lost, and the run {resumes}{later}: {_again(run)}{_staying(run)}"


def await_end(run: RunDir, *, seconds: float) -> str:
    """Wait until nothing is at work on the run; return a sentence on how the run ended.

    Returns "" if nothing was at work. Raises LaunchError with the name of the process or job that is still at
    work after ``seconds``.
    """
    end, pause, waited = time.monotonic() + seconds, STOP_CHECK_SECONDS, False
    while who := at_work(run):
        waited = True
        left = end - time.monotonic()
        if left <= 0:
            raise LaunchError(
                f"{who} is still at work on {run.path} after {seconds:g} s: wait longer, or end "
                f"it at once: {shlex.join(['tba', 'cancel', str(run.path)])}"
            )
        time.sleep(min(pause, left))
        pause = min(2 * pause, JOB_CHECK_SECONDS)
    if not waited:
        return ""
    monitor = RunMonitor(run, job_states)
    monitor.update()
    return f"{run.path} has ended: {run_state(monitor).words}"


def at_work(run: RunDir) -> Owner | ActiveJob | None:
    """Return the process or the Slurm job that is at work on the run; None for neither.

    Raises LaunchError for a process on another machine that does not listen, or if Slurm does not answer.
    """
    owner = owner_at_work(run)
    if owner and (owner.is_here or owner.listens):
        return owner
    if owner and owner.pid:
        raise LaunchError(_elsewhere(run, owner))
    components = job_states(run, seconds=ANSWER_SECONDS)
    if components and components[0]["state"] == NO_ANSWER and (owner or not run.finished):
        raise LaunchError(
            f"job {components[0]['job']} may be at work on {run.path}, and squeue does not answer here: type "
            "the same on the job's cluster, or try again in a minute if this is it"
        )
    return active(components)


def _elsewhere(run: RunDir, owner: Owner) -> str:
    where = f"{run.path} is at work elsewhere, in {owner}"
    return f"{where}: log in to {owner.host} and type the same there"


def _nobody(run: RunDir) -> str:
    if run.finished:
        return f"nobody is at work on {run.path}; it is finished"
    if queued := _queued_again(run):
        then = f"job {queued} is queued, and goes on unless you type scancel {queued}"
        return f"nobody is at work on {run.path}; {then}"
    return f"nobody is at work on {run.path}; to resume it: {_again(run)}{_staying(run)}"


def _queued_again(run: RunDir) -> str:
    """Return the id of the job of the last event, a batch script of the user's, if it is queued; else ""."""
    job = next((event["job"] for event in read_events(run)[-1:]), "")
    found = active(components(job) or []) if job else None
    return job if found and found.waiting else ""


def _stop_job(run: RunDir, job: ActiveJob) -> str:
    # The file is written first, so that a job that starts during the next lines finds it.
    write_atomic(run.path / "slurm/stop", f"{job.number}\n")
    jobs = _of_chain(run, job)
    if job.waiting:
        ask("scancel", "--state=PENDING", *jobs)
        then = f"to resume: {_again(run)}{_staying(run)}"
        return f"job {job.number} was waiting in the queue, and is cancelled; {then}"
    if jobs[1:]:
        ask("scancel", *jobs[1:])
    then = f"to resume then: {_again(run)}{_staying(run)}"
    if job.state == "COMPLETING":  # Slurm sends it no more signals; if requeued, it reads the file
        return f"job {job.number} is ending already, and will not train again; {then}"
    ask("scancel", "--batch", "--signal=USR1", job.number)
    return f"job {job.number} is asked to checkpoint and end, not to requeue; {then}"


def _staying(run: RunDir) -> str:
    """Return clauses on elastic searchers that keep their nodes or are queued, and on how to end them."""
    names = {file.stem for file in run.owners.glob("searcher-*.*")}
    there = [claim.owner for claim in holders(run, names).values() if claim.owner.elastic]
    jobs = sorted({owner.job for owner in there if owner.job}, key=lambda job: [*map(int, job.split("_"))])
    queued = searchers_queued(run) if run.config().launch.elastic else []
    ends = [shlex.join(["scancel", *jobs, *queued])] if jobs or queued else []
    ends += [f"kill -USR1 {owner.pid} (on {owner.host})" for owner in there if not owner.job]
    who = count(len(there), "elastic searcher")
    said = [f"{who} will stay and wait for that"] if there else []
    said += [f"elastic searchers are queued as job {' and '.join(queued)}"] if queued else []
    return "".join(f"; {words}" for words in [*said, f"to end them: {'; '.join(ends)}"]) if ends else ""


def _of_chain(run: RunDir, job: ActiveJob) -> list[str]:
    """Return the ids of the job and of the jobs of its chain that would follow it."""
    jobs = jobs_of(run)
    return jobs[jobs.index(job.number) :]


def _refuse_stranger(run: RunDir, owner: Owner) -> None:
    """Raise LaunchError if the owner is a process of this user that does not have the run's folder open.

    The id of the owner comes from a file in the run directory. In a stranger's run directory, this file may
    name any process of this user, which must not be signalled.
    """
    with suppress(psutil.NoSuchProcess):
        is_ours = os.getuid() in (0, psutil.Process(owner.pid).uids().real)  # this user can signal no others
        if is_ours and not keeps_open(run, owner.pid):
            raise LaunchError(
                f"{owner} does not seem to be at work on {run.path}, although a file there says so: look at "
                f"it with ps, then end it yourself with kill -USR1 {owner.pid}"
            )


def _signal(owner: Owner, number: signal.Signals) -> None:
    """Send the owner a signal, unless it has ended. Raises LaunchError if it belongs to another user."""
    try:
        os.kill(owner.pid, number)
    except ProcessLookupError:
        return
    except PermissionError:
        raise LaunchError(f"{owner} is another user's: ask them, or be root") from None


def _end(run: RunDir, owner: Owner) -> None:
    """Make a launcher on this machine kill its ranks, as two Ctrl-C do. If that fails, kill the launcher.

    The ranks of a killed launcher end, too (``die_with``). Raises LaunchError if it still does not end.
    """
    if _ends_after_signal(run, owner, signal.SIGINT, LAUNCHER_END_SECONDS):
        return
    gone = _ends_after_signal(run, owner, signal.SIGKILL, LAUNCHER_KILLED_SECONDS)
    log_event(run, "aborted")
    if not gone:
        raise LaunchError(
            f"{owner} was killed, but still exists {LAUNCHER_KILLED_SECONDS:g} s later: look with ps"
        )


def _ends_after_signal(run: RunDir, owner: Owner, number: signal.Signals, seconds: float) -> bool:
    """Send the owner a signal again and again; return whether it ends within ``seconds``."""
    end = time.monotonic() + seconds
    while owner_at_work(run) == owner:
        if time.monotonic() > end:
            return False
        _signal(owner, number)
        time.sleep(STOP_CHECK_SECONDS)
    return True


def _again(run: RunDir) -> str:
    return resume_command(run, read_events(run))
