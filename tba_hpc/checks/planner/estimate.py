"""A run on given GPUs, estimated before it starts: whether it fits, how fast, at what cost."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from tba_hpc.checks.planner.hardware import GIB, GPUS, Gpu
from tba_hpc.checks.planner.memory import KV_CACHE, Items, engine_items, searcher_items, trainer_items
from tba_hpc.checks.planner.seconds import Seconds, group_seconds, step_seconds
from tba_hpc.checks.planner.workload import Workload, workload_of
from tba_hpc.config import Config, ConfigError, parse_config
from tba_hpc.core.wording import count

MARGIN = 0.03
"""Share of a GPU that is left to fragments and to what is not counted."""

TRAINER_REMEDIES = (
    "train.gradient_checkpointing=true",
    *(f"train.tokens_per_micro_batch={size << 10}" for size in (16, 4)),
    "train.zero_stage=3",
    *(f"launch.trainers={ranks}" for ranks in (2, 4, 8, 16, 32)),
)
SEARCHER_REMEDIES = (
    *(f"generator.gpu_memory_utilization={share}" for share in (0.6, 0.5, 0.4, 0.3, 0.2, 0.1)),
    *(f"generator.kv_cache_mb={size << 10}" for size in (16, 8, 4, 2, 1)),
    *(f"generator.tensor_parallel={ranks}" for ranks in (2, 4, 8)),
    "launch.searchers=1",
)

MOST_REMEDIES = 3
"""Most changes that are suggested together, and most suggestions."""

TRAINER, SEARCHER, FURTHER = "trainer", "searcher", "searcher's further GPUs"
"""What a rank is called; the last: an engine on all but the first of its GPUs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """GPUs that hold the same ranks. problem: why these do not fit, else empty."""

    count: int
    ranks: tuple[str, ...]
    bytes: float
    problem: str

    @property
    def name(self) -> str:
        """trainer + 2 × searcher."""
        counts = Counter(self.ranks)
        return " + ".join(who if number == 1 else f"{number} × {who}" for who, number in counts.items())


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """All of it; bytes, seconds. items: of a rank, by its name. step, group: for mean lengths.

    micro_batch_tokens: with the longest completions; cache_tokens: of an engine, cache_bytes each.
    searchers_needed: how many give each step fresh groups. hours: to the last step; gpu_hours: of all GPUs.
    """

    gpu: str
    gpus_per_node: int
    nodes: int
    parameters: int
    adapter: int
    policy_bytes: float
    published_bytes: float
    prompt_tokens: float
    completion_tokens: float
    micro_batch_tokens: float
    cache_tokens: float
    cache_bytes: float
    items: dict[str, Items]
    devices: tuple[Device, ...]
    step: Seconds
    group: Seconds
    searchers_needed: float
    bottleneck: str
    hours: float
    gpu_hours: float

    @property
    def problems(self) -> tuple[str, ...]:
        """Why the run does not fit, one sentence for each kind of GPU; none if it does."""
        return tuple(device.problem for device in self.devices if device.problem)


def estimate(
    config: Config,
    gpu: Gpu,
    *,
    gpus: int | None = None,
    spread: bool = False,
    prompt_tokens: float | None = None,
    completion_tokens: float | None = None,
) -> Estimate:
    """Estimate a run.

    gpus: of a node; None: as many as its ranks ask for. spread: trainers and searchers have nodes of their
    own, as in a Slurm job; else all ranks are on one node, and share GPUs if there are too few. Mean lengths:
    as for ``workload_of``. Raises ConfigError if a model is unknown, the GPU lacks its dtype, or there are no
    searchers.
    """
    _require(config, gpu)
    work = workload_of(config, prompt_tokens=prompt_tokens, completion_tokens=completion_tokens)
    trainers, engines = config.launch.trainers, config.launch.searchers * config.generator.tensor_parallel
    per_node = gpus or trainers + engines
    nodes = math.ceil(trainers / per_node) + math.ceil(engines / per_node) if spread else 1
    engine = engine_items(work, gpu)
    items = {TRAINER: trainer_items(work), SEARCHER: searcher_items(work, gpu), FURTHER: engine}
    placed = _placed(config, per_node, spread=spread)
    devices = tuple(_device(ranks, number, items, gpu, work) for ranks, number in placed.items())
    step, group = step_seconds(work, gpu, per_node), group_seconds(work, gpu, engine[KV_CACHE])
    at_work, fresh = sum(step.values()), config.train.prompts_per_step * sum(group.values())
    shared = any({TRAINER, SEARCHER} <= set(device.ranks) for device in devices)
    bottleneck, seconds = _course(config, at_work, fresh, shared=shared)
    hours = seconds * config.train.steps / 3600
    return Estimate(
        gpu=gpu.name,
        gpus_per_node=per_node,
        nodes=nodes,
        parameters=work.policy.parameters,
        adapter=work.adapter,
        policy_bytes=work.policy_bytes,
        published_bytes=work.published_bytes,
        prompt_tokens=work.prompt,
        completion_tokens=work.completion,
        micro_batch_tokens=work.micro_batch(work.longest),
        cache_tokens=engine[KV_CACHE] / work.cache_bytes,
        cache_bytes=work.cache_bytes,
        items=items,
        devices=devices,
        step=step,
        group=group,
        searchers_needed=fresh / at_work,
        bottleneck=bottleneck,
        hours=hours,
        gpu_hours=hours * min(trainers + engines, per_node * nodes),
    )


def _require(config: Config, gpu: Gpu) -> None:
    if not config.launch.searchers:
        raise ConfigError(
            "launch.searchers=0 leaves no searcher to estimate: plan with --set launch.searchers=N, as many "
            "elastic searchers as will join"
        )
    if config.model.dtype == "bfloat16" and not gpu.bf16:
        raise ConfigError(
            f"--gpu {gpu.name} cannot compute in model.dtype=bfloat16: add --set model.dtype=float32 (twice "
            "the memory), or choose another GPU"
        )


def _placed(config: Config, gpus: int, *, spread: bool) -> Counter[tuple[str, ...]]:
    """On how many GPUs there are which ranks."""
    ranks = [TRAINER] * config.launch.trainers
    ranks += [SEARCHER, *[FURTHER] * (config.generator.tensor_parallel - 1)] * config.launch.searchers
    if spread:
        return Counter((rank,) for rank in ranks)
    return Counter(tuple(ranks[number::gpus]) for number in range(min(gpus, len(ranks))))


def _device(ranks: tuple[str, ...], number: int, items: dict[str, Items], gpu: Gpu, work: Workload) -> Device:
    used, room = sum(sum(items[rank].values()) for rank in ranks), (1 - MARGIN) * gpu.bytes
    problem = ""
    if used > room:
        problem = (
            f"would need {used / GIB:.1f} GiB, and {room / GIB:.1f} of its {gpu.memory:g} GiB can be counted "
            f"on: {(used - room) / GIB:.1f} GiB too much"
        )
    elif set(ranks) != {TRAINER}:
        others = used - sum(items[FURTHER].values())
        problem = _engine_problem(items[FURTHER][KV_CACHE], others, gpu, work, shared=len(ranks) > 1)
    device = Device(count=number, ranks=ranks, bytes=used, problem="")
    named = f"{gpu.name} with {device.name} {problem}" if problem else ""
    return Device(count=number, ranks=ranks, bytes=used, problem=named)


def _engine_problem(cache: float, others: float, gpu: Gpu, work: Workload, *, shared: bool) -> str:
    """What to say if an engine would not start although all fits. others: bytes of all but one engine."""
    generator, longest = work.config.generator, work.config.model.context_length
    heads, ranks, free = work.policy.heads, generator.tensor_parallel, generator.gpu_memory_utilization
    if heads % ranks:
        return (
            f"cannot start an engine: generator.tensor_parallel={ranks} does not divide the {heads} "
            f"attention heads of {work.config.model.path}"
        )
    if cache < (least := longest * work.cache_bytes):
        return (
            f"has too little: a KV cache of {cache / GIB:.2f} GiB does not hold one sequence of {longest:,} "
            f"tokens ({least / GIB:.2f} GiB), which vLLM requires"
        )
    if shared and generator.kv_cache_mb is None:
        return (
            "gives each engine an unpredictable KV cache, measured while the others start: set "
            "generator.kv_cache_mb"
        )
    if others + free * gpu.bytes > gpu.bytes:
        return (
            "cannot start an engine: vLLM wants generator.gpu_memory_utilization of it, "
            f"{free * gpu.memory:.1f} GiB, free, and all else takes {others / GIB:.1f} GiB"
        )
    return ""


def _course(config: Config, at_work: float, fresh: float, *, shared: bool) -> tuple[str, float]:
    """The bottleneck in words, and seconds of a step. at_work: of the trainer; fresh: of one searcher.

    shared: trainer and searchers share a GPU.
    """
    searchers = config.launch.searchers
    brought = fresh / searchers
    words = (
        f"{count(searchers, 'searcher')} can bring a step's groups in {brought:.3g} s, the trainer learns "
        f"from them in {at_work:.3g} s"
    )
    if shared:
        return f"the GPU that they share: {words}, and one waits for the other", at_work + fresh
    if brought <= at_work:
        return f"the trainer: {words}", at_work
    if config.selective:
        return f"the searchers: {words} and waits", brought
    return f"the searchers: {words} and goes on with older data from its buffer", at_work


def suggestions(config: Config, given: Estimate, *, spread: bool) -> list[list[str]]:
    """What would make it fit: few changes of the config, as ``--set`` takes them; else a larger GPU."""
    found: list[list[str]] = []
    troubled = {rank for device in given.devices if device.problem for rank in device.ranks}
    wanted = SEARCHER_REMEDIES if troubled - {TRAINER} else ()
    wanted += TRAINER_REMEDIES if TRAINER in troubled else ()
    for number in range(1, MOST_REMEDIES + 1):
        for changes in itertools.combinations(wanted, number):
            keys = {change.partition("=")[0] for change in changes}
            if len(keys) == number and _fits(config, changes, given, spread=spread):
                found.append(list(changes))
                if len(found) == MOST_REMEDIES:
                    return found
        if found:
            break
    for gpu in GPUS.values():
        larger = gpu.memory > GPUS[given.gpu].memory and (gpu.bf16 or config.model.dtype != "bfloat16")
        if larger and not estimate(config, gpu, gpus=given.gpus_per_node, spread=spread).problems:
            return [*found, [f"--gpu {gpu.name}"]]
    return found


def _fits(config: Config, changes: Sequence[str], given: Estimate, *, spread: bool) -> bool:
    try:
        changed = parse_config(config.model_dump(mode="json", exclude_unset=True), list(changes))
    except ConfigError:
        return False
    shared = any(len(device.ranks) > 1 for device in given.devices)  # then there are no more GPUs
    gpus = given.gpus_per_node if spread or shared else None
    return not estimate(changed, GPUS[given.gpu], gpus=gpus, spread=spread).problems
