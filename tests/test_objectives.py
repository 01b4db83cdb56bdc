"""Objectives against values worked by hand, formulas written as loops, closed forms and enumeration."""

import itertools
import math
import re
import sys
import types
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import chain, product
from pathlib import Path
from statistics import mean
from typing import Any, get_args

import numpy as np
import pytest
import torch
import yaml
from torch import Tensor

from tba_hpc.config import ConfigError, TrainSection
from tba_hpc.config.variants import (
    OWN,
    BinaryKl,
    Dppo,
    IcePop,
    LossNormaliser,
    RatioBound,
    RatioCap,
    RatioTaper,
    choices,
)
from tba_hpc.objectives import OBJECTIVES, Groups, Objective, make_objective
from tba_hpc.objectives.advantage_regression import oapl
from tba_hpc.objectives.common import bounded_exp, centred, leave_one_out, second_moment_mask
from tba_hpc.objectives.policy_gradient import decoupled_ppo, rloo
from tba_hpc.objectives.ratio_bounds import bounded, weights
from tba_hpc.objectives.trajectory_balance import tba_prime, trajectory_balance

NAMES = tuple(OBJECTIVES)
SECTIONS = choices(TrainSection.model_fields["objective"].annotation)
MASKS = (IcePop(band=(0.8, 1.3)), Dppo(limit=0.02), BinaryKl(limit=0.01))
BOUNDS: tuple[RatioBound, ...] = (RatioCap(cap=1.2), *MASKS, RatioTaper())
NORMALISERS: tuple[LossNormaliser, ...] = get_args(LossNormaliser)
MAX_TOKENS = 8


def train_of(
    name: str, bound: object = "none", normaliser: str | None = None, **keys: object
) -> TrainSection:
    return TrainSection(objective={"name": name, **keys}, ratio_bound=bound, loss_normaliser=normaliser)


def objective_of(
    name: str, bound: object = "none", normaliser: LossNormaliser | None = None, **keys: object
) -> Objective:
    return make_objective(train_of(name, bound, normaliser, **keys), max_tokens=MAX_TOKENS)


def tensor(rows: list[list[float]]) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64)


def one_token(logprob_BK: Tensor, ref_logprob_BK: Tensor, reward_BK: Tensor) -> Groups:
    """Completions of one token each, sampled by the policy itself."""
    return Groups(
        policy_BKL=logprob_BK[..., None],
        behaviour_BKL=logprob_BK[..., None].detach().clone(),
        reference_BKL=ref_logprob_BK[..., None],
        mask_BKL=torch.ones(*logprob_BK.shape, 1, dtype=torch.bool),
        reward_BK=reward_BK,
        value_BK=torch.zeros_like(reward_BK),
        age_BKL=torch.zeros(*logprob_BK.shape, 1, dtype=torch.int32),
    )


def random_groups(
    groups: int, size: int, *, length: int = 6, stale: float = 0.3, dtype: torch.dtype = torch.float64
) -> Groups:
    """Completions of 1 … ``length`` − 1 tokens, one of prompt; policy and sampler differ by ``stale``.

    Of every second completion the third token is an environment's.
    """
    draw = torch.Generator().manual_seed(groups * 100 + size)
    shape = groups, size, length
    policy, reference = torch.randn(2, *shape, generator=draw, dtype=torch.float64) * 0.5 - 1
    noise = stale * torch.randn(shape, generator=draw, dtype=torch.float64)
    ends = torch.randint(2, length + 1, (groups, size, 1), generator=draw)
    position = torch.arange(length)
    mask = (position >= 1) & (position < ends)
    mask &= (position != 3) | (torch.arange(size)[:, None] % 2 == 0)
    return Groups(
        policy_BKL=(policy * mask).to(dtype).requires_grad_(),
        behaviour_BKL=((policy + noise) * mask).to(dtype),
        reference_BKL=(reference * mask).to(dtype),
        mask_BKL=mask,
        reward_BK=torch.randn(groups, size, generator=draw, dtype=torch.float64).to(dtype),
        value_BK=torch.randn(groups, size, generator=draw, dtype=torch.float64).to(dtype),
        age_BKL=torch.randint(5, shape, generator=draw, dtype=torch.int32) * mask,
    )


def gradient(objective: Callable[..., object], groups: Groups, beta: float) -> Tensor:
    """∂ loss / ∂ policy_BKL at the tokens of the completions."""
    output = objective(groups, beta)
    (slope_BKL,) = torch.autograd.grad(output.loss, groups.policy_BKL)  # type: ignore[attr-defined]
    return slope_BKL * groups.mask_BKL


# --- Formulas, written out token by token ---


def tokens(groups: Groups, i: int, j: int) -> list[tuple[Tensor, float, float]]:
    """(log π_θ, log π_behaviour, log π_ref) of the tokens of one completion."""
    rows = groups.policy_BKL[i, j], groups.behaviour_BKL[i, j], groups.reference_BKL[i, j]
    places = torch.nonzero(groups.mask_BKL[i, j])[:, 0].tolist()
    return [(rows[0][t], rows[1][t].item(), rows[2][t].item()) for t in places]


def surrogate(ratio: Tensor, advantage: float, clip: float) -> Tensor:
    return torch.min(ratio * advantage, ratio.clamp(1 - clip, 1 + clip) * advantage)


def by_loops(train: TrainSection, groups: Groups, beta: float) -> Tensor:
    """The loss of the objective of ``train``, from its definition."""
    name = train.objective.name.rpartition(":")[2]
    keys = {"ratio_clip": 0.2, "baseline_shift": 0.0, "log_z": None, **train.objective.model_dump()}
    keys |= keys.get("options", {})
    clip, shift, log_z_of = keys["ratio_clip"], keys["baseline_shift"], keys["log_z"]
    total = torch.zeros((), dtype=torch.float64)
    many, size = groups.reward_BK.shape
    for i in range(many):
        rows = [tokens(groups, i, j) for j in range(size)]
        reward = groups.reward_BK[i].tolist()
        logp = [sum((p for p, _, _ in row), torch.zeros((), dtype=torch.float64)) for row in rows]
        behaviour = [sum(b for _, b, _ in row) for row in rows]
        ref = [sum(r for _, _, r in row) for row in rows]
        mean = sum(reward) / size
        kl_now = [logp[j].item() - ref[j] for j in range(size)]
        kl_then = [behaviour[j] - ref[j] for j in range(size)]
        kl_of = {"policy": kl_now, "behaviour": kl_then, "none": [0.0] * size, None: kl_now}[log_z_of]
        deviation = (sum((r - mean) ** 2 for r in reward) / (size - 1)) ** 0.5
        standardised = [(r - mean) / (deviation + 1e-4) for r in reward]
        if name == "online_dpo":
            best, worst = reward.index(max(reward)), reward.index(min(reward))
            margin = beta * ((logp[best] - ref[best]) - (logp[worst] - ref[worst]))
            total = total + size * torch.log(1 + torch.exp(-margin))
            continue
        for j, row in enumerate(rows):
            if name == "trajectory_balance":
                log_z = sum(reward[m] / beta - kl_of[m] for m in range(size)) / size
                residual = log_z + logp[j] - ref[j] - reward[j] / beta
                total = total + beta / 2 * residual**2
            elif name == "tba_prime":
                advantage = reward[j] - mean - beta * (kl_now[j] - sum(kl_of) / size)
                total = total - advantage * logp[j]
            elif name == "oapl":
                gap = beta * (logp[j] - behaviour[j]) - (reward[j] - groups.value_BK[i, j].item())
                total = total + gap**2 / (2 * beta)
            elif name in ("rloo", "proximal_rloo"):
                shaped = [reward[m] - beta * (behaviour[m] - ref[m]) for m in range(size)]
                advantage = shaped[j] - ((sum(shaped) - shaped[j]) / (size - 1) + shift)
                ratio = torch.exp(logp[j] - behaviour[j])
                total = total - (advantage * logp[j] if name == "rloo" else surrogate(ratio, advantage, clip))
            elif name == "topr":
                weight = 1.0 if reward[j] >= mean else min(1.0, math.exp(logp[j].item() - behaviour[j]))
                total = total - weight * (reward[j] - mean) * logp[j]
            elif name == "dr_grpo":
                advantage = reward[j] - (mean + shift)
                total = total - sum(surrogate(torch.exp(p - b), advantage, clip) for p, b, _ in row)
            elif name == "decoupled_ppo":
                places = torch.nonzero(groups.mask_BKL[i, j])[:, 0]
                for (p, b, _), age in zip(row, groups.age_BKL[i, j, places].tolist(), strict=True):
                    proximal = p.item() - (p.item() - b) / max(1, age)
                    term = surrogate(torch.exp(p - proximal), reward[j] - mean, clip)
                    total = total - math.exp(proximal - b) * term
            elif name == "gspo":
                ratio = torch.exp((logp[j] - behaviour[j]) / len(row))
                tame = ratio.clamp(1 - clip[0], 1 + clip[1])
                total = total - torch.min(ratio * standardised[j], tame * standardised[j])
            elif name == "grpo":
                terms = [
                    surrogate(torch.exp(p - b), standardised[j], clip)
                    - beta * (torch.exp(r - p) - (r - p) - 1)
                    for p, b, r in row
                ]
                total = total - sum(terms) / len(row)
            else:
                raise AssertionError(f"write the formula of {name} here")
    return total / (many * size)


def test_every_objective_has_a_section_and_a_function() -> None:
    assert set(OBJECTIVES) | {OWN} == set(SECTIONS), (
        "an objective is a section in ObjectiveChoice (config/variants.py) and a function of its name in "
        "OBJECTIVES (objectives/__init__.py): write the one that is missing"
    )
    for name in NAMES:
        assert type(TrainSection(objective=name).objective) is SECTIONS[name], f"its Tag is not {name!r}"


@pytest.mark.parametrize("normaliser", NORMALISERS)
@pytest.mark.parametrize("name", NAMES)
def test_a_normaliser_divides_each_completions_sum(name: str, normaliser: LossNormaliser) -> None:
    """Against the gradient of its sum alone: that of each row, times 1, 1/its tokens, 1/their mean, 1/8."""
    groups = random_groups(5, 4)
    tokens_BK = groups.mask_BKL.sum(2)
    divisor_BK = {
        "sum": torch.ones(5, 4),
        "completion_tokens": tokens_BK,
        "batch_tokens": torch.full((5, 4), tokens_BK.sum().item() / 20, dtype=torch.float64),
        "max_tokens": torch.full((5, 4), MAX_TOKENS),
    }[normaliser]
    summed = gradient(objective_of(name, normaliser="sum"), groups, 0.3)
    found = gradient(objective_of(name, normaliser=normaliser), groups, 0.3)
    assert tokens_BK.unique().numel() > 3 and summed.abs().sum() > 0
    torch.testing.assert_close(found * divisor_BK[..., None], summed, rtol=1e-12, atol=1e-14)


def test_by_default_an_objective_is_normalised_as_it_was_published() -> None:
    own = {name: TrainSection(objective=name).normaliser for name in NAMES}
    assert own.pop("grpo") == "completion_tokens"
    assert set(own.values()) == {"sum"}


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        *((name, {}) for name in NAMES),
        *product(("trajectory_balance", "tba_prime"), [{"log_z": "policy"}, {"log_z": "none"}]),
        *product(("grpo", "dr_grpo", "decoupled_ppo"), [{"ratio_clip": 0.1}]),
        *product(("rloo", "dr_grpo"), [{"baseline_shift": -0.7}]),
        ("gspo", {"ratio_clip": (0.1, 0.2)}),
    ],
)
@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_every_objective_agrees_with_its_formula(
    name: str, keys: dict[str, Any], dtype: torch.dtype, tolerance: float
) -> None:
    train, objective = train_of(name, **keys), objective_of(name, **keys)
    groups = random_groups(5, 4, dtype=dtype)
    exact = replace(random_groups(5, 4))
    wanted = by_loops(train, exact, beta=0.3)
    (slope,) = torch.autograd.grad(wanted, exact.policy_BKL)
    found = objective(groups, 0.3).loss
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), wanted, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(
        gradient(objective, groups, 0.3).double(), slope, rtol=tolerance, atol=tolerance
    )


@pytest.mark.parametrize("name", [name for name in NAMES if SECTIONS[name].kl_optional])
def test_a_beta_of_0_leaves_out_the_kl_wherever_the_reference_is(name: str) -> None:
    """The same loss and gradient as by the formula, whether π_ref is the sampler or far away."""
    groups, exact = random_groups(5, 4), random_groups(5, 4)
    groups.reference_BKL[:] = -1e4 * groups.mask_BKL
    wanted = by_loops(train_of(name), replace(exact, reference_BKL=exact.behaviour_BKL), beta=0.0)
    (slope,) = torch.autograd.grad(wanted, exact.policy_BKL)
    torch.testing.assert_close(objective_of(name)(groups, 0.0).loss, wanted)
    torch.testing.assert_close(gradient(objective_of(name), groups, 0.0), slope)


@pytest.mark.parametrize(
    ("name", "bound", "normaliser"),
    [
        *((name, "none", None) for name in NAMES),
        *(("grpo", "none", kind) for kind in NORMALISERS),
        *(("trajectory_balance", bound, None) for bound in BOUNDS),
    ],
)
def test_micro_batches_of_whole_groups_add_up(
    name: str, bound: object, normaliser: LossNormaliser | None
) -> None:
    objective = objective_of(name, bound, normaliser)
    groups = random_groups(5, 4)
    whole = objective(groups, 0.2)
    groups = replace(groups, batch_tokens=groups.mask_BKL.sum().item() / 20)
    parts = [slice(0, 2), slice(2, 3), slice(3, 5)]
    outputs = [(rows.stop - rows.start, objective(part(groups, rows), 0.2)) for rows in parts]
    torch.testing.assert_close(sum(n * output.loss for n, output in outputs) / 5, whole.loss)
    for metric, value in whole.metrics.items():
        assert not value.requires_grad
        torch.testing.assert_close(sum(n * output.metrics[metric] for n, output in outputs) / 5, value)


def part(groups: Groups, rows: slice) -> Groups:
    return Groups(
        groups.policy_BKL[rows],
        groups.behaviour_BKL[rows],
        groups.reference_BKL[rows],
        groups.mask_BKL[rows],
        groups.reward_BK[rows],
        groups.value_BK[rows],
        groups.batch_tokens,
        age_BKL=None if groups.age_BKL is None else groups.age_BKL[rows],
    )


# --- By hand ---


def two_completions() -> Groups:
    """Of two tokens and of one, far from the reference: log-ratios 25 and −1, and −30; rewards 2 and 1.

    Under the policy the tokens are 1/4 and 8, and 1 times as likely as when they were sampled.
    """
    policy = tensor([[0, -1, -2], [0, -31, 0]])[None]
    return Groups(
        policy_BKL=policy.requires_grad_(),
        behaviour_BKL=policy.detach() - tensor([[0, -math.log(4), math.log(8)], [0, 0, 0]]),
        reference_BKL=tensor([[0, -26, -1], [0, -1, 0]])[None],
        mask_BKL=torch.tensor([[[False, True, True], [False, True, False]]]),
        reward_BK=tensor([[2, 1]]),
        value_BK=tensor([[0, 0]]),
    )


def test_tba_prime_clamps_the_log_ratio_of_each_token_in_the_advantage_alone() -> None:
    """KL̂ 10 − 1 = 9 and −10: r − KL̂ is −7 and 11, A is ∓9; the weights are 1/4, 2 (of 8), and 1."""
    groups = two_completions()
    objective = bounded(partial(tba_prime, log_z="policy"), RatioCap(cap=2.0))
    output = objective(groups, 1.0)
    assert output.loss.item() == pytest.approx((9 * -3 + -9 * -31) / 2)  # a bound changes the gradient alone
    slope = gradient(objective, groups, 1.0)
    assert slope.flatten().tolist() == pytest.approx([0, 9 / 4 / 2, 9 * 2 / 2, 0, -9 / 2, 0])
    assert output.metrics["log_ratio"].item() == pytest.approx((24 - 30) / 2)  # not clamped


@pytest.mark.parametrize(
    ("name", "advantage"),
    [
        ("tba_prime", 9.0),
        ("rloo", 53 - math.log(2)),  # 2 − (24 − log 2) and 1 + 30: each less the other
        ("grpo", 0.5 / (math.sqrt(0.5) + 1e-4)),
        ("dr_grpo", 0.5),
        ("gspo", 0.5 / (math.sqrt(0.5) + 1e-4)),
        ("topr", 0.5),
    ],
)
def test_metrics_are_of_whole_completions(name: str, advantage: float) -> None:
    keys = {"log_z": "policy"} if name == "tba_prime" else {}
    metrics = objective_of(name, **keys)(two_completions(), 1.0).metrics
    assert metrics["log_ratio"].item() == pytest.approx(-3)
    assert metrics["advantage"].item() == pytest.approx(advantage)


@pytest.mark.parametrize(
    ("name", "limits", "share"),
    [
        ("grpo", {"ratio_clip": 0.5}, 1 / 3),  # A > 0 for ratios 1/4 and 8, A < 0 for 1: only 8 is clipped
        ("dr_grpo", {"ratio_clip": 0.5}, 1 / 3),
        ("dr_grpo", {"ratio_clip": 0.5, "baseline_shift": 0.7}, 1 / 3),  # A < 0 for all: only 1/4 is
        ("dr_grpo", {"ratio_clip": 0.8, "baseline_shift": 0.7}, 0.0),
        ("grpo", {"second_moment_limit": 0.04}, 1 / 3),  # of 8 alone, whose (log 8)² is 4.3
        ("dr_grpo", {"second_moment_limit": 4.4}, 0.0),
        ("tba_prime", {"bound": RatioCap(cap=2.0)}, 1 / 3),
        ("tba_prime", {"bound": RatioCap(cap=0.5)}, 2 / 3),
        ("rloo", {"bound": IcePop()}, 2 / 3),
        ("rloo", {"bound": IcePop(band=(0.2, 5.0))}, 1 / 3),
        ("rloo", {"bound": Dppo()}, 1 / 3),  # A < 0 for 1/4 and 8: only the first has been pushed down
        ("rloo", {"bound": BinaryKl()}, 1 / 2),
        ("rloo", {"bound": RatioTaper()}, 0.0),  # A < 0 for the first, whose ratio is 2
        ("topr", {}, 0.0),  # A > 0 for the first, and the second is as likely as ever
        ("gspo", {}, 0.5),
    ],
)
def test_clip_share_is_what_a_limit_acts_on(name: str, limits: dict[str, Any], share: float) -> None:
    """Of three tokens, ratios 1/4, 8, 1, or of two completions, ratios 2 and 1."""
    found = objective_of(name, **limits)(two_completions(), 1.0).metrics["clip_share"]
    assert found.item() == pytest.approx(share, abs=1e-12) and not found.requires_grad


def test_decoupled_ppo_between_its_extremes() -> None:
    """Around the sampler it is Dr. GRPO, around the policy itself an importance weight without a clip.

    If the policy moved evenly, the interpolated one is that of one step before.
    """
    groups = random_groups(4, 5)
    dr_grpo = gradient(objective_of("dr_grpo"), groups, 0.3)
    around = partial(decoupled_ppo, ratio_clip=0.2)
    at_sampler = partial(around, proximal_BKL=groups.behaviour_BKL)
    torch.testing.assert_close(gradient(at_sampler, groups, 0.3), dr_grpo)
    new = replace(groups, age_BKL=groups.age_BKL.clamp(max=1))
    torch.testing.assert_close(gradient(around, new, 0.3), dr_grpo)

    policy_BKL = groups.policy_BKL.detach()
    found = gradient(partial(around, proximal_BKL=policy_BKL), groups, 0.3)
    weight_BKL = (policy_BKL - groups.behaviour_BKL).exp() * groups.mask_BKL
    torch.testing.assert_close(found, -weight_BKL * centred(groups.reward_BK)[..., None] / 20)

    step_BKL = 0.3 * torch.randn(policy_BKL.shape, dtype=torch.float64) * groups.mask_BKL
    even = replace(groups, behaviour_BKL=policy_BKL - groups.age_BKL.clamp(min=1) * step_BKL)
    before = partial(around, proximal_BKL=policy_BKL - step_BKL)
    torch.testing.assert_close(gradient(around, even, 0.3), gradient(before, even, 0.3))


@pytest.mark.parametrize("name", ["grpo", "gspo", "dr_grpo", "decoupled_ppo", "topr", "tba_prime"])
def test_equal_rewards_teach_nothing(name: str) -> None:
    """Though in float32 the mean of seven times 1000.1 is not 1000.1."""
    reward_BK = torch.full((2, 7), 1000.1)
    assert (reward_BK.mean(1) != 1000.1 - torch.zeros(2)).all()
    groups = replace(random_groups(2, 7, stale=0.0, dtype=torch.float32), reward_BK=reward_BK)
    groups = replace(groups, reference_BKL=groups.policy_BKL.detach())
    assert not gradient(objective_of(name), groups, 0.3).any()


def test_log_ratios_of_long_completions_are_exact() -> None:
    """Each log-probability sums to about −50,000, where numbers in float32 are .004 apart."""
    exact, rounded = (random_groups(2, 4, length=100_000, dtype=d) for d in (torch.float64, torch.float32))
    assert exact.logprob_BK.min() < -65_536
    for name in ("log_ratio_BK", "log_weight_BK"):
        found, wanted = getattr(rounded, name).double(), getattr(exact, name)
        torch.testing.assert_close(found, wanted, atol=3e-4, rtol=0)
    oapl = objective_of("oapl", value_beta=1.0)
    found, wanted = (oapl(groups, 1.0).metrics["log_ratio"].double() for groups in (rounded, exact))
    torch.testing.assert_close(found, wanted, atol=3e-4, rtol=0)


def test_baselines_carry_no_gradient() -> None:
    value = tensor([[1.0, 3.0], [5.0, 5.0]]).requires_grad_()
    assert centred(value).tolist() == [[-1, 1], [0, 0]]
    assert leave_one_out(value).tolist() == [[-2, 2], [0, 0]]
    assert not centred(value).requires_grad and not leave_one_out(value).requires_grad


# --- Trajectory balance ---


def test_trajectory_balance_by_hand() -> None:
    # β = 2. log-ratios 1, −1; r/β 1, 3: log Ẑ = mean(0, 4) = 2; residuals 2+1−1 = 2, 2−1−3 = −2.
    logprob = tensor([[-2.0, -4.0]]).requires_grad_()
    output = trajectory_balance(one_token(logprob, tensor([[-3.0, -3.0]]), tensor([[2.0, 6.0]])), 2.0)
    output.loss.backward()
    assert output.loss.item() == 4.0  # 2/2 · mean(4, 4)
    assert logprob.grad is not None
    assert logprob.grad.tolist() == [[2.0, -2.0]]  # β · residual / 2 rows: log Ẑ carries no gradient
    assert {name: value.item() for name, value in output.metrics.items()} == {
        "log_z": 2.0,
        "log_ratio": 0.0,
        "residual": 2.0,
    }


def test_prompts_of_different_log_z_in_one_batch_do_not_disturb_each_other() -> None:
    """Each at its optimum log π_ref + r/β − log Z, with log Z 0 and 10: a log Ẑ over the batch would be 5."""
    beta, log_z = 0.5, tensor([[0.0], [10.0]])
    draw = torch.Generator().manual_seed(0)
    ref_logprob, reward = torch.randn(2, 2, 6, generator=draw, dtype=torch.float64)
    groups = one_token((ref_logprob + reward / beta - log_z).requires_grad_(), ref_logprob, reward)
    output = trajectory_balance(groups, beta)
    assert output.loss.item() == pytest.approx(0, abs=1e-24)
    assert gradient(trajectory_balance, groups, beta).abs().max() < 1e-12
    assert output.metrics["log_z"].item() == pytest.approx(5)  # mean over groups
    first = trajectory_balance(part(groups, slice(0, 1)), beta)
    assert first.metrics["log_z"].item() == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize("beta", [0.004, 0.1, 3.0])
def test_gradients_agree_where_theory_says_so(beta: float) -> None:
    """TB's is −[(r − r̄) − β(KL − KL̄)] per log-probability and row, without any 1/β.

    That is mean-baseline REINFORCE on the KL-regularised reward. TBA′ without a ratio has the same on data of
    any age. RLOO has K/(K−1) of it on its own samples.
    """
    stale = random_groups(4, 7)
    kl = (stale.logprob_BK - stale.ref_logprob_BK).detach()
    reward = stale.reward_BK
    advantage = (reward - reward.mean(1, keepdim=True)) - beta * (kl - kl.mean(1, keepdim=True))
    wanted = (-advantage / 28)[..., None] * stale.mask_BKL
    for objective in (trajectory_balance, tba_prime):
        to_the_letter = partial(objective, log_z="policy")
        torch.testing.assert_close(gradient(to_the_letter, stale, beta), wanted, rtol=1e-9, atol=1e-12)

    fresh = random_groups(4, 7, stale=0)
    torch.testing.assert_close(gradient(rloo, fresh, beta), wanted * 7 / 6, rtol=1e-9, atol=1e-12)
    for objective, log_z, bound in product(
        (trajectory_balance, tba_prime), ("policy", "behaviour"), (RatioCap(), *BOUNDS[1:])
    ):
        found = gradient(bounded(partial(objective, log_z=log_z), bound), fresh, beta)
        torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-12)


def test_behaviour_and_equation_7_differ_by_what_a_groups_log_ratios_have_in_common() -> None:
    """A − β·m, m the mean of log π_θ/π_μ: all completions of a group are pulled back together."""
    groups, beta = random_groups(4, 5), 0.3
    drift_B1 = groups.log_weight_BK.mean(1, keepdim=True)
    pull = (beta * drift_B1[..., None] * groups.mask_BKL / 20).expand_as(groups.policy_BKL)
    for objective in (trajectory_balance, tba_prime):
        then = gradient(partial(objective, log_z="behaviour"), groups, beta)
        now = gradient(partial(objective, log_z="policy"), groups, beta)
        torch.testing.assert_close(then - now, pull, rtol=1e-9, atol=1e-12)
        of_completions_BK = now.sum(2) / groups.tokens_BK  # all tokens of one are pulled alike
        assert of_completions_BK.sum(1).abs().max() < 1e-12


@pytest.mark.parametrize("log_z", ["behaviour", "policy"])
def test_a_constant_gap_between_engine_and_learner_biases_nothing(log_z: str) -> None:
    """On-policy, in expectation over all groups of two of three answers, the policy is pulled alike.

    An engine that says every answer to be e^.4 times as likely shifts all advantages by β·.4, and that has
    no gradient on average, since Σ π·∇log π = 0.
    """
    logits = torch.tensor([0.3, -0.7, 0.1], dtype=torch.float64).requires_grad_()
    policy = logits.log_softmax(0)
    reference, reward = tensor([[-1.0, -1.2, -1.1]])[0], tensor([[1.0, 0.0, 0.5]])[0]

    def expected(gap: float) -> Tensor:
        total = torch.zeros((), dtype=torch.float64)
        for i, j in product(range(3), repeat=2):
            picked = torch.tensor([[i, j]])
            groups = one_token(policy[picked], reference[picked], reward[picked])
            groups = replace(groups, behaviour_BKL=groups.behaviour_BKL + gap)
            weight = (policy[i] + policy[j]).detach().exp()
            total = total + weight * trajectory_balance(groups, 0.2, log_z=log_z).loss
        return torch.autograd.grad(total, logits, retain_graph=True)[0]

    torch.testing.assert_close(expected(0.4), expected(0.0), rtol=1e-9, atol=1e-12)


# --- Bounds on what stale data pull ---


@pytest.mark.parametrize("name", ["trajectory_balance", "tba_prime", "oapl", "rloo"])
@pytest.mark.parametrize("bound", BOUNDS)
def test_a_bound_weighs_the_gradient_of_each_token(name: str, bound: RatioBound) -> None:
    """Token by token, by its definition; the loss stays what it is."""
    groups, beta = random_groups(4, 5), 0.3
    plain = gradient(objective_of(name), groups, beta)
    found = gradient(objective_of(name, bound), groups, beta)
    acts = []
    for i, j in product(range(4), range(5)):
        row = [(p.item(), b) for p, b, _ in tokens(groups, i, j)]
        places = torch.nonzero(groups.mask_BKL[i, j])[:, 0].tolist()
        weighed = by_hand(bound, row, down=bool(plain[i, j].sum() > 0))
        for t, (weight, _) in zip(places, weighed, strict=True):
            assert found[i, j, t].item() == pytest.approx(weight * plain[i, j, t].item(), rel=1e-9)
        acts.append([acting for _, acting in weighed])
    flat = list(chain.from_iterable(acts))
    assert any(flat) and not all(flat)
    output = objective_of(name, bound)(groups, beta)
    torch.testing.assert_close(output.loss, objective_of(name)(groups, beta).loss)
    share = mean(flat if isinstance(bound, RatioCap | IcePop | Dppo) else [row[0] for row in acts])
    assert float(output.metrics["clip_share"]) == pytest.approx(share)


def by_hand(bound: RatioBound, row: list[tuple[float, float]], *, down: bool) -> list[tuple[float, bool]]:
    """The weight of each token of a completion, and whether the bound acts on it."""
    ratios = [math.exp(p - b) for p, b in row]
    whole = math.prod(ratios)
    match bound:
        case RatioCap(cap=cap):
            return [(min(cap, ratio), ratio > cap) for ratio in ratios]
        case RatioTaper():
            return [(min(1.0, whole) if down else 1.0, down and whole < 1)] * len(row)
        case IcePop(band=(low, high)):
            acting = [not low <= ratio <= high for ratio in ratios]
        case Dppo(limit=limit):
            moved = [math.exp(p) - math.exp(b) for p, b in row]
            acting = [(gap < -limit if down else gap > limit) for gap in moved]
        case BinaryKl(limit=limit):
            pairs = [[min(math.exp(of), 1 - 1e-6) for of in (b, p)] for p, b in row]
            kl = [b * math.log(b / p) + (1 - b) * math.log((1 - b) / (1 - p)) for b, p in pairs]
            acting = [mean(kl) > limit] * len(row)
        case _:
            raise AssertionError(bound)
    return [(0.0 if masked else ratio, masked) for ratio, masked in zip(ratios, acting, strict=True)]


@pytest.mark.parametrize(
    ("bound", "now", "slope", "wanted"),
    [
        (IcePop(), [0.2, 0.3, 0.5, 1.0], -1, [0, 0.6, 1, 2]),
        (IcePop(band=(0.3, 1.5)), [0.2, 0.3, 0.5, 1.0], -1, [0.4, 0.6, 1, 0]),
        (Dppo(), [0.3, 0.4, 0.6, 0.7], -1, [0.6, 0.8, 1.2, 0]),  # pushed up, where .7 already is
        (Dppo(), [0.3, 0.4, 0.6, 0.7], 1, [0, 0.8, 1.2, 1.4]),
        (BinaryKl(limit=0.0103), [0.6, 0.5], 1, [1.2, 1]),  # ½·log(.5/.6) + ½·log(.5/.4) = .02041, and 0
        (BinaryKl(limit=0.0101), [0.6, 0.5], 1, [0, 0]),
        (BinaryKl(), [0.46, 0.5], 1, [0.92, 1]),  # .00321 and 0, mean .0016
        (BinaryKl(), [0.44, 0.5], 1, [0, 0]),  # .00725 and 0
    ],
)
def test_masks_by_the_numbers(bound: RatioBound, now: list[float], slope: int, wanted: list[float]) -> None:
    """Tokens had a probability of ½ when they were sampled."""
    policy = tensor([now]).log()[None]
    everywhere = torch.ones_like(policy, dtype=torch.bool)
    sampled = torch.full_like(policy, math.log(0.5))
    groups = Groups(policy, sampled, policy, everywhere, tensor([[1]]), tensor([[0]]))
    found, _ = weights(bound, groups, torch.full_like(policy, slope))
    torch.testing.assert_close(found.flatten(), torch.tensor(wanted, dtype=torch.float64))


# --- Of the user's ---


def halves(groups: Groups, beta: float, scale: float = 1.0) -> Tensor:
    """RLOO without a KL term, times K−1 over K: an objective of one's own."""
    return -scale * centred(groups.reward_BK) * groups.logprob_BK


def rewards_alone(groups: Groups, beta: float) -> Tensor:
    return groups.reward_BK


def a_mean(groups: Groups, beta: float) -> Tensor:
    return groups.logprob_BK.mean()


def test_an_objective_of_ones_own_takes_its_options_and_a_bound() -> None:
    groups = random_groups(4, 5)
    own = objective_of("test_objectives:halves", "taper", options={"scale": 2.0})
    torch.testing.assert_close(gradient(own, groups, 0.3), 2 * gradient(objective_of("topr"), groups, 0.3))
    assert {"log_ratio", "clip_share", "weight"} <= own(groups, 0.3).metrics.keys()


def test_an_objective_of_ones_own_gets_one_group_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """So a mean over all that it gets is the same in every micro-batch."""
    module = types.ModuleType("my_losses")
    module.whitened = lambda groups, beta: -(groups.reward_BK - groups.reward_BK.mean()) * groups.logprob_BK
    monkeypatch.setitem(sys.modules, "my_losses", module)
    objective = make_objective(TrainSection(objective="my_losses:whitened"), max_tokens=5)
    groups = random_groups(3, 4)
    together = objective(groups, 0.5).loss_BK
    alone = [objective(part(groups, slice(row, row + 1)), 0.5).loss_BK for row in range(3)]
    torch.testing.assert_close(together, torch.cat(alone), rtol=1e-12, atol=0)


@pytest.mark.parametrize(
    ("name", "options", "sentence"),
    [
        ("no_such_module:loss", {}, "cannot be imported .*: put the module beside the config"),
        ("test_objectives:halfs", {}, "no function or class 'halfs' in that module: did you mean 'halves'?"),
        (
            "test_objectives:halves",
            {"size": 2},
            r"cannot be called \(.*size.*\): let it take \(groups, beta\)",
        ),
        ("test_objectives:a_mean", {}, r"returned \[\]: let it return a tensor of shape \[1, 5\]"),
        (
            "test_objectives:rewards_alone",
            {},
            "returned a loss without gradient: let it depend on groups.polic",
        ),
    ],
)
def test_an_objective_of_ones_own_that_is_none_is_refused(
    name: str, options: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ConfigError, match=f"^train.objective={name} .*{sentence}|{name}: {sentence}"):
        objective_of(name, options=options)(random_groups(4, 5), 0.3)


# --- Optimal advantage regression ---


def test_oapls_gradient_on_logits_is_that_of_its_closed_form() -> None:
    """Weighted by the sampler μ: ∂/∂logits = g − π·Σg, where g = μ·[β·log(π/μ) − (r − V̂)]."""
    rng, beta = np.random.default_rng(3), 0.3
    logits, sampler_logits, reward = rng.standard_normal((3, 6))
    policy, sampler = (np.exp(x) / np.exp(x).sum() for x in (logits, sampler_logits))
    value = beta * np.log(sampler @ np.exp(reward / beta))
    pull = sampler * (beta * np.log(policy / sampler) - (reward - value))
    variable = torch.from_numpy(logits).requires_grad_()
    logprob = variable.log_softmax(0)[None]
    groups = replace(
        one_token(logprob, logprob.detach(), torch.from_numpy(reward)[None]),
        behaviour_BKL=torch.from_numpy(np.log(sampler))[None, :, None],
        value_BK=torch.full((1, 6), value, dtype=torch.float64),
    )
    (slope,) = torch.autograd.grad(
        (torch.from_numpy(sampler) * oapl(groups, beta).loss_BK[0]).sum(), variable
    )
    np.testing.assert_allclose(slope.numpy(), pull - policy * pull.sum(), rtol=1e-9, atol=1e-14)


def test_oapl_is_at_rest_at_its_target_whatever_was_drawn() -> None:
    """π_lag·exp(r/β)/Z with V̂ = β·log Z, of versions with a π_lag and a Z each in one group."""
    draw, beta = torch.Generator().manual_seed(0), 0.5
    sampler, reward = torch.randn(2, 3, 4, generator=draw, dtype=torch.float64)
    log_z = torch.randn(3, 4, generator=draw, dtype=torch.float64)
    groups = replace(
        one_token((sampler + reward / beta - log_z).requires_grad_(), sampler, reward),
        behaviour_BKL=sampler[..., None],
        value_BK=beta * log_z,
    )
    assert oapl(groups, beta).loss.item() == pytest.approx(0, abs=1e-28)
    assert gradient(oapl, groups, beta).abs().max() < 1e-12
    assert gradient(trajectory_balance, groups, beta).abs().max() > 0.01  # one log Ẑ for all


# --- M2PO's mask ---


def masked_by_loops(log_ratio: list[float], advantage: list[float], limit: float) -> list[bool]:
    """Algorithm 1 of the paper, literally."""
    stays = [True] * len(log_ratio)
    trusted = [i for i, (x, a) in enumerate(zip(log_ratio, advantage, strict=True)) if x * a > 0]
    while trusted and sum(log_ratio[i] ** 2 for i in trusted) / len(trusted) > limit:
        worst = max(trusted, key=lambda i: log_ratio[i] ** 2)
        stays[worst] = False
        trusted.remove(worst)
    return stays


@pytest.mark.parametrize("limit", [1e-9, 0.01, 0.04, 1e9])
def test_the_mask_is_that_of_the_papers_algorithm(limit: float) -> None:
    groups = random_groups(5, 4)
    log_ratio = groups.policy_BKL - groups.behaviour_BKL
    advantage = centred(groups.reward_BK)[:, :, None].expand_as(log_ratio)
    rows = zip(log_ratio.flatten(1).tolist(), advantage.flatten(1).tolist(), strict=True)
    wanted = [masked_by_loops(*of_group, limit) for of_group in rows]
    assert second_moment_mask(log_ratio, advantage, limit).flatten(1).tolist() == wanted
    assert any(False in of_group for of_group in wanted) == (limit < 1)


@pytest.mark.parametrize("name", ["grpo", "dr_grpo"])
def test_masked_tokens_pull_no_more_and_the_others_without_a_clip(name: str) -> None:
    groups, limit = random_groups(5, 4), 0.04
    log_ratio = groups.policy_BKL.detach() - groups.behaviour_BKL
    mask = second_moment_mask(log_ratio, centred(groups.reward_BK)[:, :, None], limit)
    beta = 1e-12  # GRPO's penalty is not masked
    slope = gradient(objective_of(name, normaliser="sum", second_moment_limit=limit), groups, beta)
    free = gradient(objective_of(name, normaliser="sum", second_moment_limit=1e9), groups, beta)
    advantage = centred(groups.reward_BK)
    if name == "grpo":
        advantage = advantage / (groups.reward_BK.std(1, keepdim=True) + 1e-4)
    wanted = -advantage[..., None] * log_ratio.exp() * groups.mask_BKL / 20
    torch.testing.assert_close(free, wanted, rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(slope, wanted * mask, rtol=1e-9, atol=1e-11)
    assert (wanted * ~mask).abs().sum() > 0


def test_a_group_without_advantage_or_ratio_is_masked_nowhere() -> None:
    nothing = torch.zeros(2, 3, 4)
    assert second_moment_mask(nothing, torch.ones(2, 3, 1), 0.04).all()
    assert second_moment_mask(torch.ones(2, 3, 4), nothing, 0.04).all()


# --- Data that the policy or the reference would hardly have sampled ---


def far_groups(nats: float, dtype: torch.dtype, *, spread: bool) -> Groups:
    """Rows whose log π_θ/π_behaviour and log π_θ/π_ref are each +nats or −nats, on one token or on all."""
    near = random_groups(2, 8, dtype=dtype)
    place = near.mask_BKL if spread else torch.arange(6) == 1
    gap_BKL = nats * place / place.sum(-1, keepdim=True)
    stale_BK1, kl_BK1 = tensor([[1, -1] * 4] * 2)[..., None], tensor([[1, 1, -1, -1] * 2] * 2)[..., None]
    return replace(
        near,
        behaviour_BKL=(near.policy_BKL.detach() - stale_BK1 * gap_BKL).to(dtype),
        reference_BKL=(near.policy_BKL.detach() - kl_BK1 * gap_BKL).to(dtype),
    )


@pytest.mark.parametrize("spread", [False, True])
@pytest.mark.parametrize("nats", [100.0, 1e4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("name", "limits"),
    [*((name, {}) for name in NAMES), *(("tba_prime", {"bound": bound}) for bound in BOUNDS)],
)
def test_loss_and_gradient_are_finite_for_any_log_ratio(
    name: str, limits: dict[str, Any], dtype: torch.dtype, nats: float, spread: bool
) -> None:
    groups = far_groups(nats, dtype, spread=spread)
    signs = (groups.policy_BKL - groups.behaviour_BKL).sum(2).sign(), groups.log_ratio_BK.sign()
    assert len({tuple(pair) for pair in torch.stack([sign.flatten() for sign in signs], 1).tolist()}) == 4
    objective = objective_of(name, **limits)
    assert objective(groups, 0.5).loss.isfinite()
    assert gradient(objective, groups, 0.5).square().sum().isfinite()


def test_beyond_the_bound_a_ratio_is_constant() -> None:
    log_ratio = tensor([[-1e4, 0.0, 19.99, 20.01, 1e4]]).requires_grad_()
    ratio = bounded_exp(log_ratio)
    (slope,) = torch.autograd.grad(ratio.sum(), log_ratio)
    top = math.exp(20)
    assert ratio[0].tolist() == pytest.approx([0, 1, math.exp(19.99), top, top], rel=1e-12)
    assert slope[0].tolist() == pytest.approx([0, 1, math.exp(19.99), 0, 0], rel=1e-12)


# --- Expectations, by enumeration ---


def expected_gradient(
    objective: Objective, logits: Tensor, ref_logprob: Tensor, reward: Tensor, beta: float
) -> Tensor:
    """∇_logits of E over groups of 2 drawn from the policy itself, by enumeration of all pairs."""
    total = torch.zeros_like(logits)
    for pair in itertools.product(range(len(logits)), repeat=2):
        variable = logits.clone().requires_grad_()
        chosen = list(pair)
        logprob = variable.log_softmax(0)[chosen]
        objective(
            one_token(logprob[None], ref_logprob[chosen][None], reward[chosen][None]), beta
        ).loss.backward()
        assert variable.grad is not None
        total += logprob.detach().sum().exp() * variable.grad
    return total


def world(seed: int) -> tuple[Tensor, Tensor, Tensor, float]:
    """Logits, reference log-probabilities and rewards of six completions; β."""
    draw = torch.Generator().manual_seed(seed)
    logits, ref_logits, reward = torch.randn(3, 6, generator=draw, dtype=torch.float64)
    return logits, ref_logits.log_softmax(0), reward, 0.4


def test_on_policy_all_expect_the_gradient_of_reward_less_kl() -> None:
    """Exact: leave-one-out, all of it; a mean baseline, (K−1)/K of it."""
    logits, ref_logprob, reward, beta = case = world(1)
    variable = logits.clone().requires_grad_()
    logprob = variable.log_softmax(0)
    (logprob.exp() * (beta * (logprob - ref_logprob) - reward)).sum().backward()
    exact = variable.grad
    assert exact is not None
    torch.testing.assert_close(expected_gradient(rloo, *case), exact)
    torch.testing.assert_close(expected_gradient(trajectory_balance, *case), exact / 2)
    torch.testing.assert_close(expected_gradient(tba_prime, *case), exact / 2)


def test_a_shifted_baseline_changes_nothing_on_policy() -> None:
    logits, ref_logprob, reward, beta = world(1)
    case = logits, ref_logprob, reward, beta
    shifted = expected_gradient(partial(rloo, baseline_shift=-3.0), *case)
    torch.testing.assert_close(shifted, expected_gradient(rloo, *case))


@pytest.mark.parametrize("name", NAMES)
def test_only_trajectory_balance_is_at_rest_at_the_optimum_off_policy(name: str) -> None:
    """Drawn uniformly, not by the policy: at π_ref·exp(r/β)/Z two losses rest, the others pull."""
    _, ref_logprob, reward, beta = world(2)
    logits = (ref_logprob + reward / beta).log_softmax(0).requires_grad_()
    groups = one_token(logits.log_softmax(0)[None], ref_logprob[None], reward[None])
    stale = replace(groups, behaviour_BKL=torch.full((1, 6, 1), -math.log(6), dtype=torch.float64))
    keys = {"log_z": "policy"} if name in ("trajectory_balance", "tba_prime") else {}
    loss = objective_of(name, **keys)(stale, beta).loss
    (pull,) = torch.autograd.grad(loss, logits)
    assert (pull.norm() < 1e-12) == (name in ("trajectory_balance", "tba_prime"))


@pytest.mark.parametrize(
    ("name", "options"), [("online_dpo", {}), ("proximal_rloo", {}), ("proximal_rloo", {"ratio_clip": 0.1})]
)
def test_the_example_losses_agree_with_their_formulas(
    name: str, options: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "docs/examples")
    objective, beta = objective_of(f"losses:{name}", options=options), 0.3
    groups, exact = random_groups(5, 4), random_groups(5, 4)
    wanted = by_loops(train_of(f"losses:{name}", options=options), exact, beta)
    (slope,) = torch.autograd.grad(wanted, exact.policy_BKL)
    torch.testing.assert_close(objective(groups, beta).loss, wanted, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(gradient(objective, groups, beta), slope, rtol=1e-12, atol=1e-12)
    assert objective(far_groups(1e4, torch.float32, spread=False), beta).loss.isfinite()
    even = replace(groups, reward_BK=torch.ones(5, 4, dtype=torch.float64))
    assert gradient(objective, even, beta).any() == (name == "proximal_rloo")  # DPO prefers nothing there


def test_the_documents_example_is_an_objective() -> None:
    """TOPR without its taper, times the scale, with the bound that its config asks for."""
    page = (Path(__file__).parents[1] / "docs/own-task.md").read_text()
    settings, code = re.search(
        r"## Your own loss.*?```yaml\n(.*?)```\n```python\n(.*?)```", page, re.S
    ).groups()
    module = types.ModuleType("my_losses")
    exec(code, vars(module))
    groups, train = random_groups(4, 5), TrainSection(**yaml.safe_load(settings)["train"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "my_losses", module)
        found = gradient(make_objective(train, max_tokens=MAX_TOKENS), groups, 0.3)
    torch.testing.assert_close(found, 2 * gradient(objective_of("topr"), groups, 0.3))
