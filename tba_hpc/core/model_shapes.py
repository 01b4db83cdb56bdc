"""Dimensions of models, read from their config.json, and memory per token. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
"""Bytes of a weight, by dtype."""

UNGATED = {"gpt2", "gpt_neox", "bert", "roberta"}
"""Kinds of models whose MLP has two matrices instead of three, and whose norms are LayerNorm."""

LEARNED_POSITIONS = {"gpt2", "bert", "roberta"}
"""Kinds of models with learned positions; their output layer is tied unless config.json says otherwise."""

GPT2_FIELDS = {
    "n_embd": "hidden_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_positions": "max_position_embeddings",
    "n_inner": "intermediate_size",
}
"""GPT-2's names for fields of config.json, each with the name in other models."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Dimensions of a decoder or a text encoder.

    kind: the model_type of config.json. query: width of a layer's queries, all heads together. key_value:
    width of its keys, and of its values. inner: hidden width of the MLP, or of one expert. experts_per_token:
    number of experts that compute a token; 1 without experts. layer_weights: number of weights in a layer's
    linear maps, all experts together. mixture: whether the model is a mixture of experts. table: number of
    weights in the embeddings, learned positions included. head: number of weights in the output layer; 0 if
    it uses those of the embeddings. vocabulary: number of tokens; 0 if no logits are computed. disk_bytes:
    bytes per weight in the model's files. gated: whether the MLP has a gate, as in Llama.
    """

    kind: str
    layers: int
    hidden: int
    heads: int
    query: int
    key_value: int
    inner: int
    experts_per_token: int
    layer_weights: int
    mixture: bool
    table: int
    head: int
    vocabulary: int
    disk_bytes: int
    gated: bool

    @property
    def parameters(self) -> int:
        """Number of weights, without those of norms and biases, which are below 0.1 % of a large model."""
        return self.layers * self.layer_weights + self.table + self.head

    @property
    def key_value_heads(self) -> int:
        """Number of key and value heads; fewer than ``heads`` under grouped-query attention."""
        return self.heads * self.key_value // self.query

    def kv_bytes(self, weight_bytes: int) -> int:
        """Return the bytes of KV cache per token. weight_bytes: bytes of each number in the cache."""
        return 2 * self.layers * self.key_value * weight_bytes

    def without_head(self) -> Shape:
        """Return the shape without the output layer, for a classifier or embedder that computes no logits."""
        return replace(self, head=0, vocabulary=0)

    @property
    def linear_layers(self) -> dict[str, int]:
        """Input plus output width of each nn.Linear of a layer, by name. LoRA adapts these modules.

        Experts and GPT-2 have no nn.Linear.
        """
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


def shape_of(fields: Mapping[str, Any]) -> Shape:
    """Derive a shape from the fields of a config.json. Raises KeyError with the name of a missing field."""
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
        layer_weights=shared + max(experts, 1) * mlp,
        mixture=experts > 0,
        table=(words + positions) * hidden,
        head=0 if tied else words * hidden,
        vocabulary=words,
        disk_bytes=BYTES[fields.get("dtype") or fields.get("torch_dtype") or "float32"],
        gated=kind not in UNGATED,
    )


def activation_bytes(shape: Shape, weight_bytes: int) -> float:
    """Return the bytes per token that a layer keeps for the backward pass, without activation checkpointing.

    weight_bytes: bytes of a weight. The estimate is for Hugging Face's implementations with SDPA. RMSNorm
    keeps float32 copies, LayerNorm keeps its input, and GPT-2's GELU keeps its intermediate results.
    """
    heads = 3 * shape.query + 2 * shape.key_value
    if shape.gated:
        norms = 2 * (4 + 2 * weight_bytes) * shape.hidden
        mlp: float = 4 * shape.inner * shape.experts_per_token
    else:
        norms = 5 * weight_bytes * shape.hidden
        mlp = (4.5 if shape.kind == "gpt2" else 2) * shape.inner
    return norms + weight_bytes * (heads + mlp)


def kept_bytes(shape: Shape, weight_bytes: int, *, checkpointing: bool) -> float:
    """Return the bytes of activations per token that all layers together keep for the backward pass."""
    layer = activation_bytes(shape, weight_bytes)
    if checkpointing:
        return weight_bytes * shape.hidden * shape.layers + 1.5 * layer
    return layer * (shape.layers + 0.5)


CHUNK_BYTES = {"cuda": 256 << 20, "cpu": 64 << 20}
"""Bytes of float32 logits that are computed at once, by device. Only large products keep a GPU busy."""

PASS_TOKENS = 16 << 10
"""Token limit of a forward pass in which a searcher's reference scores several groups.

A group with more tokens has a pass to itself."""

ROOM = {"cuda": 8 << 30, "cpu": 1 << 30}
"""Default limit on a micro-batch's activations, in bytes, by device. Micro-batches of this size keep a GPU
busy while the host launches the next layers."""

MOST_TOKENS = 32 << 10
"""Default limit on a micro-batch's tokens; the limit in bytes, ROOM, applies as well."""


def default_micro_batch(token_bytes: float, device: str) -> int:
    """Return the default token limit of a micro-batch. token_bytes: ``kept_bytes`` of a token."""
    return min(MOST_TOKENS, int(ROOM[device] / token_bytes))
