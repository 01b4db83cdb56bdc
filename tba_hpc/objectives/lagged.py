"""A reference that lags behind the policy, computed from log-probabilities, without a model of its own."""

from __future__ import annotations

from dataclasses import replace

import torch

from tba_hpc.objectives.common import Groups

LEAST_AGE = 4
"""Lower limit on the age Δ in ``with_lagged_reference``, in optimizer steps.

The author of TBA proposes such a limit, because on data at most two steps old the approximation's relative
error was 5.9 (bbartoldson/tba-prime, results_fp4.tex).
"""


def with_lagged_reference(groups: Groups, decay: float) -> Groups:
    """Return the groups with a moving average of the policy, to first order, as their reference.

    If a policy moves evenly, its moving average with this decay lags decay/(1 − decay) steps behind. Let π_μ
    be the policy that sampled a token, Δ steps ago. Since then the token's log-probability has moved by (log
    π_θ − log π_μ)/Δ per step. Therefore

        log π_ref = log π_θ − c·(log π_θ − log π_μ),   c = decay/((1 − decay)·max(Δ, LEAST_AGE)),

    without gradient. If Δ = 0, π_ref is π_θ: θ itself sampled the token, and log π_μ differs from log π_θ
    only by the rounding of engine and learner. The groups' ages must be known.
    """
    assert groups.age_BKL is not None, "Groups.of knows the ages"
    policy_BKL = groups.policy_BKL.detach()
    age_BKL = groups.age_BKL.to(policy_BKL)
    share_BKL = torch.where(age_BKL == 0, 0.0, decay / (1 - decay) / age_BKL.clamp(min=LEAST_AGE))
    reference_BKL = policy_BKL - share_BKL * (policy_BKL - groups.behaviour_BKL)
    return replace(groups, reference_BKL=reference_BKL)
