"""Memory of a trainer rank and of a searcher on their GPUs, in bytes by purpose.

A searcher's GPU holds an engine, and beside it the reference and the models of the task. All estimates assume
completions of the maximum length, since an untrained policy often writes such completions.
"""

from __future__ import annotations

from dataclasses import dataclass

from tba_hpc.checks.planner.hardware import GIB, Gpu
from tba_hpc.checks.planner.shapes import adapter_weights, load_shape
from tba_hpc.config import Config
from tba_hpc.core.model_shapes import (
    BYTES,
    CHUNK_BYTES,
    PASS_TOKENS,
    Shape,
    default_micro_batch,
    kept_bytes,
)

READERS = {"reward_model": 32, "gold_model": 32, "classifier": 64, "guard": 16, "embedder": 32}
"""Default batch sizes of the models that read whole texts on a searcher's GPU, by the task option that names
the model."""

CONTEXT, NCCL = 0.6 * GIB, 0.5 * GIB
"""Bytes of a process's CUDA context, and of NCCL's buffers if there are several trainer ranks."""

ENGINE_RUNTIME = 1.5 * GIB
"""Bytes of an engine's CUDA context, graphs and workspaces."""

BUCKET, LIVE = 128 << 20, 10**9
"""Maximum number of weights in one reduction of gradients (deepspeed_settings.BUCKET_ELEMENTS), and of
weights that ZeRO-3 keeps gathered at the same time (DeepSpeed's default)."""

BATCHED_TOKENS, LARGE_GPU = 8192, 70
"""Maximum number of tokens in a step of an engine (vLLM's default). On GPUs with LARGE_GPU GiB or more it is
twice as large."""

KV_CACHE = "engine: KV cache"
"""Name of an engine's KV cache among the items of a searcher."""

Items = dict[str, float]
"""Bytes by purpose."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Sizes of models, prompts and completions, on which the memory of the ranks depends.

    adapter: number of weights of the LoRA adapter, 0 for none. readers: models that read whole texts, by the
    task option that names them (READERS). victim: model that the red-teaming task attacks, or None. embedder:
    model with which the trainer's buffer recognises duplicates, or None. prompt: mean length of prompts, in
    tokens.
    """

    config: Config
    policy: Shape
    adapter: int
    readers: dict[str, Shape]
    victim: Shape | None
    embedder: Shape | None
    prompt: float

    @classmethod
    def of(cls, config: Config, *, prompt_tokens: float | None = None) -> Workload:
        """Derive the workload from a config. Raises ConfigError if a model is unknown.

        prompt_tokens: mean length of prompts; None means a quarter of the longest possible prompt.
        """
        longest, options = config.generator.max_tokens, config.task.options
        room = config.model.context_length - longest
        readers = {
            option: load_shape(str(options[option]), f"task.options.{option}").without_head()
            for option in READERS
            if options.get(option)
        }
        victim, embedder = options.get("victim"), config.buffer.embedding_model
        policy, lora = load_shape(config.model.path), config.model.lora
        return cls(
            config=config,
            policy=policy,
            adapter=adapter_weights(policy, lora, config.model.path) if lora else 0,
            readers=readers,
            victim=load_shape(str(victim), "task.options.victim") if victim else None,
            embedder=load_shape(embedder, "buffer.duplicates.model").without_head() if embedder else None,
            prompt=min(prompt_tokens or room / 4, room),
        )

    @property
    def weight_bytes(self) -> int:
        """Bytes per weight of the policy."""
        return BYTES[self.config.model.dtype]

    @property
    def policy_bytes(self) -> float:
        """Bytes of all weights of the policy, in the dtype in which it computes."""
        return self.weight_bytes * self.policy.parameters

    @property
    def trained(self) -> int:
        """Number of weights that are trained and published: the adapter's, or all."""
        return self.adapter or self.policy.parameters

    @property
    def sequences_per_rank(self) -> float:
        """Number of sequences per optimizer step of one trainer rank."""
        train = self.config.train
        return train.prompts_per_step * train.completions_per_prompt / self.config.launch.trainers

    @property
    def sequences(self) -> int:
        """Number of sequences that an engine generates at the same time."""
        generator = self.config.generator
        return generator.prompts_in_flight * generator.completions_per_prompt

    @property
    def cache_bytes(self) -> float:
        """Bytes of KV cache per token on one GPU of an engine.

        If an engine has more GPUs than the model has key-value heads, the surplus GPUs hold copies.
        """
        ranks = min(self.config.generator.tensor_parallel, self.policy.key_value_heads)
        return self.policy.kv_bytes(self.weight_bytes) / ranks

    @property
    def trainer_reads_reference(self) -> bool:
        """True if a trainer rank loads the weights of a reference.

        The frozen reference of an adapter needs none: it is the policy with the adapter switched off.
        """
        train = self.config.train
        return train.trainer_has_reference and not (self.adapter and train.reference.name == "frozen")

    @property
    def micro_batch(self) -> float:
        """Number of tokens in a micro-batch, prompts included, if all completions have the maximum length."""
        train, length = self.config.train, self.prompt + self.config.generator.max_tokens
        group = train.completions_per_prompt * length
        tokens = train.tokens_per_micro_batch or max(group, default_micro_batch(self.kept_bytes, "cuda"))
        return min(tokens, self.sequences_per_rank * length)

    @property
    def kept_bytes(self) -> float:
        """Bytes of activations that are kept for the backward pass, per token of a micro-batch."""
        checkpointing = self.config.train.gradient_checkpointing
        return kept_bytes(self.policy, self.weight_bytes, checkpointing=checkpointing)


def trainer_items(work: Workload) -> Items:
    """Return the memory of a trainer rank at its peak, in bytes by purpose.

    The peak is in the backward pass, in the optimizer or while the reference reads a micro-batch.
    """
    config, size, weights = work.config, work.weight_bytes, work.trained
    ranks, stage = config.launch.trainers, config.train.zero_stage
    items = {"weights": work.policy_bytes / (ranks if stage == 3 else 1)}
    if work.adapter:
        items["adapter"] = size * weights
    if not config.train.offloads_optimizer:
        items |= {"float32 masters": 4 * weights / ranks, "AdamW": 8 * weights / ranks}
    items["gradients"] = 4 * weights / (1 if stage == 1 else ranks)
    items["reduction"] = size * min(BUCKET, weights)
    if stage == 3 and ranks > 1:
        items["gathered weights"] = size * min(work.policy.parameters, LIVE)
    peaks: list[Items] = [_backward_items(work)]
    if not config.train.offloads_optimizer:
        peaks.append({"in the optimizer": 8 * weights / ranks})
    if work.trainer_reads_reference:
        scored = _scoring_bytes(work, work.micro_batch)
        peaks.append({"reference, loaded when needed": work.policy_bytes, "reference: a micro-batch": scored})
    highest: Items = max(peaks, key=lambda peak: sum(peak.values()))
    items |= highest
    if work.embedder:
        items["embedder of the buffer"] = _reader_bytes(work.embedder, 64)
    return items | {"CUDA": CONTEXT + (NCCL if ranks > 1 else 0)}


def _backward_items(work: Workload) -> Items:
    """Return the bytes, by purpose, that a micro-batch's forward and backward passes need on a trainer GPU.

    Weights, gradients and optimizer state are not included, except the output layer's gradient.
    """
    shape, size, longest = work.policy, work.weight_bytes, work.config.generator.max_tokens
    tokens = work.micro_batch
    scored = tokens * longest / (work.prompt + longest)
    items = {
        "activations": tokens * work.kept_bytes,
        "hidden states": 3 * size * shape.hidden * scored,
        "logits": min(CHUNK_BYTES["cuda"], 4 * scored * shape.vocabulary) * (8 + size) / 4,
    }
    head = {} if work.adapter else {"output layer's gradient": (4 + size) * shape.vocabulary * shape.hidden}
    return items | head


def searcher_items(work: Workload, gpu: Gpu) -> Items:
    """Return the memory of a searcher on its fullest GPU, in bytes by purpose.

    This GPU holds the reference and the models of the task beside its share of the engine.
    """
    generator, shape, size = work.config.generator, work.policy, work.weight_bytes
    options, ranks = work.config.task.options, generator.tensor_parallel
    weights = work.policy_bytes / ranks
    batched = BATCHED_TOKENS * (2 if gpu.memory >= LARGE_GPU else 1)
    runtime = ENGINE_RUNTIME + size * batched * (8 * shape.hidden + 4 * shape.inner / ranks)
    runtime += 8 * work.sequences * shape.vocabulary
    cache = max(generator.gpu_memory_utilization * gpu.bytes - weights - runtime, 0.0)
    if generator.kv_cache_mb:
        cache = generator.kv_cache_mb << 20
    items = {"engine: weights": weights, KV_CACHE: cache, "engine: work": runtime}
    if work.config.train.searcher_has_reference:
        group = generator.completions_per_prompt * (work.prompt + generator.max_tokens)
        scored = _scoring_bytes(work, max(group, PASS_TOKENS))
        items |= {"reference": work.policy_bytes, "reference: a pass": scored}
    for option, reader in work.readers.items():
        batch = options.get(f"{option}_batch") or options.get("batch") or READERS[option]
        items[f"task.options.{option}"] = _reader_bytes(reader, int(batch))
    if work.victim:  # a second engine
        items["task.options.victim"] = float(options.get("victim_gpu_memory", 0.3)) * gpu.bytes
        if cache_mb := options.get("victim_kv_cache_mb"):
            weights = BYTES[options.get("victim_dtype", "bfloat16")] * work.victim.parameters
            items["task.options.victim"] = weights + (int(cache_mb) << 20) + ENGINE_RUNTIME
    return items | {"CUDA": CONTEXT}


def _scoring_bytes(work: Workload, tokens: float) -> float:
    """Return the bytes, besides weights, that the reference needs to compute log π_ref of ``tokens`` tokens.

    The reference has the policy's shape.
    """
    shape = work.policy
    each = work.weight_bytes * (4 * shape.hidden + 3 * shape.inner * shape.experts_per_token)
    return tokens * each + 2 * min(CHUNK_BYTES["cuda"], 4 * tokens * shape.vocabulary)


def _reader_bytes(shape: Shape, batch: int) -> float:
    """Return the bytes that a model in its files' dtype needs to read ``batch`` texts of 512 tokens."""
    working = batch * 512 * (6 * shape.hidden + 3 * shape.inner)
    return shape.disk_bytes * (shape.parameters + working)
