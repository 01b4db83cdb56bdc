"""A run's figures as curves over its steps, folded record by record in bounded memory.

A day's records of many searchers come to a few dozen points a figure, which average its noise away. What was
folded of several files adds up. It must not know which figures are healthy.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, Self, TypeVar

from tba_hpc.report.attempts import STARTS, CumulativeCounter
from tba_hpc.run.metrics import TENTHS, Record, number

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


OF_NEWEST = ("train/log_weight", "train/better_log_weight")
"""Figures of optimizer steps that may tell within some dozen steps what comes."""

NEWEST_STEPS = 120
"""So many of the newest steps are kept one by one."""

AFTER_START = 2
"""Optimizer steps after the first weights of a start in which a policy has not yet moved far."""


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
        """Count all values of another one as well: as if this one had taken them."""
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
class Curve(Spans[tuple[float, float]]):
    """Weighted means over spans of steps.

    latest_weight: of what ``latest`` is the mean. sums: of value · weight, and of the weights.
    """

    latest_weight: float
    spans: int = SPANS
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

    def latest(self) -> float | None:
        """Mean of the newest points that together have the weight for it, or of all; None of nothing."""
        total = weights = 0.0
        for point in reversed(self.points):
            if weights >= self.latest_weight:
                break
            total, weights = total + point.value * point.weight, weights + point.weight
        return total / weights if weights else None


class Newest(Curve):
    """The values of the newest steps, each for itself: spans of a long run would hide what begins in them."""

    def _bound(self) -> None:
        while len(self.sums) > self.spans:
            del self.sums[min(self.sums)]


def _fresh_curve() -> Curve:
    return Curve(LATEST_COMPLETIONS)


@dataclass
class AcrossStarts:
    """The KL of a searcher's completions shortly before each of its starts, and shortly after.

    A resume goes on with the weights of the stop, or of some steps before: the two are about the same.
    before, last: by version, of the attempt before and of this one; first: of the first versions of this one,
    which ``began`` with that version.
    """

    before: Curve | None = None
    last: Curve = field(default_factory=_fresh_curve)
    first: Curve = field(default_factory=_fresh_curve)
    began: int | None = None

    def start(self) -> None:
        """What comes now is of another attempt."""
        if self.last.sums:
            self.before = self.last
        self.last, self.first, self.began = _fresh_curve(), _fresh_curve(), None

    def take(self, version: int, kl: float, weight: float) -> None:
        """One more mean of so many completions, sampled by the weights of ``version``."""
        self.began = version if self.began is None else self.began
        self.last.take(version, kl, weight)
        if version <= self.began + AFTER_START:
            self.first.take(version, kl, weight)

    @property
    def change(self) -> tuple[float, float] | None:
        """Before and after the last start; None where one is not known."""
        before = self.before.latest() if self.before else None
        after = self.first.latest()
        return None if before is None or after is None else (before, after)


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
        """Share of what came of these tenths, 0 … 1, that was dropped; 0 where nothing came."""
        return sum(self.unlearned[first:end]) / max(1, sum(self.came[first:end]))


@dataclass
class History:
    """The curves of a run, by the names of the metrics, and what is counted since its start."""

    curves: dict[str, Curve] = field(
        default_factory=lambda: {
            **{name: Curve(LATEST_STEPS) for name in OF_STEPS},
            **{name: _fresh_curve() for name in OF_FRESH},
        }
    )
    newest: dict[str, Newest] = field(
        default_factory=lambda: {name: Newest(LATEST_STEPS, NEWEST_STEPS) for name in OF_NEWEST}
    )
    initial_kl: Curve = field(default_factory=_fresh_curve)
    """search/kl of what the initial weights sampled alone: a single point, at step 0."""
    first_log_ratio: float | None = None
    """train/log_ratio of the first step, where that is plainly against π_ref."""
    starts: dict[int, AcrossStarts] = field(default_factory=dict)
    """search/kl across the last start of each searcher."""
    paused: Curve = field(default_factory=_fresh_curve)
    """Share of its time that a searcher with trained weights was idle, by version."""
    steps: int = 0
    beta: float | None = None
    """β of the last step."""
    last_skip: int | None = None
    """The last step that was skipped."""
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
        self._follow(record, OF_STEPS, int(step), 1.0)
        for name, curve in self.newest.items():
            if (value := number(record, name)) is not None:
                curve.take(int(step), value)

    def _go_back(self, step: int) -> None:
        self.steps = min(self.steps, step)
        for curve in [*(self.curves[name] for name in OF_STEPS), *self.newest.values()]:
            curve.cut(step)

    def add(self, other: History) -> None:
        """Count what was folded of other files of the run as well."""
        for name, curve in other.curves.items():
            self.curves[name].add(curve)
        self.initial_kl.add(other.initial_kl)
        self.paused.add(other.paused)
        self.starts |= other.starts
        self.rejections |= other.rejections
        self.trajectories += other.trajectories

    def take_search(self, searcher: int, record: Record) -> None:
        """One more record of a searcher."""
        self.rejections.setdefault(searcher, CumulativeCounter("search/rejected")).take(record)
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
        return self.skips.total

    @property
    def rejected(self) -> int:
        """Trajectories set aside, in all attempts."""
        return sum(counter.total for counter in self.rejections.values())

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
