"""Events of a run's ranks and jobs over all its starts, as JSON lines in ``events.jsonl``."""

from __future__ import annotations

import json
import os
import shlex
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tba_hpc.run.files import parse_json_lines, read_regular

if TYPE_CHECKING:  # slow to import, and batch scripts call this module often
    from tba_hpc.run.directory import RunDir


def this_job() -> str:
    """Return the id of this process's Slurm job, as squeue prints it; "" outside Slurm.

    For a task of a job array the id is, for example, ``49_1``. The task's SLURM_JOB_ID may be that of the
    whole array, and ``scancel`` with that id would end all tasks.
    """
    array, task = (os.environ.get(f"SLURM_ARRAY_{part}_ID") for part in ("JOB", "TASK"))
    return f"{array}_{task}" if array and task else os.environ.get("SLURM_JOB_ID", "")


def log_event(run: RunDir, event: str, **extra: object) -> None:
    """Append an event to ``events.jsonl``: a JSON object with the following keys, and those of ``extra``.

    time: unix seconds. event: kind of the event, from the table below. job: see ``this_job``.
    restarts: how often this job has been requeued.

    ===========  ====================================================================================
    event       when it happens, and its extra keys
    ===========  ====================================================================================
    prepared    the run directory is ready for a job; ``command``: what submits the run again
    submitted   Slurm has accepted ``job``
    allocated   a batch script begins, for the first time or after a requeue; ``nodes``: "node1,node2"
    changed     a resume brings another config; ``keys``: {"train.steps": [80, 2000]}, old and new values;
                or other code of the user's; ``files``: ["my_rewards.py"], and no ``keys``
    start       the ranks are about to be started; ``attempt``: "attempt-003", ``trainers``, ``searchers``
    failed      a rank failed, and all ranks have ended; ``code``: exit status
    aborted     the user killed the ranks by pressing Ctrl-C twice
    stopped     the ranks ended because they were asked to, or because the job's time was over; or a
                replay ended for lack of shards; ``sentence``: says so
    signal      the batch script, or ``tba run``, was asked to stop
    preempted   ``tba run`` leaves a job that was preempted, cancelled or out of time, and may queue again
    requeue     the batch script puts its job back into the queue
    unreachable ``nodes`` do not answer, or Slurm has taken them out of the job
    unhealthy   ``nodes`` failed the check before a start, so the job excludes them from its next start
    draining    ``nodes`` are about to be drained, so the job leaves them
    hung        srun did not end when its job step had ended, and was killed
    orphan      a job step from before the last requeue still ran, and was cancelled
    finished    the run is finished
    refused     an error that only the user can fix; ``sentence``: the error
    ===========  ====================================================================================

    ``job_supervisor.sh`` writes such lines, too. On a full disk the event is lost without an error.
    """
    append_event(run.events_file, event, **extra)


def append_event(file: Path, event: str, **extra: object) -> None:
    """Append an event to ``file`` as ``log_event`` does to a run's file."""
    job, restarts = this_job(), int(os.environ.get("SLURM_RESTART_COUNT", "0"))
    line = json.dumps({"time": time.time(), "event": event, "job": job, "restarts": restarts, **extra})
    with suppress(OSError), file.open("ab", buffering=0) as events:
        events.write(line.encode() + b"\n")


def read_events(run: RunDir) -> list[dict[str, Any]]:
    """Read a run's events in order; none if there is no file. A line that a crash cut short is left out."""
    if not run.events_file.exists():
        return []
    return parse_json_lines(read_regular(run.events_file))


def run_command(run: RunDir) -> str:
    """Return the command that resumes the run here: ``tba replay`` for a replay, otherwise ``tba run``."""
    if run.replay_note.exists():
        note = json.loads(read_regular(run.replay_note))
        return str(note.get("command") or shlex.join(["tba", "replay", note["of"]]))  # older notes have none
    return shlex.join(["tba", "run", str(run.path)])


def resume_command(run: RunDir, events: Sequence[Mapping[str, Any]], *, job: str = "") -> str:
    """Return the command that resumes the run: ``tba run``, or its last ``tba submit`` or ``sbatch``.

    If a run has a job, but no event holds its command, the result is a ``tba submit`` with the number of the
    job's nodes, or the letter N if that is unknown. In a batch script of the user's, which leaves no event
    ``allocated``, it was ``tba run``. events: all events of the run, in order. job: id of the run's job, or
    "" if it has none; used only if there are no events, which name the job.
    """
    typed = [str(event["command"]) for event in events if "command" in event]
    if typed and (events[-1]["job"] or "command" in events[-1]):
        return typed[-1]
    allocated = [str(event["nodes"]) for event in events if event["event"] == "allocated"]
    if not (events[-1]["job"] and allocated if events else job):
        return run_command(run)
    nodes = len(allocated[-1].split(",")) if allocated else "N"
    return shlex.join(["tba", "submit", "--config", str(run.path), "--nodes", str(nodes)])
