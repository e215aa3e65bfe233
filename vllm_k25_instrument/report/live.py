"""The live view of a running server, as one rich renderable per frame: data in, no I/O."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Final

from rich import box
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from vllm_k25_instrument.model import NS_PER_SECOND, Category
from vllm_k25_instrument.palette import category_color
from vllm_k25_instrument.report.bars import cells_of, segments
from vllm_k25_instrument.report.figures import ABSENT, calls, microseconds, milliseconds, percent
from vllm_k25_instrument.report.follow import ServerState, Snapshot
from vllm_k25_instrument.report.table import caveat_lines, subject_header
from vllm_k25_instrument.report.view import GroupView, group_views

IDLE_AFTER_NS: Final = 3 * NS_PER_SECOND
"""A server whose newest sampled step is older than this is called idle."""

LETTERS: Final[Mapping[str, str]] = {
    Category.ALL_REDUCE: "R",
    Category.COLLECTIVE: "C",
    Category.MOE_EXPERTS: "E",
    Category.MOE_ROUTING: "t",
    Category.MOE_SHARED_EXPERTS: "h",
    Category.MLA_ATTENTION: "A",
    Category.ATTENTION: "a",
    Category.SAMPLING: "s",
    Category.SPECULATION: "d",
    Category.INPUT_PREPARATION: "i",
    Category.UNATTRIBUTED: ".",
}
"""What fills a bar where there are too few colours to tell its parts by."""

_MIN_BAR: Final = 16


class Frame:
    """One frame of `vllm-k25 top`."""

    def __init__(self, snapshot: Snapshot, *, now_unix_ns: int, window_s: float, ranks: Collection[int] = ()) -> None:
        """`now_unix_ns`: the time to reckon idleness from. `ranks`: those to show; none means all."""
        self._snapshot = snapshot
        self._now_unix_ns = now_unix_ns
        self._window_s = window_s
        self._ranks = ranks

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        snapshot = self._snapshot
        if snapshot.state is ServerState.WAITING:
            yield Text(
                f"waiting for a server: no ring at {snapshot.path} (start vLLM with K25_INSTRUMENT=1)", style="bold"
            )
            return
        report = snapshot.report
        yield subject_header(report.subject, report.breakdown)
        if snapshot.state is ServerState.RESTARTING:
            yield Text("the server has ended; waiting for the next one, which is starting", style="bold yellow")
        if snapshot.state is ServerState.ENDED:
            yield Text("the server has ended; this is its last state", style="bold yellow")
        yield Text()
        yield self._headline()
        views = group_views(report.breakdown, report.slowest)
        if views:
            # The group that the server spends most of its time in.
            main = max(views, key=_time_in)
            colored = console.color_system in ("256", "truecolor")
            yield Text()
            yield Text.assemble((main.title, "bold"), ("  " + main.subtitle, "dim"))
            yield self._bars(main, options.max_width, colored)
            yield _legend(main, colored)
            if len(main.ranks) > 1 or report.breakdown.ranks_expected > 1:
                sentence = main.slowest.sentence
                yield Text(sentence[:1].upper() + sentence[1:], style="" if main.slowest.rank is not None else "dim")
            others = [view for view in views if view is not main]
            if others:
                yield Text()
                yield _others(others)
        if report.caveats:
            yield Text()
            yield Group(*caveat_lines(report.caveats))

    def _headline(self) -> RenderableType:
        snapshot = self._snapshot
        last = snapshot.last
        if last is None:
            return Text("no step sampled yet", style="bold")
        rate = ABSENT if snapshot.steps_per_second is None else calls(round(snapshot.steps_per_second, 1))
        figures = [
            ("last step", f"{milliseconds(last.duration_ns)} ms"),
            ("steps/s", rate),
            ("sampled", f"{snapshot.sampled:,}"),
            ("lost", f"{snapshot.lost:,}"),
            ("window", f"{self._window_s:g} s"),
        ]
        age_ns = self._now_unix_ns - last.start_unix_ns
        if snapshot.state is ServerState.RUNNING and age_ns > IDLE_AFTER_NS:
            figures.append(("idle for", f"{age_ns // NS_PER_SECOND:,} s"))
        text = Text()
        for name, value in figures:
            text.append(f"{name} ", style="dim").append(value, style="bold").append("   ")
        text.rstrip()
        return text

    def _bars(self, view: GroupView, width: int, colored: bool) -> Table:
        table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim", show_edge=False)
        table.add_column("rank", justify="right", no_wrap=True)
        table.add_column("", no_wrap=True)
        for header in ("last ms", "p50 ms", "p99 ms", "all_reduce %"):
            table.add_column(header, justify="right", no_wrap=True)
        room = max(width - 58, _MIN_BAR)
        longest = max(row for step in view.step_rows[:1] for row in step.values.values())
        reduce = next((row for row in view.rows if row.name == Category.ALL_REDUCE), None)
        for rank in view.ranks:
            if self._ranks and rank not in self._ranks:
                continue
            cell = reduce.cells.get(rank) if reduce is not None else None
            slow = rank == view.slowest.rank
            table.add_row(
                Text(f"{'slowest ▶ ' if slow else ''}{rank}", style="bold red" if slow else ""),
                stacked_bar(view, rank, longest, room, colored=colored),
                milliseconds(self._snapshot.last_ns[view.key, rank]),
                milliseconds(view.step_rows[1].values[rank]),
                milliseconds(view.step_rows[2].values[rank]),
                ABSENT if cell is None else percent(cell.share),
            )
        return table


def stacked_bar(view: GroupView, rank: int, longest_ns: float, width: int, *, colored: bool) -> Text:
    """The exclusive times of one rank as `width` character cells of a step of `longest_ns`.

    Without colours the parts are told apart by the letters of ``LETTERS``.
    """
    widths = {segment.name: segment.width_ns for segment in segments(view, rank)}
    text = Text(no_wrap=True)
    for name, cells in cells_of(widths, longest_ns, width).items():
        text.append(("█" if colored else LETTERS.get(name, "?")) * cells, style=category_color(name))
    text.pad_right(width - len(text))
    return text


def _legend(view: GroupView, colored: bool) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim", show_edge=False)
    table.add_column("category, mean of the ranks", no_wrap=True)
    for header in ("exclusive µs/step", "% of step", "calls/step", "µs/call"):
        table.add_column(header, justify="right", no_wrap=True)
    for row in view.table_rows:
        mark = "■" if colored else LETTERS.get(row.name, "?")
        name = (
            Text(f"  {row.label}", style="dim")
            if row.inferred
            else Text.assemble((f"{mark} ", category_color(row.name)), row.name)
        )
        inclusive = (calls(row.mean.calls), microseconds(row.mean.ns_per_call)) if row.measured else (ABSENT, ABSENT)
        table.add_row(
            name,
            microseconds(row.mean.exclusive_ns),
            percent(row.mean.share),
            *inclusive,
        )
    return table


def _others(views: Sequence[GroupView]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, header_style="dim", show_edge=False)
    table.add_column("also in this window", no_wrap=True)
    for header in ("sampled steps", "step p50 ms", "all_reduce %"):
        table.add_column(header, justify="right", no_wrap=True)
    for view in views:
        reduce = next((row for row in view.rows if row.name == Category.ALL_REDUCE), None)
        table.add_row(
            view.title,
            f"{max(view.steps.values()):,}",
            milliseconds(view.step_rows[1].mean_ns),
            ABSENT if reduce is None else percent(reduce.mean.share),
        )
    return table


def _time_in(view: GroupView) -> float:
    return sum(view.steps[rank] * ns for rank, ns in view.step_rows[0].values.items())
