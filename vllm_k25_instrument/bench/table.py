"""The results of a micro-benchmark in a terminal: rich renderables, data in, no I/O."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich import box
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from vllm_k25_instrument.bench.document import BenchDocument, BenchMachine, Choice, Kind, Row
from vllm_k25_instrument.report.figures import ABSENT, microseconds
from vllm_k25_instrument.report.words import time_text


class BenchTable:
    """A whole result: the machine, the rows, what follows from them, and what to know of them."""

    def __init__(self, document: BenchDocument) -> None:
        self._document = document

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        document = self._document
        yield machine_text(document.machine)
        yield Text()
        if document.kind is Kind.MOE:
            yield moe_table(document.rows)
        elif document.kind is Kind.ALL_REDUCE:
            yield all_reduce_table(document.rows)
            yield Text()
            yield choice_table(document.choices)
        else:
            yield overhead_table(document.rows)
        for line in summary_lines(document):
            yield Text(line)
        yield Text()
        yield Text("Median of the repeats, 95 % interval by order statistics.", style="dim")
        for reason in sorted({row.floor_reason for row in document.rows if row.floor_reason}):
            yield Text(f"No floor: {reason}.", style="dim")
        for warning in document.warnings:
            yield Text(f"{warning.message}.", style="yellow")


def machine_text(machine: BenchMachine) -> Text:
    """One line of what it ran on."""
    ranks = f"{machine.ranks} ranks, " if machine.ranks > 1 else ""
    threads = f"{machine.threads} thread{'s' if machine.threads != 1 else ''}"
    return Text(
        f"{machine.device_name}: {ranks}{threads} each, vLLM {machine.vllm}, torch {machine.torch}", style="bold"
    )


def moe_table(rows: Iterable[Row]) -> Table:
    """Experts and projections: time, bandwidth and operations, floor."""
    table = _table(
        ("name", "shape", "by"),
        ("tokens", "experts", "µs", "95 %", "MB", "GB/s", "GFLOP/s", "floor µs", "x floor"),
    )
    for row in rows:
        name = row.name if row.routing is None else f"{row.name}, {row.routing}"
        table.add_row(
            f"{name}{' (graph)' if row.in_graph else ''}",
            row.shape,
            row.path,
            _number(row.tokens),
            _number(row.active_experts),
            microseconds(row.median_ns),
            _interval(row),
            ABSENT if row.bytes is None else f"{row.bytes / 1e6:,.1f}",
            ABSENT if row.achieved_bytes_per_s is None else f"{row.achieved_bytes_per_s / 1e9:,.1f}",
            ABSENT if row.achieved_flop_per_s is None else f"{row.achieved_flop_per_s / 1e9:,.1f}",
            ABSENT if row.floor_ns is None else microseconds(row.floor_ns),
            ABSENT if row.ratio_to_floor is None else f"{row.ratio_to_floor:,.2f}",
        )
    return table


def all_reduce_table(rows: Iterable[Row]) -> Table:
    """All-reduces by path, size and number in a row: transfer, wait, skew of entry."""
    table = _table(
        ("path",),
        ("tokens", "KiB", "in a row", "µs", "95 %", "µs a call", "last entry µs", "most wait µs", "GB/s", "floor µs"),
    )
    for row in rows:
        skew = row.skew
        table.add_row(
            f"{row.path}{' (graph)' if row.in_graph else ''}",
            _number(row.tokens),
            ABSENT if row.bytes is None else f"{row.bytes / row.calls / 1024:,.0f}",
            _number(row.calls),
            microseconds(row.median_ns),
            _interval(row),
            microseconds(row.median_ns / row.calls),
            ABSENT if skew is None else microseconds(skew.last_ns),
            ABSENT if skew is None else microseconds(max(skew.wait_by_rank_ns)),
            ABSENT if row.achieved_bytes_per_s is None else f"{row.achieved_bytes_per_s / 1e9:,.2f}",
            ABSENT if row.floor_ns is None else microseconds(row.floor_ns),
        )
    return table


def choice_table(choices: Iterable[Choice]) -> Table:
    """Which path wins at which size, beside what vLLM would take."""
    table = _table(("wins", "vLLM takes"), ("tokens", "KiB", "in a row", "winner µs", "vLLM's µs", "times"))
    for choice in choices:
        ratio = None if choice.vllm_ns is None or not choice.winner_ns else choice.vllm_ns / choice.winner_ns
        table.add_row(
            f"{choice.winner}{'' if choice.decided else ' (intervals overlap)'}{' (graph)' if choice.in_graph else ''}",
            choice.vllm_takes or ABSENT,
            _number(choice.tokens),
            f"{choice.bytes / 1024:,.0f}",
            _number(choice.calls),
            microseconds(choice.winner_ns),
            ABSENT if choice.vllm_ns is None else microseconds(choice.vllm_ns),
            ABSENT if ratio is None else f"{ratio:,.2f}",
        )
    return table


def overhead_table(rows: Iterable[Row]) -> Table:
    """The costs of this package's own pieces."""
    table = _table(("what", "by", "of"), ("calls", "µs", "95 %", "ns a call"))
    for row in rows:
        table.add_row(
            row.name,
            row.path,
            row.shape,
            _number(row.calls),
            microseconds(row.median_ns),
            _interval(row),
            f"{row.median_ns / row.calls:,.0f}",
        )
    return table


def summary_lines(document: BenchDocument) -> Sequence[str]:
    """The derived figures in words."""
    summary = document.summary
    if document.kind is Kind.MOE:
        return [f"per step, {name}: {time_text(ns)}" for name, ns in summary.items()]
    if document.kind is Kind.OVERHEAD:
        return [f"{name.removesuffix('_ns').replace('_', ' ')}: {time_text(value)}" for name, value in summary.items()]
    return []


def _table(texts: Sequence[str], numbers: Sequence[str]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 0, 0, 1), header_style="dim", show_edge=False)
    for head in texts:
        table.add_column(head, no_wrap=True)
    for head in numbers:
        table.add_column(head, justify="right", no_wrap=True)
    return table


def _interval(row: Row) -> str:
    return f"{microseconds(row.low_ns)} to {microseconds(row.high_ns)}"


def _number(value: int | None) -> str:
    return ABSENT if value is None else f"{value:,}"
