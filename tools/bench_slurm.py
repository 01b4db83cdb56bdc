"""Measures how long the interruptions of runs took, by what the runs noted themselves. Changes nothing.

    python tools/bench_slurm.py RUN…

Needs no Slurm: RUN/events.jsonl says what batch scripts met, RUN/metrics/trainer.jsonl when steps were taken.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from tba_hpc.run.directory import RunDir
from tba_hpc.run.events import read_events
from tba_hpc.run.metrics import read_metrics

STEP = "step"
"""Name of an optimizer step among the marks of a run."""

INTERRUPTIONS = ("signal", "requeue", "failed")
"""Events after which a run has to start again, or soon will."""


@dataclass(frozen=True, slots=True)
class Interval:
    """Time from each ``begin`` to the first ``end`` after it."""

    what: str
    begin: str
    end: str


INTERVALS = (
    Interval("signal → checkpoint on disk", "signal", "checkpoint"),
    Interval("requeue → first optimizer step", "requeue", STEP),
    Interval("ranks ended badly → first optimizer step, same allocation", "failed", STEP),
    Interval("ranks about to start → first optimizer step", "start", STEP),
)

Mark = tuple[float, str]
"""When, in unix seconds, and what."""


def main(runs: Annotated[list[Path], typer.Argument(metavar="RUN…", help="Run directories.")]) -> None:
    """Print each kind of interval: how many, median, longest."""
    histories = [marks(RunDir.open(path)) for path in runs]
    table = Table("interval", "count", "median (s)", "longest (s)", box=SIMPLE_HEAD)
    for interval in INTERVALS:
        seconds = [wait for history in histories for wait in waits(history, interval)]
        figures = (f"{median(seconds):.1f}", f"{max(seconds):.1f}") if seconds else ("", "")
        table.add_row(interval.what, str(len(seconds)), *figures)
    Console().print(table)


def marks(run: RunDir) -> list[Mark]:
    """Events of the run and of its trainer, and its steps, by time."""
    records = [*read_events(run), *read_metrics(run.metrics_file("trainer"))]
    return sorted((float(record["time"]), str(record.get("event", STEP))) for record in records)


def waits(history: list[Mark], interval: Interval) -> list[float]:
    """Lengths, s, less those that another interruption cut short."""
    lengths: list[float] = []
    began: float | None = None
    for time, name in history:
        if name == interval.end and began is not None:
            lengths.append(time - began)
        if name in (interval.begin, interval.end, *INTERRUPTIONS):
            began = time if name == interval.begin else None
    return lengths


if __name__ == "__main__":
    typer.run(main)
