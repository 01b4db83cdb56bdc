"""OAPL: regression of log-ratios on optimal advantages, for data of any age."""

from __future__ import annotations

from tba_hpc.objectives.common import Groups, ObjectiveOutput


def oapl(groups: Groups, beta: float) -> ObjectiveOutput:
    """Optimal advantage regression on completions of a lagged policy (arXiv 2602.19362, eq. 3).

    The loss of a completion is residual²/(2β₂), where

        V̂ = β₁·log mean exp(r/β₁), over all completions that were sampled for the same request
        residual = β₂·log(π_θ/π_lag) − (r − V̂)

    π_lag is the policy that sampled the completion, and β₂ is ``beta``. The buffer computes V̂
    (``groups.value_BK``) when completions arrive, with β₁ = ``train.objective.value_beta``. A group may
    therefore mix requests and versions of the weights.

    The paper's loss is residual². The factor 1/(2β₂) makes the gradient −A·∇log π_θ, where
    A = (r − V̂) − β₂·log(π_θ/π_lag). That is the scale of trajectory balance, whose baseline is the group's
    mean instead of V̂.

    If β₁ = β₂ and V̂ averages infinitely many completions, the policy π_lag·exp(r/β)/Z makes all residuals 0,
    and no other policy does. If β₁ ≠ β₂, no policy does, and the minimum depends on the completions that were
    drawn. The completions must be samples of exactly the distribution that is recorded as π_lag; Config
    ensures this.

    Metrics: log_ratio (mean of log π_θ/π_lag, nats per completion), value (mean V̂), residual (mean absolute
    value, in units of the reward).
    """
    log_ratio_BK = (groups.policy_BKL - groups.behaviour_BKL).sum(2)
    residual_BK = beta * log_ratio_BK - (groups.reward_BK - groups.value_BK)
    metrics = {
        "log_ratio": log_ratio_BK.detach().mean(),
        "value": groups.value_BK.mean(),
        "residual": residual_BK.detach().abs().mean(),
    }
    return ObjectiveOutput(residual_BK.square() / (2 * beta), metrics)
