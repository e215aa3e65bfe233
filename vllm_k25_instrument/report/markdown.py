"""The breakdown as Markdown, for an issue or a pull request: data in, text out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from vllm_k25_instrument.plain_text import one_line
from vllm_k25_instrument.report.figures import ABSENT, calls, microseconds, percent
from vllm_k25_instrument.report.gpu import GpuFindings
from vllm_k25_instrument.report.rings import Report
from vllm_k25_instrument.report.sheets import sheets, step_count_text
from vllm_k25_instrument.report.view import FEW_RANKS, LIVE_TERMS, GroupView, Row, group_views


def to_markdown(report: Report, *, per_rank: bool = False) -> str:
    """The whole report. `per_rank`: a column for each rank even where there are more than four."""
    return "\n".join(_lines(report, per_rank)) + "\n"


def _lines(report: Report, per_rank: bool) -> Iterator[str]:
    subject, breakdown = report.subject, report.breakdown
    findings = breakdown.gpu
    ranks = f"{len(breakdown.ranks_found)} of {breakdown.ranks_expected} ranks"
    if findings is None:
        yield f"# Step breakdown: {_escape(subject.model or 'model unknown')}"
        yield ""
        version = f"vLLM {_escape(subject.vllm_version)} · " if subject.vllm_version else ""
        yield f"{version}instance `{_code(subject.instance)}` · {ranks} · {subject.counts_text}"
    else:
        yield f"# Step breakdown: {_escape(subject.instance)}"
        yield ""
        steps = "a table: totals only" if findings.table_rows else step_count_text(findings.ranks)
        yield f"{breakdown.source} · {ranks} found · {steps}"
    if not breakdown.complete:
        yield ""
        yield "**Incomplete: see the warnings.**"
    for caveat in breakdown.caveats:
        yield ""
        yield f"> **{caveat.code}**: {_escape(caveat.message)}"
    for view in group_views(breakdown, report.slowest):
        yield ""
        yield f"## {view.title}"
        yield ""
        span = "duration" if findings is None else "span on the GPU"
        yield f"{view.subtitle}. Percentages are of the step's {span} and use {view.terms.own} time."
        yield ""
        yield from _rank_table(view) if per_rank or len(view.ranks) <= FEW_RANKS else _spread_table(view)
        if view.inferred:
            yield ""
            yield view.inferred_note
        if len(view.ranks) > 1:
            sentence = view.slowest.sentence
            yield ""
            yield f"{sentence[:1].upper()}{sentence[1:]}."
    if findings is not None:
        yield from _findings(findings)


def _findings(findings: GpuFindings) -> Iterator[str]:
    """Why sums and step times differ, then the sheets."""
    if findings.words:
        yield ""
        yield "## In words"
    for sentence in findings.words:
        yield ""
        yield _escape(sentence)
    for sheet in sheets(findings):
        yield ""
        yield f"## {sheet.title}"
        yield ""
        if sheet.caption:
            yield _escape(sheet.caption)
            yield ""
        yield from _head(sheet.head)
        for line in sheet.lines:
            yield _row([f"`{_code(line.name)}`" if line.category else _escape(line.name), *line.cells])


def _rank_table(view: GroupView) -> Iterator[str]:
    marks = {view.slowest.rank: " (slowest)"}
    ranks = [f"rank {rank}{marks.get(rank, '')}: {_own(view)} µs/step (%)" for rank in view.ranks]
    yield from _head(["category", *ranks, f"{_whole(view)} µs/step", "calls/step", "µs/call"])
    for row in view.table_rows:
        cells = [row.cells.get(rank) for rank in view.ranks]
        own = [ABSENT if c is None else f"{microseconds(c.exclusive_ns)} ({percent(c.share)})" for c in cells]
        yield _row([f"`{row.label}`", *own, *_inclusive(row)])
    for step in view.step_rows:
        yield _row([step.name, *(microseconds(step.values[rank]) for rank in view.ranks), "", "", ""])


def _spread_table(view: GroupView) -> Iterator[str]:
    yield from _head(
        [
            "category",
            f"mean of {len(view.ranks)} ranks: {_own(view)} µs/step",
            "% of step",
            *("min", "max", "max at", f"{_whole(view)} µs/step", "calls/step", "µs/call"),
        ]
    )
    for row in view.table_rows:
        own = [microseconds(row.mean.exclusive_ns), percent(row.mean.share)]
        spread = [microseconds(row.lowest_ns), microseconds(row.highest_ns), f"rank {row.highest_rank}"]
        yield _row([f"`{row.label}`", *own, *spread, *_inclusive(row)])
    for step in view.step_rows:
        spread = [microseconds(step.lowest_ns), microseconds(step.highest_ns), f"rank {step.highest_rank}"]
        yield _row([step.name, microseconds(step.mean_ns), "", *spread, "", "", ""])


def _own(view: GroupView) -> str:
    return "excl." if view.terms is LIVE_TERMS else view.terms.own


def _whole(view: GroupView) -> str:
    return "incl." if view.terms is LIVE_TERMS else view.terms.whole


def _inclusive(row: Row) -> list[str]:
    if not row.measured:
        return [ABSENT] * 3
    return [microseconds(row.mean.sum_ns), calls(row.mean.calls), microseconds(row.mean.ns_per_call)]


def _head(names: Sequence[str]) -> Iterator[str]:
    yield _row(names)
    yield _row(["---", *("---:" for _ in names[1:])])


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _code(text: str) -> str:
    """Text from outside inside backticks, in a cell."""
    return one_line(text).replace("`", "'").replace("|", "¦")


def _escape(text: str) -> str:
    """Text that comes from outside, so that it stays text."""
    text = one_line(text)
    for character in "\\`*_[]<>|#&":
        text = text.replace(character, f"\\{character}")
    return text
