"""Objectives against hand-computed values, closed forms and enumeration."""

import itertools
from typing import get_args

import pytest
import torch
from torch import Tensor

from tba_hpc.config import TrainSection
from tba_hpc.objectives import OBJECTIVES, policy_gradient, trajectory_balance


def tensor(rows: list[list[float]]) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64)


def random_case(groups: int, size: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """logprob (with gradient), ref_logprob, reward."""
    draw = torch.Generator().manual_seed(seed)
    logprob, ref_logprob, reward = torch.randn(3, groups, size, generator=draw, dtype=torch.float64)
    return (logprob - 5).requires_grad_(), ref_logprob - 5, reward


def test_every_objective_of_the_config_exists() -> None:
    names = get_args(TrainSection.model_fields["objective"].annotation)
    assert set(OBJECTIVES) == set(names)


def test_trajectory_balance_by_hand() -> None:
    # β = 2. log-ratios 1, −1; r/β 1, 3: log Ẑ = mean(0, 4) = 2; residuals 2+1−1 = 2, 2−1−3 = −2.
    logprob = tensor([[-2.0, -4.0]]).requires_grad_()
    output = trajectory_balance(logprob, tensor([[-3.0, -3.0]]), tensor([[2.0, 6.0]]), beta=2.0)
    output.loss.backward()
    assert output.loss.item() == 4.0  # 2/2 · mean(4, 4)
    assert logprob.grad is not None
    assert logprob.grad.tolist() == [[2.0, -2.0]]  # β · residual / 2 rows: log Ẑ carries no gradient
    assert {name: value.item() for name, value in output.metrics.items()} == {
        "log_z": 2.0,
        "kl": 0.0,
        "residual": 2.0,
    }


def test_policy_gradient_by_hand() -> None:
    # r − r̄ = ∓1, times K/(K−1) = 2: A = ∓2. KL terms 1·(1, 4)/2.
    logprob = tensor([[-2.0, -5.0]]).requires_grad_()
    output = policy_gradient(logprob, tensor([[-3.0, -3.0]]), tensor([[0.0, 2.0]]), beta=1.0)
    output.loss.backward()
    assert output.loss.item() == ((0.5 - 4) + (2 + 10)) / 2
    assert logprob.grad is not None
    assert logprob.grad.tolist() == [[(2.0 + 1.0) / 2, (-2.0 - 2.0) / 2]]
    assert {name: value.item() for name, value in output.metrics.items()} == {"kl": -0.5, "advantage": 2.0}


def test_prompts_of_different_log_z_in_one_batch_do_not_disturb_each_other() -> None:
    """Each at its optimum log π_ref + r/β − log Z, with log Z 0 and 10: a log Ẑ over the batch would be 5."""
    beta, log_z = 0.5, tensor([[0.0], [10.0]])
    _, ref_logprob, reward = random_case(2, 6)
    logprob = (ref_logprob + reward / beta - log_z).requires_grad_()
    output = trajectory_balance(logprob, ref_logprob, reward, beta)
    output.loss.backward()
    assert output.loss.item() == pytest.approx(0, abs=1e-24)
    assert logprob.grad is not None and logprob.grad.abs().max() < 1e-12
    assert output.metrics["log_z"].item() == pytest.approx(5)  # mean over groups
    assert trajectory_balance(logprob[0:1], ref_logprob[0:1], reward[0:1], beta).metrics[
        "log_z"
    ].item() == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize("beta", [0.004, 0.1, 3.0])
def test_gradient_is_mean_baseline_reinforce_on_the_kl_regularised_reward(beta: float) -> None:
    """−[(r − r̄) − β(KL − KL̄)] / (B·K) per log-probability, from METHOD: without any 1/β."""
    logprob, ref_logprob, reward = random_case(4, 7)
    trajectory_balance(logprob, ref_logprob, reward, beta).loss.backward()
    kl = (logprob - ref_logprob).detach()
    advantage = (reward - reward.mean(1, keepdim=True)) - beta * (kl - kl.mean(1, keepdim=True))
    torch.testing.assert_close(logprob.grad, -advantage / 28, rtol=1e-9, atol=1e-12)


def test_loss_is_the_papers_times_half_beta() -> None:
    beta = 0.3
    logprob, ref_logprob, reward = random_case(3, 4)
    squares = []
    for i in range(3):
        log_z = sum(ref_logprob[i, j] - logprob[i, j] + reward[i, j] / beta for j in range(4)) / 4
        squares += [(log_z + logprob[i, j] - ref_logprob[i, j] - reward[i, j] / beta) ** 2 for j in range(4)]
    paper = sum(squares) / 12
    torch.testing.assert_close(trajectory_balance(logprob, ref_logprob, reward, beta).loss, beta / 2 * paper)


@pytest.mark.parametrize("name", sorted(OBJECTIVES))
def test_micro_batches_of_whole_groups_add_up(name: str) -> None:
    logprob, ref_logprob, reward = random_case(5, 4)
    objective = OBJECTIVES[name]
    whole = objective(logprob, ref_logprob, reward, 0.2)
    parts = [(0, 2), (2, 3), (3, 5)]
    outputs = [(b - a, objective(logprob[a:b], ref_logprob[a:b], reward[a:b], 0.2)) for a, b in parts]
    torch.testing.assert_close(sum(n * output.loss for n, output in outputs) / 5, whole.loss)
    for metric, value in whole.metrics.items():
        assert not value.requires_grad
        torch.testing.assert_close(sum(n * output.metrics[metric] for n, output in outputs) / 5, value)


def expected_gradient(name: str, logits: Tensor, ref_logprob: Tensor, reward: Tensor, beta: float) -> Tensor:
    """∇_logits of E over groups of 2 drawn from the policy itself, by enumeration of all pairs."""
    total = torch.zeros_like(logits)
    for pair in itertools.product(range(len(logits)), repeat=2):
        variable = logits.clone().requires_grad_()
        chosen = list(pair)
        logprob = variable.log_softmax(0)[chosen]
        OBJECTIVES[name](logprob[None], ref_logprob[chosen][None], reward[chosen][None], beta).loss.backward()
        assert variable.grad is not None
        total += logprob.detach().sum().exp() * variable.grad
    return total


def test_on_policy_both_expect_the_gradient_of_reward_less_kl() -> None:
    """Exact: policy gradient, leave-one-out, all of it; trajectory balance, (K−1)/K of it."""
    draw = torch.Generator().manual_seed(1)
    logits, ref_logits, reward = torch.randn(3, 6, generator=draw, dtype=torch.float64)
    ref_logprob, beta = ref_logits.log_softmax(0), 0.4
    variable = logits.clone().requires_grad_()
    logprob = variable.log_softmax(0)
    (logprob.exp() * (beta * (logprob - ref_logprob) - reward)).sum().backward()
    exact = variable.grad
    assert exact is not None
    case = logits, ref_logprob, reward, beta
    torch.testing.assert_close(expected_gradient("policy_gradient", *case), exact)
    torch.testing.assert_close(expected_gradient("trajectory_balance", *case), exact / 2)


def test_only_trajectory_balance_is_at_rest_at_the_optimum_off_policy() -> None:
    """Completions drawn uniformly, not by the policy: at π_ref·exp(r/β)/Z one loss rests, the other pulls."""
    draw = torch.Generator().manual_seed(2)
    ref_logits, reward = torch.randn(2, 6, generator=draw, dtype=torch.float64)
    ref_logprob, beta = ref_logits.log_softmax(0), 0.4
    optimum = (ref_logprob + reward / beta).log_softmax(0)
    pulls = {}
    for name, objective in OBJECTIVES.items():
        logits = optimum.clone().requires_grad_()
        loss = objective(logits.log_softmax(0)[None], ref_logprob[None], reward[None], beta).loss
        (gradient,) = torch.autograd.grad(loss, logits)
        pulls[name] = gradient.norm().item()
    assert pulls["trajectory_balance"] < 1e-12
    assert pulls["policy_gradient"] > 0.05
