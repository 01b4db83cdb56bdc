"""The planner's bytes against those that transformers, torch and DeepSpeed really hold, on a CPU."""

from __future__ import annotations

import gc
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from known_models import KNOWN
from learner_worker import learner_of, make_batch, make_config, play
from tiny_models import make_family_model, make_random_model
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, PreTrainedModel

from tba_hpc.checks.planner.memory import Workload, trainer_items
from tba_hpc.checks.planner.shapes import adapter_weights, load_shape
from tba_hpc.config import Config, Dtype, LoraSection
from tba_hpc.core.model_shapes import BYTES, activation_bytes, shape_of
from tba_hpc.learner.deepspeed_learner import DeepSpeedLearner
from tba_hpc.learner.hf_model import load_policy
from tba_hpc.learner.lora import Lora

TORCH_DTYPE = {"float32": torch.float32, "bfloat16": torch.bfloat16}


MIXTURE = {
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "num_hidden_layers": 4,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "vocab_size": 151936,
}
"""Qwen3-30B-A3B, with fewer layers."""


@pytest.mark.parametrize("name", ["mixture", *(name for name in KNOWN if not name.startswith("."))])
def test_weights_are_those_of_transformers(name: str) -> None:
    """Less norms and biases; encoders have a pooler or not, less than one in a hundred."""
    fields = dict((KNOWN | {"mixture": MIXTURE})[name])
    encoder = fields["model_type"] in ("bert", "roberta")
    kind, shape = (AutoModel if encoder else AutoModelForCausalLM), shape_of(fields)
    config = AutoConfig.for_model(fields.pop("model_type"), **fields)
    with torch.device("meta"):
        model = kind.from_config(config)
    counted = sum(parameter.numel() for parameter in model.parameters())
    assert shape.parameters == pytest.approx(counted, rel=0.01 if encoder else 0.002)


WIDE = {
    "llama": {"num_key_value_heads": 2},
    "qwen2": {"num_key_value_heads": 2},
    "gpt_neox": {},
    "gpt2": {
        "n_embd": 256,
        "n_head": 4,
        "n_positions": 512,
        "resid_pdrop": 0,
        "embd_pdrop": 0,
        "attn_pdrop": 0,
    },
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", WIDE)
def test_a_layer_keeps_as_many_bytes_of_a_token_as_the_planner_says(kind: str, dtype: Dtype) -> None:
    """What autograd saves in two layers more, on tokens that attention reads by SDPA; within 15 %."""
    few, many = (_saved(kind, dtype, layers) for layers in (2, 4))
    shape = shape_of({**_fields(kind, 2), "model_type": kind})
    assert (many - few) / 2 == pytest.approx(activation_bytes(shape, BYTES[dtype]), rel=0.15)


def _fields(kind: str, layers: int) -> dict[str, object]:
    if kind == "gpt2":
        return {"vocab_size": 64, "n_layer": layers, **WIDE[kind]}
    size = {
        "hidden_size": 256,
        "intermediate_size": 640,
        "num_attention_heads": 4,
        "num_hidden_layers": layers,
    }
    return {"vocab_size": 64, **size, **WIDE[kind]}


def _saved(kind: str, dtype: Dtype, layers: int, tokens: int = 256) -> float:
    """Bytes per token that autograd saves, weights left out."""
    config = AutoConfig.for_model(kind, **_fields(kind, layers))
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=TORCH_DTYPE[dtype])
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    saved: dict[int, int] = {}
    kept: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            saved[storage.data_ptr()] = storage.nbytes()
            kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model.base_model(input_ids=torch.zeros(1, tokens, dtype=torch.int64), use_cache=False)
    return sum(saved.values()) / tokens


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "qwen3_moe", "gpt_neox"])
@pytest.mark.parametrize("targets", [None, ("q_proj", "self_attn.v_proj")], ids=["all", "two"])
def test_an_adapter_has_as_many_weights_as_the_planner_says(
    kind: str, targets: tuple[str, ...] | None, tmp_path: Path
) -> None:
    make = make_random_model if kind == "llama" else make_family_model
    folder = make(tmp_path, tied=True) if kind == "llama" else make(tmp_path, kind)  # type: ignore[call-arg]
    if targets and kind == "gpt_neox":
        targets = ("query_key_value",)
    section = LoraSection(rank=4, targets=targets)
    lora = Lora(load_policy(str(folder), "float32"), section, path=str(folder), seed=0)
    counted = sum(parameter.numel() for parameter in lora.adapter.values())
    assert adapter_weights(load_shape(str(folder)), section, str(folder)) == counted


@pytest.mark.nightly
@pytest.mark.engine
@pytest.mark.parametrize(
    ("stage", "ranks", "dtype", "lora"),
    [
        (2, 1, "float32", None),
        (2, 2, "bfloat16", None),
        (3, 2, "bfloat16", None),
        (2, 1, "bfloat16", LoraSection(rank=16)),
        (3, 2, "bfloat16", LoraSection(rank=16)),
    ],
)
def test_a_learner_holds_what_the_planner_says(
    stage: int, dtype: Dtype, ranks: int, lora: LoraSection | None, tmp_path: Path
) -> None:
    """Weights, masters, AdamW and gradients of a rank that is about to take a step; within 15 %.

    ZeRO-3 keeps tensors of less than 100,000 numbers whole on every rank: those of real models have more.
    """
    hidden = 512 if lora else 256  # what is shared out else, masters and the like, is less of an adapter
    folder = make_random_model(tmp_path / "model", tied=False, hidden=hidden, layers=4, vocab=2048)
    config = make_config(folder, ranks=ranks, dtype=dtype, zero_stage=stage)
    config = config.model_copy(update={"model": config.model.model_copy(update={"lora": lora})})
    items = trainer_items(Workload.of(config))
    names = ("weights", "adapter", "float32 masters", "AdamW", "gradients")
    planned = sum(items.get(name, 0) for name in names)
    play(_hold, tmp_path, config, ranks=ranks)
    for rank in range(ranks):
        assert int((tmp_path / f"held-{rank}").read_text()) == pytest.approx(planned, rel=0.15)


def _hold(folder: Path, rank: int, config: Config) -> None:
    """Be a rank: two steps, for the first makes AdamW's state; note what is alive before the optimizer's."""
    learner = learner_of(folder, rank, config)
    take = learner._engine.step

    def note_and_take() -> None:
        (folder / f"held-{rank}").write_text(str(_settled_bytes(learner)))
        take()

    learner._engine.step = note_and_take
    if rank:
        learner.follow(lambda: np.empty(0, np.uint8))
        return
    for seed in (1, 2):
        learner.step(make_batch(seed), learning_rate=1e-4, beta=0.1)
    learner.close()


def _settled_bytes(learner: DeepSpeedLearner) -> int:
    """The least of some looks: once a reduced bucket was still alive, as a thread of gloo's may keep it."""
    looks = []
    for _ in range(5):
        looks.append(_live_bytes(learner))
        time.sleep(0.05)
    return min(looks)


def _live_bytes(learner: DeepSpeedLearner) -> int:
    """Of all tensors, but for the bucket in which gradients are reduced: it is an item of its own."""
    optimizer = learner._engine.optimizer
    buffers = [bucket.buffer for bucket in getattr(optimizer, "ipg_buckets", {}).values()]
    buckets = [tensor for buffer in buffers for tensor in ([buffer] if torch.is_tensor(buffer) else buffer)]
    left_out = {tensor.untyped_storage().data_ptr() for tensor in buckets}
    tensors = [thing for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor)]
    storages = [tensor.untyped_storage() for tensor in tensors if tensor.device.type == "cpu"]
    held = {storage.data_ptr(): storage.nbytes() for storage in storages}
    return sum(size for place, size in held.items() if place not in left_out)
