"""Commands that batch scripts and people on login nodes type; none of them needs torch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tba_hpc.metrics import MetricsWriter
from tba_hpc.run.directory import RunDir

TBA = str(Path(sys.executable).parent / "tba")
CONFIG = str(Path(__file__).parents[1] / "configs" / "quickstart.yaml")


def tba(*words: str | Path) -> subprocess.CompletedProcess[str]:
    """Run the command to its end."""
    return subprocess.run([TBA, *map(str, words)], capture_output=True, text=True, timeout=60)


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """A run as ``tba create`` makes it, from a model that is a name on a hub."""
    made = tba("create", CONFIG, "--set", "model.path=org/model", "--set", f"run.root={tmp_path}")
    assert made.returncode == 0 and made.stdout == f"{tmp_path}/quickstart-seed0\n", made
    return RunDir.open(tmp_path / "quickstart-seed0")


def test_prepare_sets_the_ranks_of_a_start_and_nothing_else(run: RunDir) -> None:
    done = tba("prepare", run.path, "--set", "launch.trainers=2", "--set", "launch.searchers=6")
    assert done.returncode == 0 and done.stdout == ""
    assert (run.config().launch.trainers, run.config().launch.searchers) == (2, 6)
    assert run.attempt.name == "attempt-001"

    refused = tba("prepare", run.path, "--set", "train.steps=5")
    assert refused.returncode == 2 and "another config: train.steps differs" in refused.stderr
    uneven = tba("prepare", run.path, "--set", "launch.trainers=3")
    assert uneven.returncode == 2 and "use a multiple of 3" in uneven.stderr
    assert run.config().launch.trainers == 2 and run.attempt.name == "attempt-001"


def test_status_tells_how_a_run_stands(run: RunDir) -> None:
    MetricsWriter(run.metrics_file("trainer")).log({"step": 7, "train/reward": 0.25, "buffer/size": 1234})
    shown = json.loads(tba("status", run.path, "--json").stdout)
    assert (shown["state"], shown["step"], shown["steps"], shown["reward"], shown["buffer"]) == (
        *("training", 7, 80, 0.25, 1234),
    )
    table = tba("status", run.path, "--once")
    assert table.returncode == 0 and "7/80" in table.stdout


def test_a_finished_run_says_so_and_is_not_started_again(run: RunDir, tmp_path: Path) -> None:
    assert not run.finished
    run.summary.write_text(json.dumps({"finished": True}))
    assert run.finished
    again = tba("run", run.path, "--json")
    assert again.returncode == 0 and json.loads(again.stdout)["steps"] == 0
    assert not list(run.logs.iterdir())
