"""Shows an estimate: tables for the terminal, or JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from tba_hpc.checks.planner.estimate import Device, Estimate
from tba_hpc.checks.planner.hardware import GIB
from tba_hpc.checks.planner.seconds import Span, total
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
    for device in estimate.devices:
        console.print(_memory(device, estimate))
    console.print(_times(estimate))
    for line in (*_course(estimate), *_verdict(estimate, suggestions)):
        console.print(Text(line))


def _head(estimate: Estimate) -> Iterator[str]:
    work, config = estimate.work, estimate.work.config
    yield (
        f"{config.model.path}: {work.policy.parameters / 1e9:.4g} G weights in {config.model.dtype}"
        f"{f' and {work.adapter / 1e6:.4g} M of an adapter, which is trained' if work.adapter else ''}; "
        f"{count(config.launch.trainers, 'trainer')}, {count(config.launch.searchers, 'searcher')} on "
        f"{count(estimate.nodes, 'node')} with {estimate.gpus} {estimate.gpu.name}"
    )
    yield (
        f"mean tokens: {work.prompt:g} of a prompt, {work.completion:g} of a completion (at most "
        f"{work.longest}), assumed; say yours by --prompt-tokens and --completion-tokens"
    )


def _memory(device: Device, estimate: Estimate) -> Table:
    on = f" on each of {device.count} GPUs" if device.count > 1 else ""
    table = _table(f"{device.name}{on}", "GiB")
    for need in device.needs:
        for item in need.items:
            who = f"{need.who}: " if len(device.needs) > 1 else ""
            table.add_row(Text(who + item.name), f"{item.bytes / GIB:.2f}", Text(item.formula))
    style = "red" if device.problem else "bold"
    table.add_row(Text("all", style), Text(f"{device.bytes / GIB:.2f}", style), f"of {estimate.gpu.memory:g}")
    return table


def _times(estimate: Estimate) -> Table:
    table = _table("times", "s")
    for name, spans in _spans(estimate).items():
        table.add_row(Text(name, "bold"), Text(_seconds(total(spans)), "bold"), "")
        for span in spans:
            table.add_row(Text(f"  {span.name}"), _seconds(span.seconds), Text(span.formula))
    return table


def _spans(estimate: Estimate) -> dict[str, Sequence[Span]]:
    return {
        "a step": estimate.step,
        "a group, on one searcher": estimate.group,
    }


def _course(estimate: Estimate) -> Iterator[str]:
    config = estimate.work.config
    yield f"bottleneck: {estimate.bottleneck}"
    yield f"searchers that keep the trainer in fresh groups: {estimate.searchers_needed:.1f}"
    yield (
        f"{count(config.train.steps, 'step')}: {duration(3600 * estimate.hours)}, "
        f"{estimate.gpu_hours:.3g} GPU-hours, without start-up, checkpoints and evaluations"
    )
    for note in _notes(estimate):
        yield f"note: {note}"
    yield CAVEAT


def _notes(estimate: Estimate) -> list[str]:
    """What is known of the run besides memory and time."""
    beyond = beyond_tuned(estimate.work.config)
    return [": ".join(beyond)] if beyond else []


def _verdict(estimate: Estimate, suggestions: Sequence[Sequence[str]]) -> Iterator[str]:
    for problem in estimate.problems:
        yield f"does not fit: {problem}"
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
                "items": [
                    {"rank": need.who, "name": item.name, "bytes": item.bytes, "formula": item.formula}
                    for need in device.needs
                    for item in need.items
                ],
            }
            for device in estimate.devices
        ],
        "seconds": {
            name: [{"name": span.name, "seconds": span.seconds, "formula": span.formula} for span in spans]
            for name, spans in _spans(estimate).items()
        },
        "bottleneck": estimate.bottleneck,
        "searchers_needed": estimate.searchers_needed,
        "hours": estimate.hours,
        "gpu_hours": estimate.gpu_hours,
        "notes": _notes(estimate),
        "fits": not estimate.problems,
        "suggestions": [list(changes) for changes in suggestions],
    }


def _table(title: str, unit: str) -> Table:
    table = Table(box=None, header_style="dim", padding=(0, 2, 0, 0))
    table.add_column(title)
    table.add_column(unit, justify="right")
    table.add_column("of", overflow="fold", style="dim")
    return table


def _seconds(value: float) -> str:
    return f"{value:.3g}" if value < 100 else f"{value:,.0f}"
