"""What a run has written since the last look, as figures at optimizer steps."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from tba_hpc.report.data import searcher_files
from tba_hpc.run.directory import RunDir
from tba_hpc.run.evaluations import Answer, evaluations_on_disk, find_evaluation
from tba_hpc.run.metrics import MetricsTail, Record, number


@dataclass(frozen=True, slots=True)
class Point:
    """Figures by name at an optimizer step. time: unix seconds, None if unknown.

    answers: some of an evaluation's, by the name of its split. again: whether training resumes from this
    step, and what was reported of later ones is taken back.
    """

    step: int
    figures: Mapping[str, float] = field(default_factory=dict)
    answers: Mapping[str, Sequence[Answer]] = field(default_factory=dict)
    time: float | None = None
    again: bool = False


class News:
    """Reads a run from where ``state``, which is JSON, says; from the start if it says nothing."""

    def __init__(self, run: RunDir, state: Mapping[str, Any]) -> None:
        self._run = run
        self._places: dict[str, int] = dict(state.get("places", {}))
        self._evaluated: set[str] = set(state.get("evaluated", ()))
        self.ended = False
        """Whether the trainer's last record says that it has stopped or finished."""

    def state(self) -> dict[str, Any]:
        """How far it has read."""
        return {"places": self._places, "evaluated": sorted(self._evaluated)}

    def look(self) -> list[Point]:
        """What is new: of the trainer, of all searchers together, and whole evaluations."""
        points = list(self._of_trainer())
        fresh: dict[int, list[Record]] = defaultdict(list)
        for path in searcher_files(self._run):
            for record in self._records(path):
                if "search/version" in record:
                    fresh[int(number(record, "search/version", 0))].append(record)
        points += [Point(version, _means(records)) for version, records in sorted(fresh.items())]
        return points + self._of_evaluations()

    def _records(self, path: Path) -> Iterator[Record]:
        tail = MetricsTail(path, place=self._places.get(path.stem, 0))
        yield from tail.records()
        self._places[path.stem] = tail.place

    def _of_trainer(self) -> Iterator[Point]:
        for record in self._records(self._run.metrics_file("trainer")):
            step, event = int(number(record, "step", 0)), record.get("event")
            if event is None:
                yield Point(step, _scalars(record), time=number(record, "time"))
            elif event == "resumed":
                yield Point(step, again=True)
            self.ended = event in ("stopped", "finished")

    def _of_evaluations(self) -> list[Point]:
        points = []
        for name, (split, step) in sorted(evaluations_on_disk(self._run).items(), key=lambda one: one[1][1]):
            if name in self._evaluated or not (found := find_evaluation(self._run, split, step)):
                continue
            self._evaluated.add(name)
            figures = {f"{split}/{found.score_name}": found.score, f"{split}/perplexity": found.perplexity}
            figures[f"{split}/reward"] = found.rewards / found.graded if found.graded else None
            known = {key: value for key, value in figures.items() if value is not None}
            points.append(Point(step, known, {split: found.answers} if found.answers else {}))
        return points


def _scalars(record: Record) -> dict[str, float]:
    values = {name: number(record, name) for name in record if "/" in name}
    return {name: value for name, value in values.items() if value is not None}


def _means(records: Iterable[Record]) -> dict[str, float]:
    """Of each figure over the records that have it."""
    values = defaultdict[str, list[float]](list)
    for record in records:
        for name, value in _scalars(record).items():
            values[name].append(value)
    return {name: fmean(found) for name, found in values.items()}
