"""Stacked bars: the segments of a step, laid out once for SVG and for the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from vllm_k25_instrument.report.view import GroupView


@dataclass(frozen=True, slots=True)
class Segment:
    """A stretch of a bar: a category and its exclusive time per step, ns."""

    name: str
    start_ns: float
    width_ns: float


def segments(view: GroupView, rank: int) -> list[Segment]:
    """The exclusive times per step of one rank, end to end.

    Negative times (ranges of several streams overlapping) have no width; the bar is then longer than the step, which
    is what overlap means.
    """
    placed = []
    at = 0.0
    for row in view.rows:
        cell = row.cells.get(rank)
        if cell is None or cell.exclusive_ns <= 0:
            continue
        placed.append(Segment(row.name, at, cell.exclusive_ns))
        at += cell.exclusive_ns
    return placed


def bar_length_ns(views: Sequence[GroupView]) -> float:
    """The longest bar of these views, so that all of them can share one scale."""
    ends = [s.start_ns + s.width_ns for view in views for rank in view.ranks for s in segments(view, rank)]
    return max(ends, default=0.0)


def ticks(length_ns: float, about: int = 8) -> list[float]:
    """Round positions from 0 to `length_ns`: steps of 1, 2 or 5 times a power of ten, about `about` of them."""
    if length_ns <= 0:
        return [0.0]
    raw = length_ns / about
    power = 1.0
    while power * 10 <= raw:
        power *= 10
    while power > raw:
        power /= 10
    step = min((power * factor for factor in (1, 2, 5, 10)), key=lambda step: abs(step - raw))
    return [step * n for n in range(int(length_ns / step) + 1)]


def cells_of(widths: Mapping[str, float], total: float, cells: int) -> dict[str, int]:
    """How many of `cells` character cells each width takes of a bar of `total`: largest remainders round up.

    The cells add up to the rounded length of the bar, so that bars of equal steps are equally long.
    """
    if total <= 0 or cells <= 0:
        return dict.fromkeys(widths, 0)
    exact = {name: max(width, 0.0) / total * cells for name, width in widths.items()}
    whole = {name: int(value) for name, value in exact.items()}
    left = min(round(sum(exact.values())), cells) - sum(whole.values())
    for name in sorted(exact, key=lambda name: whole[name] - exact[name])[: max(left, 0)]:
        whole[name] += 1
    return whole
