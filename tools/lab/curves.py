"""Arithmetic on learning curves, and the learning curve of a run from its files.

A curve is a list of (when, pass@1), ascending: seconds on the training clock, or steps.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from tba_hpc.report.data import read_evaluations, series
from tba_hpc.run.directory import RunDir
from tba_hpc.run.history import step_records
from tba_hpc.run.metrics import Record, number, read_metrics

Curve = Sequence[tuple[float, float]]


def time_to(curve: Curve, threshold: float) -> float | None:
    """When a curve first reaches ``threshold``, on straight lines between its points; None: never.

    A curve that begins above it counts as reaching it at its first point.
    """
    if curve and curve[0][1] >= threshold:
        return curve[0][0]
    for (t0, p0), (t1, p1) in pairwise(curve):
        if p1 >= threshold:
            return t0 + (t1 - t0) * (threshold - p0) / (p1 - p0)
    return None


def last_part(curve: Curve, share: float) -> list[float]:
    """pass@1 at the last ``share`` of the points, at least one."""
    count = max(1, round(share * len(curve)))
    return [value for _, value in curve[-count:]]


@dataclass(frozen=True)
class Course:
    """The evaluations of a run in order: (seconds of training, optimizer steps, pass@1) each."""

    points: Sequence[tuple[float, float, float]]

    @property
    def over_seconds(self) -> Curve:
        """How fast it learns on this machine."""
        return [(seconds, value) for seconds, _, value in self.points]

    @property
    def over_steps(self) -> Curve:
        """How fast it learns on any."""
        return [(step, value) for _, step, value in self.points]

    @property
    def end(self) -> float:
        """Mean pass@1 of the last three evaluations: one alone is noisy."""
        return statistics.fmean(value for _, _, value in self.points[-3:])


def course_of(run: RunDir, *, evaluations_count: bool = True) -> Course:
    """Greedy pass@1 on the validation split over seconds and steps, of a finished run.

    The clock starts when the first engine has its first weights, so that the start of processes and engines
    is left out; a point stands where the weights that were evaluated came to be. ``evaluations_count``: False
    takes off the clock the time that earlier evaluations took the engines, by their tokens: in a synchronous
    run the trainer waits for them.
    """
    trainer = read_metrics(run.metrics_file("trainer"))
    searchers = [read_metrics(path) for path in run.searcher_files().values()]
    steps = step_records(trainer)
    reached = {int(number(record, "step", 0)): number(record, "time", 0.0) for record in steps}
    start, lost, points = clock_start(trainer, searchers), 0.0, []
    rate = 0.0 if evaluations_count else 1 / tokens_per_second(searchers)
    for evaluation in read_evaluations(run).values():
        if evaluation.split == "validation":
            points.append((reached[evaluation.step] - start - lost, float(evaluation.step), evaluation.score))
            lost += evaluation.tokens * rate
    return Course(points)


def clock_start(trainer: Sequence[Record], searchers: Sequence[Sequence[Record]]) -> float:
    """Unix time at which the first searcher had the first weights in use; all records of each rank."""
    published = series(trainer, "time")[0]
    delays = [series(records, "search/propagation_seconds") for records in searchers]
    return published + min(delay[0] for delay in delays if delay)


def tokens_per_second(searchers: Sequence[Sequence[Record]]) -> float:
    """Of all engines together while they are at work."""
    return sum(_busy_rate(records) for records in searchers)


def _busy_rate(records: Sequence[Record]) -> float:
    """Tokens of one engine ÷ seconds inside its steps."""
    at_work = [record for record in records if number(record, "search/tokens", 0.0)]
    busy = sum(_seconds(record) * number(record, "search/busy_share", 0.0) for record in at_work)
    return sum(series(at_work, "search/tokens")) / busy if busy else 0.0


def _seconds(record: Record) -> float:
    """Wall time that a record of a searcher covers."""
    return number(record, "search/tokens", 0.0) / number(record, "search/tokens_per_second", 1.0)
