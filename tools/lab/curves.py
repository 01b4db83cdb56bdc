"""Arithmetic on learning curves, and the learning curve of a run from its files.

A curve is a list of points (x, pass@1) with ascending x. x is seconds of training, or optimizer steps.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from tba_hpc.report.data import read_evaluations, series
from tba_hpc.run.directory import RunDir
from tba_hpc.run.history import History
from tba_hpc.run.metrics import Record, number, read_metrics

Curve = Sequence[tuple[float, float]]


def time_to(curve: Curve, threshold: float) -> float | None:
    """Return the x at which a curve first reaches ``threshold``, interpolated linearly; None if it never
    does.

    For a curve that begins above the threshold this is the x of its first point.
    """
    if curve and curve[0][1] >= threshold:
        return curve[0][0]
    for (t0, p0), (t1, p1) in pairwise(curve):
        if p1 >= threshold:
            return t0 + (t1 - t0) * (threshold - p0) / (p1 - p0)
    return None


def last_part(curve: Curve, share: float) -> list[float]:
    """Return pass@1 at the last ``share`` of the points, and at one point at least."""
    count = max(1, round(share * len(curve)))
    return [value for _, value in curve[-count:]]


@dataclass(frozen=True)
class Course:
    """The evaluations of a run, in order: points (seconds of training, optimizer steps, pass@1)."""

    points: Sequence[tuple[float, float, float]]

    @property
    def over_seconds(self) -> Curve:
        """Pass@1 over seconds of training, which depend on the machine."""
        return [(seconds, value) for seconds, _, value in self.points]

    @property
    def over_steps(self) -> Curve:
        """Pass@1 over optimizer steps."""
        return [(step, value) for _, step, value in self.points]

    @property
    def end(self) -> float:
        """Mean pass@1 of the last three evaluations, since a single one is noisy."""
        return statistics.fmean(value for _, _, value in self.points[-3:])


def course_of(run: RunDir, *, evaluations_count: bool = True) -> Course:
    """Return the greedy pass@1 of a finished run on the validation split.

    Seconds are counted from the moment at which the first engine had its first weights, so they do not
    include the start of processes and engines. A point stands at the step that made the evaluated weights.
    evaluations_count: if False, the time of earlier evaluations is subtracted, estimated by their tokens,
    because the trainer of a synchronous run waits for evaluations.
    """
    trainer = read_metrics(run.metrics_file("trainer"))
    searchers = [read_metrics(path) for path in run.searcher_files().values()]
    steps = History.of(trainer).steps
    reached = {int(number(record, "step", 0)): number(record, "time", 0.0) for record in steps}
    start, lost, points = clock_start(trainer, searchers), 0.0, []
    rate = 0.0 if evaluations_count else 1 / tokens_per_second(searchers)
    for evaluation in read_evaluations(run).values():
        if evaluation.split == "validation":
            points.append((reached[evaluation.step] - start - lost, float(evaluation.step), evaluation.score))
            lost += evaluation.tokens * rate
    return Course(points)


def clock_start(trainer: Sequence[Record], searchers: Sequence[Sequence[Record]]) -> float:
    """Return the Unix time at which a searcher first used weights, from all records of each rank."""
    published = series(trainer, "time")[0]
    delays = [series(records, "search/propagation_seconds") for records in searchers]
    return published + min(delay[0] for delay in delays if delay)


def tokens_per_second(searchers: Sequence[Sequence[Record]]) -> float:
    """Return the tokens per second of all engines together, while they are at work."""
    return sum(_busy_rate(records) for records in searchers)


def _busy_rate(records: Sequence[Record]) -> float:
    """Return the tokens of one engine, divided by the time inside its steps, s."""
    at_work = [record for record in records if number(record, "search/tokens", 0.0)]
    busy = sum(_seconds(record) * number(record, "search/busy_share", 0.0) for record in at_work)
    return sum(series(at_work, "search/tokens")) / busy if busy else 0.0


def _seconds(record: Record) -> float:
    """Return the wall time that a searcher's record covers, s."""
    return number(record, "search/tokens", 0.0) / number(record, "search/tokens_per_second", 1.0)
