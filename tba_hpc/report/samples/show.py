"""Shows trajectories in the terminal, a screen at a time if it is one, or as JSON.

What a model or a data file says is text: its control characters are shown, not obeyed.
"""

from __future__ import annotations

import json
import os
from contextlib import nullcontext

from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from tba_hpc.core.wording import count
from tba_hpc.report.samples.select import Sample, Selection
from tba_hpc.report.terminal import Terminal

PAGER = "-RFX"
"""For less: obey colours, end at once if all fits on a screen, leave the text there."""

STATES = {
    "waiting": "not merged",
    "merged": "merged, no checkpoint since",
    "buffer": "in the buffer",
    "duplicate": "equal to one in the buffer",
    "evicted": "evicted from the buffer",
    "left": "not in the buffer any more, or never: evicted, equal to another, or too late",
}


def print_samples(selection: Selection, *, as_json: bool = False, console: Console | None = None) -> None:
    """Print them one below the other, with a last line on how many there are; or a JSON list."""
    if as_json:
        print(json.dumps([sample.values() for sample in selection.samples], indent=2))
        return
    console = console or Terminal()
    os.environ.setdefault("LESS", PAGER)
    with console.pager(styles=True) if console.is_terminal else nullcontext():
        for sample in selection.samples:
            console.print(Text(facts(sample), style="bold"))
            console.print(Padding(Text(sample.prompt.strip("\n"), style="dim"), (0, 0, 0, 2)))
            cut_off = " […cut off]" if sample.truncated else ""
            console.print(Padding(Text(sample.completion + cut_off), (0, 0, 1, 2)))
        console.print(Text(summary(selection), style="dim"))


def facts(sample: Sample) -> str:
    """What is known of a trajectory, in a line."""
    oldest, newest, life = sample.version_oldest, sample.version_newest, sample.life
    weights = f"step {oldest}" if oldest == newest else f"steps {oldest}–{newest}"
    stale = f", {count(sample.staleness or 0, 'step')} stale"
    used = f", trained on {count(life.uses, 'time')}" if life.uses is not None else ""
    parts = [
        f"reward {sample.reward:.4g}",
        f"prompt {sample.prompt_id}, request {sample.request_id}",
        f"weights of {weights}",
        "" if life.merged_step is None else f"merged at step {life.merged_step}{stale}",
        f"{STATES[life.state]}{used}",
        "" if sample.log_ratio is None else f"log π/π_ref {sample.log_ratio:+.3f} a token",
    ]
    return " · ".join(part for part in parts if part)


def summary(selection: Selection) -> str:
    """How many there are, and how to have others."""
    shown, found, read = len(selection.samples), selection.found, selection.read
    if not read:
        return (
            "no trajectory is there: none was sealed yet, or those that were merged are deleted; the next "
            "run keeps them with --set exchange.keep_shards=1"
        )
    known = selection.checkpoint_step
    as_of = (
        "no checkpoint tells what was used" if known is None else f"uses as of the checkpoint of step {known}"
    )
    return f"{shown:,} of {found:,} that match, of {count(read, 'trajectory')} still on disk; {as_of}"
