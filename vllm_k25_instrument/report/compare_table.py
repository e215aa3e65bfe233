"""Two breakdowns side by side in a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from rich import box
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from vllm_k25_instrument.palette import category_color
from vllm_k25_instrument.report.compare import REST, Change, Comparison
from vllm_k25_instrument.report.figures import ABSENT, microseconds


class ComparisonTable:
    """One table per group that both sides have: A, B, the difference, and its share of the step's change."""

    def __init__(self, comparison: Comparison) -> None:
        self._comparison = comparison

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        compared = self._comparison
        for letter, side in (("A", compared.a), ("B", compared.b)):
            text = Text.assemble((f"{letter}  ", "bold"), f"{side.name}  ", (f"({side.source})", "dim"))
            if not side.complete:
                text.append(" · INCOMPLETE", style="bold red")
            yield text
        for group in compared.groups:
            yield Text()
            steps = f"  {group.a_steps:,} and {group.b_steps:,} steps, means per step"
            yield Text.assemble((group.title, "bold"), (steps, "dim"))
            yield _table(group.rows, group.step)
        if compared.totals:
            yield Text()
            yield Text("No steps to compare: the sums of the whole captures", style="bold")
            yield _table(compared.totals, None)
        yield from _left_over(compared)


def _left_over(compared: Comparison) -> Iterator[RenderableType]:
    for letter, keys in (("A", compared.only_a), ("B", compared.only_b)):
        if keys:
            yield Text()
            yield Text(f"Only in {letter}: {'; '.join(key.words for key in keys)}", style="dim")


def _table(rows: Iterable[Change], whole: Change | None) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 0, 0, 2), header_style="dim", show_edge=False)
    table.add_column("category", no_wrap=True, min_width=20)
    for head in ("A\nµs", "B\nµs", "difference\nµs", "\n% of A", "share of\nchange %"):
        table.add_column(head, justify="right", no_wrap=True)
    for row in rows:
        color = category_color("idle" if row.name == REST else row.name)
        share = ABSENT if row.share is None else f"{100 * row.share:.1f}"
        table.add_row(Text.assemble(("■ ", color), row.name), *_figures(row), share)
    if whole is not None:
        table.add_section()
        table.add_row(Text("step", style="bold"), *_figures(whole), "")
    return table


def _figures(row: Change) -> tuple[str, str, str, str]:
    difference = round(row.difference_ns / 1000, 1) or 0.0  # no "-0.0"
    percent = ABSENT if row.percent is None else f"{round(row.percent, 1) or 0.0:+.1f}"
    return microseconds(row.a_ns), microseconds(row.b_ns), f"{difference:+,.1f}", percent
