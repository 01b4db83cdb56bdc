"""VarGrad trajectory balance (TB), the loss of TBA (arXiv 2503.18929, §3): valid for data of any age.

It must not know where the completions come from: no importance ratio, no clipping.
"""

from __future__ import annotations

from torch import Tensor

from tba_hpc.objectives.common import ObjectiveOutput, group_mean


def trajectory_balance(
    logprob_BK: Tensor, ref_logprob_BK: Tensor, reward_BK: Tensor, beta: float
) -> ObjectiveOutput:
    """β/2 · mean over all rows of residual², where

        log Ẑ(x_i)  = mean_j [ log π_ref(y_ij|x_i) − log π_θ(y_ij|x_i) + r_ij/β ]   (current θ, no gradient)
        residual_ij = log Ẑ(x_i) + log π_θ(y_ij|x_i) − log π_ref(y_ij|x_i) − r_ij/β

    The paper's loss has no factor; with β/2 the gradient is −A·∇log π_θ, A being the group-centred
    r − β·log(π_θ/π_ref), so that gradient clipping means the same at every β of an annealing schedule.
    It is zero for every set of completions if and only if π_θ ∝ π_ref·exp(r/β) on them.

    Metrics: log_z (mean over groups, nats), kl (mean of log π_θ/π_ref, nats per completion),
    residual (mean absolute value, nats).
    """
    log_ratio_BK = logprob_BK - ref_logprob_BK
    log_z_B1 = group_mean(reward_BK / beta - log_ratio_BK)
    residual_BK = log_z_B1 + log_ratio_BK - reward_BK / beta
    metrics = {
        "log_z": log_z_B1.mean(),
        "kl": log_ratio_BK.detach().mean(),
        "residual": residual_BK.detach().abs().mean(),
    }
    return ObjectiveOutput(beta / 2 * residual_BK.square().mean(), metrics)
