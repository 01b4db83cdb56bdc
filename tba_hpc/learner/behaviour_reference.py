"""The lagged sampler itself as the reference: the log-probabilities that came with the completions.

It must not load a model; that there is none is the point.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tba_hpc.core.types import BEHAVIOUR, Group, WeightUpdate


class BehaviourReference:
    """A Reference port without weights: π_ref is whatever sampled, a first-order average of the policy."""

    step = BEHAVIOUR
    has_model = False

    def logprobs(self, group: Group) -> list[np.ndarray]:
        """Per completion, float32 [T]: as sampled, bit for bit."""
        return [completion.logprobs for completion in group.completions]

    def logprobs_under(self, weights: WeightUpdate, groups: Sequence[Group]) -> list[list[np.ndarray]]:
        """Never asked for: there is no model to put them into."""
        raise AssertionError(f"the behaviour has no model for weights of {weights.publication.version}")

    def load(self, step: int) -> None:
        """Never asked for: what samples is loaded by the generator."""
        raise AssertionError(f"the behaviour is the reference, not the policy of step {step}")
