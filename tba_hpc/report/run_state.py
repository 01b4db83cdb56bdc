"""Says what a run is doing, by its files and Slurm's view of its job, and which command comes next.

Reading the state is cheap: ``tba status`` does it once a second.
"""

from __future__ import annotations

import re
import shlex
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import datetime

from tba_hpc.config import is_elastic
from tba_hpc.report.attempts import Attempt, failures_in_a_row
from tba_hpc.report.data import RunData, series
from tba_hpc.report.digest import SearcherDigest
from tba_hpc.run.checkpoints import latest_checkpoint, step_of
from tba_hpc.run.directory import RunDir
from tba_hpc.run.events import resume_command
from tba_hpc.run.files import is_full
from tba_hpc.run.metrics import number, record_seconds
from tba_hpc.run.notes import rank_name
from tba_hpc.run.owners import Owner, holders, is_abandoned
from tba_hpc.run.slurm_queue import FORGOTTEN, NO_ANSWER, QUEUED, WITH_NODES, bracketed

SILENT_RUN_SECONDS = 600.0
"""Seconds of silence of all ranks after which a run may be dead. Engines may take this long to start."""

OVER = {"created", "stopped", "aborted", "failed", "refused", "gone", "finished"}
"""States of a run that does nothing more by itself."""

ELASTIC = "an elastic searcher (tba search RUN, or on Slurm tba submit --elastic RUN)"
"""Description of what a run without other searchers waits for, with the commands that start it."""

RANKS_WAIT = ", waiting for its ranks to end"
"""Words about a finished run whose ranks are still there."""

NEVER = re.compile(
    r"Partition(Time|Node)Limit|(Assoc|QOS)Max\w*Per(Job|Node)|DependencyNeverSatisfied|BadConstraints"
    r"|Invalid(Account|QOS)"
)
"""Pattern of Slurm's reasons for which a job stays in the queue until the job or a limit is changed."""

STANDSTILL_SECONDS, STANDSTILL_STEPS = 120.0, 10
"""A trainer stands still if it takes no step for this many seconds and for the time of this many steps."""

QUEUE_SECONDS = 10.0
"""Shortest pause between two queries to Slurm, in seconds."""

FRESH_SECONDS = 60.0
"""Shortest silence after which a searcher counts as stopped, in seconds. Nodes' clocks differ by less."""

QueueEntry = dict[str, str]
"""A component of a Slurm job; see ``run.slurm_queue.job_states``."""

Queue = Callable[[RunDir], list[QueueEntry]]
"""Function that asks Slurm for the components of a run's job; [] for a run that was never submitted."""


class RunMonitor(RunData):
    """Data of a run while it is running, with Slurm's view of its job.

    queue: function that asks Slurm. job: components of the run's job, as of the last query. elastic: owners
    (processes) of the elastic searchers that are present, by the searcher's index. abandoned: whether the
    launcher of a run without a job is gone. full: whether the file system of the run is full. saved: step of
    the newest checkpoint on disk, from which a resume begins; None without one. The trainer may have been
    killed before it could record that checkpoint.
    """

    def __init__(self, run: RunDir, queue: Queue = lambda _: []) -> None:
        super().__init__(run)
        self.job: list[QueueEntry] = []
        self.elastic: dict[int, Owner] = {}
        self.abandoned = self.full = False
        self.saved: int | None = None
        self._queue = queue
        self._asked = -QUEUE_SECONDS
        self._opened = time.time()

    def update(self) -> None:
        """Read what is new in the run directory. First ask Slurm, if the last query is QUEUE_SECONDS old."""
        if time.monotonic() - self._asked >= QUEUE_SECONDS:  # Slurm first, so that the files are newer
            self.job = self._queue(self.run)
            self.elastic = self._find_elastic()
            self.abandoned = not self.job and is_abandoned(self.run)
            self._asked = time.monotonic()  # counts from the answer, which may take long
        super().update()
        folder = latest_checkpoint(self.run)
        self.saved = step_of(folder) if folder else None
        self.full = is_full(self.run.path)

    def _find_elastic(self) -> dict[int, Owner]:
        names = {rank_name("searcher", index): index for index in self.config.launch.elastic_searchers}
        found = holders(self.run, names) if names else {}
        return {names[name]: found[name].owner for name in sorted(found)}

    @property
    def attempt(self) -> Attempt | None:
        """The newest attempt; None before the first."""
        return self.attempts[-1] if self.attempts else None

    @property
    def last_event(self) -> str:
        """Last event of a launcher or batch script that changed the run's state; empty before the first."""
        asides = {"unreachable", "unhealthy", "hung", "orphan"}
        kinds = (str(event["event"]) for event in reversed(self.events))
        return next((kind for kind in kinds if kind not in asides), "")

    @property
    def phase(self) -> str:
        """Phase of the newest attempt's trainer (see ``TrainerDigest``); empty before its first record."""
        trainer = self.trainer
        return trainer.phase if number(trainer.latest, "time", 0.0) >= self._begun else ""

    @property
    def step(self) -> int:
        """Number of optimizer steps done, without steps that an attempt which is starting will repeat."""
        starting = self.attempt and not self.phase and not self.finished
        return self.first_step if starting else super().step

    @property
    def first_step(self) -> int:
        """Step from which the newest attempt begins; while it starts, the step of the last checkpoint."""
        resumed = self.trainer.stretches[-1:] if self.phase else []
        return resumed[0].first if resumed else self.saved or 0

    @property
    def repeated(self) -> int:
        """Number of steps of earlier attempts that the newest one repeats."""
        earlier = [stretch.last for stretch in self.trainer.stretches[:-1]]
        last = max(earlier[-1:], default=0) if self.phase else self.trainer.step
        return max(0, last - self.first_step)

    @property
    def _begun(self) -> float:
        """Start of the newest attempt, unix seconds. Records from before it belong to other attempts.

        0 if the start is in the future, because a clock was set back: times then do not tell attempts apart.
        """
        start = self.attempt.start if self.attempt else 0.0
        return start if start <= time.time() + FRESH_SECONDS else 0.0

    @property
    def elapsed(self) -> float:
        """Duration of the newest attempt so far, in seconds; before any attempt, the age of this monitor."""
        if self.attempt is None:
            return time.time() - self._opened
        return max(0.0, (self.attempt.end or time.time()) - self.attempt.start)

    @property
    def eta(self) -> float | None:
        """Seconds that the remaining steps take at the current pace; None unless the run is training."""
        if self.phase != "training" or not (pace := self.step_seconds.latest):
            return None
        return pace * (self.config.train.steps - self.step)

    @property
    def silence(self) -> float | None:
        """Seconds since the last record or event of any rank or launcher; None before the first."""
        heard = max([self.newest, *(event["time"] for event in self.events[-1:])])
        return max(0.0, time.time() - heard) if heard else None

    @property
    def standstill(self) -> float:
        """Seconds since the trainer's last record, if it should have taken steps since; otherwise 0.

        It should have if it is training, its steps take far less time, and other ranks leave records.
        """
        quiet = time.time() - number(self.trainer.latest, "time", time.time())
        limit = max(STANDSTILL_SECONDS, STANDSTILL_STEPS * (self.step_seconds.latest or 0.0))
        alone = (self.silence or 0.0) < limit < quiet
        steps_left = self.phase == "training" and self.step < self.config.train.steps
        return quiet if steps_left and alone else 0.0

    @property
    def is_silent(self) -> bool:
        """True if all ranks, or the trainer alone, were silent for longer than ranks wait for each other."""
        launch, silence = self.config.launch, max(self.silence or 0.0, self.standstill)
        deserted = self.all_elastic and not self.elastic  # the trainer then waits longer
        longest = launch.elastic_seconds if deserted else launch.timeout_seconds
        return silence >= max(SILENT_RUN_SECONDS, longest)

    @property
    def checkpoint_age(self) -> float | None:
        """Seconds since the last checkpoint; None before the first, or if the trainer has not recorded it."""
        record = self.trainer.checkpoint
        saved = number(record, "time") if number(record, "step") == self.saved else None
        return None if saved is None else max(0.0, time.time() - saved)

    @property
    def rates(self) -> list[float]:
        """Tokens per second of each running searcher, without elastic searchers that have left."""
        silent = max(FRESH_SECONDS, 2 * record_seconds(self.config.launch.places))
        since = max(self._begun, time.time() - silent)
        arrivals = {i: self.elastic[i].since for i in self.searchers if i in self.elastic}
        there = [i for i in sorted(self.searchers) if not is_elastic(i) or i in self.elastic]
        newest = [(self.searchers[i].last, max(since, arrivals.get(i, 0.0))) for i in there]
        records = [last for last, first in newest if number(last, "time", 0.0) >= first]
        return series(records, "search/tokens_per_second")

    @property
    def engines(self) -> dict[int, SearcherDigest]:
        """Digests of the searchers whose engines have reported a stage since their start, by index.

        Elastic searchers count only if the run has no others.
        """
        begun = {index: self._begun for index in self.searchers if not is_elastic(index)}
        if self.all_elastic:
            begun = {index: owner.since for index, owner in self.elastic.items() if index in self.searchers}
        found = {index: self.searchers[index] for index in begun}
        return {i: digest for i, digest in found.items() if digest.stage and digest.stage_since >= begun[i]}

    @property
    def all_elastic(self) -> bool:
        """True if the run has no searchers of its own."""
        return self.config.launch.searchers == 0

    @property
    def engines_expected(self) -> int:
        """Number of engines that are to start."""
        return len(self.elastic) if self.all_elastic else self.config.launch.searchers

    @property
    def resume_command(self) -> str:
        """Command that resumes the run once it has ended."""
        return resume_command(self.run, self.all_events, job=self.job[0]["job"] if self.job else "")

    @property
    def tested(self) -> bool:
        """True if the final evaluation is complete."""
        return any(found.step == self.config.train.steps for found in self.evaluated("test"))


# --- In words ---


@dataclass(frozen=True, slots=True)
class RunState:
    """A run's state.

    state: a word for scripts: queued, requeued, suspended, starting, filling, evaluating, training,
    finishing, stopping, relaunching, or one of OVER. words: the state for people. command: what the user may
    type next; empty if nothing is needed.
    """

    state: str
    words: str
    command: str = ""

    @property
    def over(self) -> bool:
        """True if the run does nothing more by itself."""
        return self.state in OVER


def run_state(monitor: RunMonitor) -> RunState:
    """Return the run's state as of the monitor's last update."""
    if monitor.run.finished or monitor.last_event == "finished":
        ending = monitor.last_event == "start" and (monitor.silence or 0) < SILENT_RUN_SECONDS
        ranks = RANKS_WAIT if ending else ""
        return RunState("finished", f"finished at step {monitor.step}{ranks}", _report(monitor))
    job = job_of(monitor)
    states = {component["state"] for component in job}
    if states & QUEUED:
        return _in_the_queue(monitor, job)
    if states & {*WITH_NODES, NO_ANSWER}:
        return _with_hint(monitor, _in_a_job(monitor, job, states))
    return _after_a_job(monitor, job) if job else _without_a_job(monitor)


def _report(monitor: RunMonitor) -> str:
    """Return the command that shows the results."""
    return shlex.join(["tba", "report", str(monitor.run.path)])


def job_of(monitor: RunMonitor) -> list[QueueEntry]:
    """Return the components of the run's job; none if the job ended and the run then went on without it."""
    states, events = {component["state"] for component in monitor.job}, monitor.events
    if not monitor.job or not events or states & (QUEUED | WITH_NODES):
        return monitor.job
    last = events[-1]["job"]
    return monitor.job if last and _number(last) <= _number(monitor.job[0]["job"]) else []


def _number(job: str) -> int:
    """Return the number in a job's id; for a task of an array, the array's number."""
    return int(job.partition("_")[0])


def _in_the_queue(monitor: RunMonitor, job: list[QueueEntry]) -> RunState:
    queued = [component for component in job if component["state"] in QUEUED]
    waiting = next((component for component in queued if NEVER.match(component["reason"])), queued[0])
    reason, step = waiting["reason"], monitor.step
    held = "held" in reason.lower() or "hold" in reason.lower()
    command, why_not = f"scontrol release {waiting['job']}" if held else "", bracketed(reason)
    if NEVER.match(reason):
        command = shlex.join(["tba", "stop", str(monitor.run.path)])
        why_not += ": the job will never start unless a limit or a node changes; stop it, and submit it anew"
    if not _heard_of(monitor, job):
        return RunState("queued", f"queued{why_not}", command)
    why = monitor.attempt.why_requeued if monitor.attempt else "ended by Slurm"
    return RunState("requeued", f"{why}, back in the queue at step {step}{why_not}", command)


def _heard_of(monitor: RunMonitor, job: list[QueueEntry]) -> bool:
    """Return whether the job's batch script has logged an event."""
    return any(event["job"] == job[0]["job"] for event in monitor.events)


def _in_a_job(monitor: RunMonitor, job: list[QueueEntry], states: set[str]) -> RunState:
    """Return the state of a run whose job has nodes, or whose job Slurm cannot be asked about.

    states: Slurm's states of the job's components.
    """
    step, job_id = monitor.step, job[0]["job"]
    if not _heard_of(monitor, job):
        if job[0]["state"] == NO_ANSWER:
            return RunState("queued", f"submitted as job {job_id}, which squeue does not know here")
        return RunState("starting", f"job {job_id} has its nodes, no word from it yet")
    if "SUSPENDED" in states:
        return RunState("suspended", f"suspended by Slurm at step {step}")
    match monitor.last_event:
        case "failed":
            return RunState("relaunching", f"the ranks failed after step {step}, to be started again")
        case "stopped" | "requeue" if _started_since(job[0], monitor.events[-1]["time"]):
            return RunState("starting", f"job {job_id} has its nodes again, no word from it yet")
        case "stopped" | "requeue":
            return RunState("stopping", f"stopped at step {step}, leaving its nodes")
    return _at_work(monitor)


def _started_since(component: QueueEntry, moment: float) -> bool:
    """Return whether Slurm has started a job component after a moment, unix seconds."""
    try:
        return datetime.fromisoformat(component["start"]).timestamp() > moment
    except ValueError:  # Slurm says "N/A"
        return False


def _after_a_job(monitor: RunMonitor, job: list[QueueEntry]) -> RunState:
    job_id, state, heard = job[0]["job"], job[0]["state"], _heard_of(monitor, job)
    how = "" if state == FORGOTTEN else f" ({state.lower().replace('_', ' ')})"
    gone = RunState("gone", f"job {job_id} is gone{how}, the run is at step {monitor.step}")
    if monitor.full:  # no rank could record why it ended
        gone = replace(gone, words=f"{gone.words}; the disk is full")
    elif state == "FAILED" and not heard:
        gone = RunState("gone", f"job {job_id} failed without a word: do its nodes see {monitor.run.path}?")
    ended = _ended(monitor) if heard else None
    if heard and not ended and state == "COMPLETED":  # asked to stop before it had started ranks
        ended = RunState("stopped", f"stopped, as asked, at step {monitor.step}")
    return _with_next(monitor, ended or gone)


def _without_a_job(monitor: RunMonitor) -> RunState:
    if not monitor.events and not monitor.newest:
        return RunState("created", "not started yet", monitor.resume_command)
    ended = _ended(monitor) or _abandoned(monitor)
    return _with_next(monitor, ended) if ended else _with_hint(monitor, _at_work(monitor))


def _with_next(monitor: RunMonitor, ended: RunState) -> RunState:
    """Add the command that resumes the run, unless the state has another.

    After a refusal no command is added if the run has a copy of the user's code, because a resume would use
    the copy, not what the user has mended.
    """
    copy_refused = ended.state == "refused" and monitor.run.modules.is_dir()
    return ended if copy_refused or ended.command else replace(ended, command=monitor.resume_command)


def _ended(monitor: RunMonitor) -> RunState | None:
    """Return how the run ended according to its last event; None if that event ends nothing."""
    note, step = monitor.attempt.note if monitor.attempt else "", monitor.step
    match monitor.last_event:
        case "refused":
            return RunState("refused", note)
        case "stopped" if note:  # a replay without shards: typing the command again would change nothing
            return RunState("stopped", f"stopped at step {step}: {note}", _report(monitor))
        case "stopped":
            return RunState("stopped", f"stopped at step {step}")
        case "preempted":
            why = "its job was preempted, cancelled or out of time"
            return RunState(
                "stopped", f"stopped at step {step}, as {why}: unless that job is queued again, resume it"
            )
        case "changed":
            end = monitor.config.train.steps
            return RunState(
                "stopped",
                f"stopped at step {step}, its config or code changed: it will continue to step {end}",
            )
        case "aborted":
            return RunState("aborted", f"killed on request at step {step}; {_resumed_by(monitor)}")
        case "failed":
            count = failures_in_a_row(monitor.attempts)
            often = f" {count} times in a row" if count > 1 else ""
            words = f"gave up: the ranks failed{often}, {note}; see {monitor.run.logs}/latest"
            return RunState("failed", words)
    return None


def _abandoned(monitor: RunMonitor) -> RunState | None:
    """Return the state of a run whose launcher is gone without a last event; None for any other run."""
    found = f"killed at step {monitor.step}, or its machine was lost"
    words = f"{found}; {_resumed_by(monitor)}"
    return RunState("gone", words) if monitor.abandoned else None


def _resumed_by(monitor: RunMonitor) -> str:
    """Return a clause that says from which step, and by which command, the run goes on."""
    saved = monitor.saved is not None
    what = "to resume from the last checkpoint" if saved else "to start again from step 0"
    return f"{what}: {monitor.resume_command}"


def _at_work(monitor: RunMonitor) -> RunState:
    """Return the state of a run whose ranks are starting or at work."""
    step, phase, last = monitor.step, monitor.phase, monitor.last_event
    # Before the first phase, rates may be of elastic searchers that serve an earlier attempt.
    arrive = bool(phase) and any(monitor.rates)
    before = phase in ("", "started", "resumed", "filling") and not arrive
    if last == "signal" and phase not in ("stopped", "finished"):
        return RunState("stopping", "asked to stop: goes on to the next safe point, then writes a checkpoint")
    if before and (words := _engines(monitor)):
        return RunState("starting", words)
    match phase:
        case "filling":
            wanted = monitor.config.buffer.initial_completions
            size = int(number(monitor.trainer.latest, "buffer/size", 0))
            if size < wanted:
                return RunState("filling", f"filling the buffer {size}/{wanted}")
            since = number(monitor.trainer.latest, "time", time.time())
            words = f"the buffer is filled, first optimizer step ({_seconds_since(since)})"
            return RunState("filling", words)
        case "training":
            still = f", but no step has ended for {monitor.standstill / 60:.0f} min"
            return RunState("training", f"training{still if monitor.standstill else ''}")
        case "waiting" if monitor.all_elastic and not monitor.elastic:
            return RunState("training", f"training waits for {ELASTIC}")
        case "waiting":
            now = monitor.trainer.stretches[-1]
            why = "none came for a while" if now.last > now.first else "the first since the start"
            return RunState("training", f"training waits for completions: {why}")
        case "finished":
            rest = "writing the results" if monitor.tested else "final evaluation"
            return RunState("finishing", f"last step done, {rest}")
        case "stopped":
            return RunState("stopping", f"stopped at step {step}, waiting for the ranks to end")
    if last == "allocated":
        return RunState("starting", "checking which nodes answer")
    if arrive and phase == "resumed":
        return RunState("starting", f"first completions arrive: training resumes at step {step}")
    if arrive:
        return RunState("evaluating", "first completions arrive: evaluating before training")
    if monitor.all_elastic and not phase:
        where = "" if monitor.saved is None else f" (resuming at step {monitor.saved})"
        return RunState("starting", f"the trainer starts{where}")
    if monitor.all_elastic and not monitor.elastic:
        return RunState("starting", f"waiting for {ELASTIC}")
    if len(monitor.engines) < monitor.engines_expected:
        return RunState("starting", "starting ranks, which import their libraries")
    what = "the first weights and completions" if phase else "the trainer to load its model"
    since = max((digest.stage_since for digest in monitor.engines.values()), default=time.time())
    return RunState("starting", f"engines are up, waiting for {what} ({_seconds_since(since)})")


def _engines(monitor: RunMonitor) -> str:
    """Say how many engines are ready and what the slowest is doing; "" if all that report are ready."""
    waiting = [digest for digest in monitor.engines.values() if digest.stage != "ready"]
    if not waiting:
        return ""
    ready = len(monitor.engines) - len(waiting)
    first = min(waiting, key=lambda digest: digest.stage_since)
    seconds = _seconds_since(first.stage_since)
    return f"engines: {ready} of {monitor.engines_expected} ready ({first.stage}, {seconds})"


def _seconds_since(moment: float) -> str:
    """Say how long ago a moment was. moment: unix seconds, perhaps by another node's clock."""
    return f"{max(0.0, time.time() - moment):.0f} s"


def _with_hint(monitor: RunMonitor, found: RunState) -> RunState:
    """Add a hint to a state if ranks have been silent for too long, or if the disk lacks space."""
    if monitor.is_silent:
        heard = f"nothing heard for {(monitor.silence or 0) / 60:.0f} min: was it killed?"
        words = found.words if monitor.standstill else f"{found.words}; {heard}"
        return RunState(found.state, words, f"tail {shlex.quote(str(monitor.run.logs))}/latest/*.log")
    return replace(found, words="; ".join(filter(None, [found.words, _no_space(monitor)])))


def _no_space(monitor: RunMonitor) -> str:
    """Return a clause on the lack of space on the run's disk; "" if no lack is known.

    The trainer records until when it waits for space, but a full disk may have no room for this record. Each
    rank waits for up to ``launch.disk_seconds`` from its own first failure, and then ends the run. So if
    records have ceased for a shorter time, ranks probably wait. While new records come, no rank waits: some
    users, such as root, may write into reserved space.
    """
    postponed, now = monitor.trainer.postponed, time.time()
    postponed = postponed if number(postponed, "time", 0.0) >= monitor._begun else {}
    if (until := number(postponed, "until", 0.0)) > now:
        return f"the disk is full, and the trainer waits for space until {_clock(until)} at the latest"
    if monitor.full:
        launch, since = monitor.config.launch, max(monitor.newest or 0.0, monitor._begun) or now
        waiting = since + 2 * record_seconds(launch.places) < now < since + launch.disk_seconds
        each = f", and each rank waits for space for up to {launch.disk_seconds:g} s"
        return "the disk is full" + (each if waiting else "")
    return f"no space for the checkpoint of step {number(postponed, 'step', 0):.0f}" if postponed else ""


def _clock(moment: float) -> str:
    """Format unix seconds as a local time of day."""
    return time.strftime("%H:%M:%S", time.localtime(moment))
