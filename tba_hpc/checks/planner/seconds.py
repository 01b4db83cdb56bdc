"""Rough seconds of a step and of a group, by what they are spent on."""

from __future__ import annotations

from tba_hpc.checks.planner.hardware import GB, Gpu
from tba_hpc.checks.planner.shapes import Shape
from tba_hpc.checks.planner.workload import Workload

# Shares of a data sheet's figures that are reached: assumed, for no GPU has run these yet.

TRAINING_SHARE = {"bfloat16": 0.3, "float32": 0.5}
"""Of the FLOP/s, by a learner."""

SCORING_SHARE, DECODE_SHARE = 0.3, 0.6
"""Of the FLOP/s, by a model of transformers that reads whole texts, and by an engine with many sequences."""

BANDWIDTH_SHARE, LINK_SHARE = 0.8, 0.6
"""Of the memory's bandwidth, by an engine or an optimizer; of links between GPUs, by collectives."""

DECODE_STEP_SECONDS, DECODE_SEQUENCE_SECONDS = 0.5e-3, 10e-6
"""Overhead of an engine's step, s, and of each of its sequences."""

HOST_COPY, NODE_LINK = 6 * GB, 20 * GB
"""Bytes/s between a GPU and pageable memory of its host, and between nodes by NCCL."""

PASSES, CHECKPOINTED_PASSES = 3, 4
"""Forward passes that forward and backward cost; one more with gradient checkpointing."""

Seconds = dict[str, float]


def passes_of(work: Workload) -> int:
    """Forward passes' worth of a step, for mean lengths."""
    train = work.config.train
    group = train.completions_per_prompt * (work.prompt + work.completion)
    passes = CHECKPOINTED_PASSES if train.gradient_checkpointing else PASSES
    passes += work.micro_batch(work.completion) < group  # a split group is computed once more
    passes -= work.adapter > 0  # frozen weights have no gradients
    return passes + (work.trainer_reference != "no")


def step_seconds(work: Workload, gpu: Gpu, gpus_per_node: int) -> Seconds:
    """Of an optimizer step, for mean lengths."""
    config, ranks, length = work.config, work.config.launch.trainers, work.prompt + work.completion
    scored, owned = work.sequences_per_rank * work.completion, work.trained / ranks
    once = work.policy.forward_flops(work.sequences_per_rank * length, attended=length / 2, scored=scored)
    rate = TRAINING_SHARE[config.model.dtype] * gpu.flops(config.model.dtype)
    reference = {"model": work.policy_bytes, "average": 3 * 4 * owned}.get(work.trainer_reference, 0.0)
    spent = {
        "forward and backward": passes_of(work) * once / rate,
        "reference, to the GPU": reference / HOST_COPY,
        "optimizer": 48 * owned / (BANDWIDTH_SHARE * gpu.bandwidth * GB),
        "publication": work.published_bytes / ranks / HOST_COPY / config.exchange.sync_every,
        "between trainers": 0.0 if ranks == 1 else _collective_seconds(work, gpu, gpus_per_node),
    }
    return {name: seconds for name, seconds in spent.items() if seconds}


def _collective_seconds(work: Workload, gpu: Gpu, gpus_per_node: int) -> float:
    """Gradients, and ZeRO-3's weights, between the trainer ranks."""
    ranks, stage = work.config.launch.trainers, work.config.train.zero_stage
    tokens = work.sequences_per_rank * (work.prompt + work.completion)
    micro_batches = max(1.0, tokens / work.micro_batch(work.completion))
    times = {1: 2.0, 2: 1 + micro_batches, 3: passes_of(work) * micro_batches}[stage]
    each = work.policy_bytes if stage == 3 else work.published_bytes
    link = LINK_SHARE * gpu.link * GB if ranks <= gpus_per_node else NODE_LINK
    return times * each * (ranks - 1) / ranks / link


def group_seconds(work: Workload, gpu: Gpu, cache: float) -> Seconds:
    """Of a searcher for a group. cache: bytes of the engine's KV cache, on each of its GPUs."""
    config, options = work.config, work.config.task.options
    texts, length, size = (
        config.generator.completions_per_prompt,
        work.prompt + work.completion,
        work.weight_bytes,
    )
    half, ranks = work.completion / 2, config.generator.tensor_parallel
    kept = work.policy.kv_bytes(size) * max(work.prompt / texts + half, 1)
    batch = max(1.0, min(work.sequences, cache * ranks / kept))
    token = decode_seconds(
        work.policy, gpu, batch=batch, length=work.prompt + half, weight_bytes=size, ranks=ranks
    )
    spent = {"generation": texts * work.completion * token / batch}
    if config.train.searcher_has_reference:
        scored = texts * work.completion
        spent["reference"] = _reading_seconds(work.policy, size, gpu, texts * length, scored)
    if work.victim:  # as fast as the policy's engine
        texts *= int(options.get("answers", 5))
        length = int(options.get("victim_max_tokens", 30))
        spent["task.options.victim"] = texts * length * token / batch
    for option, reader in work.readers.items():
        if option not in ("gold_model", "embedder"):  # these work in evaluations only
            spent[f"task.options.{option}"] = _reading_seconds(reader, reader.disk_bytes, gpu, texts * length)
    return spent


def _reading_seconds(shape: Shape, weight_bytes: int, gpu: Gpu, tokens: float, scored: float = 0) -> float:
    """Of a model that reads whole texts."""
    flops = shape.forward_flops(tokens, attended=0, scored=scored)
    return flops / (SCORING_SHARE * _flops(gpu, weight_bytes))


def decode_seconds(
    shape: Shape, gpu: Gpu, *, batch: float, length: float, weight_bytes: int, ranks: int = 1
) -> float:
    """Seconds of one token for each of ``batch`` sequences of ``length`` tokens, over ``ranks`` GPUs."""
    read = weight_bytes * shape.parameters + batch * length * shape.kv_bytes(weight_bytes)
    memory = read / ranks / (BANDWIDTH_SHARE * gpu.bandwidth * GB)
    flops = shape.forward_flops(batch, attended=length, scored=batch) / ranks
    compute = flops / (DECODE_SHARE * _flops(gpu, weight_bytes))
    return max(memory, compute) + DECODE_STEP_SECONDS + batch * DECODE_SEQUENCE_SECONDS


def _flops(gpu: Gpu, weight_bytes: int) -> float:
    return gpu.flops("float32" if weight_bytes == 4 else "bfloat16")
