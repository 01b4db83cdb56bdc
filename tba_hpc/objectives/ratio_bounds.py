"""Bounds on the influence of stale data, for any loss: weights on the gradient of each token.

A loss depends on the policy only through the log-probabilities of tokens. It is therefore enough to weight
its derivative ∂loss/∂log π at each token, called the slope. A gradient step makes a token with a positive
slope less likely.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from tba_hpc.config.variants import (
    BinaryKl,
    Dppo,
    IcePop,
    RatioBound,
    RatioCap,
    RatioTaper,
    Unbounded,
)
from tba_hpc.objectives.common import Groups, Objective, ObjectiveOutput, token_share
from tba_hpc.objectives.score_centering import mean_score

OF_TOKENS = (Unbounded, RatioCap, IcePop, Dppo)
"""Bounds that weight a token by its own values alone. The weights of other bounds depend on all tokens of a
completion."""


def bounded(objective: Objective, bound: RatioBound, *, center_scores: bool = False) -> Objective:
    """Return ``objective`` with its gradient weighted by ``bound`` and its value unchanged.

    center_scores: whether to subtract from each token's weighted score w·∇log π (w is the bound's weight) its
    mean under the sampling policy; see ``score_centering``. The mean is over candidates: all tokens that
    could have been sampled at the position. With a bound of OF_TOKENS, each candidate's weight follows from
    its own ratio. The expected gradient is then 0 if the slope ∂loss/∂log π is the same for all candidates.

    Other bounds depend on the whole completion, which is known for the sampled token only. RatioTaper gives
    all candidates the sampled token's weight. With BinaryKl a candidate's weight is its own ratio, or 0 for
    all candidates if the completion is masked.

    Metrics: those of the objective, and clip_share, the share of tokens or completions on which the bound
    acts.
    """
    if isinstance(bound, Unbounded) and not center_scores:
        return objective

    def weighted(groups: Groups, beta: float) -> ObjectiveOutput:
        policy_BKL = groups.policy_BKL.detach().requires_grad_()
        output = objective(replace(groups, policy_BKL=policy_BKL), beta)
        (slope_BKL,) = torch.autograd.grad(output.loss_BK.sum(), policy_BKL)
        weight_BKL, acts_BKL = weights(bound, groups, slope_BKL)
        score_BKL = weight_BKL * groups.policy_BKL
        if center_scores:
            weigh = partial(_candidate_weights, bound, slope_BKL, weight_BKL, acts_BKL)
            score_BKL = score_BKL - mean_score(groups, weigh)
        zero_BK = (slope_BKL * (score_BKL - score_BKL.detach())).sum(2)  # 0, with the weighted gradient
        clip_share = {} if isinstance(bound, Unbounded) else {"clip_share": _share(acts_BKL, groups)}
        return ObjectiveOutput(output.loss_BK.detach() + zero_BK, {**output.metrics, **clip_share})

    return weighted


def _candidate_weights(
    bound: RatioBound, slope_BKL: Tensor, weight_BKL: Tensor, acts_BKL: Tensor, candidates: Groups
) -> Tensor:
    """Return the weight of each candidate's ∇log π, from which ``mean_score`` computes the mean to subtract.

    A bound of OF_TOKENS weights a candidate like a sampled token, with the slope of the token that was
    sampled at its position. ``bounded`` describes the other bounds.

    slope_BKL: ∂loss/∂log π of the sampled tokens. weight_BKL, acts_BKL: what ``weights`` returns for the
    sampled tokens. candidates: groups whose tokens are the C + 1 candidates of each position in turn. The
    result is [B, K, L·(C + 1)], or [B, K, 1] if one weight holds for a whole completion.
    """
    if isinstance(bound, OF_TOKENS):
        each = candidates.policy_BKL.shape[2] // slope_BKL.shape[2]
        return weights(bound, candidates, slope_BKL.repeat_interleave(each, 2))[0]
    if isinstance(bound, BinaryKl):
        return candidates.token_ratio_BKL.detach() * ~acts_BKL
    return weight_BKL


def weights(bound: RatioBound, groups: Groups, slope_BKL: Tensor) -> tuple[Tensor, Tensor]:
    """Return the weight w of each token's gradient, and a bool mask of where ``bound`` acts, both detached.

    A bound acts where it caps, tapers or masks. Both results are [B, K, L], or [B, K, 1] if one value holds
    for all tokens of a completion. slope_BKL: ∂loss/∂log π of each token.
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
        case IcePop() | Dppo() | BinaryKl():
            acts = _masked(bound, groups, slope_BKL)
            return ratio_BKL * ~acts, acts
        case Unbounded():
            return torch.ones_like(groups.behaviour_BKL), torch.zeros_like(groups.mask_BKL)


def _masked(bound: IcePop | Dppo | BinaryKl, groups: Groups, slope_BKL: Tensor) -> Tensor:
    """Return which tokens, bool [B, K, L], or completions, [B, K, 1], have moved too far from π_behaviour.

    IcePop (arXiv 2510.18855): tokens whose ratio is outside ``bound.band``.
    DPPO (arXiv 2602.04879, eq. 12 and 13): tokens that a step would move further, and whose
    |π_θ − π_behaviour| is already above the limit. The paper's limit is 0.15.
    FlashREINFORCE (github.com/yifanzhang-pro/FlashREINFORCE): completions whose mean ``_binary_kl`` is above
    the limit. The limit of that project is 0.003.

    slope_BKL: ∂loss/∂log π of each token, which only DPPO uses.
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
    """Return the binary KL(p‖q) at each token, [B, K, L], detached, nats; 0 where no token was sampled.

    The two outcomes are "this token" and "another token". p and q are the token's probabilities under
    π_behaviour and π_θ, clamped to 1e-6 … 1 − 1e-6.
    """
    p, q = (
        logprob_BKL.detach().exp().clamp(1e-6, 1 - 1e-6)
        for logprob_BKL in (groups.behaviour_BKL, groups.policy_BKL)
    )
    return p * (p / q).log() + (1 - p) * ((1 - p) / (1 - q)).log()


def _share(acts: Tensor, groups: Groups) -> Tensor:
    return acts.double().mean() if acts.shape[2] == 1 else token_share(acts, groups)
