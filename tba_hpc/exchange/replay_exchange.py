"""The trainer's end of an exchange without searchers: it replays the shards of a recorded run in order.

A trainer's metrics record which shards arrived together, before which step, and which weights had been
published by then. So a trainer that behaves like the recorded one gets the same trajectories at the same
steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import groupby
from operator import attrgetter

from tba_hpc.core.ports import Write
from tba_hpc.core.types import BEHAVIOUR, Publication, Shard
from tba_hpc.run.directory import RunDir, ShardKey
from tba_hpc.run.history import History, integer


@dataclass(frozen=True, slots=True)
class Arrival:
    """Shards that arrived together.

    step: number of optimizer steps done by then. sync: version of the newest weights published by then.
    revision: how often merges or evictions had changed the buffer by then, this merge included.
    """

    step: int
    sync: int
    revision: int
    shards: tuple[ShardKey, ...]


@dataclass(frozen=True, slots=True)
class Recording:
    """Arrivals of shards and publications of weights in a run, without those that a resume has undone.

    arrivals: arrivals in order. published: versions of the weights that were published; None: a replay
    publishes whenever a publication is due. steps: number of optimizer steps done.
    """

    arrivals: tuple[Arrival, ...]
    published: frozenset[int] | None
    steps: int

    @classmethod
    def of(cls, run: RunDir) -> Recording:
        """Read the recording from the trainer's metrics of ``run``."""
        history = History.read(run)
        arrivals = []
        for revision, together in groupby(history.merges, attrgetter("revision")):
            merges = list(together)
            shards = tuple(merge.key for merge in merges)
            arrivals.append(Arrival(merges[0].step, merges[0].sync, revision, shards))
        published = frozenset(integer(step, "sync/version") for step in history.steps)
        return cls(tuple(arrivals), published, history.last_step)

    def delayed(self, steps: int) -> Recording:
        """Return a recording in which every shard arrives ``steps`` optimizer steps later."""
        later = (replace(one, step=one.step + steps, sync=one.sync + steps) for one in self.arrivals)
        return replace(self, arrivals=tuple(later))

    def at_once(self) -> Recording:
        """Return a recording in which all shards arrive before the first step."""
        keys = tuple(key for one in self.arrivals for key in one.shards)
        return replace(self, arrivals=(Arrival(0, 0, 1, keys),))

    def only(self, there: Iterable[ShardKey]) -> Recording:
        """Return a recording without the shards that are not in ``there``."""
        known = set(there)
        left = (replace(one, shards=tuple(k for k in one.shards if k in known)) for one in self.arrivals)
        return replace(self, arrivals=tuple(one for one in left if one.shards))


def of_behaviour(shard: Shard) -> Shard:
    """Return a shard whose reference, for each trajectory, is the policy that sampled the trajectory."""
    record = shard.trajectories.record.copy()
    record["reference"] = BEHAVIOUR
    logprobs = shard.trajectories.logprobs
    return replace(shard, trajectories=replace(shard.trajectories, record=record, ref_logprobs=logprobs))


class ReplayExchange:
    """TrainerExchange that replays a recording.

    If the trainer waits for more shards than had arrived by its step in the recorded run, perhaps because its
    config differs, the next arrival comes early. If the trainer waits and no arrival is left,
    ``stop_requested`` is True. read: function that returns a shard. cursors: by searcher, the index of its
    first shard that no earlier attempt merged. step: function that returns how many optimizer steps the
    trainer has done.
    """

    def __init__(
        self,
        recording: Recording,
        read: Callable[[ShardKey], Shard],
        cursors: Mapping[int, int],
        *,
        step: Callable[[], int],
    ) -> None:
        merged = {key for one in recording.arrivals for key in one.shards if key[1] < cursors.get(key[0], 0)}
        self._left = [one for one in recording.arrivals if not merged.issuperset(one.shards)][::-1]
        self._published, self._steps = recording.published, recording.steps
        self._read = read
        self._version = -1
        self._waits = False
        self._step = step

    def publish(self, publication: Publication, write: Write) -> bool:
        """Note the version of the weights, but send them to nobody.

        Returns False if the recorded run went on beyond this version without publishing it.
        """
        version = publication.version
        if self._published is not None and version < self._steps and version not in self._published:
            return False
        self._version = version
        return True

    def gather(self) -> bool:
        self._waits = True
        return True

    def collect(self) -> list[Shard]:
        due: list[ShardKey] = []
        while self._left and (self._is_due(self._left[-1]) or (self._waits and not due)):
            due += self._left.pop().shards
            self._waits = False
        return [self._read(key) for key in due]

    def _is_due(self, arrival: Arrival) -> bool:
        now = self._step()
        return arrival.step < now or (arrival.step == now and arrival.sync <= self._version)

    @property
    def stop_requested(self) -> bool:
        """True if the trainer waits for shards and none are left."""
        return self._waits and not self._left

    def close(self) -> None:
        """Do nothing, because no searcher waits for the end."""
