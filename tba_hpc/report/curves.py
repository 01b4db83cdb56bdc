"""Condenses a run's metrics, record by record, to curves of at most 256 points.

The curves of several ranks can be added to one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from tba_hpc.report.attempts import STARTS, CumulativeCounter
from tba_hpc.run.metric_table import CURVES
from tba_hpc.run.metrics import Record, number

POINTS = 256
"""Largest number of points of a curve, as many as fit in a plot."""

TREND_POINTS = 64
"""Largest number of points of a trend, the coarser curve that alerts look at, in which noise averages out."""

LATEST_STEPS, LATEST_COMPLETIONS = 16, 256
"""Minimum numbers of newest steps and of newest completions over which current values are averaged."""

STEP_CURVES = tuple(name for name in CURVES if not name.startswith("search/"))
"""Metrics of the trainer's records, one record per optimizer step."""

FRESH_CURVES = tuple(name for name in CURVES if name.startswith("search/"))
"""Metrics of searchers' records. A record's weight is its number of trajectories, but 1 for OF_TIME."""

NAMED = "search/reward/"
"""Beginning of the names of the metrics of a task's named rewards."""

SHOWN_REWARDS = 4
"""Largest number of named rewards that are shown."""

OF_TIME = frozenset(
    f"search/{name}"
    for name in (
        *("busy_share", "paused_share", "reward_share", "seal_share"),
        *("load_seconds", "propagation_seconds"),
    )
)
"""Metrics of searchers that describe time, not completions: all of their records weigh the same."""


class Point(NamedTuple):
    """A mean over a span of steps. step: the span's first. weight: total weight of the averaged values."""

    step: int
    value: float
    weight: float


@dataclass
class Curve:
    """Weighted means over equally wide spans of steps; values may come in any order.

    limit: largest number of spans; if there are more, their width doubles. width: width of a span, in steps.
    sums: Σ value · weight and Σ weight of each span, by the span's number, which is its first step ÷ width.
    latest_weight: minimum total weight of the newest points that ``latest`` averages.
    """

    limit: int = POINTS
    width: int = 1
    sums: dict[int, tuple[float, float]] = field(default_factory=dict)
    latest_weight: float = 1.0

    def take(self, step: int, value: float, weight: float = 1.0) -> None:
        """Add a value that belongs to ``step``."""
        self._put(step // self.width, value * weight, weight)
        self._bound()

    def add(self, other: Curve) -> None:
        """Add all values of another curve."""
        while self.width < other.width:
            self._widen()
        for span, (total, weight) in other.sums.items():
            self._put(span * other.width // self.width, total, weight)
        self._bound()

    def cut(self, step: int) -> None:
        """Drop the spans that begin after ``step``, because a resume does their steps again."""
        self.sums = {span: sums for span, sums in self.sums.items() if span * self.width <= step}

    @property
    def points(self) -> list[Point]:
        """Points ordered by step."""
        return [
            Point(span * self.width, total / weight, weight)
            for span, (total, weight) in sorted(self.sums.items())
        ]

    @property
    def mean(self) -> float | None:
        """Mean over all values; None if there are none."""
        return _mean(self.points)

    @property
    def latest(self) -> float | None:
        """Mean of as many newest points as it takes to reach ``latest_weight``; None without points."""
        newest, weight = [], 0.0
        for point in reversed(self.points):
            if weight >= self.latest_weight:
                break
            newest.append(point)
            weight += point.weight
        return _mean(newest)

    @property
    def trend(self) -> Curve:
        """Coarser copy of the curve, with at most TREND_POINTS points."""
        coarse = replace(self, limit=TREND_POINTS, sums=dict(self.sums))
        coarse._bound()
        return coarse

    def _put(self, span: int, total: float, weight: float) -> None:
        known, weights = self.sums.get(span, (0.0, 0.0))
        self.sums[span] = known + total, weights + weight

    def _bound(self) -> None:
        while len(self.sums) > self.limit:
            self._widen()

    def _widen(self) -> None:
        self.width *= 2
        halves, self.sums = self.sums, {}
        for span, (total, weight) in halves.items():
            self._put(span // 2, total, weight)


def _mean(points: Iterable[Point]) -> float | None:
    total = weights = 0.0
    for point in points:
        total, weights = total + point.value * point.weight, weights + point.weight
    return total / weights if weights else None


def _curves() -> dict[str, Curve]:
    by_record = {*STEP_CURVES, *OF_TIME}
    return {
        name: Curve(latest_weight=LATEST_STEPS if name in by_record else LATEST_COMPLETIONS)
        for name in CURVES
    }


@dataclass
class Trends:
    """Curves of a run by name of the metric, and counts over all of its attempts.

    first_log_ratio: train/log_ratio of the first step; None before this step, or if train/reference_power is
    not 1 there. last_skip: the last skipped step, None if there is none. trajectories: completions that
    searchers scored. rejected: trajectories set aside, since they have no usable reward. rejected_before:
    number of these that earlier attempts set aside. nan_groups: groups sampled again, since a log-probability
    was NaN. graded: whether some reward was neither 0 nor 1. skips: counter of skipped steps.
    """

    curves: dict[str, Curve] = field(default_factory=_curves)
    first_log_ratio: float | None = None
    last_skip: int | None = None
    trajectories: int = 0
    rejected: int = 0
    rejected_before: int = 0
    nan_groups: int = 0
    graded: bool = False
    skips: CumulativeCounter = field(default_factory=lambda: CumulativeCounter("train/skipped_steps"))

    def take(self, record: Record) -> None:
        """Add a record of the trainer. If it begins a resume, drop the steps that will be done again."""
        skipped = self.skips.take(record)
        step = int(number(record, "step", 0))
        if record.get("event") in STARTS:
            for name in STEP_CURVES:
                self.curves[name].cut(step)
        if "event" in record:
            return
        self.last_skip = step if skipped else self.last_skip
        if step == 1 and number(record, "train/reference_power", 1.0) == 1.0:
            self.first_log_ratio = number(record, "train/log_ratio")
        for name in STEP_CURVES:
            self._follow(name, record, step, 1.0)

    def take_search(self, record: Record) -> None:
        """Add a record of a searcher, at the step of the weights that the searcher used."""
        if (version := number(record, "search/version")) is None:
            return
        step, count = int(version), number(record, "search/trajectories", 0.0)
        self.trajectories += int(count)
        reward = number(record, "search/reward", 0.0)
        self.graded |= not 0 <= reward <= 1 or not math.isclose(reward * count, round(reward * count))
        for name in FRESH_CURVES:
            self._follow(name, record, step, 1.0 if name in OF_TIME else count)
        for name in (name for name in record if name.startswith(NAMED) and name.isprintable()):
            self.curves.setdefault(name, Curve(latest_weight=LATEST_COMPLETIONS))
            self._follow(name, record, step, count)

    def _follow(self, name: str, record: Record, step: int, weight: float) -> None:
        value = number(record, name)
        if weight and value is not None and math.isfinite(value):
            self.curves[name].take(step, value, weight)

    def add(self, other: Trends) -> None:
        """Add the curves and counts of a searcher's records."""
        for name, curve in other.curves.items():
            self.curves.setdefault(name, Curve(latest_weight=LATEST_COMPLETIONS)).add(curve)
        self.trajectories += other.trajectories
        self.rejected += other.rejected
        self.rejected_before += other.rejected_before
        self.nan_groups += other.nan_groups
        self.graded |= other.graded

    @property
    def named_rewards(self) -> list[str]:
        """Metrics of the rewards that the task returns by name, in order; none if it returns only one."""
        names = [name for name in self.curves if name.startswith(NAMED)]
        return sorted(names) if len(names) > 1 else []

    @property
    def skipped(self) -> int:
        """Number of skipped optimizer steps in all attempts."""
        return self.skips.total

    def trend(self, name: str) -> list[Point]:
        """Return at most TREND_POINTS points of a metric, ordered by step."""
        return self.curves[name].trend.points

    def latest(self, name: str) -> float | None:
        """Return a metric's current value, see ``Curve.latest``; None if it was never recorded."""
        return self.curves[name].latest
