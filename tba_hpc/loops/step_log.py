"""The record of every optimizer step in the trainer's metrics; ``metric_table`` says what each name means."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from tba_hpc.config import TrainSection
from tba_hpc.core import schedules
from tba_hpc.core.batch import staleness
from tba_hpc.core.buffer import ReplayBuffer
from tba_hpc.core.types import TrajectoryBatch
from tba_hpc.run.metrics import Clock, MetricsWriter

WARMUP_STEPS = 5
"""Optimizer steps of an attempt that are left out of the wait share."""

STALENESS_BINS = 64
"""Last bin of the staleness histogram; it holds all that is staler."""


class StepLog:
    """Writes the records. ``clock`` adds up ``wait`` (for data), ``publish``, ``reference``, ``learn`` and
    ``checkpoint``.

    version: weights published last, optimizer steps. publishes, late: publishes so far, and those put off.
    longest_step: seconds, waits and checkpoints left out.
    """

    def __init__(
        self, train: TrainSection, buffer: ReplayBuffer, metrics: MetricsWriter, *, version: int
    ) -> None:
        self._train = train
        self._buffer = buffer
        self._metrics = metrics
        self._wait = WaitShare()
        self.clock = Clock()
        self.version = version
        self.publishes = self.late = 0
        self.longest_step = 0.0

    def published(self, version: int) -> None:
        """Weights of ``version`` were published."""
        self.version = version
        self.publishes += 1

    def write(self, step: int, batch: TrajectoryBatch, learned: Mapping[str, float]) -> float:
        """The record of ``step``, counted from 0, which learned from ``batch``; returns its wall time, s.

        What is not finite in ``learned``, as in a step that was skipped, is left out.
        """
        wall, spent = self.clock.wall, self.clock.reset()
        learning = spent["learn"] + spent.get("reference", 0.0)
        own = wall - spent.get("wait", 0.0) - spent.get("checkpoint", 0.0)
        self.longest_step = max(self.longest_step, own)
        lag, reward_BK = staleness(batch, step), batch.reward_N.reshape(-1, batch.group_size)
        self._metrics.log(
            {
                "step": step + 1,
                **{f"train/{name}": value for name, value in learned.items() if math.isfinite(value)},
                "train/reward": float(batch.reward_N.mean()),
                "train/flat_groups": float((reward_BK == reward_BK[:, :1]).all(1).mean()),
                "train/length": float(batch.completion_length_N.mean()),
                "train/replay_ratio": self._buffer.replay_ratio,
                "train/beta": schedules.beta(self._train, step),
                "train/reference_power": schedules.reference_power(self._train, step),
                "train/wait_share": self._wait.add(wall, learning),
                "time/step_seconds": wall,
                "time/learn_seconds": spent["learn"],
                "time/reference_seconds": spent.get("reference"),
                "sync/version": self.version,
                "sync/publish_stall_seconds": spent.get("publish"),
                "sync/late": self.late,
                "sync/publishes": self.publishes,
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
        return wall


class WaitShare:
    """Share of wall time outside the learner, counted from the end of the warm-up."""

    def __init__(self) -> None:
        self._steps = 0
        self._wall = 0.0
        self._learning = 0.0

    def add(self, wall: float, learning: float) -> float | None:
        """Add one step of ``wall`` seconds with ``learning`` in the learner; None during warm-up."""
        self._steps += 1
        if self._steps <= WARMUP_STEPS:
            return None
        self._wall += wall
        self._learning += learning
        return 1 - self._learning / self._wall
