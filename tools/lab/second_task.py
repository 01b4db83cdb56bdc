"""The two best remedies and the worst on a task that their rates were not tuned on, by ``remedies.md``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean

from lab import digits, skill
from lab.remedies import ARMS, RATES, REMEDIES, SEEDS, STEPS, row, run_of
from lab.results import Result
from lab.runs import Options
from lab.staleness import TB, Figures, end_of, panel
from tba_hpc.config import Config

LAGS = (10, 32)
TASK = (f"model.path={digits.PATH}", "task.name=lab.digits:Digits", "generator.max_tokens=64")


class SecondTask:
    """Commands on digits in place of word problems; all else as ``Remedies`` has it."""

    question = "The two best remedies and the worst on a second task, with the rates of the first"
    seeds = SEEDS

    def arms(self, options: Options) -> dict[str, Config]:
        """The config of one run of each arm that may be chosen."""
        return {name: run_of((name, LAGS[0]), RATES[0], SEEDS[0], STEPS, TASK)[1].config() for name in ARMS}

    def measure(self, options: Options) -> Result:
        """Choose the arms by the first comparison, which lies beside this one or is measured first."""
        first = Options(options.folder.parent / "remedies", SEEDS)
        skill.MODEL.make()
        digits.make()
        tuned = {key: rates for lag in LAGS for key, rates in REMEDIES.tune(lag, first).items()}
        names = chosen([REMEDIES.follow(lag, tuned, first) for lag in LAGS])
        rows, panels = [], []
        for lag in LAGS:
            found = REMEDIES.follow(lag, tuned, options, names=names, task=TASK)
            rows += [row(lag, name, tuned[name, lag], found) for name in names]
            curves = {(name, lag): [run["curve"] for run in runs] for name, runs in found.items()}
            panels.append(panel("pass@1, validation, %", lag, names, curves))
        return Result(rows, panels, NOTES)


def chosen(found: Sequence[Mapping[str, Sequence[Figures]]]) -> list[str]:
    """The two best arms and the worst, by mean pass@1 over lags and seeds, and TB."""
    score = {name: fmean(end_of(run) for lag in found for run in lag[name]) for name in ARMS}
    *_, worst = ranked = sorted(ARMS, key=score.__getitem__, reverse=True)
    return [name for name in ARMS if name in {*ranked[:2], worst, TB}]


NOTES = (
    "Commands on rows of digits (tools/lab/digits.py); the model takes two of three pairs of opposite "
    "commands for one another. Rates and their tuning scores are those of the first task: nothing was tuned "
    "on this one.",
)

SECOND_TASK = SecondTask()
