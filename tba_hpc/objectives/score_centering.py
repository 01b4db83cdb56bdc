"""Score centering: subtracts from each score its mean under the sampling policy (arXiv 2609.20807).

The score of a token is s = ∇log π_θ. A constant advantage A should have no effect in expectation. But on data
from an older policy q its expected gradient is A·Σ_v q(v)·s(v), which is 0 only if q = π_θ. With the mean Σ_v
q(v)·s(v) subtracted from each score, the expected gradient is 0 for any q.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from tba_hpc.objectives.common import Groups

LEAST_MASS = 1e-6
"""Lower limit on the total probability of all tokens but the C likeliest. It is about the rounding error of a
sum in float32."""


def mean_score(groups: Groups, weigh: Callable[[Groups], Tensor]) -> Tensor:
    """Return Σ_v q(v)·w(v)·log π_θ(v) at each position, [B, K, L], whose gradient is the mean weighted score.

    q is the policy that sampled the token (equation 14), and only log π_θ has a gradient. The sum runs over
    the C tokens that are likeliest under q, and over one more that stands for all others. The score of this
    extra token is ∇log(1 − Σ_C π_θ), as if q divided the rest of its mass like π_θ (equation 12). With this
    choice the mean score is 0 for any C if q = π_θ. The mean is exact if C is the size of the vocabulary.

    weigh: function from groups to the weights w of their tokens. It is given groups whose tokens are the
    C + 1 candidates of each position in turn, and returns [B, K, L·(C + 1)] or [B, K, 1].
    """
    assert groups.top_policy_BKLC is not None, "the batch has train.score_centering likeliest tokens"
    assert groups.top_behaviour_BKLC is not None, "both policies have them, or neither"
    policy, behaviour = _with_others(groups.top_policy_BKLC), _with_others(groups.top_behaviour_BKLC)
    as_tokens = (policy.detach().flatten(2), behaviour.flatten(2))
    weight = weigh(replace(groups, policy_BKL=as_tokens[0], behaviour_BKL=as_tokens[1]))
    share = (weight * as_tokens[1].exp()).view_as(policy)
    return (share * policy).sum(3)


def _with_others(logprob_BKLC: Tensor) -> Tensor:
    """Append to the C likeliest tokens one that stands for all others, with their total probability.

    logprob_BKLC: log-probabilities of the C likeliest tokens. Returns log-probabilities, [B, K, L, C + 1], in
    float64 if the input is float64, and otherwise in float32.
    """
    logprob_BKLC = logprob_BKLC.to(torch.promote_types(logprob_BKLC.dtype, torch.float32))
    others = 1 - logprob_BKLC.exp().sum(3, keepdim=True)
    return torch.cat([logprob_BKLC, others.clamp(min=LEAST_MASS).log()], 3)
