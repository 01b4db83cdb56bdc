"""What may be learned from, and how far searchers may run ahead, against formulas and small cases."""

import time
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from tba_hpc.commands.replay import Unhurried
from tba_hpc.config import FIRST_ELASTIC, Config, parse_config
from tba_hpc.core.buffer import ReplayBuffer
from tba_hpc.core.ports import ExchangeError
from tba_hpc.core.prompts import CompletedRequests
from tba_hpc.core.types import RECORD, Ragged, Shard, Trajectories, make_uid
from tba_hpc.loops.freshness import Freshness, RolloutBudget


def budget(
    completed: CompletedRequests,
    *,
    bound: int,
    searchers: int,
    prompts: int,
    steps: int = 100,
    slots: int = 0,
) -> RolloutBudget:
    """Of a run with so many prompts in each step."""
    config = parse_config(
        {
            "model": {"path": "tiny"},
            "exchange": {"max_staleness": bound, "sync_every": 1},
            "launch": {"searchers": searchers, "elastic": slots},
            "train": {"steps": steps, "prompts_per_step": prompts},
        }
    )
    return RolloutBudget(config, completed)


@pytest.mark.parametrize("bound", [0, 1, 3])
def test_without_a_loss_the_budget_is_areals(bound: int) -> None:
    """B requests more per version, the first of them max_staleness + 1 versions ahead: (v + n + 1)·B."""
    prompts, steps = 6, 10
    areal = budget(CompletedRequests(), bound=bound, searchers=4, prompts=prompts, steps=steps)
    for version in range(steps):
        end = areal.extend(version, ready=0, missing=0)
        assert end == areal.end == min(version + bound + 1, steps) * prompts, "and none beyond the last step"
        areal.arrive(np.arange(version * prompts, (version + 1) * prompts))
    assert areal.extend(steps, ready=0, missing=0) == steps * prompts
    assert not areal.owed()


@pytest.mark.parametrize("bound", [0, 1, 3])
def test_a_resumed_run_issues_as_much_as_one_that_was_never_stopped(bound: int) -> None:
    """All of 40 steps is completed, and half a step's requests are in the buffer: (v + n + 1)·B still."""
    prompts, step, buffered = 6, 40, 3
    completed = CompletedRequests()
    completed.add(np.arange(step * prompts + buffered))
    resumed = budget(completed, bound=bound, searchers=4, prompts=prompts)
    for version in range(step, step + 5):
        ready = buffered if version == step else 0
        assert resumed.extend(version, ready=ready, missing=0) == (version + bound + 1) * prompts
        resumed.arrive(np.arange(version * prompts + ready, (version + 1) * prompts))


def test_what_was_evicted_unlearned_is_granted_again_with_every_version() -> None:
    """Whatever was evicted unlearned: (n + 1)·B requests are ready or owed with every version."""
    rng, prompts, bound = np.random.default_rng(0), 6, 2
    lossy = budget(CompletedRequests(), bound=bound, searchers=4, prompts=prompts)
    arrived = ready = 0
    for version in range(50):
        end = lossy.extend(version, ready=ready, missing=0)
        assert lossy.owed().total() + ready == (bound + 1) * prompts
        coming = int(rng.integers(0, end - arrived + 1))
        lossy.arrive(np.arange(arrived, arrived + coming))
        arrived += coming
        ready = max(0, ready + coming - prompts - int(rng.integers(0, 4)))
    assert arrived > 50 * prompts


def test_what_is_completed_or_owed_by_the_excluded_is_made_up_for() -> None:
    rng, completed = np.random.default_rng(0), CompletedRequests()
    completed.add(rng.integers(0, 60, 25))
    given = budget(completed, bound=0, searchers=3, prompts=10)
    end = given.extend(0, ready=0, missing=0)
    assert given.owed().total() == 10 and end - 1 not in completed
    expected = Counter(p % 3 for p in range(end) if p not in completed)
    assert given.owed() == expected
    given.exclude({1}, "no searcher is left")
    expected[1] = 0
    assert given.owed() == +expected
    given.arrive(np.array([99, 101]))  # beyond the end: from before the attempt
    assert given.owed() == +expected
    owed = given.owed().total()
    assert given.extend(0, ready=10, missing=owed) == end, "what is owed need not be begun again"
    given.extend(0, ready=10, missing=owed + 7)
    assert given.owed().total() == owed + 7 and set(given.owed()) == {0, 2}
    with pytest.raises(ExchangeError, match="no searcher is left"):
        given.exclude({0, 2}, "no searcher is left")


def test_a_searcher_that_was_silent_counts_again_once_it_delivers() -> None:
    """Of twelve requests each of three owes four."""
    given = budget(CompletedRequests(), bound=0, searchers=3, prompts=12)
    given.extend(0, ready=0, missing=0)
    given.exclude({1, 2}, "searcher 0 is at work")
    given.arrive(np.array([1]))
    assert given.owed() == {0: 4, 1: 3}
    given.exclude({0}, "searcher 1 is at work")
    assert given.owed() == {1: 3}
    with pytest.raises(ExchangeError, match="nobody is left"):
        given.exclude({1}, "nobody is left")


def test_of_what_was_granted_no_more_may_be_open_than_later_steps_can_learn_from() -> None:
    """Two prompts a step and n = 2: of the six granted under weights 0 step 0 may leave four, step 1 two."""
    given = budget(CompletedRequests(), bound=2, searchers=2, prompts=2)
    assert given.extend(0, ready=0, missing=0) == 6
    assert [given.overdue(step) for step in range(4)] == [2, 4, 6, 6]
    given.arrive(np.array([1, 5]))
    assert [given.overdue(step) for step in range(4)] == [0, 2, 4, 4]
    assert given.extend(1, ready=0, missing=0) == 8
    given.arrive(np.array([0, 6]))
    assert given.overdue(1) == 1, "6 is newer, and makes up for none of 2, 3 and 4"
    given.arrive(np.array([3]))
    assert (given.overdue(1), given.overdue(2)) == (0, 2)
    given.exclude({0}, "searcher 1 is there")
    assert given.overdue(2) == 0, "nobody waits for 2 and 4"


def test_in_place_of_a_request_that_was_set_aside_another_is_granted() -> None:
    """Searcher 1 sets 1 aside: step 0 then lacks a group that nobody owes, and gets request 4."""
    config = config_of(exchange={"max_staleness": 0}, train={"prompts_per_step": 4})
    buffer = ReplayBuffer(config.buffer, 0)
    given = Freshness(config, buffer)
    given.begin(0, CompletedRequests())
    assert given.publication(0, evaluate=None, published=0.0).budget_end == 4
    for request_id in (0, 2, 3):
        one = shard(request_id % 2, request_id)
        given.arrive(one, 0)
        buffer.merge(one.trajectories, 0)
    assert given.missing(0) == 1 and not given.exhausted(0)
    given.arrive(replace(one, trajectories=one.trajectories.take(np.empty(0, np.int64)), set_aside=(1,)), 0)
    assert given.missing(0) == 1 and given.exhausted(0)
    assert given.publication(0, evaluate=None, published=0.0).budget_end == 5


# --- Slots ---

FIRST, SECOND = FIRST_ELASTIC, FIRST_ELASTIC + 1


def test_a_slot_shares_the_budget_only_while_a_searcher_is_there() -> None:
    """One searcher of the run issues 0, 3, 6 …; two slots issue 1, 4, 7 … and 2, 5, 8 …; six a step."""
    given = budget(CompletedRequests(), bound=0, searchers=1, prompts=6, slots=2)
    assert given.extend(0, ready=0, missing=0) == 18 and given.lease_ends == {}
    assert given.owed() == {0: 6}
    given.note_leases({FIRST: 1})
    given.extend(0, ready=0, missing=0)
    assert given.lease_ends == {FIRST: {1: 1}}, "nothing yet: the six are owed"
    given.arrive(np.array([0, 3, 6, 9, 12]))
    assert given.extend(1, ready=0, missing=0) == 24
    assert given.owed() == {0: 3, 1: 3} and given.lease_ends == {FIRST: {1: 10}}
    given.arrive(np.array([1, 4, 7, 15]))
    assert given.extend(2, ready=0, missing=0) == 27
    assert given.owed() == {0: 3, 1: 3} and given.lease_ends == {FIRST: {1: 19}}, "who answers more gets more"


def test_what_a_searcher_left_unanswered_is_granted_to_others_and_again_to_the_next_one() -> None:
    """Three searchers share twelve requests; that of 1, 4, 7 and 10 has answered 4 when it vanishes."""
    given = budget(CompletedRequests(), bound=0, searchers=1, prompts=12, slots=2)
    given.note_leases({FIRST: 1, SECOND: 1})
    given.extend(0, ready=0, missing=0)
    assert given.owed() == {0: 4, 1: 4, 2: 4}
    given.arrive(np.array([4]))
    given.note_leases({SECOND: 1})
    assert given.owed() == {0: 4, 2: 4}
    assert given.overdue(0) == 8, "nobody waits for those that are lost"
    given.extend(0, ready=1, missing=0)
    assert given.owed() == {0: 6, 2: 5}, "eleven, with one in the buffer"
    assert FIRST not in given.lease_ends
    given.arrive(np.array([7]))  # sealed while its searcher was frozen and taken for dead
    assert given.owed() == {0: 6, 2: 5}
    given.arrive(np.array([2, 5, 8, 11, 14, 0, 3, 6, 9]))
    given.note_leases({FIRST: 2, SECOND: 1})
    given.extend(5, ready=0, missing=0)
    assert given.owed() == {0: 4, 1: 4, 2: 4}
    assert given.lease_ends[FIRST] == {2: 19}, "1 and 10, which it left, then 13 and 16"
    given.arrive(np.array([0, 3, 6, 9, 12, 15, 18, 2, 5, 8, 11, 14, 17, 20]))
    assert given.overdue(4) == 0, "granted under the weights of step 5, it is not late"


def test_a_slot_that_changed_hands_owes_nothing_until_it_is_granted_anew() -> None:
    """The first holder's eight requests are not the second's, who comes before anybody saw the slot free."""
    given = budget(CompletedRequests(), bound=1, searchers=0, prompts=4, slots=1)
    given.note_leases({FIRST: 1})
    given.extend(0, ready=0, missing=0)
    assert given.owed() == {0: 8} and given.lease_ends == {FIRST: {1: 8}}
    given.arrive(np.array([0, 2]))
    given.note_leases({FIRST: 2})
    assert not given.owed() and given.overdue(1) == 0 and given.has_searchers
    given.extend(1, ready=2, missing=0)
    assert given.owed() == {0: 6} and given.lease_ends == {FIRST: {2: 8}}, "1 and 3 to 7"
    assert given.overdue(1) == 2 and given.overdue(2) == 6, "granted under weights 1"


def test_a_grant_costs_the_same_with_many_searchers() -> None:
    """2,048 requests among 1,024 searchers and 256 slots; asking all for each took five seconds."""
    given = budget(CompletedRequests(), bound=3, searchers=1024, prompts=512, slots=256)
    given.note_leases(dict.fromkeys(range(FIRST, FIRST + 256), 1))
    began = time.process_time()
    given.extend(0, ready=0, missing=0)
    assert time.process_time() - began < 0.5
    assert given.owed().total() == 2048 and max(given.owed().values()) == 2


def test_a_second_answer_counts_for_nothing() -> None:
    """A frozen searcher and its slot's next one both answer 0; answers from before a restart do not count."""
    given = budget(CompletedRequests(), bound=0, searchers=0, prompts=3, slots=1)
    given.arrive(np.array([1]))  # begun before the trainer was started again
    given.note_leases({FIRST: 1})
    given.extend(0, ready=0, missing=0)
    assert given.owed() == {0: 3} and given.lease_ends == {FIRST: {1: 4}}, "0, 2, 3"
    for left in (2, 2, 2):
        given.arrive(np.array([0]))
        assert given.owed() == {0: left}
    given.arrive(np.array([5]))
    assert given.owed() == {0: 2} and given.overdue(0) == 2, "an earlier searcher had begun 5"
    given.arrive(np.array([2, 3]))
    given.extend(1, ready=0, missing=0)
    assert given.owed() == {0: 3} and given.lease_ends == {FIRST: {1: 8}}, "4, 6, 7"


@pytest.mark.parametrize("searchers", [0, 2])
def test_whoever_comes_and_goes_the_budget_is_spent_and_never_exceeded(searchers: int) -> None:
    """At each version (n + 1)·B requests are ready or owed while a searcher is there; none is skipped."""
    rng, prompts, bound, slots = np.random.default_rng(0), 6, 2, 3
    places = searchers + slots
    given = budget(CompletedRequests(), bound=bound, searchers=searchers, prompts=prompts, slots=slots)
    there, answered, ready = set[int](), set[int](), 0
    for version in range(90):
        there ^= {FIRST_ELASTIC + int(rng.integers(slots))} if rng.random() < 0.4 else set()
        given.note_leases(dict.fromkeys(there, version // 7))
        end = given.extend(version, ready=ready, missing=0)
        ends = dict.fromkeys(range(searchers), end)
        ends |= {
            searchers + who - FIRST_ELASTIC: at
            for who, held in given.lease_ends.items()
            for at in held.values()
        }
        open_ = [r for place, until in ends.items() for r in range(place, until, places) if r not in answered]
        assert Counter(r % places for r in open_) == given.owed(), "what may be issued is what is owed"
        if ends:
            assert len(open_) + ready == (bound + 1) * prompts
        coming = rng.permutation(open_)[: int(rng.integers(0, 2 * prompts))].astype(np.int64)
        given.arrive(coming)
        answered.update(coming.tolist())
        ready = max(0, ready + len(coming) - prompts)
    assert len(answered) > 30 * prompts


def test_with_nobody_there_nothing_is_granted_until_somebody_comes() -> None:
    config = config_of(exchange={"max_staleness": 1}, launch={"searchers": 0, "elastic": 2})
    empty = Freshness(config, ReplayBuffer(config.buffer, 0))
    empty.begin(0, CompletedRequests())
    empty.note_elastic_leases({})
    assert empty.publication(0, evaluate=None, published=0.0).lease_ends == {}
    assert empty.missing(0) == 2 and not empty.exhausted(0), "weights need not be published again and again"
    empty.note_elastic_leases({SECOND: 3})
    assert empty.exhausted(0)
    told = empty.publication(0, evaluate=None, published=0.0)
    assert [told.for_lease(who, 3).budget_end for who in (FIRST, SECOND)] == [0, 9]  # 1, 3, 5, 7
    assert not empty.exhausted(0)
    with pytest.raises(ExchangeError, match=r"holds 0 of the 2 groups.*add one: tba search"):
        empty.exclude_unresponsive(0, 12.0)


# --- Freshness ---


def config_of(**sections: dict[str, object]) -> Config:
    """Two prompts a step, four initial completions."""
    tree: dict[str, dict[str, object]] = {
        "model": {"path": "tiny"},
        "buffer": {"initial_completions": 4},
        "train": {"steps": 100, "prompts_per_step": 2},
        "exchange": {"sync_every": 1},
        "launch": {"searchers": 2},
    }
    return parse_config(
        {name: {**tree.get(name, {}), **sections.get(name, {})} for name in {**tree, **sections}}
    )


def shard(searcher: int, request_id: int, *, version: int = 0, reference: int = 0) -> Shard:
    """Two trajectories of a request."""
    record = np.zeros(2, RECORD)
    record["uid"] = [make_uid(searcher, request_id, row) for row in range(2)]
    record["prompt_id"] = record["request_id"] = request_id
    record["version_oldest"] = record["version_newest"] = version
    record["reference"] = reference
    completions = Ragged.from_rows([np.array([request_id, row]) for row in range(2)], np.int32)
    logprobs = np.zeros(4, np.float32)
    prompts = Ragged.from_rows([np.array([request_id])], np.int32)
    return Shard(searcher, request_id, Trajectories(record, prompts, completions, logprobs, logprobs))


def records(*versions_and_references: tuple[int, int]) -> np.ndarray:
    """RECORD of so many trajectories."""
    record = np.zeros(len(versions_and_references), RECORD)
    record["version_oldest"], record["reference"] = zip(*versions_and_references, strict=True)
    return record


def test_staleness_is_counted_from_the_oldest_version_either_way() -> None:
    """A shard that survived a crash may come of weights ahead of the step that the resume took back to."""
    bounded = Freshness(config_of(exchange={"max_staleness": 3}), ReplayBuffer(config_of().buffer, 0))
    stale = bounded.is_stale(records((6, 0), (7, 0), (10, 0), (13, 0), (14, 0)), step=10)
    assert stale.tolist() == [True, False, False, False, True]


def test_a_reset_reference_makes_stale_what_older_ones_scored() -> None:
    config = config_of(train={"reference": {"name": "reset", "every": 4}})
    reset = Freshness(config, ReplayBuffer(config.buffer, 0))
    changed = [step for step in range(13) if reset.update_reference(step)]
    assert changed == [4, 8, 12] and reset.reference == 12
    assert reset.is_stale(records((12, 8), (1, 12), (12, 0)), step=12).tolist() == [True, False, True]
    assert reset.publication(12, evaluate=None, published=0.0).reference == 12


def test_what_is_missing_is_completions_at_first_then_requests() -> None:
    free_config, bounded_config = config_of(), config_of(exchange={"max_staleness": 1})
    for config, at_first, later in (
        (free_config, [4, 2, 0], [0, 0, 0]),
        (bounded_config, [2, 1, 0], [2, 1, 0]),
    ):
        buffer = ReplayBuffer(config.buffer, 0)
        freshness = Freshness(config, buffer)
        seen = []
        for request_id in range(3):
            seen.append((freshness.missing(0), freshness.missing(1)))
            buffer.merge(shard(0, request_id).trajectories, request_id)
        assert seen == list(zip(at_first, later, strict=True))


def test_with_a_replay_limit_groups_are_missing_once_prompts_are_used_up() -> None:
    """Three prompts of two trajectories each, two prompts a step: to learn twice gives three steps."""
    config = config_of(
        buffer={"replay_limit": 2, "initial_completions": 6}, train={"completions_per_prompt": 2}
    )
    buffer = ReplayBuffer(config.buffer, 0)
    limited = Freshness(config, buffer)
    for request_id in range(3):
        buffer.merge(shard(0, request_id).trajectories, request_id)
    seen = []
    for step in range(1, 4):
        buffer.sample(step, groups=2, group_size=2)
        seen.append((limited.evict_stale(step + 1), limited.missing(step + 1)))
    assert seen == [(0, 0), (2, 0), (4, 2)]
    with pytest.raises(ExchangeError, match=r"holds 0 of the 2 groups that step 4 needs.*searchers 0, 1, wh"):
        limited.exclude_unresponsive(4, 12.0)


def few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three without data, or five syncs of one step."""
    monkeypatch.setattr("tba_hpc.loops.freshness.STEPS_WITHOUT_DATA", 3)
    monkeypatch.setattr("tba_hpc.loops.freshness.SYNCS_WITHOUT_DATA", 1)


def test_too_many_steps_without_a_shard_make_one_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted from the last shard; a resume, at step 10, waits for one at once."""
    few_steps(monkeypatch)
    config = config_of()
    hungry = Freshness(config, ReplayBuffer(config.buffer, 0))
    hungry.begin(10, CompletedRequests())
    assert hungry.missing(10) == 1
    with pytest.raises(ExchangeError, match=r"got no shard since the run was resumed and no new .* for 12 s"):
        hungry.exclude_unresponsive(10, 12.0)
    hungry.arrive(shard(1, 0), 10)
    assert [hungry.missing(step) for step in range(10, 16)] == [0, 0, 0, 1, 1, 1]
    with pytest.raises(
        ExchangeError, match=r"got no shard in the last 3 steps and no new one has .* for 12 s"
    ):
        hungry.exclude_unresponsive(13, 12.0)
    hungry.arrive(shard(1, 0), 13)
    assert [hungry.missing(step) for step in range(13, 18)] == [0, 0, 0, 1, 1]
    slow = Freshness(config_of(exchange={"sync_every": 4}), ReplayBuffer(config.buffer, 0))
    slow.begin(0, CompletedRequests())
    assert [slow.missing(step) for step in (3, 4)] == [0, 1], "whole syncs"
    never = Unhurried(config, ReplayBuffer(config.buffer, 0))
    never.begin(10, CompletedRequests())
    assert never.missing(1000) == 0


def test_where_staleness_is_bounded_only_what_is_owed_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two requests a step, of which version 0 allows those of the first 51: all come, then those of more."""
    few_steps(monkeypatch)
    config = config_of(exchange={"max_staleness": 50})
    buffer = ReplayBuffer(config.buffer, 0)
    bounded = Freshness(config, buffer)
    bounded.begin(0, CompletedRequests())
    assert bounded.publication(0, evaluate=None, published=0.0).budget_end == 2 * 51
    for request_id in range(2 * 51):
        bounded.arrive(shard(0, request_id), 0)
        buffer.merge(shard(0, request_id).trajectories, request_id)
    assert bounded.missing(5) == 0, "nothing is owed"
    for step in range(5):
        buffer.sample(step, groups=2, group_size=2)
    bounded.publication(5, evaluate=None, published=0.0)
    assert (bounded.starved(5), bounded.missing(5), bounded.exhausted(5)) == (True, 1, False)
    bounded.arrive(shard(0, 2 * 51), 5)
    assert bounded.missing(5) == 0


def test_silence_excludes_who_owes_and_ends_the_run_where_all_do(caplog: pytest.LogCaptureFixture) -> None:
    config = config_of(exchange={"max_staleness": 0})
    bounded = Freshness(config, ReplayBuffer(config.buffer, 0))
    bounded.begin(0, CompletedRequests())
    bounded.publication(0, evaluate=None, published=0.0)
    bounded.arrive(shard(0, 0), 0)
    bounded.exclude_unresponsive(0, 12.0)
    assert "arrived for 12 s: see the logs of searchers 1, which have yet to answer" in caplog.text
    bounded.publication(0, evaluate=None, published=0.0)
    with pytest.raises(ExchangeError, match=r"holds 0 of the 2 groups that step 0 needs.*searchers 0, which"):
        bounded.exclude_unresponsive(0, 12.0)
    free = Freshness(config_of(), ReplayBuffer(config.buffer, 0))
    with pytest.raises(ExchangeError, match=r"holds 0 of 4 initial completions.*raise launch.timeout_sec"):
        free.exclude_unresponsive(0, 12.0)
