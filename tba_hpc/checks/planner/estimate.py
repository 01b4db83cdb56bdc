"""A run on given GPUs, reckoned before it starts: what fits, how fast, how many GPU-hours; what would fit.

It must not know how the answer is shown. All is arithmetic on the config and on ``hardware``'s assumptions.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from tba_hpc.checks.planner import seconds
from tba_hpc.checks.planner.hardware import GIB, GPUS, Gpu, require_dtype
from tba_hpc.checks.planner.memory import Need, searcher_need, trainer_need
from tba_hpc.checks.planner.seconds import Span, items_named
from tba_hpc.checks.planner.workload import Workload, workload_of
from tba_hpc.config import Config, ConfigError, parse_config
from tba_hpc.core.wording import count

MARGIN = 0.03
"""Share of a GPU that is left to fragments and to what is not counted."""

TRAINER_REMEDIES = (
    "train.gradient_checkpointing=true",
    "train.groups_per_micro_batch=1",
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """GPUs that hold the same. problem: why it does not fit, else empty."""

    count: int
    needs: tuple[Need, ...]
    problem: str

    @property
    def bytes(self) -> float:
        """That all of its ranks take together."""
        return sum(need.bytes for need in self.needs)

    @property
    def name(self) -> str:
        """Who is there: trainer + 2 × searcher."""
        counts = Counter(need.who for need in self.needs)
        return " + ".join(who if count == 1 else f"{count} × {who}" for who, count in counts.items())


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """All of it. gpus: of a node, nodes: of the run. searchers_needed: that give each step fresh groups.

    bottleneck: in words. hours: to the last step, GPU-hours: of all GPUs meanwhile.
    """

    gpu: Gpu
    gpus: int
    nodes: int
    work: Workload
    devices: tuple[Device, ...]
    step: tuple[Span, ...]
    group: tuple[Span, ...]
    publication: tuple[Span, ...]
    checkpoint: tuple[Span, ...]
    searchers_needed: float
    bottleneck: str
    hours: float
    gpu_hours: float

    @property
    def problems(self) -> tuple[str, ...]:
        """Why the run cannot be made there, one sentence for each kind of GPU; none where it can."""
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
    """Reckon a run.

    gpus: of a node; None: as many as its ranks ask for. spread: trainers and searchers have nodes of their
    own, as in a Slurm job; else all ranks are on one node, and share its GPUs where there are too few.
    Lengths: mean tokens, None takes the task's. Raises ConfigError where a model is unknown, the GPU has not
    its dtype, or nobody searches.
    """
    if not config.launch.searchers:
        raise ConfigError(
            "launch.searchers=0 leaves nobody whose seconds could be reckoned: plan with --set "
            "launch.searchers=N, as many as will come by themselves"
        )
    require_dtype(gpu, config.model.dtype)
    work = workload_of(config, prompt_tokens=prompt_tokens, completion_tokens=completion_tokens)
    asked = config.launch.trainers + config.launch.searchers * config.generator.tensor_parallel
    per_node = gpus or asked
    places = _placed(work, gpu, per_node, spread=spread)
    devices = tuple(_device(needs, count, gpu, work) for needs, count in places)
    nodes = _nodes(config, per_node) if spread else 1
    cache = next(
        items_named(need.items, "engine: KV cache")
        for device in devices
        for need in device.needs
        if need.who == "searcher"
    )
    step = tuple(seconds.step_spans(work, gpu, per_node))
    group = tuple(seconds.group_spans(work, gpu, cache))
    publication = (*seconds.publish_spans(work, nodes), seconds.recompute_span(work, gpu, cache))
    checkpoint = tuple(seconds.checkpoint_spans(work, per_node))
    return Estimate(
        gpu=gpu,
        gpus=per_node,
        nodes=nodes,
        work=work,
        devices=devices,
        step=step,
        group=group,
        publication=publication,
        checkpoint=checkpoint,
        **_course(
            work,
            step,
            group,
            publication,
            checkpoint,
            gpus=min(asked, per_node * nodes),
            shared=any({"trainer", "searcher"} <= {need.who for need in device.needs} for device in devices),
        ),
    )


def _placed(work: Workload, gpu: Gpu, gpus: int, *, spread: bool) -> Iterator[tuple[tuple[Need, ...], int]]:
    """Who is on a GPU, and on how many GPUs it is so."""
    config, ranks = work.config, work.config.generator.tensor_parallel
    trainer = trainer_need(work)
    engine = [searcher_need(work, gpu, place) for place in range(ranks)]
    if spread:
        yield (trainer,), config.launch.trainers
        yield (engine[0],), config.launch.searchers
        if ranks > 1:
            yield (engine[1],), (ranks - 1) * config.launch.searchers
        return
    on: list[list[Need]] = [[] for _ in range(gpus)]
    for number in range(config.launch.trainers):
        on[number % gpus].append(trainer)
    for number in range(config.launch.searchers * ranks):
        on[(config.launch.trainers + number) % gpus].append(engine[number % ranks])
    groups: dict[tuple[str, ...], list[list[Need]]] = {}
    for needs in on:
        groups.setdefault(tuple(need.who for need in needs), []).append(needs)
    for alike in groups.values():
        if alike[0]:
            yield tuple(alike[0]), len(alike)


def _device(needs: tuple[Need, ...], count: int, gpu: Gpu, work: Workload) -> Device:
    return Device(
        count=count, needs=needs, problem=_problem(Device(count=count, needs=needs, problem=""), gpu, work)
    )


def _problem(device: Device, gpu: Gpu, work: Workload) -> str:
    """Why this does not fit; empty where it does."""
    room = (1 - MARGIN) * gpu.bytes
    where = f"{gpu.name} with {device.name}"
    heads, ranks = work.policy.heads, work.config.generator.tensor_parallel
    if heads % ranks and any(need.engine for need in device.needs):
        return (
            f"{where} will not let an engine start: generator.tensor_parallel={ranks} does not divide the "
            f"{heads} attention heads of {work.config.model.path}"
        )
    if device.bytes > room:
        return (
            f"{where} would need {device.bytes / GIB:.1f} GiB, and {room / GIB:.1f} of its {gpu.memory:g} "
            f"GiB can be counted on: {(device.bytes - room) / GIB:.1f} GiB too much"
        )
    if lacking := next((need.too_little for need in device.needs if need.too_little), ""):
        return f"{where} has too little: {lacking}"
    engines = [need for need in device.needs if need.free]
    if len(device.needs) > 1 and engines and work.config.generator.kv_cache_mb is None:
        return (
            f"{where} leaves each engine a KV cache by chance, as it is measured while the others start: set "
            "generator.kv_cache_mb"
        )
    for need in engines:
        if device.bytes - need.engine + need.free > gpu.bytes:
            others = (device.bytes - need.engine) / GIB
            return (
                f"{where} will not let an engine start: vLLM wants generator.gpu_memory_utilization of it, "
                f"{need.free / GIB:.1f} GiB, free, and all else takes {others:.1f} GiB"
            )
    return ""


def _nodes(config: Config, gpus: int) -> int:
    """Of a job whose roles have nodes of their own."""
    searchers = config.launch.searchers * config.generator.tensor_parallel
    return -(-config.launch.trainers // gpus) + -(-searchers // gpus)


def _course(
    work: Workload,
    step: Sequence[Span],
    group: Sequence[Span],
    publication: Sequence[Span],
    checkpoint: Sequence[Span],
    *,
    gpus: int,
    shared: bool,
) -> dict[str, Any]:
    """What comes of these times over a whole run; shared: trainer and searchers compute on the same GPU."""
    config = work.config
    every, groups = config.exchange.sync_every, config.train.prompts_per_step
    stall = publication[0].seconds / every + checkpoint[0].seconds / config.checkpoint.every
    at_work = seconds.total(list(step)) + stall
    engine_stall = seconds.total(list(publication[3:])) / every
    share = max(1 - engine_stall / at_work, 0.05)  # of a searcher's time that is left to generate in
    fresh = groups * seconds.total(list(group)) / share
    needed, searchers = fresh / at_work, config.launch.searchers
    waits = config.selective and needed > searchers
    per_step = at_work + fresh if shared else fresh / searchers if waits else at_work
    brought = f"{count(searchers, 'searcher')} can bring a step's groups in {fresh / searchers:.3g} s"
    learned = f"the trainer learns from them in {at_work:.3g} s"
    if shared:
        bottleneck = f"the GPU that they share: {brought}, {learned}, and one waits for the other"
    elif needed > searchers:
        what = "waits" if waits else "goes on with older data from its buffer"
        bottleneck = f"the searchers: {brought}, {learned} and {what}"
    else:
        bottleneck = f"the trainer: {brought}, {learned}"
    hours = per_step * config.train.steps / 3600
    return {
        "searchers_needed": needed,
        "bottleneck": bottleneck,
        "hours": hours,
        "gpu_hours": hours * gpus,
    }


def suggestions(config: Config, given: Estimate, *, spread: bool) -> list[list[str]]:
    """With what it would fit: changes of the config, as ``--set`` takes them, few rather than many; a GPU."""
    wanted = [*_remedies(given)]
    found: list[list[str]] = []
    for number in range(1, MOST_REMEDIES + 1):
        for changes in itertools.combinations(wanted, number):
            if len({change.partition("=")[0] for change in changes}) == number and _fits(
                config, changes, given, spread=spread
            ):
                found.append(list(changes))
                if len(found) == MOST_REMEDIES:
                    return found
        if found:
            break
    for gpu in sorted(GPUS.values(), key=lambda gpu: gpu.memory):
        if (
            gpu.memory > given.gpu.memory
            and (gpu.bf16 or config.model.dtype != "bfloat16")
            and not estimate(config, gpu, gpus=given.gpus, spread=spread).problems
        ):
            return [*found, [f"--gpu {gpu.name}"]]
    return found


def _remedies(given: Estimate) -> Iterator[str]:
    """What may help those ranks that do not fit."""
    troubled = [device for device in given.devices if device.problem]
    names = {need.who for device in troubled for need in device.needs}
    if any(name.startswith("searcher") for name in names):
        yield from SEARCHER_REMEDIES
    if "trainer" in names:
        yield from TRAINER_REMEDIES


def _fits(config: Config, changes: Sequence[str], given: Estimate, *, spread: bool) -> bool:
    try:
        changed = parse_config(config.model_dump(mode="json", exclude_unset=True), list(changes))
    except ConfigError:
        return False
    gpus = given.gpus if spread or _shared(given) else None
    return not estimate(changed, given.gpu, gpus=gpus, spread=spread).problems


def _shared(given: Estimate) -> bool:
    """Whether ranks share GPUs, so that there are no more of them to be had."""
    return any(len(device.needs) > 1 for device in given.devices)
