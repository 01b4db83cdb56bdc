"""A reference that lags behind the policy, from the policy and what sampled alone: no model computes it."""

from __future__ import annotations

from dataclasses import replace

import torch

from tba_hpc.objectives.common import Groups

LEAST_AGE = 4
"""Age that younger data count as, in steps. The paper's author suggests it: the relative error of the
approximation was 5.9 for data of at most two steps (bbartoldson/tba-prime, results_fp4.tex)."""


def with_lagged_reference(groups: Groups, decay: float) -> Groups:
    """The groups against the reference that a moving average of the policy would be, to first order.

    An average with this decay lags decay/(1 − decay) steps behind a policy that moves evenly, and
    (log π_θ − log π_μ)/Δ is what a token has moved a step in the Δ steps since π_μ sampled it; so

        log π_ref = log π_θ − c·(log π_θ − log π_μ),   c = decay/((1 − decay)·max(Δ, LEAST_AGE)),

    without gradient. Of a token that θ itself sampled (Δ = 0) the reference is π_θ: both are one policy, and
    their difference is how engine and learner round.
    """
    assert groups.age_BKL is not None, "Groups.of knows the ages"
    policy_BKL = groups.policy_BKL.detach()
    age_BKL = groups.age_BKL.to(policy_BKL)
    share_BKL = torch.where(age_BKL == 0, 0.0, decay / (1 - decay) / age_BKL.clamp(min=LEAST_AGE))
    reference_BKL = policy_BKL - share_BKL * (policy_BKL - groups.behaviour_BKL)
    return replace(groups, reference_BKL=reference_BKL)
