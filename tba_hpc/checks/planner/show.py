"""Shows an estimate: a table for the terminal, or JSON."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from tba_hpc.checks.planner.estimate import SEARCHER, Estimate
from tba_hpc.checks.planner.hardware import GIB
from tba_hpc.checks.planner.memory import KV_CACHE
from tba_hpc.core.tuned import beyond_tuned
from tba_hpc.core.wording import count
from tba_hpc.report.tables import duration
from tba_hpc.report.terminal import Terminal

CAVEAT = "Computed from the config and from data sheets, not measured: no GPU has run any of this yet."


def print_estimate(estimate: Estimate, suggestions: Sequence[Sequence[str]], *, as_json: bool) -> None:
    """Print it; with what would fit if it does not."""
    if as_json:
        print(json.dumps(as_values(estimate, suggestions), indent=2))
        return
    console = Terminal()
    for line in _head(estimate):
        console.print(Text(line))
    console.print(_table(estimate))
    for line in (*_course(estimate), *_verdict(estimate, suggestions)):
        console.print(Text(line))


def _head(estimate: Estimate) -> Iterator[str]:
    work, config = estimate.work, estimate.work.config
    adapter = f" and an adapter of {work.adapter / 1e6:.4g} M, which is trained" if work.adapter else ""
    weights = f"{work.policy.parameters / 1e9:.4g} G weights in {config.model.dtype}{adapter}"
    yield (
        f"{config.model.path}: {weights}; "
        f"{count(config.launch.trainers, 'trainer')}, {count(config.launch.searchers, 'searcher')} on "
        f"{count(estimate.nodes, 'node')} with {estimate.gpus} {estimate.gpu.name}"
    )
    yield (
        f"mean tokens: {work.prompt:g} of a prompt, {work.completion:g} of a completion (at most "
        f"{work.longest}), assumed; set yours with --prompt-tokens and --completion-tokens"
    )
    cached = estimate.items[SEARCHER][KV_CACHE] / work.cache_bytes
    yield (
        f"at most {work.micro_batch(work.longest):,.0f} tokens in a micro-batch; an engine's KV cache holds "
        f"{cached:,.0f} tokens of {work.cache_bytes / 1024:,.0f} KiB, for {work.sequences} sequences"
    )


def _table(estimate: Estimate) -> Table:
    table = Table(box=None, header_style="dim", padding=(0, 2, 0, 0))
    table.add_column("memory")
    table.add_column("GiB", justify="right")
    for device in estimate.devices:
        style = "red" if device.problem else "bold"
        on = f"{device.name}, on {count(device.count, 'GPU')} of {estimate.gpu.memory:g}"
        table.add_row(Text(on, style), Text(f"{device.bytes / GIB:.2f}", style))
        for who, number in Counter(device.ranks).items():
            times = f"{number} × " if number > 1 else ""
            for name, nbytes in estimate.items[who].items():
                table.add_row(Text(f"  {times}{name}"), f"{nbytes / GIB:.2f}")
    table.add_row(Text("times", "dim"), Text("s", "dim"))
    for title, spans in {"a step": estimate.step, "a group, on one searcher": estimate.group}.items():
        table.add_row(Text(title, "bold"), Text(f"{sum(spans.values()):,.3g}", "bold"))
        for name, seconds in spans.items():
            table.add_row(Text(f"  {name}"), f"{seconds:,.3g}")
    return table


def _course(estimate: Estimate) -> Iterator[str]:
    yield f"bottleneck: {estimate.bottleneck}"
    yield f"searchers that keep the trainer in fresh groups: {estimate.searchers_needed:.1f}"
    yield (
        f"{count(estimate.work.config.train.steps, 'step')}: {duration(3600 * estimate.hours)}, "
        f"{estimate.gpu_hours:.3g} GPU-hours, without start-up, checkpoints and evaluations"
    )
    yield from (f"note: {note}" for note in _notes(estimate))
    yield CAVEAT


def _notes(estimate: Estimate) -> list[str]:
    """What is known of the run besides memory and time."""
    beyond = beyond_tuned(estimate.work.config)
    return [": ".join(beyond)] if beyond else []


def _verdict(estimate: Estimate, suggestions: Sequence[Sequence[str]]) -> Iterator[str]:
    yield from (f"does not fit: {problem}" for problem in estimate.problems)
    for changes in suggestions:
        yield "  would fit with " + " ".join(c if c.startswith("--") else f"--set {c}" for c in changes)
    if estimate.problems and not suggestions:
        yield "  nothing that the planner tries would fit: use a smaller model, or larger GPUs"


def as_values(estimate: Estimate, suggestions: Sequence[Sequence[str]]) -> dict[str, Any]:
    """Plain values of all that is printed; bytes and seconds."""
    return {
        "gpu": estimate.gpu.name,
        "gpus_per_node": estimate.gpus,
        "nodes": estimate.nodes,
        "parameters": estimate.work.policy.parameters,
        "trained": estimate.work.trained,
        "published_bytes": estimate.work.published_bytes,
        "gpus": [
            {
                "holds": device.name,
                "count": device.count,
                "bytes": device.bytes,
                "problem": device.problem or None,
                "items": {who: estimate.items[who] for who in device.ranks},
            }
            for device in estimate.devices
        ],
        "seconds": {"step": estimate.step, "group": estimate.group},
        "bottleneck": estimate.bottleneck,
        "searchers_needed": estimate.searchers_needed,
        "hours": estimate.hours,
        "gpu_hours": estimate.gpu_hours,
        "notes": _notes(estimate),
        "fits": not estimate.problems,
        "suggestions": [list(changes) for changes in suggestions],
    }
