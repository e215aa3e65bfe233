"""A mean over repeated windows, with Student's 95 % interval."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import hypot, sqrt
from statistics import fmean, stdev
from typing import Any, Final

_T_975: Final = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
    *(2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)
"""Student's t, 97.5th percentile, of 1 to 30 degrees of freedom (NIST/SEMATECH e-Handbook, 1.3.6.7.2)."""


def student_t(freedom: int) -> float:
    """The 97.5th percentile of Student's t; above 30 degrees of freedom by its expansion in 1 / freedom (Abramowitz and
    Stegun, 26.7.5).
    """
    if freedom < 1:
        raise ValueError(f"no t of {freedom} degrees of freedom")
    z = 1.959964
    if freedom <= len(_T_975):
        return _T_975[freedom - 1]
    return z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)


@dataclass(frozen=True, slots=True)
class Estimate:
    """The mean over `windows` windows. `half` is half the width of its 95 % interval, None of a single window."""

    mean: float
    half: float | None
    windows: int

    def to_json_dict(self) -> dict[str, Any]:
        """Mean, both ends of the interval, and of how many windows."""
        low, high = (None, None) if self.half is None else (self.mean - self.half, self.mean + self.half)
        return {"mean": _round(self.mean), "low": _round(low), "high": _round(high), "windows": self.windows}


def _round(value: float | None) -> float | None:
    return None if value is None else round(value, 4)


def apart(one: Estimate, other: Estimate) -> bool | None:
    """Whether two means differ beyond chance: by more than the interval of their difference, windows being independent.

    None where one of them has a single window.
    """
    if one.half is None or other.half is None:
        return None
    return abs(one.mean - other.mean) > hypot(one.half, other.half)


def estimate(values: Sequence[float]) -> Estimate:
    """Student's interval of the mean of independent windows. Raises ValueError of no value."""
    if not values:
        raise ValueError("no window")
    count = len(values)
    half = student_t(count - 1) * stdev(values) / sqrt(count) if count > 1 else None
    return Estimate(fmean(values), half, count)


def estimate_of(values: Sequence[float | None]) -> Estimate | None:
    """The estimate over the windows that have the figure; None where none has."""
    there = [value for value in values if value is not None]
    return estimate(there) if there else None
