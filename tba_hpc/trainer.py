"""The trainer: every k steps publish weights and merge what arrived; sample groups; take a step.

It must not know how weights travel, how the optimizer is sharded, or how many ranks there are.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, replace
from typing import Protocol

import numpy as np

from tba_hpc import schedules
from tba_hpc.batch import staleness, with_reference_power
from tba_hpc.buffer import Merged, ReplayBuffer
from tba_hpc.config import Config
from tba_hpc.metrics import Clock, MetricsWriter
from tba_hpc.ports import ExchangeError, Learner, TrainerExchange
from tba_hpc.prompts import CompletedRequests, RolloutBudget
from tba_hpc.run.checkpoints import TrainerState
from tba_hpc.types import Shard, Split, TrajectoryBatch

log = logging.getLogger(__name__)

POLL_SECONDS = 0.02
"""Pause between two looks at the exchange while the trainer has nothing else to do."""

WARMUP_STEPS = 5
"""Optimizer steps of an attempt that are left out of the wait share."""

STALENESS_BINS = 64
"""Last bin of the staleness histogram; it holds all that is staler."""

MARGIN_SECONDS = 30.0
"""Kept free before the end of the job, beside a step and a save: to leave, and to go back to the queue."""


class CheckpointStore(Protocol):
    """Where checkpoints go; see runtime.Checkpoints."""

    def save(
        self, state: TrainerState, learner: Learner, buffer: ReplayBuffer, completed: CompletedRequests
    ) -> TrainerState:
        """Write a complete checkpoint, drop those no longer kept; returns the state that it holds."""

    def export_reference(self, step: int, learner: Learner) -> None:
        """Write the policy of ``step`` as the next reference; drop those that no kept checkpoint needs."""


class Trainer:
    """The leading trainer's loop, from ``state`` (fresh or restored) to ``config.train.steps``.

    pending: shards sealed beyond the cursors of ``state`` by an earlier attempt; they are merged first.
    job_end: when the job's time is over, unix seconds.
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
        checkpoints: CheckpointStore,
        pending: Iterable[Shard],
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
        self._pending = pending
        self._metrics = metrics
        self._stop_asked = stop_asked
        self._job_end = job_end
        self._saved = state
        self._longest_step = 0.0
        self._next_sync = state.step
        self._next_evaluation = _next_multiple(config.evaluate.every, state.step)
        self._next_checkpoint = _next_multiple(config.checkpoint.every, state.step)
        self._reference = schedules.reference(config.train, 0)
        self._budget: RolloutBudget | None = None
        self._late = 0
        self._published = state.step
        self._publishes = 0
        self._busy = BusyShare()
        self._clock = Clock()

    def run(self) -> bool:
        """Train to the last step; True when it was reached, False when stopped before, with all saved.

        Consumes shards. Produces weights, references, checkpoints, metrics. Waits for nothing once the
        initial buffer is there, unless staleness is bounded or the reference was reset; these waits are
        unblocked by the searchers' shards. Whoever calls this closes the exchange, after the last evaluation.
        """
        self._log_event("resumed" if self._state != TrainerState() else "started")
        self._update_reference()
        self._merge(list(self._pending))
        self._drop_unfit()
        self._open_budget()
        self._publish(evaluate="test" if self._state.step == 0 else None)
        while not self._finished and not self.stopping and self._prepare_step():
            batch = self._sample()
            learned = self._learn(batch)
            self._log_step(batch, learned)
            self._checkpoint_if_due()
        return self._leave()

    @property
    def _finished(self) -> bool:
        return self._state.step >= self._config.train.steps

    @property
    def stopping(self) -> bool:
        """Whether a stop was asked for, or the job's time is nearly over."""
        return self._stop_asked() or self._exchange.stop_requested or self._is_late

    @property
    def _is_late(self) -> bool:
        left = self._job_end - time.time()
        return is_late(left, step_seconds=self._longest_step, save_seconds=self._state.save_seconds)

    def _publish(self, *, evaluate: Split | None) -> bool:
        """Publish the current weights; False, and try again later, while a revision is under way."""
        step = self._state.step
        with self._clock("publish"):
            started = self._exchange.publish(
                step,
                self._learner.write_weights,
                evaluate=evaluate,
                reference=self._reference,
                quota=self._budget.extend(step, missing=self._missing) if self._budget else None,
            )
        if started:
            self._published = step
            self._publishes += 1
            self._next_sync = step + self._config.exchange.sync_every
        return started

    def _prepare_step(self) -> bool:
        """Bring reference, weights and buffer up to the next step; False where the run is to stop instead."""
        self._update_reference()
        self._drop_unfit()
        self._sync_if_due()
        self._collect()
        self._wait_for_groups()
        self._late += self._sync_is_due
        return not self.stopping

    def _update_reference(self) -> None:
        """Every ρ steps the policy becomes the reference; searchers hear of it at once, with its weights."""
        step, before = self._state.step, self._reference
        self._reference = schedules.reference(self._config.train, step)
        if self._reference == before:
            return
        if self._reference == step:
            self._checkpoints.export_reference(step, self._learner)
            self._log_event("reset")
        self._next_sync = step

    def _wait_for_groups(self) -> None:
        """Wait until the buffer has what the next step needs; a whole deadline without news is too long."""
        patience, last_arrival = self._config.exchange.deadline_seconds, time.monotonic()
        while self._missing and not self.stopping:
            if self._budget and self._missing > self._budget.owed().total():
                self._next_sync = self._state.step  # nobody may begin what is missing: let them
            if not self._sync_if_due():
                self._exchange.gather()
            if self._collect():
                last_arrival = time.monotonic()
            if time.monotonic() - last_arrival > patience:
                self._exclude_unresponsive(patience)
                last_arrival = time.monotonic()
            time.sleep(POLL_SECONDS)

    @property
    def _filling(self) -> bool:
        """Whether the initial buffer of a run is what it waits for."""
        return self._state.step == 0 and self._config.exchange.max_staleness is None

    @property
    def _missing(self) -> int:
        """What the buffer lacks for the next step: completions at first, then groups fit to train on."""
        if self._filling:
            return max(0, self._config.buffer.initial_completions - len(self._buffer))
        if not self._config.selective:
            return 0
        return max(0, self._config.train.prompts_per_step - self._buffer.requests)

    def _open_budget(self) -> None:
        """Where staleness is bounded; what is there already need not be begun."""
        if self._config.exchange.max_staleness is not None:
            step, groups = self._state.step, self._buffer.requests
            self._budget = RolloutBudget(self._config, self._completed, step=step, groups=groups)

    def _exclude_unresponsive(self, patience: float) -> None:
        """Where others are left, have them begin what is owed: over files this is how a death shows.

        Raises ExchangeError where nobody is left to wait for.
        """
        shortage, remedy = self._shortage()
        silence = f"the replay buffer {shortage} and no new one has arrived for {patience:.0f} s: {remedy}"
        if self._budget is None:
            raise ExchangeError(silence)
        self._budget.exclude(set(self._budget.owed()), silence)
        log.warning("%s; others begin what is missing", silence)

    def _shortage(self) -> tuple[str, str]:
        """How much the buffer holds of what, and what the user can do."""
        if self._filling:
            return (
                f"holds {len(self._buffer)} of {self._config.buffer.initial_completions} initial completions",
                "see the searchers' logs, or lower buffer.initial_completions if the task has too few "
                "distinct completions",
            )
        owed = sorted(self._budget.owed()) if self._budget else range(self._config.launch.searchers)
        wanted, step = self._config.train.prompts_per_step, self._state.step
        return (
            f"holds {self._buffer.requests} of the {wanted} groups that step {step} needs",
            f"see the logs of searchers {', '.join(map(str, owed))}, which owe them",
        )

    @property
    def _sync_is_due(self) -> bool:
        return self._state.step >= self._next_sync

    def _sync_if_due(self) -> bool:
        """Every k steps; one that finds the one before still under way is put off. Whether one was due."""
        step = self._state.step
        if not self._sync_is_due:
            return False
        evaluate: Split | None = "validation" if step >= self._next_evaluation else None
        if self._publish(evaluate=evaluate) and evaluate:
            self._next_evaluation = _next_multiple(self._config.evaluate.every, step)
        return True

    def tend(self) -> bool:
        """Keep the exchange going while the last evaluation is under way; whether a searcher was lost."""
        self._exchange.gather()
        return self._log_losses()

    def _collect(self) -> int:
        """Merge what has arrived, less what is unfit; returns how many completions were new."""
        self._log_losses()
        shards = self._exchange.collect()
        if self._budget:
            for shard in shards:
                self._budget.arrive(shard.trajectories.request_ids)
        added = self._merge(shards)
        if added and self._filling:
            self._log_event("filling")
        self._drop_unfit()
        return added

    def _log_losses(self) -> bool:
        lost = self._exchange.lost()
        for searcher, host in lost:
            log.warning("searcher %d on %s died: the run goes on without it; see its log", searcher, host)
            step = self._state.step
            self._metrics.log({"event": "lost", "step": step, "searcher": searcher, "host": host})
            if self._budget:
                self._budget.exclude({searcher}, f"no searcher is left: the last, {searcher} on {host}, died")
        return bool(lost)

    def _merge(self, shards: list[Shard]) -> int:
        """Merge the shards of one revision into the replay buffer; returns how many completions were new."""
        shards = [shard for shard in shards if shard.index >= self._state.cursors.get(shard.searcher, 0)]
        if not shards:
            return 0
        cursors, added, tokens = dict(self._state.cursors), 0, 0
        for shard in shards:
            merged = self._buffer.merge(shard.trajectories, self._state.revision + 1)
            self._completed.add(shard.trajectories.record["request_id"])
            cursors[shard.searcher] = shard.index + 1
            added += merged.added
            tokens += len(shard.trajectories.completions.values)
            self._log_merge(shard, merged)
        self._state = replace(
            self._state,
            revision=self._state.revision + 1,
            cursors=cursors,
            trajectories=self._state.trajectories + sum(len(s.trajectories) for s in shards),
            added=self._buffer.added,
            duplicates=self._buffer.duplicates,
            evicted=self._buffer.evicted,
            tokens=self._state.tokens + tokens,
        )
        return added

    def _log_merge(self, shard: Shard, merged: Merged) -> None:
        """The trace that a merged shard leaves when its file is pruned; ``tba audit`` reads it."""
        self._metrics.log(
            {
                "event": "merged",
                "step": self._state.step,
                "revision": self._state.revision + 1,
                "searcher": shard.searcher,
                "shard": shard.index,
                "trajectories": len(shard.trajectories),
                "tokens": len(shard.trajectories.completions.values),
                "request_ids": shard.trajectories.request_ids.tolist(),
                **asdict(merged),
            }
        )

    def _drop_unfit(self) -> None:
        """Evict what is too stale by now, or scored by another reference; ``tba audit`` reads the trace."""
        if not self._config.selective or not (evicted := self._buffer.drop(self._unfit)):
            return
        self._state = replace(self._state, revision=self._state.revision + 1, evicted=self._buffer.evicted)
        step, revision = self._state.step, self._state.revision
        self._metrics.log({"event": "evicted", "step": step, "revision": revision, "evicted": evicted})

    def _unfit(self, record: np.ndarray) -> np.ndarray:
        """bool [N] of RECORD [N]: which trajectories the next step must not learn from."""
        unfit: np.ndarray = record["reference"] != self._reference
        if (bound := self._config.exchange.max_staleness) is not None:
            unfit |= np.abs(self._state.step - record["version_oldest"]) > bound
        return unfit

    def _sample(self) -> TrajectoryBatch:
        train = self._config.train
        return self._buffer.sample(
            self._state.step, groups=train.prompts_per_step, group_size=train.completions_per_prompt
        )

    def _learn(self, batch: TrajectoryBatch) -> Mapping[str, float]:
        """One optimizer step on the batch; the state moves on by one step."""
        train, step = self._config.train, self._state.step
        with self._clock("learn"):
            learned = self._learner.step(
                with_reference_power(batch, schedules.reference_power(train, step)),
                learning_rate=schedules.learning_rate(train.learning_rate, step, train.steps),
                beta=schedules.beta(train, step),
            )
        self._state = replace(self._state, step=step + 1)
        return learned

    def _checkpoint_if_due(self) -> None:
        if self._state.step >= self._next_checkpoint and not self._finished:
            self._checkpoint()

    def _checkpoint(self) -> None:
        with self._clock("checkpoint"):
            self._metrics.sync()  # what the checkpoint counts is on record before it is
            self._state = self._checkpoints.save(self._state, self._learner, self._buffer, self._completed)
        self._saved = self._state
        self._next_checkpoint = _next_multiple(self._config.checkpoint.every, self._state.step)
        self._log_event("checkpoint")

    def _leave(self) -> bool:
        """Checkpoint; where the run is finished, publish its weights once more, for the last evaluation.

        Shards that arrive from here on stay on disk beyond the checkpoint's cursors: a resume merges them.
        """
        if self._state != self._saved:
            self._checkpoint()
        finished = self._finished and self._publish_last()
        self._log_event("finished" if finished else "stopped")
        return finished

    def _publish_last(self) -> bool:
        """Publish the last weights for the last evaluation; False when asked to stop before."""
        while not self.stopping:
            if self._publish(evaluate="test"):  # bounded by the exchange's deadline
                return True
            time.sleep(POLL_SECONDS)
        return False

    def _log_event(self, event: str) -> None:
        state = self._state
        self._metrics.log(
            {"event": event, "step": state.step, "revision": state.revision, "buffer/size": len(self._buffer)}
        )

    def _log_step(self, batch: TrajectoryBatch, learned: Mapping[str, float]) -> None:
        train, step = self._config.train, self._state.step - 1
        wall, spent = self._clock.wall, self._clock.reset()
        self._longest_step = max(self._longest_step, wall - spent.get("checkpoint", 0.0))
        self._state = replace(self._state, train_seconds=self._state.train_seconds + wall)
        lag = staleness(batch, step)
        self._metrics.log(
            {
                "step": self._state.step,
                **{f"train/{name}": value for name, value in learned.items()},
                "train/reward": float(batch.reward_N.mean()),
                "train/learning_rate": schedules.learning_rate(train.learning_rate, step, train.steps),
                "train/beta": schedules.beta(train, step),
                "train/reference_power": schedules.reference_power(train, step),
                "train/wait_share": self._busy.idle_share(wall, spent["learn"]),
                "time/step_seconds": wall,
                "time/learn_seconds": spent["learn"],
                "sync/version": self._published,
                "sync/publish_stall_seconds": spent.get("publish"),
                "sync/late": self._late,
                "sync/publishes": self._publishes,
                "buffer/size": len(self._buffer),
                "buffer/prompts": self._buffer.prompts,
                "buffer/added": self._buffer.added,
                "buffer/duplicates": self._buffer.duplicates,
                "buffer/evicted": self._buffer.evicted,
                "staleness/mean": float(lag.mean()),
                "staleness/max": int(lag.max()),
                "staleness/histogram": np.bincount(np.minimum(lag, STALENESS_BINS)).tolist(),
            }
        )


def is_late(left: float, *, step_seconds: float, save_seconds: float) -> bool:
    """Whether ``left`` seconds are too few for one more step and a save after it."""
    return left < step_seconds + save_seconds + MARGIN_SECONDS


def _next_multiple(of: int, step: int) -> int:
    """The first step after ``step`` at which something done every ``of`` steps is due."""
    return (step // of + 1) * of


class BusyShare:
    """Share of wall time outside the optimizer step, counted from the end of the warm-up."""

    def __init__(self) -> None:
        self._steps = 0
        self._wall = 0.0
        self._learning = 0.0

    def idle_share(self, wall: float, learning: float) -> float | None:
        """Add one step of ``wall`` seconds with ``learning`` in the learner; None during warm-up."""
        self._steps += 1
        if self._steps <= WARMUP_STEPS:
            return None
        self._wall += wall
        self._learning += learning
        return 1 - self._learning / self._wall
