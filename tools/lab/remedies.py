"""Trajectory balance and other remedies for old data, compared by a protocol fixed before the first run.

The protocol, ``remedies.md``, says what is compared, how, and why. An interrupted experiment continues where
it was. This does a single run, and prints its pass@1, %:

    PYTHONPATH=tools python -m lab.remedies ARM LAG RATE SEED
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from itertools import product
from math import sqrt
from statistics import fmean, stdev
from typing import Any

from lab import skill
from lab.lockstep_model import Run, figures_of, measure
from lab.results import Panel, Result, Row, Spread
from lab.runs import Options, log
from lab.staleness import BASELINE, EQUATION_7, FORMS, TB, TUNING_SEED, Figures, Key, best_rate, end_of, panel
from tba_hpc.config import Config

CENTRED = {"train.score_centering": 32}
DECOUPLED = "decoupled PPO"

ARMS: dict[str, dict[str, Any]] = {
    TB: FORMS[TB],
    EQUATION_7: FORMS[EQUATION_7],
    "TB, equation 7, centred": FORMS[EQUATION_7] | CENTRED,
    "TB, centred": FORMS[TB] | CENTRED,
    BASELINE: FORMS[BASELINE],
    "TIS": {"train.objective": "rloo", "train.ratio_bound": {"name": "cap", "cap": 2.0}},
    "IcePop": {"train.objective": "rloo", "train.ratio_bound": "icepop"},
    DECOUPLED: {"train.objective": "decoupled_ppo"},
}
"""Overrides of the config, by arm. The other arms are compared with the first."""

LAGS = (10, 32, 1, 4)
"""Lags, steps, in the order in which they are run."""

RATES = (1.25e-4, 2.5e-4, 5e-4)
SEEDS = (11, 12, 13, 14, 15)
STEPS, TUNING_STEPS = 225, 150

T_975 = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365, 9: 2.306, 10: 2.262}
"""The 97.5 % quantiles of Student's t with n − 1 degrees of freedom, by number n of pairs."""


class Remedies:
    """The comparison, in lockstep on a small Llama: each arm with its best of three rates, paired by seed."""

    question = "Which remedy for old data? Eight arms on a whole model, exact lags, paired seeds"
    seeds = SEEDS

    def arms(self, options: Options) -> dict[str, Config]:
        """Return the config of one run of each arm."""
        return {name: run_of((name, LAGS[0]), RATES[0], SEEDS[0], STEPS)[1].config() for name in ARMS}

    def measure(self, options: Options) -> Result:
        """Lag by lag, run all rates with the tuning seed, then the best rates with the other seeds."""
        if len(options.seeds) > max(T_975):
            raise SystemExit(f"{len(options.seeds)} seeds are more than {max(T_975)}: give fewer")
        skill.MODEL.make()
        rows, panels = {}, {}
        for lag in LAGS:
            tuned = self.tune(lag, options)
            rates = {name: best_rate(tuned[name]) for name in ARMS}
            found = self.follow(lag, rates, options)
            rows[lag] = [row(lag, name, in_words(tuned[name]), rates, found) for name in ARMS]
            curves = {(name, lag): [run["curve"] for run in runs] for name, runs in found.items()}
            panels[lag] = panel("pass@1, validation, %", lag, ARMS, curves)
            log.print(*rows[lag], sep="\n", style="dim")
        return _in_order(rows, panels)

    def tune(self, lag: int, options: Options) -> dict[str, dict[float, float]]:
        """Return pass@1 at the end of a shorter run with the tuning seed, %, by arm, then by rate."""
        steps = min(TUNING_STEPS, options.steps or TUNING_STEPS)
        wanted = {
            (name, rate): run_of((name, lag), rate, TUNING_SEED, steps) for name, rate in product(ARMS, RATES)
        }
        found = figures_of(wanted, options.folder / "runs")
        return {name: {rate: end_of(found[name, rate]) for rate in RATES} for name in ARMS}

    def follow(
        self, lag: int, rates: Mapping[str, float], options: Options, task: tuple[str, ...] = ()
    ) -> dict[str, list[Figures]]:
        """Return the figures of the runs at one lag, by arm, in the order of the seeds.

        rates: learning rate of each arm. task: overrides that select another task than that of the tuning.
        """
        steps = options.steps or STEPS
        wanted = {
            (name, seed): run_of((name, lag), rates[name], seed, steps, task)
            for seed, name in product(options.seeds, rates)
        }
        found = figures_of(wanted, options.folder / "runs")
        return {name: [found[name, seed] for seed in options.seeds] for name in rates}


def run_of(key: Key, rate: float, seed: int, steps: int, task: tuple[str, ...] = ()) -> tuple[str, Run]:
    """Return the arm's name and a run of it. key: arm and lag. task: further overrides."""
    name, lag = key
    given = tuple(f"{key}={json.dumps(value)}" for key, value in ARMS[name].items())
    exact = name == DECOUPLED
    return name, Run(
        overrides=(*given, *task), lag=lag, rate=rate, seed=seed, steps=steps, published_proximal=exact
    )


def row(
    lag: int, name: str, tuning: str, rates: Mapping[str, float], found: Mapping[str, Sequence[Figures]]
) -> Row:
    """Return the row of the table for one arm at one lag. tuning: the arm's scores at the three rates."""
    ends, shipped = [end_of(run) for run in found[name]], [end_of(run) for run in found[TB]]
    pairs = None if name == TB or len(ends) < 2 else paired(ends, shipped)
    return {
        "age": age(lag),
        "arm": name,
        "tuning, %": tuning,
        "rate": f"{rates[name]:g}",
        "pass@1, %": Spread(ends),
        "− TB": pairs and pairs[0],
        "95 %": pairs and "{:.1f} … {:.1f}".format(*pairs[1:]),
        "ESS": Spread([fmean(run["series"]["ess"]) for run in found[name]]),
    }


def age(lag: int) -> str:
    """Return the age of the data at a lag, in steps, as text."""
    return f"{lag} to {2 * lag - 1}" if lag > 1 else "1"


def in_words(tuned: Mapping[float, float]) -> str:
    """Return the scores as text, in the order of the rates."""
    return ", ".join(f"{score:.0f}" for score in tuned.values())


def paired(ours: Sequence[float], theirs: Sequence[float]) -> tuple[float, float, float]:
    """Return the mean difference ``ours`` − ``theirs`` of pairs, and the ends of its 95 % t-interval."""
    differences = [our - their for our, their in zip(ours, theirs, strict=True)]
    mean, pairs = fmean(differences), len(differences)
    half = T_975[pairs] * stdev(differences) / sqrt(pairs)
    return mean, mean - half, mean + half


def _in_order(rows: Mapping[int, list[Row]], panels: Mapping[int, Panel]) -> Result:
    """Return the result, with rows and panels in the order of rising lags."""
    lags = sorted(rows)
    return Result([row for lag in lags for row in rows[lag]], [panels[lag] for lag in lags], NOTES)


NOTES = (
    "The protocol, fixed before the first run: tools/lab/remedies.md. B = 8, K = 16, β = .02, AdamW, every "
    f"group used once, {STEPS} steps; greedy pass@1 on 256 validation problems, mean of the last three "
    "evaluations; − TB: mean of the differences between runs of one seed, and its 95 % t-interval.",
    f"Rates: the best of {', '.join(f'{rate:g}' for rate in RATES)} for each arm and age, by {TUNING_STEPS} "
    f"steps with seed {TUNING_SEED}.",
)

REMEDIES = Remedies()


def main(name: str, lag: str, rate: str, seed: str) -> None:
    """Print pass@1 at the end of one run, %."""
    skill.MODEL.make()
    print(f"{end_of(measure(run_of((name, int(lag)), float(rate), int(seed), STEPS)[1])):.1f}")


if __name__ == "__main__":
    main(*sys.argv[1:])
