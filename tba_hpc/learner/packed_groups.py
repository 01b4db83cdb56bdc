"""Several completions of one prompt in one row: the prompt once, each completion blind to the others.

A row then costs the prompt's tokens once instead of once per completion, and nothing between its completions
is padding. What keeps completions apart is a mask over rows (PackedGroups), or attention that gathers each
sequence from one row of all groups (SharedPrompts). It must not know which model reads the rows.

Shape letters: N sequences, L padded length, B rows of S sequences, M longest row, T completion tokens in all,
R tokens of all groups, F features.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

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


@dataclass(frozen=True, slots=True, eq=False)
class SharedPrompts:
    """All groups in one row without padding: each prompt, then the S completions that share it.

    tokens_R, position_R: int64, a token and its place in its own sequence. places: of sequences of like
    length int64 [n, longest], where in the row their tokens lie, those of the prompt among them; 0 beyond
    their end. from_R: int64, which of all these places a token is: of a prompt, its first sequence's.
    before_T: int64, place of the token from which each completion token is predicted, one sequence after the
    other.
    """

    tokens_R: Tensor
    position_R: Tensor
    places: tuple[Tensor, ...]
    from_R: Tensor
    before_T: Tensor

    def gather(self, value_RF: Tensor) -> tuple[Tensor, ...]:
        """The values of each sequence's own tokens, [n, longest, F] as in ``places``; differentiable."""
        gathered: tuple[Tensor, ...] = _Gather.apply(value_RF, *self.places)
        return gathered

    def scatter(self, values: Sequence[Tensor]) -> Tensor:
        """[R, F]: back in the row; of a prompt, the values of its first sequence."""
        return torch.cat([value.flatten(0, 1) for value in values]).index_select(0, self.from_R)


class _Gather(torch.autograd.Function):
    """Rows by index, of which several may be the same; their gradients are added up in float32.

    Autograd would round the sum to the type of the values after each of them.
    """

    @staticmethod
    def forward(ctx: Any, value_RF: Tensor, *places: Tensor) -> tuple[Tensor, ...]:
        ctx.places, ctx.shape = places, value_RF.shape
        return tuple(value_RF.index_select(0, at.flatten()).unflatten(0, at.shape) for at in places)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        exact = torch.promote_types(grads[0].dtype, torch.float32)
        total_RF = torch.zeros(ctx.shape, dtype=exact, device=grads[0].device)
        for at, grad in zip(ctx.places, grads, strict=True):
            total_RF.index_add_(0, at.flatten(), grad.flatten(0, 1).to(exact))
        return total_RF.to(grads[0].dtype), *(None for _ in ctx.places)


def share_prompts(
    tokens_NL: Tensor, prompt_length_N: Tensor, length_N: Tensor, sequences: int
) -> SharedPrompts:
    """As ``pack``, without rows."""
    place_L = torch.arange(tokens_NL.shape[1], device=tokens_NL.device)
    prompt_NL = place_L < prompt_length_N[:, None]
    within_NL = place_L < length_N[:, None]
    first_N1 = (torch.arange(len(tokens_NL), device=tokens_NL.device) % sequences == 0)[:, None]
    kept_NL = within_NL & (~prompt_NL | first_N1)
    own_NL = kept_NL.flatten().cumsum(0).view_as(kept_NL) - 1
    of_first_NL = own_NL[::sequences].repeat_interleave(sequences, 0)
    place_NL = torch.where(prompt_NL, of_first_NL, own_NL).where(within_NL, 0)
    from_NL, cells, places = torch.zeros_like(place_NL), 0, []
    for alike in _of_like_length(length_N):
        longest = int(length_N[alike].max())
        cell = torch.arange(len(alike) * longest, device=tokens_NL.device).view(len(alike), longest)
        from_NL[alike, :longest] = cells + cell
        cells += cell.numel()
        places.append(place_NL[alike, :longest])
    return SharedPrompts(
        tokens_R=tokens_NL[kept_NL],
        position_R=place_L.expand_as(tokens_NL)[kept_NL],
        places=tuple(places),
        from_R=from_NL[kept_NL],
        before_T=place_NL.roll(1, 1)[within_NL & ~prompt_NL],
    )


def _of_like_length(length_N: Tensor) -> Iterator[Tensor]:
    """Which sequences to pad to one length, the longest first: none to twice its own or more."""
    falling_N, order_N = length_N.sort(descending=True, stable=True)
    start, lengths = 0, falling_N.tolist()
    while start < len(lengths):
        end = start + sum(2 * length > lengths[start] for length in lengths[start:])
        yield order_N[start:end]
        start = end


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
