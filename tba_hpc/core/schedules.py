"""Learning rate, target policy and reference as functions of the step, so that no scheduler need be saved.

Steps are counted from 0; step ``i`` makes version ``i + 1``.
"""

from __future__ import annotations

import math

import numpy as np

from tba_hpc.config import LearningRate, Schedule, TrainSection
from tba_hpc.config.variants import FrozenReference, ResetReference
from tba_hpc.core.types import BEHAVIOUR


def learning_rate(train: TrainSection, step: int) -> float:
    """Return the learning rate of ``step``.

    It rises linearly to the peak: from peak / warmup_steps at step 0 to the peak at step warmup_steps − 1.
    After that it is constant, or decays from the peak at step a to zero at step b, where (a, b) is
    ``learning_rate.decay`` or, if that is not set, (warmup_steps, train.steps). Config requires
    b ≥ train.steps, so no step has a rate of zero.
    """
    config = train.learning_rate
    if step < config.warmup_steps:
        return config.peak * (step + 1) / config.warmup_steps
    first, last = config.decay or (config.warmup_steps, train.steps)
    return config.peak * _decay(config, min(1.0, max(0, last - step) / max(1, last - first)))


def decay_end(train: TrainSection) -> int:
    """Return the step at which the decay of the learning rate ends; the run may end earlier."""
    return train.learning_rate.decay[1] if train.learning_rate.decay else train.steps


def _decay(config: LearningRate, share: float) -> float:
    """Return the learning rate divided by its peak. share: part of the decay that remains, from 1 to 0."""
    match config.schedule:
        case "constant":
            return 1.0
        case "linear":
            return share
        case "cosine":
            return (1 - math.cos(math.pi * share)) / 2


def beta(train: TrainSection, step: int) -> float:
    """Return the KL coefficient β′ = β·T of the target policy of ``step``.

    T is train.target_temperature and γ is train.reference_temperature. The target is proportional to R with
    log R = (log π_ref/γ + r/β)/T, so that R = π_ref^p·exp(r/β′) with p = 1/(γ·T), the ``reference_power``.
    """
    return at(train.beta, step) * at(train.target_temperature, step)


def reference_power(train: TrainSection, step: int) -> float:
    """Return the power p = 1/(γ·T) of the reference in the target policy of ``step``; see ``beta``."""
    return 1 / (at(train.reference_temperature, step) * at(train.target_temperature, step))


def at(schedule: Schedule, step: int) -> float:
    """Return the value of a schedule at ``step``: linear between its points, constant after the last."""
    return float(np.interp(step, [start for start, _ in schedule], [value for _, value in schedule]))


def reference(config: TrainSection, step: int) -> int:
    """Return which optimizer step made the reference policy of ``step``; 0 is the initial policy.

    The result is BEHAVIOUR for the references ``behaviour`` and ``lagged``, with which searchers record the
    sampler's own log-probabilities. If the reference is reset every ρ steps (TBA′), steps ρ to 2ρ − 1 use the
    policy that the first ρ steps made. After the last step, the reference is still that of the last step.
    """
    match config.reference:
        case ResetReference(every=every):
            return min(step, config.steps - 1) // every * every
        case FrozenReference():
            return 0
        case _:
            return BEHAVIOUR
