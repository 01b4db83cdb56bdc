"""A run in lockstep on a whole model: its samples, the age of its data, and that it repeats to the bit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from lab.lockstep_model import Run, kept, measure
from lab.sampling import Sampler
from tiny_models import make_random_model
from transformers import PreTrainedModel

from tba_hpc.core.packing import pack
from tba_hpc.core.types import Completion, Prompt, Ragged
from tba_hpc.learner.hf_model import PolicyLogprobs, load_policy, load_tokenizer
from tba_hpc.learner.upload import upload
from tba_hpc.tasks.arithmetic import Arithmetic

ROOM = 12
PROMPTS = 5


class Even(Arithmetic):
    """Rewards what a random model can do."""

    def rewards(self, prompt: Prompt, completions: Sequence[Completion]) -> list[float]:
        """1 for an even sum of the tokens."""
        return [float(completion.tokens.sum() % 2 == 0) for completion in completions]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a model that ends now and then, as all its distributions are broad."""
    return make_random_model(tmp_path_factory.mktemp("model") / "random", tied=False, spread=0.4)


@pytest.fixture(scope="module")
def policy(folder: Path) -> PreTrainedModel:
    return load_policy(str(folder), "float32")


@pytest.fixture(scope="module")
def prompts(folder: Path) -> list[np.ndarray]:
    task = Arithmetic(load_tokenizer(str(folder)))
    return [prompt.tokens for prompt in task.prompts("validation")[:PROMPTS]]


@torch.no_grad()
def test_what_is_sampled_has_the_learners_logprobs(
    policy: PreTrainedModel, prompts: list[np.ndarray]
) -> None:
    logprobs = PolicyLogprobs(policy)
    sampler = Sampler(policy, eos=0, max_tokens=ROOM, seed=3, top=2)
    groups = sampler.sample(policy.state_dict(), prompts, 40)
    reasons = {completion.finish_reason for group in groups for completion in group}
    assert len(groups) == PROMPTS and reasons == {"stop", "length"}
    for prompt, group in zip(prompts, groups, strict=True):
        for completion in group[:8]:
            assert (completion.tokens[:-1] != 0).all()
            sequence = Ragged.from_rows([np.concatenate([prompt, completion.tokens])], np.int32)
            sampled_T = np.ones(len(completion.tokens), bool)
            assert completion.top_logprobs is not None
            top_TC = completion.top_logprobs
            of_one = sequence, np.array([len(prompt)]), np.zeros(1, int), sampled_T, logprobs.layout
            packed = pack(*of_one, others_TC=top_TC["token"])
            found_TJ = logprobs(upload(packed, torch.device("cpu")))
            np.testing.assert_allclose(completion.logprobs, found_TJ[:, 0], atol=1e-5)
            np.testing.assert_allclose(top_TC["logprob"], found_TJ[:, 1:], rtol=2**-11, atol=1e-5)
            assert (found_TJ[:, 1] >= found_TJ.max(1).values - 1e-5).all(), "the likeliest comes first"


@pytest.fixture(scope="module")
def tiny(folder: Path) -> Run:
    """Six steps of two groups of two."""
    overrides = (
        f"model.path={folder}",
        "model.context_length=256",
        "task.name=test_lockstep_model:Even",
        f"generator.max_tokens={ROOM}",
        "generator.completions_per_prompt=2",
        "train.completions_per_prompt=2",
        "train.prompts_per_step=2",
        "task.options.train_problems=20",
    )
    return Run(overrides=overrides, lag=2, steps=6, every=3, problems=4)


def test_data_are_as_old_as_asked_for(tiny: Run) -> None:
    ages = {lag: measure(replace(tiny, lag=lag))["series"]["age"] for lag in (0, 1, 2)}
    assert ages == {0: [0] * 6, 1: [0, 1, 1, 1, 1, 1], 2: [0, 1, 2, 3, 2, 3]}


def test_the_same_run_gives_the_same_figures(tiny: Run) -> None:
    first, again, other = (measure(run) for run in (tiny, tiny, replace(tiny, seed=1)))
    assert first["series"] == again["series"] and first["curve"] == again["curve"]
    assert first["series"] != other["series"]
    assert [step for step, _ in first["curve"]] == [0, 3, 6]


def test_sampling_that_the_lab_does_not_do_is_refused(tiny: Run) -> None:
    with pytest.raises(ValueError, match=r"temperature, top_p, .* are \(0.9, 1.0, 0, None\)"):
        replace(tiny, overrides=(*tiny.overrides, "generator.temperature=0.9")).config()


def test_fresh_data_have_weights_of_one(tiny: Run) -> None:
    series = measure(replace(tiny, lag=0))["series"]
    assert series["ess"] == pytest.approx([1.0] * 6, abs=1e-6)
    assert series["kl"][0] == pytest.approx(0, abs=1e-4), "the policy is the reference at first"


def test_decoupled_ppo_around_the_policy_published_last(tiny: Run) -> None:
    """At lag 1 that is θ itself, and nothing is clipped; at lag 2 it is the sampler for two steps.

    After them an interpolated policy of one step before is another one.
    """
    kinds = {"published_proximal": True, "overrides": (*tiny.overrides, "train.objective=decoupled_ppo")}
    exact = replace(tiny, rate=1e-2, **kinds)
    near = measure(replace(exact, lag=1))["series"]
    assert near["clip_share"] == [0] * 6 and min(near["ess"]) < 0.99
    found = measure(exact)["series"]
    interpolated = measure(replace(exact, published_proximal=False))["series"]
    assert found["loss"][:2] == pytest.approx(interpolated["loss"][:2], abs=1e-4)
    assert found["loss"][2:] != pytest.approx(interpolated["loss"][2:], abs=1e-4)


def test_scores_can_be_centred(tiny: Run) -> None:
    """The first step has the loss of an uncentred step, but another gradient."""
    plain = (*tiny.overrides, "train.ratio_bound=none")
    off, on = (
        measure(replace(tiny, overrides=overrides))["series"]
        for overrides in (plain, (*plain, "train.score_centering=8"))
    )
    assert on["loss"][0] == pytest.approx(off["loss"][0], rel=1e-5)
    assert 0 < on["grad_norm"][0] != off["grad_norm"][0]


def test_a_run_is_measured_once(tiny: Run, tmp_path: Path) -> None:
    first = kept("A form", tiny, tmp_path)
    assert kept("A form", tiny, tmp_path) == first
    (path,) = tmp_path.iterdir()
    longer = kept("A form", replace(tiny, every=2), tmp_path)
    assert [step for step, _ in longer["curve"]] == [0, 2, 4, 6] and [*tmp_path.iterdir()] == [path]
