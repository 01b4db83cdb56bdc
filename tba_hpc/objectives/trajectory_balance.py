"""Trajectory balance: VarGrad TB and TBA′, the losses of TBA (arXiv 2503.18929), for data of any age.

It must not know where the completions come from.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional

from tba_hpc.objectives.common import Groups, ObjectiveOutput, centred, group_mean, token_share

LOG_RATIO_LIMIT = 10.0
"""TBA′: nats that one token's log π_θ/π_ref may add to the KL estimate."""


def trajectory_balance(
    groups: Groups, beta: float, *, ratio_cap: float | None = None, gap_clip: float | None = None
) -> ObjectiveOutput:
    """VarGrad trajectory balance (§3): β/2 · mean over all rows of residual².

        log Ẑ(x_i)  = mean_j [ log π_ref(y_ij|x_i) − log π_θ(y_ij|x_i) + r_ij/β ]   (current θ, no gradient)
        residual_ij = log Ẑ(x_i) + log π_θ(y_ij|x_i) − log π_ref(y_ij|x_i) − r_ij/β

    The paper's loss has no factor; with β/2 the gradient is −A·∇log π_θ, A being the group-centred
    r − β·log(π_θ/π_ref), so that gradient clipping means the same at every β of an annealing schedule.
    It is zero for every set of completions if and only if π_θ ∝ π_ref·exp(r/β) on them. The π_ref given may
    be a power of the reference's (``schedules.reference_power``), for log Ẑ needs no probabilities that add
    up: of log R = [log π_ref/γ + r/β]/T, as in red-teaming, the optimum is π_ref^(1/γT)·exp(r/βT)/Z.

    Two safeguards from later work, off by default, which leave that minimum where it is. ratio_cap: weigh a
    row by min(π_θ/π_behaviour, ratio_cap), without gradient (GFlowRL, arXiv 2607.13394). gap_clip: beyond
    this many nats the residual counts linearly (Huber): no row pulls harder than one at the limit.

    Metrics: log_z (mean over groups, nats), log_ratio (mean of log π_θ/π_ref, nats per completion),
    residual (mean absolute value, nats), clip_share (share of rows beyond either limit, where there is one).
    """
    log_ratio_BK = groups.log_ratio_BK
    log_z_B1 = group_mean(groups.reward_BK / beta - log_ratio_BK)
    residual_BK = log_z_B1 + log_ratio_BK - groups.reward_BK / beta
    loss_BK = _squared(residual_BK, gap_clip)
    if ratio_cap is not None:
        loss_BK = loss_BK * groups.ratio_BK.detach().clamp(max=ratio_cap)
    metrics = {
        "log_z": log_z_B1.mean(),
        "log_ratio": log_ratio_BK.detach().mean(),
        "residual": residual_BK.detach().abs().mean(),
        **_beyond(groups, residual_BK, ratio_cap, gap_clip),
    }
    return ObjectiveOutput(beta / 2 * loss_BK, metrics)


def tba_prime(groups: Groups, beta: float, *, ratio_cap: float | None = None) -> ObjectiveOutput:
    """TBA′ (§5 and appendix, for large models): mean over rows of the sum over tokens of −w·A·log π_θ.

        A_ij = (r_ij − r̄_i) − β(KL̂_ij − KL̄_i),   KL̂ = Σ_t clamp(log π_θ/π_ref, ±10), without gradient

    w = min(π_θ/π_behaviour, ratio_cap) of each token, without gradient (as in CISPO, arXiv 2506.13585), or 1
    where ratio_cap is none: then, and while no clamp acts, the gradient is that of trajectory balance.

    Metrics: log_ratio (mean of log π_θ/π_ref, nats per completion), advantage (mean absolute value),
    ratio (mean weight of a completion's tokens, added up and divided by their number in all), clip_share
    (share of tokens beyond the cap, where there is one).
    """
    log_ratio_BKL = (groups.policy_BKL - groups.reference_BKL).detach()
    kl_BK = log_ratio_BKL.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).sum(2)
    advantage_BK = centred(groups.reward_BK - beta * kl_BK)
    weight_BKL = _capped(groups, ratio_cap)
    loss_BK = -advantage_BK * (weight_BKL * groups.policy_BKL).sum(2)
    metrics = {
        "log_ratio": log_ratio_BKL.sum(2).mean(),
        "advantage": advantage_BK.abs().mean(),
        "ratio": ((weight_BKL * groups.mask_BKL).sum(2) / groups.tokens_BK).mean(),
    }
    if ratio_cap is not None:
        metrics["clip_share"] = token_share(groups.token_ratio_BKL > ratio_cap, groups)
    return ObjectiveOutput(loss_BK, metrics)


def _capped(groups: Groups, ratio_cap: float | None) -> Tensor:
    if ratio_cap is None:
        return torch.ones_like(groups.behaviour_BKL)
    return groups.token_ratio_BKL.detach().clamp(max=ratio_cap)


def _beyond(
    groups: Groups, residual_BK: Tensor, ratio_cap: float | None, gap_clip: float | None
) -> dict[str, Tensor]:
    """The share of rows beyond a limit; nothing where there is none."""
    if ratio_cap is None and gap_clip is None:
        return {}
    residual_limit, ratio_limit = (math.inf if limit is None else limit for limit in (gap_clip, ratio_cap))
    beyond_BK = (residual_BK.abs() > residual_limit) | (groups.ratio_BK > ratio_limit)
    return {"clip_share": beyond_BK.double().mean()}


def _squared(residual_BK: Tensor, limit: float | None) -> Tensor:
    if limit is None:
        return residual_BK.square()
    return 2 * functional.huber_loss(
        residual_BK, torch.zeros_like(residual_BK), reduction="none", delta=limit
    )
