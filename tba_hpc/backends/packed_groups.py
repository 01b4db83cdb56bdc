"""Several completions of one prompt in one row: the prompt once, each completion blind to the others.

A row then costs the prompt's tokens once instead of once per completion, and nothing between its completions
is padding. It must not know which model reads the rows.

Shape letters: N sequences, L padded length, B rows, M longest row, T completion tokens in all.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class PackedGroups:
    """Rows in which S sequences of one prompt follow each other, less the prompts of all but the first.

    tokens_BM, position_BM: int64, a token and its place in its own sequence. completion_BM: int64, of which
    completion it is, from 1; 0 in the prompt. All three are 0 to the right of a row's end. row_T, before_T:
    int64, row and place of the token from which each completion token is predicted, one sequence after the
    other.
    """

    tokens_BM: Tensor
    position_BM: Tensor
    completion_BM: Tensor
    row_T: Tensor
    before_T: Tensor

    @property
    def visible_BMM(self) -> Tensor:
        """bool: whether a token (second axis) may look at another (third).

        That is one not after it which belongs to the prompt or to its own completion.
        """
        owner_BM1, owner_B1M = self.completion_BM[:, :, None], self.completion_BM[:, None, :]
        return ((owner_B1M == owner_BM1) | (owner_B1M == 0)).tril()


def pack(tokens_NL: Tensor, prompt_length_N: Tensor, length_N: Tensor, sequences: int) -> PackedGroups:
    """Rows of ``sequences`` sequences each, in order, which must have their prompt in common.

    tokens_NL: int64, padded on the right with any token. prompt_length_N (at least 1) and length_N: int64,
    tokens of the prompt, and of prompt and completion together.
    """
    place_L = torch.arange(tokens_NL.shape[1], device=tokens_NL.device)
    member_N1 = (torch.arange(len(tokens_NL), device=tokens_NL.device) % sequences)[:, None]
    prompt_NL = place_L < prompt_length_N[:, None]
    kept_NL = (place_L < length_N[:, None]) & (~prompt_NL | (member_N1 == 0))
    length_B = kept_NL.sum(1).unflatten(0, (-1, sequences)).sum(1)
    place_M = torch.arange(int(length_B.max()), device=tokens_NL.device)
    filled_BM = place_M < length_B[:, None]

    def packed(value_NL: Tensor) -> Tensor:
        return torch.zeros_like(filled_BM, dtype=torch.int64).masked_scatter(filled_BM, value_NL[kept_NL])

    position_BM = packed(place_L.expand_as(tokens_NL))
    completion_BM = packed(torch.where(prompt_NL, 0, member_N1 + 1))
    prompt_length_B1 = prompt_length_N[::sequences, None]
    before_BM = torch.where(position_BM == prompt_length_B1, prompt_length_B1 - 1, place_M - 1)
    row_T, place_T = completion_BM.nonzero(as_tuple=True)
    return PackedGroups(
        tokens_BM=packed(tokens_NL),
        position_BM=position_BM,
        completion_BM=completion_BM,
        row_T=row_T,
        before_T=before_BM[row_T, place_T],
    )
