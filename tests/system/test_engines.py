"""Whole runs of a language model as a user types them: vLLM engines, DeepSpeed, a model taught in seconds.

What stops, kills and full disks do to a run is ``test_run.py``'s, whose model is cheaper; other families and
ways to train are ``test_families.py``'s.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tba_hpc.report.data import series
from tba_hpc.run.directory import RunDir
from tba_hpc.run.metrics import Record, read_metrics

from .test_run import assert_whole, finish, stop, tba, wait_for
from .test_run import steps_done as steps_of
from .test_run import trainer_events as events_of

pytestmark = pytest.mark.system

NAME = "quickstart-seed0"
SAMPLES = 20
SETTINGS = [
    "checkpoint.every=4",
    "buffer.initial_completions=64",
    f"generator.completions_per_prompt={SAMPLES}",
    "evaluate.every=5",
    "evaluate.validation_prompts=8",
    "evaluate.test_prompts=16",
    "launch.timeout_seconds=60",
    "launch.searchers=1",  # two processes that each start takes less
]


def start(model: Path, root: Path, *settings: str) -> subprocess.Popen[str]:
    """Start the quickstart, or go on with it."""
    pairs = [f"model.path={model}", f"run.root={root}", *SETTINGS, *settings]
    return tba("run", "configs/quickstart.yaml", *(word for pair in pairs for word in ("--set", pair)))


def steps_done(root: Path) -> int:
    """Optimizer steps in the metrics so far."""
    return steps_of(root, NAME)


def searched(run: RunDir) -> list[Record]:
    """Records of the only searcher."""
    return read_metrics(run.metrics_file("searcher", 0))


def trainer_events(root: Path) -> list[object]:
    """Events in the trainer's metrics so far."""
    return events_of(root, NAME)


@pytest.mark.nightly
def test_an_engine_is_killed_and_the_run_stopped_and_resumed(model: Path, tmp_path: Path) -> None:
    """Over files that hold what has changed: bfloat16 at a small rate.

    Each new engine gets the weights due. The model loads by the libraries' own means, and is another than at
    first.
    """
    settings = (
        *("exchange.transport=files", "exchange.max_staleness=8"),
        *("model.dtype=bfloat16", "train.learning_rate.peak=1e-6", "train.steps=24", "evaluate.every=20"),
    )
    process = start(model, tmp_path, *settings)
    run = RunDir(tmp_path / NAME)
    wait_for(lambda: any(run.weights.glob("*.changes")) and steps_done(tmp_path) > 4, process)
    (engine,) = [
        child
        for child in psutil.Process(process.pid).children(recursive=True)
        if "tba_hpc.engine.engine_process" in child.cmdline()
    ]
    engine.kill()
    wait_for(lambda: 1 in series(searched(run), "search/rebuilds"), process)
    stop(process)
    stopped_at = steps_done(tmp_path)
    assert 4 < stopped_at < 24

    code, out, err = finish(start(model, tmp_path, *settings))
    assert code == 0, out + err
    assert_whole(RunDir.open(run.path), 24, SAMPLES)
    assert "resumed" in trainer_events(tmp_path) and trainer_events(tmp_path)[-1] == "finished"
    assert max(series(searched(run), "search/rebuilds")) == 1
    assert max(series(searched(run), "search/version")) == 24
    policy = AutoModelForCausalLM.from_pretrained(run.export)
    assert AutoTokenizer.from_pretrained(run.export).eos_token_id is not None
    old = AutoModelForCausalLM.from_pretrained(model).state_dict()
    assert any(not torch.equal(tensor, old[name]) for name, tensor in policy.state_dict().items())
