"""Measures what a run costs at scale, on two cores in some minutes.

    python tools/bench_scale.py end       summary, report and status at the end of a long run
    python tools/bench_scale.py buffer    merges, samples and snapshots of a replay buffer of a million

Takes ``--json``. Believe the ratios, not the seconds.
"""

from __future__ import annotations

from typing import Annotated

import typer
from scale import buffer as replay_buffer
from scale import end as long_run

from tba_hpc.report.tables import print_rows

app = typer.Typer(add_completion=False, no_args_is_help=True, help=__doc__)

Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]


@app.command()
def end(as_json: Json = False) -> None:
    """What readers of a run of 256 searchers and three days take."""
    print_rows(long_run.measure(), as_json=as_json)


@app.command()
def buffer(as_json: Json = False) -> None:
    """What the replay buffer costs the trainer's loop."""
    print_rows(replay_buffer.measure(), as_json=as_json)


if __name__ == "__main__":
    app()
