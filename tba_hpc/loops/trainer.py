"""The trainer's loop: publishes weights every k steps, collects sealed shards, samples groups, takes steps.

It must not know how weights travel, how the optimizer is sharded, how many ranks there are, or how a run
ends.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from dataclasses import KW_ONLY, InitVar, dataclass, replace

import numpy as np

from tba_hpc.config import Config
from tba_hpc.core import schedules
from tba_hpc.core.batch import with_reference_power
from tba_hpc.core.buffer import ReplayBuffer
from tba_hpc.core.ports import Learner, TrainerExchange
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
"""Pause between two checks of the exchange while the trainer waits."""

MARGIN_SECONDS = 30.0
"""Time reserved at the end of a job for leaving and requeueing, s, in addition to a step and a save."""


@dataclass
class Trainer:
    """The leading trainer's loop, from ``state`` (fresh or restored) to ``config.train.steps``.

    saved: state in the newest checkpoint. It may be older than ``state``, which has merged pending shards.
    elastic_leases: returns the leases of the present elastic searchers, by searcher. job_end: time at which
    the job ends, unix seconds.
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
    _last_arrival: float = 0.0  # of new completions, on the monotonic clock

    def __post_init__(self, saved: TrainerState) -> None:
        self.job_end += time.monotonic() - time.time()  # a changed system clock then does no harm
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
        """Train to the last step, and save. Returns True if it was reached, False if stopped before.

        Once the initial buffer is filled, and while shards keep arriving, the loop waits only with bounded
        staleness, a replay limit or a reset reference, or after a resume. New shards end any wait.
        ``ending`` continues after the last step.
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
        """Publish if that is due. Shards that arrived in the previous round belong to its sync."""
        self._update_reference()
        self._merge_arrived()
        if self.publish_if_due():
            self._merge_arrived()

    def publish_if_due(self) -> bool:
        """Begin to publish the current weights if that is due; return whether it began.

        It cannot begin during another round; call this again then.
        """
        if not self._schedule.due(self.step):
            return False
        with self._step_log.clock("publish"):
            publication = self._schedule.publication(self.step)
            started = self.exchange.publish(publication, self.learner.write_weights)
        self._schedule.note(publication, started=started)
        return started

    def _update_reference(self) -> None:
        """Make the policy the reference if that is due; evict what older references scored."""
        if self.freshness.update_reference(self.step) and self.freshness.reference == self.step:
            self.checkpoints.export_reference(self.step, self.learner)
            self.log_event("reset")
        self.state = self._merger.evict_stale(self.state)

    # --- Collect ---

    def _collect(self) -> bool:
        """Wait until the buffer has what the next step needs; False if the run must stop instead.

        Raises ExchangeError after a timeout without new shards if there is no searcher left to wait for.
        """
        with self._step_log.clock("wait"):
            since = time.monotonic()
            if self.freshness.starved(self.step):
                log.info("step %d waits for a new shard", self.step)
                self.log_event("waiting")
            while self.freshness.missing(self.step) and not self.stopping:
                if not self.publish_if_due():
                    self.exchange.gather()
                self._merge_arrived()
                self._saving.note()
                if time.monotonic() - max(since, self._last_arrival) > self._timeout:
                    self.freshness.exclude_unresponsive(self.step, self._timeout)
                    since = time.monotonic()
                time.sleep(DATA_CHECK_SECONDS)
        return not self.stopping

    def _merge_arrived(self) -> None:
        """Merge the shards that have arrived, evict what is stale, and note whether any completion was new.

        During the initial filling only a larger buffer counts as new, because completions that merely replace
        others of their prompt could arrive forever.
        """
        self.freshness.note_elastic_leases(self.elastic_leases)
        shards = self.exchange.collect()
        for shard in shards:
            self.freshness.arrive(shard, self.step)
        added, held, filling = self.state.added, len(self.buffer), self.freshness.filling(self.step)
        self.state = self._merger.merge(self.state, shards, sync=self._schedule.version)
        if len(self.buffer) > held if filling else self.state.added > added:
            self._last_arrival = time.monotonic()
            if filling:
                self.log_event("filling")
        self.state = self._merger.evict_stale(self.state)

    @property
    def _timeout(self) -> float:
        """Longest wait for shards, s; longer before the first, because ranks and engines may be starting."""
        launch = self.config.launch
        return launch.timeout_seconds if self._last_arrival else launch.start_seconds

    def poll(self) -> None:
        """Advance the exchange after the last step."""
        self.exchange.gather()

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
        """Compute log-probabilities under the current reference, to which the whole batch belongs."""
        with self._step_log.clock("reference"):
            return self.learner.reference_logprobs(batch, self.freshness.reference)

    # --- Learn ---

    def _learn(self, batch: TrajectoryBatch) -> None:
        """Take one optimizer step on the batch, and write its record."""
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
        """Save every ``checkpoint.every`` steps, except the last, which ``_save_last`` saves."""
        self._saving.note()
        if self._saving.due(self.step):
            with self._step_log.clock("checkpoint"):
                self._saving.save(self.state)

    def _save_last(self) -> None:
        """Save the last state. Raises DiskFullError if the disk stays full."""
        give_up = time.monotonic() + self.config.launch.disk_seconds
        self._saving.save_last(self.state, give_up=min(give_up, self.job_end - self._saving.seconds))

    def log_event(self, event: str) -> None:
        """Log an event of the run in the trainer's metrics; ``metric_table`` has the names."""
        self.metrics.log(state_event(event, self.state, self.buffer))
