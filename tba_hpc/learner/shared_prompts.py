"""Attention within each of many sequences that lie in one row, in which every prompt appears once.

A model treats a row as one long sequence (``core.packing``). Only attention mixes the row's tokens. Here
attention first gathers the keys and values of each sequence. What remains is plain causal attention, which
has fast kernels, unlike attention with a custom mask.

Shape letters: N or n sequences, L padded length, R tokens of the row, S keys of all sequences, H heads, d
head size, F = H·d.
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

from tba_hpc.config import ConfigError
from tba_hpc.core.packing import Padded, Varlen

ATTENTION = "by-sequence"
"""Name under which ``attend_by_sequence`` is registered with transformers."""

NO_MASK = torch.ones(1, 1, 1, 0, dtype=torch.bool)
"""Attention mask for ``attend_by_sequence``. Four axes keep transformers from making another mask. It is
empty, so any other attention function that uses it fails."""

CAUSAL = (-1, 0)
"""Argument window_size of varlen_attn for causal attention in which the last query sees all keys."""


class _Gather(torch.autograd.Function):
    """Function like index_select whose backward pass sums the gradients of repeated rows in float32.

    index_select itself rounds the sum to the dtype of the values after each term.
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
    """Return the rows of ``value_RF`` at each of ``places``, as [*shape, F] with gradient.

    places: int64 tensors of any shape, each with indices of rows.
    """
    if not value_RF.requires_grad:  # torch cannot compile a Function without gradient
        return tuple(value_RF.index_select(0, at.flatten()).unflatten(0, at.shape) for at in places)
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
    """Compute attention within each sequence, [1, R, H, d]. This is an attention function of transformers.

    Keys and values may have fewer heads than queries. packed: indices of the sequences in the row; None: the
    row is one sequence, and transformers' "sdpa" is used, with ``attention_mask``. Raises ConfigError if the
    mask is NO_MASK and ``packed`` is None, because the model has not passed ``packed`` on.
    """
    if packed is None:
        if attention_mask is not None and attention_mask.shape[-1] == 0:
            raise ConfigError(
                f"{type(module).__name__} does not get the indices of sequences that share a row: train "
                "another model, or add its type to ATTEND_ALONE in tba_hpc/learner/hf_model.py"
            )
        options["scaling"] = scaling
        return sdpa_attention_forward(module, query_1HRd, key_1HRd, value_1HRd, attention_mask, **options)
    query, key, value = (of_1HRd[0].transpose(0, 1) for of_1HRd in (query_1HRd, key_1HRd, value_1HRd))
    if isinstance(packed, Varlen):
        return _attend_varlen(query, key, value, packed, scaling)[None], None
    return _attend_padded(query, key, value, packed, scaling)[None], None


def _attend_varlen(
    query_RHd: Tensor, key_RHd: Tensor, value_RHd: Tensor, packed: Varlen, scaling: float | None
) -> Tensor:
    """Compute attention, [R, H, d], by torch's kernel for sequences of different lengths, without padding."""
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
    queries_per_key = query_RHd.shape[1] // key_RHd.shape[1]
    if queries_per_key > 1 and query_RHd.is_cuda and query_RHd.dtype == torch.float32:
        # The only float32 kernel for fewer key heads than query heads keeps all L x L weights in memory.
        key_RHd, value_RHd = (of_RHd.repeat_interleave(queries_per_key, 1) for of_RHd in (key_RHd, value_RHd))
    grouped = key_RHd.shape[1] < query_RHd.shape[1]
    sequences = zip(*(_rectangles(of_RHd, packed) for of_RHd in (query_RHd, key_RHd, value_RHd)), strict=True)
    found = []
    for query_nHLd, key_nHLd, value_nHLd in sequences:
        found_nHLd = functional.scaled_dot_product_attention(
            query_nHLd, key_nHLd, value_nHLd, is_causal=True, scale=scaling, enable_gqa=grouped
        )
        found.append(found_nHLd.transpose(1, 2).flatten(0, 1))
    return torch.cat(found).index_select(0, packed.from_R)


def _rectangles(value_RHd: Tensor, packed: Padded) -> list[Tensor]:
    """Gather values into a rectangle, [n, H, L, d], for each of ``packed.places``."""
    gathered = gather(value_RHd.flatten(1), packed.places)
    return [value_nLF.unflatten(2, value_RHd.shape[1:]).transpose(1, 2) for value_nLF in gathered]


AttentionInterface.register(ATTENTION, attend_by_sequence)
AttentionMaskInterface.register(ATTENTION, sdpa_mask)
