"""The breakdown in a terminal: rich renderables, data in, no I/O."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from rich import box
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.measure import Measurement
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from vllm_k25_instrument.palette import category_color
from vllm_k25_instrument.plain_text import one_line
from vllm_k25_instrument.report.breakdown import Breakdown
from vllm_k25_instrument.report.caveats import Caveat
from vllm_k25_instrument.report.figures import ABSENT, calls, microseconds, percent
from vllm_k25_instrument.report.gpu import GpuFindings
from vllm_k25_instrument.report.rings import Report
from vllm_k25_instrument.report.sheets import sheets, step_count_text
from vllm_k25_instrument.report.subject import Subject
from vllm_k25_instrument.report.view import FEW_RANKS, LIVE_TERMS, Cell, GroupView, Row, StepRow, group_views

_WITHOUT_LIMIT = 10_000


class ReportTable:
    """A whole report: whom it is about, then one table per phase x batch x graph mode."""

    def __init__(self, report: Report, *, per_rank: bool = False) -> None:
        """`per_rank`: a column for each rank however many there are."""
        self._report = report
        self._per_rank = per_rank

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        findings = self._report.breakdown.gpu
        if findings is None:
            yield subject_header(self._report.subject, self._report.breakdown)
        else:
            yield trace_header(self._report.subject, self._report.breakdown, findings)
        views = group_views(self._report.breakdown, self._report.slowest)
        for view in views:
            yield Text()
            yield GroupTable(view, per_rank=self._per_rank)
        if views or findings is None:
            yield Text()
            yield Text((views[0].terms if views else LIVE_TERMS).share_note, style="dim")
        for note in dict.fromkeys(view.inferred_note for view in views if view.inferred):
            yield Text(note, style="dim")
        if findings is not None:
            yield from _findings(findings)


class GroupTable:
    """One phase x batch x graph mode: categories as rows, ranks as columns or, of many ranks, mean and spread."""

    def __init__(self, view: GroupView, *, per_rank: bool = False) -> None:
        """`per_rank`: a column for each rank even where there are more than ``FEW_RANKS``."""
        self._view = view
        self._columns = per_rank or len(view.ranks) <= FEW_RANKS

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        view = self._view
        yield Text.assemble((view.title, "bold"), ("  " + view.subtitle, "dim"))
        if self._columns:
            yield from self._tables_by_rank(console, options)
        elif _fits(console, options, table := _spread_table(view)):
            yield table
        else:
            yield _spread_table(view, spread=False)
            yield Text(" (a wider terminal shows the least and the most of the ranks)", style="dim")
        if len(view.ranks) > 1 or view.slowest.rank is not None:
            sentence = view.slowest.sentence
            yield Text(f" {sentence[:1].upper()}{sentence[1:]}", style="" if view.slowest.rank is not None else "dim")

    def _tables_by_rank(self, console: Console, options: ConsoleOptions) -> Iterator[Table]:
        """As many tables as it takes: a figure cut off by the edge of the screen would be a wrong figure."""
        ranks = self._view.ranks
        room = len(ranks)
        while room > 1 and not _fits(console, options, _rank_table(self._view, ranks[:room])):
            room -= 1
        for at in range(0, len(ranks), room):
            yield _rank_table(self._view, ranks[at : at + room])


def _fits(console: Console, options: ConsoleOptions, table: Table) -> bool:
    """Whether the table keeps all its figures in the width there is."""
    return Measurement.get(console, options.update(width=_WITHOUT_LIMIT), table).maximum <= options.max_width


def subject_header(subject: Subject, breakdown: Breakdown) -> RenderableType:
    """Two lines: the server, and how much of it was seen."""
    who = [subject.model or "model unknown"]
    if subject.vllm_version:
        who.append(f"vLLM {subject.vllm_version}")
    who.append(f"instance {subject.instance or 'unknown'} ({'running' if subject.alive else 'ended'})")
    lines = [Text(" · ".join(who), style="bold")]
    found, expected = len(breakdown.ranks_found), breakdown.ranks_expected
    state = Text.assemble(
        (f"{found} of {expected} ranks", "" if found == expected else "bold red"), " · ", subject.counts_text
    )
    if not breakdown.complete:
        state.append(" · INCOMPLETE, see the warnings", style="bold red")
    lines.append(state)
    return Group(*lines)


def trace_header(subject: Subject, breakdown: Breakdown, findings: GpuFindings) -> RenderableType:
    """Two lines: the files, and how much is in them."""
    found, expected = len(breakdown.ranks_found), breakdown.ranks_expected
    state = Text.assemble(
        (f"{found} of {expected} ranks found", "" if found == expected else "bold red"),
        " · ",
        "a table: totals only" if findings.table_rows else step_count_text(findings.ranks),
    )
    if not breakdown.complete:
        state.append(" · INCOMPLETE, see the warnings", style="bold red")
    return Group(Text(f"{breakdown.source} · {subject.instance}", style="bold"), state)


def _findings(findings: GpuFindings) -> Iterator[RenderableType]:
    """Why sums and step times differ, then the sheets."""
    if findings.words:
        yield Text()
        yield Text("In words", style="bold")
    for sentence in findings.words:
        yield Padding(Text(sentence), (0, 0, 0, 1))
    for sheet in sheets(findings):
        yield Text()
        yield Text(sheet.title, style="bold")
        if sheet.caption:
            yield Text(f" {sheet.caption}", style="dim")
        table = _table(sheet.head[0])
        for head in sheet.head[1:]:
            _figure(table, head)
        for line in sheet.lines:
            table.add_row(_name(line.name, line.category), *line.cells)
        yield table


def caveat_lines(caveats: Sequence[Caveat]) -> list[Text]:
    """One line per warning."""
    return [Text.assemble(("warning ", "bold yellow"), (f"[{c.code}] ", "dim"), one_line(c.message)) for c in caveats]


def _table(first: str = "category") -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 0, 0, 1), header_style="dim", show_edge=False)
    table.add_column(first, no_wrap=first != "kernel", overflow="fold", min_width=20)
    return table


def _figure(table: Table, header: str) -> None:
    table.add_column(header, justify="right", no_wrap=True)


def _name(name: str, category: str | None = None) -> Text:
    if category == "":
        return Text(name)
    return Text.assemble(("■ ", category_color(category or name)), name)


def _row_name(row: Row) -> Text:
    return Text(f"  {row.label}", style="dim") if row.inferred else _name(row.name)


def _rank_header(view: GroupView, rank: int) -> str:
    mark = " ◀" if view.slowest.rank == rank else ""
    return f"rank {rank}{mark}\n{view.terms.own}\nµs/step"


def _rank_table(view: GroupView, ranks: Sequence[int]) -> Table:
    table = _table()
    for rank in ranks:
        _figure(table, _rank_header(view, rank))
        _figure(table, "\n% of\nstep")
    _figure(table, f"{'mean' if len(view.ranks) > 1 else ''}\n{view.terms.whole}\nµs/step")
    _figure(table, "\ncalls\n/step")
    _figure(table, "\nµs\n/call")
    for row in view.table_rows:
        figures = [text for rank in ranks for text in _exclusive(row.cells.get(rank))]
        table.add_row(_row_name(row), *figures, *_inclusive(row), end_section=row is view.table_rows[-1])
    for step in view.step_rows:
        own = [text for rank in ranks for text in (microseconds(step.values[rank]), "")]
        table.add_row(Text(step.name), *own, style="dim" if step.name != "step mean" else "")
    return table


def _spread_table(view: GroupView, *, spread: bool = True) -> Table:
    """Mean over the ranks, and with `spread` the least and the most of them and where that is."""
    table = _table()
    between = (f"{view.terms.own}\nmin\nµs/step", "over ranks\nmax\nµs/step", "\nmax at\nrank") if spread else ()
    for header in (
        f"mean\n{view.terms.own}\nµs/step",
        "\n% of\nstep",
        *between,
        f"mean\n{view.terms.whole}\nµs/step",
        "\ncalls\n/step",
        "\nµs\n/call",
    ):
        _figure(table, header)
    for row in view.table_rows:
        table.add_row(
            _row_name(row),
            *_exclusive(row.mean),
            *(_spread(row) if spread else ()),
            *_inclusive(row),
            end_section=row is view.table_rows[-1],
        )
    for step in view.step_rows:
        table.add_row(
            Text(step.name),
            microseconds(step.mean_ns),
            "",
            *(_spread(step) if spread else ()),
            style="dim" if step.name != "step mean" else "",
        )
    return table


def _exclusive(cell: Cell | None) -> tuple[str, str]:
    return (ABSENT, ABSENT) if cell is None else (microseconds(cell.exclusive_ns), percent(cell.share))


def _inclusive(row: Row) -> tuple[str, str, str]:
    if not row.measured:
        return ABSENT, ABSENT, ABSENT
    return microseconds(row.mean.sum_ns), calls(row.mean.calls), microseconds(row.mean.ns_per_call)


def _spread(row: Row | StepRow) -> tuple[str, str, str]:
    return microseconds(row.lowest_ns), microseconds(row.highest_ns), str(row.highest_rank)


def legend(names_and_shares: Mapping[str, float]) -> Text:
    """Coloured squares with names and shares (0 to 1)."""
    text = Text()
    for name, share in names_and_shares.items():
        text.append("■ ", style=category_color(name)).append(f"{name} ").append(f"{percent(share)} %   ", style="dim")
    return text
