"""Attention of transformers' models in which every sequence looks at itself alone, prompts shared or not.

All else of a model looks at one token at a time, and so need not know whose it is: attention alone gathers
the sequences, which are causal and so take the fast kernels that no mask spoils.

Shape letters: H heads, d their size; else as in ``packed_groups``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from tba_hpc.learner.packed_groups import SharedPrompts

NAME = "by-sequence"
"""Of this attention among those of transformers. Without ``shared`` it is plain ``sdpa``."""

NO_MASK = torch.ones(1, 1, 1, 1, dtype=torch.bool)
"""To be given with ``shared``: of four axes it is handed on, and none made of the positions instead."""


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


AttentionInterface.register(NAME, attend_by_sequence)
AttentionMaskInterface.register(NAME, sdpa_mask)
