"""Shapes of models from their config.json, and how many weights they have.

The file comes from a folder, the Hugging Face cache or the hub; neither torch nor transformers is imported.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tba_hpc.checks.resources import find_file, hub_cache
from tba_hpc.config import ConfigError, LoraSection, is_local

BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
"""Of a weight."""

UNGATED = {"gpt2", "gpt_neox", "bert", "roberta"}
"""Models whose MLP has two matrices instead of three, and whose norms are LayerNorm."""

LEARNED_POSITIONS = {"gpt2", "bert", "roberta"}
"""Models with a table of positions; their output layer is tied unless config.json says otherwise."""

GPT2_FIELDS = {
    "n_embd": "hidden_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_positions": "max_position_embeddings",
    "n_inner": "intermediate_size",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Dimensions of a decoder or a text encoder.

    query, key_value: width of all heads together. inner: hidden width of an MLP, of one expert if there are
    several. matrices: weights of a layer's linear maps, all experts together. mixture: whether there are
    several. table: embeddings, learned positions included. head: weights of an untied output layer.
    vocabulary: 0 if no logits are computed. disk_bytes: of a weight in the model's files.
    """

    kind: str
    layers: int
    hidden: int
    heads: int
    query: int
    key_value: int
    inner: int
    experts_per_token: int
    matrices: int
    mixture: bool
    table: int
    head: int
    vocabulary: int
    disk_bytes: int
    gated: bool

    @property
    def parameters(self) -> int:
        """All weights but norms and biases, which are some hundredths of a percent of large models."""
        return self.layers * self.matrices + self.table + self.head

    @property
    def key_value_heads(self) -> int:
        """Heads of keys and values, fewer than ``heads`` under grouped-query attention."""
        return self.heads * self.key_value // self.query

    def kv_bytes(self, weight_bytes: int) -> int:
        """KV cache per token."""
        return 2 * self.layers * self.key_value * weight_bytes

    def without_head(self) -> Shape:
        """The same as a classifier or an embedder: no logits over the vocabulary."""
        return replace(self, head=0, vocabulary=0)

    @property
    def linear_layers(self) -> dict[str, int]:
        """Inputs plus outputs of a layer's nn.Linear modules by name; experts and GPT-2 have none."""
        hidden, wide = self.hidden, self.hidden + self.inner
        if self.kind == "gpt2":
            return {}
        if not self.gated:
            attention = {"query_key_value": 4 * hidden, "dense": 2 * hidden}
            return attention | dict.fromkeys(("dense_h_to_4h", "dense_4h_to_h"), wide)
        attention = dict.fromkeys(("q_proj", "o_proj"), hidden + self.query)
        attention |= dict.fromkeys(("k_proj", "v_proj"), hidden + self.key_value)
        mlp = () if self.mixture else ("gate_proj", "up_proj", "down_proj")
        return attention | dict.fromkeys(mlp, wide)


def adapter_weights(shape: Shape, lora: LoraSection, path: str) -> int:
    """Weights of a LoRA adapter. Raises ConfigError if a target names no linear layer."""
    layers = shape.linear_layers
    wanted = {target.rpartition(".")[2] for target in lora.targets or layers}
    unknown = sorted(wanted - layers.keys())
    if unknown or not layers:
        raise ConfigError(
            f"model.lora.{f'targets={unknown[0]}' if unknown else 'rank'} names no linear layer of "
            f"model.path={path} that LoRA can adapt: it has {', '.join(layers) or 'none'}"
        )
    return shape.layers * lora.rank * sum(layers[name] for name in wanted)


def load_shape(path: str, key: str = "model.path") -> Shape:
    """The shape of a folder or hub name; ``key``: its config key, for errors. Raises ConfigError."""
    fields: dict[str, Any] = json.loads(_config_file(path, key).read_text(encoding="utf-8"))
    try:
        return shape_of(fields)
    except KeyError as error:
        raise ConfigError(
            f"the config.json of {key}={path} does not say {error}: the planner knows decoders such as "
            "Llama, Qwen, GPT-NeoX and GPT-2"
        ) from None


def _config_file(path: str, key: str) -> Path:
    """The config.json of a folder or hub name, downloaded unless it is cached. Raises ConfigError."""
    if found := find_file(path, "config.json", os.environ):
        return found
    reason = "no such file"
    if not is_local(path):
        from huggingface_hub import get_hf_file_metadata, hf_hub_download, hf_hub_url

        try:
            get_hf_file_metadata(hf_hub_url(path, "config.json"))  # the other tries for half a minute, aloud
            return Path(hf_hub_download(path, "config.json", cache_dir=hub_cache(os.environ)))
        except (OSError, ValueError) as error:
            reason = str(error).strip().splitlines()[0]
        except Exception as error:  # of the hub's HTTP library
            reason = f"the hub cannot be reached: {error}"
    download = "" if is_local(path) else f", or run `hf download {path} config.json` where there is a network"
    raise ConfigError(
        f"{key}={path} has no config.json that can be read ({reason}): give a model's folder{download}"
    )


def shape_of(fields: Mapping[str, Any]) -> Shape:
    """From the fields of a config.json. KeyError names one that is missing."""
    fields = {**fields, **fields.get("text_config", {})}
    kind = fields["model_type"]
    if kind == "gpt2":
        fields |= {GPT2_FIELDS.get(name, name): value for name, value in fields.items() if value is not None}
        fields.setdefault("intermediate_size", 4 * fields["hidden_size"])
    hidden, heads, words = fields["hidden_size"], fields["num_attention_heads"], fields["vocab_size"]
    head_size = fields.get("head_dim") or hidden // heads
    query, key_value = heads * head_size, (fields.get("num_key_value_heads") or heads) * head_size
    experts = fields.get("num_experts") or fields.get("num_local_experts") or 0
    each = fields["num_experts_per_tok"] if experts else 1
    inner = (fields.get("moe_intermediate_size") if experts else None) or fields["intermediate_size"]
    mlp = (2 if kind in UNGATED else 3) * hidden * inner
    shared = 2 * hidden * (query + key_value) + experts * hidden  # attention and the router
    positions = fields["max_position_embeddings"] if kind in LEARNED_POSITIONS else 0
    tied = fields.get("tie_word_embeddings", kind in LEARNED_POSITIONS)
    return Shape(
        kind=kind,
        layers=fields["num_hidden_layers"],
        hidden=hidden,
        heads=heads,
        query=query,
        key_value=key_value,
        inner=inner,
        experts_per_token=each,
        matrices=shared + max(experts, 1) * mlp,
        mixture=experts > 0,
        table=(words + positions) * hidden,
        head=0 if tied else words * hidden,
        vocabulary=words,
        disk_bytes=BYTES[fields.get("dtype") or fields.get("torch_dtype") or "float32"],
        gated=kind not in UNGATED,
    )
