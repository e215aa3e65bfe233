"""One step of a capture as a picture: a lane per stream, and in it what ran when."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from vllm_k25_instrument.analysis.capture import Activities, Capture, Int8, Int32
from vllm_k25_instrument.analysis.exposure import CATEGORIES
from vllm_k25_instrument.model import Phase
from vllm_k25_instrument.report.gpu import StepRecord, Timeline, TimelineBar

RESOLUTION: Final = 1600
"""Bars of a lane that are closer than the step's span over this, and of one category, are drawn as one."""

MAX_LANES: Final = 12


def representative(steps: Sequence[StepRecord]) -> StepRecord | None:
    """The step of median span among those of the largest group, decode before others; None where none counts."""
    groups: dict[tuple[object, ...], list[StepRecord]] = {}
    for step in steps:
        if step.averaged:
            groups.setdefault(tuple(step.group), []).append(step)
    if not groups:
        return None
    those = max(groups.values(), key=lambda group: (group[0].phase is Phase.DECODE, len(group)))
    return sorted(those, key=lambda step: (step.span_ns, step.place))[(len(those) - 1) // 2]


def draw_step(
    capture: Capture, activities: Activities, code: Int8, of_step: Int32, steps: Sequence[StepRecord]
) -> Timeline | None:
    """The timeline of the representative step; the busiest streams, ``MAX_LANES`` at most."""
    step = representative(steps)
    if step is None:
        return None
    rows = np.flatnonzero(of_step == step.place - 1)
    streams, totals = np.unique(activities.stream[rows], return_inverse=True)
    busy = np.zeros(len(streams), np.int64)
    np.add.at(busy, totals.reshape(-1), activities.duration_ns[rows])
    shown = streams[np.sort(np.argsort(-busy, kind="stable")[:MAX_LANES])]
    lanes = tuple(
        (f"stream {stream}", tuple(_bars(capture, activities, code, rows[activities.stream[rows] == stream], step)))
        for stream in shown.tolist()
    )
    return Timeline(step.rank, step.place, step.name, step.span_ns, lanes)


def _bars(
    capture: Capture,
    activities: Activities,
    code: Int8,
    rows: NDArray[np.intp],
    step: StepRecord,
) -> Iterator[TimelineBar]:
    near = step.span_ns // RESOLUTION
    open_bar: TimelineBar | None = None
    for row in rows.tolist():
        start = int(activities.start_ns[row]) - step.start_ns
        duration = int(activities.duration_ns[row])
        category = str(CATEGORIES[code[row]]) if code[row] >= 0 else ""
        name = capture.names[int(activities.name[row])]
        if open_bar is not None:
            end = open_bar.start_ns + open_bar.duration_ns
            if category == open_bar.category and start - end <= near:
                reach = max(end, start + duration) - open_bar.start_ns
                same = open_bar.name if open_bar.name == name else ""
                open_bar = TimelineBar(open_bar.start_ns, reach, category, open_bar.kernels + 1, same)
                continue
            yield open_bar
        open_bar = TimelineBar(start, duration, category, 1, name)
    if open_bar is not None:
        yield open_bar
