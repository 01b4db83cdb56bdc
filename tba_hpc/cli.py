"""The command ``tba``: run, the two roles, report. Imports nothing heavy until a role starts.

Errors that a user can mend are one sentence on stderr and exit code 2; everything else keeps its
traceback in the rank's log.
"""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from tba_hpc.config import Config, ConfigError, dump_config, load_config
from tba_hpc.state import RunDir

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Trajectory Balance with Asynchrony: post-train language models with reinforcement learning.",
)

USER_ERROR = 2
"""Exit code of a command that could not run as asked."""

Overrides = Annotated[
    list[str] | None, typer.Option("--set", metavar="a.b=value", help="Override one key; repeatable.")
]
RunPath = Annotated[Path, typer.Argument(metavar="RUN", help="A run directory.")]
Index = Annotated[
    int | None, typer.Option("--index", help="Rank within the role, where no MPI launcher gives it.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]


@app.command()
def run(
    config: Annotated[Path, typer.Argument(help="A YAML config, or the directory of a run to go on with.")],
    overrides: Overrides = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the resolved config, start nothing.")] = False,
    as_json: AsJson = False,
) -> None:
    """Train on this machine, from the start or from where the run directory stopped."""
    from tba_hpc.launch import local
    from tba_hpc.report import summary

    resolved = _resolve(config, overrides or [])
    if dry_run:
        typer.echo(f"{dump_config(resolved)}# {' '.join(local.command(resolved.run_dir, resolved))}")
        return
    run_dir = RunDir.create(resolved)
    if not run_dir.finished:
        local.launch(run_dir, resolved)
    summary.show(run_dir, as_json=as_json)


@app.command()
def train(run: RunPath, index: Index = None) -> None:
    """Be a trainer rank of RUN (started by mpiexec or srun)."""
    from tba_hpc import runtime

    runtime.train(RunDir.open(run), index)


@app.command()
def search(run: RunPath, index: Index = None) -> None:
    """Be a searcher rank of RUN (started by mpiexec or srun)."""
    from tba_hpc import runtime

    runtime.search(RunDir.open(run), index)
