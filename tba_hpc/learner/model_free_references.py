"""References of a searcher that holds no model for them."""

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
        """Per completion, float32 [T]: as sampled, bit for bit."""
        return [completion.logprobs for completion in group.completions]

    def logprobs_of(self, groups: Sequence[Group]) -> list[list[np.ndarray]]:
        """Give ``logprobs`` of every group."""
        return [self.logprobs(group) for group in groups]

    def logprobs_under(self, weights: WeightUpdate, groups: Sequence[Group]) -> list[list[np.ndarray]]:
        """Never called."""
        raise AssertionError(f"no model here takes the weights of step {weights.publication.version}")

    def load(self, step: int) -> None:
        """Note the policy of ``step``."""
        self.step = step


class DeferredReference(BehaviourReference):
    """The Reference port for one that the trainer computes: it only knows which policy that is."""

    def __init__(self) -> None:
        self.step = 0

    def logprobs(self, group: Group) -> list[np.ndarray]:
        """Per completion, float32 [T]: NaN, which the trainer replaces."""
        return [np.full(len(completion.tokens), np.nan, np.float32) for completion in group.completions]
