"""A sparse stand-in for red-teaming: one prompt, 8 of 5,461 completions rewarded, all far apart.

It measures what red-teaming is judged by (success, diversity), exactly, from the policy's table. It must not
know what is compared. Shape letters as in lockstep.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

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
"""A mode counts as kept where the policy gives it this share of the probability it has at the optimum."""

TRAIN = TrainSection(
    steps=STEPS,
    prompts_per_step=8,
    completions_per_prompt=16,
    learning_rate=LearningRate(peak=0.05),
    beta=BETA,
)
REPLAY = BufferSection(capacity=200_000, capacity_per_prompt=200_000, reward_temperature=BETA)
"""Everything is kept, and replayed by reward."""
SYNC_EVERY = 10

NOTES = (
    f"One prompt, {MODES} rewarded words of {LENGTH} letters (of {LETTERS}) among 5,461 completions; TB, β = "
    f"{BETA}, batches of 8 × 16, k = {SYNC_EVERY}, {STEPS} steps, replay by softmax of reward ÷ β; trainer "
    "and searchers in lockstep; a searcher generates 32 completions per step.",
    "Found: rewarded words generated at least once; kept: those with at least a tenth of their probability "
    "at the optimum π_ref·exp(r/β)/Z. Success: probability that a sample is rewarded; diversity: expected "
    "share of places at which two rewarded samples differ; both exact, of the last policy. Last row: the "
    "optimum.",
)


@dataclass(frozen=True, slots=True)
class Quality:
    """A policy at a moment."""

    step: int
    trajectories: int
    found: int
    kept: int
    success: float
    diversity: float


def setup(seed: int, options: Options, *, log_z: LogZ = "behaviour", **changes: object) -> Setup:
    """A run with TBA's defaults, less what ``changes``."""
    changed = {"steps": options.steps or STEPS, "objective": TrajectoryBalance(log_z=log_z)}
    train = TRAIN.model_copy(update={**changed, "ratio_bound": Unbounded()})
    table = SparseTable(prompts=1, letters=LETTERS, length=LENGTH, modes=MODES, seed=seed)
    plain = Setup(
        table=table, train=train, buffer=REPLAY, sync_every=SYNC_EVERY, groups_per_step=2, seed=seed
    )
    return Setup(**{**vars(plain), **changes})


def quality(moment: Moment, table: SparseTable) -> Quality:
    """What a policy is worth."""
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
    """Expected share of places at which two completions differ, drawn by weight; having ended is a letter."""
    words_CL = np.full((len(table.completions), table.length), table.eos)
    for row, tokens in enumerate(table.completions):
        words_CL[row, : len(tokens)] = tokens
    letters = range(table.letters + 1)
    share_LV = np.array([[(weight_C * (place == v)).sum() for v in letters] for place in words_CL.T])
    return float(1 - ((share_LV / weight_C.sum()) ** 2).sum(1).mean())


def follow(arms: Mapping[str, Sequence[Setup]]) -> dict[str, list[list[Quality]]]:
    """Every arm and seed: the way of its policy."""
    found = {}
    for arm, setups in arms.items():
        log.print(arm, style="dim")
        found[arm] = [_follow(one) for one in setups]
    return found


def _follow(one: Setup) -> list[Quality]:
    table = one.table
    assert isinstance(table, SparseTable)
    moments = lockstep.train(one, every=max(1, one.train.steps // EVALUATIONS))
    return [quality(moment, table) for moment in moments]


def result(found: Mapping[str, list[list[Quality]]], arms: Mapping[str, Sequence[Setup]]) -> Result:
    """One row per arm, one for the optimum."""
    rows = [_row(arm, [way[-1] for way in ways]) for arm, ways in found.items()]
    tables = [one.table for one in next(iter(arms.values()))]
    best = [
        quality(Moment(0, 0, MODES, 0.0, table.optimum(BETA)), table)
        for table in tables
        if isinstance(table, SparseTable)
    ]
    optimum = {**_row("optimum", best), "trajectories": None}
    return Result([*rows, optimum], panels(found), NOTES)


def _row(arm: str, ends: Sequence[Quality]) -> Row:
    return {
        "arm": arm,
        "trajectories": ends[0].trajectories,
        "found": Spread([float(end.found) for end in ends]),
        "kept": Spread([float(end.kept) for end in ends]),
        "success, %": Spread([100 * end.success for end in ends]),
        "diversity": Spread([end.diversity for end in ends]),
    }


def panels(found: Mapping[str, list[list[Quality]]]) -> list[Panel]:
    """Modes kept, success and diversity against trajectories, from the first ones on."""
    names = {"kept": "modes kept", "success": "success", "diversity": "diversity"}
    return [
        Panel(
            "trajectories", label, [_series(arm, ways, name) for arm, ways in found.items()], logarithmic=True
        )
        for name, label in names.items()
    ]


def _series(arm: str, ways: list[list[Quality]], name: str) -> Series:
    return Series(arm, [[(moment.trajectories, getattr(moment, name)) for moment in way[1:]] for way in ways])
