"""A sparse task in place of red-teaming: one prompt, and 8 of 5,461 completions rewarded, all far apart.

The figures by which red-teaming is judged, success and diversity, are computed exactly from the policy's
table. Two experiments vary the number of searchers for one trainer, and the share m of recent data. Shape
letters are those of ``lockstep``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from lab import lockstep
from lab.lockstep import Moment, Setup, SparseTable
from lab.results import Panel, Result, Row, Series, Spread
from lab.runs import Options, log
from tba_hpc.config import BufferSection, LearningRate, TrainSection
from tba_hpc.config.variants import LogZ, TrajectoryBalance, Unbounded

MODES, LETTERS, LENGTH = 8, 4, 6
STEPS, EVALUATIONS = 400, 40
BETA = 0.1
KEPT = 0.1
"""Share of its probability at the optimum from which on a mode (a rewarded completion) counts as kept."""

TRAIN = TrainSection(
    steps=STEPS,
    prompts_per_step=8,
    completions_per_prompt=16,
    learning_rate=LearningRate(peak=0.05),
    beta=BETA,
)
REPLAY = BufferSection(capacity=200_000, capacity_per_prompt=200_000, reward_temperature=BETA)
"""A buffer that keeps everything, and replays by reward."""

SYNC_EVERY = 10
COUNTS, SHARES = (1, 2, 4, 8), (0.0, 0.5, 0.95, 1.0)
LOG_Z: tuple[LogZ, ...] = ("behaviour", "policy")
ON_POLICY: dict[str, Any] = {"buffer": None, "sync_every": 1, "ahead": True, "groups_per_step": 8}

NOTES = (
    f"One prompt, {MODES} rewarded words of {LENGTH} letters (of {LETTERS}) among 5,461 completions; TB, β = "
    f"{BETA}, batches of 8 × 16, k = {SYNC_EVERY}, {STEPS} steps, replay by softmax of reward ÷ β. Trainer "
    "and searchers run in lockstep; a searcher generates 32 completions per step.",
    "Found: rewarded words generated at least once. Kept: rewarded words with at least a tenth of their "
    "probability at the optimum π_ref·exp(r/β)/Z. Success: probability that a sample is rewarded. Diversity: "
    "expected share of positions at which two rewarded samples differ. Both are exact figures of the last "
    "policy. Last row: the optimum.",
)

Ways = Mapping[str, "list[list[Quality]]"]
"""Qualities of the policy during a run, by arm and then by seed."""


@dataclass(frozen=True, slots=True)
class Quality:
    """Figures of a policy after ``step`` steps; NOTES defines found, kept, success and diversity."""

    step: int
    trajectories: int
    found: int
    kept: int
    success: float
    diversity: float


@dataclass(frozen=True)
class Sparse:
    """An experiment. setups: function from seed and options to the setup of a run, by arm."""

    question: str
    setups: Mapping[str, Callable[[int, Options], Setup]]

    def arms(self, options: Options) -> dict[str, list[Setup]]:
        """Return the setups of each arm, one per seed."""
        return {arm: [setup(seed, options) for seed in options.seeds] for arm, setup in self.setups.items()}

    def measure(self, options: Options) -> Result:
        """Return a row for each arm, and one for the optimum."""
        arms, ways = self.arms(options), {}
        for arm, setups in arms.items():
            log.print(arm, style="dim")
            ways[arm] = [_follow(one) for one in setups]
        rows = [_row(arm, [way[-1] for way in of_seeds]) for arm, of_seeds in ways.items()]
        tables = [one.table for one in next(iter(arms.values())) if isinstance(one.table, SparseTable)]
        best = [quality(Moment(0, 0, MODES, 0.0, table.optimum(BETA)), table) for table in tables]
        return Result([*rows, {**_row("optimum", best), "trajectories": None}], _panels(ways), NOTES)


def _setup(*, log_z: LogZ = "behaviour", **changes: Any) -> Callable[[int, Options], Setup]:
    """Return a function that makes setups with TBA's defaults, except for ``changes``."""

    def setup(seed: int, options: Options) -> Setup:
        changed = {"steps": options.steps or STEPS, "objective": TrajectoryBalance(log_z=log_z)}
        train = TRAIN.model_copy(update={**changed, "ratio_bound": Unbounded()})
        table = SparseTable(prompts=1, letters=LETTERS, length=LENGTH, modes=MODES, seed=seed)
        common = {"buffer": REPLAY, "sync_every": SYNC_EVERY, "groups_per_step": 2}
        return Setup(**{"table": table, "train": train, "seed": seed, **common, **changes})

    return setup


def quality(moment: Moment, table: SparseTable) -> Quality:
    """Return the figures of a policy."""
    optimum_M, policy_M = (p_PC[0, table.modes_PM[0]] for p_PC in (table.optimum(BETA), moment.policy_PC))
    return Quality(
        moment.step,
        moment.trajectories,
        moment.found,
        int((policy_M >= KEPT * optimum_M).sum()),
        float(policy_M.sum()),
        diversity(table, (moment.policy_PC * table.reward_PC)[0]),
    )


def diversity(table: SparseTable, weight_C: np.ndarray) -> float:
    """Return the expected share of positions at which two completions differ that are drawn by weight.

    Positions after the end of a completion count as a letter of their own.
    """
    words_CL = np.full((len(table.completions), table.length), table.eos)
    for row, tokens in enumerate(table.completions):
        words_CL[row, : len(tokens)] = tokens
    letters = range(table.letters + 1)
    share_LV = np.array([[(weight_C * (place == v)).sum() for v in letters] for place in words_CL.T])
    return float(1 - ((share_LV / weight_C.sum()) ** 2).sum(1).mean())


def _follow(one: Setup) -> list[Quality]:
    table = one.table
    assert isinstance(table, SparseTable)
    moments = lockstep.train(one, every=max(1, one.train.steps // EVALUATIONS))
    return [quality(moment, table) for moment in moments]


def _row(arm: str, ends: Sequence[Quality]) -> Row:
    return {
        "arm": arm,
        "trajectories": ends[0].trajectories,
        "found": Spread([float(end.found) for end in ends]),
        "kept": Spread([float(end.kept) for end in ends]),
        "success, %": Spread([100 * end.success for end in ends]),
        "diversity": Spread([end.diversity for end in ends]),
    }


def _panels(ways: Ways) -> list[Panel]:
    """Return panels of modes kept, success and diversity over the number of trajectories."""

    def series(arm: str, name: str) -> Series:
        return Series(arm, [[(m.trajectories, getattr(m, name)) for m in way[1:]] for way in ways[arm]])

    names = {"kept": "modes kept", "success": "success", "diversity": "diversity"}
    return [
        Panel("trajectories", label, [series(arm, name) for arm in ways], logarithmic=True)
        for name, label in names.items()
    ]


SEARCHERS = Sparse(
    "Do more searchers find more, and does diversity drop?",
    {f"{n} searcher{'s' * (n > 1)}": _setup(searchers=n) for n in COUNTS}
    | {"synchronous": _setup(**ON_POLICY)},
)
"""The synchronous on-policy run generates as many trajectories as four searchers."""

SHARE = Sparse(
    "How much replay? m on the sparse task",
    {
        f"m = {m:g}, log Z of the {log_z}": _setup(
            log_z=log_z, searchers=4, buffer=REPLAY.model_copy(update={"most_on_policy": m})
        )
        for m in SHARES
        for log_z in LOG_Z
    },
)
