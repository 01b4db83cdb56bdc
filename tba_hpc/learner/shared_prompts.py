"""Completions of one prompt in one row that holds the prompt once, and the attention that keeps them apart.

Everything in a model but attention looks at one token at a time. Attention gathers each sequence, prompt and
completion, from the row; they are causal, so the fast kernels apply, which a mask would rule out.

Shape letters: N sequences, L padded length, T completion tokens in all, R tokens of the row, H heads, d their
size, F features.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

ATTENTION = "by-sequence"
"""Name of this attention among those of transformers. Without ``shared`` it is plain ``sdpa``."""

NO_MASK = torch.ones(1, 1, 1, 1, dtype=torch.bool)
"""Passed with ``shared``: transformers hands a mask of four axes on, and would make one of positions else."""


@dataclass(frozen=True, slots=True, eq=False)
class SharedPrompts:
    """All sequences in one row without padding: each prompt, then the completions that share it.

    tokens_R, position_R: int64, a token and its place in its own sequence. places: for sequences of similar
    length int64 [n, longest], where in the row their tokens lie, those of the prompt among them; 0 beyond
    their end. from_R: int64, which of all these places a token is; for a prompt, its first sequence's.
    before_NL: int64, place of the token from which each completion token is predicted; elsewhere any.
    """

    tokens_R: Tensor
    position_R: Tensor
    places: tuple[Tensor, ...]
    from_R: Tensor
    before_NL: Tensor

    def gather(self, value_RF: Tensor) -> tuple[Tensor, ...]:
        """The values of each sequence's own tokens, [n, longest, F] as in ``places``; differentiable."""
        gathered: tuple[Tensor, ...] = _Gather.apply(value_RF, *self.places)
        return gathered

    def scatter(self, values: Sequence[Tensor]) -> Tensor:
        """[R, F]: back in the row; for a prompt, the values of its first sequence."""
        return torch.cat([value.flatten(0, 1) for value in values]).index_select(0, self.from_R)


class _Gather(torch.autograd.Function):
    """Rows by index, with repeats, whose gradients are summed in float32.

    Autograd would round the sum to the dtype of the values after each term.
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
    tokens_NL: Tensor, prompt_length_N: Tensor, length_N: Tensor, prompt_N: Tensor
) -> SharedPrompts:
    """The sequences in one row; those next to each other with the same number in ``prompt_N`` share a prompt.

    tokens_NL: int64, padded on the right with any token. prompt_length_N (at least 1) and length_N: int64,
    tokens of the prompt, and of prompt and completion together.
    """
    place_L = torch.arange(tokens_NL.shape[1], device=tokens_NL.device)
    prompt_NL = place_L < prompt_length_N[:, None]
    within_NL = place_L < length_N[:, None]
    first_N = torch.ones_like(prompt_N, dtype=torch.bool)
    first_N[1:] = prompt_N[1:] != prompt_N[:-1]
    kept_NL = within_NL & (~prompt_NL | first_N[:, None])
    own_NL = kept_NL.flatten().cumsum(0).view_as(kept_NL) - 1
    of_first_NL = own_NL[first_N][first_N.cumsum(0) - 1]
    place_NL = torch.where(prompt_NL, of_first_NL, own_NL).where(within_NL, 0)
    from_NL, cells, places = torch.zeros_like(place_NL), 0, []
    for alike in _of_similar_length(length_N):
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
        before_NL=place_NL.roll(1, 1),
    )


def _of_similar_length(length_N: Tensor) -> Iterator[Tensor]:
    """Which sequences to pad to one length, the longest first: none to twice its own or more."""
    falling_N, order_N = length_N.sort(descending=True, stable=True)
    start, lengths = 0, falling_N.tolist()
    while start < len(lengths):
        end = start + sum(2 * length > lengths[start] for length in lengths[start:])
        yield order_N[start:end]
        start = end


def attend_by_sequence(
    module: nn.Module,
    query_1HRd: Tensor,
    key_1HRd: Tensor,
    value_1HRd: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    shared: SharedPrompts | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """[1, R, H, d], and no weights. Keys and values may have fewer heads. shared: what lies in the row."""
    if shared is None:
        options["scaling"] = scaling
        return sdpa_attention_forward(module, query_1HRd, key_1HRd, value_1HRd, attention_mask, **options)
    several = key_1HRd.shape[1] < query_1HRd.shape[1]
    sequences = zip(*(_sequences(value, shared) for value in (query_1HRd, key_1HRd, value_1HRd)), strict=True)
    found = []
    for query_nHLd, key_nHLd, value_nHLd in sequences:
        found_nHLd = functional.scaled_dot_product_attention(
            query_nHLd, key_nHLd, value_nHLd, is_causal=True, scale=scaling, enable_gqa=several
        )
        found.append(found_nHLd.transpose(1, 2))
    found_RF = shared.scatter([found_nLHd.flatten(2) for found_nLHd in found])
    return found_RF.unflatten(1, found[0].shape[2:])[None], None


def _sequences(value_1HRd: Tensor, shared: SharedPrompts) -> list[Tensor]:
    """[n, H, L, d] of each of ``shared.places``."""
    value_RHd = value_1HRd[0].transpose(0, 1)
    gathered = shared.gather(value_RHd.flatten(1))
    return [value_nLF.unflatten(2, value_RHd.shape[1:]).transpose(1, 2) for value_nLF in gathered]


AttentionInterface.register(ATTENTION, attend_by_sequence)
AttentionMaskInterface.register(ATTENTION, sdpa_mask)
