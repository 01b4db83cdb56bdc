"""Micro-batches by tokens: nothing is lost, nothing is larger than the budget, and ranks stay in step."""

from __future__ import annotations

import numpy as np
import pytest
from test_batch import batch_of, make_batch

from tba_hpc.config import ConfigError, may_change, parse_config
from tba_hpc.core.batch import split
from tba_hpc.core.token_budget import Part, most_per_row, parts
from tba_hpc.core.types import TrajectoryBatch

LONGEST = 40
"""Tokens that no sequence of ``make_batch`` exceeds."""


def of_ranks(batch: TrajectoryBatch, ranks: int, budget: int, per_row: int) -> list[list[Part]]:
    return [parts(batch, rank=rank, ranks=ranks, budget=budget, per_row=per_row) for rank in range(ranks)]


def rows(part: Part, per_row: int) -> list[list[int]]:
    """Tokens of every row of every micro-batch, its prompt once, counted one by one."""
    found = []
    for micro, _ in part.micro_batches():
        prompts, lengths = micro.prompt_length_N.tolist(), micro.length_N.tolist()
        found.append(
            [
                prompts[at] + sum(lengths[i] - prompts[at] for i in range(at, at + per_row))
                for at in range(0, len(lengths), per_row)
            ]
        )
    return found


@pytest.mark.parametrize("per_row", [1, 2, 3, 6])
@pytest.mark.parametrize("budget", [LONGEST, 70, 130, 400, 10_000])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_no_micro_batch_has_more_tokens_and_every_sequence_is_in_one(
    ranks: int, budget: int, per_row: int
) -> None:
    """Padding counts; and the shares of the ranks are those of whole groups."""
    batch = make_batch(8, 6)
    if per_row > most_per_row(batch, budget):
        return
    shares = split(batch, ranks)
    for share, mine in zip(shares, of_ranks(batch, ranks, budget, per_row), strict=True):
        for part in mine:
            for tokens in rows(part, per_row):
                assert len(tokens) * max(tokens) <= budget
            assert sorted(np.concatenate(part.sequences).tolist()) == list(range(len(part.batch)))
        prompts = np.concatenate([part.batch.prompt_id_B for part in mine])
        assert sorted(prompts.tolist()) == sorted(share.prompt_id_B.tolist())


@pytest.mark.parametrize("seed", range(20))
def test_ranks_have_equally_many_micro_batches_in_equally_many_parts(seed: int) -> None:
    """Whatever they hold: a group of very long completions is on one of them only."""
    random = np.random.default_rng(seed)
    lengths = random.integers(1, 5, (6, 4)) * np.array([60, 1, 1, 5, 5, 20])[random.permutation(6), None]
    batch = batch_of(np.repeat(random.integers(1, 9, 6), 4), lengths.ravel(), 4, random)
    for ranks in (2, 3):
        shapes = [[len(part.sequences) for part in mine] for mine in of_ranks(batch, ranks, 260, 1)]
        assert all(shape == shapes[0] for shape in shapes)
        assert all(micro_batches == 1 for shape in shapes for micro_batches in shape[1:])


def test_rectangles_hold_the_tokens_and_places_their_completions() -> None:
    batch = make_batch(5, 4)
    for part in parts(batch, rank=0, ranks=1, budget=60, per_row=2):
        places = []
        for chosen, (micro, place_T) in zip(part.sequences, part.micro_batches(), strict=True):
            for row, sequence in enumerate(chosen.tolist()):
                tokens = micro.tokens_NL[row]
                assert tokens[: micro.length_N[row]].tolist() == part.batch.sequences.row(sequence).tolist()
                assert not tokens[micro.length_N[row] :].any()
            values = [
                part.batch.logprobs[start:end]
                for start, end in (_span(part.batch, sequence) for sequence in chosen.tolist())
            ]
            np.testing.assert_array_equal(part.batch.logprobs[place_T], np.concatenate(values))
            places += place_T.tolist()
        assert sorted(places) == list(range(len(part.batch.logprobs)))


def _span(batch: TrajectoryBatch, sequence: int) -> tuple[int, int]:
    ends = np.cumsum(batch.completion_length_N)
    return int(ends[sequence] - batch.completion_length_N[sequence]), int(ends[sequence])


def test_by_hand() -> None:
    """Prompts of 2; completions 8, 2, 2, 2 and 1, 1, 1, 1: at 12 tokens the first group alone is split."""
    batch = batch_of(np.full(8, 2), np.array([2, 8, 2, 2, 1, 1, 1, 1]), 4, np.random.default_rng(0))
    first, second = parts(batch, rank=0, ranks=1, budget=12, per_row=1)
    assert [chosen.tolist() for chosen in first.sequences] == [[1], [0, 2, 3]]
    assert [chosen.tolist() for chosen in second.sequences] == [[0, 1, 2, 3]]
    assert [part.batch.prompt_id_B.tolist() for part in (first, second)] == [[i] for i in batch.prompt_id_B]
    assert most_per_row(batch, 12) == 2 and most_per_row(batch, 16) == 4


@pytest.mark.parametrize("size", [4, 16, 64])
def test_the_largest_micro_batch_does_not_depend_on_the_size_of_groups(size: int) -> None:
    batch = make_batch(2, size, longest=30)
    (first, *_) = parts(batch, rank=0, ranks=1, budget=LONGEST, per_row=1)
    assert max(micro.tokens_NL.size for micro, _ in first.micro_batches()) <= LONGEST


def test_a_sequence_that_does_not_fit_is_named_by_its_lengths() -> None:
    batch = batch_of(np.full(4, 5), np.array([3, 9, 2, 4]), 2, np.random.default_rng(0))
    sentence = (
        r"train.tokens_per_micro_batch=13 is below one sequence, of 5 tokens of the prompt and 9 of the "
        r"completion: raise it to at least 14$"
    )
    with pytest.raises(ConfigError, match=sentence):
        most_per_row(batch, 13)
    assert most_per_row(batch, 14) == 1


def test_a_budget_below_the_longest_sequence_is_refused_with_the_config() -> None:
    tree = {"model": {"path": "m", "context_length": 1024}, "train": {"tokens_per_micro_batch": 1023}}
    with pytest.raises(ConfigError, match=r"=1023 is below model.context_length=1024, the longest sequence"):
        parse_config(tree)
    assert parse_config(tree, ["train.tokens_per_micro_batch=1024"]).train.tokens_per_micro_batch == 1024
    assert may_change("train.tokens_per_micro_batch")
