"""Memory of a GPU, item by item: of a trainer rank; of a searcher, its engine and the models beside it.

It must not know which ranks share a GPU. Everything is for the longest completions: a policy that does not
know yet when to stop fills every group with them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tba_hpc.checks.planner.hardware import GIB, Gpu
from tba_hpc.checks.planner.shapes import BYTES, Shape
from tba_hpc.checks.planner.workload import READER_BATCH, Workload

CONTEXT = 0.6 * GIB
"""What CUDA and its libraries take of a GPU for each process."""

NCCL = 0.5 * GIB
"""Buffers of NCCL, where there are several trainer ranks."""

ENGINE_RUNTIME = 1.5 * GIB
"""CUDA, graphs and workspaces of an engine."""

CHUNK_TOKENS = 256
"""As in learner.hf_model, which needs torch."""

BUCKET = 128 << 20
"""Most weights in a reduction of gradients (deepspeed_settings.BUCKET_ELEMENTS)."""

LIVE = 10**9
"""Most weights that ZeRO-3 keeps whole at once (DeepSpeed's default)."""

BATCHED_TOKENS = 8192
"""Tokens that an engine computes in one step at most (vLLM's default; 16,384 on GPUs of 70 GiB and more)."""

LARGE_GPU = 70
"""GiB."""


@dataclass(frozen=True, slots=True)
class Item:
    """A part of a GPU's memory, and how it was reckoned."""

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
    """Of a trainer rank, the leader: at its peak, in the backward pass or in the optimizer."""
    return Need(who="trainer", items=tuple(_trainer_items(work)))


def _trainer_items(work: Workload) -> Iterator[Item]:
    config, shape = work.config, work.policy
    weights, ranks, stage = work.trained, config.launch.trainers, config.train.zero_stage
    shared = f" ÷ {ranks}" if ranks > 1 else ""
    yield Item(
        "weights",
        work.policy_bytes / (ranks if stage == 3 else 1),
        f"{work.weight_bytes} B × {_count(shape.parameters)}{shared if stage == 3 else ''}",
    )
    if work.adapter:
        yield Item("adapter", work.published_bytes, f"{work.weight_bytes} B × {_count(weights)}")
    if not config.train.offloads_optimizer:
        yield Item("float32 masters", 4 * weights / ranks, f"4 B × {_count(weights)}{shared}")
        yield Item("AdamW", 8 * weights / ranks, f"8 B × {_count(weights)}{shared}")
    of_gradients = 1 if stage == 1 else ranks
    yield Item(
        "gradients",
        4 * weights / of_gradients,
        f"4 B × {_count(weights)}{shared if stage > 1 else ''}",
    )
    bucket = min(BUCKET, weights)
    yield Item("reduction", work.weight_bytes * bucket, f"{work.weight_bytes} B × {_count(bucket)}")
    if stage == 3 and ranks > 1:
        live = min(shape.parameters, LIVE)
        yield Item("gathered weights", work.weight_bytes * live, f"{work.weight_bytes} B × {_count(live)}")
    step = 0.0 if config.train.offloads_optimizer else 8 * weights / ranks
    peaks = [
        list(_backward_items(work)),
        [Item("in the optimizer", step, f"8 B × {_count(weights)}{shared}, more than the backward pass")],
        list(_visiting_items(work)),
        list(_reading_items(work)),
    ]
    yield from max(peaks, key=lambda items: sum(item.bytes for item in items))
    if work.embedder:
        yield Item("embedder of the buffer", _reader_bytes(work.embedder), _reader_formula(work.embedder))
    yield Item("CUDA", CONTEXT + (NCCL if ranks > 1 else 0), "assumed")


def _reading_items(work: Workload) -> Iterator[Item]:
    """Of a base that every rank reads as a whole before it is shared out."""
    ranks = work.config.launch.trainers
    if work.adapter and work.config.train.zero_stage == 3:
        formula = f"{work.weight_bytes} B × {_count(work.policy.parameters)}, less what stays here"
        yield Item("weights, while they are read", work.policy_bytes * (1 - 1 / ranks), formula)


def _visiting_items(work: Workload) -> Iterator[Item]:
    """The reference that a trainer computes, while it is on the GPU; nothing is kept for a backward pass."""
    if work.trainer_reference not in ("model", "average"):
        return
    parameters = work.policy.parameters
    formula = f"{work.weight_bytes} B × {_count(parameters)}, more than the backward pass"
    yield Item("reference, which visits", work.policy_bytes, formula)
    tokens = work.config.train.tokens_per_micro_batch or work.group * (work.prompt + work.longest)
    yield Item("reference: a group", *_scoring(work, tokens, cached=False))


def _scoring(work: Workload, tokens: float, *, cached: bool) -> tuple[float, str]:
    """Bytes that the policy's architecture needs to read so many tokens, and how they were reckoned."""
    shape, size = work.policy, work.weight_bytes
    each = size * (4 * shape.hidden + 3 * shape.inner * shape.experts_per_token)
    each += shape.kv_bytes(size) if cached else 0
    logits = 8 * CHUNK_TOKENS * shape.vocabulary
    return tokens * each + logits, f"{_count(tokens)} tokens × {each / 1024:,.0f} KiB + logits"


def _backward_items(work: Workload) -> Iterator[Item]:
    """Activations of a micro-batch, and the output layer's gradient."""
    train, shape, size = work.config.train, work.policy, work.weight_bytes
    rows, row = work.rows_at_once(work.longest), work.row(work.longest)
    tokens, layer = rows * row, activation_bytes(shape, size)
    of_tokens = f"{_count(tokens)} tokens of {rows:.0f} × {row:,.0f}"
    if (budget := train.tokens_per_micro_batch) is not None:  # shorter rows fill it
        tokens = min(budget, work.groups_per_rank * work.group / work.per_row * row)
        of_tokens = f"{_count(tokens)} tokens (train.tokens_per_micro_batch)"
    if train.gradient_checkpointing:
        kept = size * shape.hidden * shape.layers + 1.5 * layer
        formula = (
            f"{of_tokens} × ({size} B × {shape.hidden} × {shape.layers} + 1.5 × {layer / 1024:,.0f} KiB)"
        )
    else:
        kept = layer * (shape.layers + 0.5)
        formula = f"{of_tokens} × {shape.layers} layers × {layer / 1024:,.0f} KiB"
    yield Item("activations", tokens * kept, formula)
    if work.by_sequence:
        yield _gathered(work, tokens, row)
    elif work.per_row > 1:
        yield Item("masks", rows * row**2 * (1 + size), f"{rows:.0f} × {row:,.0f}² × {1 + size} B")
    scored = tokens * work.per_row * work.longest / row
    yield Item(
        "hidden states", 3 * size * shape.hidden * scored, f"3 × {size} B × {shape.hidden} × {scored:,.0f}"
    )
    chunk = min(CHUNK_TOKENS, scored)
    logits = chunk * shape.vocabulary * (8 + size)
    yield Item("logits", logits, f"{chunk:,.0f} tokens × {shape.vocabulary:,} × {8 + size} B")
    if not work.adapter:
        head = (4 + size) * shape.vocabulary * shape.hidden
        yield Item("output layer's gradient", head, f"{4 + size} B × {shape.vocabulary:,} × {shape.hidden}")


def _gathered(work: Workload, tokens: float, row: float) -> Item:
    """What attention keeps of prompts that each sequence reads; of all other tokens a layer's item has it."""
    train, shape = work.config.train, work.policy
    again = tokens / row * (work.per_row - 1) * work.prompt
    each = 2 * work.weight_bytes * (shape.query + shape.key_value)
    layers = 1 if train.gradient_checkpointing else shape.layers
    formula = f"{_count(again)} tokens of prompts read again × {layers} layers × {each / 1024:,.0f} KiB"
    return Item("attention, gathered", again * each * layers, formula)


def searcher_need(work: Workload, gpu: Gpu, place: int = 0) -> Need:
    """Of a searcher rank on the GPU of that place among its engine's: the first holds other models, too."""
    generator, shape = work.config.generator, work.policy
    engine, too_little = engine_items(
        shape,
        gpu,
        weight_bytes=work.weight_bytes,
        ranks=generator.tensor_parallel,
        sequences=work.sequences,
        longest=work.config.model.context_length,
        kv_cache_mb=generator.kv_cache_mb,
        share=generator.gpu_memory_utilization,
        keys=("generator.kv_cache_mb", "generator.gpu_memory_utilization"),
    )
    beside = tuple(_beside_items(work, gpu)) if place == 0 else ()
    return Need(
        who="searcher" if place == 0 else "searcher's further GPUs",
        items=(*engine, *beside),
        engine=sum(item.bytes for item in engine),
        free=generator.gpu_memory_utilization * gpu.bytes,
        too_little=too_little,
    )


def engine_items(
    shape: Shape,
    gpu: Gpu,
    *,
    weight_bytes: int,
    ranks: int,
    sequences: int,
    longest: int,
    kv_cache_mb: int | None,
    share: float,
    keys: tuple[str, str],
) -> tuple[list[Item], str]:
    """Of an engine on one of its GPUs; and why it would not start, else an empty text."""
    split = f" ÷ {ranks}" if ranks > 1 else ""
    weights = weight_bytes * shape.parameters / ranks
    batched = BATCHED_TOKENS * (2 if gpu.memory >= LARGE_GPU else 1)
    work = weight_bytes * batched * (8 * shape.hidden + 4 * shape.inner / ranks)
    work += 8 * sequences * shape.vocabulary
    each = shape.kv_bytes(weight_bytes) / min(ranks, shape.key_value_heads)  # further GPUs hold copies
    budget = share * gpu.bytes - weights - ENGINE_RUNTIME - work
    cache = (kv_cache_mb << 20) if kv_cache_mb else max(budget, 0.0)
    how = f"{keys[0]}" if kv_cache_mb else f"{share:g} × {gpu.memory:g} GiB ({keys[1]}) less the rest"
    items = [
        Item("engine: weights", weights, f"{weight_bytes} B × {_count(shape.parameters)}{split}"),
        Item("engine: KV cache", cache, f"{how}: {_count(cache / each)} tokens of {each / 1024:,.0f} KiB"),
        Item(
            "engine: work",
            ENGINE_RUNTIME + work,
            f"{ENGINE_RUNTIME / GIB:g} GiB + {batched:,} tokens + {sequences} rows of logits",
        ),
    ]
    if cache >= longest * each:
        return items, ""
    return items, (
        f"its KV cache of {cache / GIB:.2f} GiB does not hold one sequence of {longest:,} tokens "
        f"({longest * each / GIB:.2f} GiB), which vLLM asks for"
    )


def _beside_items(work: Workload, gpu: Gpu) -> Iterator[Item]:
    """The models that a searcher's rank holds beside its engine."""
    shape, size = work.policy, work.weight_bytes
    if work.has_reference:
        yield Item("reference", work.policy_bytes, f"{size} B × {_count(shape.parameters)}")
        tokens = work.config.generator.completions_per_prompt * (work.prompt + work.longest)
        yield Item("reference: a group", *_scoring(work, tokens, cached=True))
    for option, reader in work.readers.items():
        yield Item(
            f"task.options.{option}", _reader_bytes(reader, _batch(work, option)), _reader_formula(reader)
        )
    if work.victim:
        yield from _victim_items(work, work.victim, gpu)
    yield Item("CUDA", CONTEXT, "of the rank, assumed")


def _victim_items(work: Workload, victim: Shape, gpu: Gpu) -> Iterator[Item]:
    """A second engine, which takes its share of the whole GPU, or what its KV cache and weights need."""
    options = work.config.task.options
    share, cache = float(options.get("victim_gpu_memory", 0.3)), options.get("victim_kv_cache_mb")
    if cache is None:
        yield Item(
            "task.options.victim", share * gpu.bytes, f"{share:g} × {gpu.memory:g} GiB (victim_gpu_memory)"
        )
        return
    weights = BYTES[str(options.get("victim_dtype", "bfloat16"))] * victim.parameters
    needed = weights + (int(cache) << 20) + ENGINE_RUNTIME
    yield Item("task.options.victim", needed, "weights, victim_kv_cache_mb and runtime")


def _batch(work: Workload, option: str) -> int:
    options = work.config.task.options
    return int(options.get(f"{option}_batch") or options.get("batch") or READER_BATCH.get(option, 32))


def _reader_bytes(shape: Shape, batch: int = 64) -> float:
    """A model that reads texts, in its files' type, and a batch of 512 tokens each."""
    working = batch * 512 * shape.disk_bytes * (6 * shape.hidden + 3 * shape.inner)
    return shape.disk_bytes * shape.parameters + working


def _reader_formula(shape: Shape) -> str:
    return f"{shape.disk_bytes} B × {_count(shape.parameters)}, and a batch"


def _count(number: float) -> str:
    """1.10e9 as 1.10 G."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.3g} {letter}"
    return f"{number:.0f}"
