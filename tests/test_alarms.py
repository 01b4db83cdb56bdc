"""Alarms on runs that were recorded step by step: early on those that old data spoil, never on the others.

``recorded_alarms.json`` says how they were made. A batch's rewards are as old as its data, so that they fall
when the first completions of a spoiled policy come back.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from tba_hpc.config import parse_config
from tba_hpc.report.alerts import EARLY_STEPS, Alert, View, alerts, sinking_answers
from tba_hpc.report.curves import Trends
from tba_hpc.run.evaluations import Evaluation

RUNS: dict[str, dict[str, Any]] = json.loads((Path(__file__).parent / "recorded_alarms.json").read_text())[
    "runs"
]
SPOILED = [name for name, run in RUNS.items() if run["ends"] == "spoiled"]
WELL = [name for name in RUNS if name not in SPOILED]


def views(name: str) -> Iterator[View]:
    """What there is to see after each step."""
    run, trends = RUNS[name], Trends()
    tree = {"model": {"path": "m"}, "train": {"steps": len(run["series"]["reward"])}}
    config = parse_config(tree, run["overrides"])
    for step in range(1, config.train.steps + 1):
        known = {f"train/{figure}": values[step - 1] for figure, values in run["series"].items()}
        trends.take({"step": step, "train/length": run["length"], **known})
        yield View(trends, config, evaluated(run, step))


def evaluated(run: dict[str, Any], until: int) -> list[Evaluation]:
    return [
        Evaluation(
            split="validation", step=step, correct=round(128 * score), total=128, tokens=9, truncated=0
        )
        for step, score in run["curve"]
        if step <= until
    ]


def fall(name: str) -> int:
    """The step after which the batch's rewards of 20 steps are less than half of all those before."""
    reward = RUNS[name]["series"]["reward"]
    return next(
        step
        for step in range(2 * EARLY_STEPS, len(reward))
        if fmean(reward[step - EARLY_STEPS : step]) < fmean(reward[: step - EARLY_STEPS]) / 2
    )


def first(check: Callable[[View], Alert | None], name: str) -> int:
    """The step after which an alarm rings."""
    return next(view.trends.steps for view in views(name) if check(view))


def test_it_rings_well_before_the_rewards_of_a_collapse_fall() -> None:
    assert first(sinking_answers, "collapse") == EARLY_STEPS <= fall("collapse") - 80


def test_it_rings_where_old_data_keep_a_run_from_learning() -> None:
    assert first(sinking_answers, "standstill") < 140


@pytest.mark.parametrize("name", WELL)
def test_runs_that_learn_from_data_of_any_age_raise_none(name: str) -> None:
    assert not any(alerts(view.trends, view.config, view.evaluations) for view in views(name))


def test_a_resume_forgets_the_steps_that_it_takes_back() -> None:
    """So a run that goes on from before it was spoiled begins without an alarm."""
    trends = Trends()
    for step in range(1, 61):
        drift = -9.0 if step > 30 else 0.0
        trends.take({"step": step, "train/length": 10.0, "train/better_log_weight": drift})
    spoiled = View(trends, parse_config({"model": {"path": "m"}}), [])
    assert sinking_answers(spoiled)
    trends.take({"event": "resumed", "step": 30})
    assert not sinking_answers(spoiled)
