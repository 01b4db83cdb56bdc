"""Learning rate, target policy and reference as pure functions of the step: a resume needs no scheduler.

It must not know about optimizers. Steps count from 0; step ``i`` is the one that makes version ``i + 1``.
"""

from __future__ import annotations

import math

import numpy as np

from tba_hpc.config import LearningRate, Schedule, TrainSection
from tba_hpc.config.variants import FrozenReference, ResetReference
from tba_hpc.core.types import BEHAVIOUR


def learning_rate(train: TrainSection, step: int) -> float:
    """Learning rate of ``step``, on a schedule laid out for ``train.horizon`` or else for all ``steps``.

    Warm-up rises from zero *before* the first step: step 0 has peak / warmup_steps, step warmup_steps − 1
    has the peak. Decay ends at zero *after* the horizon's last step. So no step is spent on a rate of zero,
    and a warm-up of 50 and a decay of 500 have exactly 450 of 1000 steps in between.
    """
    config = train.learning_rate
    if step < config.warmup_steps:
        return config.peak * (step + 1) / config.warmup_steps
    return config.peak * _decay(config, step, laid_out_for(train))


def laid_out_for(train: TrainSection) -> int:
    """Optimizer steps after which the learning rate has decayed."""
    return train.horizon or train.steps


def _decay(config: LearningRate, step: int, horizon: int) -> float:
    """Share of the peak after warm-up."""
    left = max(0, horizon - step)
    share = min(1.0, left / (config.decay_steps or max(1, horizon - config.warmup_steps)))
    match config.schedule:
        case "constant":
            return 1.0
        case "linear":
            return share
        case "cosine":
            return _half_cosine(share)


def _half_cosine(share: float) -> float:
    """From 0 to 1 as ``share`` does, level at both ends."""
    return (1 - math.cos(math.pi * share)) / 2


def beta(train: TrainSection, step: int) -> float:
    """KL coefficient of the target policy of ``step``: β·T.

    A target tempered as log R = [log π_ref/γ + r/β]/T is π_ref^p·exp(r/β′) with β′ = β·T and p = 1/(γ·T),
    the ``reference_power``: two numbers are all that a loss needs to know of three schedules.
    """
    return at(train.beta, step) * at(train.target_temperature, step)


def reference_power(train: TrainSection, step: int) -> float:
    """Power p = 1/(γ·T) of the reference in the target policy of ``step``; see ``beta``."""
    return 1 / (at(train.reference_temperature, step) * at(train.target_temperature, step))


def at(schedule: Schedule, step: int) -> float:
    """Value of a schedule at ``step``: linear between its points, constant after the last."""
    return float(np.interp(step, [start for start, _ in schedule], [value for _, value in schedule]))


def reference(config: TrainSection, step: int) -> int:
    """Which policy is the reference in ``step``: that of an optimizer step (0: the initial one) or BEHAVIOUR.

    That also where the learner makes another of it. Where it is reset (TBA′), step ρ is the first to learn
    against the policy that ρ steps have made. After the last step it stays as it is: nothing more is learned,
    and the last evaluation is under it.
    """
    match config.reference:
        case ResetReference(every=every):
            return min(step, config.steps - 1) // every * every
        case FrozenReference():
            return 0
        case _:
            return BEHAVIOUR
