"""A reference that lags behind the policy, computed without a model from the policy and sampling weights."""

from __future__ import annotations

from dataclasses import replace

import torch

from tba_hpc.objectives.common import Groups

LEAST_AGE = 4
"""Age that younger data count as, in steps. The paper's author suggests it: the relative error of the
approximation was 5.9 for data of at most two steps (bbartoldson/tba-prime, results_fp4.tex)."""


def with_lagged_reference(groups: Groups, decay: float) -> Groups:
    """Set the groups' reference to a moving average of the policy, approximated to first order.

    An average with this decay lags decay/(1 − decay) steps behind a policy that moves evenly. In the Δ steps
    since π_μ sampled a token, its log-probability moved by (log π_θ − log π_μ)/Δ per step. Therefore

        log π_ref = log π_θ − c·(log π_θ − log π_μ),   c = decay/((1 − decay)·max(Δ, LEAST_AGE)),

    without gradient. For a token that θ itself sampled (Δ = 0) the reference is π_θ: both are the same
    policy, and they differ only by the rounding of engine and learner.
    """
    assert groups.age_BKL is not None, "Groups.of knows the ages"
    policy_BKL = groups.policy_BKL.detach()
    age_BKL = groups.age_BKL.to(policy_BKL)
    share_BKL = torch.where(age_BKL == 0, 0.0, decay / (1 - decay) / age_BKL.clamp(min=LEAST_AGE))
    reference_BKL = policy_BKL - share_BKL * (policy_BKL - groups.behaviour_BKL)
    return replace(groups, reference_BKL=reference_BKL)
