"""Seconds of what a run does again and again: a step, a group, a publication, a checkpoint; and formulas.

It must not know what fits. Rates and shares are ``hardware``'s.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from tba_hpc.checks.planner import hardware
from tba_hpc.checks.planner.hardware import Gpu
from tba_hpc.checks.planner.memory import Item
from tba_hpc.checks.planner.shapes import BYTES, Shape
from tba_hpc.checks.planner.workload import Workload

TEXT_BEYOND = 200
"""Tokens that a safety model's template adds to what it reads."""


@dataclass(frozen=True, slots=True)
class Span:
    """A time, s, and how it was reckoned."""

    name: str
    seconds: float
    formula: str


def step_spans(work: Workload, gpu: Gpu, gpus_per_node: int) -> Iterator[Span]:
    """Parts of an optimizer step, on mean lengths."""
    config, shape = work.config, work.policy
    train, ranks, dtype = config.train, config.launch.trainers, config.model.dtype
    row = work.row(work.completion)
    rows = work.groups_per_rank * work.group / work.per_row
    scored = work.groups_per_rank * work.group * work.completion
    passes = (4 if train.gradient_checkpointing else 3) + work.splits(work.completion)
    passes -= work.adapter > 0  # weights that stay have no gradients
    flops = passes * shape.forward_flops(rows * row, attended=work.attended, scored=scored)
    share = hardware.TRAINING_SHARE[dtype]
    yield Span(
        "forward and backward",
        flops / (share * gpu.flops(dtype)),
        f"{passes} × {flops / passes / 1e12:,.3g} TFLOP ÷ ({share:g} × {gpu.flops(dtype) / 1e12:g} TFLOP/s)",
    )
    micro = math.ceil(rows / work.rows_at_once(work.completion))
    yield Span(
        "launches",
        micro * shape.layers * hardware.LAYER_SECONDS,
        f"{micro} micro-batches × {shape.layers} layers × {hardware.LAYER_SECONDS * 1e3:g} ms",
    )
    owned = work.trained / ranks
    if work.trainer_reference != "no":
        moved = {"model": work.policy_bytes, "average": 4 * owned}.get(work.trainer_reference, 0.0)
        flops = shape.forward_flops(rows * row, attended=work.attended, scored=scored)
        rate = share * gpu.flops(dtype)
        formula = f"{moved / 1e9:.3g} GB from the host, {flops / 1e12:,.3g} TFLOP"
        if work.trainer_reference == "average":
            both_ways = f"2 × {moved / 1e9:.3g} GB, to the GPU and back"
            yield Span("average", 2 * moved / hardware.HOST_COPY, both_ways)
        else:
            formula += ", where all data are new"
        yield Span("reference", moved / hardware.HOST_COPY + flops / rate, formula)
    rate = hardware.BANDWIDTH_SHARE * gpu.bandwidth
    yield Span("optimizer", 48 * owned / (rate * 1e9), f"48 B × {owned / 1e9:.3g} G ÷ {rate:,.0f} GB/s")
    if ranks > 1:
        times = (passes if train.zero_stage == 3 else 1) * (micro if train.zero_stage > 1 else 1)
        times += train.zero_stage != 3  # the new weights
        each = work.policy_bytes if train.zero_stage == 3 else work.published_bytes
        link = hardware.LINK_SHARE * gpu.link if ranks <= gpus_per_node else hardware.NODE_LINK / hardware.GB
        moved = times * each * (ranks - 1) / ranks
        formula = f"{times} × {each / 1e9:.3g} GB × {ranks - 1}/{ranks} ÷ {link:,.0f} GB/s"
        yield Span("between trainers", moved / (link * 1e9), formula)


def group_spans(work: Workload, gpu: Gpu, engine_kv: float) -> Iterator[Span]:
    """Parts of a searcher's time for a group; what is beside the engine shares its GPU, so they add up.

    engine_kv: bytes of its KV cache, on each of its GPUs.
    """
    generator, dtype = work.config.generator, work.config.model.dtype
    completions = generator.completions_per_prompt
    batch, rate = decode(work, gpu, engine_kv)
    yield Span(
        "generation",
        completions * work.completion / rate,
        f"{completions} × {work.completion:g} tokens ÷ {rate:,.0f} tokens/s ({batch:.0f} sequences at once)",
    )
    policy = work.policy
    prefill = policy.forward_flops(work.prompt, attended=work.prompt / 2, scored=0)
    prefill /= hardware.PREFILL_SHARE * gpu.flops(dtype) * generator.tensor_parallel
    yield Span("its prompt", prefill, f"{work.prompt:g} tokens")
    if work.has_reference:
        scored = completions * work.completion
        tokens = work.prompt + scored
        flops = policy.forward_flops(tokens, attended=work.prompt, scored=scored)
        yield _reading("reference", flops, gpu.flops(dtype), f"{tokens:,.0f} tokens")
    for option, reader in work.readers.items():
        if option not in ("gold_model", "embedder"):  # these are asked in evaluations
            yield _reader_span(work, option, reader, gpu)
    if work.victim:
        answers = int(work.config.task.options.get("answers", 5)) * completions
        tokens = answers * int(work.config.task.options.get("victim_max_tokens", 30))
        yield Span("task.options.victim", tokens / rate, f"{tokens:,} tokens, as fast as the policy's engine")


def _reader_span(work: Workload, option: str, reader: Shape, gpu: Gpu) -> Span:
    options, texts = work.config.task.options, work.config.generator.completions_per_prompt
    length = work.prompt + work.completion
    if work.victim:
        texts *= int(options.get("answers", 5))
        length = int(options.get("victim_max_tokens", 30)) + (TEXT_BEYOND if option == "guard" else 0)
    flops = reader.forward_flops(texts * length, attended=length / 2, scored=0)
    best = gpu.flops("float32" if reader.disk_bytes == BYTES["float32"] else "bfloat16")
    return _reading(f"task.options.{option}", flops, best, f"{texts} texts of {length:,.0f} tokens")


def _reading(name: str, flops: float, best: float, what: str) -> Span:
    share = hardware.SCORING_SHARE
    return Span(
        name,
        flops / (share * best),
        f"{what}: {flops / 1e12:,.3g} TFLOP ÷ ({share:g} × {best / 1e12:g} TFLOP/s)",
    )


def decode(work: Workload, gpu: Gpu, engine_kv: float) -> tuple[float, float]:
    """Sequences that an engine decodes at once, and the tokens/s that come of it."""
    ranks, size, shape = work.config.generator.tensor_parallel, work.weight_bytes, work.policy
    length = work.prompt / work.config.generator.completions_per_prompt + work.completion / 2
    room = engine_kv / (shape.kv_bytes(size) / ranks * max(length, 1))
    batch = max(1.0, min(work.sequences, room))
    return batch, batch / decode_seconds(
        shape, gpu, batch=batch, length=work.prompt + work.completion / 2, weight_bytes=size, ranks=ranks
    )


def decode_seconds(
    shape: Shape, gpu: Gpu, *, batch: float, length: float, weight_bytes: int, ranks: int = 1
) -> float:
    """Of one token for each of ``batch`` sequences of so many tokens, over ``ranks`` GPUs."""
    active = min(shape.parameters, shape.layers * shape.matrices + shape.head + shape.table)
    read = weight_bytes * active + batch * length * shape.kv_bytes(weight_bytes)
    memory = read / ranks / (hardware.BANDWIDTH_SHARE * gpu.bandwidth * 1e9)
    flops = shape.forward_flops(batch, attended=length, scored=batch) / ranks
    compute = flops / (
        hardware.DECODE_SHARE * gpu.flops("float32" if weight_bytes == BYTES["float32"] else "bfloat16")
    )
    return max(memory, compute) + hardware.DECODE_STEP_SECONDS + batch * hardware.DECODE_SEQUENCE_SECONDS


def publish_spans(work: Workload, nodes: int) -> Iterator[Span]:
    """Of a publication: what the trainer stands still for, then a searcher, then its engine."""
    size, whole = work.published_bytes, work.policy_bytes
    parts, ranks = work.config.launch.trainers, work.config.generator.tensor_parallel
    text = f"{size / 1e9:.3g} GB"
    yield Span(
        "trainer's stall",
        size / parts / hardware.HOST_COPY,
        f"{text} ÷ {parts} ÷ {hardware.HOST_COPY / 1e9:g} GB/s, to the host",
    )
    rate = hardware.NETWORK if nodes > 1 else hardware.MEMORY_COPY
    yield Span("to the searchers", size / rate, f"{text} ÷ {rate / 1e9:g} GB/s, beside training")
    yield Span("private copy", size / hardware.MEMORY_COPY, f"{text} ÷ {hardware.MEMORY_COPY / 1e9:g} GB/s")
    yield Span(
        "engine's stall",
        whole / ranks / hardware.HOST_COPY,
        f"{whole / 1e9:.3g} GB ÷ {ranks} ÷ {hardware.HOST_COPY / 1e9:g} GB/s, to the GPU"
        f"{', merged with the adapter' if work.adapter else ''}",
    )


def recompute_span(work: Workload, gpu: Gpu, engine_kv: float) -> Span:
    """Of the attention cache that an engine computes again after every publication."""
    batch, _ = decode(work, gpu, engine_kv)
    tokens = batch * (work.completion / 2 + work.prompt / work.config.generator.completions_per_prompt)
    best = hardware.PREFILL_SHARE * gpu.flops(work.config.model.dtype) * work.config.generator.tensor_parallel
    flops = work.policy.forward_flops(tokens, attended=work.completion / 2, scored=batch)
    return Span("KV cache anew", flops / best, f"{tokens:,.0f} tokens of {batch:.0f} sequences in flight")


def checkpoint_spans(work: Workload, gpus_per_node: int) -> Iterator[Span]:
    """Of a checkpoint: the copy that the trainer waits for, and the writing beside training."""
    ranks = work.config.launch.trainers
    size = (12 + work.weight_bytes) * work.trained
    text = f"{size / 1e9:.3g} GB"
    yield Span(
        "copy", size / ranks / hardware.HOST_COPY, f"{text} ÷ {ranks} ÷ {hardware.HOST_COPY / 1e9:g} GB/s"
    )
    nodes = math.ceil(ranks / gpus_per_node)
    yield Span(
        "writing",
        size / nodes / hardware.DISK,
        f"{text} ÷ {nodes} ÷ {hardware.DISK / 1e9:g} GB/s, beside training",
    )


def total(parts: Iterator[Span] | list[Span]) -> float:
    """Seconds of all."""
    return sum(part.seconds for part in parts)


def items_named(items: tuple[Item, ...], name: str) -> float:
    """Bytes of the items of that name."""
    return sum(item.bytes for item in items if item.name == name)
