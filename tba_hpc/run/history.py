"""Surviving history of a run's trainer: its records, without those that a resume has undone."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple, cast

from tba_hpc.run.directory import RunDir, ShardKey
from tba_hpc.run.metrics import MetricsTail, Record, number


class ShardSize(NamedTuple):
    """Size of a shard: its trajectories, and the tokens of their completions."""

    trajectories: int
    tokens: int


EMPTY = ShardSize(0, 0)


@dataclass(frozen=True, slots=True)
class Merge:
    """Shard that the trainer merged.

    step: optimizer steps done by then. sync: version of the weights published last. request_ids: positions of
    its groups in the prompt sequence. again: trajectories left out because their request had been answered
    before. answered: those requests.
    """

    key: ShardKey
    step: int
    sync: int
    revision: int
    trajectories: int
    tokens: int
    request_ids: tuple[int, ...]
    added: int
    duplicates: int
    evicted: int
    again: int = 0
    answered: tuple[int, ...] = ()

    @classmethod
    def of(cls, record: Record) -> Merge:
        """Build a merge from an event ``merged`` of the trainer's metrics."""
        counts = ("step", "sync", "revision", "trajectories", "tokens", "added", "duplicates", "evicted")
        return cls(
            key=(whole(record, "searcher"), whole(record, "shard")),
            request_ids=tuple(cast(list[int], record.get("request_ids", []))),
            answered=tuple(cast(list[int], record.get("answered", []))),
            **{name: whole(record, name) for name in (*counts, "again")},
        )


@dataclass(slots=True)
class History:
    """Records of the trainer that still count.

    merges: in order. steps: the records of optimizer steps, in order. evictions: per revision, the number of
    trajectories dropped between merges: stale, of an old reference, or used up. starts: how often a trainer
    began its loop. redone: per resume, the number of steps that it undid. gaps: resumes from a state that is
    not on record, a phrase each.
    """

    merges: list[Merge] = field(default_factory=list)
    evictions: dict[int, int] = field(default_factory=dict)
    steps: list[Record] = field(default_factory=list)
    starts: int = 0
    redone: list[int] = field(default_factory=list)
    gaps: list[str] = field(default_factory=list)

    @classmethod
    def read(cls, run: RunDir) -> History:
        """Read the history from the trainer's metrics file as it is now."""
        return cls.of(MetricsTail(run.metrics_file("trainer")).records())

    @classmethod
    def of(cls, records: Iterable[Record]) -> History:
        """Build the history from records of the trainer's metrics."""
        history = cls()
        for record in records:
            history._take(record)
        return history

    def _take(self, record: Record) -> None:
        match record.get("event"):
            case None if "step" in record:
                self.steps.append(record)
            case "merged":
                self.merges.append(Merge.of(record))
            case "evicted":
                self.evictions[whole(record, "revision")] = whole(record, "evicted")
            case "started" | "resumed":
                self._go_back(whole(record, "step"), whole(record, "revision"))

    def _go_back(self, step: int, revision: int) -> None:
        """Drop records after ``step`` and ``revision``, where the trainer starts; both are 0 in a new run."""
        if step > self.last_step or revision > self.last_revision:
            self.gaps.append(
                f"a resume from step {step}, revision {revision} follows step {self.last_step}, "
                f"revision {self.last_revision}"
            )
        steps = [taken for taken in self.steps if whole(taken, "step") <= step]
        if self.starts:
            self.redone.append(len(self.steps) - len(steps))
        self.starts += 1
        self.steps, self.merges = steps, self.until(revision)
        self.evictions = {at: count for at, count in self.evictions.items() if at <= revision}

    def until(self, revision: int) -> list[Merge]:
        """List the merges up to a revision."""
        return [merge for merge in self.merges if merge.revision <= revision]

    def revisions(self, last: float = math.inf) -> list[int]:
        """List the revisions of merges and evictions up to ``last``, ascending."""
        found = (*(merge.revision for merge in self.merges), *self.evictions)
        return sorted(revision for revision in found if revision <= last)

    def dropped(self, last: float = math.inf) -> int:
        """Count the trajectories evicted between merges, up to a revision."""
        return sum(count for revision, count in self.evictions.items() if revision <= last)

    @property
    def last_step(self) -> int:
        """Number of optimizer steps done."""
        return whole(self.steps[-1], "step") if self.steps else 0

    @property
    def last_revision(self) -> int:
        """Newest revision of the buffer; 0 if there is none."""
        return max(self.revisions(), default=0)


def step_records(records: Iterable[Record]) -> list[Record]:
    """List the records of optimizer steps, ascending. A step repeated by a resume keeps the later record."""
    return History.of(records).steps


def whole(record: Record, name: str) -> int:
    """Return a field as an integer; 0 if it is missing."""
    return int(number(record, name, 0))
