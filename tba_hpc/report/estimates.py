"""What a finite number of prompts and samples tells about a score: estimates with 95 % intervals.

It must not know what was generated or how it was judged.

Shape letters: P prompts, N samples of a prompt, K values of k.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

Z = NormalDist().inv_cdf(0.975)
"""Quantile of the normal distribution that leaves 2.5 % above."""

RESAMPLES = 2000
"""Bootstrap samples of the prompts."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """A value and the ends of its 95 % confidence interval."""

    value: float
    low: float
    high: float


def wilson(successes: int, trials: int) -> Estimate:
    """A share with Wilson's score interval (Wilson 1927; Brown, Cai and DasGupta 2001, eq. 4)."""
    share, z2 = successes / trials, Z * Z / trials
    centre = (share + z2 / 2) / (1 + z2)
    half = Z * math.sqrt(share * (1 - share) / trials + z2 / (4 * trials)) / (1 + z2)
    return Estimate(share, max(0.0, centre - half), min(1.0, centre + half))


def mean(total: float, squares: float, count: int) -> Estimate:
    """The mean of values of which sum and sum of squares are given, with the normal interval."""
    value = total / count
    variance = max(0.0, squares - total * value) / max(1, count - 1)
    half = Z * math.sqrt(variance / count)
    return Estimate(value, value - half, value + half)


def difference(one: Estimate, other: Estimate) -> Estimate:
    """``one − other`` of unpaired trials: for shares with Wilson intervals Newcombe's method 10 (1998)."""
    gap = one.value - other.value
    below = math.hypot(one.value - one.low, other.high - other.value)
    above = math.hypot(one.high - one.value, other.value - other.low)
    return Estimate(gap, gap - below, gap + above)


def pass_at_k(correct: int, samples: int, k: int) -> float:
    """Unbiased estimate of the chance that one of k samples is correct (Chen et al. 2021, eq. 1).

    1 − C(n − c, k) ÷ C(n, k) with c correct of n samples, 1 ≤ k ≤ n.
    """
    return 1 - math.comb(samples - correct, k) / math.comb(samples, k)


def powers_of_two(samples: int) -> list[int]:
    """The k that are reported: 1, 2, 4, … up to ``samples``."""
    return [1 << exponent for exponent in range(samples.bit_length())]


def passes(correct_P: Sequence[int], samples: int) -> dict[int, Estimate]:
    """k → pass@k, mean over prompts, with a percentile bootstrap over prompts.

    correct_P: correct ones of each prompt's ``samples``. A single prompt has no spread over prompts: its
    interval is Wilson's for one sample, carried over by 1 − (1 − p)^k.
    """
    ks = powers_of_two(samples)
    pass_PK = np.array([[pass_at_k(correct, samples, k) for k in ks] for correct in correct_P])
    if len(correct_P) == 1:
        one = wilson(correct_P[0], samples)
        low_K, high_K = ([1 - (1 - end) ** k for k in ks] for end in (one.low, one.high))
    else:
        low_K, high_K = bootstrap(pass_PK)
    value_K = pass_PK.mean(0)
    return {
        k: Estimate(float(value), float(low), float(high))
        for k, value, low, high in zip(ks, value_K, low_K, high_K, strict=True)
    }


def bootstrap(value_PK: np.ndarray) -> np.ndarray:
    """float64 [2, K]: both ends of the percentile interval of the mean over P; the same at every call."""
    rng, prompts = np.random.default_rng(0), len(value_PK)
    means = [value_PK[rng.integers(prompts, size=prompts)].mean(0) for _ in range(RESAMPLES)]
    return np.quantile(means, [0.025, 0.975], axis=0)
