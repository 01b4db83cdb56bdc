"""The trainer's line of metrics about each optimizer step. ``run.metric_table`` explains the names."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from tba_hpc.config import TrainSection
from tba_hpc.core import schedules
from tba_hpc.core.batch import staleness
from tba_hpc.core.buffer import ReplayBuffer
from tba_hpc.core.types import TrajectoryBatch
from tba_hpc.loops.publish_schedule import PublishSchedule
from tba_hpc.run.metrics import Clock, MetricsWriter

WARMUP_STEPS = 5
"""Number of steps at the start of an attempt that ``train/wait_share`` leaves out."""


@dataclass
class StepLog:
    """Writes a line of metrics per step.

    clock: measures the parts of a step under the names ``wait`` (for data), ``publish``, ``reference``,
    ``learn`` and ``checkpoint``. late: number of steps taken while a publication was put off. longest_step:
    duration of the longest step, without its waits and checkpoints, in seconds.
    """

    train: TrainSection
    buffer: ReplayBuffer
    metrics: MetricsWriter
    schedule: PublishSchedule
    late: int = 0
    longest_step: float = 0.0
    clock: Clock = field(default_factory=Clock)
    _steps: int = 0
    _wall: float = 0.0  # duration of the steps after the first WARMUP_STEPS, in seconds
    _learning: float = 0.0  # seconds of _wall spent in the learner

    def write(self, step: int, batch: TrajectoryBatch, learned: Mapping[str, float]) -> float:
        """Write the line about ``step`` (from 0), which learned from ``batch``; return the step's duration.

        learned: metrics of the learner. Those that are not finite, as in a skipped step, are left out. The
        duration is in seconds.
        """
        wall, spent = self.clock.wall, self.clock.reset()
        own = wall - spent.get("wait", 0.0) - spent.get("checkpoint", 0.0)
        self.late += self.schedule.put_off
        self.longest_step = max(self.longest_step, own)
        lag, reward_BK = staleness(batch, step), batch.reward_N.reshape(-1, batch.group_size)
        self.metrics.log(
            {
                "step": step + 1,
                **{f"train/{name}": value for name, value in learned.items() if math.isfinite(value)},
                "train/reward": float(batch.reward_N.mean()),
                "train/flat_groups": float((reward_BK == reward_BK[:, :1]).all(1).mean()),
                "train/length": float(batch.action_length_N.mean()),
                "train/environment_share": float(1 - batch.action_T.mean()),
                "train/replay_ratio": self.buffer.replay_ratio,
                "train/beta": schedules.beta(self.train, step),
                "train/reference_power": schedules.reference_power(self.train, step),
                "train/wait_share": self._wait_share(wall, spent["learn"] + spent.get("reference", 0.0)),
                "time/step_seconds": wall,
                "time/learn_seconds": spent["learn"],
                "time/reference_seconds": spent.get("reference"),
                "sync/version": self.schedule.version,
                "sync/publish_stall_seconds": spent.get("publish"),
                "sync/late": self.late,
                "sync/publishes": self.schedule.publishes,
                "buffer/size": len(self.buffer),
                "buffer/prompts": self.buffer.prompts,
                "buffer/added": self.buffer.added,
                "buffer/duplicates": self.buffer.duplicates,
                "buffer/evicted": self.buffer.evicted,
                "staleness/mean": float(lag.mean()),
                "staleness/max": int(lag.max()),
                "staleness/end": float(abs(step - batch.record["version_newest"]).mean()),
            }
        )
        return wall

    def _wait_share(self, wall: float, learning: float) -> float | None:
        """Add a step to the sums; return the share of the time so far that was spent outside the learner.

        The first WARMUP_STEPS steps are not added; the result is None for them. wall: duration of the step,
        in seconds. learning: how much of it was spent in the learner, in seconds.
        """
        self._steps += 1
        if self._steps <= WARMUP_STEPS:
            return None
        self._wall += wall
        self._learning += learning
        return 1 - self._learning / self._wall
