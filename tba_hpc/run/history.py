"""What a run did, by its own records: of the trainer, less what every resume took back, and of each searcher.

The one reader of that history: audit, samples and replay look at different parts of it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple, cast

from tba_hpc.run.directory import RunDir, ShardKey
from tba_hpc.run.metrics import MetricsTail, Record, number


class ShardSize(NamedTuple):
    """What a shard holds: trajectories, and the tokens of their completions."""

    trajectories: int
    tokens: int


EMPTY = ShardSize(0, 0)


@dataclass(frozen=True, slots=True)
class Merge:
    """A shard that the trainer merged; request_ids: places of its groups in the prompt sequence.

    step: optimizer steps done by then; sync: version of the weights published last. late, again:
    trajectories that stayed out by rule, as they came too late, or their request had been answered before;
    answered: these requests.
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
    late: int = 0
    again: int = 0
    answered: tuple[int, ...] = ()

    @property
    def left_out(self) -> int:
        """Trajectories that stayed out of the buffer by rule."""
        return self.late + self.again

    @classmethod
    def of(cls, record: Record) -> Merge:
        """From the event ``merged`` of the trainer's metrics."""
        counts = ("step", "sync", "revision", "trajectories", "tokens", "added", "duplicates", "evicted")
        return cls(
            key=(whole(record, "searcher"), whole(record, "shard")),
            request_ids=tuple(cast(list[int], record.get("request_ids", []))),
            answered=tuple(cast(list[int], record.get("answered", []))),
            **{name: whole(record, name) for name in (*counts, "late", "again")},
        )


@dataclass(frozen=True, slots=True)
class Step:
    """An optimizer step.

    sync: version of the weights published last. added, duplicates, evicted: what the buffer had counted by
    then. merges, dropped: shards merged before it, and trajectories evicted between merges.
    """

    step: int
    sync: int
    added: int
    duplicates: int
    evicted: int
    merges: int
    dropped: int


@dataclass(slots=True)
class History:
    """The surviving past of the trainer.

    merges, steps: in order. evictions: by revision, trajectories dropped between merges: stale, of an old
    reference, or used up. starts: how often a trainer began its loop. redone: per resume, the steps that it
    took back.
    """

    merges: list[Merge] = field(default_factory=list)
    evictions: dict[int, int] = field(default_factory=dict)
    steps: list[Step] = field(default_factory=list)
    starts: int = 0
    redone: list[int] = field(default_factory=list)
    _dropped: int = 0

    @classmethod
    def read(cls, run: RunDir) -> History:
        """Of the trainer's metrics as they are now."""
        return cls.of(MetricsTail(run.metrics_file("trainer")).records())

    @classmethod
    def of(cls, records: Iterable[Record]) -> History:
        """Fold the records of the trainer's metrics."""
        history = cls()
        for record in records:
            history._take(record)
        return history

    def _take(self, record: Record) -> None:
        match record.get("event"):
            case None:
                counts = {
                    name: whole(record, f"buffer/{name}") for name in ("added", "duplicates", "evicted")
                }
                step, sync = whole(record, "step"), whole(record, "sync/version")
                merges, dropped = len(self.merges), self._dropped
                self.steps.append(Step(step=step, sync=sync, merges=merges, dropped=dropped, **counts))
            case "merged":
                self.merges.append(Merge.of(record))
            case "evicted":
                self.evictions[whole(record, "revision")] = evicted = whole(record, "evicted")
                self._dropped += evicted
            case "started" | "resumed":
                self._go_back(whole(record, "step"), whole(record, "revision"))

    def _go_back(self, step: int, revision: int) -> None:
        """Begin again from a checkpoint of ``step`` and ``revision``, or from nothing."""
        steps = [taken for taken in self.steps if taken.step <= step]
        if self.starts:
            self.redone.append(len(self.steps) - len(steps))
        self.starts += 1
        self.steps, self.merges = steps, self.until(revision)
        self.evictions = {at: count for at, count in self.evictions.items() if at <= revision}
        self._dropped = self.dropped()

    def until(self, revision: int) -> list[Merge]:
        """Merges up to a revision."""
        return [merge for merge in self.merges if merge.revision <= revision]

    def revisions(self, last: float = math.inf) -> list[int]:
        """The revisions of merges and evictions, up to the last, ascending."""
        found = (*(merge.revision for merge in self.merges), *self.evictions)
        return sorted(revision for revision in found if revision <= last)

    def dropped(self, last: float = math.inf) -> int:
        """Trajectories evicted between merges, up to a revision."""
        return sum(count for revision, count in self.evictions.items() if revision <= last)

    @property
    def last_step(self) -> int:
        """Optimizer steps done."""
        return self.steps[-1].step if self.steps else 0


@dataclass(slots=True)
class Seals:
    """What a searcher said about its shards.

    sizes: per index, of every seal under it (more than one: the file before had vanished). place, searchers,
    issued, indices: of its last start, its place among how many searchers that shared the prompts (0: it
    cannot be told), how many prompts it had taken by its last seal, and the shards sealed by then.
    """

    sizes: dict[int, list[ShardSize]] = field(default_factory=dict)
    place: int | None = None
    searchers: int = 0
    issued: int = 0
    indices: list[int] = field(default_factory=list)

    @classmethod
    def of(cls, records: Iterable[Record]) -> Seals:
        """Fold the records of a searcher's metrics."""
        seals = cls()
        for record in records:
            match record.get("event"):
                case "started":
                    seals.searchers, seals.issued, seals.indices = whole(record, "searchers"), 0, []
                    seals.place = whole(record, "place") if "place" in record else None
                case "moved":
                    seals.searchers = 0
                case "sealed":
                    index = whole(record, "shard")
                    size = ShardSize(whole(record, "trajectories"), whole(record, "tokens"))
                    seals.sizes.setdefault(index, []).append(size)
                    seals.issued = whole(record, "search/issued")
                    seals.indices.append(index)
        return seals


def whole(record: Record, name: str) -> int:
    """A count; 0 if it is missing."""
    return int(number(record, name, 0))
