"""The course of a run's figures, folded record by record in bounded memory: a few hundred points each.

What was folded of several files adds up.
"""

from __future__ import annotations

import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Generic, NamedTuple, Self, TypeVar

from tba_hpc.report.attempts import STARTS, CumulativeCounter
from tba_hpc.run.metric_table import CURVES
from tba_hpc.run.metrics import TENTHS, Record, number

POINTS = 256
"""Most points of a curve: as many as a plot has room for."""

TREND_POINTS = 64
"""Most points of a trend: each of many records, so that noise averages out."""

LATEST_STEPS, LATEST_COMPLETIONS = 16, 256
"""What a current value is the mean of, unless a point is of more by itself."""

STEP_CURVES = tuple(name for name in CURVES if not name.startswith("search/"))
FRESH_CURVES = tuple(name for name in CURVES if name.startswith("search/"))
"""Means of a searcher's record, weighted by its trajectories."""

EARLY_SIGNS = ("train/log_weight", "train/better_log_weight")
"""Figures that show a collapse within some dozen steps."""

NEWEST_STEPS = 120
"""Steps of which these are kept one by one."""

V = TypeVar("V")


class Point(NamedTuple):
    """Mean over a span of steps. step: where the span begins; weight: what the mean is of."""

    step: int
    value: float
    weight: float


class Spans(ABC, Generic[V]):
    """Sums over equal spans of steps, in whatever order values come.

    spans: the most of them; beyond that their width, in steps, doubles. sums: by the number of the span.
    """

    spans: int
    width: int
    sums: dict[int, V]

    def add(self, other: Self) -> None:
        """Count all values of another one as well."""
        while self.width < other.width:
            self._widen()
        for span, value in other.sums.items():
            self._put(span * other.width // self.width, value)
        self._bound()

    def cut(self, step: int) -> None:
        """Forget the spans that begin after ``step``: those steps are done again."""
        self.sums = {span: value for span, value in self.sums.items() if span * self.width <= step}

    @staticmethod
    @abstractmethod
    def _sum(one: V, other: V) -> V:
        """Of two values of a span."""

    def _take(self, step: int, value: V) -> None:
        self._put(step // self.width, value)
        self._bound()

    def _put(self, span: int, value: V) -> None:
        self.sums[span] = self._sum(self.sums[span], value) if span in self.sums else value

    def _bound(self) -> None:
        while len(self.sums) > self.spans:
            self._widen()

    def _widen(self) -> None:
        self.width *= 2
        halves, self.sums = self.sums, {}
        for span, value in halves.items():
            self._put(span // 2, value)


@dataclass
class Histograms(Spans[list[int]]):
    """Counts per bin over spans of steps."""

    spans: int = TREND_POINTS
    width: int = 1
    sums: dict[int, list[int]] = field(default_factory=dict)

    def take(self, step: int, counts: Sequence[float]) -> None:
        """Count one more histogram, of ``step``."""
        self._take(step, [int(count) for count in counts])

    @staticmethod
    def _sum(one: list[int], other: list[int]) -> list[int]:
        return [a + b for a, b in itertools.zip_longest(one, other, fillvalue=0)]

    @property
    def points(self) -> list[tuple[int, list[int]]]:
        """Where a span begins, and its counts; by step."""
        return [(span * self.width, counts) for span, counts in sorted(self.sums.items())]


@dataclass
class Curve(Spans[tuple[float, float]]):
    """Weighted means over spans of steps.

    latest_weight: of what ``latest`` is the mean. sums: of value · weight, and of the weights.
    """

    latest_weight: float
    spans: int = POINTS
    width: int = 1
    sums: dict[int, tuple[float, float]] = field(default_factory=dict)

    def take(self, step: int, value: float, weight: float = 1.0) -> None:
        """Count one more value, of ``step``."""
        self._take(step, (value * weight, weight))

    @staticmethod
    def _sum(one: tuple[float, float], other: tuple[float, float]) -> tuple[float, float]:
        return one[0] + other[0], one[1] + other[1]

    @property
    def points(self) -> list[Point]:
        """By step."""
        found = sorted(self.sums.items())
        return [Point(span * self.width, total / weight, weight) for span, (total, weight) in found]

    @property
    def values(self) -> list[float]:
        """Of the points, by step."""
        return [point.value for point in self.points]

    @property
    def mean(self) -> float | None:
        """Over all values; None of nothing."""
        totals = list(self.sums.values())
        return sum(total for total, _ in totals) / sum(weight for _, weight in totals) if totals else None

    @property
    def latest(self) -> float | None:
        """Mean of the newest points that together have the weight for it, or of all; None of nothing."""
        total = weights = 0.0
        for point in reversed(self.points):
            if weights >= self.latest_weight:
                break
            total, weights = total + point.value * point.weight, weights + point.weight
        return total / weights if weights else None

    @property
    def trend(self) -> Curve:
        """The same with TREND_POINTS at most."""
        coarse = replace(self, spans=TREND_POINTS, sums=dict(self.sums))
        coarse._bound()
        return coarse


class Newest(Curve):
    """The values of the newest steps, each for itself: spans of a long run would hide what begins in them."""

    def _bound(self) -> None:
        while len(self.sums) > self.spans:
            del self.sums[min(self.sums)]


@dataclass
class ByLength:
    """Trajectories in all attempts, by tenths of generator.max_tokens.

    unlearned: of what came, what was dropped as too stale or too late before a step learned from its request.
    """

    came: list[int] = field(default_factory=lambda: [0] * TENTHS)
    unlearned: list[int] = field(default_factory=lambda: [0] * TENTHS)

    def take(self, record: Record) -> None:
        """One more record of the trainer."""
        for counts, name in ((self.came, "lengths"), (self.unlearned, "unlearned")):
            if isinstance(more := record.get(name), list):
                counts[:] = [int(a + b) for a, b in zip(counts, more, strict=True)]

    def lost(self, first: int = 0, end: int = TENTHS) -> float:
        """Share of what came of these tenths, 0 … 1, that was dropped; 0 if nothing came."""
        return sum(self.unlearned[first:end]) / max(1, sum(self.came[first:end]))


@dataclass
class Trends:
    """The curves of a run, by the names of the metrics, and what is counted since its start.

    initial_kl: search/kl of the initial weights' samples alone, a single point. first_log_ratio:
    train/log_ratio of the first step, if that is plainly against π_ref. paused: share of its time that a
    searcher with trained weights was idle, by version. beta: of the last step. last_skip: the last step that
    was skipped.
    """

    curves: dict[str, Curve] = field(
        default_factory=lambda: {
            **{name: Curve(LATEST_STEPS) for name in STEP_CURVES},
            **{name: Curve(LATEST_COMPLETIONS) for name in FRESH_CURVES},
        }
    )
    newest: dict[str, Newest] = field(
        default_factory=lambda: {name: Newest(LATEST_STEPS, NEWEST_STEPS) for name in EARLY_SIGNS}
    )
    initial_kl: Curve = field(default_factory=lambda: Curve(LATEST_COMPLETIONS))
    first_log_ratio: float | None = None
    paused: Curve = field(default_factory=lambda: Curve(LATEST_COMPLETIONS))
    steps: int = 0
    beta: float | None = None
    last_skip: int | None = None
    trajectories: int = 0
    by_length: ByLength = field(default_factory=ByLength)
    skips: CumulativeCounter = field(default_factory=lambda: CumulativeCounter("train/skipped_steps"))
    rejections: dict[int, CumulativeCounter] = field(default_factory=dict)

    def take(self, record: Record) -> None:
        """One more record of the trainer. What a resume takes back is forgotten, as far as spans tell."""
        before = self.skips.total
        self.skips.take(record)
        self.by_length.take(record)
        step = number(record, "step")
        if step is not None and record.get("event") in STARTS:
            self._go_back(int(step))
        if step is None or "event" in record:
            return
        self.steps = max(self.steps, int(step))
        self.beta = number(record, "train/beta") or self.beta
        if self.skips.total > before:
            self.last_skip = int(step)
        if step == 1 and number(record, "train/reference_power", 1.0) == 1.0:
            self.first_log_ratio = number(record, "train/log_ratio")
        self._follow(self.curves, record, STEP_CURVES, int(step), 1.0)
        self._follow(self.newest, record, EARLY_SIGNS, int(step), 1.0)

    def _go_back(self, step: int) -> None:
        self.steps = min(self.steps, step)
        for curve in [*(self.curves[name] for name in STEP_CURVES), *self.newest.values()]:
            curve.cut(step)

    def take_search(self, searcher: int, record: Record) -> None:
        """One more record of a searcher."""
        self.rejections.setdefault(searcher, CumulativeCounter("search/rejected")).take(record)
        version, count = number(record, "search/version"), number(record, "search/trajectories", 0.0)
        paused = number(record, "search/paused_share")
        if version and paused is not None:
            self.paused.take(int(version), paused)
        if version is None or not count:
            return
        self.trajectories += int(count)
        self._follow(self.curves, record, FRESH_CURVES, int(version), count)
        if version == 0 and (kl := number(record, "search/kl")) is not None:
            self.initial_kl.take(0, kl, count)

    @staticmethod
    def _follow(
        curves: dict[str, Curve] | dict[str, Newest],
        record: Record,
        names: Sequence[str],
        step: int,
        weight: float,
    ) -> None:
        for name in names:
            if (value := number(record, name)) is not None and math.isfinite(value):
                curves[name].take(step, value, weight)

    def add(self, other: Trends) -> None:
        """Count what was folded of other files of the run as well."""
        for name, curve in other.curves.items():
            self.curves[name].add(curve)
        self.initial_kl.add(other.initial_kl)
        self.paused.add(other.paused)
        self.rejections |= other.rejections
        self.trajectories += other.trajectories

    @property
    def skipped(self) -> int:
        """Optimizer steps not taken, in all attempts."""
        return self.skips.total

    @property
    def rejected(self) -> int:
        """Trajectories set aside, in all attempts."""
        return sum(counter.total for counter in self.rejections.values())

    def trend(self, name: str) -> list[Point]:
        """Of a metric, by step."""
        return self.curves[name].trend.points

    def latest(self, name: str) -> float | None:
        """What a metric is now; None if it was never recorded."""
        return self.curves[name].latest

    @property
    def engine_gap(self) -> float | None:
        """As the searchers measure it now, or else the trainer."""
        fresh = self.latest("search/engine_gap")
        return self.latest("train/engine_gap") if fresh is None else fresh
