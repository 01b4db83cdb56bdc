"""How a run stands, in a sentence, and what the user types next where it is the user's turn.

It puts together what three witnesses say: Slurm's queue, the events of the launchers, and the metrics of
the ranks. It must not read files: the view does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from tba_hpc.metrics import number
from tba_hpc.report.lives import failures_in_a_row
from tba_hpc.report.view import Component, RunView

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
"""State of a job where Slurm cannot be asked, or does not answer."""

FORGOTTEN = "FORGOTTEN"
"""State of a job that ended so long ago that Slurm does not know how."""

ASIDES = {"unfit", "hung", "orphan"}
"""Events that do not change how a run stands."""

SILENT_SECONDS = 600.0
"""Engines may take so long to start."""

OVER = {"created", "stopped", "failed", "refused", "gone", "finished"}
"""States of a run that does nothing more by itself."""


@dataclass(frozen=True, slots=True)
class Standing:
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


def standing(view: RunView) -> Standing:
    """How the run stands as of the view's last update."""
    if view.run.finished or _last_event(view) == "finished":
        return Standing("finished", f"finished at step {view.progress.step}")
    job = job_of(view)
    states = {component["state"] for component in job}
    if states & WAITING:
        return _in_the_queue(view, job)
    if states & {*AT_WORK, UNKNOWN}:
        return _with_silence(view, _in_a_job(view, job, states))
    return _after_a_job(view, job) if job else _without_a_job(view)


def job_of(view: RunView) -> list[Component]:
    """The components of the run's job; none where the run was started otherwise since that job ended."""
    states = {component["state"] for component in view.job}
    if not view.job or not view.events or states & {*WAITING, *AT_WORK}:
        return view.job
    last = view.events[-1]["job"]
    return view.job if last and int(last) <= int(view.job[0]["job"]) else []


def _in_the_queue(view: RunView, job: list[Component]) -> Standing:
    waiting = next(component for component in job if component["state"] in WAITING)
    reason, step = waiting["reason"], view.progress.step
    held = any(word in reason.lower() for word in ("held", "hold"))
    release = f"scontrol release {waiting['job']}" if held else ""
    if not _heard_of(view, job):
        return Standing("queued", f"queued ({reason})", release)
    return Standing("requeued", f"{_why(view)}, back in the queue at step {step} ({reason})", release)


def _why(view: RunView) -> str:
    """Why the job went back to the queue, as far as its last life knew."""
    kinds = {event["event"] for event in view.events if event["life"] == view.events[-1]["life"]}
    if "signal" in kinds:
        return "preempted or out of time"
    return "nodes unfit" if "requeue" in kinds else "preempted or a node lost"


def _heard_of(view: RunView, job: list[Component]) -> bool:
    """Whether the job's batch script has begun."""
    return any(event["job"] == job[0]["job"] for event in view.events)


def _unheard(job: list[Component]) -> Standing:
    """A job of which there is no word yet."""
    if job[0]["state"] == UNKNOWN:
        return Standing("queued", f"submitted as job {job[0]['job']}, which squeue tells nothing about here")
    return Standing("starting", f"job {job[0]['job']} has its nodes, no word from it yet")


def _in_a_job(view: RunView, job: list[Component], states: set[str]) -> Standing:
    """While the batch script may react to what happens."""
    step = view.progress.step
    if not _heard_of(view, job):
        return _unheard(job)
    if "SUSPENDED" in states:
        return Standing("suspended", f"suspended by Slurm at step {step}")
    match _last_event(view):
        case "failed":
            return Standing("relaunching", f"the ranks failed after step {step}, to be started again")
        case "stopped" | "requeue":
            return Standing("stopping", f"stopped at step {step}, leaving its nodes")
    return _at_work(view)


def _after_a_job(view: RunView, job: list[Component]) -> Standing:
    job_id, state = job[0]["job"], job[0]["state"]
    how = "" if state == FORGOTTEN else f" ({state.lower().replace('_', ' ')})"
    gone = Standing("gone", f"job {job_id} is gone{how}, the run is at step {view.progress.step}")
    ended = _ended(view) if _heard_of(view, job) else None
    return replace(ended or gone, command=_submit(view, job_id))


def _without_a_job(view: RunView) -> Standing:
    again = f"tba run {view.run.path}"
    if not view.events and not view.progress.newest:
        return Standing("created", "not started yet", again)
    ended = _ended(view)
    return replace(ended, command=again) if ended else _with_silence(view, _at_work(view))


def _ended(view: RunView) -> Standing | None:
    """The end that a launcher noted, where no launcher is left."""
    note = view.attempt.note if view.attempt else ""
    match _last_event(view):
        case "refused":
            return Standing("refused", note)
        case "stopped":
            return Standing("stopped", f"stopped at step {view.progress.step}")
        case "failed":
            count = failures_in_a_row(view.attempts)
            often = f" {count} times in a row" if count > 1 else ""
            return Standing("failed", f"gave up: the ranks failed{often}, {note}; see {view.run.logs}/latest")
    return None


def _at_work(view: RunView) -> Standing:
    """What the ranks of the newest attempt do."""
    if _last_event(view) == "signal" and view.phase not in ("stopped", "finished"):
        return Standing("stopping", "asked to stop: to the next safe point, then a checkpoint")
    return PHASES.get(view.phase, _starting)(view)


def _starting(view: RunView) -> Standing:
    if _last_event(view) == "life":
        return Standing("starting", "looking which nodes are fit")
    if view.rates:
        return Standing("evaluating", "first completions, evaluation before training")
    up = view.phase in ("started", "resumed")
    return Standing("starting", "engines are up, first weights on their way" if up else "starting engines…")


def _filling(view: RunView) -> Standing:
    wanted = view.config.buffer.initial_completions
    size = int(number(view.progress.latest, "buffer/size", 0))
    return Standing("filling", f"filling the buffer {min(size, wanted)}/{wanted}")


def _finishing(view: RunView) -> Standing:
    rest = "writing the results" if view.tested else "final evaluation"
    return Standing("finishing", f"last step done, {rest}")


PHASES: dict[str, Callable[[RunView], Standing]] = {
    "filling": _filling,
    "training": lambda view: Standing("training", "training"),
    "finished": _finishing,
    "stopped": lambda view: Standing("stopping", f"stopped at step {view.progress.step}"),
}


def _with_silence(view: RunView, found: Standing) -> Standing:
    """The same, with a hint where all are silent for longer than any rank waits for another."""
    silence = view.silence or 0.0
    if silence < max(SILENT_SECONDS, view.config.exchange.deadline_seconds):
        return found
    words = f"{found.words}; no sign of life for {silence / 60:.0f} min: was it killed?"
    return Standing(found.state, words, f"tail {view.run.logs}/latest/*.log")


def _submit(view: RunView, job: str) -> str:
    """What submits the run again: as ``tools/submit.py`` noted it, or a guess for a script sent by hand."""
    if job in view.submissions:
        return view.submissions[job]
    lives = [str(event["nodes"]) for event in view.events if event["event"] == "life"]
    nodes = len(lives[-1].split(",")) if lives else "N"
    return f"python tools/submit.py --config {view.run.path} --nodes {nodes}"


def _last_event(view: RunView) -> str:
    """The last event that changed how the run stands."""
    kinds = (str(event["event"]) for event in reversed(view.events))
    return next((kind for kind in kinds if kind not in ASIDES), "")
