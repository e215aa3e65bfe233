"""What a trace has beyond its groups of steps, as plain tables: one layout for terminal, Markdown and page."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from vllm_k25_instrument.model import Category
from vllm_k25_instrument.report.breakdown import category_order
from vllm_k25_instrument.report.figures import ABSENT, microseconds, milliseconds3, percent
from vllm_k25_instrument.report.gpu import GpuFindings, GpuTotals, KernelTotal, RankFindings

TOP_KERNELS: Final = 12
TOP_OTHERS: Final = 10
MAX_STEPS: Final = 500


@dataclass(frozen=True, slots=True)
class Line:
    """One row: its name, its figures, and the category whose colour it has (empty: none)."""

    name: str
    cells: tuple[str, ...]
    category: str = ""
    full_name: str = ""
    """What `name` is short for."""


@dataclass(frozen=True, slots=True)
class Sheet:
    """A titled table. The first entry of `head` is over the names, the others over the figures."""

    title: str
    caption: str
    head: tuple[str, ...]
    lines: tuple[Line, ...]


def sheets(findings: GpuFindings) -> list[Sheet]:
    """The sheets of `findings`; those that would be empty are absent."""
    if not findings.has_work:
        return []
    made = [_totals(findings), *_ranks(findings), _kernels(findings), *_others(findings)]
    return [sheet for sheet in made if sheet.lines]


def _totals(findings: GpuFindings) -> Sheet:
    totals = findings.totals
    categories = totals.by_category or {}
    whole = totals.sum_ns
    lines = [
        Line(
            name,
            (
                f"{total.count:,}",
                milliseconds3(total.sum_ns),
                _share(total.sum_ns, whole),
                _milliseconds(total.exposed_ns),
                ABSENT if total.exposed_ns is None else _share(total.exposed_ns, totals.span_ns),
                microseconds(total.sum_ns / total.count) if total.count else ABSENT,
            ),
            category=name,
        )
        for name, total in sorted(categories.items(), key=lambda item: category_order(item[0]))
    ]
    if totals.graphs:
        mean = microseconds(totals.graph_ns / totals.graphs)
        cells = (f"{totals.graphs:,}", milliseconds3(totals.graph_ns), ABSENT, ABSENT, ABSENT, mean)
        lines.append(Line("opaque graphs", cells))
    lines += _sums(totals)
    many = f", {len(findings.ranks)} ranks added up" if len(findings.ranks) > 1 else ""
    captions = {
        True: "Sums of a table: what ran at the same time as something else is not known.",
        False: "Exposed time gives each instant to one kernel, compute before communication before copies; with idle "
        "it adds up to the span, to the nanosecond.",
    }
    return Sheet(
        f"The whole capture{many}",
        captions[findings.table_rows],
        ("category", "calls", "sum ms", "% of sum", "exposed ms", "% of span", "µs / call"),
        tuple(lines),
    )


def _sums(totals: GpuTotals) -> Iterator[Line]:
    count = totals.kernels + totals.memcpys + totals.memsets + totals.graphs
    yield Line("sum", (f"{count:,}", milliseconds3(totals.sum_ns), "", "", "", ""))
    if totals.busy_ns is None or totals.span_ns is None:
        return
    for name, value in (
        ("overlap", totals.overlap_ns),
        ("busy", totals.busy_ns),
        ("idle", totals.idle_ns),
        ("span", totals.span_ns),
    ):
        yield Line(name, ("", "", "", _milliseconds(value), _share(value or 0, totals.span_ns), ""))


def _ranks(findings: GpuFindings) -> Iterator[Sheet]:
    if len(findings.ranks) < 2:
        return
    cross = findings.cross_rank
    waits = {wait.rank: wait for wait in cross.ranks}
    lines = []
    for rank in findings.ranks:
        wait = waits.get(rank.rank)
        skew = ABSENT if wait is None or wait.skew_ns is None else microseconds(wait.skew_ns)
        lines.append(
            Line(
                f"rank {rank.rank}" + (" (slowest)" if rank.rank == cross.slowest else ""),
                (
                    f"{rank.step_counts.averaged:,}",
                    f"{rank.totals.kernels:,}",
                    milliseconds3(rank.totals.sum_ns),
                    _milliseconds(rank.totals.busy_ns),
                    _milliseconds(rank.totals.idle_ns),
                    ABSENT if wait is None else microseconds(wait.wait_ns),
                    skew,
                ),
            )
        )
    yield Sheet(
        "Ranks",
        rank_caption(findings),
        ("rank", "steps", "kernels", "sum ms", "busy ms", "idle ms", "all-reduce wait µs / step", "skew µs / step"),
        tuple(lines),
    )


def rank_caption(findings: GpuFindings) -> str:
    """What the ranks say of each other, in a sentence."""
    cross = findings.cross_rank
    if cross.reason:
        return f"No figures across ranks: {cross.reason}."
    text = (
        f"Over {cross.steps:,} steps that are whole on all ranks: {cross.calls:,.1f} all-reduces a step, of which "
        f"{microseconds(cross.transfer_ns)} µs are transfer (the least of any rank, call by call) and the rest is "
        "waiting for the rank that comes last."
    )
    if cross.skipped:
        text += f" {cross.skipped:,} steps are left out: their ranks have different numbers of all-reduces."
    sentence = cross.verdict
    return f"{text} {sentence[:1].upper()}{sentence[1:]}." if sentence else text


def _kernels(findings: GpuFindings) -> Sheet:
    kernels = findings.kernels
    whole = findings.totals.kernel_ns
    return Sheet(
        "Top kernels outside the opaque graphs" if findings.totals.graphs else "Top kernels",
        f"The largest {min(TOP_KERNELS, len(kernels))} of {len(kernels)} names, by the sum of their durations.",
        ("kernel", "category", "calls", "sum ms", "% of kernels", "µs / call"),
        tuple(_kernel_line(kernel, whole, with_category=True) for kernel in kernels[:TOP_KERNELS]),
    )


def _others(findings: GpuFindings) -> Iterator[Sheet]:
    others = [kernel for kernel in findings.kernels if kernel.category == Category.OTHER]
    if not others:
        return
    spent = sum(kernel.sum_ns for kernel in others)
    whole = findings.totals.kernel_ns
    yield Sheet(
        "Kernels of category other",
        f"No rule names these {len(others)} ({percent(spent / whole if whole else 0)} % of the kernels' time): a rules "
        "file can (--rules; `vllm-k25 classify NAME` says which rule hits).",
        ("kernel", "calls", "sum ms", "% of kernels", "µs / call"),
        tuple(_kernel_line(kernel, whole, with_category=False) for kernel in others[:TOP_OTHERS]),
    )


def _kernel_line(kernel: KernelTotal, whole_ns: int, *, with_category: bool) -> Line:
    figures = (
        f"{kernel.count:,}",
        milliseconds3(kernel.sum_ns),
        _share(kernel.sum_ns, whole_ns),
        microseconds(kernel.sum_ns / kernel.count) if kernel.count else ABSENT,
    )
    cells = (kernel.category, *figures) if with_category else figures
    return Line(short_kernel(kernel.name), cells, category=kernel.category, full_name=kernel.name)


def steps_sheet(rank: RankFindings, limit: int = MAX_STEPS) -> Sheet:
    """The steps of one rank, one by one, the first `limit` of them."""
    more = f", the first {limit:,} of {len(rank.steps):,} (the JSON has all)" if len(rank.steps) > limit else ""
    return Sheet(
        f"Each step of rank {rank.rank}{more}",
        "",
        ("step", "kernels", "sum µs", "span µs", "busy µs", "overlap µs", "idle µs", "launches", "to the next µs"),
        tuple(
            Line(
                f"{step.place} {step.name}" + ("" if step.averaged else " (cut off)" if step.cut_off else " (no work)"),
                (
                    f"{step.kernels:,}",
                    *(
                        microseconds(value) if step.span_ns else ABSENT
                        for value in (
                            step.sum_ns,
                            step.span_ns,
                            step.busy_ns,
                            step.sum_ns - step.busy_ns,
                            step.span_ns - step.busy_ns,
                        )
                    ),
                    f"{step.launches:,}",
                    ABSENT if step.period_ns is None else microseconds(step.period_ns),
                ),
            )
            for step in rank.steps[:limit]
        ),
    )


def step_count_text(ranks: Sequence[RankFindings]) -> str:
    """``18 steps (vllm), 17 averaged, 1 without GPU work``, of the rank that has the most."""
    if not ranks:
        return "no rank"
    counts = max((rank.step_counts for rank in ranks), key=lambda counts: counts.found)
    if not counts.found:
        return "no steps"
    parts = [f"{counts.found:,} step{'s' if counts.found > 1 else ''} ({counts.marker}), {counts.averaged:,} averaged"]
    if counts.cut_off:
        parts.append(f"{counts.cut_off:,} cut off")
    if counts.without_work:
        parts.append(f"{counts.without_work:,} without GPU work")
    return ", ".join(parts)


def short_kernel(name: str, limit: int = 72) -> str:
    """A kernel's name without its arguments, at most `limit` characters of it."""
    text = " ".join(name.split())
    text = text.removeprefix("void ").replace("(anonymous namespace)::", "")
    depth = 0
    for at, character in enumerate(text):
        depth += (character in "<{") - (character in ">}")
        if character == "(" and depth <= 0 and at:
            text = text[:at]
            break
    return text if len(text) <= limit else text[: limit - 1] + "…"


def _milliseconds(ns: int | None) -> str:
    return ABSENT if ns is None else milliseconds3(ns)


def _share(part: int, whole: int | None) -> str:
    return percent(part / whole) if whole else ABSENT
