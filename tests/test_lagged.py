"""The reference that lags behind the policy, against its formula, an average, and what it teaches."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from tba_hpc.batch import token_ages
from tba_hpc.objectives.common import Groups
from tba_hpc.objectives.lagged import with_lagged_reference
from tba_hpc.types import RECORD

LENGTHS = [5, 1, 4, 6]


def mixed_groups(dtype: torch.dtype = torch.float64) -> Groups:
    """One group: its weights changed while completions were sampled, but for those of the last."""
    record = np.zeros(4, RECORD)
    record["version_oldest"], record["version_newest"] = [10, 17, 16, 20], [20, 17, 19, 20]
    ages = torch.from_numpy(token_ages(record, np.array(LENGTHS), 20))
    mask = torch.arange(7) < torch.tensor(LENGTHS)[:, None]
    policy, behaviour = -torch.rand(2, 4, 7, generator=torch.Generator().manual_seed(3), dtype=dtype) * mask
    return Groups(
        policy_BKL=policy[None].requires_grad_(),
        behaviour_BKL=behaviour[None],
        reference_BKL=torch.full((1, 4, 7), torch.nan, dtype=dtype),
        mask_BKL=mask[None],
        reward_BK=torch.rand(1, 4, generator=torch.Generator().manual_seed(4), dtype=dtype),
        value_BK=torch.zeros(1, 4, dtype=dtype),
        age_BKL=torch.zeros(4, 7, dtype=torch.int32).masked_scatter(mask, ages)[None],
    )


@pytest.mark.parametrize("decay", [0.9, 0.5, 0.99])
def test_the_reference_is_the_formula_token_by_token(decay: float) -> None:
    """Of ages 10, 8, 5, 2, 0; 3; 4, 3, 2, 1; and 0."""
    groups = mixed_groups()
    found = with_lagged_reference(groups, decay)
    ages = [[10, 8, 5, 2, 0], [3], [4, 3, 2, 1], [0] * 6]
    assert not found.reference_BKL.requires_grad and found.policy_BKL is groups.policy_BKL
    for row, of_tokens in enumerate(ages):
        for place, age in enumerate(of_tokens):
            policy = groups.policy_BKL[0, row, place].item()
            behaviour = groups.behaviour_BKL[0, row, place].item()
            lag = decay / (1 - decay) / age if age else 0.0
            wanted = policy - lag * (policy - behaviour)
            assert found.reference_BKL[0, row, place].item() == pytest.approx(wanted, rel=1e-12)
        assert not found.reference_BKL[0, row, len(of_tokens) :].any()


def test_of_what_the_policy_itself_sampled_the_kl_is_exactly_0() -> None:
    """However engine and learner round."""
    groups = with_lagged_reference(mixed_groups(torch.float32), 0.9)
    own = groups.age_BKL == 0
    assert own.sum() > 6 and not torch.equal(groups.behaviour_BKL[own], groups.policy_BKL[own])
    assert torch.equal(groups.reference_BKL[own], groups.policy_BKL[own])
    assert groups.log_ratio_BK[0, 3].item() == 0


@pytest.mark.parametrize("decay", [0.9, 0.5])
def test_behind_a_policy_that_moves_evenly_it_is_the_moving_average(decay: float) -> None:
    """Of its log-probabilities, whatever the ages of the data, once the average has forgotten its start."""
    groups, steps = mixed_groups(), 600
    velocity = groups.policy_BKL.detach() - groups.behaviour_BKL
    start = groups.behaviour_BKL
    average = start
    for step in range(1, steps + 1):
        average = decay * average + (1 - decay) * (start + step * velocity)
    policy = start + steps * velocity
    moved = replace(groups, policy_BKL=policy, behaviour_BKL=policy - groups.age_BKL * velocity)
    stale = groups.age_BKL > 0
    found = with_lagged_reference(moved, decay).reference_BKL
    torch.testing.assert_close(found[stale], average[stale], rtol=1e-9, atol=1e-9)
