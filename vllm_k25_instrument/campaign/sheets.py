"""The tables of a campaign, as rows of text: one layout for terminal, Markdown and page."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Final

from vllm_k25_instrument.bench.document import BenchDocument, Row
from vllm_k25_instrument.campaign.interval import Estimate
from vllm_k25_instrument.campaign.results import Column, ComponentEstimates, Results
from vllm_k25_instrument.campaign.trace_figures import TraceFigures
from vllm_k25_instrument.model import Category
from vllm_k25_instrument.report.breakdown import category_order
from vllm_k25_instrument.report.figures import ABSENT, calls, microseconds, percent
from vllm_k25_instrument.report.sheets import Line, Sheet

TOP_OPERATORS: Final = 12
TOP_ROWS: Final = 40


def detail_sheets(results: Results) -> list[Sheet]:
    """The tables behind the overview, those that have a row."""
    made: list[Sheet] = []
    for column in results.columns:
        made += [*_details(results, column), *_kernels(column), *_operators(column)]
    if results.nsys is not None:
        made.append(_trace_sheet("Kernels of a decode step, nsys", results.nsys))
    made += [_bench(name, document) for name, document in results.micro.items()]
    return [sheet for sheet in made if sheet.lines]


def with_interval(estimate: Estimate | None, scale: Callable[[float], str] = microseconds) -> str:
    """``1,234.5 ± 12.3``."""
    if estimate is None:
        return ABSENT
    half = "" if estimate.half is None else f" ± {scale(estimate.half)}"
    return f"{scale(estimate.mean)}{half}"


def overview_sheet(results: Results) -> Sheet:
    """Component by concurrency: the table that a campaign is run for."""
    columns = results.columns
    names = dict.fromkeys(sorted({name for column in columns for name in column.components()}, key=category_order))
    tables = {column.concurrency: column.components() for column in columns}
    lines = [
        Line(name, tuple(_exposed(tables[column.concurrency].get(name), column) for column in columns), category=name)
        for name in names
    ]
    rows: tuple[tuple[str, Callable[[Column], str]], ...] = (
        ("decode step", lambda column: with_interval(column.over("step_ns"))),
        ("+ between steps", lambda column: with_interval(column.part("gap_ns"))),
        ("+ other steps, on balance", lambda column: with_interval(column.part("others_ns"))),
        ("+ steps not sampled, against these", lambda column: with_interval(column.part("unsampled_ns"))),
        ("+ unexplained", lambda column: with_interval(column.unexplained)),
        ("= time per output token", lambda column: with_interval(column.tpot)),
        ("time to first token, ms", lambda column: with_interval(column.ttft, lambda ns: f"{ns / 1e6:,.1f}")),
        ("tokens per second", lambda column: with_interval(column.tokens_per_second, lambda value: f"{value:,.1f}")),
        (
            "batch of the decode steps",
            lambda column: with_interval(column.over("batch"), lambda value: f"{value:,.1f}"),
        ),
        ("windows, sampled steps", _counts),
    )
    lines += [Line(name, tuple(cell(column) for column in columns)) for name, cell in rows]
    lines = [line for line in lines if any(cell not in (ABSENT, "") for cell in line.cells)]
    return Sheet(
        "Component by concurrency",
        "Exposed time per decode step at full batch, µs, mean over the ranks and the windows ± half of Student's 95 % "
        "interval over the windows, and share of the step. The categories add up to the decode step. Step, gap, other "
        "steps (prefills in between, partly filled batches), what steps that were not sampled take more or less, and "
        "what is unexplained add up to the time per output token.",
        ("µs", *(f"concurrency {column.concurrency}" for column in columns)),
        tuple(lines),
    )


def _exposed(one: ComponentEstimates | None, column: Column) -> str:
    step = column.over("step_ns")
    if one is None:
        return ABSENT
    share = f" ({percent(one.exposed.mean / step.mean)} %)" if step is not None and step.mean else ""
    return f"{with_interval(one.exposed)}{share}"


def _counts(column: Column) -> str:
    if not column.windows:
        return ABSENT
    steps = sum(window.live.steps for window in column.live if window.live is not None)
    return f"{len(column.windows)}, {steps:,}" if steps else f"{len(column.windows)}"


def _details(results: Results, column: Column) -> Iterator[Sheet]:
    components = column.components()
    step = column.over("step_ns")
    if not components or step is None:
        return
    lines = []
    for name, one in sorted(components.items(), key=lambda item: category_order(item[0])):
        wait = column.over("wait_ns") if name == Category.ALL_REDUCE else None
        lines.append(Line(name, (*_cells(one, step.mean), with_interval(wait), *_floor(column, name)), category=name))
        if name == Category.ALL_REDUCE and len(column.paths()) > 1:
            lines += [
                Line(f"  by {path}", (*_cells(of_path, step.mean), ABSENT, ABSENT, ABSENT))
                for path, of_path in sorted(column.paths().items())
            ]
    lines.append(
        Line("decode step", (with_interval(step), "100.0", ABSENT, ABSENT, ABSENT, ABSENT, *_floor(column, "step")))
    )
    live = next(window.live for window in column.live if window.live is not None)
    ranks = f"{live.ranks_found} of {live.ranks_expected} ranks"
    first = column is results.columns[0]
    floors = f" No floors: {results.floors_missing}." if first and results.floors_missing and not column.floors else ""
    source = "samples of the rings" if live.source == "ring" else "differences of /metrics: means only"
    yield Sheet(
        f"Decode step at concurrency {column.concurrency}",
        f"{source}, {ranks}. Sums count what overlaps; wait is for the rank that comes last.{floors}",
        (
            "component",
            "exposed µs/step",
            "% of step",
            "sum µs/step",
            "calls/step",
            "µs/call",
            "wait µs/step",
            "floor µs",
            "x floor",
        ),
        tuple(lines),
    )


def _cells(one: ComponentEstimates, step_ns: float) -> tuple[str, ...]:
    return (
        with_interval(one.exposed),
        percent(one.exposed.mean / step_ns) if step_ns else ABSENT,
        with_interval(one.sum),
        ABSENT if one.calls is None else calls(round(one.calls.mean, 1)),
        with_interval(one.ns_per_call),
    )


def _floor(column: Column, name: str) -> tuple[str, str]:
    row = column.floors.get(name)
    if row is None or row.floor is None:
        return ABSENT, ABSENT
    return microseconds(row.floor.ns), ABSENT if row.times is None else f"{row.times:,.2f}"


def _kernels(column: Column) -> Iterator[Sheet]:
    if column.trace is not None:
        yield _trace_sheet(f"Kernels of a decode step at concurrency {column.concurrency}", column.trace)


def _trace_sheet(title: str, trace: TraceFigures) -> Sheet:
    lines = [
        Line(
            name,
            (
                microseconds(one.exposed_ns),
                ABSENT if not trace.span_ns else percent(one.exposed_ns / trace.span_ns),
                microseconds(one.sum_ns or 0.0),
                percent(trace.share(name)),
                calls(round(one.calls or 0.0, 1)),
                ABSENT if one.ns_per_call is None else microseconds(one.ns_per_call),
            ),
            category=name,
        )
        for name, one in sorted(trace.components.items(), key=lambda item: category_order(item[0]))
    ]
    for name, ns in (("idle", trace.idle_ns), ("span", trace.span_ns)):
        if ns is not None and trace.span_ns:
            lines.append(Line(name, (microseconds(ns), percent(ns / trace.span_ns), "", "", "", "")))
    lines.append(Line("sum", ("", "", microseconds(trace.sum_ns), "100.0", "", "")))
    batch = "" if trace.batch is None else f" with {calls(round(trace.batch, 1))} requests, the largest batch in it"
    what = f"means of {trace.steps:,} steps{batch}" if trace.steps else "the whole capture: it has no steps"
    found = f"{trace.ranks_found} of {trace.ranks_expected} ranks"
    return Sheet(
        title,
        f"{trace.source}, {found}, {what}, under the profiler: one window, so no interval.",
        ("category", "exposed µs", "% of span", "sum µs", "% of sum", "calls", "µs/call"),
        tuple(lines),
    )


def _operators(column: Column) -> Iterator[Sheet]:
    ranks = column.cpu.get("ranks") or []
    if not ranks:
        return
    rank = ranks[0]
    whole, steps = float(rank["total_ns"]), int(rank["decode_steps"])
    rows = sorted(rank["operators"], key=lambda row: -row["self_ns"])[:TOP_OPERATORS]
    yield Sheet(
        f"CPU operators at concurrency {column.concurrency}",
        f"torch profiler, rank {rank['rank']}: self time over the profiled window ({steps} decode steps), the "
        f"largest {len(rows)} of the {len(rank['operators'])} that it lists.",
        ("operator", "self ms", "% of CPU time", "calls", "µs/call"),
        tuple(
            Line(
                row["name"],
                (
                    f"{row['self_ns'] / 1e6:,.2f}",
                    percent(row["self_ns"] / whole) if whole else ABSENT,
                    f"{row['calls']:,}",
                    microseconds(row["self_ns"] / row["calls"]) if row["calls"] else ABSENT,
                ),
            )
            for row in rows
        ),
    )


def _bench(name: str, document: BenchDocument) -> Sheet:
    rows = document.rows[:TOP_ROWS]
    more = f", the first {TOP_ROWS} of {len(document.rows)} rows" if len(document.rows) > TOP_ROWS else ""
    remarks = "".join(f" {warning.message}" for warning in document.warnings[:3])
    return Sheet(
        f"Micro-benchmark: {name}{more}",
        f"On {document.machine.device_name}. Medians with 95 % intervals of order statistics.{remarks}",
        ("what", "path", "tokens", "median µs", "95 %", "calls", "floor µs", "x floor"),
        tuple(
            Line(
                _bench_name(row),
                (
                    row.path,
                    ABSENT if row.tokens is None else f"{row.tokens:,}",
                    microseconds(row.median_ns),
                    f"{microseconds(row.low_ns)} to {microseconds(row.high_ns)}",
                    f"{row.calls:,}",
                    ABSENT if row.floor_ns is None else microseconds(row.floor_ns),
                    ABSENT if row.ratio_to_floor is None else f"{row.ratio_to_floor:,.2f}",
                ),
            )
            for row in rows
        ),
    )


def _bench_name(row: Row) -> str:
    """What tells a row from the others of its benchmark."""
    more = [
        row.routing and f"{row.routing} routing",
        row.calls > 1 and f"{row.calls} in a row",
        row.in_graph and "graph",
    ]
    return ", ".join([row.name, *(str(each) for each in more if each)])


def facts(results: Results) -> Sequence[tuple[str, str]]:
    """What stands at the head of every report: name and text."""
    manifest = results.manifest
    versions = manifest.environment.get("versions", {})
    gpus = [gpu.get("name", "") for gpu in manifest.environment.get("gpus", [])]
    machine = f"{len(gpus)} x {gpus[0]}" if gpus else str(manifest.environment.get("cpu", ""))
    plan = manifest.plan
    found = [
        ("model", plan.model),
        ("vLLM", str(manifest.server.get("vllm", "") or versions.get("vllm", "unknown"))),
        ("measured on", machine or "unknown"),
        (
            "load",
            f"{plan.input_tokens} tokens in, {plan.output_tokens} out, {plan.requests_per_client} requests a client",
        ),
        ("client", str(manifest.server.get("client", "-"))),
        ("live breakdown", str(manifest.server.get("live_source", "-"))),
        ("begun", manifest.created),
    ]
    return [(name, text) for name, text in found if text]
