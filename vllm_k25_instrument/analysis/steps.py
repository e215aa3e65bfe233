"""Which steps a capture has, and which GPU work belongs to which: by launch correlation, never by time window.

In a decode with CUDA graphs the host is done with a step long before the GPU: its annotation lasts a millisecond, the
kernels ten, and they run while later steps are being annotated. So an activity belongs to the step in whose annotation
its launch was made, on the thread that made it. What was launched elsewhere belongs to no step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from vllm_k25_instrument.analysis.capture import NO_ANNOTATION, NO_STEP, Capture, Int32, Int64
from vllm_k25_instrument.analysis.graph_periods import find_period
from vllm_k25_instrument.analysis.step_names import StepKind, StepLabel, parse_step_name
from vllm_k25_instrument.report.caveats import Caveat, CaveatCode

MIN_PERIODS: Final = 3
"""Graph launches must repeat at least this often before their period is taken for a step."""


@dataclass(frozen=True, slots=True)
class Steps:
    """The steps of a capture, sorted by host start; one entry per step in every column but the last two.

    `annotation` indexes the capture's annotations (-1: inferred, no annotation). `start_ns` and `end_ns` are times of
    the host. `cut_off` marks those that the capture does not hold whole: they must not enter averages. `of_activity`
    and `of_launch` give the step of each activity and launch (-1: outside any step). `kind` is None without steps.
    """

    kind: StepKind | None
    annotation: Int32
    start_ns: Int64
    end_ns: Int64
    names: tuple[str, ...]
    labels: tuple[StepLabel, ...]
    cut_off: NDArray[np.bool_]
    of_activity: Int32
    of_launch: Int32
    notes: tuple[Caveat, ...] = ()

    def __len__(self) -> int:
        return len(self.labels)


def find_steps(capture: Capture) -> Steps:
    """The steps of `capture`: from annotations, else from the periodicity of graph launches, else none.

    Of several kinds of marker the one that covers the most GPU work is taken; of equals, the one that says the most.
    """
    marked = [_assign(capture, kind, rows, labels) for kind, rows, labels in _markers(capture)]
    best = max(marked, key=lambda steps: int(np.count_nonzero(steps.of_activity != NO_STEP)), default=None)
    if best is None or not (best.of_activity != NO_STEP).any():
        inferred = _infer(capture)
        if inferred is not None:
            return inferred
    if best is None or (len(capture.activities) and not (best.of_activity != NO_STEP).any()):
        return _no_steps(capture, best)
    return _cut_off_at_the_edges(capture, best)


def _markers(capture: Capture) -> Iterator[tuple[StepKind, NDArray[np.intp], list[StepLabel]]]:
    """The annotations that mark steps, by kind, in order of preference."""
    annotations = capture.annotations
    by_name = {
        int(name): label
        for name in np.unique(annotations.name).tolist()
        if (label := parse_step_name(capture.names[name])) is not None
    }
    if not by_name:
        return
    rows = np.flatnonzero(np.isin(annotations.name, np.array(list(by_name), np.int32)))
    # A copy of the annotation on a GPU row or in another process launches nothing, and is no step of its own.
    launching = np.isin(annotations.thread[rows], np.unique(capture.launches.thread))
    if launching.any():
        rows = rows[launching]
    kinds = {kind: [row for row in rows if by_name[int(annotations.name[row])].kind is kind] for kind in StepKind}
    for kind, those in kinds.items():
        if those:
            yield kind, np.array(those, np.intp), [by_name[int(annotations.name[row])] for row in those]


def _assign(capture: Capture, kind: StepKind, rows: NDArray[np.intp], labels: Sequence[StepLabel]) -> Steps:
    annotations, launches = capture.annotations, capture.launches
    start = annotations.start_ns[rows]
    end = start + annotations.duration_ns[rows]
    thread = annotations.thread[rows]
    of_launch = np.full(len(launches), NO_STEP, np.int32)
    for one in np.unique(thread).tolist():
        steps = np.flatnonzero(thread == one)
        those = np.flatnonzero(launches.thread == one)
        inside = innermost(start[steps], end[steps], launches.start_ns[those])
        of_launch[those] = np.where(inside >= 0, steps[inside], NO_STEP)
    return Steps(
        kind=kind,
        annotation=rows.astype(np.int32),
        start_ns=start,
        end_ns=end,
        names=tuple(capture.names[name] for name in annotations.name[rows].tolist()),
        labels=tuple(labels),
        cut_off=np.zeros(len(rows), np.bool_),
        of_activity=_of_activity(capture, of_launch),
        of_launch=of_launch,
    )


def _of_activity(capture: Capture, of_launch: Int32) -> Int32:
    launch = capture.activities.launch
    if not len(of_launch):
        return np.full(len(launch), NO_STEP, np.int32)
    return np.where(launch >= 0, of_launch[launch], NO_STEP).astype(np.int32)


def innermost(start_ns: Int64, end_ns: Int64, instant_ns: Int64) -> Int64:
    """Index of the innermost of the ranges of one thread that is open at each instant; -1 where none is.

    The ranges are sorted by start. They are half-open, nest, and are never many deep.
    """
    parent = np.full(len(start_ns), -1, np.int64)
    stack: list[int] = []
    for index, (start, end) in enumerate(zip(start_ns.tolist(), end_ns.tolist(), strict=True)):
        while stack and end_ns[stack[-1]] <= start:
            stack.pop()
        if stack:
            parent[index] = stack[-1]
        if end > start:
            stack.append(index)
    at = np.searchsorted(start_ns, instant_ns, side="right") - 1
    while True:
        beyond = (at >= 0) & (instant_ns >= end_ns[at]) if len(end_ns) else np.zeros(len(at), np.bool_)
        if not beyond.any():
            return at
        at = np.where(beyond, parent[at], at)


def _cut_off_at_the_edges(capture: Capture, steps: Steps) -> Steps:
    """Mark the steps that the capture does not hold whole.

    In a truncated file: the last step that has GPU work, and every step with a launch whose work is not there. In a
    whole one: the first and the last step, where it has more such launches than any step between has, or where its
    annotation was still open at the end.
    """
    busy = np.bincount(steps.of_activity[steps.of_activity >= 0], minlength=len(steps)) > 0
    lacking = _launches_without_work(capture, steps)
    cut_off = np.zeros(len(steps), np.bool_)
    with_work = np.flatnonzero(busy)
    if not capture.complete:
        cut_off |= lacking > 0
        if len(with_work):
            cut_off[with_work[-1] :] = True
    else:
        launching = np.flatnonzero(busy | (lacking > 0))
        if len(launching) > 1:
            between = lacking[launching[1:-1]]
            usual = int(between.max()) if len(between) else 0
            edges = launching[[0, -1]]
            cut_off[edges] = lacking[edges] > usual
        cut_off |= _never_closed(capture, steps)
    count = int(np.count_nonzero(cut_off))
    if not count:
        return steps
    note = Caveat(
        CaveatCode.STEPS_CUT_OFF,
        f"{capture.path}: {count} of {len(steps)} steps {'is' if count == 1 else 'are'} cut off at the edge of the "
        "capture, and left out of the averages",
        count,
    )
    return replace(steps, cut_off=cut_off, notes=(*steps.notes, note))


def _never_closed(capture: Capture, steps: Steps) -> NDArray[np.bool_]:
    """Steps whose annotation was still open at the end, where a reader closes it, and those that hold other steps."""
    thread = capture.annotations.thread[steps.annotation]
    never = np.zeros(len(steps), np.bool_)
    for one in np.unique(thread).tolist():
        rows = np.flatnonzero(thread == one)
        begins, ends = steps.start_ns[rows], steps.end_ns[rows]
        never[rows] = np.searchsorted(begins, ends, side="left") - 1 > np.arange(len(rows))
    if capture.annotations.is_open is not None:
        never |= capture.annotations.is_open[steps.annotation]
    return never


def _launches_without_work(capture: Capture, steps: Steps) -> Int64:
    """How many launches of each step have no GPU work in the capture."""
    launches = len(capture.launches)
    with_work = np.zeros(launches, np.bool_)
    with_work[capture.activities.launch[capture.activities.launch >= 0]] = True
    lacking = steps.of_launch[(steps.of_launch >= 0) & ~with_work]
    return np.bincount(lacking, minlength=len(steps)).astype(np.int64)


def _infer(capture: Capture) -> Steps | None:
    """Steps from graph launches that repeat: from the first launch of a period to the first one of the next.

    The last period has no end, and is cut off.
    """
    launches = capture.launches
    graphs = np.flatnonzero(launches.is_graph)
    if len(graphs) < MIN_PERIODS:
        return None
    threads, counts = np.unique(launches.thread[graphs], return_counts=True)
    thread = int(threads[np.argmax(counts)])
    graphs = graphs[launches.thread[graphs] == thread]
    period = find_period(capture, graphs)
    if period is None:
        return None
    first = graphs[period.offset :: period.length]
    begins = launches.start_ns[first]
    ends = np.append(begins[1:], launches.start_ns[launches.thread == thread].max() + 1)
    of_launch = np.full(len(launches), NO_STEP, np.int32)
    those = np.flatnonzero(launches.thread == thread)
    of_launch[those] = np.searchsorted(begins, launches.start_ns[those], side="right") - 1
    cut_off = np.zeros(len(first), np.bool_)
    cut_off[-1] = True
    label = StepLabel(StepKind.GRAPH_LAUNCHES)
    graphs_text = "graph launch" if period.length == 1 else f"{period.length} graph launches"
    return Steps(
        kind=StepKind.GRAPH_LAUNCHES,
        annotation=np.full(len(first), NO_ANNOTATION, np.int32),
        start_ns=begins,
        end_ns=ends,
        names=tuple(f"graph period {n + 1}" for n in range(len(first))),
        labels=(label,) * len(first),
        cut_off=cut_off,
        of_activity=_of_activity(capture, of_launch),
        of_launch=of_launch,
        notes=(
            Caveat(
                CaveatCode.STEPS_INFERRED,
                f"{capture.path}: no step is annotated; steps are inferred, one for every {graphs_text} of a pattern "
                "that repeats, so what a step begins and ends with is a guess, and its phase and batch are unknown",
                len(first),
            ),
            Caveat(
                CaveatCode.STEPS_CUT_OFF,
                f"{capture.path}: the last of {len(first)} inferred steps has no end, and is left out of the averages",
                1,
            ),
        ),
    )


def _no_steps(capture: Capture, marked: Steps | None) -> Steps:
    if marked is None:
        why = "no annotation marks a step, and no pattern of graph launches repeats"
    else:
        why = f"{len(marked)} steps are annotated, but no GPU work was launched inside them on their thread"
    nothing = np.zeros(0, np.int64)
    note = Caveat(
        CaveatCode.NO_STEPS,
        f"{capture.path}: no steps found ({why}): only totals of the whole capture are given; capture with vLLM's step "
        "annotations, or with K25_INSTRUMENT=1",
    )
    return Steps(
        kind=None,
        annotation=np.zeros(0, np.int32),
        start_ns=nothing,
        end_ns=nothing,
        names=(),
        labels=(),
        cut_off=np.zeros(0, np.bool_),
        of_activity=np.full(len(capture.activities), NO_STEP, np.int32),
        of_launch=np.full(len(capture.launches), NO_STEP, np.int32),
        notes=(note,) if len(capture.activities) else (),  # without GPU work there is something else to say
    )
