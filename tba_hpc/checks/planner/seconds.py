"""Rough seconds of a step and of a group, each with its formula."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from tba_hpc.checks.planner import hardware
from tba_hpc.checks.planner.hardware import GB, Gpu
from tba_hpc.checks.planner.shapes import BYTES, Shape
from tba_hpc.checks.planner.workload import Workload

PASSES, CHECKPOINTED_PASSES = 3, 4
"""Forward passes that forward and backward cost; one more with gradient checkpointing."""


@dataclass(frozen=True, slots=True)
class Span:
    """A time, s, and how it was computed."""

    name: str
    seconds: float
    formula: str


def step_spans(work: Workload, gpu: Gpu, gpus_per_node: int) -> Iterator[Span]:
    """Parts of an optimizer step, for mean lengths."""
    config, shape = work.config, work.policy
    train, ranks, dtype = config.train, config.launch.trainers, config.model.dtype
    sequences = work.groups_per_rank * work.group
    length = work.prompt + work.completion
    once = shape.forward_flops(sequences * length, attended=length / 2, scored=sequences * work.completion)
    passes = CHECKPOINTED_PASSES if train.gradient_checkpointing else PASSES
    passes += work.micro_batch(work.completion) < work.group * length  # a split group is computed once more
    passes -= work.adapter > 0  # frozen weights have no gradients
    passes += work.trainer_reference != "no"
    rate = hardware.TRAINING_SHARE[dtype] * gpu.flops(dtype)
    formula = f"{passes} × {once / 1e12:,.3g} TFLOP ÷ {rate / 1e12:,.3g} TFLOP/s"
    yield Span("forward and backward", passes * once / rate, formula)
    owned = work.trained / ranks
    if work.trainer_reference in ("model", "average"):
        moved = work.policy_bytes if work.trainer_reference == "model" else 3 * 4 * owned
        yield Span("reference, to the GPU", moved / hardware.HOST_COPY, f"{moved / GB:.3g} GB from the host")
    bandwidth = hardware.BANDWIDTH_SHARE * gpu.bandwidth
    formula = f"48 B × {owned / 1e9:.3g} G ÷ {bandwidth:,.0f} GB/s"
    yield Span("optimizer", 48 * owned / (bandwidth * GB), formula)
    stall = work.published_bytes / ranks / hardware.HOST_COPY / config.exchange.sync_every
    yield Span("publication", stall, f"{work.published_bytes / GB:.3g} GB to the host, every few steps")
    if ranks > 1:
        micro = max(1.0, sequences * length / work.micro_batch(work.completion))
        times = passes * micro if train.zero_stage == 3 else 1 + (micro if train.zero_stage == 2 else 1)
        each = work.policy_bytes if train.zero_stage == 3 else work.published_bytes
        link = hardware.LINK_SHARE * gpu.link * GB if ranks <= gpus_per_node else hardware.NODE_LINK
        moved = times * each * (ranks - 1) / ranks
        formula = f"{times:.0f} × {each / GB:.3g} GB × {ranks - 1}/{ranks} ÷ {link / GB:,.0f} GB/s"
        yield Span("between trainers", moved / link, formula)


def group_spans(work: Workload, gpu: Gpu, cache: float) -> Iterator[Span]:
    """Parts of a searcher's time for a group. cache: bytes of the engine's KV cache, on each of its GPUs."""
    generator = work.config.generator
    completions = generator.completions_per_prompt
    batch, rate = decode(work, gpu, cache)
    yield Span(
        "generation",
        completions * work.completion / rate,
        f"{completions} × {work.completion:g} tokens ÷ {rate:,.0f} tokens/s ({batch:.0f} sequences at once)",
    )
    if work.has_reference:
        tokens = completions * (work.prompt + work.completion)
        scored = completions * work.completion
        yield _reading("reference", work.policy, work.weight_bytes, gpu, tokens, scored)
    texts, length = completions, work.prompt + work.completion
    if work.victim:
        options = work.config.task.options
        texts *= int(options.get("answers", 5))
        length = int(options.get("victim_max_tokens", 30))
        formula = f"{texts} × {length} tokens, as fast as the policy's engine"
        yield Span("task.options.victim", texts * length / rate, formula)
    for option, reader in work.readers.items():
        if option not in ("gold_model", "embedder"):  # these are asked in evaluations
            yield _reading(f"task.options.{option}", reader, reader.disk_bytes, gpu, texts * length)


def _reading(name: str, shape: Shape, weight_bytes: int, gpu: Gpu, tokens: float, scored: float = 0) -> Span:
    """A model that reads finished texts."""
    flops = shape.forward_flops(tokens, attended=0, scored=scored)
    rate = hardware.SCORING_SHARE * _flops(gpu, weight_bytes)
    return Span(name, flops / rate, f"{tokens:,.0f} tokens: {flops / 1e12:,.3g} ÷ {rate / 1e12:,.3g} TFLOP/s")


def decode(work: Workload, gpu: Gpu, cache: float) -> tuple[float, float]:
    """Sequences that an engine decodes at once, and its tokens/s."""
    generator, size = work.config.generator, work.weight_bytes
    length = work.prompt / generator.completions_per_prompt + work.completion / 2
    room = cache * generator.tensor_parallel / (work.policy.kv_bytes(size) * max(length, 1))
    batch = max(1.0, min(work.sequences, room))
    length, ranks = work.prompt + work.completion / 2, generator.tensor_parallel
    return batch, batch / decode_seconds(
        work.policy, gpu, batch=batch, length=length, weight_bytes=size, ranks=ranks
    )


def decode_seconds(
    shape: Shape, gpu: Gpu, *, batch: float, length: float, weight_bytes: int, ranks: int = 1
) -> float:
    """Seconds of one token for each of ``batch`` sequences of ``length`` tokens, over ``ranks`` GPUs."""
    active = min(shape.parameters, shape.layers * shape.matrices + shape.head + shape.table)
    read = weight_bytes * active + batch * length * shape.kv_bytes(weight_bytes)
    memory = read / ranks / (hardware.BANDWIDTH_SHARE * gpu.bandwidth * GB)
    flops = shape.forward_flops(batch, attended=length, scored=batch) / ranks
    compute = flops / (hardware.DECODE_SHARE * _flops(gpu, weight_bytes))
    return max(memory, compute) + hardware.DECODE_STEP_SECONDS + batch * hardware.DECODE_SEQUENCE_SECONDS


def _flops(gpu: Gpu, weight_bytes: int) -> float:
    return gpu.flops("float32" if weight_bytes == BYTES["float32"] else "bfloat16")


def total(spans: Iterable[Span]) -> float:
    """Seconds of all."""
    return sum(span.seconds for span in spans)
