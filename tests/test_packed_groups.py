"""Packed rows, by hand and against their definition."""

from __future__ import annotations

import pytest
import torch

from tba_hpc.backends.packed_groups import pack
from tba_hpc.batch import sequences_per_row

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


@pytest.mark.parametrize(
    ("prompt", "completion", "width", "together"),
    [
        (27, 20, 96, 8),  # the quickstart
        (500, 50, 1024, 16),  # long prompts, short answers: all
        (100, 700, 1024, 1),  # the reverse: attention over all others would cost more than the prompt
    ],
)
def test_rows_hold_as_many_sequences_as_pays(
    prompt: float, completion: float, width: int, together: int
) -> None:
    assert sequences_per_row(16, prompt=prompt, completion=completion, width=width) == together
