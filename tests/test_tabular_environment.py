"""Conversations small enough to enumerate: what the losses learn where an environment speaks in between.

They are words of the table whose second letter the environment chooses, by the first; the others, and their
end, are sampled. The policy's logits at the environment's place mean nothing.

Shape letters as in tools/lab/tabular.py; C conversations are those of the table's completions with a chance.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pytest
from lab.tabular import Table, total_variation
from lab.tabular_learner import TabularLearner

from tba_hpc.config import BufferSection, TrainSection
from tba_hpc.core.buffer import ReplayBuffer
from tba_hpc.core.types import LIVE_RECORD, Ragged, TrajectoryBatch, offsets_of

BETA = 0.25

GARBAGE = -99.0
"""The reference's log-probability of what the environment says: no loss may look at it."""


@dataclass(frozen=True)
class World:
    """A table, and an environment that answers a letter with another: by chance, or always the same one."""

    table: Table
    certain: bool = False

    @cached_property
    def answers_PVV(self) -> np.ndarray:
        """float64: probability of each answer to each first letter. An end is answered by the padding."""
        letters, prompts = self.table.letters, self.table.prompts
        rng = np.random.default_rng([self.table.seed, 2])
        answers_PVV = np.zeros((prompts, letters + 1, letters + 1))
        answers_PVV[:, :letters, :letters] = rng.dirichlet(np.ones(letters), (prompts, letters))
        answers_PVV[:, letters, 0] = 1
        return self.settled(answers_PVV, rng) if self.certain else answers_PVV

    def settled(self, answers_PVV: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """An environment that gives one answer to each letter, drawn once."""
        noise = rng.gumbel(size=answers_PVV.shape)
        with np.errstate(divide="ignore"):
            drawn_PV = (np.log(answers_PVV) + noise).argmax(2)
        return np.eye(answers_PVV.shape[2])[drawn_PV]

    def answer_PC(self, answers_PVV: np.ndarray) -> np.ndarray:
        """The environment's part of the probability of each completion."""
        _, token_CL, _ = self.table._cells
        return answers_PVV[:, token_CL[:, 0], token_CL[:, 1]]

    def sampled_PCL(self, logits_PSV: np.ndarray) -> np.ndarray:
        """The policy's part, by place."""
        prefix_CL, token_CL, mask_CL = self.table._cells
        mask_CL = mask_CL & (np.arange(self.table.length) != 1)
        return np.exp(self.table.next_logprobs(logits_PSV)[:, prefix_CL, token_CL] * mask_CL)

    def conversations(self, logits_PSV: np.ndarray, answers_PVV: np.ndarray | None = None) -> np.ndarray:
        """float64 [P, C]: how often a policy has each, with this environment or another."""
        answers_PVV = self.answers_PVV if answers_PVV is None else answers_PVV
        return self.sampled_PCL(logits_PSV).prod(2) * self.answer_PC(answers_PVV)

    @property
    def posterior_PC(self) -> np.ndarray:
        """float64: π_ref·exp(r/β)/Z over whole conversations."""
        weight_PC = self.conversations(self.table.ref_logits_PSV) * np.exp(self.table.reward_PC / BETA)
        return weight_PC / weight_PC.sum(1, keepdims=True)

    @property
    def optimum_PC(self) -> np.ndarray:
        """float64: conversations of the policy with the most reward less β·KL, by backward induction."""
        _, token_CL, _ = self.table._cells
        said = np.arange(self.table.prompts)[:, None], token_CL[:, 0], token_CL[:, 1]
        first_PC, _, last_PC = np.moveaxis(self.sampled_PCL(self.table.ref_logits_PSV), 2, 0)
        weight_PC = last_PC * np.exp(self.table.reward_PC / BETA)
        total_PVV = np.zeros_like(self.answers_PVV)
        np.add.at(total_PVV, said, weight_PC)
        value_PV = (self.answers_PVV * np.log(np.where(total_PVV > 0, total_PVV, 1))).sum(2)
        spoken_PC = first_PC * np.exp(value_PV)[said[:2]]
        found_PC = spoken_PC * self.answer_PC(self.answers_PVV) * weight_PC / total_PVV[said]
        return found_PC / found_PC.sum(1, keepdims=True)

    def batch(self, rows_PK: np.ndarray, logits_PSV: np.ndarray) -> TrajectoryBatch:
        """A group of K conversations of each prompt, sampled by a policy."""
        table, row_N = self.table, rows_PK.ravel()
        prompt_N = np.arange(table.prompts).repeat(rows_PK.shape[1])
        record = np.zeros(len(row_N), LIVE_RECORD)
        record["prompt_id"] = record["prompt_row"] = record["request_id"] = prompt_N
        record["reward"] = table.reward_PC[prompt_N, row_N]
        prefix_CL, token_CL, mask_CL = table._cells
        mask_NL, place = mask_CL[row_N], (prompt_N[:, None], prefix_CL[row_N], token_CL[row_N])
        logprob_NL, ref_logprob_NL = (
            table.next_logprobs(logits)[place].astype(np.float32)
            for logits in (logits_PSV, table.ref_logits_PSV)
        )
        logprob_NL[:, 1], ref_logprob_NL[:, 1] = np.nan, GARBAGE
        batch = TrajectoryBatch(
            record,
            Ragged(
                np.arange(table.prompts, dtype=np.int32) + table.prompt_token(0),
                offsets_of([1] * table.prompts),
            ),
            Ragged(token_CL[row_N][mask_NL], offsets_of(mask_NL.sum(1))),
            logprob_NL[mask_NL],
            ref_logprob_NL[mask_NL],
            group_size=rows_PK.shape[1],
            step=0,
        )
        batch.check()
        return batch

    def draw(
        self, rng: np.random.Generator, logits_PSV: np.ndarray, n: int, *, alike: bool = False
    ) -> TrajectoryBatch:
        """Sample n conversations of each prompt; ``alike``: with one answer to each letter in all of them."""
        answers_PVV = self.settled(self.answers_PVV, rng) if alike else self.answers_PVV
        weight_PC = self.conversations(logits_PSV, answers_PVV)
        chance_PC = weight_PC / weight_PC.sum(1, keepdims=True)
        rows_PK = np.stack([rng.choice(chance_PC.shape[1], n, p=chance_C) for chance_C in chance_PC])
        return self.batch(rows_PK, logits_PSV)


def test_the_two_optima_are_one_where_the_environment_is_certain() -> None:
    """By chance it would have to take part in the posterior, which no policy can bring about."""
    certain, random = (World(Table(seed=0), certain=certain) for certain in (True, False))
    np.testing.assert_allclose(certain.optimum_PC, certain.posterior_PC, atol=1e-12)
    assert total_variation(random.optimum_PC, random.posterior_PC).max() > 0.05
    for world in (certain, random):
        np.testing.assert_allclose(world.conversations(np.zeros(world.table.shape)).sum(1), 1)


@pytest.mark.parametrize(
    ("name", "seed"),
    [
        *(("trajectory_balance", 0), ("tba_prime", 1)),
        pytest.param("trajectory_balance", 1, marks=pytest.mark.nightly),
        pytest.param("tba_prime", 0, marks=pytest.mark.nightly),
    ],
)
def test_stale_conversations_lead_to_the_posterior_if_the_environment_is_certain(
    name: str, seed: int
) -> None:
    """Replayed from a buffer; and where the environment speaks no logit moves by a bit."""
    world = World(Table(seed=seed), certain=True)
    uniform_PSV, rng = np.zeros(world.table.shape), np.random.default_rng(seed)
    buffer = ReplayBuffer(BufferSection(most_on_policy=0.5), seed)
    buffer.merge(world.draw(rng, uniform_PSV, 400), 0)
    train = TrainSection(objective={"name": name, "log_z": "policy"}, ratio_bound="none")
    learner = TabularLearner(world.table, train)
    for step in range(300):
        batch = buffer.sample(step, groups=4, group_size=8)
        learner.step(batch, learning_rate=0.1 * (1 - step / 300), beta=BETA)
    assert total_variation(world.conversations(learner.policy_logits), world.posterior_PC).max() <= 1e-3
    answers = slice(1, 1 + world.table.letters)
    np.testing.assert_array_equal(learner.policy_logits[:, answers], world.table.ref_logits_PSV[:, answers])


def test_oapl_reaches_the_posterior_from_exact_values() -> None:
    """Of all conversations once, as in test_tabular: all residuals are 0 there, and nowhere else."""
    world = World(Table(seed=0), certain=True)
    ref_PC = world.conversations(world.table.ref_logits_PSV)
    rows_PK = np.stack([np.flatnonzero(ref_C) for ref_C in ref_PC])
    batch = world.batch(rows_PK, world.table.ref_logits_PSV)
    value_P = BETA * np.log((ref_PC * np.exp(world.table.reward_PC / BETA)).sum(1))
    batch.record["value"] = value_P[batch.record["prompt_id"]]
    learner = TabularLearner(world.table, TrainSection(objective="oapl"))
    for step in range(400):
        metrics = learner.step(batch, learning_rate=0.1 * (1 - step / 400), beta=BETA)
    assert metrics["residual"] < 1e-3
    assert total_variation(world.conversations(learner.policy_logits), world.posterior_PC).max() <= 1e-3


def go_on_sampling(
    world: World, objective: object, *, alike: bool = False, sampler_PSV: np.ndarray | None = None
) -> np.ndarray:
    """Conversations [P, C] of the policy at the end of a run on data 5 to 9 steps old, or of one sampler."""
    learner = TabularLearner(world.table, TrainSection(objective=objective, ratio_bound="none"))
    rng, steps, logits = np.random.default_rng(0), 400, [world.table.ref_logits_PSV] * 2
    for step in range(steps):
        if step % 5 == 0:
            logits = [logits[1], learner.policy_logits]
        batch = world.draw(rng, logits[0] if sampler_PSV is None else sampler_PSV, 128, alike=alike)
        learner.step(batch, learning_rate=0.1 * (1 - step / steps), beta=BETA)
    return world.conversations(learner.policy_logits)


@pytest.mark.parametrize(
    "objective, alike",
    [
        *(("trajectory_balance", False), ("trajectory_balance", True)),
        pytest.param("tba_prime", False, marks=pytest.mark.nightly),
    ],
)
def test_a_run_in_a_random_environment_comes_to_rest_at_its_optimum(objective: str, alike: bool) -> None:
    """The most reward less β·KL, whether or not the completions of a group meet the same answers."""
    world = World(Table(prompts=1, seed=25))
    found_PC = go_on_sampling(world, objective, alike=alike)
    assert total_variation(found_PC, world.optimum_PC).max() < 0.03
    assert total_variation(found_PC, world.posterior_PC).max() > 0.3


def test_data_of_another_policy_lead_elsewhere_in_a_random_environment() -> None:
    """No policy makes all residuals 0, so it matters which conversations count most."""
    equation_7 = {"name": "trajectory_balance", "log_z": "policy"}
    worlds = [World(Table(prompts=1, seed=25), certain=certain) for certain in (True, False)]
    found = [go_on_sampling(world, equation_7, sampler_PSV=np.zeros(world.table.shape)) for world in worlds]
    pairs = zip(found, worlds, strict=True)
    certain, random = (total_variation(found_PC, world.optimum_PC).max() for found_PC, world in pairs)
    assert certain < 1e-3 and random > 0.08


def test_dr_grpo_finds_the_most_reward_in_a_random_environment() -> None:
    """It has no KL term: the best last letter, and the first one with the best expectation of it."""
    world = World(Table(prompts=1, seed=25))
    reward_C, answers_VV, (_, token_CL, _) = (
        world.table.reward_PC[0],
        world.answers_PVV[0],
        world.table._cells,
    )
    best_VV = np.zeros_like(answers_VV)
    np.maximum.at(best_VV, (token_CL[:, 0], token_CL[:, 1]), reward_C)
    best = (answers_VV * best_VV).sum(1).max()
    (start_C,), (found_C,) = (
        world.conversations(world.table.ref_logits_PSV),
        go_on_sampling(world, "dr_grpo"),
    )
    assert start_C @ reward_C < best - 0.1 < best - 0.01 < found_C @ reward_C < best
