"""The trainer's end of an exchange without searchers: it brings what another run has recorded, in its order.

It must not know what is learned from it. The trainer's metrics of a run tell which shards each collection
brought, before which step, and which weights were published by then; so a trainer that behaves the same gets
the same trajectories at the same moments.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from tba_hpc.core.types import BEHAVIOUR, Publication, Shard
from tba_hpc.exchange.hdf5_shards import ShardError, parse_shard
from tba_hpc.run.bundles import Key, Place
from tba_hpc.run.directory import RunDir
from tba_hpc.run.keeping import sealed_files
from tba_hpc.run.metrics import MetricsTail, Record, number


@dataclass(frozen=True, slots=True)
class Arrival:
    """What one collection brought before a step: shards, after weights of version ``sync`` were published."""

    step: int
    sync: int
    revision: int
    shards: tuple[Key, ...]


@dataclass(frozen=True, slots=True)
class Recording:
    """The past of a run, less what its resumes took back.

    arrivals: in order. published: versions of the weights that were, None where all that are due are. steps:
    optimizer steps done.
    """

    arrivals: tuple[Arrival, ...]
    published: frozenset[int] | None
    steps: int

    @classmethod
    def of(cls, run: RunDir) -> Recording:
        """Read the trainer's metrics."""
        arrivals: list[Arrival] = []
        published: dict[int, int] = {}  # by step
        for record in MetricsTail(run.metrics_file("trainer")).records():
            event = record.get("event")
            if event is None:
                published[_whole(record, "step")] = _whole(record, "sync/version")
            elif event == "merged":
                _add(arrivals, record)
            elif event in ("started", "resumed"):
                arrivals = [one for one in arrivals if one.revision <= _whole(record, "revision")]
                published = {at: version for at, version in published.items() if at <= _whole(record, "step")}
        return cls(tuple(arrivals), frozenset(published.values()), max(published, default=0))

    def delayed(self, steps: int) -> Recording:
        """Every shard so many steps later."""
        later = (replace(one, step=one.step + steps, sync=one.sync + steps) for one in self.arrivals)
        return replace(self, arrivals=tuple(later)) if steps else self

    def at_once(self) -> Recording:
        """All shards before the first step."""
        keys = tuple(key for one in self.arrivals for key in one.shards)
        return replace(self, arrivals=(Arrival(0, 0, 1, keys),))

    def only(self, there: Iterable[Key]) -> Recording:
        """Less the shards that are not there."""
        known = set(there)
        left = (replace(one, shards=tuple(k for k in one.shards if k in known)) for one in self.arrivals)
        return replace(self, arrivals=tuple(one for one in left if one.shards))


def _add(arrivals: list[Arrival], record: Record) -> None:
    key, revision, step = (
        (_whole(record, "searcher"), _whole(record, "shard")),
        _whole(record, "revision"),
        _whole(record, "step"),
    )
    if arrivals and arrivals[-1].revision == revision:
        arrivals[-1] = replace(arrivals[-1], shards=(*arrivals[-1].shards, key))
    else:
        arrivals.append(Arrival(step, _whole(record, "sync"), revision, (key,)))


def _whole(record: Record, name: str) -> int:
    return int(number(record, name, 0))


class RecordedShards:
    """The shards of a run that are still there: files of their own, in bundles, or kept. Read when asked for.

    behaviour: whether what sampled a trajectory is to be its reference, whatever was recorded.
    """

    def __init__(self, run: RunDir, *, behaviour: bool = False) -> None:
        self._run = run
        self._behaviour = behaviour
        self.places = sealed_files(run)

    def __call__(self, key: Key) -> Shard:
        """Raises ShardError where it is damaged, or gone by now; OSError where it cannot be read."""
        try:
            path, data = _read(self.places[key])
        except FileNotFoundError as error:
            self.places = sealed_files(self._run)  # a run at work puts together what it has merged
            if key not in self.places:
                raise ShardError(
                    f"{error.filename} is gone, as its run is at work: record with exchange.keep_shards=1"
                ) from None
            path, data = _read(self.places[key])
        shard = parse_shard(path, data)
        return _of_behaviour(shard) if self._behaviour else shard


def _read(place: Path | Place) -> tuple[Path, bytes]:
    """The file that a shard lies in, and the shard's bytes."""
    return (place, place.read_bytes()) if isinstance(place, Path) else (place.bundle, place.read())


def _of_behaviour(shard: Shard) -> Shard:
    record = shard.trajectories.record.copy()
    record["reference"] = BEHAVIOUR
    logprobs = shard.trajectories.logprobs
    return replace(shard, trajectories=replace(shard.trajectories, record=record, ref_logprobs=logprobs))


class ReplayExchange:
    """A TrainerExchange. ``step`` tells the trainer's step, and must be set before it runs.

    Where the trainer waits for more than was there at the time, as another config may have it, the next
    arrival comes early; where nothing is left, a stop is requested. cursors: shards before these indices, by
    searcher, were merged by an attempt before.
    """

    def __init__(
        self, recording: Recording, read: Callable[[Key], Shard], cursors: Mapping[int, int]
    ) -> None:
        merged = {key for one in recording.arrivals for key in one.shards if key[1] < cursors.get(key[0], 0)}
        self._left = [one for one in recording.arrivals if not merged.issuperset(one.shards)][::-1]
        self._published = recording.published
        self._read = read
        self._version = -1
        self._waits = False
        self.step: Callable[[], int] = lambda: 0

    def publish(self, publication: Publication, write: Callable[[np.ndarray], None]) -> bool:
        """Nobody gets the weights; put off where they were put off."""
        version = publication.version
        if self._published and version not in self._published and version < max(self._published):
            return False
        self._version = version
        return True

    def gather(self) -> bool:
        """The trainer waits."""
        self._waits = True
        return True

    def collect(self) -> list[Shard]:
        """What had come by now."""
        due: list[Key] = []
        while self._left and (self._is_due(self._left[-1]) or (self._waits and not due)):
            due += self._left.pop().shards
            self._waits = False
        return [self._read(key) for key in due]

    def _is_due(self, arrival: Arrival) -> bool:
        now = self.step()
        return arrival.step < now or (arrival.step == now and arrival.sync <= self._version)

    @property
    def stop_requested(self) -> bool:
        """Whether the trainer waits for more than there is."""
        return self._waits and not self._left

    def close(self) -> list[Shard]:
        """Nothing is under way."""
        return []
