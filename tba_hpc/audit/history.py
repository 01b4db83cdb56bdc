"""What the metrics of a run say that it did, less what every resume took back.

It must not know what else lies on disk: the rest of the audit compares this history with it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import cast

from tba_hpc.metrics import Record, number

ShardKey = tuple[int, int]
"""Searcher and index of a shard."""


@dataclass(frozen=True, slots=True)
class Merge:
    """A shard that the trainer merged; positions: places of its groups in the prompt sequence."""

    key: ShardKey
    round: int
    trajectories: int
    tokens: int
    positions: tuple[int, ...]
    added: int
    duplicates: int
    evicted: int

    @classmethod
    def of(cls, record: Record) -> Merge:
        """From the event ``merged`` of the trainer's metrics."""
        counts = ("round", "trajectories", "tokens", "added", "duplicates", "evicted")
        return cls(
            key=(whole(record, "searcher"), whole(record, "shard")),
            positions=tuple(cast(list[int], record["positions"])),
            **{name: whole(record, name) for name in counts},
        )


@dataclass(frozen=True, slots=True)
class Eviction:
    """Trajectories that the trainer dropped between merges: too stale, or scored by an old reference."""

    round: int
    evicted: int


@dataclass(slots=True)
class History:
    """The surviving past of the trainer.

    merges, evictions: in order. steps: records of optimizer steps, each with the number of merges, and the
    trajectories evicted otherwise, before it. starts: how often a trainer began its loop. redone: per resume,
    the steps that it took back.
    """

    merges: list[Merge] = field(default_factory=list)
    evictions: list[Eviction] = field(default_factory=list)
    steps: list[tuple[Record, int, int]] = field(default_factory=list)
    starts: int = 0
    redone: list[int] = field(default_factory=list)

    @classmethod
    def of(cls, records: Iterable[Record]) -> History:
        """Fold the records of the trainer's metrics."""
        history = cls()
        for record in records:
            history._take(record)
        return history

    def _take(self, record: Record) -> None:
        event = record.get("event")
        if event is None:
            self.steps.append((record, len(self.merges), self.dropped()))
        elif event == "merged":
            self.merges.append(Merge.of(record))
        elif event == "evicted":
            self.evictions.append(Eviction(whole(record, "round"), whole(record, "evicted")))
        elif event in ("started", "resumed"):
            self._go_back(whole(record, "step"), whole(record, "round"))

    def _go_back(self, step: int, round: int) -> None:
        """Begin again from a checkpoint of ``step`` and ``round``, or from nothing."""
        steps = [taken for taken in self.steps if whole(taken[0], "step") <= step]
        if self.starts:
            self.redone.append(len(self.steps) - len(steps))
        self.starts += 1
        self.steps, self.merges = steps, self.until(round)
        self.evictions = [eviction for eviction in self.evictions if eviction.round <= round]

    def until(self, round: int) -> list[Merge]:
        """Merges up to a round."""
        return [merge for merge in self.merges if merge.round <= round]

    def rounds(self, last: float = math.inf) -> list[int]:
        """The rounds of merges and evictions, up to the last, ascending."""
        found = [*(merge.round for merge in self.merges), *(drop.round for drop in self.evictions)]
        return sorted(round for round in found if round <= last)

    def dropped(self, last: float = math.inf) -> int:
        """Trajectories evicted between merges, up to a round."""
        return sum(eviction.evicted for eviction in self.evictions if eviction.round <= last)

    @property
    def last_step(self) -> int:
        """Optimizer steps done."""
        return whole(self.steps[-1][0], "step") if self.steps else 0


@dataclass(slots=True)
class Seals:
    """What a searcher said about its shards.

    trajectories: per index, the count of every seal under it (more than one: the file before had vanished).
    searchers, dealt, indices: of its last start, how many searchers shared the prompts, how many prompts
    it had taken by its last seal, and the shards sealed by then.
    """

    trajectories: dict[int, list[int]] = field(default_factory=dict)
    searchers: int = 0
    dealt: int = 0
    indices: list[int] = field(default_factory=list)

    @classmethod
    def of(cls, records: Sequence[Record]) -> Seals:
        """Fold the records of a searcher's metrics."""
        seals = cls()
        for record in records:
            if record.get("event") == "started":
                seals.searchers, seals.dealt, seals.indices = whole(record, "searchers"), 0, []
            elif record.get("event") == "sealed":
                index = whole(record, "shard")
                seals.trajectories.setdefault(index, []).append(whole(record, "trajectories"))
                seals.dealt = whole(record, "search/dealt")
                seals.indices.append(index)
        return seals


def whole(record: Record, name: str) -> int:
    """A count; 0 where it is missing."""
    return int(number(record, name, 0))
