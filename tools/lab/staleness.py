"""Objectives on equally stale data: where they end at lags of 1 to 50 steps.

Two experiments run in lockstep: one on the enumerable policy, whose optimum is known, one on a whole model.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from itertools import product
from typing import Any

import numpy as np

from lab import lockstep, skill
from lab.curves import Curve, last_part, time_to
from lab.lockstep import Setup, SparseTable
from lab.lockstep_model import Run, figures_of
from lab.results import Panel, Result, Row, Series, Spread
from lab.runs import Options, log
from lab.tabular import total_variation
from tba_hpc.config import Config, LearningRate, TrainSection

OBJECTIVES: dict[str, dict[str, Any]] = {
    "TB": {"objective": "trajectory_balance"},
    "TB, equation 7": {
        "objective": {"name": "trajectory_balance", "log_z": "policy"},
        "ratio_bound": "none",
    },
    "TBA′": {"objective": "tba_prime"},
    "OAPL": {"objective": "oapl"},
    "Dr. GRPO": {"objective": "dr_grpo"},
    "M2PO": {"objective": {"name": "dr_grpo", "second_moment_limit": 0.04}},
    "RLOO": {"objective": "rloo"},
    "AsymRE": {"objective": {"name": "rloo", "baseline_shift": -0.1}},
}
"""Keys of the section ``train``, by objective."""

LAGS = (1, 10, 50)
RATES, TUNING_SEED = (0.1, 0.2, 0.4), 100
"""Learning rates of which each objective uses the best, and the seed of the runs that find it."""

BETA = 0.1
EVALUATIONS = 30

Key = tuple[str, int]
"""Objective and lag."""

Figures = Mapping[str, Any]
"""Result of ``lockstep_model.measure``."""


class Exact:
    """The experiment on the enumerable policy: 16 prompts, 3 of 121 completions right, groups used once."""

    question = "Which objectives bear stale data? Exact lags on an enumerable policy"
    steps = 300

    def arms(self, options: Options) -> dict[tuple[str, float, int], list[Setup]]:
        """Return the runs by objective, rate and lag, one per seed."""
        return {
            (name, rate, lag): [self._setup(name, rate, lag, seed, options) for seed in options.seeds]
            for name, rate, lag in product(OBJECTIVES, RATES, LAGS)
        }

    def _setup(self, name: str, rate: float, lag: int, seed: int, options: Options) -> Setup:
        train = TrainSection(
            **OBJECTIVES[name],
            steps=options.steps or self.steps,
            prompts_per_step=8,
            completions_per_prompt=16,
            learning_rate=LearningRate(peak=rate),
            beta=BETA,
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
        """Run each objective at its best rate, one after the other."""
        arms, found, tuned = self.arms(options), {}, {}
        for name in OBJECTIVES:
            log.print(name, style="dim")
            tuned[name] = {rate: self._tune(name, rate, options) for rate in RATES}
            rate = best_rate(tuned[name])
            for lag in LAGS:
                found[name, lag] = [self._follow(setup) for setup in arms[name, rate, lag]]
        rows = [self._row(key, tuned[key[0]], runs) for key, runs in found.items()]
        curves = {key: [curve for curve, _ in runs] for key, runs in found.items()}
        panels = [panel("pass@1, %", lag, OBJECTIVES, curves) for lag in LAGS]
        return Result(rows, panels, self._notes(options, tuned))

    def _tune(self, name: str, rate: float, options: Options) -> float:
        """Return the final pass@1 with the tuning seed, %, as a mean over the lags."""
        setups = [self._setup(name, rate, lag, TUNING_SEED, options) for lag in LAGS]
        return float(np.mean([_final(self._follow(setup)[0]) for setup in setups]))

    def _follow(self, setup: Setup) -> tuple[Curve, float]:
        """Do one run; return pass@1 over steps, and the last policy's distance from π_ref·exp(r/β)/Z."""
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
            "rate": best_rate(tuned),
            "lag": lag,
            "pass@1, %": Spread([_final(curve) for curve in curves]),
            "distance": Spread([distance for _, distance in runs]),
        }

    def _notes(self, options: Options, tuned: Mapping[str, Mapping[float, float]]) -> tuple[str, ...]:
        scores = "; ".join(
            f"{name} {', '.join(f'{score:.1f}' for score in each.values())}" for name, each in tuned.items()
        )
        return (
            f"Lag k: weights are published every k of {options.steps or self.steps} steps. What they sample "
            "is trained on after the next publication, so data are k to 2k − 1 steps old for every "
            f"objective. B = 8, K = S = 16, β = {BETA}, AdamW. TB: log Z of the behaviour, tapered. Dr. "
            "GRPO: clipped at .2. M2PO: Dr. GRPO with a mask of .04 instead. AsymRE: RLOO with δ = −.1.",
            "Pass@1: exact probability that a sample is right, mean over the last tenth of the steps. "
            "Distance: total variation between the last policy and π_ref·exp(r/β)/Z.",
            "Dr. GRPO and M2PO have no KL term, and do not aim at that policy. Nor does OAPL: its target "
            "π_lag·exp(r/β)/Z moves with every sync, towards the best completions alone.",
            f"Rates: the best by pass@1 over all lags with seed {TUNING_SEED}. Pass@1 in % at "
            f"{', '.join(f'{rate:g}' for rate in RATES)}: {scores}.",
        )


def _final(curve: Curve) -> float:
    """Return pass@1, %, as a mean over the last tenth of a curve."""
    return 100 * float(np.mean(last_part(curve, 0.1)))


EXACT = Exact()


TB, BASELINE = "TB", "Dr. GRPO, clipped"
EQUATION_7 = "TB, equation 7"


def _tb(log_z: str, bound: str = "none") -> dict[str, Any]:
    return {"train.objective": {"name": "trajectory_balance", "log_z": log_z}, "train.ratio_bound": bound}


FORMS: dict[str, dict[str, Any]] = {
    TB: _tb("behaviour", "taper"),
    "TB, capped at 8": _tb("behaviour", "cap"),
    "TB, no bound": _tb("behaviour"),
    EQUATION_7: _tb("policy"),
    "TB, equation 7, tapered": _tb("policy", "taper"),
    "TB, no KL in log Z": _tb("none"),
    BASELINE: {"train.objective": "dr_grpo"},
    "TOPR": {"train.objective": "topr"},
    "GSPO": {"train.objective": "gspo"},
    "OAPL, β₁ 1, β₂ .001": {
        "train.objective": {"name": "oapl", "value_beta": 1.0},
        "train.beta": 0.001,
    },
    "OAPL, both .5": {"train.objective": "oapl", "train.beta": 0.5},
}
"""Overrides by objective. TBA′ is left out, because its gradient equals TB's where nothing is clamped."""

FORMS_AT = {
    1: (TB, EQUATION_7, BASELINE),
    4: (TB,),
    10: (TB, EQUATION_7, BASELINE),
    50: (TB, EQUATION_7, BASELINE),
}
"""Objectives that are run with every seed, by lag."""

TUNED_AT = {10: tuple(FORMS), 50: (TB, "TB, capped at 8", EQUATION_7, BASELINE, "TOPR"), 1: FORMS_AT[1]}
"""Objectives whose rates are tuned, by lag. The others end lower at lag 10."""

MODEL_RATES = (1.25e-4, 2.5e-4)
MODEL_STEPS, TUNING_STEPS = 300, 200


class WholeModel:
    """The experiment on a small Llama in lockstep: each objective at the better of two rates for each lag."""

    question = "Do old data teach? A whole model on arithmetic, exact lags"

    def arms(self, options: Options) -> dict[str, Config]:
        """Return the config of one run of each objective."""
        return {name: self._run(name, 10, MODEL_RATES[0], 0, MODEL_STEPS)[1].config() for name in FORMS}

    def measure(self, options: Options) -> Result:
        """Run all rates with the tuning seed, then the better ones with the other seeds."""
        skill.MODEL.make()
        keys = [(name, lag) for lag, names in FORMS_AT.items() for name in names]
        tried = [(name, lag) for lag, names in TUNED_AT.items() for name in names]
        tuned = {key: self._tune(key, options) for key in tried}
        tuned[TB, 4] = tuned[TB, 10]
        steps = options.steps or MODEL_STEPS
        wanted = {
            (key, seed): self._run(*key, best_rate(tuned[key]), seed, steps)
            for seed, key in product(options.seeds, keys)
        }
        made = figures_of(wanted, options.folder / "runs")
        found = {key: [made[key, seed] for seed in options.seeds] for key in keys}
        in_order = sorted(tuned, key=lambda key: (key[1], list(FORMS).index(key[0])))
        rows = [self._row(key, tuned[key], found.get(key, [])) for key in in_order]
        curves = {key: [run["curve"] for run in runs] for key, runs in found.items()}
        panels = [panel("pass@1, validation, %", lag, names, curves) for lag, names in FORMS_AT.items()]
        return Result(rows, panels, NOTES_OF_MODEL)

    def _tune(self, key: Key, options: Options) -> dict[float, float]:
        """Return pass@1 at the end of a shorter run with the tuning seed, %, by rate."""
        steps = min(TUNING_STEPS, options.steps or TUNING_STEPS)
        wanted = {rate: self._run(*key, rate, TUNING_SEED, steps) for rate in MODEL_RATES}
        made = figures_of(wanted, options.folder / "runs")
        return {rate: end_of(figures) for rate, figures in made.items()}

    def _run(self, name: str, lag: int, rate: float, seed: int, steps: int) -> tuple[str, Run]:
        given = tuple(f"{key}={json.dumps(value)}" for key, value in FORMS[name].items())
        return name, Run(overrides=given, lag=lag, rate=rate, seed=seed, steps=steps)

    def _row(self, key: Key, tuned: Mapping[float, float], runs: Sequence[Figures]) -> Row:
        curves = [run["curve"] for run in runs]
        return {
            "objective": key[0],
            "lag": key[1],
            "tuning, %": ", ".join(f"{score:.0f}" for score in tuned.values()),
            "rate": f"{best_rate(tuned):g}",
            "pass@1, %": Spread([end_of(run) for run in runs]) if runs else None,
            "steps to 50 %": Spread([time_to(curve, 0.5) for curve in curves]) if runs else None,
            "ESS": Spread([float(np.mean(run["series"]["ess"])) for run in runs]) if runs else None,
        }


def panel(y: str, lag: int, names: Iterable[str], curves: Mapping[Key, Sequence[Curve]]) -> Panel:
    """Return the panel of pass@1 over steps at one lag. y: title of the axis. names: objectives shown."""
    series = [
        Series(name, [[(step, 100 * value) for step, value in curve] for curve in curves[name, lag]])
        for name in names
    ]
    return Panel("step", y, series, f"lag {lag}")


def best_rate(tuned: Mapping[float, float]) -> float:
    return max(tuned, key=tuned.__getitem__)


def end_of(figures: Figures) -> float:
    """Return pass@1, %, as a mean of the last three evaluations."""
    return 100 * float(np.mean([value for _, value in figures["curve"][-3:]]))


NOTES_OF_MODEL = (
    "Lag k: weights are published every k steps. What they sample is learned from after the next "
    "publication, so data are k to 2k − 1 steps old; every group is used once. B = 8, K = 16, β = .02 (not "
    f"for OAPL, whose authors use 1 and .001), AdamW, {MODEL_STEPS} steps. Greedy pass@1 on 256 validation "
    "problems, mean of the last three evaluations. TB: log Z of the behaviour, tapered.",
    f"Rates: the better of {', '.join(f'{rate:g}' for rate in MODEL_RATES)} for each lag, by {TUNING_STEPS} "
    f"steps with seed {TUNING_SEED}. At lag 4, TB has its rate of lag 10.",
)

ARITHMETIC = WholeModel()
