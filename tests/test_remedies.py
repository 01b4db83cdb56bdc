"""Comparison of remedies for old data: its arithmetic by hand, and that it follows its protocol."""

from __future__ import annotations

from pathlib import Path

import pytest
from byte_tokenizer import ByteTokenizer
from lab import digits, remedies, replay_cost, second_task, staleness
from lab.results import Result, Spread, to_json
from lab.runs import Options

from tba_hpc.tasks import load_task

PROTOCOL = (Path(remedies.__file__).with_suffix(".md")).read_text()


def test_a_paired_interval_by_hand() -> None:
    """Differences 1 … 5: mean 3, s = √2.5, and 2.776·√(2.5/5) = 1.963 on each side."""
    found = remedies.paired([11.0, 12.0, 13.0, 14.0, 15.0], [10.0] * 5)
    assert found == pytest.approx((3, 3 - 1.963, 3 + 1.963), abs=1e-3)
    assert remedies.paired([2.0, 4.0], [1.0, 5.0]) == pytest.approx((0, -12.706, 12.706))  # ±1: s = √2


def run(*ends: float) -> dict[str, object]:
    return {"curve": [(step, end) for step, end in enumerate((0.1, *ends))], "series": {"ess": [0.5, 0.7]}}


def test_a_row_compares_runs_of_one_seed() -> None:
    found = {
        staleness.TB: [run(0.5, 0.6, 0.7), run(0.2, 0.3, 0.4)],
        "TIS": [run(0.1, 0.2, 0.3), run(0, 0, 0.3)],
    }
    tuning, rates = remedies.in_words({1.25e-4: 31.2, 2.5e-4: 40.0, 5e-4: 12.0}), dict.fromkeys(found, 2.5e-4)
    ours = remedies.row(10, "TIS", tuning, rates, found)
    assert (ours["age"], ours["rate"], ours["tuning, %"]) == ("10 to 19", "0.00025", "31, 40, 12")
    assert ours["pass@1, %"].values == pytest.approx([20, 10]) and ours["ESS"] == Spread([0.6, 0.6])
    assert ours["− TB"] == pytest.approx(-30)  # of −40 and −20: 12.706·10 on each side
    assert ours["95 %"] == "-157.1 … 97.1"
    shipped = remedies.row(10, staleness.TB, tuning, rates, found)
    assert shipped["− TB"] is None and shipped["95 %"] is None


def test_the_protocol_is_what_runs(tmp_path: Path) -> None:
    """Arms, lags, rates, lengths and seeds are those of the protocol; no other figure used these seeds."""
    assert not {*remedies.SEEDS} & {0, 1, 2, staleness.TUNING_SEED}
    said = (
        f"**{', '.join(map(str, remedies.SEEDS))}**",
        f"**{', '.join(map(str, remedies.LAGS))}**",
        f"**{', '.join(f'{rate:g}' for rate in remedies.RATES)}**",
        f"**{remedies.STEPS}** optimizer steps",
        f"**{remedies.TUNING_STEPS}** steps",
    )
    assert [text for text in said if text not in PROTOCOL] == []
    for name, config in remedies.REMEDIES.arms(Options(tmp_path)).items():
        (line,) = (line for line in PROTOCOL.splitlines() if line.startswith(f"| {name} |"))
        assert f"`{config.train.objective.name}`" in line and f"`{config.train.ratio_bound.name}`" in line
        assert ("`score_centering: 32`" in line) == (config.train.score_centering == 32)
        log_z = getattr(config.train.objective, "log_z", None)
        assert log_z is None or f"`log_z: {log_z}`" in line


def test_the_second_task_takes_the_two_best_the_worst_and_tb() -> None:
    """From the JSON of the first comparison, whose rows of other lags do not count."""
    ends = dict(zip(remedies.ARMS, (0.5, 0.1, 0.6, 0.4, 0.3, 0.7, 0.2, 0.35), strict=True))
    found, rates = {name: [run(end, end, end)] for name, end in ends.items()}, dict.fromkeys(ends, 2.5e-4)
    rows = [remedies.row(lag, name, "1, 2, 3", rates, found) for lag in (10, 32) for name in ends]
    other = {name: [run(1 - end, 1 - end, 1 - end)] for name, end in ends.items()}
    rows += [remedies.row(1, name, "1, 2, 3", rates, other) for name in ends]
    first = second_task.by_lag(to_json(Result(rows, []), "first", {}))
    assert second_task.chosen(first) == ["TB", "TB, equation 7", "TB, equation 7, centred", "TIS"]
    assert {lag: float(rows["TIS"]["rate"]) for lag, rows in first.items()} == {10: 2.5e-4, 32: 2.5e-4}


def test_the_second_task_has_room_for_every_answer(tmp_path: Path) -> None:
    """No command makes a row longer by more than a digit; a token is a character or more."""
    longest = digits.Problem("0" * digits.LENGTH[1], ("Echo",) * digits.STEPS[1]).solution()
    configs = second_task.SECOND_TASK.arms(Options(tmp_path))
    assert configs.keys() == remedies.ARMS.keys()
    assert {config.generator.max_tokens > len(longest) for config in configs.values()} == {True}
    task = load_task(configs["TB"].task, ByteTokenizer())
    assert [len(task.prompts(split)) for split in ("train", "validation", "test")] == [2000, 256, 256]


def test_a_row_of_digits_by_hand() -> None:
    problem = digits.Problem("3071", ("Turn", "Clip", "Echo", "Lead"))
    assert problem.question == "Row 3071. Turn. Clip. Echo. Lead.\n"
    assert problem.solution() == "0713;713;7133;77133;#### 77133" and problem.target == "77133"
    undone = digits.Problem("3071", ("Turn", "Roll"))
    assert undone.target == "3071" and {digits.split_of(row) for row in ("3071", "14", "41")} == {
        "train",
        "test",
        "validation",
    }
    for split in ("train", "validation", "test"):
        assert all(digits.split_of(problem.row) == split for problem in digits.draw(split, 50, 0))


def test_replay_counts_what_it_sampled() -> None:
    """32 completions a step against 128; 50 % is reached halfway between steps 100 and 200."""
    figures = {"curve": [(0, 0.1), (100, 0.4), (200, 0.6)], "steps": 200}
    figures |= {"seconds": {"generation": 100.0, "learning": 300.0, "evaluation": 50.0}}
    rates = {1.25e-4: 31.2, 2.5e-4: 40.0}
    ours, queued = (replay_cost.row(name, rates, [figures]) for name in ("m = .5", replay_cost.QUEUE))
    assert ours["steps to 50%"] == queued["steps to 50%"] == Spread([150.0])
    assert ours["samples to 50%"] == Spread([4800.0]) and queued["samples to 50%"] == Spread([19200.0])
    assert ours["core-seconds to 50%"] == Spread([300.0])


def test_the_protocol_of_replay_is_what_runs(tmp_path: Path) -> None:
    protocol = Path(replay_cost.__file__).with_suffix(".md").read_text()
    said = (
        f"**{', '.join(map(str, replay_cost.SEEDS))}**",
        f"**{', '.join(f'{rate:g}' for rate in replay_cost.RATES)}**",
        f"**{replay_cost.STEPS}** steps",
        f"**{replay_cost.TUNING_STEPS}** steps",
        f"every **{replay_cost.LAG}**",
        *(f"**{level:.0%}**".replace("%", " %") for level in replay_cost.LEVELS),
    )
    assert [text for text in said if text not in protocol] == []
    for name, config in replay_cost.REPLAY_COST.arms(Options(tmp_path)).items():
        (line,) = (line for line in protocol.splitlines() if line.startswith(f"| {name} |"))
        size = config.train.prompts_per_step, config.train.completions_per_prompt
        assert size == (replay_cost.GROUPS, replay_cost.COMPLETIONS)
        fresh = replay_cost.GROUPS if name == replay_cost.QUEUE else replay_cost.FRESH_GROUPS
        assert f"| {fresh} groups |" in line and (config.buffer.replay_limit is None) == (fresh == 2)
