"""Shapes of models, from their config.json: how many weights, where, and how many a token passes.

The file comes from a folder, from the Hugging Face cache, or from the hub; no library of models is loaded.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tba_hpc.checks.resources import hub_cache, snapshot
from tba_hpc.config import ConfigError, LoraSection, is_local

BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
"""Of a weight."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A decoder, or an encoder of texts.

    heads: of queries. query, key_value: width of all heads together. inner: hidden width of an MLP, of one
    expert if there are several. matrices: weights of a layer's linear maps, all experts together; active:
    those that a token passes. others: a layer's norms and biases. table: embeddings, of positions too. head:
    weights of the output layer, 0 if it is tied to the embedding or there is none. vocabulary: 0 if no
    logits are computed. disk_bytes: of a weight in its files. gated: whether the MLP has a gate.
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
    active: int
    others: int
    table: int
    head: int
    vocabulary: int
    disk_bytes: int
    gated: bool

    @property
    def parameters(self) -> int:
        """All weights."""
        return self.layers * (self.matrices + self.others) + self.table + self.head + self._last_norm

    @property
    def key_value_heads(self) -> int:
        """Of keys and values: fewer than ``heads`` where queries share them."""
        return self.heads * self.key_value // self.query

    @property
    def _last_norm(self) -> int:
        return {"rms": 1, "layer": 2, "none": 0}[NORMS.get(self.kind, "rms")] * self.hidden

    def forward_flops(self, tokens: float, *, attended: float, scored: float) -> float:
        """Of ``tokens`` that look at ``attended`` others each on average, ``scored`` of them with logits."""
        linear = 2 * self.layers * self.active * tokens
        attention = 4 * self.layers * self.query * attended * tokens
        return linear + attention + 2 * self.hidden * self.vocabulary * scored

    def kv_bytes(self, weight_bytes: int) -> int:
        """Of the attention cache, per token."""
        return 2 * self.layers * self.key_value * weight_bytes

    @property
    def linear_layers(self) -> dict[str, tuple[int, int]]:
        """Inputs and outputs of a layer's, by name, that torch has as such: no experts, nor GPT-2's."""
        hidden, inner = self.hidden, self.inner
        if self.kind == "gpt2":
            return {}
        if not self.gated:
            fused = {"query_key_value": (hidden, 3 * hidden), "dense": (hidden, hidden)}
            return {**fused, "dense_h_to_4h": (hidden, inner), "dense_4h_to_h": (inner, hidden)}
        attention = {
            "q_proj": (hidden, self.query),
            "k_proj": (hidden, self.key_value),
            "v_proj": (hidden, self.key_value),
            "o_proj": (self.query, hidden),
        }
        if self.active != self.matrices:
            return attention
        mlp = {"gate_proj": (hidden, inner), "up_proj": (hidden, inner), "down_proj": (inner, hidden)}
        return attention | mlp

    def without_head(self) -> Shape:
        """The same as a classifier or an embedder: no logits over the vocabulary."""
        return replace(self, head=0, vocabulary=0)


def adapter_weights(shape: Shape, lora: LoraSection, path: str) -> int:
    """Weights of an adapter of LoRA. Raises ConfigError if a target names no linear layer."""
    layers = shape.linear_layers
    wanted = [target.rpartition(".")[2] for target in lora.targets or layers]
    if not layers or set(wanted) - layers.keys():
        unknown = f"targets={next(name for name in wanted if name not in layers)}" if layers else "rank"
        raise ConfigError(
            f"model.lora.{unknown} names no linear layer of model.path={path} that LoRA can adapt: it has "
            f"{', '.join(layers) or 'none'}"
        )
    return shape.layers * lora.rank * sum(sum(layers[name]) for name in set(wanted))


NORMS = {"gpt_neox": "layer", "gpt2": "layer", "bert": "none", "roberta": "none"}
"""What normalises the last hidden states; all others by root mean square."""

TIED = {"gpt2", "bert", "roberta"}
"""Whose output layer is the embedding unless config.json says otherwise."""


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
    here = Path(path).expanduser() if is_local(path) or Path(path).is_dir() else snapshot(path, os.environ)
    if here and (here / "config.json").is_file():
        return here / "config.json"
    reason = "no such file"
    if not is_local(path):
        from huggingface_hub import hf_hub_download

        try:
            return Path(hf_hub_download(path, "config.json", cache_dir=hub_cache(os.environ)))
        except (OSError, ValueError) as error:
            reason = str(error).strip().splitlines()[0]
    raise ConfigError(
        f"{key}={path} has no config.json that can be read ({reason}): give a model's folder, or run "
        f"`hf download {path} config.json` on a machine with network"
    )


def shape_of(fields: Mapping[str, Any]) -> Shape:
    """From the fields of a config.json. KeyError names one that is missing."""
    fields = {**fields, **fields.get("text_config", {})}
    if fields["model_type"] == "gpt2":
        return _gpt2(fields)
    if fields["model_type"] in ("gpt_neox", "bert", "roberta"):
        return _with_biases(fields)
    return _gated(fields)


def _gated(fields: Mapping[str, Any]) -> Shape:
    """Llama and its kin: RMSNorm, grouped queries, a gated MLP, perhaps of experts."""
    kind, hidden, heads = fields["model_type"], fields["hidden_size"], fields["num_attention_heads"]
    size = fields.get("head_dim") or hidden // heads
    query, key_value = heads * size, (fields.get("num_key_value_heads") or heads) * size
    experts = fields.get("num_experts") or fields.get("num_local_experts") or 0
    inner = fields.get("moe_intermediate_size") if experts else None
    inner = inner or fields["intermediate_size"]
    attention, expert = 2 * hidden * (query + key_value), 3 * hidden * inner
    each = fields["num_experts_per_tok"] if experts else 1
    biases = query + 2 * key_value if kind == "qwen2" or fields.get("attention_bias") else 0
    biases += hidden if fields.get("attention_bias") else 0
    return Shape(
        kind=kind,
        layers=fields["num_hidden_layers"],
        hidden=hidden,
        heads=heads,
        query=query,
        key_value=key_value,
        inner=inner,
        experts_per_token=each,
        matrices=attention + max(experts, 1) * expert + experts * hidden,
        active=attention + each * expert + experts * hidden,
        others=2 * hidden + biases + (2 * size if kind.startswith("qwen3") else 0),
        table=fields["vocab_size"] * hidden,
        head=0 if _tied(fields) else fields["vocab_size"] * hidden,
        vocabulary=fields["vocab_size"],
        disk_bytes=_disk_bytes(fields),
        gated=True,
    )


def _with_biases(fields: Mapping[str, Any]) -> Shape:
    """GPT-NeoX (Pythia); BERT and RoBERTa, whose tables are of positions and types, too, and have a norm."""
    hidden, inner, words = fields["hidden_size"], fields["intermediate_size"], fields["vocab_size"]
    table, matrices = words * hidden, 4 * hidden**2 + 2 * hidden * inner
    if fields["model_type"] != "gpt_neox":
        table += (fields["max_position_embeddings"] + fields.get("type_vocab_size", 2) + 2) * hidden
    return Shape(
        kind=fields["model_type"],
        layers=fields["num_hidden_layers"],
        hidden=hidden,
        heads=fields["num_attention_heads"],
        query=hidden,
        key_value=hidden,
        inner=inner,
        experts_per_token=1,
        matrices=matrices,
        active=matrices,
        others=9 * hidden + inner,
        table=table,
        head=0 if _tied(fields) else words * hidden,
        vocabulary=words,
        disk_bytes=_disk_bytes(fields),
        gated=False,
    )


def _gpt2(fields: Mapping[str, Any]) -> Shape:
    hidden = fields["n_embd"]
    like = {
        "model_type": "gpt2",
        "hidden_size": hidden,
        "num_hidden_layers": fields["n_layer"],
        "num_attention_heads": fields["n_head"],
        "intermediate_size": fields.get("n_inner") or 4 * hidden,
    }
    shape = _with_biases({**fields, **like, "max_position_embeddings": 0})
    return replace(shape, table=(fields["vocab_size"] + fields["n_positions"]) * hidden)


def _tied(fields: Mapping[str, Any]) -> bool:
    return bool(fields.get("tie_word_embeddings", fields["model_type"] in TIED))


def _disk_bytes(fields: Mapping[str, Any]) -> int:
    return BYTES[fields.get("dtype") or fields.get("torch_dtype") or "float32"]
