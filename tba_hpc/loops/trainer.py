"""The trainer: every k steps publish weights; collect what searchers sealed; sample groups; take a step.

It must not know how weights travel, how the optimizer is sharded, how many ranks there are, how a run ends.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from tba_hpc.config import Config
from tba_hpc.config.variants import EmaReference
from tba_hpc.core import schedules
from tba_hpc.core.batch import with_reference_power
from tba_hpc.core.buffer import ReplayBuffer
from tba_hpc.core.ports import Learner, TrainerExchange
from tba_hpc.core.prompts import CompletedRequests
from tba_hpc.core.types import Publication, Shard, Split, TrajectoryBatch
from tba_hpc.loops.freshness import Freshness
from tba_hpc.loops.merger import Merger, state_event
from tba_hpc.loops.saving import Saving
from tba_hpc.loops.step_log import StepLog
from tba_hpc.run.checkpoints import Checkpoints, TrainerState
from tba_hpc.run.metrics import MetricsWriter

log = logging.getLogger(__name__)

POLL_SECONDS = 0.02
"""Pause between two looks at the exchange while the trainer has nothing else to do."""

MARGIN_SECONDS = 30.0
"""Kept free before the end of the job, beside a step and a save: to leave, and to go back to the queue."""


class Trainer:
    """The leading trainer's loop, from ``state`` (fresh or restored) to ``config.train.steps``.

    saved: what the newest checkpoint holds; ``merger.merge_pending`` may lie between. job_end: when the job's
    time is over, unix seconds.
    """

    def __init__(
        self,
        config: Config,
        *,
        learner: Learner,
        exchange: TrainerExchange,
        buffer: ReplayBuffer,
        completed: CompletedRequests,
        state: TrainerState,
        saved: TrainerState,
        checkpoints: Checkpoints,
        metrics: MetricsWriter,
        stop_asked: Callable[[], bool],
        job_end: float = math.inf,
    ) -> None:
        self._config = config
        self._learner = learner
        self._exchange = exchange
        self._buffer = buffer
        self._completed = completed
        self._state = state
        self._checkpoints = checkpoints
        self._metrics = metrics
        self._stop_asked = stop_asked
        self._job_end = time.monotonic() + job_end - time.time()  # whatever the clock is set to meanwhile
        self._freshness = Freshness(config, buffer)
        self._merger = Merger(config, buffer, completed, self._freshness, metrics)
        self._step_log = StepLog(config.train, buffer, metrics, version=state.step)
        self._last_arrival = 0.0  # of completions that were new, on the monotonic clock
        self._published: Publication | None = None  # with the weights that searchers have
        self._put_off = False
        self._evaluated = state.step  # by the weights of which step, or the attempt's first one
        self._saving = Saving(
            config,
            checkpoints,
            saved=saved,
            step=state.step,
            learner=learner,
            buffer=buffer,
            completed=completed,
            metrics=metrics,
        )

    def run(self) -> bool:
        """Train to the last step; True when it was reached, False when stopped before. All is saved then.

        Consumes shards. Produces weights, references, checkpoints, metrics. Once the initial buffer is there
        it waits for nothing while shards come, unless staleness or uses are bounded or the reference was
        reset; all waits are unblocked by the searchers' shards. What comes after the last step: see
        ``ending``.
        """
        self._begin()
        while not self._finished and not self.stopping:
            self._update_reference()
            self._collect()  # what the round before has brought belongs to its sync
            if self._publish_if_due():
                self._collect()
            with self._step_log.clock("wait"):
                ready = self._wait_for_groups()
            if not ready:
                break
            batch = self._sample()
            learned = self._step(batch)
            self._log_step(batch, learned)
            self._save_if_due()
        self._save_last()
        return self._finished

    def _begin(self) -> None:
        """Publish the weights of the first step, or of the checkpoint."""
        self._update_reference()
        self._freshness.begin(self._state.step, self._completed)
        self._publish_if_due()

    @property
    def _finished(self) -> bool:
        return self._state.step >= self._config.train.steps

    @property
    def step(self) -> int:
        """Optimizer steps done."""
        return self._state.step

    @property
    def stopping(self) -> bool:
        """Whether a stop was asked for, or the job's time is nearly over."""
        return self._stop_asked() or self._exchange.stop_requested or self._is_late

    @property
    def _is_late(self) -> bool:
        left, saves = self._job_end - time.monotonic(), 2 if self._saving.under_way else 1
        save_seconds = saves * self._saving.seconds
        return is_late(left, step_seconds=self._step_log.longest_step, save_seconds=save_seconds)

    # --- Publish ---

    def publish(self, *, evaluate: Split | None) -> bool:
        """Publish the current weights; False, and try again later, while a round is under way."""
        step = self._state.step
        with self._step_log.clock("publish"):
            publication = self._freshness.publication(step, evaluate=evaluate, published=time.time())
            started = self._exchange.publish(publication, self._learner.write_weights)
        self._put_off = not started  # what it allows searchers is counted on
        if started:
            self._published = publication
            self._evaluated = step if evaluate else self._evaluated
            self._step_log.published(step)
        return started

    def _publish_if_due(self) -> bool:
        """Whether a publish has begun; one that finds the round before under way is put off."""
        return self._publish_is_due and self.publish(evaluate=self._split_to_evaluate)

    @property
    def _publish_is_due(self) -> bool:
        """Every k steps; at once for another reference, or where searchers need a larger budget to go on."""
        step, published = self._state.step, self._published
        return (
            published is None
            or self._put_off
            or step >= published.version + self._config.exchange.sync_every
            or self._freshness.reference != published.reference
            or self._freshness.exhausted(step)
        )

    @property
    def _split_to_evaluate(self) -> Split | None:
        """With the weights of this step: the test before training, then validation every so many steps."""
        step, every = self._state.step, self._config.evaluate.every
        if self._published is None:
            return "test" if step == 0 else None
        return "validation" if step // every > self._evaluated // every else None

    def _update_reference(self) -> None:
        """Searchers hear at once of another reference, with its weights; what older ones scored is stale."""
        step = self._state.step
        if self._freshness.update_reference(step) and self._freshness.reference == step:
            self._checkpoints.export_reference(step, self._learner)
            self.log_event("reset")
        self._state = self._merger.evict_stale(self._state)

    # --- Collect ---

    def _collect(self) -> None:
        """Merge what has arrived, less what is stale."""
        shards = self._exchange.collect()
        for shard in shards:
            self._freshness.arrive(shard, self._state.step)
        if self._merge(shards):
            self._last_arrival = time.monotonic()
            if self._freshness.filling(self._state.step):
                self.log_event("filling")

    def _merge(self, shards: Sequence[Shard]) -> int:
        """Returns how many completions were new; while the buffer first fills, how many it has more.

        Some may only push out others of their prompt, for ever where the rest of the prompts has no more.
        """
        before, held = self._state.added, len(self._buffer)
        self._state = self._merger.merge(self._state, shards, sync=self._step_log.version)
        filling = self._freshness.filling(self._state.step)
        more = len(self._buffer) - held if filling else self._state.added - before
        self._state = self._merger.evict_stale(self._state)
        return more

    def _wait_for_groups(self) -> bool:
        """Wait until the buffer has what the next step needs; False where the run is to stop instead.

        Raises ExchangeError where a whole deadline has passed without news, and nobody is left to wait for.
        """
        waiting_since = time.monotonic()
        if self._freshness.starved(self._state.step):
            log.info("step %d waits for data: no shard has come for too many steps", self._state.step)
            self.log_event("waiting")
        while self._freshness.missing(self._state.step) and not self.stopping:
            if not self._publish_if_due():
                self._exchange.gather()
            self._collect()
            self._saving.note()
            patience = self._patience
            if time.monotonic() - max(waiting_since, self._last_arrival) > patience:
                self._freshness.exclude_unresponsive(self._state.step, patience)
                waiting_since = time.monotonic()
            time.sleep(POLL_SECONDS)
        self._step_log.late += self._publish_is_due
        return not self.stopping

    @property
    def _patience(self) -> float:
        """Seconds to wait for shards: before the first, ranks and engines may still be starting."""
        launch = self._config.launch
        return launch.timeout_seconds if self._last_arrival else launch.start_seconds

    def poll(self) -> None:
        """Keep the exchange going while nothing is left to learn."""
        self._exchange.gather()

    # --- Sample, step, checkpoint ---

    def _sample(self) -> TrajectoryBatch:
        train = self._config.train
        batch = self._buffer.sample(
            self._state.step,
            groups=train.prompts_per_step,
            group_size=train.completions_per_prompt,
            reference=self._reference_logprobs if train.trainer_has_reference else None,
        )
        if not isinstance(train.reference, EmaReference):
            return batch
        return replace(batch, ref_logprobs=self._reference_logprobs(batch))  # it moves with every step

    def _reference_logprobs(self, batch: TrajectoryBatch) -> np.ndarray:
        """Under the reference in force, which all of the batch is for."""
        with self._step_log.clock("reference"):
            return self._learner.reference_logprobs(batch, self._freshness.reference)

    def _step(self, batch: TrajectoryBatch) -> Mapping[str, float]:
        """One optimizer step on the batch; the state moves on by one step."""
        train, step = self._config.train, self._state.step
        with self._step_log.clock("learn"):
            learned = self._learner.step(
                with_reference_power(batch, schedules.reference_power(train, step)),
                learning_rate=schedules.learning_rate(train, step),
                beta=schedules.beta(train, step),
            )
        self._state = replace(self._state, step=step + 1)
        return learned

    def _save_if_due(self) -> None:
        self._saving.note()
        if self._saving.due(self._state.step):
            with self._step_log.clock("checkpoint"):
                self._saving.save(self._state)

    def _save_last(self) -> None:
        """Raises DiskFullError where the disk stays full."""
        patience = self._config.launch.disk_seconds
        give_up = min(time.monotonic() + patience, self._job_end - self._saving.seconds)
        self._saving.save_last(self._state, give_up=give_up)

    def _log_step(self, batch: TrajectoryBatch, learned: Mapping[str, float]) -> None:
        seconds = self._step_log.write(self._state.step - 1, batch, learned)
        self._state = replace(self._state, train_seconds=self._state.train_seconds + seconds)

    def log_event(self, event: str) -> None:
        """Leave an event of the run in the trainer's metrics; see ``metrics`` for their names."""
        self._metrics.log(state_event(event, self._state, self._buffer))


def is_late(left: float, *, step_seconds: float, save_seconds: float) -> bool:
    """Whether ``left`` seconds are too few for one more step and a save after it."""
    return left < step_seconds + save_seconds + MARGIN_SECONDS
