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
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from tba_hpc.run.directory import RunDir
from tba_hpc.run.metrics import read_metrics

from .test_run import assert_whole, finish, stop, tba, wait_for
from .test_run import steps_done as steps_of
from .test_run import trainer_events as events_of

pytestmark = pytest.mark.system

NAME = "quickstart-seed0"
STEPS, SAMPLES = 16, 20
SETTINGS = [
    f"train.steps={STEPS}",
    "checkpoint.every=4",
    "buffer.initial_completions=64",
    f"generator.completions_per_prompt={SAMPLES}",
    "evaluate.every=5",
    "evaluate.validation_prompts=16",
    "evaluate.test_prompts=64",
    "launch.timeout_seconds=60",
    "launch.searchers=1",  # two processes that each start takes less
]


def start(model: Path, root: Path, *settings: str) -> subprocess.Popen[str]:
    """Start the quickstart, or go on with it."""
    pairs = [f"model.path={model}", f"run.root={root}", *SETTINGS, *settings]
    return tba("run", "configs/quickstart.yaml", *(word for pair in pairs for word in ("--set", pair)))


def run_to_end(model: Path, root: Path, *settings: str) -> RunDir:
    """A run that must finish, whole; its directory."""
    code, out, err = finish(start(model, root, *settings))
    assert code == 0, out + err
    run = RunDir.open(root / NAME)
    assert_whole(run, STEPS, SAMPLES)
    return run


def steps_done(root: Path) -> int:
    """Optimizer steps in the metrics so far."""
    return steps_of(root, NAME)


def trainer_events(root: Path) -> list[object]:
    """Events in the trainer's metrics so far."""
    return events_of(root, NAME)


def test_stopped_by_ctrl_c_and_resumed_over_mpi(model: Path, tmp_path: Path) -> None:
    """Its model loads by the libraries' own means, and is another than at first."""
    process = start(model, tmp_path)
    wait_for(lambda: steps_done(tmp_path) >= 5, process)
    stop(process)
    assert 5 <= steps_done(tmp_path) < STEPS
    run = run_to_end(model, tmp_path)
    assert "resumed" in trainer_events(tmp_path) and trainer_events(tmp_path)[-1] == "finished"
    policy = AutoModelForCausalLM.from_pretrained(run.export)
    assert AutoTokenizer.from_pretrained(run.export).eos_token_id is not None
    old = AutoModelForCausalLM.from_pretrained(model).state_dict()
    assert any(not torch.equal(tensor, old[name]) for name, tensor in policy.state_dict().items())


def test_over_files_that_hold_what_has_changed(model: Path, tmp_path: Path) -> None:
    """bfloat16 at a small rate; the engine dies amid changes, and the next one gets the weights due."""
    settings = ("exchange.transport=files", "exchange.delta=always", "model.dtype=bfloat16", "train.steps=40")
    process = start(model, tmp_path, *settings, "train.learning_rate.peak=1e-6", "evaluate.every=30")
    run = RunDir(tmp_path / NAME)
    wait_for(lambda: any(run.weights.glob("*.changes")) and steps_done(tmp_path) > 4, process)
    (engine,) = [
        child
        for child in psutil.Process(process.pid).children(recursive=True)
        if "tba_hpc.engine.engine_process" in child.cmdline()
    ]
    engine.kill()
    code, out, err = finish(process)
    assert code == 0, out + err
    assert_whole(run, 40, SAMPLES)
    records = read_metrics(run.metrics_file("searcher", 0))
    assert max(record.get("search/rebuilds", 0) for record in records) == 1
    assert max(record.get("search/version", 0) for record in records) == 40


def test_an_adapter_is_trained_killed_and_goes_on(model: Path, tmp_path: Path) -> None:
    """LoRA all through, over files; that engines have the adapter is what the evaluations' gaps say."""
    settings = ("model.lora={rank: 4}", "train.learning_rate.peak=5.0e-4", "exchange.transport=files")
    process = start(model, tmp_path, *settings)
    wait_for(lambda: "checkpoint" in trainer_events(tmp_path), process)
    process.kill()
    process.communicate()
    run = run_to_end(model, tmp_path, *settings)
    assert "resumed" in trainer_events(tmp_path)

    records = read_metrics(run.metrics_file("searcher", 0))
    gaps = [float(str(record["search/engine_gap"])) for record in records if "search/engine_gap" in record]
    assert gaps and max(gaps) < 1e-5
    before, after = (load_file(folder / "model.safetensors") for folder in (model, run.export))
    changed = {name for name, tensor in after.items() if not torch.equal(tensor, before[name])}
    assert changed == {name for name in after if "_proj" in name}
    assert (run.export / "adapter" / "adapter_model.safetensors").is_file()
