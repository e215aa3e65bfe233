"""The median of repeated measurements, with an interval that assumes nothing of how they are distributed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Final

FEWEST: Final = 6
"""Repeats below which no interval of the median holds 95 %: of five, even the least to the largest hold 93.75 %."""

_EACH_SIDE: Final = 0.025


@dataclass(frozen=True, slots=True)
class Median:
    """A median and its 95 % interval, ns, of so many values."""

    ns: int
    low_ns: int
    high_ns: int
    count: int

    def overlaps(self, other: Median) -> bool:
        """Whether the two intervals have a value in common."""
        return self.low_ns <= other.high_ns and other.low_ns <= self.high_ns


def median_interval(values: Sequence[float]) -> Median:
    """The median of at least :data:`FEWEST` times, ns, and its interval. Raises ValueError for fewer values."""
    low, middle, high = median_bounds(values)
    return Median(round(middle), round(low), round(high), len(values))


def median_bounds(values: Sequence[float]) -> tuple[float, float, float]:
    """Low end, median and high end: the interval of at least :data:`FEWEST` values by order statistics (the sign test).

    How many of n independent values lie below their median is Binomial(n, 1/2), whatever their distribution, so the
    k-th smallest to the k-th largest hold it with 95 % or more (Conover, Practical Nonparametric Statistics, 3.2).
    Raises ValueError for fewer values.
    """
    if len(values) < FEWEST:
        raise ValueError(f"no 95 % interval of the median of {len(values)} values: {FEWEST} are needed")
    ordered = sorted(values)
    k = sign_rank(len(ordered))
    return ordered[k - 1], median(ordered), ordered[-k]


def sign_rank(count: int) -> int:
    """The k for which the k-th smallest to the k-th largest of `count` values hold their median with at least 95 %.

    0 where no k does.
    """
    k, below = 0, 0.0
    while below + math.comb(count, k) / 2**count <= _EACH_SIDE:
        below += math.comb(count, k) / 2**count
        k += 1
    return k
