"""The prompt sequence: its order, what of it is done, how far it may be issued."""

import itertools
from collections import Counter

import numpy as np
import pytest

from tba_hpc.config import parse_config
from tba_hpc.ports import ExchangeError
from tba_hpc.prompts import CompletedRequests, PromptOrder, RolloutBudget


def test_every_epoch_is_a_permutation_and_no_two_are_alike() -> None:
    order = PromptOrder(seed=3, n_prompts=50)
    epochs = [tuple(order.prompt_at(50 * epoch + place) for place in range(50)) for epoch in range(4)]
    assert all(sorted(epoch) == list(range(50)) for epoch in epochs)
    assert len(set(epochs)) == 4
    assert [order.prompt_at(p) for p in (120, 3, 120)] == [epochs[2][20], epochs[0][3], epochs[2][20]]
    other = PromptOrder(seed=4, n_prompts=50)
    assert tuple(other.prompt_at(place) for place in range(50)) != epochs[0]


def test_the_ledger_is_a_set_of_positions() -> None:
    random = np.random.default_rng(0)
    for size in (0, 1, 7, 8, 9, 300):
        expected: set[int] = set()
        completed = CompletedRequests()
        for _ in range(5):
            request_ids = random.integers(0, 1000, size)
            completed.add(request_ids)
            expected |= set(request_ids.tolist())
        for seen in (completed, CompletedRequests.from_array(completed.to_array())):
            assert {p for p in range(1100) if seen.done(p)} == expected
            assert len(seen) == len(expected)
            assert seen.frontier == next(p for p in itertools.count() if p not in expected)
        assert completed.to_array().nbytes == (max(expected, default=-1) + 8) // 8


def test_ledgers_merge_to_the_union() -> None:
    completed, other = CompletedRequests(), CompletedRequests()
    completed.add(np.array([0, 2]))
    other.add(np.array([1, 2, 900]))
    completed.merge(other)
    assert [p for p in range(1000) if completed.done(p)] == [0, 1, 2, 900]
    assert completed.frontier == 3


@pytest.mark.parametrize("seed", range(20))
def test_resumes_with_any_number_of_searchers_deal_every_position_once(seed: int) -> None:
    """Attempts that stop anywhere: groups finish out of order, some are sealed, the rest is lost."""
    random = np.random.default_rng(seed)
    order = PromptOrder(seed, n_prompts=30)
    completed = CompletedRequests()
    sealed: Counter[int] = Counter()
    for _ in range(8):
        completed = CompletedRequests.from_array(completed.to_array())  # as a resume does
        searchers = int(random.integers(1, 7))
        shards = []
        for searcher in range(searchers):
            issued = order.request_ids(searcher, searchers, completed)
            mine = list(itertools.islice(issued, int(random.integers(0, 25))))
            assert all(request_id % searchers == searcher for request_id in mine)
            finished = random.permutation(mine)[: int(random.integers(0, len(mine) + 1))].astype(np.int64)
            shards.append(finished)
        for shard in shards:  # merged only now: a searcher's own stream leaves out what it has issued
            sealed.update(shard.tolist())
            completed.add(shard)
    assert all(count == 1 for count in sealed.values())
    assert set(sealed) == {p for p in range(2000) if completed.done(p)}

    bound = max(sealed, default=0) + 31  # a last attempt that is not disturbed fills every gap
    for searcher in range(3):
        below = itertools.takewhile(lambda p: p < bound, order.request_ids(searcher, 3, completed))
        sealed.update(below)
    assert sealed == Counter(range(bound))
    whole_epochs = bound // 30
    prompts = Counter(order.prompt_at(request_id) for request_id in range(30 * whole_epochs))
    assert set(prompts.values()) == {whole_epochs}


def quota(done: CompletedRequests, *, bound: int, searchers: int, groups: int) -> RolloutBudget:
    """Of a fresh run of 100 steps with so many groups each."""
    config = parse_config(
        {
            "model": {"path": "tiny"},
            "exchange": {"max_staleness": bound, "sync_every": 1},
            "launch": {"searchers": searchers},
            "train": {"steps": 100, "prompts_per_step": groups},
        }
    )
    return RolloutBudget(config, done, step=0, groups=0)


@pytest.mark.parametrize("bound", [0, 1, 3])
def test_without_a_loss_the_quota_is_areals(bound: int) -> None:
    """B groups more per version, the first of them max_staleness + 1 versions ahead: (v + n + 1)·B."""
    groups = 6
    areal = quota(CompletedRequests(), bound=bound, searchers=4, groups=groups)
    for version in range(5):
        end = areal.extend(version, missing=0)
        assert end == areal.end == (version + bound + 1) * groups
        areal.arrive(np.arange(version * groups, (version + 1) * groups))
        assert areal.owed().total() == bound * groups
    assert areal.extend(1000, missing=0) == 100 * groups, "nothing is begun beyond the last step"


def test_what_is_done_or_owed_by_the_absent_is_made_up_for() -> None:
    rng, completed = np.random.default_rng(0), CompletedRequests()
    completed.add(rng.integers(0, 60, 25))
    given = quota(completed, bound=0, searchers=3, groups=10)
    end = given.extend(0, missing=0)
    assert given.owed().total() == 10 and not completed.done(end - 1)
    expected = Counter(p % 3 for p in range(end) if not completed.done(p))
    assert given.owed() == expected
    given.exclude({1}, "no searcher is left")
    expected[1] = 0
    assert given.owed() == +expected
    given.arrive(np.array([99, 101]))  # beyond the end: others were set aside
    assert given.owed() == expected - Counter([0, 2])
    owed = given.owed().total()
    assert given.extend(0, missing=owed) == end, "what is owed need not be begun again"
    given.extend(0, missing=owed + 7)
    assert given.owed().total() == owed + 7 and set(given.owed()) == {0, 2}
    with pytest.raises(ExchangeError, match="no searcher is left"):
        given.exclude({0, 2}, "no searcher is left")
