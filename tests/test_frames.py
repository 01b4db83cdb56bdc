"""``tba_hpc.read``: tables of runs whose numbers are known, and the notebook that shows them."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import matplotlib
import pytest
from recorded import STEPS, evaluate, new_run, resumed_run
from test_samples import seal
from tiny_models import make_tokenizer

import tba_hpc
from tba_hpc.config import ConfigError
from tba_hpc.core.ports import MEAN_REWARD
from tba_hpc.run.directory import RunDir
from tba_hpc.run.evaluations import Evaluation, write_evaluation

NOTEBOOK = Path(__file__).parents[1] / "docs" / "run-as-tables.ipynb"


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """Resumed once; two trajectories are on disk."""
    run = new_run(tmp_path)
    resumed_run(run)
    seal(run, 0, (0, "four", 1.0, 0, 0.25), (1, "Five", 0.0, 2, -0.5))
    make_tokenizer().save_pretrained(run.export)
    return run


def test_metrics_have_every_step_once(run: RunDir) -> None:
    """Steps 5 and 6 were done again after the resume, with another loss."""
    metrics = tba_hpc.read(run.path).metrics
    assert metrics.index.tolist() == list(range(1, STEPS + 1))
    assert metrics["train/loss"].tolist() == [100.0] * 4 + [float(step) for step in range(5, 11)]


def test_searchers_are_told_apart_and_lie_in_time(run: RunDir) -> None:
    searchers = tba_hpc.read(str(run.path)).searchers
    assert searchers.groupby("searcher")["search/tokens"].sum().to_dict() == {0: 200, 1: 50}
    assert searchers["time"].is_monotonic_increasing


def test_evaluations_have_wilsons_intervals(run: RunDir) -> None:
    evaluations = tba_hpc.read(run.path).evaluations.set_index(["split", "step"])
    assert evaluations["score"].to_dict() == {("test", 0): 0.41, ("test", 10): 0.85, ("validation", 5): 0.6}
    after = evaluations.loc[("test", 10)]
    assert (after.low, after.high) == pytest.approx((0.7672, 0.9069), abs=1e-4)


def test_graded_evaluations_have_the_mean_reward_as_their_score(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    counts = {"correct": 0, "total": 4, "tokens": 9, "truncated": 0, "graded": 4}
    part = Evaluation(split="test", step=10, score_name=MEAN_REWARD, rewards=2.0, squares=1.5, **counts)
    write_evaluation(run, 0, 1, part)
    (found,) = tba_hpc.read(run.path).evaluations.to_dict("records")
    assert (found["score"], found["reward"]) == (0.5, 0.5)
    assert found["high"] - found["low"] == pytest.approx(2 * 1.96 * (0.5 / 3) ** 0.5 / 2, rel=1e-4)
    assert found["correct"] is None and found["ended_score"] is None
    least, most = (1 - 0.5**0.5) / 2, (1 + 0.5**0.5) / 2
    results = {0: least, 1: least, 2: most, 3: most}
    write_evaluation(run, 0, 1, replace(part, step=20, results=results))
    assert tba_hpc.read(run.path).evaluations.iloc[-1][["low", "high"]].tolist() == [least, most]


def test_samples_are_all_there_in_the_order_of_their_weights(run: RunDir) -> None:
    samples = tba_hpc.read(run.path).samples
    assert samples["reward"].tolist() == [1.0, 0.0] and samples["state"].tolist() == ["waiting"] * 2
    assert samples["log_ratio"].tolist() == pytest.approx([0.25, -0.5])


def test_a_run_without_anything_has_empty_tables(tmp_path: Path) -> None:
    run = tba_hpc.read(new_run(tmp_path).path)
    assert len(run.metrics) == len(run.searchers) == len(run.evaluations) == 0
    assert run.config.train.steps == STEPS
    with pytest.raises(ConfigError, match="is not a run directory"):
        tba_hpc.read(tmp_path)


def test_pandas_is_imported_only_for_a_table(run: RunDir) -> None:
    program = (
        "import sys, tba_hpc; from tba_hpc import cli\n"
        f"run = tba_hpc.read({str(run.path)!r})\n"
        "before = 'pandas' in sys.modules; run.metrics; print(before, 'pandas' in sys.modules)"
    )
    told = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert told.stdout.split() == ["False", "True"]


def test_the_notebook_runs(run: RunDir) -> None:
    evaluate(run, "validation", 10, (40, 45))
    matplotlib.use("agg")
    cells = [cell for cell in json.loads(NOTEBOOK.read_text())["cells"] if cell["cell_type"] == "code"]
    names: dict[str, object] = {}
    for cell in cells:
        source = "".join(cell["source"]).replace("runs/quickstart-seed0", str(run.path))
        exec(compile(source, NOTEBOOK.name, "exec"), names)
    assert len(cells) == 5 and names["validation"].score.tolist() == [0.6, 0.85]  # type: ignore[attr-defined]
