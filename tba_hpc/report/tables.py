"""Tables for the terminal that are JSON on request, and how values look in them."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict

from rich.console import Console
from rich.table import Table
from rich.text import Text

from tba_hpc.core.wording import percent
from tba_hpc.report.data import MEAN_REWARD
from tba_hpc.report.estimates import Estimate
from tba_hpc.report.summary import Summary, policy_name
from tba_hpc.report.terminal import Terminal
from tba_hpc.run.directory import RunDir

NOTHING = "–"
"""Shown if there is no value yet."""

Cell = str | int | float | bool | None


def summary_rows(summary: Summary) -> dict[str, Cell]:
    """The headline figures of a run, as print_summary and ``tba compare`` show them."""
    figures = summary.figures
    return {
        f"{summary.score_name} before": score_words(summary, summary.score_before),
        f"{summary.score_name} after": score_words(summary, summary.score_after),
        "held-out prompts": summary.test_prompts,
        "perplexity before": summary.perplexity_before,
        "perplexity after": summary.perplexity_after,
        "reward": figures["search/reward"],
        "KL": figures["search/kl"],
        "entropy": figures["search/entropy"],
        "tokens per completion": figures["search/length"],
        "staleness": summary.staleness,
        "optimizer steps": summary.steps,
        "training time": duration(summary.train_seconds),
        "ETTR": None if summary.ettr is None else percent(summary.ettr),
        "trainer wait": None if summary.trainer_wait_share is None else percent(summary.trainer_wait_share),
        "trajectories": summary.trajectories,
        "tokens": summary.tokens,
        "tokens per searcher-second": summary.goodput,
        "alerts": len(summary.alerts),
    }


def print_summary(
    run: RunDir, summary: Summary, *, as_json: bool = False, console: Console | None = None
) -> None:
    """Print what a run came to and where its results lie; as JSON, all of summary.json."""
    if as_json:
        print_values(asdict(summary), as_json=True)
        return
    under, step = summary.perplexity_reference, summary.evaluated_step
    optional: dict[str, Cell] = {
        "perplexity under the": None if under is None else policy_name(under),
        "evaluated at step": None if step == summary.steps else step,
        "turns per completion": turns if (turns := summary.figures["search/turns"] or 1) > 1 else None,
        "failed tool calls": None
        if (failed := summary.figures["search/failed_calls"]) is None
        else percent(failed),
        "skipped steps": summary.skipped_steps or None,
        "rejected trajectories": summary.rejected or None,
        "dropped trajectories": summary.dropped or None,
        "alert": next(iter(summary.alerts), None),
    }
    places = {"model": run.export, "report": run.report, "summary": run.summary}
    values: dict[str, Cell] = {
        **summary_rows(summary),
        **{name: value for name, value in optional.items() if value is not None},
        **{name: str(path) for name, path in places.items() if path.exists()},
        **({"try it": f'tba ask {shlex.quote(str(run.path))} "…"'} if run.export.exists() else {}),
    }
    print_values(values, console=console)


def score_words(summary: Summary, score: Estimate | None) -> str | None:
    """A score of the run with its 95 % interval."""
    if score is None:
        return None
    if summary.score_name == MEAN_REWARD:
        return f"{score.value:.3f} ({score.low:.3f} … {score.high:.3f})"
    return f"{percent(score.value)} ({100 * score.low:.1f} … {100 * score.high:.1f})"


def print_values(
    values: Mapping[str, Cell], *, as_json: bool = False, console: Console | None = None
) -> None:
    """Print names and values: a table of two columns, or a JSON object."""
    if as_json:
        print(json.dumps(dict(values), indent=2))
        return
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(style="dim")
    table.add_column(overflow="fold")
    for name, value in values.items():
        table.add_row(Text(name), Text(cell_text(value)))
    (console or Terminal()).print(table)


def print_rows(
    rows: Sequence[Mapping[str, Cell]], *, as_json: bool = False, console: Console | None = None
) -> None:
    """Print rows with the same keys: a table, or a JSON list of objects."""
    if as_json:
        print(json.dumps([dict(row) for row in rows], indent=2))
        return
    table = Table(box=None, header_style="dim", padding=(0, 2, 0, 0))
    for name, value in (rows[0] if rows else {}).items():
        table.add_column(name, justify="left" if isinstance(value, str) else "right")
    for row in rows:
        table.add_row(*(Text(cell_text(value)) for value in row.values()))
    (console or Terminal()).print(table)


def cell_text(value: Cell) -> str:
    """A value as tables show it."""
    if value is None:
        return NOTHING
    if isinstance(value, float):
        return f"{value:,.4g}" if abs(value) < 1000 else f"{value:,.0f}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def duration(seconds: float) -> str:
    """Minutes and seconds, hours if there are any: 2:05, 1:02:05."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
