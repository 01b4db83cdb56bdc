"""The acceptance test for GPUs, on a CPU with tiny models: stages run, and failed ones keep their figures."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import gpu_acceptance
import pytest
from forks import fork

from tba_hpc.config import load_config

ROOT = Path(__file__).parents[1]


def figures(out: Path, stage: str) -> dict[str, object]:
    """By their name; of a stage that went well."""
    record = json.loads((out / f"{stage}.json").read_text())
    assert record["state"] == "ok" and record["tiny"] and record["seconds"] > 0, record
    return {figure["what"]: figure["value"] for figure in record["figures"]}


def inside(stage: str, out: Path) -> dict[str, object]:
    """The figures of a stage, without the command that keeps each in a process of its own."""
    process = fork(gpu_acceptance.run_inside, stage, out, True)
    process.join(600)
    assert process.exitcode == 0
    return figures(out, stage)


def test_the_command_runs_a_stage_and_prints_its_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu_acceptance.py", "--tiny", "--out", str(tmp_path), "installation"])
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(SystemExit) as end:
        gpu_acceptance.main()
    assert end.value.code == 0
    found = figures(tmp_path, "installation")
    assert found["GPUs"] == 0 and found["workers can be forked after a look at the GPUs"] is True
    assert f"torch: {found['torch']}" in capfd.readouterr().out


@pytest.mark.engine
def test_the_stage_of_a_learner(tmp_path: Path) -> None:
    found = inside("learner", tmp_path)
    assert {"optimizer step", "peak memory ÷ the planner's", "weights copied out ÷ copy"} <= found.keys()


@pytest.mark.engine
def test_the_stage_of_engines(tmp_path: Path) -> None:
    """They agree better with the learner if logits are float32, also under new weights."""
    found = inside("engine", tmp_path)
    gaps = [
        found[f"log-probability, engine less learner, logits in {dtype}: standard deviation"]
        for dtype in ("float32", "bfloat16")
    ]
    assert 0 < gaps[0] < gaps[1]
    assert found["all completions are of the newest weights"] is True
    assert found["log-probability under the new weights, engine less learner: mean"] < 0.05


@pytest.mark.parametrize("tiny", [True, False])
@pytest.mark.parametrize("name", ["quickstart", "shared", "several"])
def test_configs_of_the_stages_that_are_runs(name: str, tiny: bool, tmp_path: Path) -> None:
    config, *changes = gpu_acceptance.run_of(name, tmp_path, tiny)
    assert load_config(ROOT / config, changes).train.steps == (
        80 if (name, tiny) == ("quickstart", False) else 4
    )


@pytest.mark.system
def test_a_stage_starts_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the enumerable model; runs of language models are the business of ``system/``."""
    monkeypatch.delenv("PYTHONPATH", raising=False)
    stage = gpu_acceptance.Stage("shared", tmp_path, True, tmp_path)
    summary = gpu_acceptance.train(stage, "tools/tabular.yaml", "train.steps=4", "checkpoint.every=4")
    stage.note_summary(summary)
    assert stage.figures[0] == {"what": "steps", "value": 4, "unit": ""}


def test_a_stage_that_fails_keeps_its_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(stage: gpu_acceptance.Stage) -> None:
        stage.note("before", 1, "s")
        raise ValueError("no more\nof this")

    monkeypatch.setitem(gpu_acceptance.STAGES, "broken", broken)
    assert gpu_acceptance.run_inside("broken", tmp_path, tiny=True) == 1
    record = json.loads((tmp_path / "broken.json").read_text())
    assert record["state"] == "failed: ValueError: no more"
    assert record["figures"] == [{"what": "before", "value": 1, "unit": "s"}]


def test_an_unknown_stage_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        gpu_acceptance.parse(["--tiny", "engines"])
    assert "no stage engines: there are installation, engine" in capsys.readouterr().err
