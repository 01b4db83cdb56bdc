"""Estimates the memory that a run needs on each GPU, and whether the run fits."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from tba_hpc.checks.planner.hardware import GIB, Gpu
from tba_hpc.checks.planner.memory import KV_CACHE, Items, Workload, searcher_items, trainer_items
from tba_hpc.config import Config, ConfigError

MARGIN = 0.03
"""Share of a GPU's memory that stays free, for fragmentation and for what the estimate omits."""

TRAINER, SEARCHER = "trainer", "searcher"
"""Names of ranks in an estimate."""

Lack = Literal["memory", "KV cache", ""]
"""Resource of which the ranks of a GPU have too little; "" for none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """Group of GPUs that each hold the same kinds of ranks, such as one trainer and two searchers.

    count: number of GPUs in the group. ranks: names of the ranks on each GPU. bytes: memory that these ranks
    need on the GPU. problem: sentence that says why the ranks do not fit or cannot start, or "". lacks:
    resource of which the ranks have too little, or "".
    """

    count: int
    ranks: tuple[str, ...]
    bytes: float
    problem: str
    lacks: Lack

    @property
    def name(self) -> str:
        """Description of the ranks, such as ``trainer + 2 × searcher``."""
        return _named(self.ranks)


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """The estimate of a run.

    gpu: name of the GPU. parameters: number of weights of the policy. adapter: number of weights of its LoRA
    adapter, 0 for none. prompt_tokens: mean length of prompts. micro_batch_tokens: tokens in a micro-batch if
    all completions have the maximum length. cache_tokens: tokens in the KV cache of an engine. items: memory
    of each kind of rank, in bytes by purpose. devices: all GPUs that hold ranks.
    """

    gpu: str
    gpus_per_node: int
    nodes: int
    parameters: int
    adapter: int
    prompt_tokens: float
    micro_batch_tokens: float
    cache_tokens: float
    items: dict[str, Items]
    devices: tuple[Device, ...]

    @property
    def problems(self) -> tuple[str, ...]:
        """Reasons why the run does not fit, one sentence per ``Device``; empty if it fits."""
        return tuple(device.problem for device in self.devices if device.problem)


def estimate(
    config: Config,
    gpu: Gpu,
    *,
    gpus: int | None = None,
    spread: bool = False,
    prompt_tokens: float | None = None,
) -> Estimate:
    """Estimate the memory of a run.

    gpus: number of GPUs per node; None means as many as the ranks need. spread: whether trainers and
    searchers have separate nodes, as in a Slurm job. Otherwise all ranks are on one node, and share GPUs if
    there are too few. prompt_tokens: as for ``Workload.of``. Raises ConfigError if a model is unknown, if the
    GPU lacks the dtype of the policy, or if there are no searchers.
    """
    _require(config, gpu)
    work = Workload.of(config, prompt_tokens=prompt_tokens)
    trainers, engines = config.launch.trainers, config.launch.searchers * config.generator.tensor_parallel
    per_node = gpus or trainers + engines
    nodes = math.ceil(trainers / per_node) + math.ceil(engines / per_node) if spread else 1
    items = {TRAINER: trainer_items(work), SEARCHER: searcher_items(work, gpu)}
    placed = _placed(trainers, engines, per_node, spread=spread)
    devices = tuple(_device(ranks, number, items, gpu, work) for ranks, number in placed.items())
    return Estimate(
        gpu=gpu.name,
        gpus_per_node=per_node,
        nodes=nodes,
        parameters=work.policy.parameters,
        adapter=work.adapter,
        prompt_tokens=work.prompt,
        micro_batch_tokens=work.micro_batch,
        cache_tokens=items[SEARCHER][KV_CACHE] / work.cache_bytes,
        items=items,
        devices=devices,
    )


def _require(config: Config, gpu: Gpu) -> None:
    if not config.launch.searchers:
        raise ConfigError(
            "launch.searchers=0 leaves no searcher to estimate: add --set launch.searchers=N, where N is the "
            "number of elastic searchers that will join"
        )
    if config.model.dtype == "bfloat16" and not gpu.bf16:
        raise ConfigError(
            f"--gpu {gpu.name} cannot compute in model.dtype=bfloat16: add --set model.dtype=float32 (twice "
            "the memory), or choose another GPU"
        )


# --- Memory ---


def _placed(trainers: int, engines: int, gpus: int, *, spread: bool) -> Counter[tuple[str, ...]]:
    """Return the number of GPUs that hold each combination of ranks.

    gpus: number of GPUs of the node. Each GPU of an engine is counted as if it were the fullest one.
    """
    ranks = [TRAINER] * trainers + [SEARCHER] * engines
    if spread:
        return Counter((rank,) for rank in ranks)
    return Counter(tuple(ranks[number::gpus]) for number in range(min(gpus, len(ranks))))


def _named(ranks: Sequence[str]) -> str:
    return " + ".join(who if number == 1 else f"{number} × {who}" for who, number in Counter(ranks).items())


def usable(gpu: Gpu) -> float:
    """Return the bytes of a GPU's memory that ranks may fill."""
    return (1 - MARGIN) * gpu.bytes


def _device(ranks: tuple[str, ...], number: int, items: dict[str, Items], gpu: Gpu, work: Workload) -> Device:
    used, room = sum(sum(items[rank].values()) for rank in ranks), usable(gpu)
    lacks: Lack = ""
    problem = ""
    if used > room:
        lacks = "memory"
        problem = (
            f"would need {used / GIB:.1f} GiB, but {room / GIB:.1f} of its {gpu.memory:g} GiB are usable: "
            f"{(used - room) / GIB:.1f} GiB too much"
        )
    elif SEARCHER in ranks:
        engine = sum(size for name, size in items[SEARCHER].items() if name.startswith("engine"))
        cache = items[SEARCHER][KV_CACHE]
        lacks, problem = _engine_problem(cache, used - engine, gpu, work, shared=len(ranks) > 1)
    named = f"{gpu.name} with {_named(ranks)} {problem}" if problem else ""
    return Device(count=number, ranks=ranks, bytes=used, problem=named, lacks=lacks)


def _engine_problem(
    cache: float, others: float, gpu: Gpu, work: Workload, *, shared: bool
) -> tuple[Lack, str]:
    """Return what an engine lacks, and why it cannot start although the memory suffices; ("", "") if it can.

    cache: bytes of its KV cache. others: bytes that everything but the engine needs on the GPU. shared:
    whether the GPU holds other ranks.
    """
    generator, longest = work.config.generator, work.config.model.context_length
    heads, ranks, free = work.policy.heads, generator.tensor_parallel, generator.gpu_memory_utilization
    if heads % ranks:
        return "", (
            f"cannot start an engine: generator.tensor_parallel={ranks} does not divide the {heads} "
            f"attention heads of {work.config.model.path}"
        )
    if cache < longest * work.cache_bytes:
        return "KV cache", (
            f"cannot start an engine: its KV cache of {cache / GIB:.2f} GiB holds "
            f"{int(cache / work.cache_bytes):,} tokens, fewer than one sequence of {longest:,} "
            "(model.context_length)"
        )
    if shared and generator.kv_cache_mb is None:
        return "", (
            "would give each engine a KV cache of unpredictable size, since its ranks start at the same "
            "time: set generator.kv_cache_mb"
        )
    if others + free * gpu.bytes > gpu.bytes:
        return "", (
            f"cannot start an engine: vLLM needs {free * gpu.memory:.1f} GiB free, but everything else takes "
            f"{others / GIB:.1f} GiB: lower generator.gpu_memory_utilization"
        )
    return "", ""
