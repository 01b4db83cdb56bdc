"""The reference that lags behind the policy, against its formula and an average, and where it is used."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from learner_worker import BETA, make_batch, make_config, run
from tiny_models import make_random_model

from tba_hpc.config import ConfigError, TrainSection, parse_config
from tba_hpc.core.types import RECORD, token_ages
from tba_hpc.learner.hf_model import load_policy
from tba_hpc.learner.upload import upload
from tba_hpc.objectives import RecordedGroups, make_objective
from tba_hpc.objectives.common import Groups
from tba_hpc.objectives.lagged import with_lagged_reference

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
            lag = decay / (1 - decay) / max(age, 4) if age else 0.0
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
    """Of its log-probabilities, for data of four steps or more, once it has forgotten its start."""
    groups, steps = mixed_groups(), 600
    velocity = groups.policy_BKL.detach() - groups.behaviour_BKL
    start = groups.behaviour_BKL
    average = start
    for step in range(1, steps + 1):
        average = decay * average + (1 - decay) * (start + step * velocity)
    policy = start + steps * velocity
    moved = replace(groups, policy_BKL=policy, behaviour_BKL=policy - groups.age_BKL * velocity)
    stale = groups.age_BKL >= 4
    assert stale.sum() == 4
    found = with_lagged_reference(moved, decay).reference_BKL
    torch.testing.assert_close(found[stale], average[stale], rtol=1e-9, atol=1e-9)


BOUNDED = {"ratio_bound": {"name": "cap", "cap": 1.1}}


@pytest.mark.parametrize(
    "train",
    [{"objective": name} for name in ("trajectory_balance", "rloo", "grpo")]
    + [{"objective": "tba_prime", **BOUNDED}],
)
def test_an_objective_sees_it_in_place_of_what_came(train: dict[str, object]) -> None:
    """That is NaN here."""
    found, wanted = (
        make_objective(TrainSection(reference=reference, **train), max_tokens=8)
        for reference in ({"name": "lagged", "decay": 0.8}, "frozen")
    )
    groups = mixed_groups()
    outputs = found(groups, 0.3), wanted(with_lagged_reference(groups, 0.8), 0.3)
    slopes = [torch.autograd.grad(output.loss, groups.policy_BKL)[0] for output in outputs]
    assert outputs[0].loss.isfinite() and slopes[0].any()
    assert torch.equal(outputs[0].loss, outputs[1].loss) and torch.equal(*slopes)


@pytest.mark.engine
@pytest.mark.parametrize(("ranks", "budget"), [(1, None), (2, 48)])
def test_the_learner_steps_on_it(ranks: int, budget: int | None, tmp_path: Path) -> None:
    """The loss, from a sequence's own logits and the tokens' ages; by groups, and by tokens on two ranks."""
    folder = make_random_model(tmp_path / "model", tied=True, spread=0.15)
    settings = {"reference": "lagged", "tokens_per_micro_batch": budget}
    config = make_config(folder, ranks=ranks, context_length=48, **settings)
    done = run(tmp_path / "run", config, [("step", 1)])
    model, batch = load_policy(str(folder), "float32"), make_batch(1)
    rows = []
    for row, prompt_length in enumerate(batch.prompt_length_N.tolist()):
        tokens = torch.from_numpy(batch.sequences.row(row).astype(np.int64))
        logprob_LV = model(input_ids=tokens[None]).logits[0].log_softmax(-1).detach()
        rows.append(logprob_LV[:-1].gather(1, tokens[1:, None])[prompt_length - 1 :, 0])
    policy_T = torch.cat(rows).where(torch.from_numpy(batch.action_T), 0.0)
    groups = Groups.of(policy_T, upload(RecordedGroups.of(batch), policy_T.device))
    loss = make_objective(config.train, max_tokens=24)(groups, BETA).loss.item()
    assert done.losses() == [pytest.approx(loss, rel=1e-5)]
    frozen = TrainSection()
    assert make_objective(frozen, max_tokens=24)(groups, BETA).loss.item() != pytest.approx(loss, rel=0.1)


@pytest.mark.parametrize(
    ("train", "sentence"),
    [
        ({"reference_temperature": 2}, "train.reference_temperature would be ignored"),
        ({"target_temperature": 2}, "the temperature of the policy: leave it out"),
        ({"objective": "oapl"}, "train.reference=lagged is not for train.objective=oapl"),
        ({"reference": {"name": "lagged", "decay": 0}}, "greater than 0"),
    ],
)
def test_what_does_not_go_with_it_is_refused(train: dict[str, object], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        parse_config({"model": {"path": "model"}, "train": {"reference": "lagged", **train}})
