"""Score centering: its expectation over all completions of the enumerable policy, and its terms."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from lab.tabular import Table
from learner_worker import make_batch
from torch import Tensor

from tba_hpc.config import Config, ConfigError, TrainSection, parse_config
from tba_hpc.config.variants import Dppo, IcePop, RatioBound, RatioCap, RatioTaper, Unbounded
from tba_hpc.core.batch import with_top_logprobs
from tba_hpc.core.types import TOP_LOGPROBS
from tba_hpc.objectives import Groups, Objective, ObjectiveOutput, make_objective
from tba_hpc.objectives.ratio_bounds import bounded
from tba_hpc.objectives.trajectory_balance import trajectory_balance

TABLE = Table(letters=3)
VOCABULARY = TABLE.shape[2]


def logits(*, lag: float, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Logits, float64 [S, V], of a policy, with gradient, and a sampler ``lag`` standard deviations off."""
    draw = torch.Generator().manual_seed(seed)
    policy, noise = torch.randn(2, *TABLE.shape[1:], generator=draw, dtype=torch.float64)
    return policy.requires_grad_(), policy.detach() + lag * noise


def everything(policy_SV: Tensor, sampler_SV: Tensor, k: int) -> Groups:
    """One group of all completions; rewards and reference are those of the table's first prompt."""
    length_C = [len(completion) for completion in TABLE.completions]
    token_CL = np.zeros((len(length_C), TABLE.length), np.int64)
    for row, completion in zip(token_CL, TABLE.completions, strict=True):
        row[: len(completion)] = completion
    mask_CL = torch.arange(TABLE.length) < torch.tensor(length_C)[:, None]
    prefix_CL = torch.from_numpy(TABLE.prefixes(token_CL)).where(mask_CL, torch.tensor(0))
    token_CL1 = torch.from_numpy(token_CL)[..., None]

    def logprobs(of_SV: Tensor, token_CLX: Tensor) -> Tensor:
        return of_SV.log_softmax(1)[prefix_CL].gather(2, token_CLX)[None] * mask_CL[None, ..., None]

    top_CLk = sampler_SV[prefix_CL].topk(k, dim=2).indices
    reference_SV = torch.from_numpy(TABLE.ref_logits_PSV[0]).double()
    reward_C = torch.from_numpy(TABLE.reward_PC[0]).double()
    return Groups(
        policy_BKL=logprobs(policy_SV, token_CL1)[..., 0],
        behaviour_BKL=logprobs(sampler_SV, token_CL1)[..., 0],
        reference_BKL=logprobs(reference_SV, token_CL1)[..., 0],
        mask_BKL=mask_CL[None],
        reward_BK=reward_C[None],
        value_BK=torch.zeros_like(reward_C)[None],
        top_policy_BKLC=logprobs(policy_SV, top_CLk),
        top_behaviour_BKLC=logprobs(sampler_SV, top_CLk),
    )


def constant(groups: Groups, beta: float) -> ObjectiveOutput:
    """REINFORCE with an advantage of 1 for all."""
    return ObjectiveOutput(-groups.logprob_BK, {})


def expected(objective: Objective, groups: Groups, policy_SV: Tensor) -> Tensor:
    """Gradient, [S, V], of the expected loss of a completion that the sampler draws."""
    share_BK = groups.behaviour_logprob_BK.exp()
    loss = (share_BK * objective(groups, 1.0).loss_BK).sum()
    return torch.autograd.grad(loss, policy_SV, retain_graph=True)[0]


@pytest.mark.parametrize("bound", [Unbounded(), RatioCap(cap=1.2), IcePop(band=(0.9, 1.1)), Dppo(limit=0.05)])
@pytest.mark.parametrize("lag", [0.0, 0.3, 3.0])
def test_a_constant_advantage_pulls_nowhere_at_any_lag(lag: float, bound: RatioBound) -> None:
    """The whole vocabulary is recorded; the mean of the weighted scores is subtracted (equation 14)."""
    policy_SV, sampler_SV = logits(lag=lag)
    groups = everything(policy_SV, sampler_SV, VOCABULARY)
    assert expected(bounded(constant, bound, center_scores=True), groups, policy_SV).abs().max() < 1e-6
    plain = expected(bounded(constant, bound), groups, policy_SV).abs().max()
    assert plain > 0.005 or lag == 0


@pytest.mark.parametrize("k", range(1, VOCABULARY))
def test_new_data_pull_nowhere_however_few_tokens_are_recorded(k: int) -> None:
    """All other tokens count as one; if they were dropped, their mass would be pulled up."""
    policy_SV, sampler_SV = logits(lag=0.0)
    groups = everything(policy_SV, sampler_SV, k)
    assert expected(bounded(constant, Unbounded(), center_scores=True), groups, policy_SV).abs().max() < 1e-6
    assert groups.top_policy_BKLC is not None
    mean_BKL = (groups.top_policy_BKLC.detach().exp() * groups.top_policy_BKLC).sum(3)
    weight_BK = groups.behaviour_logprob_BK.exp()
    dropped = (weight_BK * (mean_BKL * groups.mask_BKL).sum(2)).sum()
    assert torch.autograd.grad(dropped, policy_SV)[0].abs().max() > 0.01


def test_more_tokens_leave_less_of_the_pull_of_old_data() -> None:
    policy_SV, sampler_SV = logits(lag=1.0)
    centred = bounded(constant, Unbounded(), center_scores=True)

    def pull(objective: Objective, k: int) -> float:
        return float(expected(objective, everything(policy_SV, sampler_SV, k), policy_SV).norm())

    one, two, all_but_one = (pull(centred, k) for k in (1, 2, VOCABULARY - 1))
    assert pull(constant, 1) > one > two > 1e-3 > 1e-6 > all_but_one, "a rest of one token is exact"


@pytest.mark.parametrize("bound", [Unbounded(), RatioTaper()])
@pytest.mark.parametrize("k", [1, VOCABULARY])
def test_the_optimum_of_trajectory_balance_stays(k: int, bound: RatioBound) -> None:
    """The optimum has no gradient on any data (equation 7); a point one step away from it has one."""
    beta = 0.4
    _, sampler_SV = logits(lag=1.0)
    policy_SV = optimum(beta).requires_grad_()
    objective = bounded(partial(trajectory_balance, log_z="policy"), bound, center_scores=True)
    for off, rests in ((0.0, True), (0.1, False)):
        groups = everything(policy_SV + off * sampler_SV, sampler_SV, k)
        (pull,) = torch.autograd.grad(objective(groups, beta).loss, policy_SV)
        assert (pull.norm() < 1e-6) == rests


def optimum(beta: float) -> Tensor:
    """Logits, float64 [S, V], of π_ref·exp(r/β)/Z for the table's first prompt."""
    share_C = TABLE.optimum(beta)[0]
    mass_SV = np.full(TABLE.shape[1:], 1e-300)
    for share, completion in zip(share_C, TABLE.completions, strict=True):
        for prefix, token in zip(TABLE.prefixes(completion[None])[0], completion, strict=True):
            mass_SV[prefix, token] += share
    return torch.from_numpy(np.log(mass_SV))


@pytest.mark.parametrize("bound", [Unbounded(), RatioCap(cap=1.2), RatioTaper()])
def test_scores_are_centred_by_their_formula(bound: RatioBound) -> None:
    """Equations 12 and 14 are computed by numpy, token by token; the loss and its metrics do not change."""
    policy_SV, sampler_SV = logits(lag=1.0)
    groups, k = everything(policy_SV, sampler_SV, 2), 2
    objective = partial(trajectory_balance, log_z="behaviour")
    found = bounded(objective, bound, center_scores=True)(groups, 0.3)
    plain = objective(groups, 0.3)
    torch.testing.assert_close(found.loss_BK, plain.loss_BK)
    assert ("clip_share" in found.metrics) == (not isinstance(bound, Unbounded))
    slope_BKL = torch.autograd.grad(plain.loss, groups.policy_BKL, retain_graph=True)[0]
    wanted = torch.zeros_like(policy_SV)
    p_SV, q_SV = policy_SV.detach().softmax(1), sampler_SV.softmax(1)
    score_SVV = torch.eye(VOCABULARY) - p_SV[:, None]  # [S, token, logit]
    for row, completion in enumerate(TABLE.completions):
        prefixes = TABLE.prefixes(completion[None])[0].tolist()
        of_completion = 1.0
        if isinstance(bound, RatioTaper) and slope_BKL[0, row].sum() > 0:
            of_completion = min(1.0, float(groups.log_weight_BK[0, row].exp()))

        def weight(ratio: Tensor, otherwise: float = of_completion) -> Tensor:
            if isinstance(bound, RatioCap):
                return ratio.clamp(max=bound.cap)
            return torch.full_like(ratio, otherwise)

        for t, (prefix, token) in enumerate(zip(prefixes, completion.tolist(), strict=True)):
            p_V, q_V, score_VV = p_SV[prefix], q_SV[prefix], score_SVV[prefix]
            head = q_V.topk(k).indices
            alpha = (1 - q_V[head].sum()) / (1 - p_V[head].sum())
            model_V = (alpha * p_V).scatter(0, head, q_V[head])
            mean_V = (model_V * weight(p_V / model_V)) @ score_VV
            ratio = p_V[token] / q_V[token]
            wanted[prefix] += slope_BKL[0, row, t] * (weight(ratio) * score_VV[token] - mean_V)
    (gradient,) = torch.autograd.grad(found.loss, policy_SV)
    torch.testing.assert_close(gradient, wanted, rtol=1e-6, atol=1e-9)


def test_a_config_switches_it_on() -> None:
    policy_SV, sampler_SV = logits(lag=1.0)
    groups = everything(policy_SV, sampler_SV, 3)
    train = TrainSection(objective="rloo", score_centering=3)
    found = make_objective(train, max_tokens=3)(groups, 0.3)
    off = make_objective(TrainSection(objective="rloo"), max_tokens=3)
    by_hand = bounded(off, Unbounded(), center_scores=True)(groups, 0.3)
    assert torch.equal(
        *(torch.autograd.grad(one.loss, policy_SV, retain_graph=True)[0] for one in (found, by_hand))
    )
    without = replace(groups, top_policy_BKLC=None, top_behaviour_BKLC=None)
    assert off(without, 0.3).loss == found.loss


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        (
            {"train.objective": "dr_grpo"},
            "is not for train.objective=dr_grpo, which bounds stale data itself",
        ),
        ({"model.logprob_temperature": 1.0, "generator.temperature": 0.7}, "leave out the first, or make"),
        ({"generator.top_p": 0.9}, "which generator.top_p=0.9 changes: leave out one of the two"),
        ({"generator.min_tokens": 2}, "which generator.min_tokens=2 changes"),
        ({"generator.tempered_range": [0.5, 1.0]}, "which generator.tempered_range=.* changes"),
    ],
)
def test_what_cannot_be_centred_is_refused(keys: dict[str, object], sentence: str) -> None:
    with pytest.raises(ConfigError, match=f"train.score_centering=32 .*{sentence}"):
        config(**{"train.score_centering": 32, **keys})


def test_the_policy_is_then_the_sampler_unless_it_is_said_otherwise() -> None:
    section = config(**{"train.score_centering": 32, "generator.temperature": 0.7}).model
    assert section.logprob_temperature == 0.7


def config(**keys: object) -> Config:
    return parse_config({"model": {"path": "m"}}, [f"{key}={value}" for key, value in keys.items()])


def test_trajectories_without_the_likeliest_tokens_are_refused_in_one_sentence() -> None:
    batch = make_batch(0)
    with pytest.raises(ConfigError, match=r"train.score_centering=32 needs the .* trajectories hold 0: "):
        with_top_logprobs(batch, 32)
    batch = replace(batch, top_logprobs=np.ones((len(batch.logprobs), 3), TOP_LOGPROBS))
    assert with_top_logprobs(batch, 2).top_logprobs.shape == (len(batch.logprobs), 2)


def test_float16_moves_no_probability_by_more_than_it_says() -> None:
    exact = -np.logspace(-6, 2, 100_000)
    assert np.abs(np.exp(exact.astype(np.float16).astype(float)) - np.exp(exact)).max() < 2e-4
