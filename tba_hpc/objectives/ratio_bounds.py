"""Bounds on the pull of stale data: weights on the gradient of each token, for any loss.

A loss sees the policy only through log-probabilities, so it is enough to weight ∂loss/∂log π_t. Where that is
positive, the token is pushed down.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from tba_hpc.config.variants import RatioBound, RatioCap, RatioTaper, SequenceMask, Unbounded
from tba_hpc.objectives.common import Groups, Objective, ObjectiveOutput, token_share


def bounded(objective: Objective, bound: RatioBound) -> Objective:
    """Weight the gradient of ``objective`` by ``bound``; its value stays the same.

    Metrics: the objective's, and clip_share, the share of tokens that weigh less than without the bound; it
    is a share of completions if the ratio is that of a completion.
    """
    if isinstance(bound, Unbounded):
        return objective

    def weighed(groups: Groups, beta: float) -> ObjectiveOutput:
        policy_BKL = groups.policy_BKL.detach().requires_grad_()
        output = objective(replace(groups, policy_BKL=policy_BKL), beta)
        (slope_BKL,) = torch.autograd.grad(output.loss_BK.sum(), policy_BKL)
        weight_BKL, acts_BKL = weights(bound, groups, slope_BKL.sum(2) > 0)
        pull_BK = (weight_BKL * slope_BKL * (groups.policy_BKL - groups.policy_BKL.detach())).sum(2)
        metrics = {**output.metrics, "clip_share": _share(acts_BKL, groups)}
        return ObjectiveOutput(output.loss_BK.detach() + pull_BK, metrics)

    return weighed


def weights(bound: RatioBound, groups: Groups, down_BK: Tensor) -> tuple[Tensor, Tensor]:
    """Return weights, and bools for where the bound acts, of tokens [B, K, L] or completions [B, K, 1].

    Both are detached. down_BK: bool, which completions are pushed down.
    """
    down_BK1 = down_BK[:, :, None]
    match bound:
        case RatioCap(cap=cap):
            ratio_BKL = groups.token_ratio_BKL.detach()
            return ratio_BKL.clamp(max=cap), ratio_BKL > cap
        case RatioTaper():
            ratio_BK1 = groups.ratio_BK.detach()[:, :, None]
            acts = down_BK1 & (ratio_BK1 < 1)
            return torch.where(acts, ratio_BK1, 1.0), acts
        case SequenceMask(limit=limit):
            drift_BK1 = -(groups.log_weight_BK / groups.tokens_BK)[:, :, None]
            acts = down_BK1 & (drift_BK1 > limit)
            return (~acts).to(drift_BK1.dtype), acts
        case Unbounded():
            return torch.ones_like(groups.behaviour_BKL), torch.zeros_like(groups.mask_BKL)


def _share(acts: Tensor, groups: Groups) -> Tensor:
    return acts.double().mean() if acts.shape[2] == 1 else token_share(acts, groups)
