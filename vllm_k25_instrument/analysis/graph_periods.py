"""The period of graph launches: how many of them make a step, where nothing says so."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import numpy as np
from numpy.typing import NDArray

from vllm_k25_instrument.analysis.capture import Capture, Int64

MAX_PERIOD: Final = 512
"""Graph launches of one step at most: piecewise graphs of a deep model, twice over."""

REPEATS_SHARE: Final = 0.9
"""The share of launches that must be like the one a period later."""


@dataclass(frozen=True, slots=True)
class Period:
    """`length` graph launches make a step; the first step begins at launch `offset`."""

    length: int
    offset: int


def find_period(capture: Capture, graphs: NDArray[np.intp]) -> Period | None:
    """The shortest period with which the work of the launches `graphs` repeats, at least three times.

    Two launches are alike when they start the same kernels in the same order. A step begins after the longest pause of
    the host between two launches.
    """
    kinds = _signatures(capture, graphs)
    if not kinds.any():  # no launch has work
        return None
    count = len(kinds)
    for length in range(1, min(MAX_PERIOD, count // 3) + 1):
        alike = np.count_nonzero(kinds[:-length] == kinds[length:])
        if alike >= REPEATS_SHARE * (count - length):
            return Period(length, _longest_pause(capture.launches.start_ns[graphs], length))
    return None


def _signatures(capture: Capture, graphs: NDArray[np.intp]) -> Int64:
    """A number for each launch, equal where the same kernels ran in the same order; 0 for no kernel at all."""
    activities = capture.activities
    of_graph = np.full(len(capture.launches), -1, np.int64)
    of_graph[graphs] = np.arange(len(graphs))
    rows = np.flatnonzero(activities.launch >= 0)
    rows = rows[of_graph[activities.launch[rows]] >= 0]
    owner = of_graph[activities.launch[rows]]
    order = np.argsort(owner, kind="stable")
    names, owner = activities.name[rows][order], owner[order]
    bounds = np.searchsorted(owner, np.arange(len(graphs) + 1))
    known: dict[bytes, int] = {b"": 0}
    return np.array(
        [known.setdefault(names[a:b].tobytes(), len(known)) for a, b in pairwise(bounds.tolist())],
        np.int64,
    )


def _longest_pause(start_ns: Int64, length: int) -> int:
    if length == 1:
        return 0
    pauses = np.diff(start_ns)
    places = (np.arange(len(pauses)) + 1) % length
    return int(np.argmax([np.median(pauses[places == place]) for place in range(length)]))
