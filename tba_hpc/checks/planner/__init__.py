"""``tba plan``: estimates whether a run fits on given GPUs, and names config keys that reduce its memory.

The estimate is computed from the config alone: it starts nothing, and needs neither torch nor the model's
weights. This plan has nothing to do with ``launch.plan``, which splits the nodes of a job between the roles.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from tba_hpc.checks.planner.advice import advice
from tba_hpc.checks.planner.estimate import Estimate, estimate
from tba_hpc.checks.planner.hardware import GIB, GPUS, Gpu, find_gpu, gpus_named
from tba_hpc.config import Config, ConfigError, parse_config
from tba_hpc.core.tuned import beyond_tuned
from tba_hpc.core.types import TOP_LOGPROBS
from tba_hpc.core.wording import count
from tba_hpc.launch.plan import Site, load_site, plan, refuse_rank_overrides
from tba_hpc.report.tables import Terminal

DEFAULT_GPU = "h100-80"
"""Name of the GPU to plan for if neither the user nor the site names one."""

CAVEAT = "Computed from the config and from data sheets, not measured."
"""Last line of each estimate, before its verdict."""


def plan_run(
    config: Config,
    overrides: Sequence[str] = (),
    *,
    site: Path | None,
    gpu: str | None,
    gpus: int | None,
    nodes: int | None,
    trainer_nodes: int | None,
    prompt_tokens: float | None,
    as_json: bool,
) -> bool:
    """Print the estimate of a run; return whether it fits.

    overrides: those that ``config`` was loaded with. site: site file, or None for one machine. A run that is
    larger than a node of the site has trainers and searchers on separate nodes. gpu: name of the GPU; None
    means the kind that the site requests, else DEFAULT_GPU. gpus: number of GPUs of the machine; None means
    as many as the ranks need. nodes: number of nodes of a job, from which the numbers of ranks follow; None
    takes them from the config. trainer_nodes: number of these nodes that train; None means one in four.
    prompt_tokens: mean length of prompts; None means an assumed length. Raises ConfigError for options that
    contradict each other, an unknown model, or a site without GPUs.
    """
    if site is None and nodes is not None:
        raise ConfigError(f"--nodes {nodes} has no meaning without a cluster: add --site")
    if trainer_nodes is not None and nodes is None:
        raise ConfigError(f"--trainer-nodes {trainer_nodes} is a part of a job's nodes: add --nodes")
    cluster = load_site(site) if site else None
    if cluster and gpus:
        raise ConfigError(f"--gpus {gpus} contradicts --site, whose gpus_per_node counts: remove one of them")
    if cluster and not cluster.gpus_per_node:
        raise ConfigError(
            f"the site {site} has gpus_per_node=0, but tba plan estimates only the memory of GPUs: choose a "
            "site with GPUs"
        )
    remarks: tuple[str, ...] = ()
    if cluster and nodes:
        split = plan(config, cluster, nodes, trainer_nodes)
        refuse_rank_overrides(overrides, config, cluster, split)
        remarks = split.remarks
        config = parse_config(config.model_dump(mode="json", exclude_unset=True), split.overrides)
    asked = config.launch.trainers + config.launch.searchers * config.generator.tensor_parallel
    spread = cluster is not None and asked > cluster.gpus_per_node
    kinds = [find_gpu(gpu)] if gpu else _gpus_of(cluster)
    found = estimate(
        config,
        max(kinds, key=lambda kind: kind.memory, default=GPUS[DEFAULT_GPU]),
        gpus=cluster.gpus_per_node if cluster else gpus,
        spread=spread,
        prompt_tokens=prompt_tokens,
    )
    if as_json:
        print(json.dumps(as_values(config, found, remarks), indent=2))
        return not found.problems
    console = Terminal()
    for part in (
        *_head(config, found, guessed=len(kinds) != 1),
        _table(found),
        *_verdict(config, found, remarks, nodes),
    ):
        console.print(Text(part) if isinstance(part, str) else part)
    return not found.problems


def _gpus_of(site: Site | None) -> Sequence[Gpu]:
    """Return the GPUs that the site's gpu_request may mean; none if it names none."""
    return gpus_named(site.gpu_request or "") if site else []


def as_values(config: Config, found: Estimate, remarks: Sequence[str] = ()) -> dict[str, Any]:
    """Return the estimate as plain values for JSON, with sizes in bytes.

    remarks: sentences that precede the notes, see ``launch.plan.Plan``.
    """
    return asdict(found) | {
        "devices": [{"holds": device.name, **asdict(device)} for device in found.devices],
        "notes": [*remarks, *_notes(config)],
        "fits": not found.problems,
    }


def _head(config: Config, found: Estimate, *, guessed: bool) -> Iterator[str]:
    adapter = f" and an adapter of {found.adapter / 1e6:.4g} M, which is trained" if found.adapter else ""
    ranks = f"{count(config.launch.trainers, 'trainer')}, {count(config.launch.searchers, 'searcher')}"
    yield (
        f"{config.model.path}: {found.parameters / 1e9:.4g} G weights in {config.model.dtype}{adapter}; "
        f"{ranks} on {count(found.nodes, 'node')} with {found.gpus_per_node} {found.gpu}"
    )
    assumed = f"GPUs of the kind {found.gpu} (--gpu), " if guessed else ""
    yield (
        f"assumed: {assumed}a mean of {found.prompt_tokens:g} tokens per prompt (--prompt-tokens), and "
        f"completions of {config.generator.max_tokens} tokens (generator.max_tokens)"
    )
    yield (
        f"at most {found.micro_batch_tokens:,.0f} tokens in a micro-batch; an engine's KV cache holds "
        f"{int(found.cache_tokens):,} tokens"
    )


def _table(found: Estimate) -> Table:
    table = Table(box=None, header_style="dim", padding=(0, 2, 0, 0))
    table.add_column("memory")
    table.add_column("GiB", justify="right")
    for device in found.devices:
        style = "red" if device.problem else "bold"
        on = f"{device.name}, on {count(device.count, 'GPU')} of {GPUS[found.gpu].memory:g}"
        table.add_row(Text(on, style), Text(f"{device.bytes / GIB:.2f}", style))
        for who, number in Counter(device.ranks).items():
            times = f"{number} × " if number > 1 else ""
            for name, nbytes in found.items[who].items():
                table.add_row(Text(f"  {times}{name}"), f"{nbytes / GIB:.2f}")
    return table


def _verdict(config: Config, found: Estimate, remarks: Sequence[str], nodes: int | None) -> Iterator[str]:
    yield from (f"note: {note}" for note in (*remarks, *_notes(config)))
    yield CAVEAT
    yield from (f"does not fit: {problem}" for problem in found.problems)
    yield from (f"  {sentence}" for sentence in advice(config, found, nodes))


def _notes(config: Config) -> list[str]:
    """Return notes on the run that do not concern GPU memory."""
    beyond, k = beyond_tuned(config), config.train.score_centering
    notes = [": ".join(beyond)] if beyond else []
    if k:
        token = TOP_LOGPROBS.itemsize * k
        full = token * config.generator.max_tokens * config.buffer.capacity
        notes.append(
            f"train.score_centering={k} records {token} bytes per completion token: up to "
            f"{full / GIB:.3g} GiB of host memory for a full buffer, and as much in each checkpoint"
        )
    return notes
