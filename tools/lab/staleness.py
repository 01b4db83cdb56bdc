"""Objectives on equally stale data: where they end and how steady they are at lags of 1 to 50 steps.

Twice: on the enumerable policy, where the lag is exact and the optimum known; in whole runs on arithmetic.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from lab import lockstep, skill
from lab.curves import Curve, last_part, sag, swing
from lab.lockstep import Setup, SparseTable
from lab.results import Panel, Result, Row, Series, Spread
from lab.runs import Options, Study, log
from lab.scores import Scores
from tba_hpc.config import Beta, LearningRate, ObjectiveName, TrainSection
from tba_hpc.tasks.tabular import total_variation

OBJECTIVES: dict[str, ObjectiveName] = {
    "TB": "trajectory_balance",
    "TBA′": "tba_prime",
    "Dr. GRPO": "dr_grpo",
    "RLOO": "rloo",
}
WHOLE_RUN_OBJECTIVES = {name: (f"train.objective={objective}",) for name, objective in OBJECTIVES.items()}
LAGS = (1, 2, 10, 50)
BETA, RATE = 0.1, 0.1
EVALUATIONS = 30

Key = tuple[str, int]
"""Objective, lag."""


class Exact:
    """The enumerable policy: 16 prompts, 3 of 121 completions right; every group is trained on once."""

    question = "Which objectives bear stale data? Exact lags on an enumerable policy"
    steps = 300

    def arms(self, options: Options) -> dict[Key, list[Setup]]:
        """One per seed of each arm."""
        return {
            (name, lag): [self._setup(name, lag, seed, options) for seed in options.seeds]
            for name in OBJECTIVES
            for lag in LAGS
        }

    def _setup(self, name: str, lag: int, seed: int, options: Options) -> Setup:
        train = TrainSection(
            objective=OBJECTIVES[name],
            steps=options.steps or self.steps,
            prompts_per_step=8,
            completions_per_prompt=16,
            learning_rate=LearningRate(peak=RATE),
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
        """All arms, one after the other."""
        found: dict[Key, list[tuple[Curve, float]]] = {}
        for key, setups in self.arms(options).items():
            log.print(*key, style="dim")
            found[key] = [self._follow(setup) for setup in setups]
        rows = [self._row(key, runs) for key, runs in found.items()]
        return Result(rows, [self._panel(lag, found) for lag in LAGS], self._notes(options))

    def _follow(self, setup: Setup) -> tuple[Curve, float]:
        """Pass@1 over steps, and the last policy's distance from π_ref·exp(r/β)/Z."""
        table, curve = setup.table, []
        for moment in lockstep.train(setup, every=max(1, setup.train.steps // EVALUATIONS)):
            curve.append((float(moment.step), float((moment.policy_PC * table.reward_PC).sum(1).mean())))
        distance_P = total_variation(moment.policy_PC, table.optimum(BETA))
        return curve, float(distance_P.mean())

    def _row(self, key: Key, runs: list[tuple[Curve, float]]) -> Row:
        name, lag = key
        curves = [curve for curve, _ in runs]
        return {
            "objective": name,
            "lag": lag,
            "pass@1, %": Spread([100 * float(np.mean(last_part(curve, 0.1))) for curve in curves]),
            "swing": Spread([100 * swing(curve) for curve in curves]),
            "sag": Spread([100 * sag(curve) for curve in curves]),
            "distance": Spread([distance for _, distance in runs]),
        }

    def _notes(self, options: Options) -> tuple[str, ...]:
        return (
            f"Lag k: weights go out every k of {options.steps or self.steps} steps, and what they sample is "
            "trained on after the next time, so that data are k … 2k − 1 steps old, the same for every "
            f"objective. B = 8, K = 16, β = {BETA}, AdamW at {RATE}; TB and TBA′ without caps, Dr. GRPO "
            "clipped at .2.",
            "Pass@1: exact probability that a sample is right, mean over the last tenth; swing: standard "
            "deviation over the last third; sag: largest fall from a peak; in points. Distance: total "
            "variation between the last policy and π_ref·exp(r/β)/Z; Dr. GRPO, without a KL term, does not "
            "aim there.",
        )

    def _panel(self, lag: int, found: Mapping[Key, list[tuple[Curve, float]]]) -> Panel:
        series = [
            Series(name, [[(step, 100 * value) for step, value in curve] for curve, _ in found[name, lag]])
            for name in OBJECTIVES
        ]
        return Panel("step", "pass@1, %", series, f"lag {lag}")


EXACT = Exact()

WHOLE_RUN_LAGS = (1, 10, 50)

ARITHMETIC = Scores(
    "Which objectives bear stale data? Whole runs on arithmetic",
    Study(
        {
            f"{name}, k = {lag}": (*settings, f"exchange.sync_every={lag}")
            for lag in WHOLE_RUN_LAGS
            for name, settings in WHOLE_RUN_OBJECTIVES.items()
        },
        (*skill.UNTUNED, "buffer.most_on_policy=1"),
        steps=300,
        model=skill.MODEL,
    ),
    panels={f"k = {lag}": [f"{name}, k = {lag}" for name in WHOLE_RUN_OBJECTIVES] for lag in WHOLE_RUN_LAGS},
)
