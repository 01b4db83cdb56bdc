"""How a batch's completions relate to the policy that learns from them, whatever the objective.

``moments`` are means over completions, so that those of micro-batches and ranks add up; ``figures`` are made
of the moments of a whole batch.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, float64

from tba_hpc.objectives.common import Groups, group_mean

MAX_LOG_WEIGHT = 300.0
"""Nats, either way, up to which π_θ/π_behaviour is what it is: float64 holds its square, and many of them."""

MOMENTS = ("weight", "squared_weight", "better", "better_log_weight", "on_policy_tokens", "gap")
"""Of ``moments``, those of which figures are made."""


def moments(groups: Groups) -> dict[str, Tensor]:
    """Means over the completions, detached float64 scalars; ``figures`` says what they are for.

    log_weight: of log w, w = π_θ/π_behaviour. better: whether the reward is above the group's mean;
    better_log_weight: log w where it is. weight, squared_weight: of w. on_policy_tokens: those of completions
    that the policy itself has sampled; gap: sum of |log π_behaviour − log π_θ| over these.
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
    """``means`` over a whole batch, with figures in the place of its ``moments``.

    log_weight: mean of log π_θ/π_behaviour, nats per completion. better_log_weight: the same of completions
    with a reward above their group's mean: below 0 where what is rewarded has become less likely since it was
    sampled; left out where no group has two rewards. ess: effective sample size (Σw)²/(N·Σw²) of the N
    completions, a share: 1 where all weights are equal, 1/N where one outweighs all others. engine_gap: mean
    of |log π_behaviour − log π_θ|, nats per token, over what the policy itself has sampled, so that what
    differs is how two programs compute the same weights; left out where there is none.
    """
    rest = dict(means)
    weight, square, better, risen, tokens, gap = (rest.pop(name) for name in MOMENTS)
    return {
        **rest,
        "ess": weight**2 / square,
        **({"better_log_weight": risen / better} if better else {}),
        **({"engine_gap": gap / tokens} if tokens else {}),
    }
