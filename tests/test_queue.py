"""A queue of bounded staleness, tick by tick: whatever takes how long, nothing is dropped for its age."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import count

import numpy as np
import pytest
from test_freshness import shard

from tba_hpc.config import Config, is_elastic, parse_config
from tba_hpc.core.buffer import ReplayBuffer
from tba_hpc.core.prompts import CompletedRequests
from tba_hpc.loops.freshness import Freshness

STEP_TICKS, IN_FLIGHT, STEPS = 3, 8, 80
LENGTHS = np.random.default_rng(0).geometric(0.15, 100_000)

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


class Flow:
    """A run: requests are issued, answered, merged and learned from. dropped: what was too stale, by request.

    ages: groups learned from, by the steps since the weights that sampled them. visits: whether elastic
    searchers come, and vanish with all that they have in flight.
    """

    def __init__(self, config: Config, ticks_of: TicksOf) -> None:
        self.config, self._ticks_of = config, ticks_of
        self.ages, self.dropped = Counter[int](), 0
        self.buffer = ReplayBuffer(config.buffer, 0, queue=config.queue)
        self._freshness = Freshness(config, self.buffer)
        self._freshness.begin(0, CompletedRequests())
        self._completed = CompletedRequests()
        self._random = np.random.default_rng(1)
        self._upcoming: dict[int, int] = {}  # by searcher
        self._in_flight: dict[int, list[tuple[int, int, int]]] = {}  # done at a tick, request, version
        for searcher in range(config.launch.searchers):
            self._come(searcher)
        self._step = 0
        self._publish()

    def run(self) -> Flow:
        """To the last step."""
        busy_until = 0
        for tick in count():
            self._visit()
            for searcher in list(self._in_flight):
                self._search(searcher, tick)
            if self._freshness.exhausted(self._step):
                self._publish()
            if tick >= busy_until and not self._freshness.missing(self._step):
                self._learn()
                busy_until = tick + STEP_TICKS
            if self._step == STEPS:
                break
        return self

    def _publish(self) -> None:
        self._told = self._freshness.publication(self._step, evaluate=None, published=0.0)

    def _visit(self) -> None:
        """Let an elastic searcher come or vanish, in one of twenty ticks."""
        for searcher in self.config.launch.elastic_searchers:
            if self._random.random() < 0.05 and self._in_flight.pop(searcher, None) is None:
                self._come(searcher)
        self._freshness.note_visitors(lambda: {one for one in self._in_flight if is_elastic(one)})

    def _come(self, searcher: int) -> None:
        launch = self.config.launch
        self._in_flight[searcher], self._upcoming[searcher] = [], launch.place_of(searcher)

    def _may_issue(self, searcher: int) -> bool:
        told = self._told.for_slot(searcher) if is_elastic(searcher) else self._told
        while self._upcoming[searcher] in self._completed:
            self._upcoming[searcher] += self.config.launch.places
        return self._upcoming[searcher] < (told.budget_end or 0)

    def _search(self, searcher: int, tick: int) -> None:
        flying = self._in_flight[searcher]
        while len(flying) < IN_FLIGHT and self._may_issue(searcher):
            request_id = self._upcoming[searcher]
            flying.append((tick + self._ticks_of(request_id, searcher), request_id, self._told.version))
            self._upcoming[searcher] += self.config.launch.places
        for answer in [answer for answer in flying if answer[0] <= tick]:
            flying.remove(answer)
            sealed = shard(searcher, answer[1], version=answer[2])
            self._completed.add(answer[1])
            self._freshness.arrive(sealed, self._step)
            self.buffer.merge(sealed.trajectories, tick)
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
        if self._step % self.config.exchange.sync_every == 0:
            self._publish()
        self._evict()


@pytest.mark.parametrize("ticks_of", [quick_or_slow, uneven, geometric])
@pytest.mark.parametrize(("bound", "sync_every"), [(1, 1), (1, 2), (3, 1), (3, 2), (8, 2), (8, 8)])
def test_a_queue_drops_nothing_whatever_takes_how_long(
    bound: int, sync_every: int, ticks_of: TicksOf
) -> None:
    """And nothing is older than the bound, which the oldest reach."""
    queue = Flow(config_of(bound, sync_every), ticks_of).run()
    assert queue.config.queue
    assert queue.dropped == 0
    assert max(queue.ages) == bound and sum(queue.ages.values()) == 4 * STEPS
    assert queue.buffer.evicted == 8 * STEPS, "what was used, and nothing for lack of room"


@pytest.mark.parametrize("ticks_of", [quick_or_slow, geometric])
@pytest.mark.parametrize("searchers", [0, 1])
@pytest.mark.parametrize(("bound", "sync_every"), [(1, 1), (3, 2), (8, 8)])
def test_nor_if_elastic_searchers_come_and_vanish(
    bound: int, sync_every: int, searchers: int, ticks_of: TicksOf
) -> None:
    config = config_of(bound, sync_every, searchers=searchers, slots=3)
    queue = Flow(config, ticks_of).run()
    assert queue.dropped == 0
    assert max(queue.ages) <= bound and sum(queue.ages.values()) == 4 * STEPS
    assert queue.buffer.evicted == 8 * STEPS
