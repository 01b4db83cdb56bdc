"""Measures what a run costs at scale: its end, replay buffer, checkpoints.

    python tools/bench_scale.py [end] [buffer] [checkpoint] [--json]

Without a name, all of them, some ten minutes on two cores. Each is a module of ``tools/scale`` and
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

from tba_hpc.report.tables import Cell, print_rows

MEASURE = "import json; from scale.{} import measure; print(json.dumps(measure()))"


class Bench(StrEnum):
    """Modules of ``tools/scale``."""

    END = "end"
    BUFFER = "buffer"
    CHECKPOINT = "checkpoint"


def measured(bench: str) -> list[dict[str, Cell]]:
    """Rows of one bench. SystemExit if it fails."""
    command = [sys.executable, "-c", MEASURE.format(bench)]
    done = subprocess.run(command, cwd=Path(__file__).parent, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        sys.exit(f"the bench {bench} failed with exit status {done.returncode}, as said above")
    return [{"bench": str(bench), **row} for row in json.loads(done.stdout.splitlines()[-1])]


def main(
    benches: Annotated[list[Bench] | None, typer.Argument(help="Which; without any, all.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Measure, and print the table."""
    rows = [row for bench in benches or list(Bench) for row in measured(bench)]
    print_rows(rows, as_json=as_json)


if __name__ == "__main__":
    typer.run(main)
