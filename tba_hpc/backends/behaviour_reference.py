"""The lagged sampler itself as the reference: the log-probabilities that came with the completions.

It must not load a model; that there is none is the point.
"""

from __future__ import annotations

import numpy as np

from tba_hpc.types import BEHAVIOUR, Group


class BehaviourReference:
    """A Reference port without weights: π_ref is whatever sampled, a first-order average of the policy."""

    step = BEHAVIOUR

    def logprobs(self, group: Group) -> list[np.ndarray]:
        """Per completion, float32 [T]: as sampled, bit for bit."""
        return [completion.logprobs for completion in group.completions]

    def load(self, step: int) -> None:
        """Never asked for: what samples is loaded by the generator."""
        raise AssertionError(f"the behaviour is the reference, not the policy of step {step}")
