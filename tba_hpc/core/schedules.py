"""Learning rate, target policy and reference as pure functions of the step: a resume needs no scheduler.

Steps count from 0; step ``i`` makes version ``i + 1``.
"""

from __future__ import annotations

import math

import numpy as np

from tba_hpc.config import LearningRate, Schedule, TrainSection
from tba_hpc.config.variants import FrozenReference, ResetReference
from tba_hpc.core.types import BEHAVIOUR


def learning_rate(train: TrainSection, step: int) -> float:
    """Return the learning rate of ``step``, on a schedule over all ``steps`` or until its ``decay`` ends.

    Warm-up starts from zero before the first step: step 0 has peak / warmup_steps, step warmup_steps − 1 has
    the peak. Decay reaches zero only after the last step, so no step up to there has a rate of zero.
    """
    config = train.learning_rate
    if step < config.warmup_steps:
        return config.peak * (step + 1) / config.warmup_steps
    first, last = config.decay or (config.warmup_steps, train.steps)
    return config.peak * _decay(config, min(1.0, max(0, last - step) / max(1, last - first)))


def laid_out_for(train: TrainSection) -> int:
    """Return the number of optimizer steps after which the learning rate has decayed."""
    return train.learning_rate.decay[1] if train.learning_rate.decay else train.steps


def _decay(config: LearningRate, share: float) -> float:
    """Return the rate as a share of the peak, given the share of the decay that is left."""
    match config.schedule:
        case "constant":
            return 1.0
        case "linear":
            return share
        case "cosine":
            return (1 - math.cos(math.pi * share)) / 2


def beta(train: TrainSection, step: int) -> float:
    """Return the KL coefficient of the target policy of ``step``: β·T.

    The tempered target log R = [log π_ref/γ + r/β]/T is π_ref^p·exp(r/β′), with β′ = β·T. The power
    p = 1/(γ·T) is the ``reference_power``.
    """
    return at(train.beta, step) * at(train.target_temperature, step)


def reference_power(train: TrainSection, step: int) -> float:
    """Return the power p = 1/(γ·T) of the reference in the target policy of ``step``; see ``beta``."""
    return 1 / (at(train.reference_temperature, step) * at(train.target_temperature, step))


def at(schedule: Schedule, step: int) -> float:
    """Return the value of a schedule at ``step``: linear between its points, constant after the last."""
    return float(np.interp(step, [start for start, _ in schedule], [value for _, value in schedule]))


def reference(config: TrainSection, step: int) -> int:
    """Return the reference policy of ``step``: its optimizer step (0: the initial policy), or BEHAVIOUR.

    If the reference is reset every ρ steps (TBA′), step ρ is the first to learn against the policy that ρ
    steps have made. The reference of the last step stays after it, for the last evaluation.
    """
    match config.reference:
        case ResetReference(every=every):
            return min(step, config.steps - 1) // every * every
        case FrozenReference():
            return 0
        case _:
            return BEHAVIOUR
