"""Schedules against values worked out by hand."""

import math
from pathlib import Path

import pytest

from tba_hpc.config import LearningRate, TrainSection, load_config
from tba_hpc.core.schedules import at, beta, learning_rate, reference, reference_power
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
    rate = rates(1000, schedule="linear", warmup_steps=50, decay=(500, 1000))
    assert rate[0] == 1 / 50
    assert rate[49:501] == [1] * 452  # ends of both ramps included
    assert rate[501] == 499 / 500
    assert rate[999] == pytest.approx(1 / 500)


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
@pytest.mark.parametrize("decay", [None, (7, 10)])
def test_decay_is_over_at_the_end_and_stays_there(schedule: str, decay: tuple[int, int] | None) -> None:
    config = LearningRate(schedule=schedule, peak=3.0, warmup_steps=2, decay=decay)
    train = TrainSection(steps=10, learning_rate=config)
    assert learning_rate(train, 10) == learning_rate(train, 12) == 0


def test_a_run_may_stop_within_the_decay_of_its_schedule() -> None:
    """The published GSM8K figure: 50/350/600, stopped after 700 of 1000 steps, half way down."""
    fields = {"schedule": "linear", "warmup_steps": 50, "decay": (400, 1000), "peak": 1.0}
    train = TrainSection(steps=700, learning_rate=LearningRate(**fields))
    rate = [learning_rate(train, step) for step in range(700)]
    assert rate[:2] == [1 / 50, 2 / 50] and rate[49:401] == [1] * 352
    assert rate[550] == 0.75 and rate[699] == 301 / 600
    whole = TrainSection(steps=1000, learning_rate=train.learning_rate)
    assert rate == [learning_rate(whole, step) for step in range(700)]


def test_a_schedule_is_linear_between_its_points_and_constant_after() -> None:
    assert at(((0, 0.3),), 1000) == 0.3
    linear = ((0, 0.012), (500, 0.004))
    assert [at(linear, step) for step in (0, 250, 500, 900)] == pytest.approx([0.012, 0.008, 0.004, 0.004])
    jump = ((0, 2.0), (2, 2.0), (3, 1.0))
    assert [at(jump, step) for step in range(5)] == [2, 2, 2, 1, 1]


def test_the_schedule_of_the_published_tldr_code() -> None:
    """Towards .05 over 128 steps, and there from the 32nd on."""
    beta = load_config(Path("tldr_pythia410m")).train.beta
    expected = [1 - 0.95 * step / 128 if step < 31 else 0.05 for step in range(256)]
    assert [at(beta, step) for step in range(256)] == pytest.approx(expected, rel=1e-15)


def test_tempering_is_that_of_the_log_reward() -> None:
    """log R = [log π_ref/γ + r/β]/T at every step; T from 2 to 1 over 500, γ from 1 to 1.2 over 2000."""
    train = TrainSection(
        beta=0.05, target_temperature={0: 2, 500: 1}, reference_temperature={0: 1, 2000: 1.2}
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
