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
from tba_hpc.objectives.score_centering import mean_score

OF_TOKENS = (Unbounded, RatioCap)
"""Bounds that weigh each token by its own ratio, the others by that of its completion."""


def bounded(objective: Objective, bound: RatioBound, *, centred: bool = False) -> Objective:
    """Weight the gradient of ``objective`` by ``bound``; its value stays the same.

    centred: subtract from each weighted score ∇log π_t its mean under the policy that sampled the token
    (score centering). A bound of tokens weighs each token of that mean by its own ratio, because the
    mean of weighted scores is what a constant slope pulls by. A bound of completions weighs score and mean
    alike, because it depends on tokens still to come.

    Metrics: the objective's, and clip_share, the share of tokens that weigh less than without the bound; it
    is a share of completions if the ratio is that of a completion.
    """
    if isinstance(bound, Unbounded) and not centred:
        return objective

    def weighed(groups: Groups, beta: float) -> ObjectiveOutput:
        policy_BKL = groups.policy_BKL.detach().requires_grad_()
        output = objective(replace(groups, policy_BKL=policy_BKL), beta)
        (slope_BKL,) = torch.autograd.grad(output.loss_BK.sum(), policy_BKL)
        down_BK = slope_BKL.sum(2) > 0
        weight_BKL, acts_BKL = weights(bound, groups, down_BK)
        score_BKL = weight_BKL * groups.policy_BKL
        if centred:
            own = isinstance(bound, OF_TOKENS)
            score_BKL = score_BKL - mean_score(
                groups, lambda tokens: weights(bound, tokens, down_BK)[0] if own else weight_BKL
            )
        pull_BK = (slope_BKL * (score_BKL - score_BKL.detach())).sum(2)
        clip_share = {} if isinstance(bound, Unbounded) else {"clip_share": _share(acts_BKL, groups)}
        return ObjectiveOutput(output.loss_BK.detach() + pull_BK, {**output.metrics, **clip_share})

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
