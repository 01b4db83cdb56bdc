"""A model's folder that lacks a part, or holds something else, is told before anything loads it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import safetensors.numpy

from tba_hpc.checks.task_check import check
from tba_hpc.config import ConfigError, parse_config
from tba_hpc.core.model_files import fault

TINY = Path(__file__).parent / "data/tiny-model"
POINTER = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'4d' * 32}\nsize 1009384\n"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return shutil.copytree(TINY, tmp_path / "model")


@pytest.fixture
def shards(model: Path) -> Path:
    """The same model with its weights in two files."""
    weights = safetensors.numpy.load_file(model / "model.safetensors")
    (model / "model.safetensors").unlink()
    names = sorted(weights)
    parts = {f"model-0000{i}-of-00002.safetensors": names[i - 1 :: 2] for i in (1, 2)}
    for file, some in parts.items():
        safetensors.numpy.save_file({name: weights[name] for name in some}, model / file)
    listed = {name: file for file, some in parts.items() for name in some}
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": listed}))
    return model


def test_a_whole_model_has_no_fault(model: Path) -> None:
    (model / "pytorch_model.bin").write_bytes(b"")  # whatever it is: no header says what to expect
    assert fault(model) is None


def test_a_part_that_the_index_lists_is_missed(shards: Path) -> None:
    assert fault(shards) is None
    (shards / "model-00002-of-00002.safetensors").unlink()
    assert fault(shards) == "lacks model-00002-of-00002.safetensors, which model.safetensors.index.json lists"


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json", "config.json"])
def test_a_pointer_of_git_lfs_is_no_file(model: Path, name: str) -> None:
    (model / name).write_text(POINTER)
    assert fault(model) == f"holds {name}, a git LFS pointer instead of the file"


@pytest.mark.parametrize(
    ("kept", "found"),
    [
        (1_009_383, "with 1,009,383 of 1,009,384 bytes"),
        (500_000, "with 500,000 of 1,009,384 bytes"),
        (100, "whose 100 bytes are not in safetensors format"),
        (5, "whose 5 bytes are not in safetensors format"),
        (0, "whose 0 bytes are not in safetensors format"),
    ],
)
def test_a_copy_that_was_cut_off_is_told_by_its_size(model: Path, kept: int, found: str) -> None:
    file = model / "model.safetensors"
    file.write_bytes(file.read_bytes()[:kept])
    assert fault(model) == f"holds model.safetensors, {found}"


def test_something_else_is_no_safetensors(model: Path) -> None:
    (model / "model.safetensors").write_text("<!DOCTYPE html><html>Sign in to download" * 99)
    assert fault(model) == "holds model.safetensors, whose 3,960 bytes are not in safetensors format"


def test_the_check_before_a_run_refuses_it(model: Path) -> None:
    (model / "model.safetensors").write_text(POINTER)
    config = parse_config({"model": {"path": str(model)}, "task": {"name": "arithmetic"}})
    sentence = "model holds model.safetensors, a git LFS pointer .*: copy or download the model again"
    with pytest.raises(ConfigError, match=sentence):
        check(config)


def test_weights_that_cannot_be_trained_are_refused_with_the_remedy(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An adapter would be added to the weights by transformers, but not by engines, without a word."""
    config = parse_config({"model": {"path": str(model)}, "task": {"name": "arithmetic"}})
    settings = json.loads((model / "config.json").read_text())
    quantized = settings | {"quantization_config": {"quant_method": "gptq", "bits": 4}}
    (model / "config.json").write_text(json.dumps(quantized))
    with pytest.raises(ConfigError, match=r"model holds quantized weights \(gptq\).*give the same model"):
        check(config)
    (model / "config.json").write_text(json.dumps(settings | {"quantization_config": None}))
    (model / "adapter_config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"model holds a LoRA adapter .*: merge it into its model"):
        check(config)
    cached = model.parent / "hub/models--org--small"
    shutil.copytree(model, cached / "snapshots/0123abcd")
    (cached / "refs").mkdir()
    (cached / "refs/main").write_text("0123abcd")
    monkeypatch.setenv("HF_HUB_CACHE", str(cached.parent))
    named = parse_config({"model": {"path": "org/small"}, "task": {"name": "arithmetic"}})
    with pytest.raises(ConfigError, match=r"model\.path=org/small holds a LoRA adapter"):
        check(named)
    (model / "config.json").unlink()
    with pytest.raises(ConfigError, match="model holds a LoRA adapter"):
        check(config)
