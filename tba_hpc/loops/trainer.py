"""The trainer: every k steps publish weights; collect what searchers sealed; sample groups; take a step.

It must not know how weights travel, how the optimizer is sharded, how many ranks there are, how a run ends.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import replace
from functools import partial

import numpy as np

from tba_hpc.config import Config
from tba_hpc.config.variants import EmaReference
from tba_hpc.core import schedules
from tba_hpc.core.batch import with_reference_power
from tba_hpc.core.buffer import ReplayBuffer
from tba_hpc.core.ports import Learner, TrainerExchange
from tba_hpc.core.prompts import CompletedRequests
from tba_hpc.core.types import Shard, Split, TrajectoryBatch
from tba_hpc.loops.freshness import Freshness
from tba_hpc.loops.merger import Merger, state_event
from tba_hpc.loops.step_log import StepLog
from tba_hpc.run.checkpoints import (
    BUFFER_FILE,
    PROMPTS_FILE,
    Arrays,
    Checkpoints,
    TrainerState,
)
from tba_hpc.run.files import AGAIN_SECONDS, DiskFullError
from tba_hpc.run.metrics import MetricsWriter, Value

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
        self._state, self._saved = state, saved
        self._checkpoints = checkpoints
        self._metrics = metrics
        self._stop_asked = stop_asked
        self._job_end = time.monotonic() + job_end - time.time()  # whatever the clock is set to meanwhile
        self._freshness = Freshness(config, buffer)
        self._merger = Merger(config, buffer, completed, self._freshness, metrics)
        self._step_log = StepLog(config.train, buffer, metrics, version=state.step)
        self._last_arrival = 0.0  # of completions that were new, on the monotonic clock
        self._next_publish = state.step
        self._next_evaluation = _next_multiple(config.evaluate.every, state.step)
        self._next_checkpoint = _next_multiple(config.checkpoint.every, state.step)
        self._under_way: Future[TrainerState] | None = None  # a checkpoint that is being written
        self._to_log: dict[str, Value] = {}  # its event
        self._no_room: DiskFullError | None = None  # for the last one

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
            self._publish_if_due()
            self._collect()
            with self._step_log.clock("wait"):
                ready = self._wait_for_groups()
            if not ready:
                break
            batch = self._sample()
            learned = self._step(batch)
            self._log_step(batch, learned)
            self._checkpoint_if_due()
        self._save_last()
        return self._finished

    def _begin(self) -> None:
        """Publish the weights to begin with."""
        self._update_reference()
        self._freshness.begin(self._state.step, self._completed)
        self.publish(evaluate="test" if self._state.step == 0 else None)

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
        left, saves = self._job_end - time.monotonic(), 2 if self._under_way else 1
        save_seconds = saves * self._state.save_seconds
        return is_late(left, step_seconds=self._step_log.longest_step, save_seconds=save_seconds)

    # --- Publish ---

    def publish(self, *, evaluate: Split | None) -> bool:
        """Publish the current weights; False, and try again later, while a round is under way."""
        step = self._state.step
        with self._step_log.clock("publish"):
            publication = self._freshness.publication(step, evaluate=evaluate, published=time.time())
            started = self._exchange.publish(publication, self._learner.write_weights)
        if started:
            self._step_log.published(step)
            self._next_publish = step + self._config.exchange.sync_every
        return started

    def _publish_if_due(self) -> bool:
        """Every k steps; one that finds the round before under way is put off. Whether one has begun."""
        step = self._state.step
        if not self._publish_is_due:
            return False
        self._collect()  # what the round before has brought belongs to its sync
        evaluate: Split | None = "validation" if step >= self._next_evaluation else None
        started = self.publish(evaluate=evaluate)
        if started and evaluate:
            self._next_evaluation = _next_multiple(self._config.evaluate.every, step)
        return started

    @property
    def _publish_is_due(self) -> bool:
        return self._state.step >= self._next_publish

    def _update_reference(self) -> None:
        """Searchers hear at once of another reference, with its weights; what older ones scored is stale."""
        step = self._state.step
        if self._freshness.update_reference(step):
            if self._freshness.reference == step:
                self._checkpoints.export_reference(step, self._learner)
                self.log_event("reset")
            self._next_publish = step
        self._state = self._merger.evict_stale(self._state)

    # --- Collect ---

    def _collect(self) -> None:
        """Merge what has arrived, less what is stale."""
        self._log_losses()
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
            if self._freshness.exhausted(self._state.step):
                self._next_publish = self._state.step  # with a larger budget
            if not self._publish_if_due():
                self._exchange.gather()
            self._collect()
            self._note_checkpoint()
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
        config, at_work = self._config, self._config.exchange.deadline_seconds
        if self._last_arrival:
            return at_work
        return max(at_work, config.launch.start_deadline_seconds, config.generator.start_seconds)

    def poll(self) -> bool:
        """Keep the exchange going while nothing is left to learn; whether a searcher was lost."""
        self._exchange.gather()
        return self._log_losses()

    def _log_losses(self) -> bool:
        lost = self._exchange.lost()
        for searcher, host in lost:
            log.warning("searcher %d on %s died: the run goes on without it; see its log", searcher, host)
            step = self._state.step
            self._metrics.log({"event": "lost", "step": step, "searcher": searcher, "host": host})
            self._freshness.exclude_dead(searcher, host)
        return bool(lost)

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

    def _checkpoint_if_due(self) -> None:
        """Every so many steps; one that finds the one before under way is put off until that is complete."""
        self._note_checkpoint()
        if self._state.step >= self._next_checkpoint and not self._under_way and not self._finished:
            self._checkpoint()

    def _checkpoint(self) -> None:
        """Copy what a checkpoint holds; it is written beside the next steps, or now: see ``Checkpoints``."""
        with self._step_log.clock("checkpoint"):
            self._to_log = self._event("checkpoint")
            if self._checkpoints.beside:
                self.log_event("snapshot")
            files: dict[str, Callable[[], Arrays]] = {
                BUFFER_FILE: self._buffer.snapshot().arrays,
                PROMPTS_FILE: partial(dict, done=self._completed.to_array()),
            }
            self._under_way = self._checkpoints.save(
                self._state,
                self._learner,
                files,
                records=self._metrics.sync,  # what the checkpoint counts is on record before it is
            )
        self._next_checkpoint = _next_multiple(self._config.checkpoint.every, self._state.step)
        self._note_checkpoint()

    def _note_checkpoint(self) -> None:
        """Tell of the checkpoint under way once it is complete. Raises what kept it from that.

        But for a full disk: the next is tried in its turn.
        """
        if not self._under_way or not self._under_way.done():
            return
        under_way, self._under_way = self._under_way, None
        try:
            self._saved = under_way.result()
        except DiskFullError as error:
            self._postpone(error)
        else:
            self._state = replace(self._state, save_seconds=self._saved.save_seconds)
            self._metrics.log(self._to_log)

    def _postpone(self, error: DiskFullError) -> None:
        """Go on without the checkpoint that there was no room for: to end would lose what it would hold."""
        self._no_room = error
        fault = str(error).partition(";")[0]
        log.warning("%s: training goes on, and the next checkpoint is tried in its turn", fault)
        self._metrics.log({**self._to_log, "event": "postponed", "fault": fault})

    def _save_last(self) -> None:
        """Save the state that is left; a full disk is waited for, as no other turn will come.

        Raises DiskFullError where it stays full.
        """
        patience = self._config.exchange.disk_patience_seconds
        give_up = min(time.monotonic() + patience, self._job_end - self._state.save_seconds)
        self._await_checkpoint()
        while self._state != self._saved:
            self._no_room = None
            self._checkpoint()
            self._await_checkpoint()
            if self._no_room and time.monotonic() >= give_up:
                raise self._no_room
            if self._no_room:
                time.sleep(AGAIN_SECONDS)

    def _await_checkpoint(self) -> None:
        """Wait for the checkpoint under way. Raises TimeoutError past the deadline."""
        patience = self._config.exchange.deadline_seconds
        if self._under_way and not wait([self._under_way], patience).done:
            raise TimeoutError(
                f"the checkpoint of step {self._to_log['step']} was not written within {patience:g} s: see "
                "whether the file system of the run answers, or raise exchange.deadline_seconds"
            )
        self._note_checkpoint()

    def _log_step(self, batch: TrajectoryBatch, learned: Mapping[str, float]) -> None:
        seconds = self._step_log.write(self._state.step - 1, batch, learned)
        self._state = replace(self._state, train_seconds=self._state.train_seconds + seconds)

    def log_event(self, event: str) -> None:
        """Leave an event of the run in the trainer's metrics; see ``metrics`` for their names."""
        self._metrics.log(self._event(event))

    def _event(self, event: str) -> dict[str, Value]:
        return state_event(event, self._state, self._buffer)


def is_late(left: float, *, step_seconds: float, save_seconds: float) -> bool:
    """Whether ``left`` seconds are too few for one more step and a save after it."""
    return left < step_seconds + save_seconds + MARGIN_SECONDS


def _next_multiple(of: int, step: int) -> int:
    """The first step after ``step`` at which something done every ``of`` steps is due."""
    return (step // of + 1) * of
