"""The requests of a run: their order, and which are completed."""

import itertools
from collections import Counter
from functools import partial

import numpy as np
import pytest

from tba_hpc.core.prompts import CompletedRequests, prompt_of


def test_every_epoch_is_a_permutation_and_no_two_are_alike() -> None:
    order = partial(prompt_of, seed=3, prompts=50)
    epochs = [tuple(order(50 * epoch + place) for place in range(50)) for epoch in range(4)]
    assert all(sorted(epoch) == list(range(50)) for epoch in epochs)
    assert len(set(epochs)) == 4
    assert [order(p) for p in (120, 3, 120)] == [epochs[2][20], epochs[0][3], epochs[2][20]]
    assert tuple(prompt_of(place, seed=4, prompts=50) for place in range(50)) != epochs[0]


def test_completed_requests_are_a_set() -> None:
    random = np.random.default_rng(0)
    for size in (0, 1, 7, 8, 9, 300):
        expected: set[int] = set()
        completed = CompletedRequests()
        for _ in range(5):
            request_ids = random.integers(0, 1000, size)
            completed.add(request_ids)
            expected |= set(request_ids.tolist())
        for seen in (completed, CompletedRequests.from_array(completed.to_array())):
            assert {p for p in range(1100) if p in seen} == expected
        assert completed.to_array().nbytes == (max(expected, default=-1) + 8) // 8


@pytest.mark.parametrize("seed", range(20))
def test_resumes_with_any_number_of_searchers_issue_every_request_once(seed: int) -> None:
    """Attempts that stop anywhere: groups finish out of order, some are sealed, the rest is lost."""
    random = np.random.default_rng(seed)
    completed = CompletedRequests()
    sealed: Counter[int] = Counter()
    for _ in range(8):
        completed = CompletedRequests.from_array(completed.to_array())  # as a resume does
        searchers = int(random.integers(1, 7))
        shards = []
        for searcher in range(searchers):
            issued = completed.remaining(searcher, searchers)
            mine = list(itertools.islice(issued, int(random.integers(0, 25))))
            assert all(request_id % searchers == searcher for request_id in mine)
            finished = random.permutation(mine)[: int(random.integers(0, len(mine) + 1))].astype(np.int64)
            shards.append(finished)
        for shard in shards:  # merged only now: a searcher's own stream leaves out what it has issued
            sealed.update(shard.tolist())
            completed.add(shard)
    assert all(count == 1 for count in sealed.values())
    assert set(sealed) == {p for p in range(2000) if p in completed}

    bound = max(sealed, default=0) + 31  # a last attempt that is not disturbed fills every gap
    for searcher in range(3):
        below = itertools.takewhile(lambda p: p < bound, completed.remaining(searcher, 3))
        sealed.update(below)
    assert sealed == Counter(range(bound))
    whole_epochs = bound // 30
    prompts = Counter(prompt_of(request_id, seed=seed, prompts=30) for request_id in range(30 * whole_epochs))
    assert set(prompts.values()) == {whole_epochs}
