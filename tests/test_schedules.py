"""Schedules against values worked out by hand."""

import math

import pytest

from tba_hpc.config import Beta, LearningRate, Ramp, TrainSection
from tba_hpc.core.schedules import beta, learning_rate, ramp, reference, reference_power
from tba_hpc.core.types import BEHAVIOUR


def rates(steps: int, **fields: object) -> list[float]:
    train = TrainSection(steps=steps, learning_rate=LearningRate(peak=1.0, **fields))
    return [learning_rate(train, step) for step in range(steps)]


def test_warm_up_starts_above_zero_and_ends_at_the_peak() -> None:
    assert rates(6, warmup_steps=4) == [0.25, 0.5, 0.75, 1, 1, 1]


def test_linear_decays_to_zero_just_after_the_last_step() -> None:
    assert rates(4, schedule="linear") == [1, 0.75, 0.5, 0.25]
    assert rates(6, schedule="linear", warmup_steps=2) == [0.5, 1, 1, 0.75, 0.5, 0.25]


def test_cosine_is_half_way_down_at_half_time() -> None:
    assert rates(4, schedule="cosine") == pytest.approx(
        [1, (1 + math.sqrt(0.5)) / 2, 0.5, (1 - math.sqrt(0.5)) / 2]
    )


def test_warmup_stable_decay_of_the_paper() -> None:
    rate = rates(1000, schedule="warmup_stable_decay", warmup_steps=50, decay_steps=500)
    assert rate[0] == 1 / 50
    assert rate[49:501] == [1] * 452  # ends of both ramps included
    assert rate[501] == 499 / 500
    assert rate[999] == pytest.approx(1 / 500)


@pytest.mark.parametrize("schedule", ["linear", "cosine", "warmup_stable_decay"])
def test_decay_is_over_at_the_end_and_stays_there(schedule: str) -> None:
    config = LearningRate(schedule=schedule, peak=3.0, warmup_steps=2, decay_steps=3)
    train = TrainSection(steps=10, learning_rate=config)
    assert learning_rate(train, 10) == learning_rate(train, 12) == 0


def test_a_run_may_stop_within_the_horizon_of_its_schedule() -> None:
    """The published GSM8K figure: 50/350/600, stopped after 700 of 1000 steps, half way down."""
    fields = {"schedule": "warmup_stable_decay", "warmup_steps": 50, "decay_steps": 600, "peak": 1.0}
    train = TrainSection(steps=700, horizon=1000, learning_rate=LearningRate(**fields))
    rate = [learning_rate(train, step) for step in range(700)]
    assert rate[:2] == [1 / 50, 2 / 50] and rate[49:401] == [1] * 352
    assert rate[550] == 0.75 and rate[699] == 301 / 600
    whole = TrainSection(steps=1000, learning_rate=train.learning_rate)
    assert rate == [learning_rate(whole, step) for step in range(700)]


def test_the_decay_of_warmup_stable_decay_may_be_half_a_cosine() -> None:
    rate = rates(12, schedule="warmup_stable_decay", warmup_steps=2, decay_steps=4, decay="cosine")
    assert rate[:9] == [0.5, *[1] * 8]
    assert rate[9:] == pytest.approx([(2 + math.sqrt(2)) / 4, 0.5, (2 - math.sqrt(2)) / 4])


def test_a_run_of_warm_up_alone() -> None:
    assert rates(3, schedule="linear", warmup_steps=3) == pytest.approx([1 / 3, 2 / 3, 1])


def test_no_decay_steps_is_constant() -> None:
    assert rates(3, schedule="warmup_stable_decay") == [1, 1, 1]


def test_ramp() -> None:
    assert ramp(Beta(start=0.3), 1000) == 0.3
    linear = Beta(schedule="linear", start=0.012, end=0.004, anneal_steps=500)
    assert [ramp(linear, step) for step in (0, 250, 500, 900)] == pytest.approx([0.012, 0.008, 0.004, 0.004])


def test_a_ramp_may_jump_to_its_end() -> None:
    """As the published TL;DR code has it: towards .05 over 128 steps, and there from the 32nd on."""
    beta = Beta(schedule="linear", start=1, end=0.05, anneal_steps=128, jump_after=31)
    assert [ramp(beta, step) for step in (0, 30, 31, 300)] == pytest.approx(
        [1, 1 - 0.95 * 30 / 128, 0.05, 0.05]
    )
    step = Ramp(start=2, end=1, jump_after=3)
    assert [ramp(step, i) for i in range(5)] == [2, 2, 2, 1, 1]


def test_an_untempered_target_is_the_configs_own() -> None:
    train = TrainSection(beta=Beta(start=0.3))
    assert (beta(train, 7), reference_power(train, 7)) == (0.3, 1)


def test_tempering_is_that_of_the_log_reward() -> None:
    """log R = [log π_ref/γ + r/β]/T at every step; T from 2 to 1 over 500, γ from 1 to 1.2 over 2000."""
    train = TrainSection(
        beta=Beta(start=0.05),
        target_temperature=Ramp(schedule="linear", start=2, end=1, anneal_steps=500),
        reference_temperature=Ramp(schedule="linear", start=1, end=1.2, anneal_steps=2000),
    )
    log_ref, reward = -17.0, -3.0
    for step, temperature, gamma in [
        (0, 2, 1),
        (250, 1.5, 1.025),
        (500, 1, 1.05),
        (2000, 1, 1.2),
        (5000, 1, 1.2),
    ]:
        log_reward = reference_power(train, step) * log_ref + reward / beta(train, step)
        assert log_reward == pytest.approx((log_ref / gamma + reward / 0.05) / temperature)


def test_reference() -> None:
    reset = TrainSection(reference={"name": "reset", "every": 50})
    assert [reference(reset, step) for step in (0, 49, 50, 99, 100)] == [0, 0, 50, 50, 100]
    last = [TrainSection(reference={"name": "reset", "every": 50}, steps=steps) for steps in (100, 101)]
    assert [reference(train, 100) for train in last] == [50, 100], "after the last step nothing is reset"
    assert reference(TrainSection(), 1000) == 0
    assert reference(TrainSection(reference="behaviour"), 1000) == BEHAVIOUR
