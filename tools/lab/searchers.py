"""More searchers for the same trainer on the sparse task: what they find, and what it does to diversity."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lab import skill, sparse
from lab.lockstep import Setup
from lab.results import Result
from lab.runs import Options, Study
from lab.scores import Scores

COUNTS = (1, 2, 4, 8)


class Searchers:
    """1, 2, 4 and 8 searchers, and the synchronous on-policy run with the trajectories of four."""

    question = "Do more searchers find more, and does diversity drop?"

    def arms(self, options: Options) -> dict[str, Sequence[Setup]]:
        """One per seed of each arm."""
        arms: dict[str, Sequence[Setup]] = {
            f"{n} searcher{'s' * (n > 1)}": [
                sparse.setup(seed, options, searchers=n) for seed in options.seeds
            ]
            for n in COUNTS
        }
        on_policy: dict[str, Any] = {"buffer": None, "sync_every": 1, "ahead": True, "groups_per_step": 8}
        return arms | {"synchronous": [sparse.setup(seed, options, **on_policy) for seed in options.seeds]}

    def measure(self, options: Options) -> Result:
        """All arms."""
        arms = self.arms(options)
        return sparse.result(sparse.follow(arms), arms)


SEARCHERS = Searchers()

ARITHMETIC = Scores(
    "Do more searchers help where few completions are right? Whole runs on arithmetic",
    Study(
        {
            f"{n} searcher{'s' * (n > 1)}": (
                f"launch.searchers={n}",
                f"buffer.initial_completions={128 * n}",
            )
            for n in (1, 2, 4)
        },
        skill.UNTUNED,
        steps=300,
        model=skill.SPARSE,
    ),
)
