"""Learning rate, target policy and reference as pure functions of the step: a resume needs no scheduler.

It must not know about optimizers. Steps count from 0; step ``i`` is the one that makes version ``i + 1``.
"""

from __future__ import annotations

import math

from tba_hpc.config import LearningRate, Ramp, TrainSection
from tba_hpc.config.variants import FrozenReference, ResetReference
from tba_hpc.core.types import BEHAVIOUR


def learning_rate(train: TrainSection, step: int) -> float:
    """Learning rate of ``step``, on a schedule laid out for ``train.horizon`` or else for all ``steps``.

    Warm-up rises from zero *before* the first step: step 0 has peak / warmup_steps, step warmup_steps − 1
    has the peak. Decay ends at zero *after* the horizon's last step. So no step is spent on a rate of zero,
    and warmup_stable_decay with 50/450/500 has exactly 450 steps between ramps of 50 and 500.
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
    whole = max(1, horizon - config.warmup_steps)
    match config.schedule:
        case "constant":
            return 1.0
        case "linear":
            return left / whole
        case "cosine":
            return _half_cosine(left / whole)
        case "warmup_stable_decay":
            share = min(1.0, left / max(1, config.decay_steps))
            return share if config.decay == "linear" else _half_cosine(share)


def _half_cosine(share: float) -> float:
    """From 0 to 1 as ``share`` does, level at both ends."""
    return (1 - math.cos(math.pi * share)) / 2


def beta(train: TrainSection, step: int) -> float:
    """KL coefficient of the target policy of ``step``: β·T.

    A target tempered as log R = [log π_ref/γ + r/β]/T is π_ref^p·exp(r/β′) with β′ = β·T and p = 1/(γ·T),
    the ``reference_power``: two numbers are all that a loss needs to know of three schedules.
    """
    return ramp(train.beta, step) * ramp(train.target_temperature, step)


def reference_power(train: TrainSection, step: int) -> float:
    """Power p = 1/(γ·T) of the reference in the target policy of ``step``; see ``beta``."""
    return 1 / (ramp(train.reference_temperature, step) * ramp(train.target_temperature, step))


def ramp(config: Ramp, step: int) -> float:
    """Value at ``step``; where linear, from ``start`` at step 0 to ``end`` at ``anneal_steps``.

    From step ``jump_after`` on it is ``end``, wherever it was before.
    """
    if config.jump_after is not None and step >= config.jump_after:
        assert config.end is not None, "Ramp's validator asks for it"
        return config.end
    if config.schedule == "constant":
        return config.start
    assert config.end is not None and config.anneal_steps > 0, "Ramp's validator asks for both"
    return config.start + (config.end - config.start) * min(1.0, step / config.anneal_steps)


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
