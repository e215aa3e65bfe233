"""The figures of a trace or an nsys export, from the breakdown that `vllm-k25 analyze` makes of it. Times in ns."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, median
from typing import Any

from vllm_k25_instrument.campaign.errors import CampaignError
from vllm_k25_instrument.campaign.window import FULL, Component
from vllm_k25_instrument.report.breakdown import SCHEMA


@dataclass(frozen=True, slots=True)
class Kernel:
    """All calls of the kernels of one name in the capture."""

    name: str
    category: str
    count: int
    sum_ns: int

    @property
    def ns_per_call(self) -> float:
        """Mean duration."""
        return self.sum_ns / self.count if self.count else 0.0


@dataclass(frozen=True, slots=True)
class TraceFigures:
    """Decode steps at full batch, means per step over steps and ranks. `steps` 0: the capture has none, shares only.

    `components` is by category: per step, or of the whole capture where there are no steps.
    """

    source: str
    complete: bool
    ranks_found: int
    ranks_expected: int
    steps: int
    sum_ns: float
    components: Mapping[str, Component]
    kernels: Sequence[Kernel]
    span_ns: float | None = None
    busy_ns: float | None = None
    period_ns: float | None = None
    kernels_per_step: float | None = None
    launches_per_step: float | None = None
    launch_ns: float | None = None
    graph_mode: str = ""
    batch: float | None = None
    explanation: Sequence[str] = field(default_factory=tuple)
    warnings: Sequence[str] = field(default_factory=tuple)

    @property
    def overlap_ns(self) -> float | None:
        """How much of the sum ran at the same time as something else."""
        return None if self.busy_ns is None else self.sum_ns - self.busy_ns

    @property
    def idle_ns(self) -> float | None:
        """How long nothing ran."""
        return None if self.busy_ns is None or self.span_ns is None else self.span_ns - self.busy_ns

    def share(self, category: str) -> float:
        """A category's share of the sum of all kernels, copies and fills."""
        component = self.components.get(category)
        return (component.sum_ns or 0.0) / self.sum_ns if component is not None and self.sum_ns else 0.0

    def kernels_of(self, category: str) -> list[Kernel]:
        """Its kernels, largest first."""
        return sorted((k for k in self.kernels if k.category == category), key=lambda kernel: -kernel.sum_ns)


def read_document(path: Path) -> dict[str, Any] | None:
    """The JSON in a file, None where there is none. Raises CampaignError where it is damaged."""
    try:
        document = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise CampaignError(f"{path}: cannot be read: {error}") from error
    if not isinstance(document, dict):
        raise CampaignError(f"{path}: not a JSON object")
    return document


def read_trace_figures(path: Path) -> TraceFigures | None:
    """The figures of a breakdown in a file; None where there is no file, or no GPU work in it. Raises CampaignError."""
    document = read_document(path)
    if document is None:
        return None
    try:
        if document["schema"] != SCHEMA:
            raise CampaignError(f"{path}: schema {document['schema']!r:.40} instead of {SCHEMA}")
        return _figures(document)
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise CampaignError(f"{path}: not a valid breakdown ({type(error).__name__}: {error})") from error


def _figures(document: Mapping[str, Any]) -> TraceFigures | None:
    totals = document.get("totals")
    if not totals:
        return None
    steps = _full(document["steps"])
    kernels = tuple(Kernel(k["name"], k["category"], k["count"], k["sum_ns"]) for k in document["kernels"])
    common: dict[str, Any] = {
        "source": document["source"],
        "complete": document["complete"] is True,
        "ranks_found": len(document["ranks"]["found"]),
        "ranks_expected": document["ranks"]["expected"],
        "kernels": kernels,
        "explanation": tuple(document.get("explanation", ())),
        "warnings": tuple(warning["message"] for warning in document["warnings"]),
    }
    if not steps:
        return TraceFigures(
            steps=0,
            sum_ns=float(totals["sum_ns"]),
            components={
                name: Component(float(total["exposed_ns"] or 0), float(total["sum_ns"]), float(total["count"]))
                for name, total in totals["by_category"].items()
            },
            **common,
        )
    names = sorted({name for step in steps for name in step["by_category"]})
    launches = sum(step["launches"] for step in steps)
    periods = [step["period_ns"] for step in steps if step["period_ns"]]
    modes = [str(step["graph_mode"]) for step in steps]
    return TraceFigures(
        steps=len(steps),
        sum_ns=fmean(step["sum_ns"] for step in steps),
        components={name: _component(steps, name) for name in names},
        span_ns=fmean(step["span_ns"] for step in steps),
        busy_ns=fmean(step["busy_ns"] for step in steps),
        period_ns=median(periods) if periods else None,
        kernels_per_step=fmean(step["kernels"] for step in steps),
        launches_per_step=launches / len(steps),
        launch_ns=sum(step["launch_ns"] for step in steps) / launches if launches else None,
        graph_mode=max(set(modes), key=modes.count),
        batch=fmean(step["requests"] for step in steps) if all(step["requests"] for step in steps) else None,
        **common,
    )


def _full(steps: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Averaged decode steps with at least :data:`FULL` of the largest batch; of unknown phases all steps."""
    averaged = [step for step in steps if step["averaged"]]
    decode = [step for step in averaged if step["phase"] == "decode"] or [
        step for step in averaged if step["phase"] is None
    ]
    largest = max((step["requests"] or 0 for step in decode), default=0)
    return [step for step in decode if (step["requests"] or 0) >= FULL * largest]


def _component(steps: Sequence[Mapping[str, Any]], name: str) -> Component:
    n = len(steps)
    there = [step["by_category"][name] for step in steps if name in step["by_category"]]
    return Component(
        sum(total["exposed_ns"] or 0 for total in there) / n,
        sum(total["sum_ns"] for total in there) / n,
        sum(total["count"] for total in there) / n,
    )


@dataclass(frozen=True, slots=True)
class TableFigures:
    """What a key_averages table adds up to, per rank: its kernels, and the rows that repeat their time."""

    sum_ns: float
    repeated_ns: float
    repeated_rows: int
    ranks: int
    all_reduce_ns: float
    cast_ns: float


def read_table_figures(path: Path) -> TableFigures | None:
    """The figures of ``tables.json``, means over the ranks; None where there is none. Raises CampaignError."""
    document = read_document(path)
    if document is None:
        return None
    try:
        ranks = document["repeated"]
        categories = (document.get("totals") or {}).get("by_category", {})
        count = len(ranks)
        if not count:
            return None
        return TableFigures(
            sum_ns=fmean(rank["sum_ns"] for rank in ranks),
            repeated_ns=fmean(rank["ns"] for rank in ranks),
            repeated_rows=max(rank["rows"] for rank in ranks),
            ranks=count,
            all_reduce_ns=categories.get("all_reduce", {}).get("sum_ns", 0) / count,
            cast_ns=categories.get("cast_quant", {}).get("sum_ns", 0) / count,
        )
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise CampaignError(f"{path}: not the analysis of tables ({type(error).__name__}: {error})") from error
