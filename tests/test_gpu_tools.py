"""The acceptance test for GPUs, on a CPU with tiny models: stages run, and failed ones keep their figures."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import gpu_acceptance
import psutil
import pytest
import torch
from forks import fork
from transformers import AutoModelForCausalLM

from tba_hpc.config import load_config
from tba_hpc.learner.adapter import tensors_in

ROOT = Path(__file__).parents[1]
LEAVE = "weights that leave are those before the step"


def figures(out: Path, stage: str) -> dict[str, object]:
    """By their name; of a stage that went well."""
    record = json.loads((out / f"{stage}.json").read_text())
    assert record["state"] == "ok" and record["tiny"] and record["seconds"] > 0, record
    return {figure["what"]: figure["value"] for figure in record["figures"]}


def inside(stage: str, out: Path) -> dict[str, object]:
    """The figures of a stage, without the command that keeps each in a process of its own."""
    process = fork(gpu_acceptance.run_inside, stage, out, True, out)
    process.join(600)
    assert process.exitcode == 0
    return figures(out, stage)


def apart(stage: str, out: Path) -> dict[str, object]:
    """The figures of a stage in a process of its own, as the command starts it."""
    assert gpu_acceptance.run_apart(stage, out, True, out) == "ok"
    return figures(out, stage)


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of all stages: figures, models, runs."""
    return tmp_path_factory.mktemp("acceptance")


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stages in processes of their own use this checkout."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


def test_the_command_runs_a_stage_and_prints_its_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu_acceptance.py", "--tiny", "--out", str(tmp_path), "installation"])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(SystemExit) as end:
        gpu_acceptance.main()
    assert end.value.code == 0
    found = figures(tmp_path, "installation")
    assert found["GPUs"] == 0 and found["workers can be forked after a look at the GPUs"] is True
    assert f"torch: {found['torch']}" in capfd.readouterr().out


@pytest.mark.engine
@pytest.mark.parametrize(
    ("stage", "more"),
    [
        ("learner", {"weights written into shared memory", "peak memory ÷ the planner's", LEAVE}),
        ("published", set()),
    ],
)
def test_the_stages_of_a_learner(out: Path, stage: str, more: set[str]) -> None:
    found = inside(stage, out)
    assert {"optimizer step", "peak memory", *more} <= found.keys()
    assert found.get(LEAVE, True) is True


@pytest.mark.engine
def test_the_stages_of_engines(out: Path) -> None:
    """Ours is compared with vLLM's own, and agrees with the learner."""
    bare = [apart("bare", out), inside("bare_inline", out)]
    ours, eager = inside("engine", out), inside("eager", out)
    rates = [float(str(found["generation"])) for found in (ours, *bare)]
    ratios = [float(str(ours[f"generation ÷ {name}"])) for name in ("bare", "bare_inline")]
    assert ratios == pytest.approx([rates[0] / rates[1], rates[0] / rates[2]]) and min(rates) > 0
    for found in (ours, eager):
        assert 0 < float(str(found["log-probability, engine less learner: largest"])) < 0.05
    assert ours["log-probabilities that are NaN"] == eager["log-probabilities that are NaN"] == 0
    assert ours["sequences at once"] == 16
    assert ours["all completions are of the newest weights"] is True
    assert float(str(ours["log-probability under the new weights, engine less learner: mean"])) < 0.05


def test_shapes_count_the_operations_of_their_models() -> None:
    """Parameters of Qwen2.5-1.5B and Qwen3-0.6B as published, without embeddings: 1.31 and .44 billion."""
    for shape, billions in ((gpu_acceptance.LARGE, 1.31), (gpu_acceptance.LONG, 0.44)):
        tokens = shape.groups * shape.group_size * (shape.prompt + shape.completion)
        head = 6 * shape.vocabulary * shape.hidden * shape.groups * shape.group_size * shape.completion
        attention = 6 * shape.layers * shape.heads * shape.head_size * tokens * (tokens // shape.rows)
        rest = shape.step_flops - head - attention
        assert rest / (6 * tokens) / 1e9 == pytest.approx(billions, rel=0.01)


@pytest.mark.engine
def test_weights_are_taken_bit_by_bit_and_told_from_those_of_a_gpu(out: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(
        gpu_acceptance.make_model(out / "weights", gpu_acceptance.TINY), dtype=torch.bfloat16
    )
    layout, data = gpu_acceptance.weights_of(model)
    for name, tensor in tensors_in(data, layout):
        assert torch.equal(tensor, model.get_parameter(name))


@pytest.mark.parametrize(
    ("visible", "first"), [(None, "0"), ("", "0"), ("3,1", "3"), ("GPU-ab,GPU-c", "GPU-ab")]
)
def test_the_first_gpu_is_the_first_of_those_that_are_given(
    visible: str | None, first: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert gpu_acceptance.first_gpu() == first


@pytest.mark.parametrize("tiny", [True, False])
def test_configs_of_the_stages_that_are_runs(tiny: bool, tmp_path: Path) -> None:
    for config, *changes in (
        gpu_acceptance.sentences("real", tmp_path, tiny),
        [gpu_acceptance.QUICKSTART, *gpu_acceptance.quickstart_settings()],
        [gpu_acceptance.QUICKSTART, *gpu_acceptance.several_settings(tmp_path)],
    ):
        assert load_config(ROOT / config, changes).evaluate.test_prompts == 8


@pytest.mark.system
def test_the_stages_that_kill_a_run_and_go_on_with_it(out: Path) -> None:
    killed = apart("quickstart", out)
    assert killed["killed after step"] > gpu_acceptance.CHECKPOINT_EVERY
    assert float(str(killed["step 1"])) > 0
    resumed = apart("resumed", out)
    assert resumed["steps"] == int(str(killed["killed after step"])) + gpu_acceptance.MORE_STEPS
    assert resumed["attempts"] == 2 and str(resumed["checkpoint"]).endswith("5")
    assert resumed["nothing was lost, doubled or skipped"] is True


@pytest.mark.system
def test_the_stage_of_the_real_model_with_a_tiny_one(out: Path) -> None:
    found = apart("real_lora", out)
    assert found["steps"] == 2 and float(str(found["memory by the planner"])) > 0
    assert float(str(found["log-probability, engine less learner: mean"])) < 0.05


def test_mps_is_started_for_a_block_in_a_private_folder_and_ended_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a program of its name that writes down how it is called, and ends when it is told to quit."""
    program, folder, notes = tmp_path / gpu_acceptance.MPS, tmp_path / "mps", tmp_path / "notes"
    begin = f'echo "$1 $CUDA_VISIBLE_DEVICES." >> {notes}; echo $$ > {folder}/pid; touch {folder}/control'
    end = f'read word; echo "$word" >> {notes}; kill $(cat "$CUDA_MPS_PIPE_DIRECTORY/pid")'
    program.write_text(f'#!/bin/sh\nif [ "$1" ]; then {begin}; exec sleep 60; else {end}; fi\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    before = dict(os.environ)
    with gpu_acceptance.sharing(folder):
        assert os.environ["CUDA_MPS_PIPE_DIRECTORY"] == str(folder) and folder.stat().st_mode & 0o777 == 0o700
        assert psutil.pid_exists(int((folder / "pid").read_text()))
    assert notes.read_text().splitlines() == ["-f .", "quit"] and os.environ == before
    assert not psutil.pid_exists(int((folder / "pid").read_text()))


def test_the_stage_of_mps_says_if_it_is_not_here(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert gpu_acceptance.run_inside("real_mps", out, tiny=True, scratch=out) == 0
    assert figures(out, "real_mps") == {"left out: not found": gpu_acceptance.MPS}


def test_a_stage_that_fails_keeps_its_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(stage: gpu_acceptance.Stage) -> None:
        stage.note("before", 1, "s")
        raise ValueError("no more\nof this")

    monkeypatch.setitem(gpu_acceptance.STAGES, "broken", broken)
    assert gpu_acceptance.run_inside("broken", tmp_path, tiny=True, scratch=tmp_path) == 1
    record = json.loads((tmp_path / "broken.json").read_text())
    assert record["state"] == "failed: ValueError: no more"
    assert record["figures"] == [{"what": "before", "value": 1, "unit": "s"}]


def test_a_stage_that_hangs_is_ended_and_says_so(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert max(gpu_acceptance.STAGE_SECONDS, *gpu_acceptance.SHORTER_SECONDS.values()) <= 90
    monkeypatch.setattr(gpu_acceptance, "STAGE_SECONDS", 0.01)
    assert gpu_acceptance.run_apart("several", out, True, out) == "out of time"
    record = json.loads((out / "several.json").read_text())
    assert record["state"] == "out of time" and record["figures"] == []


def test_an_unknown_stage_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        gpu_acceptance.parse(["--tiny", "engines"])
    assert "no stage engines: there are installation, learner" in capsys.readouterr().err
