"""What is said of a batch whatever the objective, against closed forms."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tba_hpc.objectives import Groups, figures
from tba_hpc.objectives.diagnostics import moments


def groups_of(
    log_weight_BK: list[list[float]], tokens: int = 3, dtype: torch.dtype = torch.float64
) -> Groups:
    """Completions of ``tokens`` tokens after a prompt of one, whose log π_θ/π_behaviour are given."""
    total_BK = torch.tensor(log_weight_BK, dtype=torch.float64)
    position_L = torch.arange(tokens + 1)
    mask_BKL = (position_L > 0).expand(*total_BK.shape, -1)
    behaviour_BKL = (-0.1 * position_L * mask_BKL).double()
    policy_BKL = behaviour_BKL + total_BK[..., None] / tokens * mask_BKL
    return Groups(
        policy_BKL=policy_BKL.to(dtype).requires_grad_(),
        behaviour_BKL=behaviour_BKL.to(dtype),
        reference_BKL=torch.zeros_like(behaviour_BKL),
        mask_BKL=mask_BKL,
        reward_BK=torch.zeros_like(total_BK),
        value_BK=torch.zeros_like(total_BK),
    )


def figures_of(groups: Groups) -> dict[str, float]:
    return figures({name: value.item() for name, value in moments(groups).items()})


@pytest.mark.parametrize("shift", [-1e4, -299.0, -5.0, 0.0, 5.0, 299.0, 1e4])
def test_equal_weights_are_worth_all_completions(shift: float) -> None:
    assert figures_of(groups_of([[shift] * 4] * 2))["ess"] == pytest.approx(1, abs=1e-12)


@pytest.mark.parametrize("nats", [40.0, 250.0, 1e4])
@pytest.mark.parametrize("sign", [-1, 1])
def test_one_weight_above_all_others_is_worth_one_completion(nats: float, sign: int) -> None:
    """Whether it is large itself, or all others small."""
    others, one = (0.0, nats) if sign > 0 else (-nats, 0.0)
    groups = groups_of([[others, others, others], [others, one, others]])
    assert figures_of(groups)["ess"] == pytest.approx(1 / 6, rel=1e-9)


def test_two_weights_by_hand() -> None:
    """Weights 1 and 3: 16 / (2 · 10), and half of log 3."""
    found = figures_of(groups_of([[0.0, math.log(3)]]))
    assert found == {"ess": pytest.approx(0.8), "log_weight": pytest.approx(math.log(3) / 2)}


def test_none_of_equal_rewards_is_above_their_mean() -> None:
    """In float32 the mean of three times 1000.1 is less."""
    reward_BK = torch.full((1, 3), 1000.1)
    assert (reward_BK > reward_BK.mean()).all()
    groups = replace(groups_of([[1.0] * 3]), reward_BK=reward_BK)
    assert "better_log_weight" not in figures_of(groups)


def test_the_gap_is_of_the_tokens_that_the_policy_itself_has_sampled() -> None:
    """Of 3 tokens each: gaps .2, .3 and .4 per token on-policy, some below and some above; 9 off-policy."""
    groups = groups_of([[0.6, -0.9], [27.0, 1.2]])
    on_policy = replace(groups, on_policy_BK=torch.tensor([[True, True], [False, True]]))
    assert figures_of(on_policy)["engine_gap"] == pytest.approx(0.3)
    # A longer completion counts by its tokens: .2 over one of three tokens is dropped with its mask.
    mask_BKL = on_policy.mask_BKL.clone()
    mask_BKL[0, 0, 1:3] = False
    shorter = replace(
        on_policy,
        mask_BKL=mask_BKL,
        policy_BKL=on_policy.policy_BKL * mask_BKL,
        behaviour_BKL=on_policy.behaviour_BKL * mask_BKL,
    )
    assert figures_of(shorter)["engine_gap"] == pytest.approx((0.2 + 3 * 0.3 + 3 * 0.4) / 7)


def test_what_is_rewarded_more_than_its_group_is_told_apart() -> None:
    """In the first group that with a reward of 3, in the second two; in the third all are alike."""
    groups = groups_of([[0.6, -0.9, 4.0], [-2.0, 1.2, 5.0], [7.0, 7.0, 7.0]])
    reward_BK = torch.tensor([[3.0, 1.0, 1.0], [1.0, 1.0, 0.0], [2.0, 2.0, 2.0]])
    found = figures_of(replace(groups, reward_BK=reward_BK))
    assert found["better_log_weight"] == pytest.approx((0.6 - 2.0 + 1.2) / 3)


@pytest.mark.parametrize("on_policy", [None, torch.zeros(1, 2, dtype=torch.bool)])
def test_where_nothing_is_on_policy_there_is_no_gap(on_policy: Tensor | None) -> None:
    groups = replace(groups_of([[0.6, -0.9]]), on_policy_BK=on_policy)
    assert figures_of(groups).keys() == {"ess", "log_weight"}


def test_other_means_stay_and_gradients_do_not() -> None:
    found = moments(groups_of([[0.6, -0.9]], dtype=torch.float32))
    assert {value.dtype for value in found.values()} == {torch.float64}
    assert not any(value.requires_grad for value in found.values())
    assert figures({"loss": 2.0, **{name: value.item() for name, value in found.items()}})["loss"] == 2.0
