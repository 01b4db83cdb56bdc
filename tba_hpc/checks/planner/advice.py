"""Suggests changes of the config that would help a run to fit into the GPUs' memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from tba_hpc.checks.planner.estimate import SEARCHER, TRAINER, Estimate, usable
from tba_hpc.checks.planner.hardware import GPUS
from tba_hpc.config import Config

OFFLOAD = "train.deepspeed.zero_optimization.offload_optimizer.device=cpu"
"""Setting that keeps AdamW's state and the master weights in host memory."""

LESS_CACHE = {True: "a smaller generator.kv_cache_mb", False: "a smaller generator.gpu_memory_utilization"}
MORE_CACHE = {True: "a larger generator.kv_cache_mb", False: "a larger generator.gpu_memory_utilization"}
"""Changes of the key that sizes the KV cache, by whether the config sets generator.kv_cache_mb."""

MORE_GPUS = "more GPUs for an engine (generator.tensor_parallel)"

Choices = Iterable[tuple[object, str]]
"""Pairs of a condition, and what helps if it is true."""


def advice(config: Config, found: Estimate, nodes: int | None = None) -> Iterator[str]:
    """Yield a sentence of suggestions for each of these that lacks memory: trainers, searchers, a KV cache.

    nodes: number of nodes of a job, from which the numbers of ranks follow; None: the config's count.

    If ranks that lack memory share GPUs, and would fit into a GPU each, the first sentence says how many GPUs
    that takes.
    """
    short = {rank for device in found.devices if device.lacks == "memory" for rank in device.ranks}
    fit_alone = all(sum(found.items[rank].values()) <= usable(GPUS[found.gpu]) for rank in short)
    if short and fit_alone and _share_gpus(found):
        most = sum(device.count * len(device.ranks) for device in found.devices)
        yield f"with --gpus {most} each rank would have a GPU of its own"
    if TRAINER in short:
        yield from _sentence("a trainer takes less with", _smaller_trainer(config, found, nodes))
    if SEARCHER in short:
        yield from _sentence("a searcher takes less with", _smaller_searcher(config, found))
    if any(device.lacks == "KV cache" for device in found.devices):
        yield from _sentence("a sequence fits into the KV cache with", _larger_cache(config, found))


def _share_gpus(found: Estimate) -> bool:
    return any(len(device.ranks) > 1 for device in found.devices)


def _sentence(start: str, choices: Choices) -> Iterator[str]:
    *others, last = [text for condition, text in choices if condition] or [""]
    if last:
        yield f"{start} {', '.join(others)}{' or ' if others else ''}{last}"


def _more_trainers(nodes: int | None) -> str:
    """Say how a run gets more trainers. nodes: as for ``advice``."""
    if nodes is None:
        return "more launch.trainers"
    return "more launch.trainers and fewer launch.searchers" if nodes == 1 else "more --trainer-nodes"


def _smaller_trainer(config: Config, found: Estimate, nodes: int | None) -> Choices:
    train, items, spread = config.train, found.items[TRAINER], not _share_gpus(found)
    backward, alone = "activations" in items, config.launch.trainers == 1
    searchers_fit = not any(device.problem for device in found.devices if SEARCHER in device.ranks)
    return (
        (backward and not train.gradient_checkpointing, "train.gradient_checkpointing=true"),
        (
            backward and found.micro_batch_tokens > config.model.context_length,
            f"a smaller train.tokens_per_micro_batch (at least {config.model.context_length})",
        ),
        (
            train.zero_stage < 3 and (spread or not alone),
            "train.zero_stage=3" + (f" with {_more_trainers(nodes)}" if alone else ""),
        ),
        (train.zero_stage == 3 and spread, _more_trainers(nodes)),
        (searchers_fit and "reference, loaded when needed" in items, "train.reference.scored_by=searcher"),
        (not train.offloads_optimizer, OFFLOAD),
        (not config.model.lora, "model.lora"),
    )


def _smaller_searcher(config: Config, found: Estimate) -> Choices:
    sized, spare = bool(config.generator.kv_cache_mb), found.cache_tokens > config.model.context_length
    return (
        ("reference" in found.items[SEARCHER], "train.reference.scored_by=trainer"),
        (spare, LESS_CACHE[sized]),
        ((sized or not spare) and not _share_gpus(found), MORE_GPUS),
    )


def _larger_cache(config: Config, found: Estimate) -> Choices:
    sized = bool(config.generator.kv_cache_mb)
    return (
        (True, MORE_CACHE[sized]),
        (not sized and "reference" in found.items[SEARCHER], "that and train.reference.scored_by=trainer"),
        (not _share_gpus(found), MORE_GPUS),
        (True, "a smaller model.context_length"),
    )
