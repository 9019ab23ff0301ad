"""Intervals and tests for what was measured, and powers for what was measured as it grows."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence


def wilson(right: int, n: int, z: float = 1.96) -> tuple[float, float]:
    """Wilson's interval for a proportion, 95% by default: also sensible at 0 of n and n of n."""
    share = right / n
    middle = share + z * z / (2 * n)
    half = z * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    scale = 1 + z * z / n
    return max(0.0, (middle - half) / scale), min(1.0, (middle + half) / scale)


def t_interval(values: Sequence[float], level: float = 0.95) -> tuple[float, float] | None:
    """Student's interval for the mean of what these values were drawn from; None for one value."""
    if len(values) < 2:
        return None
    from scipy.special import stdtrit

    mean, error = _mean_and_error(values)
    half = float(stdtrit(len(values) - 1, (1 + level) / 2)) * error
    return mean - half, mean + half


def prediction_interval(values: Sequence[float], level: float = 0.95) -> tuple[float, float] | None:
    """Student's interval for one more value like these; None for one value."""
    if len(values) < 2:
        return None
    from scipy.special import stdtrit

    mean, spread = statistics.fmean(values), statistics.stdev(values)
    half = float(stdtrit(len(values) - 1, (1 + level) / 2)) * spread
    half *= math.sqrt(1 + 1 / len(values))
    return mean - half, mean + half


def t_test(values: Sequence[float], mean: float) -> float | None:
    """Student's two-sided p that these values come from this mean; None for one value."""
    if len(values) < 2:
        return None
    found, error = _mean_and_error(values)
    return _two_sided(found - mean, error, len(values) - 1)


def welch_test(first: Sequence[float], second: Sequence[float]) -> float | None:
    """Welch's two-sided p that both have one mean; None where one has a single value."""
    if min(len(first), len(second)) < 2:
        return None
    return _two_sided(*_welch(first, second))


def welch_interval(
    first: Sequence[float], second: Sequence[float], level: float = 0.95
) -> tuple[float, float] | None:
    """Welch's interval for the first mean minus the second; None where one has a single value."""
    if min(len(first), len(second)) < 2:
        return None
    from scipy.special import stdtrit

    difference, error, freedom = _welch(first, second)
    half = float(stdtrit(freedom, (1 + level) / 2)) * error
    return difference - half, difference + half


def _welch(first: Sequence[float], second: Sequence[float]) -> tuple[float, float, float]:
    """The difference of two means, its standard error and degrees of freedom."""
    (a, error_a), (b, error_b) = _mean_and_error(first), _mean_and_error(second)
    error = math.hypot(error_a, error_b)
    parts = error_a**4 / (len(first) - 1) + error_b**4 / (len(second) - 1)
    return a - b, error, error**4 / parts if parts else 1.0


def _mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    """The mean and its standard error."""
    return statistics.fmean(values), statistics.stdev(values) / math.sqrt(len(values))


def _two_sided(difference: float, error: float, freedom: float) -> float:
    """Student's p for a difference; without any spread, 1 for no difference and 0 for one."""
    if error == 0:
        return float(difference == 0)
    from scipy.special import stdtr

    return 2 * float(stdtr(freedom, -abs(difference) / error))


def fit_exponent(lengths: Sequence[int], values: Sequence[float]) -> tuple[float, float | None]:
    """The p of value = c n^p by least squares of logarithms, and its standard error (None for two
    points).

    Only the upper half of the lengths counts, from the middle one up: the lower ones say more about
    overheads.
    """
    start = len(lengths) // 2
    x, y = [math.log(n) for n in lengths[start:]], [math.log(value) for value in values[start:]]
    away = [a - sum(x) / len(x) for a in x]
    spread = sum(a * a for a in away)
    exponent = sum(a * b for a, b in zip(away, y, strict=True)) / spread
    if len(x) < 3:
        return exponent, None
    left = [b - sum(y) / len(y) - exponent * a for a, b in zip(away, y, strict=True)]
    return exponent, math.sqrt(sum(a * a for a in left) / (len(x) - 2) / spread)
