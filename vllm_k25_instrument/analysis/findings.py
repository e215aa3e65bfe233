"""A capture reduced to what a report needs: a few kilobytes in place of a million rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from vllm_k25_instrument.analysis.capture import NO_STEP, Activities, ActivityKind, Capture, Int8, Int32, Int64
from vllm_k25_instrument.analysis.categories import Categories, categorise
from vllm_k25_instrument.analysis.classify import Classifier
from vllm_k25_instrument.analysis.exposure import CATEGORIES, CATEGORY_CODE, Exposure, expose
from vllm_k25_instrument.analysis.steps import Steps, find_steps
from vllm_k25_instrument.analysis.timeline import draw_step
from vllm_k25_instrument.model import Category, GraphMode
from vllm_k25_instrument.report.caveats import Caveat
from vllm_k25_instrument.report.gpu import (
    CategoryTotal,
    GpuTotals,
    KernelTotal,
    RankFindings,
    StepCounts,
    StepRecord,
)

MAX_KERNELS: Final = 400
"""Kernel names kept of a capture, largest first: real ones have a hundred, damaged ones have no bound."""

_ALL_REDUCE: Final = CATEGORY_CODE[Category.ALL_REDUCE]

# One column more than there are categories: what has none (an opaque graph) is counted there and shown nowhere.
_COLUMNS: Final = len(CATEGORIES) + 1


@dataclass(frozen=True, slots=True)
class StepRange:
    """The steps asked for, by place, counted from 1, both ends included."""

    first: int
    last: int

    def __contains__(self, place: object) -> bool:
        return isinstance(place, int) and self.first <= place <= self.last


@dataclass(frozen=True, slots=True)
class Reduced:
    """The findings of one capture, and all that has to be said of it."""

    findings: RankFindings
    notes: tuple[Caveat, ...]
    complete: bool = True


def reduce_capture(capture: Capture, classifier: Classifier, only: StepRange | None = None) -> Reduced:
    """The findings of `capture`. With `only`, of these steps alone: everything else is as if it were not there."""
    steps = find_steps(capture)
    categories = categorise(capture, classifier)
    activities, of_step, of_launch = capture.activities, steps.of_activity, steps.of_launch
    places = np.arange(1, len(steps) + 1)
    if only is not None:
        wanted = (places >= only.first) & (places <= only.last)
        kept = np.flatnonzero((of_step != NO_STEP) & np.append(wanted, False)[of_step])
        activities, of_step = _rows(activities, kept), of_step[kept]
        categories = replace(categories, code=categories.code[kept], rule=categories.rule[kept])
        of_launch = np.where((of_launch != NO_STEP) & np.append(wanted, False)[of_launch], of_launch, NO_STEP)
        of_launch = of_launch.astype(np.int32)
        places = places[wanted]
    whole = expose(activities.start_ns, activities.duration_ns, categories.code, activities.stream)
    streams, stream_index = np.unique(activities.stream, return_inverse=True)
    per_stream = expose(
        activities.start_ns,
        activities.duration_ns,
        categories.code,
        activities.stream,
        stream_index.reshape(-1).astype(np.int32),
        max(len(streams), 1),
    )
    launched = np.ones(len(of_launch), np.bool_) if only is None else of_launch != NO_STEP
    totals = _totals(activities, categories.code, whole, of_step)
    totals = replace(
        totals,
        same_stream_overlap_ns=int(per_stream.overlap_ns.sum()),
        launches=int(np.count_nonzero(launched)),
        launch_ns=int(capture.launches.duration_ns[launched].sum()),
    )
    records = _step_records(capture, activities, categories, steps, of_step, of_launch, places.tolist())
    outside = of_step == NO_STEP
    findings = RankFindings(
        rank=capture.rank,
        path=str(capture.path),
        totals=totals,
        device=capture.device,
        world_size=capture.world_size,
        clock_base_ns=capture.clock_base_ns,
        step_counts=StepCounts(
            found=len(records),
            averaged=sum(record.averaged for record in records),
            cut_off=sum(record.cut_off for record in records),
            without_work=sum(not record.cut_off and not record.span_ns for record in records),
            marker="" if steps.kind is None else str(steps.kind),
        ),
        steps=records,
        kernels=_kernels(capture, activities, categories),
        outside=_by_category(categories.code[outside], activities.duration_ns[outside], whole.exposed_ns[outside]),
        streams=len(streams),
        timeline=draw_step(capture, activities, categories.code, of_step, records),
    )
    return Reduced(findings, (*capture.notes, *steps.notes), capture.complete)


def _rows(activities: Activities, kept: NDArray[np.intp]) -> Activities:
    return Activities(
        start_ns=activities.start_ns[kept],
        duration_ns=activities.duration_ns[kept],
        kind=activities.kind[kept],
        name=activities.name[kept],
        stream=activities.stream[kept],
        launch=activities.launch[kept],
        annotation=activities.annotation[kept],
        bytes=activities.bytes[kept],
    )


def _by_category(code: Int8, duration_ns: Int64, exposed_ns: Int64) -> dict[str, CategoryTotal]:
    (table,) = _tables(np.zeros(len(code), np.int32), 1, code, duration_ns, exposed_ns)
    return table


def _tables(
    group: Int32, groups: int, code: Int8, duration_ns: Int64, exposed_ns: Int64
) -> list[dict[str, CategoryTotal]]:
    """The categories of each group, in the order of the closed set; those without a row are absent."""
    shape = (groups, _COLUMNS)
    count, sums, exposed = (np.zeros(shape, np.int64) for _ in range(3))
    at = (group, code)  # code -1 is the last column
    np.add.at(count, at, 1)
    np.add.at(sums, at, duration_ns)
    np.add.at(exposed, at, exposed_ns)
    tables: list[dict[str, CategoryTotal]] = [{} for _ in range(groups)]
    for row, column in np.argwhere(count[:, :-1]).tolist():
        tables[row][str(CATEGORIES[column])] = CategoryTotal(
            int(count[row, column]), int(sums[row, column]), int(exposed[row, column])
        )
    return tables


def _totals(activities: Activities, code: Int8, whole: Exposure, of_step: Int32) -> GpuTotals:
    counts, sums = {}, {}
    for kind in ActivityKind:
        rows = activities.kind == kind
        counts[kind] = int(np.count_nonzero(rows))
        sums[kind] = int(activities.duration_ns[rows].sum())
    in_steps = (of_step != NO_STEP) & (activities.kind == ActivityKind.KERNEL)
    opaque = counts[ActivityKind.GRAPH] > 0
    return GpuTotals(
        kernels=counts[ActivityKind.KERNEL],
        kernel_ns=sums[ActivityKind.KERNEL],
        memcpys=counts[ActivityKind.MEMCPY],
        memcpy_ns=sums[ActivityKind.MEMCPY],
        memsets=counts[ActivityKind.MEMSET],
        memset_ns=sums[ActivityKind.MEMSET],
        graphs=counts[ActivityKind.GRAPH],
        graph_ns=sums[ActivityKind.GRAPH],
        kernels_in_steps=int(np.count_nonzero(in_steps)),
        span_ns=int(whole.span_ns[0]),
        busy_ns=int(whole.busy_ns[0]),
        # What is inside an opaque graph is not known, so neither is how much there is of any category.
        by_category=None if opaque else _by_category(code, activities.duration_ns, whole.exposed_ns),
    )


def _step_records(
    capture: Capture,
    activities: Activities,
    categories: Categories,
    steps: Steps,
    of_step: Int32,
    of_launch: Int32,
    places: list[int],
) -> tuple[StepRecord, ...]:
    count = len(steps)
    if not count:
        return ()
    rows = np.flatnonzero(of_step != NO_STEP)
    group, code = of_step[rows], categories.code[rows]
    duration, kind = activities.duration_ns[rows], activities.kind[rows]
    of_steps = expose(activities.start_ns[rows], duration, code, activities.stream[rows], group, count)
    tables = _tables(group, count, code, duration, of_steps.exposed_ns)
    if (activities.kind == ActivityKind.GRAPH).any():  # what is inside opaque graphs is not known
        tables = [{}] * count
    kernels = np.bincount(group[kind == ActivityKind.KERNEL], minlength=count)
    copies = np.zeros(count, np.int64)
    is_copy = (kind == ActivityKind.MEMCPY) | (kind == ActivityKind.MEMSET)
    np.add.at(copies, group[is_copy], duration[is_copy])
    inside = np.flatnonzero(of_launch != NO_STEP)
    launches = np.bincount(of_launch[inside], minlength=count)
    launch_ns = np.zeros(count, np.int64)
    np.add.at(launch_ns, of_launch[inside], capture.launches.duration_ns[inside])
    graph_modes = _graph_modes(capture, activities, steps, of_step, of_launch)
    all_reduces = _all_reduces(activities, code, rows, group, count)
    periods = _periods(of_steps)
    return tuple(
        StepRecord(
            rank=capture.rank,
            place=place,
            name=steps.names[n],
            phase=steps.labels[n].phase,
            requests=steps.labels[n].requests,
            number=steps.labels[n].number,
            graph_mode=graph_modes[n],
            start_ns=int(of_steps.start_ns[n]),
            span_ns=int(of_steps.span_ns[n]),
            sum_ns=int(of_steps.sum_ns[n]),
            busy_ns=int(of_steps.busy_ns[n]),
            kernels=int(kernels[n]),
            launches=int(launches[n]),
            launch_ns=int(launch_ns[n]),
            cut_off=bool(steps.cut_off[n]),
            categories=tables[n],
            all_reduce_ns=all_reduces[n],
            period_ns=periods.get(n),
            copies_ns=int(copies[n]),
        )
        for place in places
        for n in (place - 1,)
    )


def _periods(of_steps: Exposure) -> Mapping[int, int]:
    """From each step's first GPU work to the next step's, for the steps that have some and are followed by one."""
    working = np.flatnonzero(of_steps.span_ns > 0)
    order = working[np.argsort(of_steps.start_ns[working], kind="stable")]
    return dict(zip(order[:-1].tolist(), np.diff(of_steps.start_ns[order]).tolist(), strict=True))


def _all_reduces(
    activities: Activities, code: Int8, rows: NDArray[np.intp], group: Int32, steps: int
) -> list[tuple[int, ...]]:
    """The durations of the all-reduces of each step, in the order of their starts (activities are sorted by start)."""
    of_steps: list[list[int]] = [[] for _ in range(steps)]
    those = np.flatnonzero(code == _ALL_REDUCE)
    for step, duration in zip(group[those].tolist(), activities.duration_ns[rows[those]].tolist(), strict=True):
        of_steps[step].append(duration)
    return [tuple(durations) for durations in of_steps]


def _graph_modes(
    capture: Capture, activities: Activities, steps: Steps, of_step: Int32, of_launch: Int32
) -> list[GraphMode]:
    """How the graphs of each step were dispatched: what its marker says, else what its launches look like.

    No graph launch: eager. One graph that holds more than half of the step's kernels: full. Else piecewise.
    """
    count = len(steps)
    is_graph = capture.launches.is_graph
    graphs = np.bincount(of_launch[(of_launch != NO_STEP) & is_graph], minlength=count)
    launch = activities.launch
    kernels = (of_step != NO_STEP) & (launch >= 0) & (activities.kind != ActivityKind.MEMCPY)
    kernels &= activities.kind != ActivityKind.MEMSET
    per_step = np.bincount(of_step[kernels], minlength=count)
    from_graph = kernels & np.append(is_graph, False)[launch]
    largest = np.zeros(count, np.int64)
    if from_graph.any():
        launches, sizes = np.unique(launch[from_graph], return_counts=True)
        np.maximum.at(largest, of_launch[launches], sizes)
    modes = []
    for n, label in enumerate(steps.labels):
        if label.graph_mode is not None:
            modes.append(label.graph_mode)
        elif not graphs[n]:
            modes.append(GraphMode.NONE)
        else:
            full = graphs[n] == 1 or 2 * largest[n] > per_step[n]
            modes.append(GraphMode.FULL if full else GraphMode.PIECEWISE)
    return modes


def _kernels(capture: Capture, activities: Activities, categories: Categories) -> tuple[KernelTotal, ...]:
    """Kernels by name and category, largest first, ``MAX_KERNELS`` at most."""
    rows = np.flatnonzero(activities.kind == ActivityKind.KERNEL)
    keys = activities.name[rows].astype(np.int64) * len(CATEGORIES) + categories.code[rows]
    distinct, first, inverse, counts = np.unique(keys, return_index=True, return_inverse=True, return_counts=True)
    sums = np.zeros(len(distinct), np.int64)
    np.add.at(sums, inverse.reshape(-1), activities.duration_ns[rows])
    largest = np.lexsort((distinct, -sums))[:MAX_KERNELS]
    return tuple(
        KernelTotal(
            name=capture.names[int(activities.name[rows[first[n]]])],
            category=str(CATEGORIES[int(categories.code[rows[first[n]]])]),
            rule=categories.rules[int(categories.rule[rows[first[n]]])],
            count=int(counts[n]),
            sum_ns=int(sums[n]),
        )
        for n in largest.tolist()
    )
