"""The command ``tba``: run, the two roles, report. It imports nothing heavy until a role starts.

An error that the user can mend is one sentence on stderr and exit status 2; the ranks leave theirs in
the logs of the attempt, where ``tba run`` finds it.
"""

from __future__ import annotations

import logging
import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from tba_hpc.config import Config, ConfigError, dump_config, load_config
from tba_hpc.launch import local
from tba_hpc.report.status import follow, print_status, print_summary
from tba_hpc.report.summary import summarise
from tba_hpc.state import DiskFullError, RunDir, StateError, StopFlag

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Trajectory Balance with Asynchrony: post-train language models with reinforcement learning.",
)

Overrides = Annotated[
    list[str] | None, typer.Option("--set", metavar="a.b=value", help="Override one key; repeatable.")
]
RunPath = Annotated[Path, typer.Argument(metavar="RUN", help="A run directory.")]
Index = Annotated[
    int | None, typer.Option("--index", help="Rank within the role, where no MPI launcher gives it.")
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print the config and the commands; start nothing.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]


@app.command()
def run(
    config: Annotated[Path, typer.Argument(help="A YAML config, or the directory of a run to go on with.")],
    overrides: Overrides = None,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Train on this machine, from the start or from where the run stopped."""
    resolved = _resolve(config, overrides or [])
    if dry_run:
        run_dir = RunDir(resolved.run_dir.absolute())
        commands = [shlex.join(command) for command in local.commands(run_dir, resolved).values()]
        typer.echo(dump_config(resolved) + "".join(f"# {command}\n" for command in commands), nl=False)
        return
    run_dir = RunDir.create(resolved)
    if not run_dir.finished:
        _launch(run_dir, resolved, quiet=as_json)
    print_summary(run_dir, summarise(run_dir, resolved), as_json=as_json)


@app.command()
def create(
    config: Annotated[Path, typer.Argument(help="A YAML config.")], overrides: Overrides = None
) -> None:
    """Make the run directory of a config, or check that it holds the same run, and print its path."""
    typer.echo(RunDir.create(_resolve(config, overrides or [])).path)


@app.command()
def prepare(run: RunPath, overrides: Overrides = None) -> None:
    """Before every start of RUN's ranks by a batch script: set how many there are, begin new logs."""
    run_dir = RunDir.open(run)
    run_dir.adapt(overrides or [])
    run_dir.begin_attempt()


@app.command()
def train(run: RunPath, index: Index = None) -> None:
    """Be a trainer rank of RUN (started by mpiexec or srun)."""
    stop = StopFlag()  # before the slow imports: a signal that finds no handler is lost
    from tba_hpc import runtime

    runtime.train(_open(run), index, stop)


@app.command()
def search(run: RunPath, index: Index = None) -> None:
    """Be a searcher rank of RUN (started by mpiexec or srun)."""
    stop = StopFlag()
    from tba_hpc import runtime

    runtime.search(_open(run), index, stop)


@app.command()
def status(
    run: RunPath,
    once: Annotated[bool, typer.Option("--once", help="Print the state once and end.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show how RUN stands, live; from any machine that sees its directory, over plain ssh."""
    run_dir = RunDir.open(run)
    if once or as_json:
        print_status(run_dir, run_dir.config(), as_json=as_json)
    else:
        follow(run_dir, run_dir.config())


@app.command()
def report(run: RunPath, as_json: AsJson = False) -> None:
    """Write RUN/report.html anew and print the summary of RUN."""
    from tba_hpc.report.page import write_report

    run_dir = RunDir.open(run)
    write_report(run_dir)
    print_summary(run_dir, summarise(run_dir, run_dir.config()), as_json=as_json)


def _resolve(path: Path, overrides: list[str]) -> Config:
    """The config of a file, or the frozen one of a run directory; local files it names must exist."""
    config = load_config(RunDir.open(path).config_file if path.is_dir() else path, overrides)
    for key, value in (
        ("model.path", config.model.path),
        ("task.train_file", config.task.train_file),
        ("task.test_file", config.task.test_file),
    ):
        if value and _is_local(value) and not Path(value).exists():
            raise ConfigError(f"{key}={value} does not exist: check the path, seen from {Path.cwd()}")
    return config


def _is_local(value: str) -> bool:
    """Whether a value is a path of this machine, not a name on a hub such as ``org/model``."""
    return value.startswith((".", "/", "~")) or value.count("/") > 1 or Path(value).suffix == ".jsonl"


def _open(path: Path) -> RunDir:
    """The run directory of a rank, which logs what it does."""
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", force=True
    )
    return RunDir.open(path)


def _launch(run_dir: RunDir, config: Config, *, quiet: bool) -> None:
    """Run all roles; exit with their status unless they finished or stopped on request."""
    code = local.launch(run_dir, config, console=Console(stderr=quiet))
    if code:
        raise typer.Exit(code)


def main() -> None:
    """Entry point: print a user's error as one sentence."""
    try:
        app()
    except (ConfigError, StateError, DiskFullError, local.LaunchError) as error:
        print(f"tba: {error}", file=sys.stderr)
        sys.exit(local.USER_ERROR)
