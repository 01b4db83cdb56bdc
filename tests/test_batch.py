"""Batches: nothing is lost or mixed up on the way to ranks, micro-batches and the wire."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
import safetensors.numpy as wire

from tba_hpc.config import ConfigError, may_change, parse_config
from tba_hpc.core.batch import Part, balance, from_arrays, plan, staleness, take_groups, to_arrays
from tba_hpc.core.batch import rows_of as batch_rows
from tba_hpc.core.types import BEGIN, LIVE_RECORD, RECORD, Ragged, TrajectoryBatch, offsets_of, token_ages
from tba_hpc.objectives import RecordedGroups


def make_batch(groups: int, size: int = 3, *, seed: int = 0, longest: int = 30) -> TrajectoryBatch:
    """Random batch; every token, reward and log-probability is different, so that rows cannot be confused."""
    rng = np.random.default_rng(seed)
    prompt_length_N = np.repeat(rng.integers(1, 9, groups), size)
    return batch_of(prompt_length_N, rng.integers(1, longest, groups * size), size, rng)


def batch_of(
    prompt_length_N: np.ndarray, completion_length_N: np.ndarray, size: int, rng: np.random.Generator
) -> TrajectoryBatch:
    rows, groups = len(completion_length_N), len(completion_length_N) // size
    record = np.zeros(rows, LIVE_RECORD)
    record["reward"] = np.arange(rows)
    record["value"] = record["reward"] + 0.5
    record["version_oldest"] = rng.integers(0, 50, rows)
    record["version_newest"] = record["version_oldest"] + rng.integers(0, 9, rows)
    record["sync"] = 50
    for name in ("version_oldest", "version_newest"):
        record[name][::3] = 50
    completion_tokens = int(completion_length_N.sum())
    logprobs, ref_logprobs = -rng.random((2, completion_tokens)).astype(np.float32)
    record["prompt_id"] = np.repeat(rng.permutation(groups * 5)[:groups], size)
    record["prompt_row"] = np.arange(rows) // size
    prompts = offsets_of(prompt_length_N[::size])
    return TrajectoryBatch(
        record,
        Ragged(np.arange(1, prompts[-1] + 1, dtype=np.int32), prompts),
        Ragged(np.arange(1, completion_tokens + 1, dtype=np.int32) + 10_000, offsets_of(completion_length_N)),
        logprobs,
        ref_logprobs,
        group_size=size,
        step=50,
    )


Row = tuple[
    int, float, float, int, int, tuple[int, ...], tuple[float, ...], tuple[float, ...], bool, tuple[int, ...]
]


def rows_of(batch: TrajectoryBatch) -> list[Row]:
    """Every row as plain values, taken apart one by one."""
    found, start = [], 0
    for i in range(len(batch)):
        tokens = batch.sequences.row(i).tolist()
        end = start + len(tokens) - int(batch.prompt_length_N[i])
        found.append(
            (
                int(batch.prompt_id_B[i // batch.group_size]),
                float(batch.reward_N[i]),
                float(batch.value_N[i]),
                int(batch.version_N[i]),
                int(batch.prompt_length_N[i]),
                tuple(tokens),
                tuple(batch.logprobs[start:end].tolist()),
                tuple(batch.ref_logprobs[start:end].tolist()),
                bool(batch.on_policy_N[i]),
                tuple(batch.ages[start:end].tolist()),
            )
        )
        start = end
    assert start == len(batch.logprobs) == len(batch.ref_logprobs)
    return found


def group_rows(batch: TrajectoryBatch) -> list[list[Row]]:
    rows, size = rows_of(batch), batch.group_size
    return [rows[i : i + size] for i in range(0, len(rows), size)]


def test_take_groups_takes_whole_groups_in_order() -> None:
    batch = make_batch(5)
    groups = group_rows(batch)
    taken = take_groups(batch, np.array([3, 0, 3]))
    assert group_rows(taken) == [groups[3], groups[0], groups[3]]


@pytest.mark.parametrize("ranks", [1, 2, 3, 6])
def test_balance_deals_every_group_once_and_equally(ranks: int) -> None:
    batch = make_batch(6)
    parts = [group_rows(take_groups(batch, groups)) for groups in balance(batch, ranks)]
    assert [len(part) for part in parts] == [6 // ranks] * ranks
    assert sorted(itertools.chain(*parts)) == sorted(group_rows(batch))


def lightest_possible(tokens: list[int], ranks: int) -> int:
    """Brute force: the smallest heaviest load over all ways to share out equal numbers of groups."""
    size = len(tokens) // ranks
    return min(
        max(sum(order[i : i + size]) for i in range(0, len(order), size))
        for order in set(itertools.permutations(tokens))
    )


@pytest.mark.parametrize("seed", range(40))
def test_balance_is_within_four_thirds_of_the_optimum(seed: int) -> None:
    ranks = (2, 3)[seed % 2]
    batch = make_batch(6, seed=seed, longest=(10, 200)[seed % 4 // 2])
    tokens = [computed_tokens(group) for group in group_rows(batch)]
    heaviest = max(sum(tokens[group] for group in share) for share in balance(batch, ranks))
    assert heaviest <= 4 / 3 * lightest_possible(tokens, ranks)


def test_arrays_round_trip_bit_by_bit() -> None:
    batch = make_batch(4)
    arrays = to_arrays(batch)
    assert all(array.dtype != object for array in arrays.values())
    again = to_arrays(from_arrays(arrays))
    assert {name: (a.dtype, a.tobytes()) for name, a in arrays.items()} == {
        name: (a.dtype, a.tobytes()) for name, a in again.items()
    }
    assert rows_of(from_arrays(arrays)) == rows_of(batch)


def test_a_batch_of_views_survives_the_wire() -> None:
    """safetensors writes memory, not strides."""
    batch = make_batch(4)
    logprobs = np.repeat(batch.logprobs, 2)[::2]
    strided = replace(batch, logprobs=logprobs, record=np.repeat(batch.record, 2)[::2])
    assert not logprobs.flags.c_contiguous
    assert rows_of(from_arrays(wire.load(wire.save(to_arrays(strided))))) == rows_of(batch)


def computed_tokens(group: list[Row]) -> int:
    """Of a group's completions, and of its prompt once."""
    prompt_length = group[0][4]
    return prompt_length + sum(len(row[5]) - prompt_length for row in group)


def test_rectangles_hold_every_value_at_its_place() -> None:
    """Values at the completion's tokens, 0 beyond them."""
    batch = make_batch(4)
    groups = RecordedGroups.of(batch)
    rectangles = (groups.behaviour_BKL, groups.reference_BKL, groups.age_BKL)
    assert [one.dtype for one in rectangles] == [np.float32, np.float32, np.int32]
    assert {one.shape for one in rectangles} == {(4, 3, batch.completion_length_N.max())}
    for number, (*_, logprobs, ref_logprobs, _, ages) in enumerate(rows_of(batch)):
        for found_BKL, values in zip(rectangles, (logprobs, ref_logprobs, ages), strict=True):
            row_L = found_BKL[number // 3, number % 3]
            assert tuple(row_L[: len(values)].tolist()) == values and not row_L[len(values) :].any()


def test_rectangles_are_0_where_an_environment_speaks() -> None:
    """One row of two turns, its second token and its third the environment's, and one of a single turn."""
    gap = np.nan
    batch = batch_of(np.full(2, 2), np.array([5, 2]), 2, np.random.default_rng(0))
    batch = replace(batch, logprobs=np.array([-1, gap, gap, -2, -3, -4, -5], np.float32), step=10)
    batch.record["version_oldest"], batch.record["version_newest"] = [2, 7], [6, 7]
    groups = RecordedGroups.of(batch)
    assert groups.mask_BKL.astype(int).tolist() == [[[1, 0, 0, 1, 1], [1, 1, 0, 0, 0]]]
    assert groups.behaviour_BKL.tolist() == [[[-1, 0, 0, -2, -3], [-4, -5, 0, 0, 0]]]
    assert groups.age_BKL.tolist() == [[[8, 0, 0, 6, 4], [3, 3, 0, 0, 0]]]
    assert groups.age_BKL.dtype == np.int32
    assert ((groups.reference_BKL != 0) == groups.mask_BKL).all()
    assert groups.cell_T.tolist() == [0, 1, 2, 3, 4, 5, 6]
    assert batch.action_length_N.tolist() == [3, 2] and batch.completion_length_N.tolist() == [5, 2]
    actions = batch.take(np.array([1, 0])).actions
    assert [actions.row(row).tolist() for row in range(2)] == [[10_006, 10_007], [10_001, 10_004, 10_005]]


# --- Micro-batches ---

LONGEST = 40
"""Tokens that no sequence of ``make_batch`` exceeds."""


def plans(batch: TrajectoryBatch, ranks: int, budget: int | None, share: bool) -> list[list[Part]]:
    return [plan(batch, rank=r, ranks=ranks, budget=budget, share_prompts=share) for r in range(ranks)]


def tokens_of(batch: TrajectoryBatch, rows: np.ndarray, share: bool) -> int:
    """As computed, counted one by one."""
    lengths, prompts = batch.length_N.tolist(), batch.prompt_length_N.tolist()
    if not share:
        return len(rows) * max(lengths[row] for row in rows)
    first_rows = {row // batch.group_size * batch.group_size for row in rows.tolist()}
    return sum(lengths[row] - prompts[row] for row in rows) + sum(prompts[row] for row in first_rows)


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("budget", [None, LONGEST, 70, 130, 10_000])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_micro_batches_keep_to_the_budget_and_hold_every_row_once(
    ranks: int, budget: int | None, share: bool
) -> None:
    """And every group's rows follow each other, so that they can share a prompt."""
    batch = make_batch(8, 6)
    largest = max(tokens_of(batch, np.arange(g * 6, g * 6 + 6), share) for g in range(8))
    for groups, parts in zip(balance(batch, ranks), plans(batch, ranks, budget, share), strict=True):
        for part in parts:
            rows = np.concatenate(part.micro_batches)
            assert sorted(rows.tolist()) == sorted(batch_rows(part.groups, 6).tolist())
            for some in part.micro_batches:
                assert tokens_of(batch, some, share) <= (budget or largest)
                assert len([*itertools.groupby(some // 6)]) == len(set((some // 6).tolist()))
        assert sorted(np.concatenate([part.groups for part in parts]).tolist()) == groups.tolist()
        assert budget is not None or all(len(part.micro_batches) == 1 for part in parts)


@pytest.mark.parametrize("seed", range(20))
def test_ranks_have_equally_many_micro_batches_in_equally_many_parts(seed: int) -> None:
    """Whatever they hold: a group of very long completions is on one of them only."""
    random = np.random.default_rng(seed)
    lengths = random.integers(1, 5, (6, 4)) * np.array([60, 1, 1, 5, 5, 20])[random.permutation(6), None]
    batch = batch_of(np.repeat(random.integers(1, 9, 6), 4), lengths.ravel(), 4, random)
    for ranks, share in itertools.product((2, 3), (True, False)):
        shapes = [[len(part.micro_batches) for part in parts] for parts in plans(batch, ranks, 260, share)]
        assert all(shape == shapes[0] for shape in shapes)
        assert all(micro_batches == 1 for shape in shapes for micro_batches in shape[1:])


@pytest.mark.parametrize(("share", "split"), [(True, [[1, 0], [2, 3]]), (False, [[1], [0, 2, 3]])])
def test_micro_batches_by_hand(share: bool, split: list[list[int]]) -> None:
    """Prompts of 2; completions 2, 8, 2, 2 and 1, 1, 1, 1: at 12 tokens the first group alone is split."""
    batch = batch_of(np.full(8, 2), np.array([2, 8, 2, 2, 1, 1, 1, 1]), 4, np.random.default_rng(0))
    first, second = plan(batch, rank=0, ranks=1, budget=12, share_prompts=share)
    assert [rows.tolist() for rows in first.micro_batches] == split
    assert [rows.tolist() for rows in second.micro_batches] == [[4, 5, 6, 7]]
    assert (first.groups.tolist(), second.groups.tolist()) == ([0], [1])


def test_padding_of_further_sequences_counts() -> None:
    """Prompts of 2; the first of four completions of 9 has three sequences, of 7, 2 and 2 tokens."""
    batch = batch_of(np.full(4, 2), np.full(4, 9), 2, np.random.default_rng(0))
    batch.logprobs[[5, 7]] = BEGIN
    assert [
        rows.tolist() for rows in plan(batch, **ONE, budget=33, share_prompts=False)[0].micro_batches
    ] == [
        [0],
        [1],
    ]
    assert len(plan(batch, **ONE, budget=44, share_prompts=False)[0].micro_batches) == 1  # four of 11
    shared = plan(batch, **ONE, budget=20, share_prompts=True)
    assert [[rows.tolist() for rows in part.micro_batches] for part in shared] == [[[0, 1]], [[2, 3]]]


ONE = {"rank": 0, "ranks": 1}


def test_micro_batches_are_bounded_by_what_attention_reads_of_shared_prompts() -> None:
    """A group of a long completion, 161 tokens, and short ones of 62, each of which reads 612."""
    completions = np.array([[100, *[1] * 11], *[[1] * 12] * 5])
    batch = batch_of(np.full(72, 50), completions.ravel(), 12, np.random.default_rng(0))

    def sets(budget: int | None) -> list[list[int]]:
        parts = plan(batch, rank=0, ranks=1, budget=budget, share_prompts=True)
        return [part.groups.tolist() for part in parts]

    assert sets(None) == [[group] for group in range(6)]  # 711 may be read; two of the short ones read 1224
    assert sets(800) == [[0, 4], [1, 2, 3, 5]]  # of 3200
    assert sets(1000) == [[0, 1, 2, 3, 4, 5]]  # they read 3771 of 4000


def test_groups_are_spread_evenly_over_the_fewest_micro_batches() -> None:
    """Sixteen groups of 52 tokens: one pass where they fit, else as few as do, of as many groups each."""
    batch = batch_of(np.full(64, 20), np.full(64, 8), 4, np.random.default_rng(0))

    def sizes(budget: int | None, ranks: int = 1, enough: int = 0) -> list[int]:
        parts = plan(batch, rank=0, ranks=ranks, budget=budget, share_prompts=True, enough=enough)
        assert all(len(part.micro_batches) == 1 for part in parts)
        return [len(part.groups) for part in parts]

    assert sizes(None) == [1] * 16
    assert sizes(None, enough=832) == [16]
    assert sizes(None, enough=831) == [8, 8]
    assert sizes(300) == [4, 4, 4, 4] and sizes(260) == [4, 4, 4, 4] and sizes(207) == [3] * 4 + [2] * 2
    assert sizes(300, ranks=2) == [4, 4]


def test_a_sequence_that_does_not_fit_is_named_by_its_lengths() -> None:
    batch = batch_of(np.full(4, 5), np.array([3, 9, 2, 4]), 2, np.random.default_rng(0))
    sentence = (
        r"train.tokens_per_micro_batch=13 is too small for a prompt of 5 and a completion of 9 tokens: raise "
        r"it to at least 14$"
    )
    with pytest.raises(ConfigError, match=sentence):
        plan(batch, rank=0, ranks=1, budget=13, share_prompts=True)
    assert plan(batch, rank=0, ranks=1, budget=14, share_prompts=True)


def test_a_budget_below_the_longest_sequence_is_refused_with_the_config() -> None:
    tree = {"model": {"path": "m", "context_length": 1024}, "train": {"tokens_per_micro_batch": 1023}}
    with pytest.raises(ConfigError, match=r"=1023 is below model.context_length=1024, the longest sequence"):
        parse_config(tree)
    assert parse_config(tree, ["train.tokens_per_micro_batch=1024"]).train.tokens_per_micro_batch == 1024
    assert may_change("train.tokens_per_micro_batch")


def test_staleness_counts_from_the_version_that_sampled() -> None:
    batch = make_batch(2)
    assert staleness(batch, 60).tolist() == [60 - version for version in batch.version_N.tolist()]
    assert min(staleness(batch, 0)) >= 0  # after a resume from before the weights that sampled


def test_tokens_are_as_old_as_the_weights_that_sampled_them() -> None:
    """One version; versions that come evenly; two tokens; one; nothing between 2 and 3; weights ahead."""
    record = np.zeros(6, RECORD)
    record["version_oldest"] = [7, 2, 3, 4, 2, 12]
    record["version_newest"] = [7, 6, 9, 4, 3, 12]
    ages = token_ages(record, np.array([3, 5, 2, 1, 4, 2]), 10)
    assert ages.dtype == np.int32
    assert ages.tolist() == [*[3, 3, 3], *[8, 7, 6, 5, 4], *[7, 1], 6, *[8, 8, 7, 7], *[-2, -2]]
