"""Trajectory balance: VarGrad TB and TBA′, the losses of TBA (arXiv 2503.18929), for data of any age."""

from __future__ import annotations

import torch
from torch import Tensor

from tba_hpc.config.variants import LogZ
from tba_hpc.objectives.common import Groups, ObjectiveOutput, centred, group_mean

LOG_RATIO_LIMIT = 10.0
"""Limit on a token's |log π/π_ref| in the KL estimates of TBA′, in nats."""


def trajectory_balance(groups: Groups, beta: float, *, log_z: LogZ = "behaviour") -> ObjectiveOutput:
    """VarGrad trajectory balance (§3): the loss of a completion is β/2 · residual².

        log Ẑ(x_i)  = mean_j [ log π_ref(y_ij|x_i) − log π_μ(y_ij|x_i) + r_ij/β ]
        residual_ij = log Ẑ(x_i) + log π_θ(y_ij|x_i) − log π_ref(y_ij|x_i) − r_ij/β

    x_i is the prompt of group i, and y_ij is its completion j, with reward r_ij.

    log_z: the policy π_μ in log Ẑ. "behaviour": the policy that sampled each completion. "policy": the
    current θ, without gradient, as in equation 7. "none": log Ẑ = r̄/β, without log-ratios. On fresh data
    "behaviour" and "policy" agree. But with "policy" a group's residuals always sum to 0. Nothing then keeps
    log π_θ of all its completions from moving together, and on old data they can all fall.

    The paper's loss has no factor β/2. The factor makes the gradient −A·∇log π_θ, where A = −β·residual, so
    that gradient clipping means the same at every β of a schedule. With "policy" the loss is 0 on a set of
    completions if and only if π_θ ∝ π_ref·exp(r/β) on them, whichever policy sampled them. With "behaviour"
    it is 0 if both π_θ and π_μ have that form, with the same constant. A run can reach this point, since π_μ
    follows π_θ.

    π_ref may be a power of the reference (``schedules.reference_power``), because log Ẑ does not need
    probabilities that sum to 1. For log R = (log π_ref/γ + r/β)/T, as in red-teaming, the optimum is
    π_ref^(1/γT)·exp(r/βT)/Z.

    Metrics: log_z (mean over groups, nats), log_ratio (mean of log π_θ/π_ref, nats per completion), residual
    (mean absolute value, nats).
    """
    log_z_B1 = group_mean(groups.reward_BK / beta - _kl(groups, log_z).sum(2))
    residual_BK = log_z_B1 + groups.log_ratio_BK - groups.reward_BK / beta
    metrics = {
        "log_z": log_z_B1.mean(),
        "log_ratio": groups.log_ratio_BK.detach().mean(),
        "residual": residual_BK.detach().abs().mean(),
    }
    return ObjectiveOutput(beta / 2 * residual_BK.square(), metrics)


def tba_prime(groups: Groups, beta: float, *, log_z: LogZ = "behaviour") -> ObjectiveOutput:
    """TBA′ (§5 and appendix, for large models): the loss of a completion is −A·log π_θ.

        A_ij = (r_ij − r̄_i) − β(KL_ij − mean_j KL′_ij),   KL = Σ_t clamp(log π_θ/π_ref, ±10), no gradient

    KL′ is the same sum for the policy that ``log_z`` names. "behaviour": the policy that sampled. "policy":
    θ, as in the paper. "none": KL′ is 0. If no clamp acts, the gradient is that of trajectory balance.

    Metrics: log_ratio (mean of log π_θ/π_ref, nats per completion), advantage (mean absolute value).
    """
    kl_BK, centre_BK = (_clamped(_kl(groups, whose)) for whose in ("policy", log_z))
    advantage_BK = centred(groups.reward_BK) - beta * (kl_BK - group_mean(centre_BK))
    metrics = {"log_ratio": groups.log_ratio_BK.detach().mean(), "advantage": advantage_BK.abs().mean()}
    return ObjectiveOutput(-advantage_BK * groups.logprob_BK, metrics)


def _kl(groups: Groups, log_z: LogZ) -> Tensor:
    """Return log π/π_ref of each token, [B, K, L], detached, for the policy named log_z; 0 for "none"."""
    if log_z == "none":
        return torch.zeros_like(groups.behaviour_BKL)
    logprob_BKL = groups.behaviour_BKL if log_z == "behaviour" else groups.policy_BKL.detach()
    return logprob_BKL - groups.reference_BKL


def _clamped(log_ratio_BKL: Tensor) -> Tensor:
    """Return the sum over tokens, [B, K], of log-ratios clamped to ±LOG_RATIO_LIMIT."""
    return log_ratio_BKL.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).sum(2)
