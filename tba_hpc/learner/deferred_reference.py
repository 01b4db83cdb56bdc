"""A reference that the trainer computes: a searcher leaves its log-probabilities open.

It must not load a model; that a searcher need not hold one is the point.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tba_hpc.core.types import Group, WeightUpdate


class DeferredReference:
    """A Reference port that only knows which policy the reference is: what it says of each token is NaN."""

    has_model = False

    def __init__(self) -> None:
        self.step = 0

    def logprobs(self, group: Group) -> list[np.ndarray]:
        """Per completion, float32 [T]: NaN, in place of which the trainer puts what it computes."""
        return [np.full(len(completion.tokens), np.nan, np.float32) for completion in group.completions]

    def logprobs_under(self, weights: WeightUpdate, groups: Sequence[Group]) -> list[list[np.ndarray]]:
        """Never asked for: there is no model to put them into."""
        raise AssertionError(f"there is no model here for weights of {weights.publication.version}")

    def load(self, step: int) -> None:
        """Name the policy of ``step``."""
        self.step = step
