"""OAPL: regression of log-ratios on optimal advantages, for data of any age."""

from __future__ import annotations

from tba_hpc.objectives.common import Groups, ObjectiveOutput


def oapl(groups: Groups, beta: float) -> ObjectiveOutput:
    """Optimal advantage regression on the lagged policy (arXiv 2602.19362, eq. 3): mean of residual²/2β₂.

        V̂ = β₁·log mean exp(r/β₁), over all completions that were sampled for a request
        residual = β₂·log(π_θ/π_lag) − (r − V̂)

    π_lag is the policy that sampled the completion. β₂ is ``beta``. β₁ is ``value_beta``; the buffer computes
    V̂ when completions arrive, so a group may mix requests and versions. The paper's loss has no factor. With
    1/2β₂ the gradient is −A·∇log π_θ, where A = (r − V̂) − β₂·log(π_θ/π_lag). This is the scale of trajectory
    balance, with V̂ instead of the group's mean.

    If β₁ = β₂, and V̂ averages infinitely many completions, all residuals are 0 at π_lag·exp(r/β)/Z and
    nowhere else. With another β₁ they cannot all be 0, and the minimum depends on the completions drawn.
    V̂ assumes that π_lag, as recorded, is the distribution that was sampled; Config ensures it.

    Metrics: log_ratio (mean of log π_θ/π_lag, nats per completion), value (mean V̂), residual (mean absolute
    value, in units of the reward).
    """
    log_ratio_BK = groups.logprob_BK - groups.behaviour_logprob_BK
    residual_BK = beta * log_ratio_BK - (groups.reward_BK - groups.value_BK)
    metrics = {
        "log_ratio": log_ratio_BK.detach().mean(),
        "value": groups.value_BK.mean(),
        "residual": residual_BK.detach().abs().mean(),
    }
    return ObjectiveOutput(residual_BK.square() / (2 * beta), metrics)
