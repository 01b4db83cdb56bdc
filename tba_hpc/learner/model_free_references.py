"""References for searchers that hold no model of the reference."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tba_hpc.core.types import BEHAVIOUR, Group, WeightUpdate


class BehaviourReference:
    """Reference whose π_ref is the policy that sampled."""

    has_model = False

    def __init__(self) -> None:
        self.step = BEHAVIOUR

    def logprobs(self, group: Group) -> list[np.ndarray]:
        """Return the recorded log-probabilities of each completion unchanged, float32 [T]."""
        return [completion.logprobs for completion in group.completions]

    def logprobs_of(self, groups: Sequence[Group]) -> list[list[np.ndarray]]:
        """Return ``logprobs`` of several groups."""
        return [self.logprobs(group) for group in groups]

    def logprobs_under(self, weights: WeightUpdate, groups: Sequence[Group]) -> list[list[np.ndarray]]:
        """Raise AssertionError, because only references with a model are asked."""
        raise AssertionError(f"no model here takes the weights of step {weights.publication.version}")

    def load(self, step: int) -> None:
        """Record ``step`` as the step of the reference."""
        self.step = step


class DeferredReference(BehaviourReference):
    """Placeholder for a reference that the trainer computes; it only knows the reference's step."""

    def __init__(self) -> None:
        self.step = 0

    def logprobs(self, group: Group) -> list[np.ndarray]:
        """Return NaN for every token, float32 [T] per completion; the trainer replaces them."""
        return [np.full(len(completion.tokens), np.nan, np.float32) for completion in group.completions]
