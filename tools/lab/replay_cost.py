"""Does replay save compute? Trajectory balance that learns from each group once, or several times.

The protocol, ``replay_cost.md``, was fixed before the first run. It says what is compared, how, and why.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

from lab import skill
from lab.curves import Curve, time_to
from lab.lockstep_model import Run, figures_of
from lab.results import Panel, Result, Row, Series, Spread
from lab.runs import Options
from lab.staleness import TUNING_SEED, Figures, best_rate, end_of
from tba_hpc.config import Config

QUEUE = "queue"
SHARES = {"m = 0": 0.0, "m = .5": 0.5, "m = .95": 0.95}
ARMS = (QUEUE, *SHARES)
"""A queue, and arms that replay, which draw a recent group with probability m."""

LAG = 4
GROUPS = 8
"""Number of groups that a step learns from; the queue also samples as many per step."""
FRESH_GROUPS = 2
"""Number of groups that an arm with replay samples per step: it learns from each four times on average."""
COMPLETIONS = 16

RATES = (1.25e-4, 2.5e-4, 5e-4)
SEEDS = (11, 12, 13)
STEPS, TUNING_STEPS = 400, 150
LEVELS = (0.3, 0.5)


class ReplayCost:
    """The comparison, in lockstep on a small Llama: each arm with its best of three rates, paired by seed."""

    question = "Does replay save compute? Trajectory balance with a queue and with m = 0, .5, .95"
    seeds = SEEDS

    def arms(self, options: Options) -> dict[str, Config]:
        """Return the config of one run of each arm."""
        return {name: run_of(name, RATES[0], SEEDS[0], STEPS)[1].config() for name in ARMS}

    def measure(self, options: Options) -> Result:
        """Run all rates with the tuning seed, then the best ones with the others."""
        skill.MODEL.make()
        shorter, steps = min(TUNING_STEPS, options.steps or STEPS), options.steps or STEPS
        folder = options.folder / "runs"
        tried = {key: run_of(*key, TUNING_SEED, shorter) for key in product(ARMS, RATES)}
        ends = {key: end_of(run) for key, run in figures_of(tried, folder).items()}
        tuned = {name: {rate: ends[name, rate] for rate in RATES} for name in ARMS}
        wanted = {
            (name, seed): run_of(name, best_rate(tuned[name]), seed, steps)
            for seed, name in product(options.seeds, ARMS)
        }
        runs = figures_of(wanted, folder)
        found = {name: [runs[name, seed] for seed in options.seeds] for name in ARMS}
        series = [Series(name, [by_samples(name, run) for run in found[name]]) for name in ARMS]
        panel = Panel("completions sampled", "pass@1, validation", series)
        return Result([row(name, tuned[name], found[name]) for name in ARMS], [panel], NOTES)


def run_of(name: str, rate: float, seed: int, steps: int) -> tuple[str, Run]:
    """Return the arm's name and a run of it."""
    given, fresh = [], None
    if name != QUEUE:
        given = [f"buffer.most_on_policy={SHARES[name]}", "buffer.replay_limit=null"]
        given += ["exchange.max_staleness=null"]  # else the buffer would be a queue
        fresh = FRESH_GROUPS
    return name, Run(overrides=tuple(given), lag=LAG, rate=rate, seed=seed, steps=steps, fresh_groups=fresh)


def samples_per_step(name: str) -> int:
    """Return the number of completions that an arm samples per step, on average."""
    return COMPLETIONS * (GROUPS if name == QUEUE else FRESH_GROUPS)


def by_samples(name: str, run: Figures) -> Curve:
    """Return pass@1 over the number of completions sampled."""
    return [(step * samples_per_step(name), value) for step, value in run["curve"]]


def seconds_per_step(run: Figures) -> float:
    """Return the time of one core that generation and learning took per step, s."""
    return float(run["seconds"]["generation"] + run["seconds"]["learning"]) / int(run["steps"])


def row(name: str, tuned: Mapping[float, float], runs: Sequence[Figures]) -> Row:
    """Return the row of the table for one arm: what it took to reach each level, and where it ended."""
    cells: dict[str, Any] = {
        "arm": name,
        "tuning, %": ", ".join(f"{score:.0f}" for score in tuned.values()),
        "rate": f"{best_rate(tuned):g}",
        "pass@1, %": Spread([end_of(run) for run in runs]),
    }
    for level in LEVELS:
        steps = [time_to(run["curve"], level) for run in runs]
        seconds = [at and at * seconds_per_step(run) for at, run in zip(steps, runs, strict=True)]
        cells[f"samples to {level:.0%}"] = Spread([at and at * samples_per_step(name) for at in steps])
        cells[f"steps to {level:.0%}"] = Spread(steps)
        cells[f"core-seconds to {level:.0%}"] = Spread(seconds)
    return cells


NOTES = (
    "Protocol, fixed before the first run: tools/lab/replay_cost.md. TB as shipped; B = 8, K = 16, β = .02, "
    f"AdamW, weights every {LAG} steps. The queue samples 8 groups per step, the others {FRESH_GROUPS}, with "
    "a buffer that keeps everything.",
    f"Rates: the best of {', '.join(f'{rate:g}' for rate in RATES)}, by {TUNING_STEPS} steps with seed "
    f"{TUNING_SEED}. Samples, steps and core-seconds to a level are interpolated linearly between "
    "evaluations, whose time does not count. In brackets: how many seeds reach the level.",
)

REPLAY_COST = ReplayCost()
