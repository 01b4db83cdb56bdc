"""Bounds on the pull of stale data: weights on the gradient of each token, for any loss.

A loss sees the policy only through log-probabilities, so it is enough to weight ∂loss/∂log π_t. Where that is
positive, the token is pushed down.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from tba_hpc.config.variants import (
    BinaryKl,
    Dppo,
    IcePop,
    RatioBound,
    RatioCap,
    RatioTaper,
    SequenceMask,
    Unbounded,
)
from tba_hpc.objectives.common import Groups, Objective, ObjectiveOutput, token_share


def bounded(objective: Objective, bound: RatioBound) -> Objective:
    """Weight the gradient of ``objective`` by ``bound``; its value stays the same.

    Metrics: the objective's, and clip_share, the share of tokens on which the bound acts; it is a share of
    completions if the bound looks at whole completions.
    """
    if isinstance(bound, Unbounded):
        return objective

    def weighed(groups: Groups, beta: float) -> ObjectiveOutput:
        policy_BKL = groups.policy_BKL.detach().requires_grad_()
        output = objective(replace(groups, policy_BKL=policy_BKL), beta)
        (slope_BKL,) = torch.autograd.grad(output.loss_BK.sum(), policy_BKL)
        weight_BKL, acts_BKL = weights(bound, groups, slope_BKL)
        pull_BK = (weight_BKL * slope_BKL * (groups.policy_BKL - groups.policy_BKL.detach())).sum(2)
        metrics = {**output.metrics, "clip_share": _share(acts_BKL, groups)}
        return ObjectiveOutput(output.loss_BK.detach() + pull_BK, metrics)

    return weighed


def weights(bound: RatioBound, groups: Groups, slope_BKL: Tensor) -> tuple[Tensor, Tensor]:
    """Return weights, and bools for where the bound acts, of tokens [B, K, L] or completions [B, K, 1].

    Both are detached. slope_BKL: ∂loss/∂log π of each token.
    """
    down_BK1 = slope_BKL.sum(2, keepdim=True) > 0
    ratio_BKL = groups.token_ratio_BKL.detach()
    match bound:
        case RatioCap(cap=cap):
            return ratio_BKL.clamp(max=cap), ratio_BKL > cap
        case RatioTaper():
            ratio_BK1 = groups.ratio_BK.detach()[:, :, None]
            acts = down_BK1 & (ratio_BK1 < 1)
            return torch.where(acts, ratio_BK1, 1.0), acts
        case SequenceMask(limit=limit):
            drift_BK1 = -(groups.log_weight_BK / groups.tokens_BK)[:, :, None]
            acts = down_BK1 & (drift_BK1 > limit)
            return (~acts).to(drift_BK1.dtype), acts
        case IcePop() | Dppo() | BinaryKl():
            acts = _masked(bound, groups, slope_BKL)
            return ratio_BKL * ~acts, acts
        case Unbounded():
            return torch.ones_like(groups.behaviour_BKL), torch.zeros_like(groups.mask_BKL)


def _masked(bound: IcePop | Dppo | BinaryKl, groups: Groups, slope_BKL: Tensor) -> Tensor:
    """Mark the tokens, bool [B, K, L], or completions, [B, K, 1], that have moved too far from π_behaviour.

    IcePop: the ratio is outside the band (arXiv 2510.18855). DPPO: |π_θ − π_behaviour| is above the limit,
    and the gradient pushes it further (arXiv 2602.04879, eq. 12 and 13; 0.15 is the paper's). FlashREINFORCE:
    the mean of ``_binary_kl`` is above the limit (github.com/yifanzhang-pro/FlashREINFORCE, whose is 0.003).
    """
    match bound:
        case IcePop(band=(low, high)):
            ratio_BKL = groups.token_ratio_BKL.detach()
            return (ratio_BKL < low) | (ratio_BKL > high)
        case Dppo(limit=limit):
            moved_BKL = groups.policy_BKL.detach().exp() - groups.behaviour_BKL.exp()
            return (moved_BKL.abs() > limit) & (moved_BKL * slope_BKL < 0)
        case BinaryKl(limit=limit):
            mean_BK = _binary_kl(groups).sum(2) / groups.tokens_BK
            return mean_BK[:, :, None] > limit


def _binary_kl(groups: Groups) -> Tensor:
    """Return KL(p‖q) of each token between "this token" and "another", [B, K, L], detached, nats.

    p and q are its probabilities under π_behaviour and π_θ, kept 1e-6 from 0 and 1. Where there is no sampled
    token it is 0.
    """
    p, q = (
        logprob_BKL.detach().exp().clamp(1e-6, 1 - 1e-6)
        for logprob_BKL in (groups.behaviour_BKL, groups.policy_BKL)
    )
    return p * (p / q).log() + (1 - p) * ((1 - p) / (1 - q)).log()


def _share(acts: Tensor, groups: Groups) -> Tensor:
    return acts.double().mean() if acts.shape[2] == 1 else token_share(acts, groups)
