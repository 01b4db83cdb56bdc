"""How a run stands, in a sentence, and what the user types next if it is the user's turn.

It puts together what Slurm's queue, the launchers' events and the ranks' metrics say.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import dataclass, replace

from tba_hpc.report.attempts import failures_in_a_row
from tba_hpc.report.monitor import QueueEntry, RunMonitor
from tba_hpc.run.metrics import number

WAITING = {"PENDING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT", "RESV_DEL_HOLD"}
"""Slurm's states of a job that waits for its nodes, for the first time or again."""

AT_WORK = {
    "CONFIGURING",
    "RUNNING",
    "COMPLETING",
    "SIGNALING",
    "STAGE_OUT",
    "RESIZING",
    "STOPPED",
    "SUSPENDED",
}
"""Slurm's states of a job that has nodes."""

UNKNOWN = "UNKNOWN"
"""State of a job if Slurm cannot be asked, or does not answer."""

FORGOTTEN = "FORGOTTEN"
"""State of a job that ended so long ago that Slurm does not know how."""

ASIDES = {"unreachable", "hung", "orphan"}
"""Events that do not change how a run stands."""

SILENT_SECONDS = 600.0
"""Engines may take so long to start."""

OVER = {"created", "stopped", "aborted", "failed", "refused", "gone", "finished"}
"""States of a run that does nothing more by itself."""


@dataclass(frozen=True, slots=True)
class RunState:
    """How a run stands. state: a word for scripts; words: for people; command: what the user types next.

    States: queued, requeued, suspended, starting, filling, evaluating, training, finishing, stopping,
    relaunching, and those of OVER.
    """

    state: str
    words: str
    command: str = ""

    @property
    def over(self) -> bool:
        """Whether it is the user's turn, or nobody's."""
        return self.state in OVER


def run_state(monitor: RunMonitor) -> RunState:
    """How the run stands as of the monitor's last update."""
    if monitor.run.finished or _last_event(monitor) == "finished":
        return RunState("finished", f"finished at step {monitor.progress.step}")
    job = job_of(monitor)
    states = {component["state"] for component in job}
    if states & WAITING:
        return _in_the_queue(monitor, job)
    if states & {*AT_WORK, UNKNOWN}:
        return _with_silence(monitor, _in_a_job(monitor, job, states))
    return _after_a_job(monitor, job) if job else _without_a_job(monitor)


def job_of(monitor: RunMonitor) -> list[QueueEntry]:
    """The components of the run's job; none if the run was started otherwise since that job ended."""
    states = {component["state"] for component in monitor.job}
    if not monitor.job or not monitor.events or states & {*WAITING, *AT_WORK}:
        return monitor.job
    last = monitor.events[-1]["job"]
    return monitor.job if last and int(last) <= int(monitor.job[0]["job"]) else []


def _in_the_queue(monitor: RunMonitor, job: list[QueueEntry]) -> RunState:
    waiting = next(component for component in job if component["state"] in WAITING)
    reason, step = waiting["reason"], monitor.progress.step
    held = any(word in reason.lower() for word in ("held", "hold"))
    release = f"scontrol release {waiting['job']}" if held else ""
    if not _heard_of(monitor, job):
        return RunState("queued", f"queued ({reason})", release)
    return RunState("requeued", f"{_why(monitor)}, back in the queue at step {step} ({reason})", release)


def _why(monitor: RunMonitor) -> str:
    """Why the job went back to the queue, as far as it was noted before."""
    kinds = {
        event["event"] for event in monitor.events if event["restarts"] == monitor.events[-1]["restarts"]
    }
    if "signal" in kinds:
        return "preempted or out of time"
    return "nodes unreachable" if "requeue" in kinds else "preempted or a node lost"


def _heard_of(monitor: RunMonitor, job: list[QueueEntry]) -> bool:
    """Whether the job's batch script has begun."""
    return any(event["job"] == job[0]["job"] for event in monitor.events)


def _unheard(job: list[QueueEntry]) -> RunState:
    """A job of which there is no word yet."""
    if job[0]["state"] == UNKNOWN:
        return RunState("queued", f"submitted as job {job[0]['job']}, which squeue tells nothing about here")
    return RunState("starting", f"job {job[0]['job']} has its nodes, no word from it yet")


def _in_a_job(monitor: RunMonitor, job: list[QueueEntry], states: set[str]) -> RunState:
    """While the batch script may react to what happens."""
    step = monitor.progress.step
    if not _heard_of(monitor, job):
        return _unheard(job)
    if "SUSPENDED" in states:
        return RunState("suspended", f"suspended by Slurm at step {step}")
    match _last_event(monitor):
        case "failed":
            return RunState("relaunching", f"the ranks failed after step {step}, to be started again")
        case "stopped" | "requeue":
            return RunState("stopping", f"stopped at step {step}, leaving its nodes")
    return _at_work(monitor)


def _after_a_job(monitor: RunMonitor, job: list[QueueEntry]) -> RunState:
    job_id, state = job[0]["job"], job[0]["state"]
    how = "" if state == FORGOTTEN else f" ({state.lower().replace('_', ' ')})"
    gone = RunState("gone", f"job {job_id} is gone{how}, the run is at step {monitor.progress.step}")
    ended = _ended(monitor) if _heard_of(monitor, job) else None
    return replace(ended or gone, command=_submit(monitor, job_id))


def _without_a_job(monitor: RunMonitor) -> RunState:
    again = shlex.join(["tba", "run", str(monitor.run.path)])
    if not monitor.events and not monitor.progress.newest:
        return RunState("created", "not started yet", again)
    ended = _ended(monitor)
    return replace(ended, command=again) if ended else _with_silence(monitor, _at_work(monitor))


def _ended(monitor: RunMonitor) -> RunState | None:
    """The end that a launcher noted, if no launcher is left."""
    note = monitor.attempt.note if monitor.attempt else ""
    match _last_event(monitor):
        case "refused":
            return RunState("refused", note)
        case "stopped":
            return RunState("stopped", f"stopped at step {monitor.progress.step}")
        case "changed":
            step, end = monitor.progress.step, monitor.config.train.steps
            return RunState("stopped", f"stopped at step {step}, its config changed, to go on to step {end}")
        case "aborted":
            step = monitor.progress.step
            return RunState(
                "aborted", f"killed on request at step {step}; it goes on from the last checkpoint"
            )
        case "failed":
            count = failures_in_a_row(monitor.attempts)
            often = f" {count} times in a row" if count > 1 else ""
            return RunState(
                "failed", f"gave up: the ranks failed{often}, {note}; see {monitor.run.logs}/latest"
            )
    return None


def _at_work(monitor: RunMonitor) -> RunState:
    """What the ranks of the newest attempt do."""
    if _last_event(monitor) == "signal" and monitor.phase not in ("stopped", "finished"):
        return RunState("stopping", "asked to stop: to the next safe point, then a checkpoint")
    return PHASES.get(monitor.phase, _starting)(monitor)


def _starting(monitor: RunMonitor) -> RunState:
    if _last_event(monitor) == "allocated":
        return RunState("starting", "looking which nodes answer")
    if monitor.rates:
        return RunState("evaluating", "first completions, evaluation before training")
    up = monitor.phase in ("started", "resumed")
    return RunState("starting", "engines are up, first weights on their way" if up else "starting engines…")


def _filling(monitor: RunMonitor) -> RunState:
    wanted = monitor.config.buffer.initial_completions
    size = int(number(monitor.progress.latest, "buffer/size", 0))
    return RunState("filling", f"filling the buffer {min(size, wanted)}/{wanted}")


def _finishing(monitor: RunMonitor) -> RunState:
    rest = "writing the results" if monitor.tested else "final evaluation"
    return RunState("finishing", f"last step done, {rest}")


PHASES: dict[str, Callable[[RunMonitor], RunState]] = {
    "filling": _filling,
    "training": lambda monitor: RunState("training", "training"),
    "waiting": lambda monitor: RunState("training", "training waits for completions: none came for a while"),
    "finished": _finishing,
    "stopped": lambda monitor: RunState("stopping", f"stopped at step {monitor.progress.step}"),
}


def _with_silence(monitor: RunMonitor, found: RunState) -> RunState:
    """The same, with a hint if all are silent for longer than any rank waits for another."""
    silence = monitor.silence or 0.0
    if silence < max(SILENT_SECONDS, monitor.config.launch.timeout_seconds):
        return found
    words = f"{found.words}; nothing heard for {silence / 60:.0f} min: was it killed?"
    return RunState(found.state, words, f"tail {shlex.quote(str(monitor.run.logs))}/latest/*.log")


def _submit(monitor: RunMonitor, job: str) -> str:
    """What submits the run again: as the submission noted it, or a guess for a script sent by hand."""
    if job in monitor.submissions:
        return monitor.submissions[job]
    allocations = [str(event["nodes"]) for event in monitor.events if event["event"] == "allocated"]
    nodes = len(allocations[-1].split(",")) if allocations else "N"
    return f"tba submit --config {shlex.quote(str(monitor.run.path))} --nodes {nodes}"


def _last_event(monitor: RunMonitor) -> str:
    """The last event that changed how the run stands."""
    kinds = (str(event["event"]) for event in reversed(monitor.events))
    return next((kind for kind in kinds if kind not in ASIDES), "")
