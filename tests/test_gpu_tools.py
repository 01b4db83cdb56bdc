"""The tools for GPUs, on a CPU with tiny models: every stage runs, and keeps its figures when it fails."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def acceptance(out: Path, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "tools/gpu_acceptance.py"), "--tiny", "--out", str(out), *words]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", **variables}
    return subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment)


def figures(out: Path, stage: str) -> dict[str, object]:
    """By their name; of a stage that went well."""
    record = json.loads((out / f"{stage}.json").read_text())
    assert record["state"] == "ok" and record["tiny"] and record["seconds"] > 0, record
    return {figure["what"]: figure["value"] for figure in record["figures"]}


def test_what_is_installed(tmp_path: Path) -> None:
    done = acceptance(tmp_path, "installation")
    found = figures(tmp_path, "installation")
    assert done.returncode == 0 and found["GPUs"] == 0 and found["torch"]
    assert found["workers can be forked after a look at the GPUs"] is True
    assert f"torch: {found['torch']}" in done.stdout


@pytest.mark.engine
def test_the_engine_agrees_better_with_the_learner_where_logits_are_float32(tmp_path: Path) -> None:
    assert acceptance(tmp_path, "engine").returncode == 0
    found = figures(tmp_path, "engine")
    gaps = [
        found[f"log-probability, engine less learner, logits in {dtype}: standard deviation"]
        for dtype in ("float32", "bfloat16")
    ]
    assert 0 < gaps[0] < gaps[1]


@pytest.mark.engine
def test_the_learner(tmp_path: Path) -> None:
    assert acceptance(tmp_path, "learner").returncode == 0
    assert {"optimizer step", "peak memory", "peak memory ÷ the planner's"} <= figures(
        tmp_path, "learner"
    ).keys()


@pytest.mark.engine
def test_live_weights(tmp_path: Path) -> None:
    assert acceptance(tmp_path, "reload").returncode == 0
    found = figures(tmp_path, "reload")
    assert found["all completions are of the newest weights"] is True
    assert found["log-probability under the new weights, engine less learner: mean"] < 0.05


@pytest.mark.engine
def test_changed_weights_and_kept_caches(tmp_path: Path) -> None:
    assert acceptance(tmp_path, "delta", "keep_kv").returncode == 0
    found = figures(tmp_path, "delta")
    assert 0 < found["weights that a step at 1e-6 changes"] < 0.25 and 0 < found["bytes ÷ all"] < 1
    assert found["applied, they are the new weights to the bit"] is True
    found = figures(tmp_path, "keep_kv")
    for name in ("caches kept", "caches computed anew"):
        assert found[f"generation, {name}"] > 0 and found[f"loads meanwhile, {name}"] > 0


@pytest.mark.system
def test_a_whole_run(tmp_path: Path) -> None:
    """Of the three stages that are one; runs as such are the business of ``system/``."""
    done = acceptance(tmp_path, "shared")
    assert done.returncode == 0, done.stderr
    found = figures(tmp_path, "shared")
    assert found["steps"] == 4 and found["published ÷ all weights"] < 1


@pytest.mark.engine
def test_the_bench_saves_each_row_as_it_comes(tmp_path: Path) -> None:
    assert acceptance(tmp_path, "bench").returncode == 0
    found = figures(tmp_path, "bench")
    names = (
        "matrix product",
        "optimizer step",
        "peak memory",
        "weights copied",
        "reference",
        "weights loaded",
    )
    assert [any(what.startswith(name) for what in found) for name in names] == [True] * 6


@pytest.mark.engine
def test_a_stage_that_fails_keeps_what_it_has_and_costs_no_other(tmp_path: Path) -> None:
    """vLLM cannot read a variable of its own; the weights were weighed before."""
    done = acceptance(tmp_path, "reload", "installation", VLLM_CPU_KVCACHE_SPACE="none")
    assert done.returncode == 1 and "reload: failed" in done.stdout and "installation: ok" in done.stdout
    record = json.loads((tmp_path / "reload.json").read_text())
    assert record["state"].startswith("failed: ConfigError: vLLM cannot serve model.path=")
    assert [figure["what"] for figure in record["figures"]] == ["weights", "one copy to the device"]
    assert figures(tmp_path, "installation")["GPUs"] == 0


def test_an_unknown_stage_is_refused(tmp_path: Path) -> None:
    refused = acceptance(tmp_path, "engines")
    assert refused.returncode == 2 and "no stage engines: there are installation, engine" in refused.stderr
