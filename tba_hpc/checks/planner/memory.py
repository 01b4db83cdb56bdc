"""Memory of a GPU, item by item: a trainer rank; a searcher's engine and the models beside it.

Everything is for the longest completions: an untrained policy fills every group with them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tba_hpc.checks.planner.hardware import GIB, Gpu
from tba_hpc.checks.planner.shapes import BYTES, Shape
from tba_hpc.checks.planner.workload import READER_BATCH, Workload

CONTEXT, NCCL = 0.6 * GIB, 0.5 * GIB
"""What CUDA takes of a GPU for each process, and NCCL's buffers if there are several trainer ranks."""

ENGINE_RUNTIME = 1.5 * GIB
"""CUDA, graphs and workspaces of an engine."""

CHUNK_TOKENS = 256
"""As in learner.hf_model, which needs torch."""

BUCKET, LIVE = 128 << 20, 10**9
"""Most weights in a reduction of gradients (deepspeed_settings.BUCKET_ELEMENTS), and most that ZeRO-3 keeps
whole at once (DeepSpeed's default)."""

BATCHED_TOKENS, LARGE_GPU = 8192, 70
"""Tokens that an engine computes in one step at most (vLLM's default); twice as many from so many GiB on."""


@dataclass(frozen=True, slots=True)
class Item:
    """A part of a GPU's memory, and how it was computed."""

    name: str
    bytes: float
    formula: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """What a rank takes of a GPU. free: bytes that must be free for its engine to start; engine: its own.

    too_little: why the engine would not start although all fits, if so.
    """

    who: str
    items: tuple[Item, ...]
    engine: float = 0.0
    free: float = 0.0
    too_little: str = ""

    @property
    def bytes(self) -> float:
        """All items."""
        return sum(item.bytes for item in self.items)


def activation_bytes(shape: Shape, weight_bytes: int) -> float:
    """What a layer keeps of a token for the backward pass, without checkpointing; transformers, SDPA.

    RMSNorm keeps float32 copies; LayerNorm keeps its input; GPT-2's GELU keeps steps of its formula.
    """
    heads = 3 * shape.query + 2 * shape.key_value
    if shape.gated:
        norms = 2 * (4 + 2 * weight_bytes) * shape.hidden
        mlp: float = 4 * shape.inner * shape.experts_per_token
    else:
        norms = 5 * weight_bytes * shape.hidden
        mlp = (4.5 if shape.kind == "gpt2" else 2) * shape.inner
    return norms + weight_bytes * (heads + mlp)


def trainer_need(work: Workload) -> Need:
    """A trainer rank at its peak, in the backward pass or in the optimizer."""
    return Need(who="trainer", items=tuple(_trainer_items(work)))


def _trainer_items(work: Workload) -> Iterator[Item]:
    config, size = work.config, work.weight_bytes
    weights, ranks, stage = work.trained, config.launch.trainers, config.train.zero_stage
    shared = f" ÷ {ranks}" if ranks > 1 else ""
    whole, trained = _count(work.policy.parameters), _count(weights)
    kept = work.policy_bytes / (ranks if stage == 3 else 1)
    yield Item("weights", kept, f"{size} B × {whole}{shared if stage == 3 else ''}")
    if work.adapter:
        yield Item("adapter", work.published_bytes, f"{size} B × {trained}")
    if not config.train.offloads_optimizer:
        yield Item("float32 masters", 4 * weights / ranks, f"4 B × {trained}{shared}")
        yield Item("AdamW", 8 * weights / ranks, f"8 B × {trained}{shared}")
    gradients = 4 * weights / (1 if stage == 1 else ranks)
    yield Item("gradients", gradients, f"4 B × {trained}{shared if stage > 1 else ''}")
    bucket = min(BUCKET, weights)
    yield Item("reduction", size * bucket, f"{size} B × {_count(bucket)}")
    if stage == 3 and ranks > 1:
        live = min(work.policy.parameters, LIVE)
        yield Item("gathered weights", size * live, f"{size} B × {_count(live)}")
    yield from max(_peaks(work), key=lambda items: sum(item.bytes for item in items))
    if work.embedder:
        yield _reader("embedder of the buffer", work.embedder, 64)
    yield Item("CUDA", CONTEXT + (NCCL if ranks > 1 else 0), "assumed")


def _peaks(work: Workload) -> Iterator[list[Item]]:
    """What a trainer rank holds besides at one time or another, of which the largest counts."""
    train, ranks = work.config.train, work.config.launch.trainers
    yield list(_backward_items(work))
    if not train.offloads_optimizer:
        formula = f"8 B × {_count(work.trained)} ÷ {ranks}, more than the backward pass"
        yield [Item("in the optimizer", 8 * work.trained / ranks, formula)]
    if work.trainer_reference in ("model", "average"):
        tokens = work.micro_batch(work.longest)
        formula = f"{work.weight_bytes} B × {_count(work.policy.parameters)}, more than the backward pass"
        model = Item("reference, which visits", work.policy_bytes, formula)
        yield [model, _scoring("reference: a micro-batch", work, tokens, cached=False)]


def _backward_items(work: Workload) -> Iterator[Item]:
    """Activations of a micro-batch, and the output layer's."""
    train, shape, size = work.config.train, work.policy, work.weight_bytes
    tokens, layer = work.micro_batch(work.longest), activation_bytes(shape, size)
    if train.gradient_checkpointing:
        kept = size * shape.hidden * shape.layers + 1.5 * layer
        formula = f"({size} B × {shape.hidden} × {shape.layers} + 1.5 × {layer / 1024:,.0f} KiB)"
    else:
        kept = layer * (shape.layers + 0.5)
        formula = f"{shape.layers} layers × {layer / 1024:,.0f} KiB"
    yield Item("activations", tokens * kept, f"{_count(tokens)} tokens × {formula}")
    scored = tokens * work.longest / (work.prompt + work.longest)
    formula = f"3 × {size} B × {shape.hidden} × {scored:,.0f}"
    yield Item("hidden states", 3 * size * shape.hidden * scored, formula)
    chunk = min(CHUNK_TOKENS, scored)
    formula = f"{chunk:,.0f} tokens × {shape.vocabulary:,} × {8 + size} B"
    yield Item("logits", chunk * shape.vocabulary * (8 + size), formula)
    if not work.adapter:
        head = (4 + size) * shape.vocabulary * shape.hidden
        yield Item("output layer's gradient", head, f"{4 + size} B × {shape.vocabulary:,} × {shape.hidden}")


def _scoring(name: str, work: Workload, tokens: float, *, cached: bool) -> Item:
    """What a model like the policy needs to read so many tokens."""
    shape, size = work.policy, work.weight_bytes
    each = size * (4 * shape.hidden + 3 * shape.inner * shape.experts_per_token)
    each += shape.kv_bytes(size) if cached else 0
    logits = 8 * CHUNK_TOKENS * shape.vocabulary
    return Item(name, tokens * each + logits, f"{_count(tokens)} tokens × {each / 1024:,.0f} KiB + logits")


def searcher_need(work: Workload, gpu: Gpu, place: int = 0) -> Need:
    """A searcher rank on one of its engine's GPUs: the first, place 0, holds other models, too."""
    generator = work.config.generator
    engine, too_little = _engine_items(work, gpu)
    beside = tuple(_beside_items(work, gpu)) if place == 0 else ()
    return Need(
        who="searcher" if place == 0 else "searcher's further GPUs",
        items=(*engine, *beside),
        engine=sum(item.bytes for item in engine),
        free=generator.gpu_memory_utilization * gpu.bytes,
        too_little=too_little,
    )


def _engine_items(work: Workload, gpu: Gpu) -> tuple[list[Item], str]:
    """An engine on one of its GPUs; and why it would not start, else an empty text."""
    generator, shape, size = work.config.generator, work.policy, work.weight_bytes
    ranks, share, sequences = generator.tensor_parallel, generator.gpu_memory_utilization, work.sequences
    weights = size * shape.parameters / ranks
    batched = BATCHED_TOKENS * (2 if gpu.memory >= LARGE_GPU else 1)
    runtime = ENGINE_RUNTIME + size * batched * (8 * shape.hidden + 4 * shape.inner / ranks)
    runtime += 8 * sequences * shape.vocabulary
    each = shape.kv_bytes(size) / min(ranks, shape.key_value_heads)  # further GPUs hold copies
    cache = max(share * gpu.bytes - weights - runtime, 0.0)
    how = f"{share:g} × {gpu.memory:g} GiB (generator.gpu_memory_utilization) less the rest"
    if generator.kv_cache_mb:
        cache, how = generator.kv_cache_mb << 20, "generator.kv_cache_mb"
    split = f" ÷ {ranks}" if ranks > 1 else ""
    items = [
        Item("engine: weights", weights, f"{size} B × {_count(shape.parameters)}{split}"),
        Item("engine: KV cache", cache, f"{how}: {_count(cache / each)} tokens of {each / 1024:,.0f} KiB"),
        Item("engine: work", runtime, f"runtime + {batched:,} tokens + {sequences} rows of logits"),
    ]
    longest = work.config.model.context_length
    if cache >= longest * each:
        return items, ""
    return items, (
        f"its KV cache of {cache / GIB:.2f} GiB does not hold one sequence of {longest:,} tokens "
        f"({longest * each / GIB:.2f} GiB), which vLLM asks for"
    )


def _beside_items(work: Workload, gpu: Gpu) -> Iterator[Item]:
    """The models that a searcher's rank holds beside its engine."""
    options = work.config.task.options
    if work.has_reference:
        formula = f"{work.weight_bytes} B × {_count(work.policy.parameters)}"
        yield Item("reference", work.policy_bytes, formula)
        tokens = work.config.generator.completions_per_prompt * (work.prompt + work.longest)
        yield _scoring("reference: a group", work, tokens, cached=True)
    for option, reader in work.readers.items():
        batch = options.get(f"{option}_batch") or options.get("batch") or READER_BATCH.get(option, 32)
        yield _reader(f"task.options.{option}", reader, int(batch))
    if work.victim:
        yield _victim(work, work.victim, gpu)
    yield Item("CUDA", CONTEXT, "assumed")


def _victim(work: Workload, victim: Shape, gpu: Gpu) -> Item:
    """A second engine, which takes its share of the whole GPU, or what its KV cache and weights need."""
    options = work.config.task.options
    share, cache = float(options.get("victim_gpu_memory", 0.3)), options.get("victim_kv_cache_mb")
    if cache is None:
        formula = f"{share:g} × {gpu.memory:g} GiB (victim_gpu_memory)"
        return Item("task.options.victim", share * gpu.bytes, formula)
    weights = BYTES[str(options.get("victim_dtype", "bfloat16"))] * victim.parameters
    needed = weights + (int(cache) << 20) + ENGINE_RUNTIME
    return Item("task.options.victim", needed, "weights, victim_kv_cache_mb and runtime")


def _reader(name: str, shape: Shape, batch: int) -> Item:
    """A model that reads texts, in its files' type, and a batch of 512 tokens each."""
    working = batch * 512 * shape.disk_bytes * (6 * shape.hidden + 3 * shape.inner)
    formula = f"{shape.disk_bytes} B × {_count(shape.parameters)}, and a batch"
    return Item(name, shape.disk_bytes * shape.parameters + working, formula)


def _count(number: float) -> str:
    """1.10e9 as 1.10 G."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.3g} {letter}"
    return f"{number:.0f}"
