"""The enumerable world: its own correctness, and what the objectives learn in it from stale replayed data."""

import logging
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from lab import lockstep
from lab.lockstep import Setup
from lab.tabular import (
    Table,
    TabularGenerator,
    TabularReference,
    TabularTask,
    total_variation,
)
from lab.tabular_learner import TabularLearner

from tba_hpc.config import BufferSection, ConfigError, TrainSection
from tba_hpc.core.batch import with_reference_power
from tba_hpc.core.buffer import ReplayBuffer
from tba_hpc.core.skipped_steps import MOST_IN_A_ROW
from tba_hpc.core.types import (
    Completion,
    Group,
    Publication,
    Request,
    Sampling,
    Trajectories,
    TrajectoryBatch,
    WeightUpdate,
)

BETA = 0.25

EQUATION_7 = {"name": "trajectory_balance", "log_z": "policy"}
"""For data that nobody adds to."""


def update_of(table: Table, logits: np.ndarray, version: int = 1) -> WeightUpdate:
    """Weights as they arrive from an exchange."""
    data = logits.astype(np.float32).reshape(-1).view(np.uint8)
    return WeightUpdate(Publication(version=version), TabularLearner(table).layout, data)


def generate(table: Table, generator: TabularGenerator, n: int, temperature: float = 1.0) -> list[Group]:
    """``n`` completions of every prompt."""
    for i, prompt in enumerate(TabularTask(table).prompts("train")):
        generator.submit(Request(prompt, i, n, Sampling(temperature, 1.0, table.length)))
    groups: list[Group] = []
    while generator.in_flight:
        groups += generator.step()
    return groups


def score(table: Table, groups: list[Group]) -> Trajectories:
    scored = lockstep.scored(groups, TabularTask(table), TabularReference(table))
    scored.check()
    return scored


def batch_of_all(table: Table, beta: float) -> TrajectoryBatch:
    """Every completion of every prompt once, sampled by the reference; values as of infinitely many."""
    task, reference = TabularTask(table), TabularReference(table)
    groups = []
    for prompt in task.prompts("train"):
        request = Request(prompt, prompt.id, len(table.completions), Sampling(1.0, 1.0, table.length))
        silent = tuple(Completion(x, np.zeros(len(x), np.float32), "stop") for x in table.completions)
        logprobs = reference.logprobs(Group(request, silent, np.zeros((len(silent), 2), np.int32)))
        completions = [replace(c, logprobs=row) for c, row in zip(silent, logprobs, strict=True)]
        groups.append(Group(request, tuple(completions), np.zeros((len(silent), 2), np.int32)))
    buffer = ReplayBuffer(BufferSection(most_on_policy=1), 0)
    buffer.merge(score(table, groups), 0)
    batch = buffer.sample(0, groups=table.prompts, group_size=len(table.completions))
    ref_PC = table.probabilities(table.ref_logits_PSV)
    value_P = beta * np.log((ref_PC * np.exp(table.reward_PC / beta)).sum(1))
    batch.record["value"] = value_P[batch.record["prompt_id"]]
    return batch


def stale_buffer(table: Table, seed: int) -> ReplayBuffer:
    """Collected once by the uniform policy, which no one trains; every completion is in it."""
    generator = TabularGenerator(table, seed=seed)
    generator.load(update_of(table, np.zeros(table.shape), version=0))
    buffer = ReplayBuffer(BufferSection(most_on_policy=0.5), seed)
    buffer.merge(score(table, generate(table, generator, 400)), 0)
    assert len(buffer) == table.prompts * len(table.completions)
    return buffer


def trained(
    table: Table, objective: object, seed: int, steps: int = 160, power: float = 1.0, **options: object
) -> np.ndarray:
    """Policy [P, C] after training on the stale buffer alone; power: of the reference in the target."""
    train = TrainSection(objective=objective, ratio_bound="none", **options)
    buffer, learner = stale_buffer(table, seed), TabularLearner(table, train)
    for step in range(steps):
        batch = with_reference_power(buffer.sample(step, groups=4, group_size=8), power)
        learner.step(batch, learning_rate=0.1 * (1 - step / steps), beta=BETA)
    return learner.policy_PC


@pytest.mark.parametrize(
    ("name", "seed"),
    [
        *(("trajectory_balance", 0), ("tba_prime", 2)),
        pytest.param("trajectory_balance", 1, marks=pytest.mark.nightly),
    ],
)
def test_equation_7_reaches_the_optimum_from_stale_replayed_data(name: str, seed: int) -> None:
    """Data of one age, which nobody adds to: TBA′'s gradient is trajectory balance's."""
    table = Table(seed=seed)
    policy_PC = trained(table, {"name": name, "log_z": "policy"}, seed)
    assert total_variation(policy_PC, table.optimum(BETA)).max() <= 1e-3


@pytest.mark.parametrize("log_z", ["behaviour", "none"])
def test_with_another_log_z_data_that_nobody_adds_to_pull_towards_what_sampled_them(log_z: str) -> None:
    """As it stands below the optimum's: all completions that are there are pushed up."""
    table = Table(seed=0)
    policy_PC = trained(table, {"name": "trajectory_balance", "log_z": log_z}, 0)
    assert total_variation(policy_PC, table.optimum(BETA)).max() > 0.02


BOUNDS = [("policy", "none"), *(("behaviour", bound) for bound in ("none", "cap", "taper"))]
OFTEN = {("policy", "none", 0), ("behaviour", "cap", 0), ("behaviour", "none", 2)}
"""Cases of which `make test` has each value of log_z and centring, and one bound."""


@pytest.mark.parametrize(
    ("log_z", "bound", "centring"),
    [
        pytest.param(*case, centring, marks=[] if (*case, centring) in OFTEN else pytest.mark.nightly)
        for case in BOUNDS
        for centring in (0, 2)
    ],
)
def test_a_run_that_goes_on_sampling_comes_to_rest_at_the_optimum(
    log_z: str, bound: str, centring: int
) -> None:
    """Whatever log Z and bound, on data 5 to 9 steps old: there π_θ and what sampled are the optimum."""
    table = Table(prompts=1, seed=3)
    train = TrainSection(
        objective={"name": "trajectory_balance", "log_z": log_z},
        ratio_bound=bound,
        score_centering=centring,
        steps=400,
        prompts_per_step=1,
        completions_per_prompt=64,
        learning_rate={"schedule": "linear", "peak": 0.1},
        beta=BETA,
    )
    setup = Setup(
        table=table, train=train, buffer=None, sync_every=5, groups_per_step=1, completions=64, seed=1
    )
    *_, end = lockstep.train(setup, every=train.steps)
    assert total_variation(end.policy_PC, table.optimum(BETA)).max() < 0.01


@pytest.mark.parametrize("value_beta, reaches", [(BETA, True), (4 * BETA, False)])
def test_oapl_reaches_its_target_exactly_where_its_two_betas_are_one(
    value_beta: float, reaches: bool
) -> None:
    """The lag is fixed, π_lag = π_ref, and V̂ exact: π_ref·exp(r/β)/Z, from completions of equal weight."""
    table = Table(seed=0)
    learner = TabularLearner(table, TrainSection(objective="oapl"))
    batch = batch_of_all(table, value_beta)
    for step in range(400):
        metrics = learner.step(batch, learning_rate=0.1 * (1 - step / 400), beta=BETA)
    distance_P = total_variation(learner.policy_PC, table.optimum(BETA))
    assert (distance_P.max() <= 1e-3) == reaches
    assert (metrics["residual"] < 1e-3) == reaches


def test_a_normaliser_by_length_leaves_the_optimum_where_it_is() -> None:
    """Long completions weigh less, but the residual of each of them is 0 there."""
    table = Table(seed=0)
    policy_PC = trained(table, EQUATION_7, 0, loss_normaliser="completion_tokens")
    assert total_variation(policy_PC, table.optimum(BETA)).max() <= 1e-3


def test_a_tempered_reference_has_its_own_optimum() -> None:
    """π_ref^p·exp(r/β)/Z, which is far from that of p = 1."""
    table, power = Table(seed=0), 0.4
    optimum_PC = table.optimum(BETA, power)
    by_hand = power * np.log(table.probabilities(table.ref_logits_PSV)) + table.reward_PC / BETA
    np.testing.assert_allclose(np.diff(np.log(optimum_PC)), np.diff(by_hand), rtol=1e-9)
    assert total_variation(optimum_PC, table.optimum(BETA)).min() > 0.05
    assert total_variation(trained(table, EQUATION_7, 0, power=power), optimum_PC).max() <= 1e-3


def test_a_policy_of_another_temperature_has_its_own_optimum() -> None:
    """That of the reference softmax(logits/T), as if it had been one of temperature 1 with these logits."""
    seed = 1
    tempered = Table(seed=seed, temperature=0.7)
    plain = Table(seed=seed)
    ref_PC = plain.probabilities(plain.ref_logits_PSV / 0.7)
    optimum_PC = ref_PC * np.exp(plain.reward_PC / BETA)
    optimum_PC /= optimum_PC.sum(1, keepdims=True)
    assert total_variation(optimum_PC, plain.optimum(BETA)).min() > 0.02
    policy_PC = trained(tempered, EQUATION_7, seed)
    assert total_variation(policy_PC, optimum_PC).max() <= 1e-3


@pytest.mark.parametrize("objective", ["rloo", "grpo", "dr_grpo", "gspo", "topr"])
def test_other_objectives_miss_the_optimum_on_stale_data(objective: str) -> None:
    table = Table(seed=0)
    distance_P = total_variation(trained(table, objective, 0), table.optimum(BETA))
    assert distance_P.max() > 0.05


@pytest.mark.parametrize("shift, reaches", [(-0.8, True), (0.0, False)])
def test_a_baseline_below_all_rewards_has_a_known_optimum_on_stale_data(shift: float, reaches: bool) -> None:
    """AsymRE: of E_μ[(r − V)·log π] it is π ∝ μ·(r − V), where V is below all r; at the mean it collapses.

    Groups hold all 15 completions, so that μ is uniform, nothing is random, and V = mean of the others + δ.
    """
    table = Table(seed=0)
    learner = TabularLearner(table, TrainSection(objective={"name": "rloo", "baseline_shift": shift}))
    batch = stale_buffer(table, 0).sample(0, groups=4, group_size=15)
    for step in range(300):
        learner.step(batch, learning_rate=0.1 * (1 - step / 300), beta=1e-9)
    others_PC = (table.reward_PC.sum(1, keepdims=True) - table.reward_PC) / 14
    above_PC = table.reward_PC - (others_PC - 0.8)
    assert above_PC.min() > 0
    optimum_PC = above_PC / above_PC.sum(1, keepdims=True)
    distance_P = total_variation(learner.policy_PC, optimum_PC)
    assert (distance_P <= 1e-3).tolist() == (distance_P < 0.5).tolist() == [reaches] * table.prompts
    assert (learner.policy_PC.min() > 1e-6) == reaches  # whether every completion keeps a chance


# --- The table ---


@pytest.mark.parametrize("letters, length, count", [(2, 3, 15), (3, 3, 40), (1, 4, 5), (2, 1, 3)])
def test_every_completion_exists_once_and_all_policies_sum_to_one(
    letters: int, length: int, count: int
) -> None:
    table = Table(prompts=2, letters=letters, length=length)
    texts = {tuple(tokens.tolist()) for tokens in table.completions}
    assert len(texts) == len(table.completions) == count
    logits = np.random.default_rng(0).standard_normal(table.shape)
    np.testing.assert_allclose(table.probabilities(logits).sum(1), 1, rtol=1e-12)


def test_optimum_by_hand() -> None:
    """Two completions, end or the letter: a logistic function of the difference of rewards."""
    table = Table(prompts=1, letters=1, length=1)
    (end, letter), (ref_letter, ref_end) = table.reward_PC[0], table.ref_logits_PSV[0, 0]
    log_odds = float(ref_letter) - float(ref_end) + (float(letter) - float(end)) / 0.5
    np.testing.assert_allclose(table.optimum(0.5)[0, 1], 1 / (1 + np.exp(-log_odds)), rtol=1e-6)


# --- The ports ---


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_samples_follow_the_policy_and_carry_its_logprobs(temperature: float) -> None:
    table = Table(prompts=1, temperature=temperature)
    logits = np.random.default_rng(5).standard_normal(table.shape).astype(np.float32)
    generator = TabularGenerator(table, seed=0)
    generator.load(update_of(table, logits))
    (group,) = generate(table, generator, n := 4000, temperature)
    counts = np.bincount([table.index(c.tokens) for c in group.completions], minlength=15)
    expected = n * Table(prompts=1).probabilities(logits / temperature)[0]
    assert ((counts - expected) ** 2 / expected).sum() < 42.6  # exceeded with probability 1e-4 by 14 degrees
    for completion in group.completions[:50]:
        np.testing.assert_allclose(
            completion.logprobs, table.token_logprobs(logits, 0, completion.tokens), rtol=1e-6
        )
        assert completion.finish_reason == ("stop" if completion.tokens[-1] == table.eos else "length")


@pytest.mark.parametrize("reward", [np.nan, 1e25])
def test_a_loss_that_is_not_finite_changes_nothing(
    reward: float, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The square of 1e25 overflows, its gradient does not. The prompt is named, and the count is kept."""
    table = Table()
    buffer, learner, other = stale_buffer(table, 0), TabularLearner(table), TabularLearner(table)
    good = [buffer.sample(step, groups=4, group_size=4) for step in range(3)]
    bad = replace(good[0], record=good[0].record.copy())
    bad.record["reward"][6] = reward
    with caplog.at_level(logging.WARNING):
        found = [
            learner.step(batch, learning_rate=0.1, beta=BETA)["skipped_steps"]
            for batch in (good[0], bad, good[1], bad)
        ]
    assert found == [0, 1, 1, 2]
    assert f"the loss of the groups of prompts {bad.prompt_id_B[1]} is not finite" in caplog.text
    learner.save(tmp_path)()
    learner = TabularLearner(table)
    learner.load(tmp_path)
    assert learner.step(good[2], learning_rate=0.1, beta=BETA)["skipped_steps"] == 2
    for batch in good:
        other.step(batch, learning_rate=0.1, beta=BETA)
    np.testing.assert_array_equal(learner.policy_logits, other.policy_logits)


def test_a_run_that_only_skips_ends_with_one_sentence() -> None:
    table = Table()
    good, learner = stale_buffer(table, 0).sample(0, groups=4, group_size=4), TabularLearner(table)
    bad = replace(good, ref_logprobs=np.full_like(good.ref_logprobs, -np.inf))
    for batch in [*[bad] * (MOST_IN_A_ROW - 1), good, *[bad] * (MOST_IN_A_ROW - 1)]:
        learner.step(batch, learning_rate=0.1, beta=BETA)
    sentence = r"in a row were skipped, .* 0, 1, 2, 3 was not finite: .* start another run \(run.name\)"
    with pytest.raises(ConfigError, match=sentence):
        learner.step(bad, learning_rate=0.1, beta=BETA)
