"""The two best remedies and the worst, on a task for which no rate was tuned; see ``remedies.md``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from statistics import fmean
from typing import Any

from lab import digits
from lab.remedies import ARMS, RATES, REMEDIES, SEEDS, STEPS, age, row, run_of
from lab.results import Result, from_json
from lab.runs import Options
from lab.staleness import TB, panel
from tba_hpc.config import Config

LAGS = (10, 32)
TASK = (f"model.path={digits.PATH}", "task.name=lab.digits:Digits", "generator.max_tokens=64")

FIRST = Path(__file__).parent / "results/remedies.json"
"""Results of the first comparison, by which arms and rates are chosen."""


class SecondTask:
    """The comparison ``Remedies`` with commands on digits instead of word problems."""

    question = "The two best remedies and the worst on a second task, with the rates of the first"
    seeds = SEEDS

    def arms(self, options: Options) -> dict[str, Config]:
        """Return the config of one run of each arm that may be chosen."""
        return {name: run_of((name, LAGS[0]), RATES[0], SEEDS[0], STEPS, TASK)[1].config() for name in ARMS}

    def measure(self, options: Options) -> Result:
        """Run the arms chosen by the first comparison, at both lags."""
        digits.make()
        first = by_lag(FIRST.read_text())
        rows, panels = [], []
        for lag in LAGS:
            rates = {name: float(first[lag][name]["rate"]) for name in chosen(first)}
            found = REMEDIES.follow(lag, rates, options, TASK)
            rows += [row(lag, name, first[lag][name]["tuning, %"], rates, found) for name in rates]
            curves = {(name, lag): [run["curve"] for run in runs] for name, runs in found.items()}
            panels.append(panel("pass@1, validation, %", lag, rates, curves))
        return Result(rows, panels, NOTES)


def by_lag(text: str) -> dict[int, dict[str, Any]]:
    """Return the rows of the first comparison, from its JSON, by lag and arm."""
    rows = from_json(text)[0].rows
    return {lag: {str(row["arm"]): row for row in rows if row["age"] == age(lag)} for lag in LAGS}


def chosen(first: Mapping[int, Mapping[str, Any]]) -> list[str]:
    """Return TB, the two best arms and the worst, by mean pass@1 over lags and seeds."""
    score = {name: fmean(rows[name]["pass@1, %"].mean for rows in first.values()) for name in ARMS}
    *_, worst = ranked = sorted(ARMS, key=score.__getitem__, reverse=True)
    return [name for name in ARMS if name in {*ranked[:2], worst, TB}]


NOTES = (
    "Commands on rows of digits (tools/lab/digits.py). The model mostly takes the commands of two of three "
    "pairs of opposites for each other. Rates and tuning scores are those of the first task: nothing was "
    "tuned on this one.",
)

SECOND_TASK = SecondTask()
