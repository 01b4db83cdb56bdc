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


def print_summary(
    run: RunDir, summary: Summary, *, as_json: bool = False, console: Console | None = None
) -> None:
    """Print what a run came to and where its results lie; as JSON, all of summary.json."""
    if as_json:
        print_values(asdict(summary), as_json=True)
        return
    wait, under = summary.trainer_wait_share, summary.perplexity_reference
    optional: dict[str, Cell] = {
        "perplexity under the": None if under is None else policy_name(under),
        "reward": summary.figures["search/reward"],
        "KL on fresh samples": summary.figures["search/kl"],
        "entropy": summary.figures["search/entropy"],
        "skipped steps": summary.skipped_steps or None,
        "rejected trajectories": summary.rejected or None,
        "dropped trajectories": summary.dropped or None,
        "alert": next(iter(summary.alerts), None),
    }
    places = {"model": run.export, "report": run.report, "summary": run.summary}
    values: dict[str, Cell] = {
        f"{summary.score_name} before": score_words(summary, summary.score_before),
        f"{summary.score_name} after{_of_step(summary)}": score_words(summary, summary.score_after),
        "trainer wait": None if wait is None else percent(wait),
        "held-out prompts": summary.test_prompts,
        "perplexity before": summary.perplexity_before,
        "perplexity after": summary.perplexity_after,
        "optimizer steps": summary.steps,
        "training time": duration(summary.train_seconds),
        "ETTR": None if summary.ettr is None else percent(summary.ettr),
        "trajectories": summary.trajectories,
        "tokens": summary.tokens,
        "tokens per searcher-second": summary.goodput,
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


def _of_step(summary: Summary) -> str:
    """Which step's model the last evaluation is of, if the run has gone on since."""
    step = summary.evaluated_step
    return f" (step {step})" if step is not None and step != summary.steps else ""


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
        table.add_row(Text(name), Text(_cell(value)))
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
        table.add_row(*(Text(_cell(value)) for value in row.values()))
    (console or Terminal()).print(table)


def _cell(value: Cell) -> str:
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
