"""The experiments: their arithmetic against hand-made files, their configs, the world in lockstep."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path

import experiments
import numpy as np
import pytest
from lab import asynchrony, curves, lockstep, pace, results, sparse
from lab.curves import Course
from lab.lockstep import Setup, SparseTable
from lab.pace import Paced
from lab.results import Result, Spread
from lab.runs import Options
from lab.tabular import Table, total_variation

from tba_hpc.config import BufferSection, LearningRate, TrainSection, load_config
from tba_hpc.run.directory import RunDir
from tba_hpc.run.evaluations import Evaluation, write_evaluation

REPOSITORY = Path(__file__).parents[1]


def test_time_to_a_threshold_lies_on_the_line_between_two_evaluations() -> None:
    curve = [(2.0, 0.5), (4.0, 0.7), (6.0, 0.6), (8.0, 0.9)]
    assert curves.time_to(curve, 0.6) == pytest.approx(3.0)
    assert curves.time_to(curve, 0.8) == pytest.approx(6 + 2 * 2 / 3)
    assert curves.time_to(curve, 0.4) == 2.0  # no later than its first point
    assert curves.time_to(curve, 0.95) is None


def test_the_last_part_of_a_curve() -> None:
    curve = [(0.0, 0.2), (1.0, 0.9), (2.0, 0.6), (3.0, 0.8), (4.0, 0.7), (5.0, 0.9)]
    assert curves.last_part(curve, 1 / 3) == [0.7, 0.9] and curves.last_part(curve, 0.1) == [0.9]


def test_pace_by_hand() -> None:
    """Steps 2 to 6 in 10 s, and 5 to 10 in 5."""
    slow, fast = Paced([(1.0, 2), (7.0, 3), (11.0, 6)], 1.0, 40.0), Paced([(0.0, 5), (5.0, 10)], 0.0, None)
    assert slow.seconds == 2.5 and fast.seconds == 1.0
    found = pace.result({"slow": [slow, slow], "fast": [fast, slow]})
    (panel,), (first, second) = found.panels, found.rows
    assert panel.series[0].curves[0] == [(0.0, 0), (6.0, 1), (10.0, 4)], "all begin at 0"
    assert str(first["÷ the first"]) == "1 ± 0" and str(first["tokens/s"]) == "40 ± 0"
    assert second["÷ the first"] == Spread([0.4, 1.0]) and second["tokens/s"] == Spread([None, 40.0])


def test_spread_counts_the_seeds_that_reached_something() -> None:
    assert str(Spread([10.0, None, 14.0])) == "12 ± 2.83 (2 of 3)"
    assert str(Spread([1234.5])) == "1,234" and str(Spread([None])) == "–"


def write_lines(path: Path, records: Sequence[dict[str, object]]) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def test_course_of_a_run(tmp_path: Path) -> None:
    """Weights in use at 102 s, steps every 3 s from 105 s; an evaluation is 50 of an engine's 25 tokens/s."""
    config = load_config(REPOSITORY / "configs/quickstart.yaml", [f"run.root={tmp_path}"])
    run = RunDir.create(config)
    write_lines(
        run.metrics_file("trainer"),
        [{"time": 100.0, "event": "started", "step": 0}]
        + [{"time": 102.0 + 3 * step, "step": step} for step in range(1, 5)],
    )
    write_lines(
        run.metrics_file("searcher", 0),
        [
            {
                "time": 104.0,
                "search/tokens": 100,
                "search/tokens_per_second": 20.0,
                "search/busy_share": 0.8,
                "search/propagation_seconds": 2.0,
            }
        ],
    )
    for step, correct in ((2, 1), (4, 3)):
        part = Evaluation(split="validation", step=step, correct=correct, total=4, tokens=50, truncated=0)
        write_evaluation(run, 0, 1, part)
    course = curves.course_of(run)
    assert course.over_seconds == [(6.0, 0.25), (12.0, 0.75)]
    assert course.over_steps == [(2.0, 0.25), (4.0, 0.75)]
    assert curves.course_of(run, evaluations_count=False).over_seconds == [(6.0, 0.25), (10.0, 0.75)]


def course(*points: tuple[float, float]) -> Course:
    """Ten steps to a second."""
    return Course([(seconds, 10 * seconds, value) for seconds, value in points])


def test_times_of_the_arms_and_their_ratios() -> None:
    ours = {0: course((1, 0.5), (2, 0.9)), 1: course((1, 0.5), (2, 0.7)), 2: course((1, 0.4))}
    theirs = {0: course((2, 0.5), (5, 0.9)), 1: course((2, 0.5), (4, 0.7)), 2: course((9, 0.8))}
    comparison = replace(asynchrony.QUICK, thresholds=(0.5, 0.7, 0.9))
    best = {asynchrony.ASYNCHRONOUS: 1e-4, asynchrony.PEER: 2e-4}
    result = comparison.result(best, {asynchrony.ASYNCHRONOUS: ours, asynchrony.PEER: theirs})
    _, peer = result.rows
    assert peer["rate"] == "0.0002"
    assert peer["s to 90 %"] == Spread([5.0, None, None])
    assert peer["steps to 90 %"] == Spread([50.0, None, None])
    assert peer["÷ asynchronous"] == Spread([2.5, 2.0, None])  # to 90 %, to 70 %; ours got no further


def test_the_best_rate_is_the_first_at_the_highest_threshold_that_any_reaches() -> None:
    slow, fast, poor = course((4, 0.8), (6, 0.85)), course((2, 0.8)), course((1, 0.6))
    assert asynchrony.best_rate({1e-5: slow, 1e-4: fast, 1e-3: poor}, (0.5, 0.8, 0.9)) == 1e-4
    assert asynchrony.best_rate({1e-5: slow, 1e-4: fast, 1e-3: poor}, (0.5, 0.85)) == 1e-5
    assert asynchrony.best_rate({1e-5: slow, 1e-4: fast, 1e-3: poor}, (0.9,)) == 1e-5  # by its end


def test_a_course_ends_with_its_last_three_evaluations() -> None:
    assert course((1, 0.0), (2, 0.6), (3, 0.9), (4, 0.6)).end == pytest.approx(0.7)


def test_table_and_plot_are_made_again_from_the_json_alone(tmp_path: Path) -> None:
    """To the byte, the plot too."""
    lines = [results.Series(f"arm {i}", [[(0, 1.5), (40, 2.0)], [(0, 0.5), (20, 3.0)]]) for i in range(8)]
    panels = [
        results.Panel("step", "pass@1", lines, "a", level=1.0),
        results.Panel("seconds", "pass@1", lines, "b", banded=False, logarithmic=True),
    ]
    rows = [
        {"arm": "a", "time": Spread([1.0, None]), "n": 3, "x": 0.25},
        dict.fromkeys(("arm", "time", "n", "x")),
    ]
    origin = results.provenance([0, 1])
    note = "A note of many words, longer than a line of the file would be." * 3
    text = results.write(Result(rows, panels, [note]), tmp_path / "a", title="A", origin=origin)
    source = tmp_path / "a" / "table.json"
    experiments.main(["pace", "--from", str(source), "--out", str(tmp_path / "b")])
    for name in ("table.md", "table.json", "plot.png"):
        assert (tmp_path / "b/pace" / name).read_bytes() == (tmp_path / "a" / name).read_bytes()
    assert (tmp_path / "a/table.md").read_text() == text
    assert "| a | 1 (1 of 2) | 3 | 0.25 |" in text and f"- {note}" in text
    assert f"{origin['machine']}; {origin['date']}" in text and "seeds 0, 1" in text


def test_the_mean_of_curves_that_were_evaluated_at_different_steps() -> None:
    x_X, y_CX = results.Series("a", [[(0, 0.0), (10, 1.0)], [(0, 1.0), (5, 3.0), (10, 3.0)]]).band
    assert x_X.tolist() == [0, 5, 10]
    assert y_CX.mean(0).tolist() == [0.5, 1.75, 2.0]


@pytest.mark.parametrize("name", experiments.EXPERIMENTS)
def test_every_arm_of_every_experiment_can_be_configured(name: str, tmp_path: Path) -> None:
    assert len(experiments.EXPERIMENTS[name].arms(Options(tmp_path))) >= 3


def test_too_few_steps_for_a_curve_are_refused_before_anything_runs(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="--steps 4 ends before the first evaluation, at step"):
        experiments.EXPERIMENTS["asynchrony"].measure(Options(tmp_path, steps=4))
    assert not list(tmp_path.iterdir())


# --- In lockstep ---


@pytest.mark.parametrize("seed", [0, 1])
def test_trajectory_balance_reaches_the_exact_posterior_at_a_staleness_of_50(seed: int) -> None:
    table, beta = Table(seed=seed), 0.25
    train = TrainSection(
        objective={"name": "trajectory_balance", "log_z": "policy"},  # a buffer of all ages, see there
        steps=300,
        prompts_per_step=4,
        completions_per_prompt=16,
        learning_rate=LearningRate(peak=0.1, schedule="linear"),
    )
    train = train.model_copy(update={"beta": ((0, beta),)})
    setup = Setup(
        table=table,
        train=train,
        buffer=BufferSection(most_on_policy=0.5),
        sync_every=50,
        groups_per_step=4,
        completions=32,
        seed=seed,
    )
    *_, last = lockstep.train(setup, every=300)
    assert last.staleness >= 50
    assert total_variation(last.policy_PC, table.optimum(beta)).max() <= 1e-3


@pytest.mark.parametrize("ahead, oldest", [(False, 9), (True, 4)])
def test_without_a_buffer_the_lag_is_exact(ahead: bool, oldest: int) -> None:
    train = TrainSection(steps=20, prompts_per_step=2, completions_per_prompt=4)
    setup = Setup(
        table=Table(), train=train, buffer=None, sync_every=5, groups_per_step=2, completions=4, ahead=ahead
    )
    *_, last = lockstep.train(setup, every=20)
    assert last.staleness == oldest
    assert last.trajectories == 20 * 2 * 4


def test_rewarded_words_lie_apart_and_diversity_is_that_of_all_pairs() -> None:
    table = SparseTable(prompts=1, letters=3, length=4, modes=3, seed=1)
    words = [table.completions[i] for i in table.modes_PM[0]]
    assert all((a != b).sum() > 2 for a, b in product(words, words) if a is not b)
    assert table.reward_PC.sum() == 3 and all(table.reward_PC[0, table.modes_PM[0]] == 1)
    probability_C = table.probabilities(table.ref_logits_PSV)[0]
    padded = [np.pad(tokens, (0, 4 - len(tokens)), constant_values=table.eos) for tokens in table.completions]
    apart = np.array([[(a != b).mean() for b in padded] for a in padded])
    assert sparse.diversity(table, probability_C) == pytest.approx(probability_C @ apart @ probability_C)
