"""The report of a campaign as JSON."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from vllm_k25_instrument.campaign.answers import answers
from vllm_k25_instrument.campaign.interval import Estimate
from vllm_k25_instrument.campaign.results import Column, ComponentEstimates, Results
from vllm_k25_instrument.campaign.trace_figures import TraceFigures
from vllm_k25_instrument.campaign.window import as_json
from vllm_k25_instrument.limits.report import LimitRow
from vllm_k25_instrument.model import Category
from vllm_k25_instrument.report.breakdown import category_order

SCHEMA: Final = "vllm_k25.campaign_report/1"


def report_document(results: Results) -> dict[str, Any]:
    """The document of schema ``vllm_k25.campaign_report/1``. Times are ns, intervals are Student's, 95 %."""
    manifest = results.manifest
    return {
        "schema": SCHEMA,
        "complete": results.complete,
        "missing": results.missing,
        "not_possible": results.not_possible,
        "notes": results.notes,
        "plan": msgspec.to_builtins(manifest.plan),
        "server": manifest.server,
        "environment": manifest.environment,
        "concurrency": [_column(column) for column in results.columns],
        "micro": {name: document.to_json_dict() for name, document in results.micro.items()},
        "nsys": None if results.nsys is None else _trace(results.nsys),
        "answers": [answer.to_json_dict() for answer in answers(results)],
    }


def _column(column: Column) -> dict[str, Any]:
    return {
        "concurrency": column.concurrency,
        "reached": not column.not_reached,
        "sources": sorted({window.live.source for window in column.live if window.live is not None}),
        "tpot_ns": _estimate(column.tpot),
        "ttft_ns": _estimate(column.ttft),
        "tokens_per_second": _estimate(column.tokens_per_second),
        "batch": _estimate(column.over("batch")),
        "step_ns": _estimate(column.over("step_ns")),
        "between_steps_ns": _estimate(column.part("gap_ns")),
        "other_steps_ns": _estimate(column.part("others_ns")),
        "unsampled_steps_ns": _estimate(column.part("unsampled_ns")),
        "unexplained_ns": _estimate(column.unexplained),
        "all_reduce_wait_ns": _estimate(column.over("wait_ns")),
        "all_reduce_transfer_ns": _estimate(column.over("transfer_ns")),
        "components": {
            name: _component(one, column) | _floor(column.floors.get(name))
            for name, one in sorted(column.components().items(), key=lambda item: category_order(item[0]))
        },
        "all_reduce_paths": {name: _component(one, column) for name, one in column.paths().items()},
        "trace": None if column.trace is None else _trace(column.trace),
        "key_averages": None if column.table is None else msgspec.to_builtins(column.table),
        "cpu_operators": column.cpu or None,
        "windows": [as_json(window) for window in column.windows],
    }


def _component(one: ComponentEstimates, column: Column) -> dict[str, Any]:
    step = column.over("step_ns")
    return {
        "exposed_ns": _estimate(one.exposed),
        "share": round(one.exposed.mean / step.mean, 6) if step is not None and step.mean else None,
        "sum_ns": _estimate(one.sum),
        "calls": _estimate(one.calls),
        "ns_per_call": _estimate(one.ns_per_call),
    }


def _floor(row: LimitRow | None) -> dict[str, Any]:
    if row is None or row.floor is None:
        return {"floor_ns": None, "times_floor": None}
    return {"floor_ns": round(row.floor.ns), "times_floor": None if row.times is None else round(row.times, 3)}


def _trace(trace: TraceFigures) -> dict[str, Any]:
    largest = trace.kernels_of(Category.ALL_REDUCE)
    return {
        "source": trace.source,
        "complete": trace.complete,
        "ranks": {"found": trace.ranks_found, "expected": trace.ranks_expected},
        "steps": trace.steps,
        "batch": trace.batch,
        "sum_ns": round(trace.sum_ns),
        "span_ns": _rounded(trace.span_ns),
        "busy_ns": _rounded(trace.busy_ns),
        "overlap_ns": _rounded(trace.overlap_ns),
        "idle_ns": _rounded(trace.idle_ns),
        "period_ns": _rounded(trace.period_ns),
        "kernels_per_step": trace.kernels_per_step,
        "launches_per_step": trace.launches_per_step,
        "graph_mode": trace.graph_mode or None,
        "categories": {
            name: {
                "exposed_ns": round(one.exposed_ns),
                "sum_ns": _rounded(one.sum_ns),
                "share_of_sum": round(trace.share(name), 6),
                "calls": one.calls,
            }
            for name, one in sorted(trace.components.items(), key=lambda item: category_order(item[0]))
        },
        "all_reduce_kernels": [msgspec.to_builtins(kernel) for kernel in largest],
        "warnings": list(trace.warnings),
    }


def _estimate(estimate: Estimate | None) -> dict[str, Any] | None:
    return None if estimate is None else estimate.to_json_dict()


def _rounded(value: float | None) -> int | None:
    return None if value is None else round(value)
