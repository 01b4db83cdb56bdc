"""Events of a run's ranks and jobs, over all its starts: one JSON line each in ``events.jsonl``."""

from __future__ import annotations

import json
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tba_hpc.run.files import parse_json_lines, read_regular

if TYPE_CHECKING:  # it imports the config, which batch scripts avoid
    from tba_hpc.run.directory import RunDir


def log_event(run: RunDir, event: str, **extra: object) -> None:
    """Append a line to ``events.jsonl``: ``time`` (unix s), ``event``, ``job``, ``restarts``, and ``extra``.

    job: id of this process's Slurm job, or empty. restarts: how often that job was requeued.

    ===========  ====================================================================================
    event       when, and its extra keys
    ===========  ====================================================================================
    submitted   ``tba submit`` has submitted ``job``; ``command``: what submits the run again
    allocated   a batch script begins, for the first time or after a requeue; ``nodes``: "node1,node2"
    changed     a resume brings another config; ``keys``: {"train.steps": [80, 2000]}, old and new values
    start       the ranks are about to be started; ``attempt``: "attempt-003", ``trainers``, ``searchers``
    failed      the ranks ended badly; ``code``: exit status
    aborted     the ranks were killed on request, by Ctrl-C twice
    stopped     the ranks ended because they were asked to, or their time was over
    signal      the batch script, or ``tba run``, was asked to stop
    requeue     the job goes back to the queue
    unreachable ``nodes`` do not answer
    unhealthy   ``nodes`` failed the check before a start twice: the job does not get them again
    draining    ``nodes`` are about to be drained: the job leaves them
    hung        srun did not end with its step, and was killed
    orphan      a step from before the last requeue was cancelled
    finished    the run is finished
    refused     the user must fix something; ``sentence``
    ===========  ====================================================================================

    ``job_supervisor.sh`` writes such lines too. A line that cannot be written, on a full disk, is left out.
    """
    append_event(run.events_file, event, **extra)


def append_event(file: Path, event: str, **extra: object) -> None:
    """Append an event to ``file``, in the format of ``log_event``."""
    job, restarts = os.environ.get("SLURM_JOB_ID", ""), int(os.environ.get("SLURM_RESTART_COUNT", "0"))
    line = json.dumps({"time": time.time(), "event": event, "job": job, "restarts": restarts, **extra})
    with suppress(OSError), file.open("ab", buffering=0) as events:
        events.write(line.encode() + b"\n")


def read_events(run: RunDir) -> list[dict[str, Any]]:
    """Read all events in order. A line torn by a crash is left out; a missing file means no events."""
    if not run.events_file.exists():
        return []
    return parse_json_lines(read_regular(run.events_file))
