"""The task of the whole runs: a skill that is gained over hundreds of steps, unlike the quickstart's mode.

The model reckons well but mostly takes four of six verbs for their opposites (who buys, loses), and has to
learn what each of them means from being right or wrong in the end. It must not know what is compared.
"""

from __future__ import annotations

from lab.runs import Model

MODEL = Model("misreading-model", ("--worked", "--misread=0.8"), seed=0)
COUNTING = Model("misreading-counting-model", ("--worked", "--misread=0.8", "--counted"), seed=0)
SPARSE = Model("sparse-model", ("--worked", "--misread=0.9"), seed=0)

RATE = 2e-4
"""The synchronous arm's best."""


def constant(rate: float) -> str:
    """Override: this learning rate from the first step to the last."""
    return f"train.learning_rate={{schedule: constant, peak: {rate}}}"


SETTINGS = (constant(RATE), "buffer.initial_completions=128")
"""Of whole runs that are not tuned; training begins with a step's completions."""
