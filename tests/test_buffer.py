"""The replay buffer against a naive model of it, closed-form probabilities, and itself after a restore."""

import math
import sys
import tracemalloc
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cache, partial
from itertools import chain
from pathlib import Path
from types import FrameType
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from tba_hpc.config import BufferSection
from tba_hpc.core import buffer as buffer_module
from tba_hpc.core import duplicates, live_store, replay_sampler
from tba_hpc.core import types as types_module
from tba_hpc.core.batch import to_arrays
from tba_hpc.core.buffer import Merged, ReplayBuffer, soft_values
from tba_hpc.core.types import RECORD, Ragged, Trajectories, TrajectoryBatch
from tba_hpc.exchange.hdf5_shards import read_arrays, write_arrays


@dataclass(frozen=True)
class Item:
    """One trajectory as plain values; log-probabilities are made from the uid, so that mix-ups show.

    request: None for one of its own.
    """

    uid: int
    prompt: int
    tokens: tuple[int, ...]
    reward: float = 0.0
    request: int | None = None

    @property
    def prompt_tokens(self) -> list[int]:
        return [1000 + self.prompt] * (1 + self.prompt % 3)

    @property
    def logprobs(self) -> list[float]:
        return [-float(self.uid) - t / 8 for t in range(len(self.tokens))]


def pack(items: Sequence[Item]) -> Trajectories:
    """As a shard holds them: each distinct prompt once."""
    prompts = {item.prompt: item.prompt_tokens for item in reversed(items)}
    row_of = {prompt: row for row, prompt in enumerate(prompts)}
    record = np.zeros(len(items), RECORD)
    for row, item in enumerate(items):
        values = {
            "uid": item.uid,
            "prompt_id": item.prompt,
            "request_id": item.uid if item.request is None else item.request,
            "prompt_row": row_of[item.prompt],
            "reward": item.reward,
            "version_oldest": item.uid,
            "version_newest": item.uid + 7,
        }
        for name, value in values.items():
            record[name][row] = value
    logprobs = np.array([x for item in items for x in item.logprobs], np.float32)
    return Trajectories(
        record,
        Ragged.from_rows([np.array(tokens) for tokens in prompts.values()], np.int32),
        Ragged.from_rows([np.array(item.tokens) for item in items], np.int32),
        logprobs,
        logprobs * 2,
    )


@dataclass
class Naive:
    """What the buffer should hold, by lists."""

    per_prompt: int
    capacity: int
    near: float | None = None
    deduplicate: bool = True
    similarity: float | None = None
    live: list[tuple[Item, int]] = field(default_factory=list)

    def merge(self, items: Sequence[Item], sync: int) -> Merged:
        duplicates = evicted = 0
        for item in items:
            of_prompt = self.of_prompt(item.prompt)
            equal = [x for x in of_prompt if x[0].tokens == item.tokens and self.deduplicate]
            rivals = [] if equal else [x for x in of_prompt if self.are_near(x[0], item)]
            if any(x[0].reward >= item.reward for x in rivals):
                duplicates += 1
                continue
            for old in equal + rivals:
                self.live.remove(old)
                duplicates += 1
            self.live.append((item, sync))
        for prompt in {item.prompt for item in items}:
            of_prompt = self.of_prompt(prompt)
            for old in of_prompt[: max(0, len(of_prompt) - self.per_prompt)]:
                self.live.remove(old)
                evicted += 1
        while len(self.live) > self.capacity:
            self.live.pop(0)
            evicted += 1
        return Merged(len(items) - duplicates, duplicates, evicted)

    def of_prompt(self, prompt: int) -> list[tuple[Item, int]]:
        """What is live of a prompt, oldest first."""
        return [entry for entry in self.live if entry[0].prompt == prompt]

    def are_near(self, one: Item, other: Item) -> bool:
        """Whether few edits lead from one to the other, or both have nearly the same shares of letters."""
        if self.similarity is not None:
            (a, b), (c, d) = ([item.tokens.count(letter) for letter in (0, 1)] for item in (one, other))
            return (a * c + b * d) / (math.hypot(a, b) * math.hypot(c, d)) > self.similarity
        if self.near is None:
            return False
        edits = fewest_edits(one.tokens, other.tokens)
        return edits < self.near * (len(one.tokens) + len(other.tokens))


def fewest_edits(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    """Edit distance by definition: by trying all."""

    @cache
    def rest(i: int, j: int) -> int:
        if i == len(one) or j == len(other):
            return len(one) - i + len(other) - j
        replaced = rest(i + 1, j + 1) + (one[i] != other[j])
        return min(replaced, rest(i + 1, j) + 1, rest(i, j + 1) + 1)

    return rest(0, 0)


def random_items(rng: np.random.Generator, count: int, first_uid: int, prompts: int = 6) -> list[Item]:
    """Short texts of two letters, so that many are equal."""
    return [
        Item(
            first_uid + i,
            int(rng.integers(prompts)),
            tuple(rng.integers(0, 2, rng.integers(1, 5)).tolist()),
            float(rng.integers(8)) / 8,  # many are equal, too
        )
        for i in range(count)
    ]


def items_of(trajectories: Trajectories) -> list[Item]:
    """Inverse of pack, checking everything that Item derives."""
    trajectories.check()
    items, start = [], 0
    for row, record in enumerate(trajectories.record):
        tokens = tuple(trajectories.completions.row(row).tolist())
        item = Item(int(record["uid"]), int(record["prompt_id"]), tokens, float(record["reward"]))
        assert trajectories.prompts.row(record["prompt_row"]).tolist() == item.prompt_tokens
        end = start + len(tokens)
        assert trajectories.logprobs[start:end].tolist() == item.logprobs
        assert trajectories.ref_logprobs[start:end].tolist() == [2 * x for x in item.logprobs]
        items.append(item)
        start = end
    return items


def groups_of(batch: TrajectoryBatch) -> list[list[Item]]:
    """The trajectories of each group, checking everything that Item derives."""
    items, start = [], 0
    for row in range(len(batch)):
        prompt = int(batch.prompt_id_B[row // batch.group_size])
        text, length = batch.sequences.row(row).tolist(), int(batch.prompt_length_N[row])
        item = Item(int(batch.version_N[row]), prompt, tuple(text[length:]), float(batch.reward_N[row]))
        assert text[:length] == item.prompt_tokens
        end = start + len(item.tokens)
        assert batch.logprobs[start:end].tolist() == item.logprobs
        assert batch.ref_logprobs[start:end].tolist() == [2 * x for x in item.logprobs]
        items.append(item)
        start = end
    assert start == len(batch.logprobs)
    return [items[i : i + batch.group_size] for i in range(0, len(items), batch.group_size)]


def new_buffer(seed: int = 0, **config: object) -> ReplayBuffer:
    """Keeps soft values; if these count, by embeddings of the letters 0 and 1."""
    section = BufferSection(**config)
    embed = letter_shares if section.embedding_model else None
    return ReplayBuffer(section, seed, value_beta=0.5, embed=embed)


def letter_shares(completions: Ragged) -> np.ndarray:
    """float32 [N, 2] of length 1: how often 0 and 1 come."""
    rows = (completions.row(i) for i in range(len(completions)))
    counts = np.array([[(row == letter).sum() for letter in (0, 1)] for row in rows], np.float32)
    return counts / np.linalg.norm(counts, axis=1, keepdims=True)


def filled(items: Sequence[Item], seed: int = 0, **config: object) -> ReplayBuffer:
    """A buffer that got all items in revision 0."""
    made = new_buffer(seed, **config)
    made.merge(pack(items), 0)
    return made


def prompts_with(count: int, completions: int = 1, first_prompt: int = 0) -> list[Item]:
    return [
        Item(100 * prompt + i, prompt, (prompt, i))
        for prompt in range(first_prompt, first_prompt + count)
        for i in range(completions)
    ]


# --- Merging ---


ALIKE = {"name": "embeddings", "limit": 0.9, "model": "counts"}
KINDS = [{"duplicates": kind} for kind in ("equal", {"name": "edits", "limit": 0.25}, "none", ALIKE)]


@dataclass
class History:
    """A buffer and its naive model through the same random events; ``check`` compares all that shows.

    After a restore the buffer from which the state came goes on as its twin, and draws the same samples.
    """

    kind: dict[str, Any]
    seed: int
    merged: int = 0
    revision: int = 0
    step: int = 0
    duplicates: int = 0
    evicted: int = 0

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng(self.seed)
        self.prompts = int(self.rng.choice([1, 6, 30]))
        per_prompt, capacity = (int(self.rng.choice(sizes)) for sizes in ([1, 4, 100], [3, 22, 60, 1000]))
        self.limit = (None, 1, 2)[self.seed % 3]
        sizes = {"capacity_per_prompt": per_prompt, "capacity": capacity, "replay_limit": self.limit}
        self.make = partial(new_buffer, self.seed, **sizes, **self.kind)
        self.real = self.twin = self.make()
        section = BufferSection(**self.kind)
        self.naive = Naive(
            per_prompt,
            capacity,
            near=self.kind["duplicates"]["limit"] if section.duplicates.name == "edits" else None,
            deduplicate=section.deduplicate,
            similarity=self.kind["duplicates"]["limit"] if section.embedding_model else None,
        )
        self.uses, self.values = Counter[int](), dict[int, float]()

    def merge(self) -> None:
        """Up to five shards at once."""
        shards = []
        for _ in range(int(self.rng.integers(1, 6))):
            items = random_items(self.rng, int(self.rng.integers(0, 25)), self.merged, self.prompts)
            asked = [items[i // 3 * 3] for i in range(len(items))]
            pairs = zip(items, asked, strict=True)
            shards.append([replace(item, prompt=of.prompt, request=of.uid) for item, of in pairs])
            self.merged += len(items)
            values = soft_values(pack(shards[-1]), 0.5).tolist()
            self.values |= {item.uid: value for item, value in zip(items, values, strict=True)}
        self.revision += 1
        expected = [self.naive.merge(items, self.revision // 2) for items in shards]
        for buffer in self.both:
            packed = map(pack, shards)
            assert [buffer.merge(one, self.revision, sync=self.revision // 2) for one in packed] == expected
        self.duplicates += sum(merged.duplicates for merged in expected)
        self.evicted += sum(merged.evicted for merged in expected)

    def sample(self) -> None:
        """All of it is live; count the uses."""
        if not self.naive.live:
            return
        self.step += 1
        first, *others = (buffer.sample(self.step, groups=4, group_size=3) for buffer in self.both)
        assert all(image(other) == image(first) for other in others)
        found = set(chain.from_iterable(groups_of(first)))
        assert found <= {replace(item, request=None) for item, _ in self.naive.live}
        self.uses.update(item.uid for item in found)

    def evict_used_up(self) -> None:
        limit = math.inf if self.limit is None else self.limit
        left = Counter(item.prompt for item, _ in self.naive.live if self.uses[item.uid] < limit)
        touched = {item.prompt for item, _ in self.naive.live if self.uses[item.uid] >= limit}
        few = {prompt for prompt in touched if left[prompt] < 3}
        gone = self._keep(lambda item: self.uses[item.uid] < limit and item.prompt not in few)
        assert all(buffer.evict_used_up(3) == gone for buffer in self.both)

    def evict_some(self) -> None:
        modulus = int(self.rng.integers(2, 5))
        gone = self._keep(lambda item: item.uid % modulus != 0)
        for buffer in self.both:
            assert buffer.evict_where(lambda record: record["uid"] % modulus == 0) == gone

    def _keep(self, wanted: Callable[[Item], bool]) -> int:
        before = len(self.naive.live)
        self.naive.live = [entry for entry in self.naive.live if wanted(entry[0])]
        self.evicted += before - len(self.naive.live)
        return before - len(self.naive.live)

    def restore(self) -> None:
        """Go on with a buffer made from the state, which drops all that it held."""
        self.twin, self.real = self.real, self.make()
        self.real.merge(pack(random_items(np.random.default_rng(9), 20, 1)), 0)
        self.real.restore(self.twin.state())

    @property
    def both(self) -> list[ReplayBuffer]:
        return [self.real] if self.real is self.twin else [self.real, self.twin]

    def check(self) -> None:
        live = [item for item, _ in self.naive.live]
        assert items_of(Trajectories.from_arrays(self.real.state())) == [
            replace(item, request=None) for item in live
        ]
        assert self.real.prompts == len({item.prompt for item in live})
        assert self.real.requests == len({item.request for item in live})
        kinds = {(item.uid, 0) for item in live}  # ``pack`` gives each a version of its own
        assert {tuple(kind) for kind in self.real.kinds.tolist()} == kinds
        counts = (len(self.real), self.real.added, self.real.duplicates, self.real.evicted)
        assert counts == (len(live), self.merged - self.duplicates, self.duplicates, self.evicted)
        arrays = self.real.state()
        assert_equal_states(arrays, self.twin.state())
        assert arrays["record"]["uses"].tolist() == [self.uses[item.uid] for item in live]
        assert arrays["record"]["value"].tolist() == [self.values[item.uid] for item in live]
        assert arrays["record"]["sync"].tolist() == [sync for _, sync in self.naive.live]


@pytest.mark.parametrize(
    "seed", [*range(3), *(pytest.param(seed, marks=pytest.mark.nightly) for seed in range(3, 6))]
)
@pytest.mark.parametrize("kind", KINDS)
def test_any_history_equals_the_naive_model(kind: dict[str, Any], seed: int) -> None:
    history = History(kind, seed)
    events = [history.merge, history.sample, history.evict_used_up, history.evict_some, history.restore]
    snapshots = []
    for event in history.rng.choice(len(events), 60, p=[0.45, 0.25, 0.12, 0.06, 0.12]):
        events[event]()
        history.check()
        snapshots.append((history.real.snapshot(), history.real.state()))
    for snapshot, state in snapshots:
        assert_equal_states(snapshot(), state)


@pytest.mark.parametrize("share", [0.1, 0.25, 0.5])
def test_near_are_those_that_few_edits_lead_to_whatever_the_tokens(share: float) -> None:
    """Two at a time, of tokens over all that a vocabulary may have, among them what is no character."""
    rng = np.random.default_rng(0)
    kinds = [0, 0xD7FF, 0xD800, 0xDFFF, 0xE000, 262_143, 0x10FFFF]
    for uid in range(0, 200, 2):
        one, other = (Item(uid + i, 0, tuple(rng.choice(kinds, rng.integers(1, 9)).tolist())) for i in (0, 1))
        near = fewest_edits(one.tokens, other.tokens) < share * (len(one.tokens) + len(other.tokens))
        near_ones = {"name": "edits", "limit": share}
        assert len(filled([one, other], duplicates=near_ones)) == 2 - (near or one.tokens == other.tokens)


def test_a_prompt_is_stored_once_whatever_the_number_of_shards() -> None:
    real = filled(prompts_with(3))
    real.merge(pack([Item(900, 2, (9,)), Item(901, 1, (9,))]), 1)
    assert len(Trajectories.from_arrays(real.state()).prompts) == 3


def test_memory_is_that_of_what_lives() -> None:
    """Of a request's eight completions one stays, beside a long one; of what left nothing is kept."""
    real = ReplayBuffer(BufferSection(capacity=50, capacity_per_prompt=8), 0)
    real.merge(pack([Item(0, 9, tuple(range(1000)))]), 0)
    for revision in range(1, 40):
        items = [Item(100 * revision + i, revision % 7, (revision, i), request=revision) for i in range(8)]
        real.merge(pack(items), revision)
        real.evict_where(lambda record: record["uid"] % 100 > 0)
        groups = list(real._store.groups.values())
        arrays = chain.from_iterable(groups)
        assert all(array.base is None or array.base.nbytes <= array.nbytes for array in arrays)
        assert sum(len(record) for record, *_ in groups) == len(real)


# --- Which prompts ---


def test_no_prompt_twice_in_a_batch_across_passes() -> None:
    real = filled(prompts_with(12), most_on_policy=0.0)
    seen = Counter(dict.fromkeys(range(12), 0))
    for step in range(100):
        batch = real.sample(step, groups=5, group_size=1).prompt_id_B.tolist()
        assert len(set(batch)) == 5
        seen.update(batch)
        assert max(seen.values()) - min(seen.values()) <= 1


def test_prompts_repeat_evenly_where_they_are_too_few() -> None:
    real = filled(prompts_with(2), most_on_policy=0.5)
    for step in range(20):
        batch = real.sample(step, groups=5, group_size=1)
        assert sorted(Counter(batch.prompt_id_B.tolist()).values()) == [2, 3]


def test_a_new_prompt_joins_the_pass_under_way_and_an_evicted_one_leaves_it() -> None:
    real = filled(prompts_with(6), most_on_policy=0.0, capacity=6)
    first = real.sample(0, groups=2, group_size=1).prompt_id_B.tolist()
    real.merge(pack(prompts_with(2, first_prompt=6)), 1)  # the oldest, prompts 0 and 1, leave
    rest = set(range(2, 8)) - set(first)
    batch = real.sample(1, groups=len(rest), group_size=1)
    assert set(batch.prompt_id_B.tolist()) == rest


def test_most_on_policy_share_of_groups() -> None:
    """10 old and 10 recent prompts: recent ones come with probability m + (1 − m)/2."""
    real = filled(prompts_with(10), most_on_policy=0.6)
    real.merge(pack(prompts_with(10, first_prompt=10)), 1)
    draws = 4000
    recent = sum(int(real.sample(step, groups=1, group_size=1).prompt_id_B[0] >= 10) for step in range(draws))
    assert abs(recent - 0.8 * draws) < 4 * np.sqrt(draws * 0.8 * 0.2)


def test_all_revisions_of_a_sync_are_recent_and_one_more_continues_the_pass() -> None:
    """Shards that trickle in; three of the four prompts of sync 7 come before the third comes again."""
    real = filled(prompts_with(8), most_on_policy=1.0)
    for revision, prompt in enumerate((1, 2, 3), 1):
        real.merge(pack([Item(5000 + revision, prompt, (9,))]), revision, sync=7)
    first = real.sample(0, groups=2, group_size=1).prompt_id_B.tolist()
    real.merge(pack([Item(5004, 4, (9,))]), 4, sync=7)
    second = real.sample(1, groups=2, group_size=1).prompt_id_B.tolist()
    assert sorted(first + second) == [1, 2, 3, 4]
    real.merge(pack([Item(5005, 0, (9,))]), 5, sync=8)
    assert real.sample(2, groups=1, group_size=1).prompt_id_B.tolist() == [0]


def test_a_new_revision_begins_a_new_pass_over_what_it_brought() -> None:
    """Two of four prompts were drawn; when all four bring news, any two may be next."""
    again = 0
    for seed in range(30):
        real = filled(prompts_with(4), seed, most_on_policy=1.0)
        before = real.sample(0, groups=2, group_size=1).prompt_id_B.tolist()
        real.merge(pack([Item(900 + prompt, prompt, (9,)) for prompt in range(4)]), 1)
        again += bool(set(before) & set(real.sample(1, groups=2, group_size=1).prompt_id_B.tolist()))
    assert again > 15  # 5 in 6 are expected


def test_a_recent_draw_that_has_run_out_goes_on_among_all() -> None:
    real = filled(prompts_with(6), most_on_policy=1.0)
    real.merge(pack([Item(900, 0, (9,)), Item(901, 1, (9,))]), 1)
    for step in range(20):
        batch = real.sample(step, groups=4, group_size=1).prompt_id_B.tolist()
        assert len(set(batch)) == 4 and {0, 1} <= set(batch)


# --- Which completions ---


def chi_square(found: Counter[tuple[int, ...]], expected: dict[tuple[int, ...], float], draws: int) -> float:
    assert set(found) <= set(expected)
    assert sum(expected.values()) == pytest.approx(1)
    return sum((found[key] - draws * p) ** 2 / (draws * p) for key, p in expected.items())


REWARDS = (0.0, 0.5, 1.0, 2.0)


def replay_weights(temperature: float | None, mix: float) -> np.ndarray:
    if temperature is None:
        return np.full(4, 0.25)
    odds = np.exp(np.array(REWARDS) / temperature)
    return (1 - mix) * odds / odds.sum() + mix / 4


def draws_of(size: int, draws: int, **config: object) -> Counter[tuple[int, ...]]:
    """How often each ordered group of uids came, from one prompt with REWARDS."""
    real = filled([Item(i, 0, (i,), reward) for i, reward in enumerate(REWARDS)], **config)
    groups = (real.sample(step, groups=1, group_size=size) for step in range(draws))
    return Counter(tuple(group.version_N.tolist()) for group in groups)


CHI_SQUARE_3, CHI_SQUARE_5, CHI_SQUARE_11 = 21.1, 25.7, 37.4
"""Exceeded with probability 1e-4 by 3, 5 and 11 degrees of freedom; seeds are fixed."""


@pytest.mark.parametrize("temperature, mix", [(1.0, 0.1), (0.5, 0.0), (0.25, 0.5), (1.0, 1.0), (None, 0.0)])
def test_single_completions_follow_softmax_mixed_with_uniform(
    temperature: float | None, mix: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tba_hpc.core.replay_sampler.UNIFORM_MIX", mix)
    draws = 3000
    found = draws_of(1, draws, most_on_policy=0.0, reward_temperature=temperature)
    expected = {(i,): p for i, p in enumerate(replay_weights(temperature, mix))}
    assert chi_square(found, expected, draws) < CHI_SQUARE_3


def test_pairs_follow_the_draw_without_replacement() -> None:
    """P(i then j) = w_i · w_j / (1 − w_i)."""
    draws, w = 4000, replay_weights(1.0, 0.1)
    expected = {(i, j): w[i] * w[j] / (1 - w[i]) for i in range(4) for j in range(4) if i != j}
    assert chi_square(draws_of(2, draws, most_on_policy=0.0), expected, draws) < CHI_SQUARE_11


def test_recent_completions_are_drawn_uniformly_whatever_their_reward() -> None:
    draws = 3000
    found = draws_of(1, draws, most_on_policy=1.0, reward_temperature=0.25)
    assert chi_square(found, {(i,): 0.25 for i in range(4)}, draws) < CHI_SQUARE_3


def test_extreme_rewards_leave_finite_probabilities(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tba_hpc.core.replay_sampler.UNIFORM_MIX", 0.0)
    items = [Item(0, 0, (0,), -1e30), Item(1, 0, (1,), 1e30), Item(2, 0, (2,), 0.0)]
    real = filled(items, most_on_policy=0.0, reward_temperature=1e-3)
    for step in range(20):
        (group,) = groups_of(real.sample(step, groups=1, group_size=4))
        assert group[0].uid == group[3].uid == 1  # all of the weight; the others once each for want of more
        assert {item.uid for item in group} == {0, 1, 2}


def test_too_few_completions_come_all_before_any_repeats() -> None:
    real = filled(prompts_with(3, completions=3), most_on_policy=0.0)
    for step in range(30):
        for group in groups_of(real.sample(step, groups=3, group_size=7)):
            assert len({item.uid for item in group[:3]}) == 3
            assert {item.prompt for item in group} == {group[0].prompt}


def test_recent_groups_equal_the_naive_model() -> None:
    """Which trajectories a group of the recent draw may hold, and how many distinct ones."""
    rng, size = np.random.default_rng(5), 4
    naive, config = Naive(12, 60), BufferSection(capacity_per_prompt=12, capacity=60, most_on_policy=1.0)
    real = ReplayBuffer(config, 0)
    for revision in range(40):
        items = random_items(rng, 7, first_uid=100 * revision)
        naive.merge(items, revision // 2)
        real.merge(pack(items), revision, sync=revision // 2)
        prompts = {item.prompt for item in items}
        for group in groups_of(real.sample(revision, groups=len(prompts), group_size=size)):
            stored, found = naive.of_prompt(group[0].prompt), set(group)
            recent = {item for item, sync in stored if sync == revision // 2}
            assert found <= recent and len(found) == min(size, len(recent))


def test_a_queue_serves_the_prompts_that_have_waited_longest() -> None:
    """Prompts 0, 1, 2 … come two at a revision and leave one a step, in the order in which they came."""
    config = BufferSection(capacity_per_prompt=4, replay_limit=1, most_on_policy=1)
    real, served = ReplayBuffer(config, 0, queue=True), []
    for revision in range(6):
        items = [
            Item(4 * p + c, p, (c,), request=p) for p in (2 * revision, 2 * revision + 1) for c in range(2)
        ]
        real.merge(pack(items), revision)
        assert real.unlearned == revision + 2
        served += real.sample(revision, groups=1, group_size=2).prompt_id_B.tolist()
        assert real.unlearned == revision + 1
        assert real.evict_used_up(2) == 2
    assert served == list(range(6))
    assert real.sample(7, groups=8, group_size=2).prompt_id_B.tolist() == [6, 7, 8, 9, 10, 11, 6, 7]


def test_a_queue_uses_each_request_of_a_prompt_before_it_is_too_old() -> None:
    """Prompt 0 was asked twice, prompt 1 in between, and prompt 2 later; the second answers are better."""
    config = BufferSection(capacity_per_prompt=8, replay_limit=1)
    real, taken = ReplayBuffer(config, 0, queue=True), list[int]()
    for request, prompt in enumerate((0, 1, 0, 2)):
        items = [
            Item(2 * request + c, prompt, (c, request), reward=float(request), request=request)
            for c in range(2)
        ]
        real.merge(pack(items), request)
    for step in range(4):
        taken += real.sample(step, groups=1, group_size=2).record["request_id"].tolist()
        assert real.evict_used_up(2) == 2
    assert taken == [0, 0, 1, 1, 2, 2, 3, 3]


def test_a_queue_takes_two_requests_of_a_prompt_in_a_step_and_no_trajectory_twice() -> None:
    real = ReplayBuffer(BufferSection(capacity_per_prompt=8, replay_limit=1), 0, queue=True)
    for request, prompt in enumerate((0, 1, 0, 2)):
        items = [Item(2 * request + c, prompt, (c, request), request=request) for c in range(2)]
        real.merge(pack(items), request)
    batch = real.sample(0, groups=4, group_size=2)
    assert batch.prompt_id_B.tolist() == [0, 1, 0, 2] and real.evict_used_up(2) == 8
    assert len(set(batch.record["uid"].tolist())) == 8


def test_a_queue_takes_a_request_with_completions_for_two_groups_once_in_a_step() -> None:
    """Its other completions are for the next step, as if each prompt were asked once."""
    real = ReplayBuffer(BufferSection(capacity_per_prompt=8, replay_limit=1), 0, queue=True)
    for prompt in range(2):
        real.merge(pack([Item(4 * prompt + c, prompt, (c,), request=prompt) for c in range(4)]), prompt)
    taken = list[int]()
    for step in range(2):
        taken += real.sample(step, groups=2, group_size=2).record["uid"].tolist()
        real.evict_used_up(2)
    assert sorted(taken) == list(range(8))


@pytest.mark.parametrize(
    ("oldest", "newest", "sync", "on_policy"),
    [
        (4, 4, 4, True),
        (3, 4, 4, False),  # begun by the weights before
        (4, 4, 3, False),  # known before version 4 was published: a resume took its step back
        (4, 5, 4, False),
        (3, 3, 3, False),
    ],
)
def test_on_policy_is_what_exactly_the_weights_of_the_step_sampled(
    oldest: int, newest: int, sync: int, on_policy: bool
) -> None:
    trajectories = pack(prompts_with(3, completions=2))
    trajectories.record["version_oldest"], trajectories.record["version_newest"] = oldest, newest
    real = ReplayBuffer(BufferSection(), 0)
    real.merge(trajectories, 9, sync=sync)
    batch = real.sample(4, groups=3, group_size=2)
    assert batch.on_policy_N.dtype == bool and batch.on_policy_N.tolist() == [on_policy] * 6
    ends = np.cumsum(batch.completion_length_N)
    assert batch.ages[ends[:-1]].tolist() == [4 - oldest] * 5
    last_N = np.where(batch.completion_length_N > 1, newest, oldest)
    assert batch.ages[ends - 1].tolist() == (4 - last_N).tolist()
    assert not real.sample(5, groups=3, group_size=2).on_policy_N.any()


def test_the_replay_ratio_counts_steps_of_distinct_trajectories() -> None:
    """Four trajectories, each twice in a group; then those of two prompts; then all and two new ones."""
    real = filled(prompts_with(4))
    real.sample(0, groups=4, group_size=2)
    assert real.replay_ratio == 1
    real.sample(1, groups=2, group_size=2)
    assert real.replay_ratio == 2
    real.merge(pack(prompts_with(2, first_prompt=4)), 1)
    real.sample(2, groups=6, group_size=2)
    assert real.replay_ratio == pytest.approx((3 + 3 + 2 + 2 + 1 + 1) / 6)


# --- Values ---


@pytest.mark.parametrize("beta", [1e-4, 0.1, 3.0])
def test_a_value_is_the_log_mean_exp_of_its_requests_rewards(beta: float) -> None:
    """By loops, shifted by the highest; rewards of 0 and ±1 in three requests of a prompt, mixed up."""
    rewards = {7: [1.0, 0.0, 0.0], 3: [-1.0], 9: [0.0, 1.0, 1.0, -1.0]}
    items = [Item(10 * r + i, 0, (i,), x, r) for r, each in rewards.items() for i, x in enumerate(each)]
    items = items[::3] + items[1::3] + items[2::3]
    found = soft_values(pack(items), beta)
    for item, value in zip(items, found.tolist(), strict=True):
        assert item.request is not None
        mine = rewards[item.request]
        mean = sum(math.exp((x - max(mine)) / beta) for x in mine) / len(mine)
        assert value == pytest.approx(max(mine) + beta * math.log(mean), abs=1e-6)
    assert found.dtype == np.float32


# --- Repeating, resuming, cost ---


def image(batch: TrajectoryBatch) -> dict[str, bytes]:
    return {name: array.tobytes() for name, array in to_arrays(batch).items()}


def test_samples_depend_on_seed_and_step_alone() -> None:
    def one(seed: int, step: int) -> dict[str, bytes]:
        return image(filled(prompts_with(20, 5), seed).sample(step, groups=4, group_size=3))

    assert one(0, 7) == one(0, 7)
    assert len({str(one(seed, step)) for seed in range(3) for step in range(3)}) == 9


def assert_equal_states(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> None:
    assert {name: (array.dtype, array.tobytes()) for name, array in one.items()} == {
        name: (array.dtype, array.tobytes()) for name, array in other.items()
    }


def test_a_snapshot_is_read_by_another_thread_while_the_buffer_goes_on() -> None:
    """Three times all that was in it is replaced meanwhile; the arrays are those of the moment."""
    rng = np.random.default_rng(0)
    real = new_buffer(capacity=2000, replay_limit=3)
    shards = [pack(random_items(rng, 100, 100 * i, prompts=500)) for i in range(120)]
    for shard in shards[:30]:
        real.merge(shard, 1)
    expected, snapshot = real.state(), real.snapshot()
    with ThreadPoolExecutor() as pool:
        found = [pool.submit(snapshot) for _ in range(20)]
        for i, shard in enumerate(shards[30:], 2):
            real.merge(shard, i)
            real.sample(i, groups=8, group_size=4)
            real.evict_used_up(4)
        for arrays in found:
            assert_equal_states(arrays.result(), expected)
    restored = new_buffer(capacity=2000, replay_limit=3)
    restored.restore(snapshot())
    assert_equal_states(restored.state(), expected)


@pytest.mark.parametrize("trajectories", [1_000, 10_000])
def test_a_snapshot_copies_little(trajectories: int) -> None:
    """Less than 40 bytes of a trajectory that has 12 · 60 bytes of tokens and log-probabilities alone."""
    items = [Item(i, i % 997, (i, *range(59))) for i in range(trajectories)]
    real = filled(items, capacity=trajectories)
    tracemalloc.start()
    snapshot = real.snapshot()
    peak = tracemalloc.get_traced_memory()[1]
    arrays = snapshot()
    gathered = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 40 * trajectories + 100_000
    assert gathered < 1.1 * sum(array.nbytes for array in arrays.values()) + peak + 2_000_000


def test_what_no_step_has_touched_costs_nothing_to_look_for_used_up_ones() -> None:
    """Nor does a merge or an eviction of the oldest depend on how much is stored."""
    costs = []
    for prompts in (50, 1_000):
        real = filled(prompts_with(prompts, completions=10), capacity=10 * prompts, replay_limit=1)
        fresh = [pack(prompts_with(2, completions=16, first_prompt=prompts + 2 * i)) for i in range(4)]
        real.merge(fresh[0], 1)
        lines, peak = lines_and_peak_bytes(lambda: real.merge(fresh[1], 2))  # noqa: B023
        real.sample(0, groups=2, group_size=4)
        more_lines, more = lines_and_peak_bytes(lambda: real.evict_used_up(4))  # noqa: B023
        costs.append((lines + more_lines, peak + more))
    (few_lines, few_bytes), (many_lines, many_bytes) = costs
    assert many_lines < 1.2 * few_lines
    assert many_bytes < 1.5 * few_bytes


def test_an_empty_buffer_with_embeddings_restores(tmp_path: Path) -> None:
    """Also from a file, and where all of its trajectories have left."""
    empty, left = new_buffer(duplicates=ALIKE), filled([Item(0, 0, (1,))], duplicates=ALIKE)
    assert left.evict_where(lambda record: np.ones(len(record), bool)) == 1
    for name, buffer in (("empty", empty), ("left", left)):
        write_arrays(tmp_path / name, buffer.state())
        again = new_buffer(duplicates=ALIKE)
        again.restore(read_arrays(tmp_path / name))
        items = [Item(1, 0, (0, 0)), Item(2, 0, (1, 1)), Item(3, 0, (0,), 9.0)]
        assert again.merge(pack(items), 1) == Merged(2, 1, 0)


def test_completions_are_embedded_once(tmp_path: Path) -> None:
    seen = list[int]()

    def embed(completions: Ragged) -> np.ndarray:
        seen.append(len(completions))
        return letter_shares(completions)

    section = BufferSection(duplicates=ALIKE, capacity_per_prompt=4)
    real, rng = ReplayBuffer(section, 0, embed=embed), np.random.default_rng(0)
    for revision in range(20):
        real.merge(pack(random_items(rng, 10, 10 * revision)), revision)
    assert seen == [10] * 20
    write_arrays(tmp_path / "buffer.h5", real.state())
    state = read_arrays(tmp_path / "buffer.h5")
    again = ReplayBuffer(section, 0, embed=embed)
    again.restore(state)
    assert_equal_states(again.state(), real.state())
    assert len(seen) == 20
    live = Trajectories.from_arrays(real.state()).completions
    assert state["record"]["embedding"].tobytes() == letter_shares(live).tobytes()


def lines_and_peak_bytes(work: Callable[[], object]) -> tuple[int, int]:
    """Lines of the buffer's code run, and the most memory allocated."""
    lines, modules = 0, (buffer_module, duplicates, live_store, replay_sampler, types_module)
    files = {module.__file__ for module in modules}

    def count(frame: FrameType, event: str, _: object) -> object:
        nonlocal lines
        if frame.f_code.co_filename not in files:
            return None
        lines += event == "line"
        return count

    before = sys.gettrace()
    tracemalloc.start()
    sys.settrace(count)
    try:
        work()
    finally:
        sys.settrace(before)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    return lines, peak


def test_the_cost_of_a_sample_does_not_depend_on_how_much_is_stored() -> None:
    """Twenty times the trajectories: neither more lines run nor larger arrays made."""
    costs = []
    for prompts in (50, 1_000):
        items = prompts_with(prompts, completions=10)
        real = filled(items, capacity=200_000)
        real.merge(pack(items[: len(items) // 2]), 1)  # half of the prompts are recent
        assert len(real) == 10 * prompts
        real.sample(99, groups=8, group_size=4)  # what is imported or cached at first use
        costs.append(
            lines_and_peak_bytes(
                lambda: [real.sample(step, groups=8, group_size=4) for step in range(20)]  # noqa: B023
            )
        )
    (few_lines, few_bytes), (many_lines, many_bytes) = costs
    assert many_lines < 1.2 * few_lines
    assert many_bytes < 1.5 * few_bytes


# --- A reference that the trainer computes ---


def open_items(items: Sequence[Item]) -> Trajectories:
    """As ``pack``, the reference's log-probabilities to be computed yet."""
    packed = pack(items)
    return replace(packed, ref_logprobs=np.full_like(packed.ref_logprobs, np.nan))


def test_the_reference_is_asked_once_for_each_trajectory_and_kept() -> None:
    """Over draws, repeats in a batch, later merges and a restore; ``groups_of`` knows what it must be."""
    items = [replace(item, reward=float(item.uid % 3)) for item in prompts_with(6, completions=5)]
    made, asked = new_buffer(capacity_per_prompt=8, capacity=40), list[int]()

    def reference(batch: TrajectoryBatch) -> np.ndarray:
        """Twice the behaviour's, as ``pack`` has it; notes of which it was not known."""
        unknown_T = np.isnan(batch.ref_logprobs)
        row_T = np.repeat(np.arange(len(batch)), batch.completion_length_N)
        asked.extend(np.unique(batch.version_N[row_T[unknown_T]]).tolist())
        assert np.isnan(batch.ref_logprobs).reshape(-1).any()
        return 2 * batch.logprobs

    made.merge(open_items(items), 0)
    for step in range(12):
        groups_of(made.sample(step, groups=3, group_size=4, reference=reference))
    made.merge(open_items(prompts_with(6, completions=5, first_prompt=6)), 1)
    for step in range(12, 24):
        groups_of(made.sample(step, groups=3, group_size=8, reference=reference))
    again = new_buffer(capacity_per_prompt=8, capacity=40)
    again.restore(made.state())
    for step in range(24, 30):
        before = len(asked)
        groups_of(made.sample(step, groups=3, group_size=8, reference=reference))
        del asked[before:]  # the other one has to ask for the same
        groups_of(again.sample(step, groups=3, group_size=8, reference=reference))
    assert len(asked) == len(set(asked)) > 30


def test_the_reference_is_not_asked_for_what_an_environment_said() -> None:
    packed, made = pack(prompts_with(2, completions=3)), new_buffer()
    packed.logprobs[1::3] = packed.ref_logprobs[1::3] = np.nan
    assert not packed.action_T.all()
    made.merge(packed, 0)
    never = Mock(side_effect=AssertionError("everything is known"))
    made.sample(0, groups=2, group_size=3, reference=never)


def test_what_an_environment_says_makes_nothing_alike_or_different() -> None:
    """Two conversations of the same actions, and one of others; most tokens are the environment's."""
    said = {0: (10, 11, 12, 13, 14), 1: (20, 21, 22, 23, 24), 2: (10, 11, 12, 13, 14)}
    actions = {0: (1, 2), 1: (1, 2), 2: (3, 4)}
    items = [Item(uid, 0, (actions[uid][0], *said[uid], actions[uid][1])) for uid in said]
    packed, made = pack(items), new_buffer(duplicates={"name": "edits", "limit": 0.25})
    packed.logprobs[packed.completions.values >= 10] = np.nan
    assert made.merge(packed, 0).duplicates == 1
    assert sorted(row[0] for row in actions_of(Trajectories.from_arrays(made.state()))) == [1, 3]


def actions_of(trajectories: Trajectories) -> list[list[int]]:
    return [trajectories.actions.row(row).tolist() for row in range(len(trajectories))]


def test_without_a_reference_to_ask_nothing_is_looked_for() -> None:
    """What is not known stays so, and reaches the loss: a step on it would be skipped and counted."""
    made = new_buffer()
    made.merge(open_items(prompts_with(2, completions=3)), 0)
    assert np.isnan(made.sample(0, groups=2, group_size=3).ref_logprobs).all()
