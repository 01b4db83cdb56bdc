"""``tba fetch`` from a hub on this machine into a site's cache, which a job without network then reads."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tba_hpc.checks.resources import missing, place
from tba_hpc.config import parse_config
from tba_hpc.core.types import Resource
from tests.hub import hub

WEIGHTS = b"weights"
PROBLEMS = [{"question": f"{i} + 1?", "answer": f"#### {i + 1}"} for i in range(9)]
ROWS = "\n".join(map(json.dumps, PROBLEMS)).encode()
CARD = b"""---
configs:
- config_name: main
  data_files:
  - split: train
    path: main/train.jsonl
  - split: test
    path: main/test.jsonl
---
"""

REPOSITORIES = {
    "models/org/policy": {
        "config.json": b"{}",
        "tokenizer.json": b"{}",
        "model.safetensors.index.json": json.dumps(
            {"weight_map": {"a": "model-a.safetensors", "b": "model-b.safetensors"}}
        ).encode(),
        "model-a.safetensors": WEIGHTS,
        "model-b.safetensors": WEIGHTS,
        "pytorch_model.bin": WEIGHTS,
        "original/consolidated.00.pth": WEIGHTS,
        "onnx/model.onnx": WEIGHTS,
    },
    "models/org/old": {"config.json": b"{}", "pytorch_model.bin": WEIGHTS, "tf_model.h5": WEIGHTS},
    "models/org/empty": {"config.json": b"{}", "flax_model.msgpack": WEIGHTS},
    "datasets/openai/gsm8k": {"README.md": CARD, "main/train.jsonl": ROWS, "main/test.jsonl": ROWS},
}


@pytest.fixture(scope="module")
def address() -> Iterator[tuple[str, list[str]]]:
    with hub(REPOSITORIES) as served:
        yield served


def fetch(tmp_path: Path, address: str, *settings: str) -> subprocess.CompletedProcess[str]:
    """``tba fetch`` for a site whose jobs look in tmp_path/cache."""
    (tmp_path / "site.yaml").write_text(
        yaml.safe_dump({"environment": {"HF_HOME": "$SCRATCH/cache", "HF_HUB_OFFLINE": "1"}})
    )
    (tmp_path / "config.yaml").write_text("{run: {name: it}, model: {path: org/policy}}\n")
    command = [sys.executable, "-m", "tba_hpc", "fetch", "config.yaml", "--site", "site.yaml"]
    command += [word for setting in settings for word in ("--set", setting)]
    quiet = {"HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_DATASETS_DISABLE_PROGRESS_BARS": "1"}
    environment = {**os.environ, **quiet, "SCRATCH": str(tmp_path), "HF_ENDPOINT": address}
    return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=240, env=environment)


def test_a_model_comes_in_one_format_of_weights_and_once(
    tmp_path: Path, address: tuple[str, list[str]]
) -> None:
    url, loaded = address
    first = fetch(tmp_path, url, "task.name=arithmetic")
    snapshot = next((tmp_path / "cache/hub/models--org--policy/snapshots").iterdir())
    assert first.returncode == 0, first
    assert first.stdout == (
        f"  model.path=org/policy: is fetched into {tmp_path}/cache/hub …\n"
        f"  model.path=org/policy: is there, {snapshot}\n"
    )
    assert sorted(file.name for file in snapshot.iterdir()) == [
        *("config.json", "model-a.safetensors", "model-b.safetensors"),
        *("model.safetensors.index.json", "tokenizer.json"),
    ]
    before = len(loaded)
    assert "is there, " in fetch(tmp_path, url, "task.name=arithmetic").stdout
    assert len(loaded) == before, "what is there is not loaded again"
    (snapshot / "model-b.safetensors").unlink()
    assert "is fetched" in fetch(tmp_path, url, "task.name=arithmetic").stdout
    assert (snapshot / "model-b.safetensors").read_bytes() == WEIGHTS


@pytest.mark.root("mounting a small file system")
def test_a_cache_without_room_is_said(tmp_path: Path, address: tuple[str, list[str]]) -> None:
    (tmp_path / "cache").mkdir()
    small = ["mount", "-t", "tmpfs", "-o", "size=8k", "tmpfs", tmp_path / "cache"]
    subprocess.run(small, check=True)
    try:
        done = fetch(tmp_path, address[0], "task.name=arithmetic")
    finally:
        subprocess.run(["umount", tmp_path / "cache"], check=True)
    assert done.returncode == 2
    assert "No space left on device" in done.stdout
    assert "; free space, or set HF_HOME to a folder with more\n" in done.stdout


def test_what_cannot_be_had_is_said_and_the_rest_comes(
    tmp_path: Path, address: tuple[str, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a terminal that has no sign for an ellipsis, too."""
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    options = "{reward_model: org/none, gold_model: org/old}"
    files = [f"task.{split}_file={tmp_path}/{split}.jsonl" for split in ("train", "test")]
    (tmp_path / "train.jsonl").write_text("{}")
    done = fetch(
        tmp_path, address[0], "model.path=org/empty", "task.name=tldr", f"task.options={options}", *files
    )
    assert done.returncode == 2
    assert done.stderr.endswith(
        "tba: something is missing, see above: if it is on the hub, check its name, the network, and "
        "HF_TOKEN for a gated one; if it is a file or folder of yours, make it first, as the config may "
        "explain\n"
    )
    assert f"task.train_file={tmp_path}/train.jsonl: is there, " in done.stdout
    assert f"task.test_file={tmp_path}/test.jsonl: MISSING, no such file here, in {tmp_path}" in done.stdout
    assert f"model.path=org/empty: is fetched into {tmp_path}/cache/hub ?" in done.stdout
    assert "model.path=org/empty: MISSING, the hub has no weights of it" in done.stdout
    assert "task.options.reward_model=org/none: MISSING, RepositoryNotFoundError" in done.stdout
    assert "task.options.gold_model=org/old: is there, " in done.stdout


def test_data_come_as_a_job_without_network_reads_them(
    tmp_path: Path, address: tuple[str, list[str]]
) -> None:
    done = fetch(tmp_path, address[0])
    assert done.returncode == 0, done
    assert f": is fetched into {tmp_path}/cache/datasets …\n" in done.stdout
    config = parse_config({"model": {"path": "org/policy"}})
    offline = {"HF_HOME": f"{tmp_path}/cache", "HF_HUB_OFFLINE": "1"}
    assert missing(config, offline) == []
    program = (
        "from tba_hpc.tasks.data import HubData, usable_rows\n"
        "from huggingface_hub import snapshot_download\n"
        "print(snapshot_download('org/policy', local_files_only=True, ignore_patterns='*'))\n"  # as vLLM asks
        "for split in ('train', 'test'):\n"
        "    data = HubData('openai/gsm8k', 'main', split)\n"
        "    print(usable_rows(data, split, parse=lambda row: row['answer'], wanted='')[-1])"
    )
    read = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, **offline},
    )
    snapshot = place(Resource("model", "model.path", "org/policy"), offline)
    assert read.stdout == f"{snapshot}\n#### 9\n#### 9\n", read.stderr


def test_a_place_that_only_the_nodes_know_is_refused(tmp_path: Path) -> None:
    (tmp_path / "site.yaml").write_text(yaml.safe_dump({"environment": {"HF_HOME": "$NOT_HERE/cache"}}))
    command = [sys.executable, "-m", "tba_hpc", "fetch", "math_gsm8k", "--site", f"{tmp_path}/site.yaml"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2
    assert "HF_HOME=$NOT_HERE/cache of the site file contains a variable that is not set here" in done.stderr


def test_an_environment_that_is_not_on_this_machine_is_named(tmp_path: Path) -> None:
    (tmp_path / "site.yaml").write_text("venv: /none")
    command = [sys.executable, "-m", "tba_hpc", "fetch", "math_gsm8k", "--site", f"{tmp_path}/site.yaml"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "/none/bin/python cannot be started here: set the site key venv to" in done.stderr
