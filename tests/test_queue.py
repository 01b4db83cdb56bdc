"""A queue of bounded staleness, tick by tick: whatever takes how long, nothing is dropped for its age."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_freshness import shard

from tba_hpc.config import Config, is_elastic, parse_config
from tba_hpc.core.buffer import ReplayBuffer
from tba_hpc.core.prompts import CompletedRequests
from tba_hpc.core.types import Publication, Shard
from tba_hpc.loops.elastic import ElasticSearchers
from tba_hpc.loops.freshness import Freshness
from tba_hpc.loops.publish_schedule import PublishSchedule
from tba_hpc.run.directory import RunDir
from tba_hpc.run.notes import rank_name
from tba_hpc.run.owners import Claim, Owner

STEP_TICKS, IN_FLIGHT, STEPS = 3, 8, 50
LENGTHS = np.random.default_rng(0).geometric(0.15, 100_000)

NOBODY = np.empty(0, np.int64)

TicksOf = Callable[[int, int], int]
"""How long a request takes a searcher."""


def quick_or_slow(request_id: int, searcher: int) -> int:
    """Every tenth answer is five times as long."""
    return 30 if request_id % 10 == 3 else 6


def uneven(request_id: int, searcher: int) -> int:
    """One searcher is three times as slow."""
    return 18 if searcher else 6


def geometric(request_id: int, searcher: int) -> int:
    """As texts that end at each token with the same probability."""
    return int(LENGTHS[request_id])


def config_of(bound: int, sync_every: int, *, searchers: int = 2, slots: int = 0) -> Config:
    """Four groups of two a step, by two searchers, in a queue that has room for what it must hold."""
    return parse_config(
        {
            "model": {"path": "tiny"},
            "generator": {"completions_per_prompt": 2},
            "buffer": {"capacity": 8 * (bound + 1), "initial_completions": 8, "replay_limit": 1},
            "train": {"prompts_per_step": 4, "completions_per_prompt": 2, "steps": 1000},
            "exchange": {"max_staleness": bound, "sync_every": sync_every},
            "launch": {"searchers": searchers, "elastic": slots},
        }
    )


@dataclass
class Holder:
    """A searcher at work. ready: tick from which its engine has weights. told: publication it took last."""

    lease: int
    ready: int
    upcoming: int
    told: Publication
    in_flight: list[tuple[int, int, int]] = field(default_factory=list)  # done at a tick, request, version


@dataclass(frozen=True)
class Weather:
    """What a run is exposed to.

    look, build, read: ticks between looks for elastic searchers, to build an engine, and of a round. changes:
    share of ticks at which an elastic searcher comes or vanishes. aside: share of groups set aside.
    """

    look: int = 1
    build: int = 0
    read: int = 0
    changes: float = 0.05
    aside: float = 0.0
    seed: int = 1


class Watched(ElasticSearchers):
    """Looks at ``holders`` instead of a folder, every so many ticks."""

    def __init__(self, config: Config, holders: Mapping[int, Holder]) -> None:
        super().__init__(RunDir(Path()), config)
        self._holders = holders

    def look(self, tick: int) -> None:
        """Note who is there."""
        self._there = {
            name: Claim(name, holder.lease, None, Owner(ready=holder.ready <= tick))
            for number, holder in self._holders.items()
            if (name := rank_name("searcher", number)) in self._names
        }

    def _last(self) -> dict[str, Claim]:
        return self._there


class Flow:
    """A run: requests are issued, answered, fetched in rounds, merged and learned from.

    ages: groups learned from, by the steps since the weights that sampled them. dropped: groups that became
    too stale. arrived: how often each request was completed. Searchers that vanish lose what is in flight.
    """

    def __init__(self, config: Config, ticks_of: TicksOf, weather: Weather = Weather()) -> None:
        self.config, self._ticks_of, self._weather = config, ticks_of, weather
        self.ages, self.dropped, self.arrived = Counter[int](), 0, Counter[int]()
        self.buffer = ReplayBuffer(config.buffer, 0, queue=config.queue)
        self._freshness = Freshness(config, self.buffer)
        self._freshness.begin(0, CompletedRequests())
        self._schedule = PublishSchedule(config, self._freshness, 0)
        self._completed = CompletedRequests()
        self._random = np.random.default_rng(weather.seed)
        self._tick = self._step = self._leases = 0
        self._told = Publication(version=0, budget_end=0)
        self._holders: dict[int, Holder] = {}  # by the searcher's number
        self._visitors = Watched(config, self._holders)
        self._on_disk: list[Shard] = []
        self._collected: list[Shard] = []
        self._round: tuple[int, Publication | None, Iterator[Shard]] | None = None  # its last tick
        for searcher in range(config.launch.searchers):
            self._come(searcher)

    def run(self) -> Flow:
        """To the last step."""
        busy_until = 0
        for self._tick in range(20_000):
            self._visit()
            for searcher in list(self._holders):
                self._search(searcher)
            self._end_round()
            if self._tick >= busy_until:
                self._merge()
                if not self._publish() and self._freshness.missing(self._step):
                    self._begin_round(None)
                self._end_round()
                self._merge()
                if not self._freshness.missing(self._step):
                    self._learn()
                    busy_until = self._tick + STEP_TICKS
            if self._step == STEPS:
                return self
        raise AssertionError(f"step {self._step} waits for ever")

    # --- Searchers ---

    def _visit(self) -> None:
        """Let elastic searchers come or vanish, half of the latter in favour of a successor."""
        for searcher in self.config.launch.elastic_searchers:
            changes = not self._tick or self._random.random() < self._weather.changes
            if changes and (self._holders.pop(searcher, None) is None or self._random.random() < 0.5):
                self._come(searcher)
        if self._tick % self._weather.look == 0:
            self._visitors.look(self._tick)

    def _come(self, searcher: int) -> None:
        """Join with the publication of the moment, whose weights the engine loads once it is built."""
        self._leases += 1
        ready = self._tick + (self._weather.build if is_elastic(searcher) else 0)
        place = self.config.launch.place_of(searcher)
        self._holders[searcher] = Holder(self._leases, ready, place, self._told)

    def _may_issue(self, searcher: int, holder: Holder) -> bool:
        told = holder.told.for_lease(searcher, holder.lease) if is_elastic(searcher) else holder.told
        while holder.upcoming in self._completed:
            holder.upcoming += self.config.launch.places
        return holder.upcoming < (told.budget_end or 0)

    def _search(self, searcher: int) -> None:
        holder, tick = self._holders[searcher], self._tick
        if holder.ready <= tick:
            holder.told = self._told
        while len(holder.in_flight) < IN_FLIGHT and self._may_issue(searcher, holder):
            done = max(tick, holder.ready) + self._ticks_of(holder.upcoming, searcher)
            holder.in_flight.append((done, holder.upcoming, holder.told.version))
            holder.upcoming += self.config.launch.places
        for answer in [answer for answer in holder.in_flight if answer[0] <= tick]:
            holder.in_flight.remove(answer)
            self._seal(searcher, *answer[1:])

    def _seal(self, searcher: int, request_id: int, version: int) -> None:
        self._completed.add(request_id)
        sealed = shard(searcher, request_id, version=version)
        if self._random.random() < self._weather.aside:
            sealed = replace(sealed, trajectories=sealed.trajectories.take(NOBODY), set_aside=(request_id,))
        self._on_disk.append(sealed)

    # --- The trainer ---

    def _publish(self) -> bool:
        """Begin to publish if that is due; tell whether it began."""
        if not self._schedule.due(self._step):
            return False
        publication = self._schedule.publication(self._step)
        started = self._begin_round(publication)
        self._schedule.note(publication, started=started)
        return started

    def _begin_round(self, publication: Publication | None) -> bool:
        """Look for shards, and take some time for it; False if a round is under way."""
        if self._round:
            return False
        found, self._on_disk = self._on_disk, []
        read = self._visitors.reading(lambda _: found)({})
        self._collected += [one for one in [next(read, None)] if one]  # whoever is at work is noted now
        self._round = self._tick + self._weather.read, publication, read
        return True

    def _end_round(self) -> None:
        if self._round and self._round[0] <= self._tick:
            (_, publication, read), self._round = self._round, None
            self._collected += read
            self._told = publication or self._told

    def _merge(self) -> None:
        self._freshness.note_elastic_leases(self._visitors.ready())
        collected, self._collected = self._collected, []
        for one in collected:
            self._freshness.arrive(one, self._step)
            self.arrived.update(one.request_ids.tolist())
            self.buffer.merge(one.trajectories, self._tick)
        if collected:
            self._evict()

    def _evict(self) -> None:
        record = self.buffer._store.record()
        new = ~np.isin(record["request_id"], record["request_id"][record["uses"] > 0])
        self.dropped += int((new & self._freshness.is_stale(record, self._step)).sum()) // 2
        self._freshness.evict_stale(self._step)

    def _learn(self) -> None:
        batch = self.buffer.sample(self._step, groups=4, group_size=2)
        self.ages.update((self._step - batch.version_N[::2]).tolist())
        self._step += 1
        self._evict()


def hold(flow: Flow) -> None:
    """Nothing is dropped, lost, doubled, or older than the bound."""
    bound = flow.config.exchange.max_staleness
    assert bound is not None and flow.config.queue
    assert flow.dropped == 0
    assert max(flow.ages) <= bound and sum(flow.ages.values()) == 4 * STEPS
    assert flow.buffer.evicted == 8 * STEPS, "what was used, and nothing for lack of room"
    assert set(flow.arrived.values()) == {1}


@pytest.mark.parametrize("ticks_of", [quick_or_slow, uneven, geometric])
@pytest.mark.parametrize(("bound", "sync_every"), [(1, 1), (1, 2), (3, 1), (3, 2), (8, 2), (8, 8)])
def test_a_queue_drops_nothing_whatever_takes_how_long(
    bound: int, sync_every: int, ticks_of: TicksOf
) -> None:
    """And nothing is older than the bound, which the oldest reach."""
    queue = Flow(config_of(bound, sync_every), ticks_of).run()
    hold(queue)
    assert max(queue.ages) == bound


FLOWS = [(1, 1, quick_or_slow), (3, 2, geometric), (8, 8, quick_or_slow)]

WEATHERS = {
    "seen at once": Weather(),
    "all takes time": Weather(look=15, build=20, read=4, changes=0.03),
    "a fifth set aside": Weather(changes=0.0, aside=0.2),
    "both": Weather(look=15, build=20, read=4, changes=0.03, aside=0.1),
}


def weathers() -> list[Any]:
    """The last, which has all faults, in ``make test``; the others in ``make nightly``."""
    *others, worst = WEATHERS.values()
    return [*(pytest.param(weather, marks=pytest.mark.nightly) for weather in others), worst]


@pytest.mark.parametrize("weather", weathers(), ids=WEATHERS)
@pytest.mark.parametrize("searchers", [0, 1])
@pytest.mark.parametrize(("bound", "sync_every", "ticks_of"), [(0, 1, geometric), *FLOWS])
def test_nor_if_elastic_searchers_come_and_vanish_and_groups_are_set_aside(
    bound: int, sync_every: int, ticks_of: TicksOf, searchers: int, weather: Weather
) -> None:
    """Each in a history of its own."""
    config = config_of(bound, sync_every, searchers=searchers, slots=3)
    hold(Flow(config, ticks_of, replace(weather, seed=10 * bound + searchers)).run())
