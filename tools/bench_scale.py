"""Measures what a run costs at scale: resume, end, replay buffer, checkpoints, searchers that come and go.

    python tools/bench_scale.py [resume] [end] [buffer] [checkpoint] [visitors] [--json]

Without a name, all of them, about a quarter of an hour on two cores. Each is a module of ``tools/scale`` and
has a process of its own, so that none pays for another's memory. What is extrapolated says so in its row.
Believe the ratios, not the seconds.
"""

from __future__ import annotations

import json
import subprocess
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from tba_hpc.report.tables import print_rows

TOOLS = Path(__file__).parent
MEASURE = "import json; from scale.{} import measure; print(json.dumps(measure()))"


class Bench(StrEnum):
    """Modules of tools/scale."""

    resume = "resume"
    end = "end"
    buffer = "buffer"
    checkpoint = "checkpoint"
    visitors = "visitors"


def measured(bench: Bench) -> list[dict[str, str]]:
    """Rows of one bench, as the table has them. SystemExit where it fails."""
    command = [sys.executable, "-c", MEASURE.format(bench)]
    done = subprocess.run(command, cwd=TOOLS, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        sys.exit(f"the bench {bench} failed with exit status {done.returncode}; its last words are above")
    return [
        {"bench": bench, **{name: _text(value) for name, value in row.items()}}
        for row in json.loads(done.stdout.splitlines()[-1])
    ]


def _text(value: object) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def main(
    benches: Annotated[list[Bench] | None, typer.Argument(help="Which; without any, all.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Measure, and print a table of each as soon as it is there."""
    rows: list[dict[str, str]] = []
    for bench in benches or Bench:
        rows += (new := measured(bench))
        if not as_json:
            print_rows(new)
    if as_json:
        print(json.dumps(rows, indent=2))


if __name__ == "__main__":
    typer.run(main)
