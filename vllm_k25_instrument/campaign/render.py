"""A campaign's report in a terminal, as Markdown and as a page: the same sheets and answers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from jinja2 import Environment, PackageLoader, StrictUndefined
from rich import box
from rich.console import Console, ConsoleOptions, RenderResult
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from vllm_k25_instrument.campaign.answers import Answer, answers
from vllm_k25_instrument.campaign.results import Results
from vllm_k25_instrument.campaign.sheets import detail_sheets, facts, overview_sheet
from vllm_k25_instrument.palette import category_color
from vllm_k25_instrument.report.sheets import Line, Sheet

_LISTS: Final = (("Missing", "missing"), ("Not to be had here", "not_possible"), ("To know before reading", "notes"))


def _lists(results: Results) -> Iterator[tuple[str, list[str]]]:
    for title, name in _LISTS:
        lines: list[str] = getattr(results, name)
        if lines:
            yield title, lines


def answer_lines(answer: Answer) -> list[str]:
    """An answer, a line for each thing that it says."""
    return [*answer.text, *([f"Needed: {answer.needs}."] if answer.needs else [])]


class CampaignReport:
    """The report in a terminal."""

    def __init__(self, results: Results) -> None:
        self._results = results

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        results = self._results
        state = "complete" if results.complete else "INCOMPLETE"
        yield Text.assemble(("Campaign: ", "bold"), (results.manifest.plan.model, "bold"), f" · {state}")
        yield Text(" · ".join(f"{name}: {text}" for name, text in facts(results)), style="dim")
        # What matters most comes last: that is what stays on the screen.
        for sheet in (*detail_sheets(results), overview_sheet(results)):
            yield Text()
            yield Text(sheet.title, style="bold")
            yield Text(sheet.caption, style="dim")
            yield sheet_table(sheet)
        yield Text()
        yield Text("In words", style="bold")
        for answer in answers(results):
            yield Text(answer.question, style="bold")
            for line in answer_lines(answer):
                yield Padding(Text(line), (0, 0, 0, 2))
        for title, lines in _lists(results):
            yield Text()
            yield Text(title, style="bold yellow" if title == "Missing" else "bold")
            for line in lines:
                yield Padding(Text(f"- {line}"), (0, 0, 0, 1))


def sheet_table(sheet: Sheet) -> Table:
    """A sheet as a table of rich."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 0, 0, 1), header_style="dim", show_edge=False)
    table.add_column(sheet.head[0], overflow="fold", min_width=20)
    for head in sheet.head[1:]:
        table.add_column(head, justify="right")
    for line in sheet.lines:
        table.add_row(_name(line), *(Text(cell) for cell in line.cells))
    return table


def _name(line: Line) -> Text:
    if not line.category:
        return Text(line.name)
    return Text.assemble(("■ ", category_color(line.category)), line.name)


def to_markdown(results: Results) -> str:
    """The report as Markdown."""
    return "\n".join(_markdown(results)) + "\n"


def _markdown(results: Results) -> Iterator[str]:
    yield f"# Campaign: {_escape(results.manifest.plan.model)}"
    yield ""
    for name, text in facts(results):
        yield f"- {name}: {_escape(text)}"
    if not results.complete:
        yield ""
        yield "**Incomplete: see Missing.**"
    yield from _section(overview_sheet(results))
    yield ""
    yield "## In words"
    for answer in answers(results):
        yield ""
        yield f"**{answer.question}**"
        yield ""
        for text in answer_lines(answer):
            yield f"- {_escape(text)}"
    for title, lines in _lists(results):
        yield ""
        yield f"## {title}"
        yield ""
        for line in lines:
            yield f"- {_escape(line)}"
    for sheet in detail_sheets(results):
        yield from _section(sheet)


def _section(sheet: Sheet) -> Iterator[str]:
    yield ""
    yield f"## {_escape(sheet.title)}"
    yield ""
    yield _escape(sheet.caption)
    yield ""
    yield from markdown_table(sheet)


def markdown_table(sheet: Sheet) -> Iterator[str]:
    """A sheet as a table of Markdown."""
    yield f"| {' | '.join(_escape(head) for head in sheet.head)} |"
    yield f"|---|{'---:|' * (len(sheet.head) - 1)}"
    for line in sheet.lines:
        name = f"`{line.name}`" if line.category else _escape(line.name.strip())
        yield f"| {' | '.join((name, *(_escape(cell) for cell in line.cells)))} |"


def _escape(text: str) -> str:
    clean = " ".join(text.split())
    for character in ("\\", "|", "<", "*", "_", "`"):
        clean = clean.replace(character, "\\" + character)
    return clean


def to_html(results: Results) -> str:
    """The report as one page: no script, no external resource, light and dark."""
    environment = Environment(
        loader=PackageLoader("vllm_k25_instrument.campaign", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["color"] = category_color
    return environment.get_template("campaign.html.j2").render(
        model=results.manifest.plan.model,
        complete=results.complete,
        facts=facts(results),
        overview=overview_sheet(results),
        sheets=detail_sheets(results),
        answers=[(answer.question, answer_lines(answer)) for answer in answers(results)],
        lists=list(_lists(results)),
    )
