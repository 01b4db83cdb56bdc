"""The trainer: publishes weights every k steps, collects sealed shards, samples groups, and takes steps.

It must not know how weights travel, how the optimizer is sharded, how many ranks there are, how a run ends.
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
from tba_hpc.core.ports import Learner, TrainerExchange
from tba_hpc.core.prompts import CompletedRequests
from tba_hpc.core.types import Publication, Split, TrajectoryBatch
from tba_hpc.loops.freshness import Freshness
from tba_hpc.loops.merger import Merger, state_event
from tba_hpc.loops.saving import Saving
from tba_hpc.loops.step_log import StepLog
from tba_hpc.run.checkpoints import Checkpoints, TrainerState
from tba_hpc.run.metrics import MetricsWriter

log = logging.getLogger(__name__)

POLL_SECONDS = 0.02
"""Pause between two checks of the exchange while the trainer waits."""

MARGIN_SECONDS = 30.0
"""Time kept free before the job ends, besides a step and a save, for leaving and for the requeue."""


@dataclass
class Trainer:
    """The leading trainer's loop, from ``state`` (fresh or restored) to ``config.train.steps``.

    saved: state in the newest checkpoint. It may be older than ``state``, which has merged pending shards.
    visitors: returns the numbers of the elastic searchers at work. replays: see Freshness. job_end: time of
    the job's end, unix seconds.
    """

    config: Config
    _: KW_ONLY
    learner: Learner
    exchange: TrainerExchange
    buffer: ReplayBuffer
    completed: CompletedRequests
    state: TrainerState
    saved: InitVar[TrainerState]
    checkpoints: Checkpoints
    metrics: MetricsWriter
    stop_asked: Callable[[], bool]
    visitors: Callable[[], set[int]] = set
    replays: bool = False
    job_end: float = math.inf
    _last_arrival: float = 0.0  # of new completions, on the monotonic clock
    _published: Publication | None = None  # published with the current weights of the searchers
    _put_off: bool = False
    _evaluated: int = field(init=False)  # step of the last evaluation, or the attempt's first step

    def __post_init__(self, saved: TrainerState) -> None:
        self.job_end += time.monotonic() - time.time()  # a changed system clock then does no harm
        self._evaluated = self.state.step
        self._freshness = Freshness(self.config, self.buffer, replays=self.replays)
        self._merger = Merger(self.buffer, self.completed, self._freshness, self.metrics)
        self._step_log = StepLog(self.config.train, self.buffer, self.metrics, version=self.state.step)
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
        """Train to the last step; True if it is reached, False if stopped before. Either way all is saved.

        Consumes shards. Produces weights, references, checkpoints and metrics. After the initial buffer is
        filled it does not wait while shards keep arriving. Exceptions are bounded staleness or uses, a reset
        reference and a resume. The searchers' shards end every wait. For what follows the last step see
        ``ending``.
        """
        self._update_reference()  # even if no step is left to take
        self._freshness.begin(self.step, self.completed)
        while not self._finished and not self.stopping:
            self._update_reference()
            self._collect()  # shards of the previous round belong to its sync
            if self._publish_if_due():
                self._collect()
            if not self._wait_for_data():
                break
            batch = self._sample()
            self._learn(batch)
            self._save_if_due()
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

    @property
    def _publish_is_due(self) -> bool:
        """True every k steps; at once for a new reference, or if searchers need a larger budget to go on."""
        return (
            self._published is None
            or self._put_off
            or self.step >= self._published.version + self.config.exchange.sync_every
            or self._freshness.reference != self._published.reference
            or self._freshness.exhausted(self.step)
        )

    def _publish_if_due(self) -> bool:
        """Publish if that is due, and return whether it began; it is put off while a round is under way."""
        return self._publish_is_due and self.publish(evaluate=self._split_to_evaluate)

    def publish(self, *, evaluate: Split | None) -> bool:
        """Begin to publish the current weights; False while a round is under way, to be tried again later."""
        with self._step_log.clock("publish"):
            publication = self._freshness.publication(self.step, evaluate=evaluate, published=time.time())
            started = self.exchange.publish(publication, self.learner.write_weights)
        self._put_off = not started  # the budget already counts on what it grants
        if started:
            self._published = publication
            self._evaluated = self.step if evaluate else self._evaluated
            self._step_log.published(self.step)
        return started

    @property
    def _split_to_evaluate(self) -> Split | None:
        """Split to evaluate now: test before training, then validation every ``evaluate.every`` steps."""
        every = self.config.evaluate.every
        if self._published is None:
            return "test" if self.step == 0 else None
        return "validation" if self.step // every > self._evaluated // every else None

    def _update_reference(self) -> None:
        """Make the policy the reference if that is due; evict what older references scored."""
        if self._freshness.update_reference(self.step) and self._freshness.reference == self.step:
            self.checkpoints.export_reference(self.step, self.learner)
            self.log_event("reset")
        self.state = self._merger.evict_stale(self.state)

    # --- Collect ---

    def _collect(self) -> None:
        """Merge the shards that have arrived, evict what is stale, and note whether any completion was new.

        During the initial filling only a larger buffer counts as new. Completions may just push out others
        of their prompt, and would do so for ever if the other prompts have no more.
        """
        self._freshness.note_visitors(self.visitors)
        shards = self.exchange.collect()
        for shard in shards:
            self._freshness.arrive(shard, self.step)
        added, held, filling = self.state.added, len(self.buffer), self._freshness.filling(self.step)
        self.state = self._merger.merge(self.state, shards, sync=self._step_log.version)
        if len(self.buffer) > held if filling else self.state.added > added:
            self._last_arrival = time.monotonic()
            if filling:
                self.log_event("filling")
        self.state = self._merger.evict_stale(self.state)

    def _wait_for_data(self) -> bool:
        """Wait until the buffer has what the next step needs; False if the run must stop instead.

        Raises ExchangeError after a timeout without new shards if there is no searcher left to wait for.
        """
        with self._step_log.clock("wait"):
            since = time.monotonic()
            if self._freshness.starved(self.step):
                log.info("step %d waits for a new shard", self.step)
                self.log_event("waiting")
            while self._freshness.missing(self.step) and not self.stopping:
                if not self._publish_if_due():
                    self.exchange.gather()
                self._collect()
                self._saving.note()
                if time.monotonic() - max(since, self._last_arrival) > self._timeout:
                    self._freshness.exclude_unresponsive(self.step, self._timeout)
                    since = time.monotonic()
                time.sleep(POLL_SECONDS)
        self._step_log.late += self._publish_is_due
        return not self.stopping

    @property
    def _timeout(self) -> float:
        """Seconds to wait for shards; longer before the first, as ranks and engines may still be starting."""
        launch = self.config.launch
        return launch.timeout_seconds if self._last_arrival else launch.start_seconds

    def poll(self) -> None:
        """Keep the exchange going after the last step."""
        self.exchange.gather()

    # --- Sample, step, checkpoint ---

    def _sample(self) -> TrajectoryBatch:
        train = self.config.train
        return self.buffer.sample(
            self.step,
            groups=train.prompts_per_step,
            group_size=train.completions_per_prompt,
            reference=self._reference_logprobs if train.trainer_has_reference else None,
        )

    def _reference_logprobs(self, batch: TrajectoryBatch) -> np.ndarray:
        """Compute logprobs under the current reference, which is the right one for the whole batch."""
        with self._step_log.clock("reference"):
            return self.learner.reference_logprobs(batch, self._freshness.reference)

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

    def _save_if_due(self) -> None:
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
