"""Policy-gradient objectives for comparison: RLOO, GRPO, Dr. GRPO, decoupled PPO, GSPO and TOPR.

They are correct on data that are on-policy or nearly so.

Some take a ``baseline_shift`` δ, which is added to the baseline V of the advantages R − V. On on-policy data
δ changes only the variance of the gradient. On data from another policy μ, REINFORCE maximises
E_μ[(R − V)·log π]. If V is below the mean reward under μ (δ < 0), the resulting policy improves on μ. If V is
at or above that mean, the policy's support shrinks (AsymRE, arXiv 2506.20520).
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from tba_hpc.objectives.common import (
    MAX_LOG_RATIO,
    Groups,
    ObjectiveOutput,
    bounded_exp,
    centred,
    clipped,
    leave_one_out,
    second_moment_mask,
    token_share,
)

EPSILON = 1e-4
"""Constant added to the standard deviation of a group's rewards, as in public implementations of GRPO."""


def rloo(groups: Groups, beta: float, *, baseline_shift: float = 0.0) -> ObjectiveOutput:
    """REINFORCE with a leave-one-out baseline (arXiv 2402.14740): the loss of a completion is −A·log π_θ.

    R = r − β·log(π_behaviour/π_ref) is the reward with the KL penalty of the policy that sampled. A is R
    minus the mean R of the other completions in the group, minus ``baseline_shift``. Nothing corrects for the
    age of the data.

    On on-policy data the expected gradient is the gradient of −(E[r] − β·KL(π_θ‖π_ref)). That is K/(K−1)
    times the expected gradient of trajectory balance.

    Metrics: log_ratio (mean of log π_θ/π_ref, nats per completion), advantage (mean absolute value).
    """
    kl_BK = (groups.behaviour_BKL - groups.reference_BKL).sum(2)
    advantage_BK = leave_one_out(groups.reward_BK - beta * kl_BK) - baseline_shift
    return _output(groups, -advantage_BK * groups.logprob_BK, advantage_BK)


def grpo(
    groups: Groups, beta: float, *, ratio_clip: float, second_moment_limit: float | None = None
) -> ObjectiveOutput:
    """Group-relative policy optimisation (arXiv 2402.03300, eq. 3): a clipped surrogate and a KL penalty.

    The loss of a completion is the sum over its tokens of

        −min(ρ·A, clip(ρ, 1 ± ratio_clip)·A) + β·(π_ref/π_θ − log(π_ref/π_θ) − 1)

    ρ is a token's π_θ/π_behaviour. A = (r − r̄)/(σ_r + 1e-4), where σ_r is the sample standard deviation in
    the group. So that they do not overflow, ρ and π_ref/π_θ are limited to exp(MAX_LOG_RATIO), without
    gradient beyond it. The paper's loss is a mean over tokens instead of a sum; the normaliser
    completion_tokens makes this one a mean, too.

    second_moment_limit: use M2PO's mask (``second_moment_mask``) with this limit instead of the clip; None:
    clip. M2PO's paper masks within a batch. Here each group is masked alone, so that results do not depend on
    which groups are computed together.

    Metrics: log_ratio (mean of log π_θ/π_ref, nats per completion), advantage (mean absolute value),
    clip_share (share of tokens that are masked, or whose clipped term is the smaller one).
    """
    advantage_BK = _standardised(groups.reward_BK)
    gap_BKL = (groups.reference_BKL - groups.policy_BKL).clamp(max=MAX_LOG_RATIO)
    penalty_BKL = gap_BKL.exp() - gap_BKL - 1
    surrogate_BKL, clip_share = _surrogate(groups, advantage_BK, ratio_clip, second_moment_limit)
    loss_BKL = (beta * penalty_BKL - surrogate_BKL) * groups.mask_BKL
    return _output(groups, loss_BKL.sum(2), advantage_BK, clip_share=clip_share)


def dr_grpo(
    groups: Groups,
    beta: float,
    *,
    ratio_clip: float,
    second_moment_limit: float | None = None,
    baseline_shift: float = 0.0,
) -> ObjectiveOutput:
    """Dr. GRPO, "GRPO done right" (arXiv 2503.20783): GRPO without rescaled advantages and without a KL term.

    The loss of a completion is the *sum* over its tokens of −min(ρ·A, clip(ρ, 1 ± ratio_clip)·A), where
    A = r − r̄ − ``baseline_shift``. Neither a completion's length nor the spread of its group's rewards
    changes its weight. The paper divides by a constant; in its code this is the largest number of tokens, as
    in the normaliser max_tokens. ``beta`` is not used. ρ, ``second_moment_limit`` and metrics are those of
    ``grpo``.
    """
    advantage_BK = centred(groups.reward_BK) - baseline_shift
    surrogate_BKL, clip_share = _surrogate(groups, advantage_BK, ratio_clip, second_moment_limit)
    return _output(groups, -(surrogate_BKL * groups.mask_BKL).sum(2), advantage_BK, clip_share=clip_share)


def decoupled_ppo(
    groups: Groups, beta: float, *, ratio_clip: float, proximal_BKL: Tensor | None = None
) -> ObjectiveOutput:
    """Decoupled PPO (arXiv 2505.24298, §5.2) with the advantage of Dr. GRPO.

    The loss of a completion is the sum over its tokens of −w·min(ρ·A, clip(ρ, 1 ± ratio_clip)·A), where
    ρ = π_θ/π_prox, w = π_prox/π_behaviour without gradient, and A = r − r̄. The clip thus limits the distance
    from a recent policy π_prox instead of from the policy that sampled. There is no KL term, so ``beta`` is
    not used. Metrics are those of ``grpo``.

    proximal_BKL: log π_prox of each token. None: π_prox is the policy one step before π_θ, approximated
    without a forward pass as in A-3PO (arXiv 2512.06547):

        log π_prox = log π_θ − (log π_θ − log π_behaviour)/Δ,   Δ the token's age in steps, at least 1.
    """
    policy_BKL, advantage_BK = groups.policy_BKL.detach(), centred(groups.reward_BK)
    if proximal_BKL is None:
        assert groups.age_BKL is not None, "Groups.of knows the ages"
        proximal_BKL = policy_BKL - (policy_BKL - groups.behaviour_BKL) / groups.age_BKL.clamp(min=1)
    around = replace(groups, behaviour_BKL=proximal_BKL)
    surrogate_BKL, clip_share = _surrogate(around, advantage_BK, ratio_clip, None)
    loss_BKL = -bounded_exp(proximal_BKL - groups.behaviour_BKL) * surrogate_BKL * groups.mask_BKL
    return _output(groups, loss_BKL.sum(2), advantage_BK, clip_share=clip_share)


def gspo(groups: Groups, beta: float, *, ratio_clip: tuple[float, float]) -> ObjectiveOutput:
    """Group sequence policy optimisation (arXiv 2507.18071, eq. 5): one ratio per completion.

    The loss of a completion is −min(s·A, clip(s, 1 − low, 1 + high)·A), where (low, high) = ``ratio_clip``. s
    is the geometric mean of its tokens' π_θ/π_behaviour, and A is the advantage of ``grpo``. There is no KL
    term, so ``beta`` is not used. Metrics are those of ``grpo``, but clip_share is a share of completions.
    """
    log_ratio_BK = (groups.policy_BKL - groups.behaviour_BKL).sum(2) / groups.tokens_BK
    advantage_BK = _standardised(groups.reward_BK)
    surrogate_BK, acts_BK = clipped(bounded_exp(log_ratio_BK), advantage_BK, *ratio_clip)
    return _output(groups, -surrogate_BK, advantage_BK, clip_share=acts_BK.double().mean())


def topr(groups: Groups, beta: float) -> ObjectiveOutput:
    """Tapered off-policy REINFORCE (arXiv 2503.14286, eq. 8): the loss of a completion is −w·A·log π_θ.

    A = r − r̄. w is 1 if A ≥ 0, and otherwise the completion's min(1, π_θ/π_behaviour), without gradient. The
    paper's rewards are ±1, and its baseline is a constant; here the baseline is the group's mean reward.
    There is no KL term, so ``beta`` is not used.

    Metrics: those of ``rloo``, and clip_share (share of completions with w < 1).
    """
    advantage_BK = centred(groups.reward_BK)
    tapered_BK = (advantage_BK < 0) & (groups.log_weight_BK < 0)
    weight_BK = torch.where(tapered_BK, groups.ratio_BK.detach(), 1.0)
    loss_BK = -weight_BK * advantage_BK * groups.logprob_BK
    return _output(groups, loss_BK, advantage_BK, clip_share=tapered_BK.double().mean())


def _standardised(reward_BK: Tensor) -> Tensor:
    """Return (r − r̄)/(σ_r + EPSILON), [B, K], detached; σ_r is the group's sample standard deviation."""
    return centred(reward_BK) / (reward_BK.std(dim=1, keepdim=True) + EPSILON)


def _surrogate(
    groups: Groups, advantage_BK: Tensor, clip: float, limit: float | None
) -> tuple[Tensor, Tensor]:
    """Return the surrogate ρ·A of each token, [B, K, L], and the share of tokens clipped or masked.

    The surrogate is to be maximised. If ``limit`` is None it is clipped at 1 ± ``clip``, otherwise masked by
    ``second_moment_mask`` with this limit.
    """
    advantage_BK1, ratio_BKL = advantage_BK[:, :, None], groups.token_ratio_BKL
    if limit is None:
        surrogate_BKL, acts_BKL = clipped(ratio_BKL, advantage_BK1, clip, clip)
        return surrogate_BKL, token_share(acts_BKL, groups)
    stays_BKL = second_moment_mask(groups.policy_BKL - groups.behaviour_BKL, advantage_BK1, limit)
    return ratio_BKL * advantage_BK1 * stays_BKL, token_share(~stays_BKL, groups)


def _output(groups: Groups, loss_BK: Tensor, advantage_BK: Tensor, **metrics: Tensor) -> ObjectiveOutput:
    means = {"log_ratio": groups.log_ratio_BK.detach().mean(), "advantage": advantage_BK.abs().mean()}
    return ObjectiveOutput(loss_BK, {**means, **metrics})
