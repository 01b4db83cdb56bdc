"""Packed rows, by hand and against their definition."""

from __future__ import annotations

import pytest
import torch

from tba_hpc.core.batch import MASKED_PRICE, Lengths, sequences_per_row
from tba_hpc.learner.packed_groups import pack, share_prompts

TOKENS = torch.tensor([[7, 8, 1, 2, 0], [7, 8, 3, 0, 0], [9, 4, 5, 6, 2], [9, 1, 0, 0, 0]])
PROMPT_LENGTH = torch.tensor([2, 2, 1, 1])
LENGTH = torch.tensor([4, 3, 5, 2])


def test_two_groups_by_hand() -> None:
    rows = pack(TOKENS, PROMPT_LENGTH, LENGTH, 2)
    assert rows.tokens_BM.tolist() == [[7, 8, 1, 2, 3, 0], [9, 4, 5, 6, 2, 1]]
    assert rows.position_BM.tolist() == [[0, 1, 2, 3, 2, 0], [0, 1, 2, 3, 4, 1]]
    assert rows.completion_BM.tolist() == [[0, 0, 1, 1, 2, 0], [0, 1, 1, 1, 1, 2]]
    assert rows.row_T.tolist() == [0, 0, 0, 1, 1, 1, 1, 1]
    assert rows.before_T.tolist() == [1, 2, 1, 0, 1, 2, 3, 0]
    assert rows.visible_BMM[0].int().tolist() == [
        [1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0],
        [1, 1, 1, 1, 0, 0],
        [1, 1, 0, 0, 1, 0],
        [1, 1, 0, 0, 0, 1],
    ]


def test_one_sequence_per_row_is_the_batch_itself_with_a_causal_mask() -> None:
    rows = pack(TOKENS, PROMPT_LENGTH, LENGTH, 1)
    assert torch.equal(rows.tokens_BM, TOKENS)
    within = torch.arange(5) < LENGTH[:, None]
    for row, visible in enumerate(rows.visible_BMM):
        assert torch.equal(visible[within[row]], torch.ones(5, 5).tril().bool()[within[row]])


def test_two_groups_without_rows_by_hand() -> None:
    """Of 4, 3, 5 and 2 tokens, the last is padded by itself: it has less than half of 5."""
    shared = share_prompts(TOKENS, PROMPT_LENGTH, LENGTH, 2)
    assert shared.tokens_R.tolist() == [7, 8, 1, 2, 3, 9, 4, 5, 6, 2, 1]
    assert shared.position_R.tolist() == [0, 1, 2, 3, 2, 0, 1, 2, 3, 4, 1]
    assert [places.tolist() for places in shared.places] == [
        [[5, 6, 7, 8, 9], [0, 1, 2, 3, 0], [0, 1, 4, 0, 0]],
        [[5, 10]],
    ]
    assert shared.before_T.tolist() == [1, 2, 1, 5, 6, 7, 8, 5]
    value_RF = torch.arange(22.0).view(11, 2)
    gathered = shared.gather(value_RF)
    assert all(torch.equal(found, value_RF[at]) for found, at in zip(gathered, shared.places, strict=True))
    assert torch.equal(shared.scatter(gathered), value_RF)


def test_gradients_of_what_is_gathered_are_those_of_numbers() -> None:
    shared = share_prompts(TOKENS, PROMPT_LENGTH, LENGTH, 2)
    value_RF = torch.randn(11, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(shared.gather, (value_RF,))
    assert torch.autograd.gradcheck(lambda value: shared.scatter(shared.gather(value)), (value_RF,))


def test_gradients_of_a_shared_prompt_are_added_up_before_they_are_rounded() -> None:
    """In bfloat16 256 + 1 is 256: 256 of one length, then two of other lengths, would stay there."""
    length_N = torch.tensor([16] * 256 + [8, 4])
    one_N = torch.ones_like(length_N)
    shared = share_prompts(torch.zeros(258, 16, dtype=torch.int64), one_N, length_N, 258)
    assert [len(places) for places in shared.places] == [256, 1, 1]
    value_RF = torch.zeros(len(shared.tokens_R), 1, dtype=torch.bfloat16, requires_grad=True)
    torch.cat([value_nLF[:, 0] for value_nLF in shared.gather(value_RF)]).sum().backward()
    assert value_RF.grad is not None and value_RF.grad[0] == 258


def test_no_sequence_is_padded_to_twice_its_length() -> None:
    length_N = torch.randint(1, 500, (64,), generator=torch.Generator().manual_seed(0))
    tokens_NL = torch.zeros(64, 500, dtype=torch.int64)
    shared = share_prompts(tokens_NL, torch.ones_like(length_N), length_N.clamp(min=2), 1)
    assert sum(places.numel() for places in shared.places) < 2 * int(length_N.clamp(min=2).sum())
    assert len(shared.places) <= 9


@pytest.mark.parametrize(
    ("prompt", "completion", "longest", "width", "flash", "together", "gathers"),
    [
        (27, 20, 60, 96, False, 8, False),
        (400, 45, 600, 1024, False, 16, False),  # long prompts, short answers: attention is little
        (150, 500, 2100, 1024, False, 16, True),  # the reverse: a mask would cost more than it saves
        (110, 200, 700, 1536, True, 16, True),
        (100, 700, 750, 32, False, 1, False),  # attention is everything, and a prompt little
    ],
    ids=["quickstart", "TL;DR", "MATH", "GSM8K on a GPU", "tiny"],
)
def test_rows_hold_as_many_sequences_as_pays(
    prompt: float,
    completion: float,
    longest: float,
    width: int,
    flash: bool,
    together: int,
    gathers: bool,
) -> None:
    lengths = Lengths(prompt, completion, longest, MASKED_PRICE[flash])
    found = sequences_per_row(16, lengths=lengths, width=width)
    assert found == together
    assert (lengths.by_sequence(found, width) < lengths.masked(found, width)) == gathers
