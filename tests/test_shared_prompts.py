"""Sequences in one row that share prompts, by hand, and the gradients through gathering them."""

from __future__ import annotations

import torch

from tba_hpc.learner.shared_prompts import share_prompts

TOKENS = torch.tensor([[7, 8, 1, 2, 0], [7, 8, 3, 0, 0], [9, 4, 5, 6, 2], [9, 1, 0, 0, 0]])
PROMPT_LENGTH = torch.tensor([2, 2, 1, 1])
LENGTH = torch.tensor([4, 3, 5, 2])
PROMPT = torch.tensor([6, 6, 3, 3])


def test_two_groups_by_hand() -> None:
    """Of 4, 3, 5 and 2 tokens, the last is padded by itself: it has less than half of 5."""
    shared = share_prompts(TOKENS, PROMPT_LENGTH, LENGTH, PROMPT)
    assert shared.tokens_R.tolist() == [7, 8, 1, 2, 3, 9, 4, 5, 6, 2, 1]
    assert shared.position_R.tolist() == [0, 1, 2, 3, 2, 0, 1, 2, 3, 4, 1]
    assert [places.tolist() for places in shared.places] == [
        [[5, 6, 7, 8, 9], [0, 1, 2, 3, 0], [0, 1, 4, 0, 0]],
        [[5, 10]],
    ]
    position_L = torch.arange(5)
    completion_NL = (position_L >= PROMPT_LENGTH[:, None]) & (position_L < LENGTH[:, None])
    assert shared.before_NL[completion_NL].tolist() == [1, 2, 1, 5, 6, 7, 8, 5]
    value_RF = torch.arange(22.0).view(11, 2)
    gathered = shared.gather(value_RF)
    assert all(torch.equal(found, value_RF[at]) for found, at in zip(gathered, shared.places, strict=True))
    assert torch.equal(shared.scatter(gathered), value_RF)


def test_gradients_of_gathered_values_are_numerical_gradients() -> None:
    shared = share_prompts(TOKENS, PROMPT_LENGTH, LENGTH, PROMPT)
    value_RF = torch.randn(11, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(shared.gather, (value_RF,))
    assert torch.autograd.gradcheck(lambda value: shared.scatter(shared.gather(value)), (value_RF,))


def test_gradients_of_a_shared_prompt_are_summed_before_rounding() -> None:
    """In bfloat16 256 + 1 is 256: 256 of one length, then two of other lengths, would stay there."""
    length_N = torch.tensor([16] * 256 + [8, 4])
    one_N = torch.ones_like(length_N)
    shared = share_prompts(torch.zeros(258, 16, dtype=torch.int64), one_N, length_N, one_N)
    assert [len(places) for places in shared.places] == [256, 1, 1]
    value_RF = torch.zeros(len(shared.tokens_R), 1, dtype=torch.bfloat16, requires_grad=True)
    torch.cat([value_nLF[:, 0] for value_nLF in shared.gather(value_RF)]).sum().backward()
    assert value_RF.grad is not None and value_RF.grad[0] == 258


def test_no_sequence_is_padded_to_twice_its_length() -> None:
    length_N = torch.randint(2, 500, (64,), generator=torch.Generator().manual_seed(0))
    tokens_NL = torch.zeros(64, 500, dtype=torch.int64)
    shared = share_prompts(tokens_NL, torch.ones_like(length_N), length_N, torch.arange(64))
    assert sum(places.numel() for places in shared.places) < 2 * int(length_N.sum())
    assert len(shared.places) <= 9
