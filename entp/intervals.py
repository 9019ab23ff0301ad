"""Intervals for what was counted, and powers for what was measured as it grows."""

from __future__ import annotations

import math
from collections.abc import Sequence


def wilson(right: int, n: int, z: float = 1.96) -> tuple[float, float]:
    """Wilson's interval for a proportion, 95% by default: also sensible at 0 of n and n of n."""
    share = right / n
    middle = share + z * z / (2 * n)
    half = z * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    scale = 1 + z * z / n
    return max(0.0, (middle - half) / scale), min(1.0, (middle + half) / scale)


def fit_exponent(lengths: Sequence[int], values: Sequence[float]) -> tuple[float, float | None]:
    """The p of value = c n^p by least squares of logarithms, and its standard error (None for two points).

    Only the upper half of the lengths counts, from the middle one up: the lower ones say more about overheads.
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
