"""Batches: nothing is lost or mixed up on the way to ranks, micro-batches and the wire."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
import safetensors.numpy as wire

from tba_hpc.core.batch import (
    balance,
    from_arrays,
    micro_batches,
    split,
    staleness,
    take_groups,
    to_arrays,
)
from tba_hpc.core.types import LIVE_RECORD, RECORD, Ragged, TrajectoryBatch, offsets_of, token_ages


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
def test_split_deals_every_group_once_and_equally(ranks: int) -> None:
    batch = make_batch(6)
    parts = [group_rows(part) for part in split(batch, ranks)]
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


def test_balance_by_hand() -> None:
    """Prompts of 9, 1, 1 and 1 tokens, once each, and 2, 6, 8 and 9 of completions: 11 + 7 and 10 + 9."""
    prompt_length_N = np.repeat([9, 1, 1, 1], 2)
    batch = batch_of(prompt_length_N, np.array([1, 1, 3, 3, 4, 4, 4, 5]), 2, np.random.default_rng(0))
    assert [share.tolist() for share in balance(batch, 2)] == [[0, 1], [2, 3]]


def test_groups_that_do_not_divide_over_the_ranks_are_refused() -> None:
    with pytest.raises(AssertionError):
        balance(make_batch(3), 2)


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


def unpadded(micro: TrajectoryBatch) -> list[list[tuple[int, float, float, int, tuple[int, ...]]]]:
    """Groups of (prompt id, reward, value, prompt length, tokens), padding checked and left out."""
    rows = []
    for i, length in enumerate(micro.length_N):
        assert not micro.tokens_NL[i, length:].any()
        tokens = tuple(micro.tokens_NL[i, :length].tolist())
        prompt = int(micro.prompt_id_B[i // micro.group_size])
        figures = float(micro.reward_N[i]), float(micro.value_N[i]), int(micro.prompt_length_N[i])
        rows.append((prompt, *figures, tokens))
    return [rows[i : i + micro.group_size] for i in range(0, len(rows), micro.group_size)]


@pytest.mark.parametrize("per_micro_batch", [1, 2, 3, 7, 20])
def test_micro_batches_hold_every_group_once_and_whole(per_micro_batch: int) -> None:
    batch = make_batch(7)
    micros = list(micro_batches(batch, per_micro_batch))
    found = [group for micro in micros for group in unpadded(micro)]
    wanted = [[(*row[:3], *row[4:6]) for row in group] for group in group_rows(batch)]
    assert sorted(found) == sorted(wanted)
    assert all(len(micro.prompt_id_B) == per_micro_batch for micro in micros[:-1])


def computed_tokens(group: list[Row]) -> int:
    """Of a group's completions, and of its prompt once."""
    prompt_length = group[0][4]
    return prompt_length + sum(len(row[5]) - prompt_length for row in group)


def test_micro_batches_pad_to_their_own_longest_row_most_tokens_first() -> None:
    batch, computed = make_batch(8), []
    tokens = {group[0][0]: computed_tokens(group) for group in group_rows(batch)}
    for micro in micro_batches(batch, 2):
        assert micro.tokens_NL.dtype == np.int64
        assert micro.tokens_NL.shape[1] == micro.length_N.max()
        computed += [tokens[prompt] for prompt in micro.prompt_id_B.tolist()]
    assert computed == sorted(tokens.values(), reverse=True)


def test_logprobs_stand_at_the_tokens_of_their_completions() -> None:
    batch = make_batch(4)
    wanted = {row[5]: (row[6], row[7], row[9]) for row in rows_of(batch)}
    for micro in micro_batches(batch, 2):
        for i, length in enumerate(micro.length_N):
            tokens, mask = tuple(micro.tokens_NL[i, :length].tolist()), micro.completion_mask_NL[i]
            found = micro.logprob_NL[i], micro.ref_logprob_NL[i], micro.age_NL[i]
            assert [found_L.dtype for found_L in found] == [np.float32, np.float32, np.int32]
            for found_L, values in zip(found, wanted[tokens], strict=True):
                assert tuple(found_L[mask].tolist()) == tuple(values)
                assert not found_L[~mask].any()


def test_micro_batches_know_what_is_on_policy() -> None:
    batch = make_batch(4)
    wanted = {row[5]: row[8] for row in rows_of(batch)}
    found = {
        tuple(tokens[:length].tolist()): bool(on_policy)
        for micro in micro_batches(batch, 2)
        for tokens, length, on_policy in zip(micro.tokens_NL, micro.length_N, micro.on_policy_N, strict=True)
    }
    assert found == wanted and len(set(found.values())) == 2


def test_completion_mask_marks_the_tokens_after_the_prompt() -> None:
    (micro,) = micro_batches(make_batch(3), 3)
    for i, mask in enumerate(micro.completion_mask_NL):
        start, end = micro.prompt_length_N[i], micro.length_N[i]
        assert np.flatnonzero(mask).tolist() == list(range(start, end))


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
