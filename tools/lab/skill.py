"""The task of the whole runs: a skill that is gained over hundreds of steps, unlike the quickstart's mode.

The model works everything out but takes four of six verbs mostly for their opposite, and the other two now
and then; a completion is right if it took every verb rightly.
"""

from __future__ import annotations

from lab.runs import Model

MODEL = Model("misreading-model", ("--worked", "--misread=0.8"))
COUNTING = Model("misreading-counting-model", ("--worked", "--counted", "--misread=0.6", "--steps=1600"))

RATE = 1.25e-4


def constant(rate: float) -> str:
    """Override: this learning rate from the first step to the last."""
    return f"train.learning_rate={{schedule: constant, peak: {rate}}}"


SAMPLING = (
    "buffer.initial_completions=128",
    "generator.completions_per_prompt=16",
    "generator.prompts_in_flight=8",
    "exchange.seal_seconds=0.2",
)
"""Training begins with a step's completions, which are as many as it learns from."""

BETA = "train.beta=0.02"
"""On-policy, 160 steps lead to 89 % with it; to 35 % with the quickstart's .1."""

ONCE = (
    *SAMPLING,
    BETA,
    "buffer.duplicates=none",
    "buffer.most_on_policy=1",
    "buffer.replay_limit=1",
)
"""Each trajectory is learned from once: the buffer is a queue, and speed decides nothing but the clock."""
