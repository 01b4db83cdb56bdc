"""A run's figures as curves over its steps, folded record by record in bounded memory.

A day's records of many searchers come to a few dozen points a figure, which average its noise away. It must
not know which of them are healthy.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from tba_hpc.metrics import Record, number
from tba_hpc.report.attempts import CumulativeCounter

SPANS = 64
"""Most points of a curve: enough to see a trend, and each of many records."""

LATEST_STEPS, LATEST_COMPLETIONS = 16, 256
"""What a figure of "now" is the mean of, where a point is not of more by itself."""

OF_STEPS = (
    "train/grad_norm",
    "train/log_ratio",
    "train/ess",
    "train/clip_share",
    "train/engine_gap",
    "train/flat_groups",
    "train/length",
    "train/replay_ratio",
    "train/wait_share",
)
"""Figures of optimizer steps that are followed."""

OF_FRESH = (
    "search/reward",
    "search/kl",
    "search/entropy",
    "search/length",
    "search/truncated_share",
    "search/flat_groups",
    "search/engine_gap",
)
"""Figures of fresh completions that are followed: means of a record, weighed by its trajectories."""


AFTER_START = 2
"""Optimizer steps after the first weights of a start in which a policy has not yet moved far."""


class Point(NamedTuple):
    """Mean over a span of steps. step: where the span begins; weight: what the mean is of."""

    step: int
    value: float
    weight: float


class Curve:
    """Weighted means over equal spans of steps, in whatever order values come.

    The spans double as soon as there are more than ``spans`` of them. latest_weight: of what ``latest`` is
    the mean.
    """

    def __init__(self, latest_weight: float, spans: int = SPANS) -> None:
        self._latest_weight = latest_weight
        self._spans = spans
        self._width = 1
        self._sums: dict[int, tuple[float, float]] = {}

    def take(self, step: int, value: float, weight: float = 1.0) -> None:
        """Count one more value, of ``step``."""
        self._add(step // self._width, value * weight, weight)
        while len(self._sums) > self._spans:
            self._width *= 2
            halves, self._sums = self._sums, {}
            for span, (total, weights) in halves.items():
                self._add(span // 2, total, weights)

    def _add(self, span: int, total: float, weight: float) -> None:
        before, weights = self._sums.get(span, (0.0, 0.0))
        self._sums[span] = before + total, weights + weight

    @property
    def points(self) -> list[Point]:
        """By step."""
        found = sorted(self._sums.items())
        return [Point(span * self._width, total / weight, weight) for span, (total, weight) in found]

    @property
    def values(self) -> list[float]:
        """Of the points, by step."""
        return [point.value for point in self.points]

    def latest(self) -> float | None:
        """Mean of the newest points that together have the weight for it, or of all; None of nothing."""
        total = weights = 0.0
        for point in reversed(self.points):
            if weights >= self._latest_weight:
                break
            total, weights = total + point.value * point.weight, weights + point.weight
        return total / weights if weights else None


class AcrossStarts:
    """The KL of a searcher's completions shortly before each of its starts, and shortly after.

    A resume goes on with the weights of the stop, or of some steps before: the two are about the same.
    """

    def __init__(self) -> None:
        self._before: Curve | None = None  # of the attempt before
        self._last = Curve(LATEST_COMPLETIONS)  # by version, of this attempt
        self._first = Curve(LATEST_COMPLETIONS)
        self._began: int | None = None

    def start(self) -> None:
        """What comes now is of another attempt."""
        if self._last.points:
            self._before = self._last
        self._last, self._first, self._began = Curve(LATEST_COMPLETIONS), Curve(LATEST_COMPLETIONS), None

    def take(self, version: int, kl: float, weight: float) -> None:
        """One more mean of so many completions, sampled by the weights of ``version``."""
        self._began = version if self._began is None else self._began
        self._last.take(version, kl, weight)
        if version <= self._began + AFTER_START:
            self._first.take(version, kl, weight)

    @property
    def change(self) -> tuple[float, float] | None:
        """Before and after the last start; None where one is not known."""
        before = self._before.latest() if self._before else None
        after = self._first.latest()
        return None if before is None or after is None else (before, after)


@dataclass
class History:
    """The curves of a run, by the names of the metrics, and what is counted since its start."""

    curves: dict[str, Curve] = field(
        default_factory=lambda: {
            **{name: Curve(LATEST_STEPS) for name in OF_STEPS},
            **{name: Curve(LATEST_COMPLETIONS) for name in OF_FRESH},
        }
    )
    initial_kl: Curve = field(default_factory=lambda: Curve(LATEST_COMPLETIONS))
    """search/kl of what the initial weights sampled alone: a single point, at step 0."""
    first_log_ratio: float | None = None
    """train/log_ratio of the first step, where that is plainly against π_ref."""
    starts: dict[int, AcrossStarts] = field(default_factory=dict)
    """search/kl across the last start of each searcher."""
    paused: Curve = field(default_factory=lambda: Curve(LATEST_COMPLETIONS))
    """Share of its time that a searcher with trained weights was idle, by version."""
    steps: int = 0
    beta: float | None = None
    """β of the last step."""
    last_skip: int | None = None
    """The last step that was skipped."""
    trajectories: int = 0
    _skipped: CumulativeCounter = field(default_factory=lambda: CumulativeCounter("train/skipped_steps"))
    _rejected: dict[int, CumulativeCounter] = field(default_factory=dict)

    def take(self, record: Record) -> None:
        """One more record of the trainer."""
        before = self._skipped.total
        self._skipped.take(record)
        step = number(record, "step")
        if step is None or "event" in record:
            return
        self.steps = max(self.steps, int(step))
        self.beta = number(record, "train/beta") or self.beta
        if self._skipped.total > before:
            self.last_skip = int(step)
        if step == 1 and number(record, "train/reference_power", 1.0) == 1.0:
            self.first_log_ratio = number(record, "train/log_ratio")
        self._follow(record, OF_STEPS, int(step), 1.0)

    def take_search(self, searcher: int, record: Record) -> None:
        """One more record of a searcher."""
        self._rejected.setdefault(searcher, CumulativeCounter("search/rejected")).take(record)
        starts = self.starts.setdefault(searcher, AcrossStarts())
        if record.get("event") == "started":
            starts.start()
        version, count = number(record, "search/version"), number(record, "search/trajectories", 0.0)
        paused = number(record, "search/paused_seconds")
        if version and paused is not None:
            self.paused.take(int(version), min(1.0, paused))  # a record is of about a second
        if version is None or not count:
            return
        self.trajectories += int(count)
        self._follow(record, OF_FRESH, int(version), count)
        if (kl := number(record, "search/kl")) is not None:
            starts.take(int(version), kl, count)
            if version == 0:
                self.initial_kl.take(0, kl, count)

    def _follow(self, record: Record, names: tuple[str, ...], step: int, weight: float) -> None:
        for name in names:
            if (value := number(record, name)) is not None:
                self.curves[name].take(step, value, weight)

    @property
    def skipped(self) -> int:
        """Optimizer steps not taken, in all attempts."""
        return self._skipped.total

    @property
    def rejected(self) -> int:
        """Trajectories set aside, in all attempts."""
        return sum(counter.total for counter in self._rejected.values())

    def points(self, name: str) -> list[Point]:
        """Of a metric, by step."""
        return self.curves[name].points

    def latest(self, name: str) -> float | None:
        """What a metric is now; None where it was never recorded."""
        return self.curves[name].latest()

    @property
    def engine_gap(self) -> float | None:
        """As the searchers measure it now, or else the trainer."""
        fresh = self.latest("search/engine_gap")
        return self.latest("train/engine_gap") if fresh is None else fresh
