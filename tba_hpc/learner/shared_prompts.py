"""Attention for many sequences with shared prompts in one row; each sequence attends only to itself.

All other parts of a model process tokens independently. Attention gathers each sequence's keys and values
from the row. It is then plain causal attention, for which there are fast kernels, unlike for a custom mask.

Shape letters: N sequences, L padded length, R tokens of the row, H heads, d head size, F features.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from tba_hpc.core.packing import Padded, Varlen

ATTENTION = "by-sequence"
"""Name by which transformers knows ``attend_by_sequence``."""

NO_MASK = torch.ones(1, 1, 1, 1, dtype=torch.bool)
"""Mask passed with ``packed``. Its four axes stop transformers from making a mask from positions."""

CAUSAL = (-1, 0)
"""Window of varlen_attn for causal attention. The last query is aligned with the last key."""


class _Gather(torch.autograd.Function):
    """index_select whose backward pass sums the gradients of repeated rows in float32.

    Autograd would round the sum to the values' dtype after each term.
    """

    @staticmethod
    def forward(ctx: Any, value_RF: Tensor, *places: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(*places)
        ctx.shape = value_RF.shape
        return tuple(value_RF.index_select(0, at.flatten()).unflatten(0, at.shape) for at in places)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        exact = torch.promote_types(grads[0].dtype, torch.float32)
        total_RF = torch.zeros(ctx.shape, dtype=exact, device=grads[0].device)
        for at, grad in zip(ctx.saved_tensors, grads, strict=True):
            total_RF.index_add_(0, at.flatten(), grad.flatten(0, at.dim() - 1).to(exact))
        return total_RF.to(grads[0].dtype), *(None for _ in grads)


def gather(value_RF: Tensor, places: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return the rows at each of ``places``, int64 of any shape, as [*shape, F], with gradient."""
    gathered: tuple[Tensor, ...] = _Gather.apply(value_RF, *places)
    return gathered


def attend_by_sequence(
    module: nn.Module,
    query_1HRd: Tensor,
    key_1HRd: Tensor,
    value_1HRd: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    packed: Varlen | Padded | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Compute attention, [1, R, H, d], as an attention function of transformers. Supports grouped queries.

    packed: indices of the sequences in the row; None: plain ``sdpa``.
    """
    if packed is None:
        options["scaling"] = scaling
        return sdpa_attention_forward(module, query_1HRd, key_1HRd, value_1HRd, attention_mask, **options)
    query, key, value = (of_1HRd[0].transpose(0, 1) for of_1HRd in (query_1HRd, key_1HRd, value_1HRd))
    if isinstance(packed, Varlen):
        return _attend_varlen(query, key, value, packed, scaling)[None], None
    return _attend_padded(query, key, value, packed, scaling)[None], None


def _attend_varlen(
    query_RHd: Tensor, key_RHd: Tensor, value_RHd: Tensor, packed: Varlen, scaling: float | None
) -> Tensor:
    """Compute attention, [R, H, d], with the variable-length kernel, without padding."""
    keys, values = (
        gather(of_RHd.flatten(1), [packed.key_S])[0].unflatten(1, of_RHd.shape[1:])
        for of_RHd in (key_RHd, value_RHd)
    )
    found_RHd = varlen_attn(
        query_RHd.contiguous(),
        keys,
        values,
        packed.query_ends,
        packed.key_ends,
        packed.longest_query,
        packed.longest_key,
        scale=scaling,
        window_size=CAUSAL,
        enable_gqa=key_RHd.shape[1] < query_RHd.shape[1],
    )
    assert isinstance(found_RHd, Tensor)
    return found_RHd


def _attend_padded(
    query_RHd: Tensor, key_RHd: Tensor, value_RHd: Tensor, packed: Padded, scaling: float | None
) -> Tensor:
    """Compute attention, [R, H, d], in one padded rectangle for each set of sequences of similar length."""
    each = query_RHd.shape[1] // key_RHd.shape[1]
    if each > 1 and query_RHd.is_cuda and query_RHd.dtype == torch.float32:
        # The only float32 kernel for grouped queries materialises all L x L weights.
        key_RHd, value_RHd = (of_RHd.repeat_interleave(each, 1) for of_RHd in (key_RHd, value_RHd))
    several = key_RHd.shape[1] < query_RHd.shape[1]
    sequences = zip(*(_rectangles(of_RHd, packed) for of_RHd in (query_RHd, key_RHd, value_RHd)), strict=True)
    found = []
    for query_nHLd, key_nHLd, value_nHLd in sequences:
        found_nHLd = functional.scaled_dot_product_attention(
            query_nHLd, key_nHLd, value_nHLd, is_causal=True, scale=scaling, enable_gqa=several
        )
        found.append(found_nHLd.transpose(1, 2).flatten(0, 1))
    return torch.cat(found).index_select(0, packed.from_R)


def _rectangles(value_RHd: Tensor, packed: Padded) -> list[Tensor]:
    """Gather values into a rectangle, [n, H, L, d], for each of ``packed.places``."""
    gathered = gather(value_RHd.flatten(1), packed.places)
    return [value_nLF.unflatten(2, value_RHd.shape[1:]).transpose(1, 2) for value_nLF in gathered]


AttentionInterface.register(ATTENTION, attend_by_sequence)
AttentionMaskInterface.register(ATTENTION, sdpa_mask)
