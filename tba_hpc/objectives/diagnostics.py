"""Measures of how a batch's completions relate to the policy that learns from them, for any objective.

``moments`` are means over completions, so that those of micro-batches and ranks can be averaged; ``figures``
are computed from the moments of a whole batch.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, float64

from tba_hpc.objectives.common import Groups, group_mean

MAX_LOG_WEIGHT = 300.0
"""Limit on |log π_θ/π_behaviour|, in nats; within it float64 holds the ratio's square, and sums of many."""

MOMENTS = ("weight", "squared_weight", "better", "better_log_weight", "on_policy_tokens", "gap")
"""Names of the ``moments`` from which figures are computed."""


def moments(groups: Groups) -> dict[str, Tensor]:
    """Compute means over the completions, as detached float64 scalars; ``figures`` says what they are for.

    log_weight: mean of log w, w = π_θ/π_behaviour. better: share with a reward above the group's mean.
    better_log_weight: mean of log w for those, and 0 for others. weight, squared_weight: means of w and w².
    on_policy_tokens: mean number of tokens, counting only completions that the policy itself sampled. gap:
    mean over completions of the sum of |log π_behaviour − log π_θ| over these tokens.
    """
    log_ratio_BKL = groups.policy_BKL.detach() - groups.behaviour_BKL
    log_weight_BK = log_ratio_BKL.sum(2, dtype=float64)
    weight_BK = log_weight_BK.clamp(-MAX_LOG_WEIGHT, MAX_LOG_WEIGHT).exp()
    better_BK = groups.reward_BK > group_mean(groups.reward_BK)
    on_policy_BK = 0.0 if groups.on_policy_BK is None else groups.on_policy_BK.to(float64)
    return {
        "log_weight": log_weight_BK.mean(),
        "better": better_BK.mean(dtype=float64),
        "better_log_weight": (better_BK * log_weight_BK).mean(),
        "weight": weight_BK.mean(),
        "squared_weight": weight_BK.square().mean(),
        "gap": (on_policy_BK * log_ratio_BKL.abs().sum(2, dtype=float64)).mean(),
        "on_policy_tokens": (on_policy_BK * groups.tokens_BK.to(float64)).mean(),
    }


def figures(means: Mapping[str, float]) -> dict[str, float]:
    """Replace the ``moments`` among ``means`` over a whole batch by figures.

    log_weight: mean of log π_θ/π_behaviour, nats per completion. better_log_weight: the same over completions
    with a reward above their group's mean; it is below 0 if what is rewarded has become less likely since it
    was sampled, and left out if no group has two different rewards. ess: effective sample size (Σw)²/(N·Σw²)
    as a share of the N completions; 1 if all weights are equal, 1/N if one outweighs all others. engine_gap:
    mean of |log π_behaviour − log π_θ|, nats per token, over what the policy itself sampled. It measures how
    differently engine and learner compute the same weights, and is left out if there are no such tokens.
    """
    rest = dict(means)
    weight, square, better, risen, tokens, gap = (rest.pop(name) for name in MOMENTS)
    return {
        **rest,
        "ess": weight**2 / square,
        **({"better_log_weight": risen / better} if better else {}),
        **({"engine_gap": gap / tokens} if tokens else {}),
    }
