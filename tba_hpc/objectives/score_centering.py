"""Score centering: the mean of a token's score under the policy that sampled it (arXiv 2609.20807).

The score of a token is s = ∇log π_θ. On data that an older policy q sampled, the expected gradient of
a constant advantage A is A·Σ_v q(v)·s(v), which is 0 if q = π_θ. If the mean Σ_v q(v)·s(v) is subtracted
from each score, the expected gradient is 0 for any q.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from tba_hpc.objectives.common import Groups

LEAST_MASS = 1e-6
"""Floor of the probability of all other tokens together, near the rounding error of a float32 sum."""


def mean_score(groups: Groups, weigh: Callable[[Groups], Tensor]) -> Tensor:
    """Return Σ_v q(v)·w(v)·log π_θ(v) in each token's place, [B, K, L]; only log π_θ has a gradient.

    q is the policy that sampled the token (equation 14). The sum goes over the C tokens that are likeliest
    under q, and all others count as one token. The score of this one token is ∇log(1 − Σ_C π_θ), as if q
    divided the rest of its mass like π_θ (equation 12). So the mean score is 0 for any C if q = π_θ. If the
    others were dropped, it would not be. The mean is exact if C is the size of the vocabulary.

    weigh: returns weights, [B, K, L·(C + 1)] or [B, K, 1], for groups whose tokens are the C + 1 candidates
    of each place, one after another.
    """
    assert groups.top_policy_BKLC is not None, "core.batch.with_top_logprobs asks for them"
    assert groups.top_behaviour_BKLC is not None, "they come together"
    policy, behaviour = _with_others(groups.top_policy_BKLC), _with_others(groups.top_behaviour_BKLC)
    as_tokens = (policy.detach().flatten(2), behaviour.flatten(2))
    weight = weigh(replace(groups, policy_BKL=as_tokens[0], behaviour_BKL=as_tokens[1]))
    share = (weight * as_tokens[1].exp()).view_as(policy)
    return (share * policy).sum(3)


def _with_others(logprob_BKLC: Tensor) -> Tensor:
    """Append the log-probability of all other tokens together, [B, K, L, C + 1], in float32 at least."""
    logprob_BKLC = logprob_BKLC.to(torch.promote_types(logprob_BKLC.dtype, torch.float32))
    others = 1 - logprob_BKLC.exp().sum(3, keepdim=True)
    return torch.cat([logprob_BKLC, others.clamp(min=LEAST_MASS).log()], 3)
