"""The arithmetic task of most experiments, which takes hundreds of steps to learn, unlike the quickstart's.

The model shows its work, but it was taught to take four of six verbs mostly for their opposite, and the other
two sometimes. A completion is right if it takes every verb correctly.
"""

from __future__ import annotations

from lab.runs import Model

MODEL = Model("misreading-model", ("--worked", "--misread=0.8"))
COUNTING = Model("misreading-counting-model", ("--worked", "--counted", "--misread=0.6", "--steps=1600"))

RATE = 1.25e-4


def constant(rate: float) -> str:
    """Return the override for a constant learning rate."""
    return f"train.learning_rate={{schedule: constant, peak: {rate}}}"


SAMPLING = (
    "buffer.initial_completions=128",
    "generator.completions_per_prompt=16",
    "generator.prompts_in_flight=8",
    "exchange.seal_seconds=0.2",
)
"""Overrides with which training begins as soon as there are the completions of one step."""

BETA = "train.beta=0.02"
"""Override of β. On-policy, 160 steps lead to 89 % with it, and to 35 % with the quickstart's .1."""

ONCE = (
    *SAMPLING,
    BETA,
    "buffer.duplicates=none",
    "buffer.most_on_policy=1",
    "buffer.replay_limit=1",
)
"""Overrides that make the buffer a queue: each trajectory is learned from once, however fast ranks are."""
