"""Score centering: subtracts the mean score under the policy that sampled a token (arXiv 2609.20807).

The score of a token is s = ∇log π_θ. On data from an older policy q, a constant advantage A has the expected
gradient A·Σ_v q(v)·s(v), which is 0 only if q = π_θ. If the mean Σ_v q(v)·s(v) is subtracted from each score,
the expected gradient is 0 for any q.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from tba_hpc.objectives.common import Groups

LEAST_MASS = 1e-6
"""Lower bound on the probability of all but the C likeliest tokens: about a float32 sum's rounding error."""


def mean_score(groups: Groups, weigh: Callable[[Groups], Tensor]) -> Tensor:
    """Return Σ_v q(v)·w(v)·log π_θ(v) at each position, [B, K, L]; only log π_θ has a gradient.

    q is the policy that sampled the token (equation 14). The sum runs over the C likeliest tokens under q;
    all others count as one further token, with score ∇log(1 − Σ_C π_θ), as if q divided the rest of its mass
    like π_θ (equation 12). The mean score is then 0 for any C if q = π_θ, which it would not be without that
    token. The mean is exact if C is the size of the vocabulary.

    weigh: function that returns the weights w, [B, K, L·(C + 1)] or [B, K, 1], of groups whose tokens are the
    C + 1 candidates of each position, one after another.
    """
    assert groups.top_policy_BKLC is not None, "core.batch.with_top_logprobs asks for them"
    assert groups.top_behaviour_BKLC is not None, "they come together"
    policy, behaviour = _with_others(groups.top_policy_BKLC), _with_others(groups.top_behaviour_BKLC)
    as_tokens = (policy.detach().flatten(2), behaviour.flatten(2))
    weight = weigh(replace(groups, policy_BKL=as_tokens[0], behaviour_BKL=as_tokens[1]))
    share = (weight * as_tokens[1].exp()).view_as(policy)
    return (share * policy).sum(3)


def _with_others(logprob_BKLC: Tensor) -> Tensor:
    """Append the log-probability of all other tokens together to those of the C likeliest tokens.

    The result is [B, K, L, C + 1], in float64 if the input is, and otherwise in float32.
    """
    logprob_BKLC = logprob_BKLC.to(torch.promote_types(logprob_BKLC.dtype, torch.float32))
    others = 1 - logprob_BKLC.exp().sum(3, keepdim=True)
    return torch.cat([logprob_BKLC, others.clamp(min=LEAST_MASS).log()], 3)
