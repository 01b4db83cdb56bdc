"""Estimates scores from a finite number of prompts (P) and samples, with 95 % confidence intervals."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist, fmean, pstdev, variance

Z = NormalDist().inv_cdf(0.975)
"""Number of standard errors from a mean to either end of its 95 % interval."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """A value and the ends of its 95 % confidence interval."""

    value: float
    low: float
    high: float


def wilson(successes: float, trials: float) -> Estimate:
    """Estimate a share with Wilson's score interval (Wilson 1927; Brown, Cai and DasGupta 2001, eq. 4).

    trials: at least 1. Neither argument needs to be a whole number, see ``mean_share``.
    """
    share, z2 = successes / trials, Z * Z / trials
    centre = (share + z2 / 2) / (1 + z2)
    half = Z * math.sqrt(share * (1 - share) / trials + z2 / (4 * trials)) / (1 + z2)
    return Estimate(share, max(0.0, centre - half), min(1.0, centre + half))


def mean(
    total: float, squares: float, count: int, *, least: float = -math.inf, most: float = math.inf
) -> Estimate:
    """Estimate the mean of values with the normal interval.

    total, squares: sum of the values and of their squares. count: number of values, at least 1. least, most:
    smallest and largest value. The interval ends there at the latest, as if no others were possible, which a
    task does not say. For a share use ``wilson``.
    """
    value = total / count
    spread = max(0.0, squares - total * value) / max(1, count - 1)
    half = Z * math.sqrt(spread / count)
    return Estimate(value, min(value, max(least, value - half)), max(value, min(most, value + half)))


def mean_share(shares: Sequence[float]) -> Estimate:
    """Estimate the mean of shares, each between 0 and 1, such as one per prompt.

    The interval is that of ``wilson`` for n right or wrong trials. n is chosen so that the mean of the trials
    has the same standard error as the mean of the shares (the effective sample size of Kish 1965), but n is
    at least the number of shares. Therefore the interval has a width even if all shares are equal. If each
    share is 0 or 1, n is the number of shares.
    """
    value, count = fmean(shares), len(shares)
    error2 = variance(shares) / count if count > 1 else 0.0
    trials = max(count, value * (1 - value) / error2) if error2 else count
    return wilson(value * trials, trials)


def difference(one: Estimate, other: Estimate) -> Estimate:
    """Estimate ``one − other`` of independent samples. Wilson intervals give Newcombe's method 10 (1998)."""
    gap = one.value - other.value
    below = math.hypot(one.value - one.low, other.high - other.value)
    above = math.hypot(one.high - one.value, other.value - other.low)
    return Estimate(gap, gap - below, gap + above)


def paired_difference(gaps: Sequence[float], *, graded: bool) -> Estimate:
    """Estimate the mean of differences between two scores of the same prompts.

    gaps: the difference for each prompt. graded: whether scores are rewards of any size; otherwise they are 1
    for right and 0 for wrong answers. The interval is that of Bonett and Price (2012), which adds a prompt
    won and a prompt lost, and so is wide if few prompts differ. Of rewards, these two differ by as much as
    the prompts that differ do: the root of the mean square.
    """
    squares = [gap * gap for gap in gaps if gap]
    typical = math.sqrt(fmean(squares or [0.0])) if graded else 1.0
    padded = [*gaps, typical, -typical]
    centre, half = fmean(padded), Z * pstdev(padded) / math.sqrt(len(padded))
    most = math.inf if graded else 1.0
    return Estimate(fmean(gaps), max(-most, centre - half), min(most, centre + half))


def pass_at_k(correct: int, samples: int, k: int) -> float:
    """Estimate without bias the chance that at least one of k samples is correct (Chen et al. 2021, eq. 1).

    The result is 1 − C(n − c, k) ÷ C(n, k) if c of n samples are correct, for 1 ≤ k ≤ n.
    """
    return 1 - math.comb(samples - correct, k) / math.comb(samples, k)


def passes(correct_P: Sequence[int], samples: int) -> dict[int, Estimate]:
    """Estimate pass@k, the mean over prompts, for k = 1, 2, 4, … up to ``samples``.

    correct_P: number of correct samples of each prompt, among ``samples``. Intervals are those of
    ``mean_share``. A single prompt has no spread: its interval is Wilson's for pass@1, transformed by
    1 − (1 − p)^k.
    """
    found = {}
    for k in (1 << exponent for exponent in range(samples.bit_length())):
        each = [pass_at_k(correct, samples, k) for correct in correct_P]
        found[k] = mean_share(each)
        if len(each) == 1:
            one = wilson(correct_P[0], samples)
            found[k] = Estimate(each[0], 1 - (1 - one.low) ** k, 1 - (1 - one.high) ** k)
    return found
