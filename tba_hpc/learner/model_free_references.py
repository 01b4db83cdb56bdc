"""References for a searcher that holds no model of the reference."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tba_hpc.core.types import BEHAVIOUR, Group, WeightUpdate


class BehaviourReference:
    """The Reference port whose π_ref is the policy that sampled."""

    has_model = False

    def __init__(self) -> None:
        self.step = BEHAVIOUR

    def logprobs(self, group: Group) -> list[np.ndarray]:
        """Return, per completion, the log-probabilities as sampled, bit for bit, float32 [T]."""
        return [completion.logprobs for completion in group.completions]

    def logprobs_of(self, groups: Sequence[Group]) -> list[list[np.ndarray]]:
        """Return ``logprobs`` of every group."""
        return [self.logprobs(group) for group in groups]

    def logprobs_under(self, weights: WeightUpdate, groups: Sequence[Group]) -> list[list[np.ndarray]]:
        """Raise AssertionError: this is never called."""
        raise AssertionError(f"no model here takes the weights of step {weights.publication.version}")

    def load(self, step: int) -> None:
        """Record ``step`` as the step of the reference."""
        self.step = step


class DeferredReference(BehaviourReference):
    """The Reference port for a reference that the trainer computes; it only knows the policy's step."""

    def __init__(self) -> None:
        self.step = 0

    def logprobs(self, group: Group) -> list[np.ndarray]:
        """Return, per completion, NaN for each token, float32 [T], which the trainer replaces."""
        return [np.full(len(completion.tokens), np.nan, np.float32) for completion in group.completions]
