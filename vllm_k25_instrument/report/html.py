"""The breakdown as one self-contained page: no script, no external resource, light and dark."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import PurePath

from jinja2 import Environment, PackageLoader, StrictUndefined

from vllm_k25_instrument.model import NS_PER_SECOND
from vllm_k25_instrument.palette import category_color
from vllm_k25_instrument.positions import MEANING
from vllm_k25_instrument.report import figures
from vllm_k25_instrument.report.bars import bar_length_ns, segments, ticks
from vllm_k25_instrument.report.breakdown import category_order
from vllm_k25_instrument.report.gpu import GpuFindings, Timeline, TimelineBar
from vllm_k25_instrument.report.rings import Report
from vllm_k25_instrument.report.sheets import sheets, short_kernel, step_count_text, steps_sheet
from vllm_k25_instrument.report.view import FEW_RANKS, GroupView, group_views

_CHART_WIDTH = 1000
_ROW_HEIGHT = 22
_BAR_HEIGHT = 14
_LANE_HEIGHT = 26
_LANE_BAR = 18
_HAIR = 0.4
"""The least width of a kernel in a timeline, in user units of a thousandth of the step."""


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


@dataclass(frozen=True, slots=True)
class _TimelineChart:
    """One step in SVG user units, a lane per stream."""

    rank: int
    place: int
    name: str
    span_ns: int
    width: float
    height: float
    bar_height: float
    lanes: tuple[str, ...]
    rects: tuple[_Rect, ...]
    ticks: tuple[_Tick, ...]


@dataclass(frozen=True, slots=True)
class _Fact:
    """One entry of the page's head."""

    name: str
    text: str
    more: str = ""
    bad: bool = False


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
        meaning=lambda position: MEANING.get(position, ""),
    )
    views = group_views(report.breakdown, report.slowest)
    gpu = report.breakdown.gpu
    return environment.get_template("report.html.j2").render(
        subject=report.subject,
        breakdown=report.breakdown,
        title=_title(report),
        facts=list(_facts(report)),
        gpu=gpu,
        timeline=None if gpu is None or gpu.timeline is None else _timeline(gpu.timeline),
        sheets=[] if gpu is None else sheets(gpu),
        steps=[] if gpu is None else [steps_sheet(rank) for rank in gpu.ranks],
        groups=[(view, _chart(view), len(view.ranks) <= FEW_RANKS) for view in views],
        names=_names(views, gpu),
        per_rank=per_rank,
        absent=figures.ABSENT,
    )


def _utc(unix_ns: int) -> str:
    if not unix_ns:
        return ""
    return datetime.fromtimestamp(unix_ns / NS_PER_SECOND, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def _names(views: Sequence[GroupView], gpu: GpuFindings | None) -> list[str]:
    names = dict.fromkeys(row.name for view in views for row in view.rows)
    if gpu is not None and gpu.timeline is not None:
        drawn = (bar.category for _, bars in gpu.timeline.lanes for bar in bars)
        names |= dict.fromkeys(sorted({name for name in drawn if name and name not in names}, key=category_order))
    return list(names)


def _title(report: Report) -> str:
    if report.breakdown.gpu is not None:
        return PurePath(report.subject.instance).name or report.subject.instance
    return report.subject.model or "model unknown"


def _facts(report: Report) -> Iterator[_Fact]:
    """What stands at the top of the page: whom it is about, and how much of it was seen."""
    subject, breakdown = report.subject, report.breakdown
    found, expected = len(breakdown.ranks_found), breakdown.ranks_expected
    ranks = _Fact("ranks", f"{found} of {expected}", bad=found != expected)
    if breakdown.gpu is not None:
        yield _Fact("source", str(breakdown.source), report.subject.instance)
        yield ranks
        yield _Fact(
            "steps", "a table: totals only" if breakdown.gpu.table_rows else step_count_text(breakdown.gpu.ranks)
        )
        if breakdown.gpu.has_work:
            yield _Fact("kernels", f"{breakdown.gpu.totals.kernels:,}")
        return
    yield _Fact("vLLM", subject.vllm_version or "unknown")
    yield ranks
    for count in subject.phases:
        yield _Fact(f"{count.phase} steps", f"{count.steps:,}", f"{count.sampled:,} sampled")
    yield _Fact("sampling", subject.sampling)
    yield _Fact("instance", subject.instance or "unknown", "running" if subject.alive else "ended")
    if subject.started_unix_ns:
        yield _Fact("started", _utc(subject.started_unix_ns))


def _timeline(timeline: Timeline) -> _TimelineChart:
    length = timeline.span_ns or 1
    scale = _CHART_WIDTH / length
    rects = tuple(
        _Rect(
            bar.category,
            category_color(bar.category),
            round(bar.start_ns * scale, 2),
            n * _LANE_HEIGHT,
            max(round(bar.duration_ns * scale, 2), _HAIR),
            _bar_title(bar),
        )
        for n, (_, bars) in enumerate(timeline.lanes)
        for bar in bars
    )
    return _TimelineChart(
        rank=timeline.rank,
        place=timeline.place,
        name=timeline.name,
        span_ns=timeline.span_ns,
        width=_CHART_WIDTH,
        height=len(timeline.lanes) * _LANE_HEIGHT,
        bar_height=_LANE_BAR,
        lanes=tuple(name for name, _ in timeline.lanes),
        rects=rects,
        ticks=_ticks(length),
    )


def _bar_title(bar: TimelineBar) -> str:
    what = short_kernel(bar.name) if bar.name else f"{bar.kernels} kernels"
    many = f" x {bar.kernels}" if bar.name and bar.kernels > 1 else ""
    return f"{bar.category or 'opaque graph'} · {what}{many} · {figures.microseconds(bar.duration_ns)} µs"


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
    return _Chart(
        width=_CHART_WIDTH,
        height=len(lanes) * _ROW_HEIGHT,
        bar_height=_BAR_HEIGHT,
        lanes=lanes,
        rects=rects,
        ticks=_ticks(length),
    )


def _ticks(length: float) -> tuple[_Tick, ...]:
    marks = ticks(length, about=6)
    decimals = 0 if len(marks) < 2 or marks[1] >= 1e6 else 1 if marks[1] >= 1e5 else 2 if marks[1] >= 1e4 else 3
    return tuple(_Tick(round(ns * _CHART_WIDTH / length, 2), f"{ns / 1e6:,.{decimals}f}") for ns in marks)
