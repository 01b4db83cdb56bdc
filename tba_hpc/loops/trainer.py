"""The trainer's loop: publishes weights every k steps, collects sealed shards, samples groups, takes steps.

This module must not know how weights travel, how the optimizer is sharded, how many ranks there are, or how a
run ends.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from dataclasses import KW_ONLY, InitVar, dataclass, field, replace

import numpy as np

from tba_hpc.config import Config
from tba_hpc.core import schedules
from tba_hpc.core.batch import with_reference_power
from tba_hpc.core.buffer import ReplayBuffer
from tba_hpc.core.ports import ExchangeError, Learner, TrainerExchange
from tba_hpc.core.prompts import CompletedRequests
from tba_hpc.core.types import TrajectoryBatch
from tba_hpc.loops.freshness import Freshness
from tba_hpc.loops.merger import Merger, state_event
from tba_hpc.loops.publish_schedule import PublishSchedule
from tba_hpc.loops.saving import Saving
from tba_hpc.loops.step_log import StepLog
from tba_hpc.run.checkpoints import Checkpoints, TrainerState
from tba_hpc.run.metrics import MetricsWriter

log = logging.getLogger(__name__)

DATA_CHECK_SECONDS = 0.02
"""Pause between two checks of the exchange while the trainer waits, in seconds."""

TELL_SECONDS, USUAL_STEPS = 10.0, 3
"""Shortest wait of a step about which the trainer logs an event: in seconds, and in usual steps."""

MARGIN_SECONDS = 30.0
"""Seconds kept at the end of a job for leaving and requeueing, in addition to a step and unfinished saves."""


@dataclass
class Trainer:
    """The leading trainer's loop, from ``state`` (fresh or restored) to ``config.train.steps``.

    saved: state in the newest checkpoint. ``state`` may be newer, because pending shards have been merged
    since. stop_asked: function that returns whether a signal has asked this process to stop. elastic_leases:
    function that returns the lease of each present elastic searcher, by searcher. job_end: time at which the
    job ends, unix seconds.
    """

    config: Config
    _: KW_ONLY
    learner: Learner
    exchange: TrainerExchange
    buffer: ReplayBuffer
    freshness: Freshness
    completed: CompletedRequests
    state: TrainerState
    saved: InitVar[TrainerState]
    checkpoints: Checkpoints
    metrics: MetricsWriter
    stop_asked: Callable[[], bool]
    elastic_leases: Callable[[], dict[int, int]] = dict
    job_end: float = math.inf
    _leases: dict[int, int] = field(default_factory=dict)  # of the elastic searchers that are present
    _last_arrival: float = 0.0  # when new completions arrived last, by the monotonic clock; 0: never

    def __post_init__(self, saved: TrainerState) -> None:
        self.job_end += time.monotonic() - time.time()  # now on the monotonic clock, which nobody sets
        self._merger = Merger(self.buffer, self.completed, self.freshness, self.metrics)
        self._schedule = PublishSchedule(self.config, self.freshness, self.state.step)
        self._step_log = StepLog(self.config.train, self.buffer, self.metrics, self._schedule)
        self._saving = Saving(
            self.config,
            self.checkpoints,
            self.learner,
            self.buffer,
            self.completed,
            self.metrics,
            saved=saved,
            last_step=self.state.step,
        )

    def run(self) -> bool:
        """Train to the last step, and save. Returns True if that step was taken, False if stopped before.

        Before a step, the loop waits for shards in three cases: the initial buffer is not filled yet; no
        shard has arrived since a resume, or for many steps; or, with bounded staleness, a replay limit or a
        reset reference, groups that the step may learn from are missing or overdue. New shards or a stop end
        a wait; see ``Freshness.missing``. Call ``ending.end_run`` next.
        """
        self._update_reference()  # even if no step is left to take
        self.freshness.begin(self.step, self.completed)
        while not self._finished and not self.stopping:
            self._publish()
            if not self._collect():
                break
            batch = self._sample()
            self._learn(batch)
            self._save()
        self._save_last()
        return self._finished

    @property
    def _finished(self) -> bool:
        return self.step >= self.config.train.steps

    @property
    def step(self) -> int:
        """Number of optimizer steps done."""
        return self.state.step

    @property
    def stopping(self) -> bool:
        """True if a stop was requested, or the job's time is nearly over."""
        return self.stop_asked() or self.exchange.stop_requested or self._is_late

    @property
    def _is_late(self) -> bool:
        saves = 2 if self._saving.under_way else 1
        needed = self._step_log.longest_step + saves * self._saving.seconds + MARGIN_SECONDS
        return self.job_end - time.monotonic() < needed

    # --- Publish ---

    def _publish(self) -> None:
        """Publish weights if that is due.

        Shards that have arrived are merged first, because they belong to the previous sync.
        """
        self._update_reference()
        self._merge_arrived()
        if self.publish_if_due():
            self._merge_arrived()

    def publish_if_due(self) -> bool:
        """Begin to publish the current weights if that is due; return whether the publication has begun.

        It cannot begin while another round of the exchange is in progress. It then stays due.
        """
        if not self._schedule.due(self.step):
            return False
        with self._step_log.clock("publish"):
            publication = self._schedule.publication(self.step)
            started = self.exchange.publish(publication, self.learner.write_weights)
        self._schedule.note(publication, started=started)
        return started

    def _update_reference(self) -> None:
        """Make the policy the reference if that is due; evict what is stale or used up by now.

        If the reference changes, all trajectories that an older one scored are stale.
        """
        if self.freshness.update_reference(self.step) and self.freshness.reference == self.step:
            self.checkpoints.export_reference(self.step, self.learner)
            self.log_event("reset")
        self.state = self._merger.evict_stale(self.state)

    # --- Collect ---

    def _collect(self) -> bool:
        """Wait until the buffer has what the next step needs. Returns False if the run must stop instead.

        Raises ExchangeError after a timeout without new shards, unless staleness is bounded and there are
        other searchers to wait for. The state is then saved.
        """
        with self._step_log.clock("wait"):
            since = present = time.monotonic()
            told = False
            while self.freshness.missing(self.step) and not self.stopping:
                told = told or self._tell_of_wait(time.monotonic() - max(since, self._last_arrival))
                if not self.publish_if_due():
                    self.exchange.gather()
                self._merge_arrived()
                self._saving.note()
                now, heard = time.monotonic(), max(since, self._last_arrival)
                if self._deserted:
                    present = now  # for a searcher that comes back the timeout begins anew
                waited = now - max(heard, present)
                if waited > self._timeout or now - heard > self._longest_absence:
                    self._give_up_on_silent(now - heard)
                    since = now
                time.sleep(DATA_CHECK_SECONDS)
        return not self.stopping

    @property
    def _deserted(self) -> bool:
        """True if all searchers of the run are elastic, and none is present: they may have been preempted."""
        return not self.config.launch.searchers and not self._leases

    @property
    def _longest_absence(self) -> float:
        """Maximum wait for a shard while the run is ``_deserted``, in seconds; otherwise infinite."""
        return self.config.launch.elastic_seconds if self._deserted else math.inf

    def _tell_of_wait(self, seconds: float) -> bool:
        """Log that the step waits, if that is worth an event; return whether it was logged.

        It is not while engines start or the initial buffer is filling. seconds: duration of the wait so far.
        """
        usual = max(TELL_SECONDS, USUAL_STEPS * self.state.train_seconds / max(1, self.step))
        begun = self.step or (self._last_arrival and not self.freshness.filling(0))
        if not begun or not (seconds > usual or self.freshness.starved(self.step)):
            return False
        log.info("step %d waits for new completions", self.step)
        self.log_event("waiting")
        return True

    def _give_up_on_silent(self, seconds: float) -> None:
        """Exclude the searchers that owe answers for ``seconds``. If no others are left, save and raise.

        Without a save the next attempt would repeat the steps since the last checkpoint.
        """
        try:
            self.freshness.exclude_unresponsive(self.step, seconds)
        except ExchangeError:
            if self.step > self._saving.last_step:
                try:
                    self._save_last()
                except Exception:  # what ends the run is the silence
                    log.exception("the state of step %d could not be saved", self.step)
            raise

    def _merge_arrived(self) -> None:
        """Merge the shards that have arrived, evict what is stale, and note the time of the last arrival.

        While the initial buffer is filling, only shards by which the buffer grows count as arrivals, because
        completions that replace equal ones could arrive forever.
        """
        self._leases = self.elastic_leases()
        self.freshness.note_elastic_leases(self._leases)
        shards = self.exchange.collect()
        for shard in shards:
            self.freshness.arrive(shard, self.step)
        added, held, filling = self.state.added, len(self.buffer), self.freshness.filling(self.step)
        self.state = self._merger.merge(self.state, shards, sync=self._schedule.version)
        if len(self.buffer) > held if filling else self.state.added > added:
            if not self._last_arrival:
                self._step_log.clock.reset()  # the first step begins now: until here engines were starting
            self._last_arrival = time.monotonic()
            if filling:
                self.log_event("filling")
        self.state = self._merger.evict_stale(self.state)

    @property
    def _timeout(self) -> float:
        """Maximum wait for a shard, in seconds. Longer for the first shard, since engines may be starting."""
        launch = self.config.launch
        return launch.timeout_seconds if self._last_arrival else launch.start_seconds

    # --- Sample ---

    def _sample(self) -> TrajectoryBatch:
        train = self.config.train
        return self.buffer.sample(
            self.step,
            groups=train.prompts_per_step,
            group_size=train.completions_per_prompt,
            reference=self._reference_logprobs if train.trainer_has_reference else None,
        )

    def _reference_logprobs(self, batch: TrajectoryBatch) -> np.ndarray:
        """Return log π_ref of all completion tokens of a batch, float32 [T], under the current reference."""
        with self._step_log.clock("reference"):
            return self.learner.reference_logprobs(batch, self.freshness.reference)

    # --- Learn ---

    def _learn(self, batch: TrajectoryBatch) -> None:
        """Take one optimizer step on the batch, and write a line of metrics about it."""
        train, step = self.config.train, self.step
        with self._step_log.clock("learn"):
            learned = self.learner.step(
                with_reference_power(batch, schedules.reference_power(train, step)),
                learning_rate=schedules.learning_rate(train, step),
                beta=schedules.beta(train, step),
            )
        seconds = self._step_log.write(step, batch, learned)
        self.state = replace(self.state, step=step + 1, train_seconds=self.state.train_seconds + seconds)

    # --- Save ---

    def _save(self) -> None:
        """Begin a save if one is due at this step (``Saving.due``). ``_save_last`` saves the last step."""
        self._saving.note()
        if self._saving.due(self.step):
            with self._step_log.clock("checkpoint"):
                self._saving.save(self.state)

    def _save_last(self) -> None:
        """Save the last state, and wait until it is on disk. Raises DiskFullError if the disk stays full."""
        give_up = time.monotonic() + self.config.launch.disk_seconds
        self._saving.save_last(self.state, give_up=min(give_up, self.job_end - self._saving.seconds))

    def log_event(self, event: str) -> None:
        """Log an event of the run in the trainer's metrics; ``run.metric_table`` lists the events."""
        self.metrics.log(state_event(event, self.state, self.buffer))
