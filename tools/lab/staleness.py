"""Objectives on equally stale data: where they end and how steady they are at lags of 1 to 50 steps.

Twice: on the enumerable policy, where the lag is exact and the optimum known; in whole runs on arithmetic.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from lab import lockstep, skill
from lab.curves import Curve, last_part, sag, swing
from lab.lockstep import Setup, SparseTable
from lab.results import Panel, Result, Row, Series, Spread
from lab.runs import Options, Study, log
from lab.scores import NOTES, Scored, panel, row
from tba_hpc.config import Beta, Config, LearningRate, TrainSection
from tba_hpc.tasks.tabular import total_variation

OBJECTIVES: dict[str, dict[str, Any]] = {
    "TB": {"objective": "trajectory_balance"},
    "TBA′": {"objective": "tba_prime"},
    "OAPL": {"objective": "oapl"},
    "Dr. GRPO": {"objective": "dr_grpo"},
    "M2PO": {"objective": {"name": "dr_grpo", "second_moment_limit": 0.04}},
    "RLOO": {"objective": "rloo"},
    "AsymRE": {"objective": {"name": "rloo", "baseline_shift": -0.1}},
}
"""Keys of the config, by name."""

WHOLE_RUNS = ("TB", "TBA′", "OAPL", "Dr. GRPO", "RLOO")
WHOLE_RUN_LAGS = (1, 10, 50)
WHOLE_RUN_RATES = (6.25e-5, 1.25e-4)
OAPL_BETA = "train.beta={schedule: constant, start: 0.5}"
"""Best of .02, .1 and .5 in 120 steps. It says how far a policy may be from what sampled, not from π_ref."""

EVALUATIONS_OF_RUNS = ("evaluate.every=20", "evaluate.validation_prompts=128", "evaluate.test_prompts=256")

LAGS = (1, 10, 50)
RATES, TUNING_SEED = (0.1, 0.2, 0.4), 100
"""Learning rates that every objective may choose from, with a seed that is not used again."""

BETA = 0.1
EVALUATIONS = 30

Key = tuple[str, int]
"""Objective, lag."""


class Exact:
    """The enumerable policy: 16 prompts, 3 of 121 completions right; every group is trained on once."""

    question = "Which objectives bear stale data? Exact lags on an enumerable policy"
    steps = 300

    def arms(self, options: Options) -> dict[tuple[str, float], dict[int, list[Setup]]]:
        """What there is to run of each objective at each rate: by lag, one per seed."""
        return {
            (name, rate): {
                lag: [self._setup(name, rate, lag, seed, options) for seed in options.seeds] for lag in LAGS
            }
            for name in OBJECTIVES
            for rate in RATES
        }

    def _setup(self, name: str, rate: float, lag: int, seed: int, options: Options) -> Setup:
        train = TrainSection(
            **OBJECTIVES[name],
            steps=options.steps or self.steps,
            prompts_per_step=8,
            completions_per_prompt=16,
            learning_rate=LearningRate(peak=rate),
            beta=Beta(start=BETA),
        )
        table = SparseTable(prompts=16, letters=3, length=4, modes=3, seed=seed)
        return Setup(
            table=table,
            train=train,
            buffer=None,
            sync_every=lag,
            groups_per_step=train.prompts_per_step,
            completions=train.completions_per_prompt,
            seed=seed,
        )

    def measure(self, options: Options) -> Result:
        """Every objective at its best rate, one after the other."""
        arms, found, tuned = self.arms(options), {}, {}
        for name in OBJECTIVES:
            log.print(name, style="dim")
            tuned[name] = {rate: self._tune(name, rate, options) for rate in RATES}
            best = max(RATES, key=tuned[name].__getitem__)
            for lag, setups in arms[name, best].items():
                found[name, lag] = [self._follow(setup) for setup in setups]
        rows = [self._row(key, tuned[key[0]], runs) for key, runs in found.items()]
        return Result(rows, [self._panel(lag, found) for lag in LAGS], self._notes(options, tuned))

    def _tune(self, name: str, rate: float, options: Options) -> float:
        """Final pass@1 with the seed for it, %: mean over the lags."""
        setups = [self._setup(name, rate, lag, TUNING_SEED, options) for lag in LAGS]
        return float(np.mean([_final(self._follow(setup)[0]) for setup in setups]))

    def _follow(self, setup: Setup) -> tuple[Curve, float]:
        """Pass@1 over steps, and the last policy's distance from π_ref·exp(r/β)/Z."""
        table, curve = setup.table, []
        for moment in lockstep.train(setup, every=max(1, setup.train.steps // EVALUATIONS)):
            curve.append((float(moment.step), float((moment.policy_PC * table.reward_PC).sum(1).mean())))
        distance_P = total_variation(moment.policy_PC, table.optimum(BETA))
        return curve, float(distance_P.mean())

    def _row(self, key: Key, tuned: Mapping[float, float], runs: list[tuple[Curve, float]]) -> Row:
        name, lag = key
        curves = [curve for curve, _ in runs]
        return {
            "objective": name,
            "rate": max(RATES, key=tuned.__getitem__),
            "lag": lag,
            "pass@1, %": Spread([_final(curve) for curve in curves]),
            "swing": Spread([100 * swing(curve) for curve in curves]),
            "sag": Spread([100 * sag(curve) for curve in curves]),
            "distance": Spread([distance for _, distance in runs]),
        }

    def _notes(self, options: Options, tuned: Mapping[str, Mapping[float, float]]) -> tuple[str, ...]:
        scores = "; ".join(
            f"{name} {', '.join(f'{score:.1f}' for score in each.values())}" for name, each in tuned.items()
        )
        return (
            f"Lag k: weights go out every k of {options.steps or self.steps} steps, and what they sample is "
            "trained on after the next time, so that data are k … 2k − 1 steps old, the same for every "
            f"objective. B = 8, K = S = 16, β = {BETA}, AdamW; TB and TBA′ without caps, Dr. GRPO clipped at "
            ".2, M2PO Dr. GRPO with its mask of .04 instead, AsymRE RLOO with δ = −.1.",
            "Pass@1: exact probability that a sample is right, mean over the last tenth; swing: standard "
            "deviation over the last third; sag: largest fall from a peak; in points. Distance: total "
            "variation between the last policy and π_ref·exp(r/β)/Z.",
            "Dr. GRPO and M2PO, without a KL term, do not aim at that posterior; nor does OAPL, whose target "
            "π_lag·exp(r/β)/Z moves on with every sync, towards the best completions alone.",
            f"Rates, by pass@1 over all lags with seed {TUNING_SEED}, in % at "
            f"{', '.join(f'{rate:g}' for rate in RATES)}: {scores}.",
        )

    def _panel(self, lag: int, found: Mapping[Key, list[tuple[Curve, float]]]) -> Panel:
        series = [
            Series(name, [[(step, 100 * value) for step, value in curve] for curve, _ in found[name, lag]])
            for name in OBJECTIVES
        ]
        return Panel("step", "pass@1, %", series, f"lag {lag}")


def _final(curve: Curve) -> float:
    """Pass@1, %: mean over the last tenth."""
    return 100 * float(np.mean(last_part(curve, 0.1)))


EXACT = Exact()


class WholeRuns:
    """Runs of the product, every objective at its best rate; each trajectory is learned from once."""

    question = "Which objectives bear stale data? Whole runs on arithmetic"

    def study(self, name: str, rate: float) -> Study:
        """One objective at one rate, an arm for each lag."""
        objective = [f"train.{key}={value}" for key, value in OBJECTIVES[name].items()]
        arms = {
            _run(name, lag, rate): (
                *objective,
                *([OAPL_BETA] if name == "OAPL" else []),
                skill.constant(rate),
                f"exchange.sync_every={lag}",
                f"exchange.max_staleness={2 * lag - 1}",
            )
            for lag in WHOLE_RUN_LAGS
        }
        return Study(arms, (*skill.ONCE, "launch.searchers=1", *EVALUATIONS_OF_RUNS), 300, skill.MODEL)

    def arms(self, options: Options) -> dict[str, Config]:
        """The config of every arm's first run, at every rate."""
        return {
            arm: study.config(arm, options.seeds[0], options)
            for name in WHOLE_RUNS
            for rate in WHOLE_RUN_RATES
            for study in [self.study(name, rate)]
            for arm in study.arms
        }

    def measure(self, options: Options) -> Result:
        """Tuning at the middle lag, then all; seeds outermost, so that a machine's moods meet all alike."""
        self.study("TB", WHOLE_RUN_RATES[0]).require_curves(options)
        tuned = {
            name: {rate: self._tune(name, rate, options) for rate in WHOLE_RUN_RATES} for name in WHOLE_RUNS
        }
        best = {name: max(scores, key=scores.__getitem__) for name, scores in tuned.items()}
        found: dict[str, dict[int, Scored]] = {}
        for seed in options.seeds:
            for name, rate in best.items():
                for lag in WHOLE_RUN_LAGS:
                    run = self.study(name, rate).run(_run(name, lag, rate), seed, options)
                    found.setdefault(_arm(name, lag), {})[seed] = Scored.read(run)
        rows = [
            {**row(arm, found[arm]), "rate": best[name]}
            for name in WHOLE_RUNS
            for arm in [_arm(name, lag) for lag in WHOLE_RUN_LAGS]
        ]
        panels = [
            panel({name: found[_arm(name, lag)] for name in WHOLE_RUNS}, f"k = {lag}")
            for lag in WHOLE_RUN_LAGS
        ]
        return Result(rows, panels, (*NOTES, *self._notes(tuned)))

    def _tune(self, name: str, rate: float, options: Options) -> float:
        """Final validation pass@1 at the middle lag with the seed for it, %."""
        arm = _run(name, WHOLE_RUN_LAGS[1], rate)
        run = self.study(name, rate).run(arm, TUNING_SEED, options)
        return 100 * float(np.mean(last_part(Scored.read(run).curve)))

    def _notes(self, tuned: Mapping[str, Mapping[float, float]]) -> tuple[str, ...]:
        scores = "; ".join(
            f"{name} {', '.join(f'{score:.0f}' for score in each.values())}" for name, each in tuned.items()
        )
        return (
            "Lag k: weights go out every k steps, and no trajectory is learned from when its weights are 2k "
            "steps old; each is learned from once, the oldest first. β = .02, OAPL's .5. 256 test problems, "
            "128 for validation.",
            f"Rates, by the last third of validation at k = {WHOLE_RUN_LAGS[1]} with seed {TUNING_SEED}, "
            f"in % at {', '.join(f'{rate:g}' for rate in WHOLE_RUN_RATES)}: {scores}.",
        )


def _arm(name: str, lag: int) -> str:
    return f"{name}, k = {lag}"


def _run(name: str, lag: int, rate: float) -> str:
    return f"{_arm(name, lag)}, rate {rate:g}"


ARITHMETIC = WholeRuns()
