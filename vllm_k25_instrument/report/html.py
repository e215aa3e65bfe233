"""The breakdown as one self-contained page: no script, no external resource, light and dark."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from jinja2 import Environment, PackageLoader, StrictUndefined

from vllm_k25_instrument.model import NS_PER_SECOND
from vllm_k25_instrument.palette import category_color
from vllm_k25_instrument.report import figures
from vllm_k25_instrument.report.bars import bar_length_ns, segments, ticks
from vllm_k25_instrument.report.caveats import format_ranks
from vllm_k25_instrument.report.rings import Report
from vllm_k25_instrument.report.view import FEW_RANKS, GroupView, group_views

_CHART_WIDTH = 1000
_ROW_HEIGHT = 22
_BAR_HEIGHT = 14


@dataclass(frozen=True, slots=True)
class _Rect:
    name: str
    color: str
    x: float
    y: float
    width: float
    title: str


@dataclass(frozen=True, slots=True)
class _Tick:
    x: float
    text: str


@dataclass(frozen=True, slots=True)
class _Lane:
    rank: int
    y: float
    slowest: bool


@dataclass(frozen=True, slots=True)
class _Chart:
    """A stacked bar per rank in SVG user units."""

    width: float
    height: float
    bar_height: float
    lanes: tuple[_Lane, ...]
    rects: tuple[_Rect, ...]
    ticks: tuple[_Tick, ...]


def to_html(report: Report, *, per_rank: bool = False) -> str:
    """The page. `per_rank`: open the columns of each rank even where there are more than four."""
    environment = Environment(
        loader=PackageLoader("vllm_k25_instrument.report", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(
        us=figures.microseconds,
        ms=figures.milliseconds,
        percent=figures.percent,
        calls=figures.calls,
        color=category_color,
    )
    views = group_views(report.breakdown, report.slowest)
    return environment.get_template("report.html.j2").render(
        subject=report.subject,
        breakdown=report.breakdown,
        started=_utc(report.subject.started_unix_ns),
        ranks_found=format_ranks(report.breakdown.ranks_found),
        groups=[(view, _chart(view), len(view.ranks) <= FEW_RANKS) for view in views],
        names=_names(views),
        per_rank=per_rank,
        absent=figures.ABSENT,
    )


def _utc(unix_ns: int) -> str:
    if not unix_ns:
        return ""
    return datetime.fromtimestamp(unix_ns / NS_PER_SECOND, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def _names(views: Sequence[GroupView]) -> list[str]:
    return list(dict.fromkeys(row.name for view in views for row in view.rows))


def _chart(view: GroupView) -> _Chart:
    length = bar_length_ns([view]) or 1.0
    scale = _CHART_WIDTH / length
    lanes = tuple(_Lane(rank, n * _ROW_HEIGHT, rank == view.slowest.rank) for n, rank in enumerate(view.ranks))
    rects = tuple(
        _Rect(
            segment.name,
            category_color(segment.name),
            round(segment.start_ns * scale, 2),
            lane.y,
            round(segment.width_ns * scale, 2),
            f"rank {lane.rank} · {segment.name} · {figures.microseconds(segment.width_ns)} µs per step",
        )
        for lane in lanes
        for segment in segments(view, lane.rank)
    )
    marks = ticks(length)
    decimals = 0 if len(marks) < 2 or marks[1] >= 1e6 else 1 if marks[1] >= 1e5 else 2 if marks[1] >= 1e4 else 3
    return _Chart(
        width=_CHART_WIDTH,
        height=len(lanes) * _ROW_HEIGHT,
        bar_height=_BAR_HEIGHT,
        lanes=lanes,
        rects=rects,
        ticks=tuple(_Tick(round(ns * scale, 2), f"{ns / 1e6:,.{decimals}f}") for ns in marks),
    )
