"""Measures one claim about the method on this machine; makes a table and a plot with machine, date and seeds.

    python tools/experiments.py NAME [--seeds 0 1 2] [--steps N] [--out runs/experiments]
    python tools/experiments.py NAME --from tools/lab/results/NAME.json   # draws table and plot again

Every experiment needs two cores. Results are table.md, table.json and plot.png in OUT/NAME, or, with --steps,
in OUT/NAME-N-steps. Runs are kept in its folder ``runs``, and are not repeated while their settings stay the
same. The experiments, and the question of each:

"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from lab import asynchrony, pace, remedies, replay_cost, second_task, sparse, staleness
from lab.results import Result, from_json, provenance, write
from lab.runs import Options, log


class Experiment(Protocol):
    """An experiment. question: title of its table. arms: what is run with each seed, by name."""

    @property
    def question(self) -> str: ...

    def arms(self, options: Options) -> Mapping[Any, object]: ...

    def measure(self, options: Options) -> Result: ...


EXPERIMENTS: Mapping[str, Experiment] = {
    "asynchrony": asynchrony.QUICK,
    "pace": pace.PACE,
    "staleness": staleness.EXACT,
    "staleness_arithmetic": staleness.ARITHMETIC,
    "remedies": remedies.REMEDIES,
    "second_task": second_task.SECOND_TASK,
    "replay_cost": replay_cost.REPLAY_COST,
    "replay_sparse": sparse.SHARE,
    "searchers": sparse.SEARCHERS,
}


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line. Exits with a sentence if a value is wrong."""
    listing = "\n".join(f"    {name:22}{experiment.question}" for name, experiment in EXPERIMENTS.items())
    parser = argparse.ArgumentParser(
        description=(__doc__ or "") + listing, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("name", choices=EXPERIMENTS, metavar="NAME", help="one of the above")
    parser.add_argument("--seeds", type=int, nargs="+", help="default 0 1 2, or those of the protocol")
    parser.add_argument("--steps", type=int, help="optimizer steps of a run, to try it out")
    parser.add_argument("--out", type=Path, default=Path("runs/experiments"), help="default runs/experiments")
    parser.add_argument(
        "--from", dest="source", type=Path, metavar="FILE", help="table.json to draw, without measuring"
    )
    arguments = parser.parse_args(argv)
    if min(arguments.seeds or [0]) < 0 or (arguments.steps is not None and arguments.steps < 1):
        parser.error("--seeds must be at least 0 and --steps at least 1")
    return arguments


def main(argv: list[str] | None = None) -> None:
    """Do an experiment, or read its results; write and print them."""
    arguments = parse_arguments(argv)
    # A trial with fewer steps must not replace results that took hours.
    trial = f"-{arguments.steps}-steps" if arguments.steps else ""
    folder = arguments.out.absolute() / f"{arguments.name}{trial}"
    if arguments.source:
        result, title, origin = from_json(arguments.source.read_text())
        print(write(result, folder, title=title, origin=origin))
    else:
        experiment = EXPERIMENTS[arguments.name]
        seeds = tuple(arguments.seeds or getattr(experiment, "seeds", Options.seeds))
        options = Options(folder, seeds, arguments.steps)
        origin, began = provenance(options.seeds), time.monotonic()
        print(write(experiment.measure(options), folder, title=experiment.question, origin=origin))
        log.print(f"{(time.monotonic() - began) / 60:.1f} minutes", style="dim")
    log.print(f"table and plot in {folder}", style="dim", soft_wrap=True)


if __name__ == "__main__":
    main()
