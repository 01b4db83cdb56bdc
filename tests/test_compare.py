"""``tba compare``: known runs beside one another; intervals against published ones."""

from __future__ import annotations

import json
import re
from math import nextafter
from pathlib import Path
from typing import Any

import pytest
from recorded import evaluate, new_run, resumed_run, search, step, write
from rich.console import Console
from typed import tba

from tba_hpc.commands.compare import (
    OTHER_SCORES,
    _score_of,
    compare,
    config_rows,
    over_seeds,
    print_comparison,
    remarks,
    score_rows,
    values,
    write_comparison,
)
from tba_hpc.config import parse_config
from tba_hpc.report.estimates import difference, paired_difference, wilson
from tba_hpc.report.plots import overlays, run_line
from tba_hpc.report.tables import print_rows
from tba_hpc.run.directory import RunDir
from tba_hpc.run.evaluations import Evaluation, write_evaluation
from tba_hpc.run.events import log_event


@pytest.fixture
def runs(tmp_path: Path) -> list[RunDir]:
    """One that was resumed and finished, one with another objective and rate under way."""
    first = new_run(tmp_path / "<a>")
    resumed_run(first)
    second = new_run(tmp_path / "b", objective="rloo", learning_rate={"peak": 1e-4})
    write(second.metrics_file("trainer"), [{"time": 1.0, "event": "started", "step": 0}])
    write(second.metrics_file("trainer"), [step(s, 10.0 * s, loss=1.0) for s in range(1, 4)])
    write(second.metrics_file("searcher", 0), [search(5.0, 10, 100)])
    evaluate(second, "test", 0, (20, 21))
    return [first, second]


@pytest.mark.parametrize(
    ("one", "other", "low", "high"),
    [
        ((56, 70), (48, 80), 0.0524, 0.3339),
        ((9, 10), (3, 10), 0.1705, 0.8090),
        ((10, 10), (0, 10), 0.6075, 1.0),
    ],
)
def test_differences_against_published_intervals(
    one: tuple[int, int], other: tuple[int, int], low: float, high: float
) -> None:
    """Newcombe 1998 (Statistics in Medicine 17, 873-890), table II, method 10."""
    found = difference(wilson(*one), wilson(*other))
    assert found.value == pytest.approx(one[0] / one[1] - other[0] / other[1])
    assert (found.low, found.high) == pytest.approx((low, high), abs=5e-5)


@pytest.mark.parametrize(
    ("gaps", "graded", "low", "high"),
    [
        ([1.0] + [-1.0] * 7 + [0.0] * 13, False, -0.508, -0.013),
        ([0.0] * 98, False, -0.0277, 0.0277),
        ([0.5, 1.5, 1.5, 0.5], True, 2 / 3 - 0.7185, 2 / 3 + 0.7185),
        ([0.0] * 98, True, 0.0, 0.0),
        ([1.0] * 4 + [0.0] * 28, True, 4 / 34 - 0.1356, 4 / 34 + 0.1356),  # a sign test: p = .125
        ([2.0, -2.0] * 200, True, -0.1955, 0.1955),
    ],
)
def test_paired_differences_against_intervals_by_hand(
    gaps: list[float], graded: bool, low: float, high: float
) -> None:
    """Of 21 pairs one is won and 7 are lost; none of 98; rewards, of which the last have the error 2/√402."""
    found = paired_difference(gaps, graded=graded)
    assert found.value == pytest.approx(sum(gaps) / len(gaps))
    assert (found.low, found.high) == pytest.approx((low, high), abs=5e-4)


@pytest.mark.parametrize(
    ("prompts", "answered", "paired"), [(b"same", 4, True), (b"other", 4, False), (b"same", 3, False)]
)
def test_answers_to_the_same_prompts_are_compared_in_pairs(
    tmp_path: Path, prompts: bytes, answered: int, paired: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """All of the first run's three right answers of four stay right, and the fourth becomes so."""
    runs = [new_run(tmp_path / name) for name in ("a", "b")]
    for run, text, total in zip(runs, (b"same", prompts), (4, answered), strict=True):
        run.inputs.mkdir(exist_ok=True)
        (run.inputs / "test.crc32").write_bytes(text)
        for at in (0, 10):
            results = {prompt: float(run is runs[1] or prompt > 0) for prompt in range(total)}
            counts = {"correct": int(sum(results.values())), "total": total, "tokens": 9, "truncated": 0}
            part = Evaluation(split="test", step=at, results=results, **counts)  # type: ignore[arg-type]
            write_evaluation(run, 0, 1, part)
    compared = compare([run.path for run in runs])
    independent = difference(wilson(answered, answered), wilson(3, 4))
    assert compared[1].gain == (
        paired_difference([1.0, 0.0, 0.0, 0.0], graded=False) if paired else independent
    )
    assert values(compared)["runs"][compared[1].name]["paired"] is paired
    print_comparison(compared)
    assert "+25.0 points" in capsys.readouterr().out
    (difference_row,) = (row for row in score_rows(compared) if "minus" in row["figure"])
    assert difference_row[compared[1].name].endswith(", paired, 1 of 4 differ") is paired


@pytest.mark.parametrize(("unjudged", "paired"), [(0, True), (1, False)])
def test_graded_runs_are_compared_in_pairs_only_if_every_answer_has_a_reward(
    tmp_path: Path, unjudged: int, paired: bool
) -> None:
    """An answer that could not be judged has the result 0, as of a task without rewards."""
    runs = [new_run(tmp_path / name) for name in ("a", "b")]
    for run, lacking in zip(runs, (0, unjudged), strict=True):
        run.inputs.mkdir(exist_ok=True)
        (run.inputs / "test.crc32").write_bytes(b"same")
        for at in (0, 10):
            results = {prompt: 0.5 if prompt >= lacking else 0.0 for prompt in range(4)}
            counts = {"correct": 0, "total": 4, "tokens": 9, "truncated": 0, "graded": 4 - lacking}
            sums = {"rewards": sum(results.values()), "squares": sum(one**2 for one in results.values())}
            part = Evaluation(split="test", step=at, results=results, **counts, **sums)  # type: ignore[arg-type]
            write_evaluation(run, 0, 1, part)
    assert compare([run.path for run in runs])[1].gaps == ([0.0] * 4 if paired else [])


def test_only_what_differs_is_told_but_names_and_places(runs: list[RunDir]) -> None:
    rows = {row.pop("key"): list(row.values()) for row in config_rows(compare([run.path for run in runs]))}
    assert rows["train.objective.name"] == ["trajectory_balance", "rloo"]
    assert rows["train.learning_rate.peak"][1] == "0.0001"
    assert not {"run.name", "run.root", "train.steps", "model.path"} & rows.keys()


def test_defaults_of_a_reward_that_another_run_lacks_are_not_told(tmp_path: Path) -> None:
    """Unless one of the runs has another value."""
    right, short = {"program": ["right"]}, {"program": ["short"], "weight": 0.5}
    rewards = ({"right": right}, {"right": {**right, "seconds": 60}, "short": short})
    paths = []
    for seed, several in enumerate(rewards):
        task = {"name": "jsonl", "train_file": "x", "reward": several}
        tree = {"run": {"root": str(tmp_path), "seed": seed}, "model": {"path": "m"}, "task": task}
        paths.append(RunDir.create(parse_config(tree)).path)
    rows = {row.pop("key"): list(row.values()) for row in config_rows(compare(paths))}
    assert rows == {
        "run.seed": ["0", "1"],
        "task.reward.right.seconds": ["30.0", "60.0"],
        "task.reward.short.program": ["null", "[short]"],
        "task.reward.short.weight": ["null", "0.5"],
    }


def test_values_that_a_resume_changed_are_shown_in_order(tmp_path: Path) -> None:
    """The first run ends with the rate that the second had throughout; a third went back to its own."""
    runs = [new_run(tmp_path / name, learning_rate={"peak": 1e-4}) for name in ("a", "b", "c")]
    key = "train.learning_rate.peak"
    log_event(runs[0], "changed", keys={key: (5e-4, 1e-4)})
    for pair in ((1e-4, 2e-4), (2e-4, 1e-4)):
        log_event(runs[2], "changed", keys={key: pair})
    (row,) = config_rows(compare([run.path for run in runs]))
    assert list(row.values()) == [key, "0.0005 → 0.0001", "0.0001", "0.0001 → 0.0002 → 0.0001"]


def test_code_that_differs_is_shown_though_the_configs_are_equal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = [new_run(tmp_path / name) for name in ("a", "b")]
    for run, reward in zip(runs, ("1.0", "0.5"), strict=True):
        (run.modules / "deep").mkdir(parents=True)
        (run.modules / "mine.py").write_text(f"def f(completion): return {reward}")
        (run.modules / "deep/same.py").write_text("")
    compared = compare([run.path for run in runs])
    (row,) = config_rows(compared)
    assert list(row.values()) == ["modules/mine.py", "5fab18bf", "6dccd338"]
    print_comparison(compared)
    assert "a difference of scores may be one of their rewards" in capsys.readouterr().out
    assert not remarks([compared[0], compared[0]])


def test_paths_are_shown_whole_and_without_parents(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The third path is the first one's; the terminal has no room for one in a line."""
    folder = "/projects/a-folder-with-a-long-name"
    paths = [f"{folder}/tba/../models/{name}" for name in ("base", "chat")] + [f"{folder}/models/base"]
    runs = [new_run(tmp_path / str(i), model={"path": path}).path for i, path in enumerate(paths)]
    (row,) = config_rows(compare(runs))
    plain = [f"{folder}/models/{name}" for name in ("base", "chat", "base")]
    assert list(row.values()) == ["model.path", *plain]
    assert config_rows(compare([runs[0], runs[2]])) == []
    print_rows([{"model.path": plain[1]}], console=Console(width=30))
    _, *lines = capsys.readouterr().out.split()
    assert len(lines) == 2 and "".join(lines) == plain[1]


def test_scores_have_intervals_and_the_difference_to_the_first(runs: list[RunDir]) -> None:
    evaluate(runs[1], "test", 3, (25, 25))
    first, second = compare([run.path for run in runs])
    assert first.summary.score_before == second.summary.score_before == wilson(41, 100)
    assert first.gain is None
    assert second.summary.score_after == wilson(50, 100)
    assert second.gain == difference(wilson(50, 100), wilson(85, 100))
    found = values([first, second])
    assert found["runs"][second.name]["gain"]["value"] == pytest.approx(-0.35)
    rows = [list(row.values()) for row in score_rows([first, second])][:3]
    assert [name for name, *_ in rows] == ["pass@1 before", "pass@1 after", "pass@1 after, minus the first"]
    assert rows[2][1] == "–" and rows[2][2].startswith("−35.0 points (")


def test_runs_that_differ_only_in_their_seeds_have_a_mean(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """50, 60 and 70 % right; another run has another rate, and a fifth has not finished."""
    paths = []
    for seed, (right, rate) in enumerate([(50, 1e-4), (60, 1e-4), (70, 1e-4), (90, 2e-4), (80, 1e-4)]):
        run = new_run(tmp_path, seed=seed, learning_rate={"peak": rate})
        evaluate(run, "test", 0, (20, 21))
        evaluate(run, "test", 10, (right - 25, 25))
        if right != 80:
            run.mark_finished()
        paths.append(run.path)
    compared = compare(paths)
    (sentence,) = over_seeds(compared)
    assert sentence == (
        "known, seeds 0, 1, 2: pass@1 after is 60.0 % on average, with a standard deviation of 10.0 points"
    )
    print_comparison(compared)
    assert sentence in capsys.readouterr().out
    assert over_seeds(compared[2:]) == []


def test_equal_scores_look_equal_whatever_the_order_of_their_sums(tmp_path: Path) -> None:
    runs = [new_run(tmp_path / name) for name in ("a", "b")]
    counts = {"correct": 0, "total": 400, "tokens": 9, "truncated": 0, "graded": 400, "squares": 200.0}
    for run, rewards in zip(runs, (229.0, nextafter(229.0, 0.0)), strict=True):
        for at in (0, 10):
            part = Evaluation(split="test", step=at, rewards=rewards, **counts)  # type: ignore[arg-type]
            write_evaluation(run, 0, 1, part)
    compared = compare([run.path for run in runs])
    assert {run.data.show(run.data.evaluated("test")[0].rewards / 400) for run in compared} == {"0.573"}
    before, after, gain, *_ = (list(row.values())[1:] for row in score_rows(compared))
    assert before == after == [before[0]] * 2 and before[0].startswith("0.573 (")
    assert gain[1].startswith("+0.000 (")


def test_scores_of_different_rewards_have_no_difference(runs: list[RunDir]) -> None:
    evaluate(runs[1], "test", 3, (25, 25))
    first, second = compare([run.path for run in runs])
    assert second.gain and _score_of(first.data) == _score_of(second.data)
    assert OTHER_SCORES not in remarks([first, second])
    second.data.config = parse_config({"model": {"path": "m"}, "task": {"name": "math"}})
    assert _score_of(first.data) != _score_of(second.data)
    assert OTHER_SCORES in remarks([first, second])


def test_a_run_that_has_no_last_evaluation_has_none(
    runs: list[RunDir], capsys: pytest.CaptureFixture[str]
) -> None:
    compared = compare([run.path for run in runs])
    assert compared[1].summary.score_after is compared[1].gain is None
    print_comparison(compared)
    text = capsys.readouterr().out
    assert re.search(r"optimizer steps +10, unfinished +3, unfinished", text)


def test_curves_lie_over_each_other_in_the_colours_of_the_page(runs: list[RunDir]) -> None:
    plots = overlays([run.data for run in compare([run.path for run in runs])])
    assert {"pass@1", "Reward", "Loss", "Staleness"} == {plot.title for plot in plots}
    loss = next(plot.svg for plot in plots if plot.title == "Loss")
    assert "var(--blue)" in loss and "var(--orange)" in loss
    notes = {plot.title: plot.note for plot in plots}
    assert notes["Staleness"] == "optimizer steps, of a batch: first token", "the only line that is drawn"
    assert len({run_line(i) for i in range(12)}) == 12


def test_rewards_with_names_lie_over_each_other_in_a_plot_each(runs: list[RunDir]) -> None:
    """The second run has none of the second name."""
    for run, names in zip(runs, (("right", "short", "a", "b", "c"), ("right",)), strict=True):
        rewards = {f"reward/{name}": 0.5 for name in names}
        write(run.metrics_file("searcher", 0), [search(5.0, 10, 100, version=1, **rewards)])
    compared = compare([run.path for run in runs])
    titles = [plot.title for plot in overlays([run.data for run in compared])]
    assert [title for title in titles if title.startswith("Reward ")] == (
        ["Reward a", "Reward b", "Reward c", "Reward right"]
    )
    rows = [row["figure"] for row in score_rows(compared) if row["figure"].startswith("reward ")]
    assert rows == ["reward a", "reward b", "reward c", "reward right"]


@pytest.mark.parametrize(
    ("model", "train", "shared"),
    [
        ({}, {"objective": "tba_prime"}, True),
        ({}, {"reference": "behaviour"}, True),
        ({"path": "models/other"}, {}, False),
        ({"logprob_temperature": 0.5}, {}, False),
        ({}, {"reference": {"name": "reset", "every": 2}}, False),
    ],
    ids=str,
)
def test_figures_of_different_references_are_not_put_beside_each_other(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], model: dict[str, object], train: Any, shared: bool
) -> None:
    first, second = new_run(tmp_path / "a"), new_run(tmp_path / "b", model=model, **train)
    for run in (first, second):
        write(run.metrics_file("trainer"), [step(s, 10.0 * s, loss=1.0) for s in range(1, 4)])
        write(run.metrics_file("searcher", 0), [search(5.0, 10, 100, kl=2.5, reward=1.0)])
    compared = compare([first.path, second.path])
    print_comparison(compared)
    text = capsys.readouterr().out
    assert ("KL  " in text) is ("perplexity after" in text) is shared
    assert ("KL and perplexity are left out" in text) is not shared
    write_comparison(tmp_path / "page.html", compared)
    page = (tmp_path / "page.html").read_text()
    assert ("<b>KL</b>" in page) is shared and ("are left out: these runs" in page) is not shared


def test_the_command_answers_in_json_and_wants_two_runs(runs: list[RunDir]) -> None:
    assert len(json.loads(tba("compare", *(run.path for run in runs), "--json").stdout)["runs"]) == 2
    assert "is the only run given" in tba("compare", runs[0].path, runs[0].path).stderr
