"""Measures of how far a batch's completions are from the policy that learns from them, for any objective.

``moments`` computes means over completions, which can be averaged over the batch's parts and ranks. From the
moments of the whole batch, ``figures`` computes what is logged.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, float64

from tba_hpc.objectives.common import Groups, centred

MAX_LOG_WEIGHT = 300.0
"""Limit on |log π_θ/π_behaviour|, in nats, so that sums of squared ratios do not overflow float64."""

MOMENTS = ("weight", "squared_weight", "better", "better_log_weight", "on_policy_tokens", "gap")
"""Names of the ``moments`` that are not logged themselves: ``figures`` removes them."""


def moments(groups: Groups) -> dict[str, Tensor]:
    """Compute the means over completions that ``figures`` needs, as detached float64 scalars.

    w is a completion's ratio π_θ/π_behaviour. log_weight, weight, squared_weight: means of log w, w and w².
    better: share of completions whose reward is above the mean of their group.
    better_log_weight: mean of log w, with 0 in place of log w for all other completions.
    on_policy_tokens: mean number of sampled tokens, with 0 for completions that θ itself did not sample.
    gap: mean of Σ_t |log π_behaviour − log π_θ|, with 0 for completions that θ itself did not sample.
    """
    log_ratio_BKL = groups.policy_BKL.detach() - groups.behaviour_BKL
    log_weight_BK = log_ratio_BKL.sum(2, dtype=float64)
    weight_BK = log_weight_BK.clamp(-MAX_LOG_WEIGHT, MAX_LOG_WEIGHT).exp()
    better_BK = centred(groups.reward_BK) > 0
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
    """Return the metrics to log. means: metrics of a whole batch, the ``moments`` included.

    log_weight: mean of log π_θ/π_behaviour, nats per completion, as in ``moments``.
    better_log_weight: the same mean over completions with a reward above the mean of their group. If it is
    negative, rewarded completions have become less likely since they were sampled. Omitted if no reward is
    above its group's mean.
    ess: effective sample size (Σw)²/(N·Σw²), as a share of the N completions. It is 1 if all weights are
    equal, and 1/N if one outweighs all others.
    engine_gap: mean of |log π_behaviour − log π_θ| over the tokens that θ itself sampled, nats per token. It
    measures how differently engine and learner compute the same policy. Omitted if θ sampled no token.
    """
    rest = dict(means)
    weight, square, better, risen, tokens, gap = (rest.pop(name) for name in MOMENTS)
    return {
        **rest,
        "ess": weight**2 / square,
        **({"better_log_weight": risen / better} if better else {}),
        **({"engine_gap": gap / tokens} if tokens else {}),
    }
