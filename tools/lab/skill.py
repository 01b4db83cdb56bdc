"""The task of the whole runs: a skill that is gained over hundreds of steps, unlike the quickstart's mode.

The model works sums out but has wrong habits for half of the pairs of digits, and each must be unlearned on
its own. It must not know what is compared.
"""

from __future__ import annotations

from lab.runs import Model

MODEL = Model("slipping-model", ("--worked", "--slips", "--steps=700"), seed=0)
COUNTING = Model("slipping-counting-model", ("--worked", "--slips", "--counted", "--steps=1200"), seed=0)
SPARSE = Model("sparse-model", ("--worked", "--slips", "--steps=500"), seed=0)

RATE = 1e-4
"""The synchronous arm's best."""


def constant(rate: float) -> str:
    """Override: this learning rate from the first step to the last."""
    return f"train.learning_rate={{schedule: constant, peak: {rate}}}"


SETTINGS = (constant(RATE), "buffer.initial_completions=128")
"""Of whole runs that are not tuned; training begins with a step's completions."""
