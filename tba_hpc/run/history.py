"""History of a run's training, from the trainer's metrics, without what a resume has undone."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple, cast

from tba_hpc.run.directory import RunDir, ShardKey
from tba_hpc.run.metrics import MetricsTail, Record, number


class ShardSize(NamedTuple):
    """Size of a shard: the number of its trajectories, and of the tokens of their completions."""

    trajectories: int
    tokens: int


EMPTY = ShardSize(0, 0)


@dataclass(frozen=True, slots=True)
class Merge:
    """The merging of a shard into the replay buffer.

    key: searcher and index of the shard. step: optimizer steps done by then. sync: version of the weights
    published last. revision: how often merges or evictions had changed the buffer, this one included.
    trajectories, tokens: size of the shard. request_ids: requests that the shard answers or sets aside.
    added, duplicates, evicted: trajectories that the buffer stored, dropped as duplicates, and evicted.
    answered: requests of the shard that an earlier shard had answered. again: number of the trajectories of
    these requests, which were left out.
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
        """Build from a line of the trainer's metrics whose event is ``merged``."""
        counts = ("step", "sync", "revision", "trajectories", "tokens", "added", "duplicates", "evicted")
        return cls(
            key=(integer(record, "searcher"), integer(record, "shard")),
            request_ids=tuple(cast(list[int], record.get("request_ids", []))),
            answered=tuple(cast(list[int], record.get("answered", []))),
            **{name: integer(record, name) for name in (*counts, "again")},
        )


@dataclass(slots=True)
class History:
    """Work of the trainer, without what a resume from an earlier checkpoint has undone.

    merges: merges, in order. steps: metrics of the optimizer steps, in order. evictions: numbers of
    trajectories evicted outside of merges (stale, of an old reference, or used up), by revision of the buffer
    (see Merge). starts: how often a trainer began its loop. redone: for each resume,
    the number of steps that it undid. gaps: a phrase for each resume whose checkpoint has a step or revision
    beyond the last one in the metrics.
    """

    merges: list[Merge] = field(default_factory=list)
    evictions: dict[int, int] = field(default_factory=dict)
    steps: list[Record] = field(default_factory=list)
    starts: int = 0
    redone: list[int] = field(default_factory=list)
    gaps: list[str] = field(default_factory=list)

    @classmethod
    def read(cls, run: RunDir) -> History:
        """Read the history from the metrics file of the run's trainer."""
        return cls.of(MetricsTail(run.metrics_file("trainer")).records())

    @classmethod
    def of(cls, records: Iterable[Record]) -> History:
        """Build the history from the lines of the trainer's metrics, in order."""
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
                self.evictions[integer(record, "revision")] = integer(record, "evicted")
            case "started" | "resumed":
                self._go_back(integer(record, "step"), integer(record, "revision"))

    def _go_back(self, step: int, revision: int) -> None:
        """Note a start from ``step`` and the buffer's ``revision``, and drop all records beyond them.

        Both are 0 in a new run.
        """
        if step > self.last_step or revision > self.last_revision:
            self.gaps.append(
                f"a resume from step {step}, revision {revision} follows step {self.last_step}, "
                f"revision {self.last_revision}"
            )
        steps = [taken for taken in self.steps if integer(taken, "step") <= step]
        if self.starts:
            self.redone.append(len(self.steps) - len(steps))
        self.starts += 1
        self.steps, self.merges = steps, self.until(revision)
        self.evictions = {at: count for at, count in self.evictions.items() if at <= revision}

    def until(self, revision: int) -> list[Merge]:
        """List the merges up to ``revision``, the number of a change of the buffer."""
        return [merge for merge in self.merges if merge.revision <= revision]

    def revisions(self, last: float = math.inf) -> list[int]:
        """List the numbers (revisions) of the buffer's changes on record, ascending, up to ``last``."""
        found = (*(merge.revision for merge in self.merges), *self.evictions)
        return sorted(revision for revision in found if revision <= last)

    def dropped(self, last: float = math.inf) -> int:
        """Count the trajectories evicted outside of merges, up to the buffer's change number ``last``."""
        return sum(count for revision, count in self.evictions.items() if revision <= last)

    @property
    def last_step(self) -> int:
        """Number of the last optimizer step on record; 0 if there is none."""
        return integer(self.steps[-1], "step") if self.steps else 0

    @property
    def last_revision(self) -> int:
        """Number (revision) of the buffer's last change on record; 0 if there is none."""
        return max(self.revisions(), default=0)


def integer(record: Record, name: str) -> int:
    """Return a field of a line of metrics as an integer; 0 if it is missing."""
    return int(number(record, name, 0))
