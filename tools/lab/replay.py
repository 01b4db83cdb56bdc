"""Replay and most-on-policy sampling: m from 0 to 1, on arithmetic and on the sparse task."""

from __future__ import annotations

from collections.abc import Sequence

from lab import skill, sparse
from lab.lockstep import Setup
from lab.results import Result
from lab.runs import Options, Study
from lab.scores import Scores
from tba_hpc.config.variants import LogZ

SHARES = (0.0, 0.5, 0.95, 1.0)
LOG_Z: tuple[LogZ, ...] = ("behaviour", "policy")

ARITHMETIC = Scores(
    "How much replay? m on arithmetic",
    Study(
        {f"m = {m:g}": (f"buffer.most_on_policy={m}",) for m in SHARES},
        skill.UNTUNED,
        steps=350,
        model=skill.MODEL,
    ),
)


class Sparse:
    """The same on a task with rare rewards, with as many trajectories for every arm, by either log Z."""

    question = "How much replay? m on the sparse task"

    def arms(self, options: Options) -> dict[str, Sequence[Setup]]:
        """One per seed of each arm; four searchers."""
        return {
            f"m = {m:g}, log Z of the {log_z}": [
                sparse.setup(
                    seed,
                    options,
                    log_z=log_z,
                    searchers=4,
                    buffer=sparse.REPLAY.model_copy(update={"most_on_policy": m}),
                )
                for seed in options.seeds
            ]
            for m in SHARES
            for log_z in LOG_Z
        }

    def measure(self, options: Options) -> Result:
        """All arms."""
        arms = self.arms(options)
        return sparse.result(sparse.follow(arms), arms)


SPARSE = Sparse()
