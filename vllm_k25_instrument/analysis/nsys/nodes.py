"""From a replayed graph node to the moment at which it was made, when the ranges that name it were open.

In a replay no host code runs. But nsys notes the creation of every node, on its thread, and which node each was cloned
from when a graph was instantiated; so a replayed node leads over its originals to a moment during capture.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from vllm_k25_instrument.analysis.capture import NO_ANNOTATION, Int64
from vllm_k25_instrument.analysis.nsys.tables import UNKNOWN, NodeEvents

_LONGEST_LINEAGE: Final = 64
"""Clones of clones. A longer line is a circle, in a damaged file."""


@dataclass(frozen=True, slots=True)
class Creations:
    """Moments at which queried nodes may have been made: many per query where a graph was instantiated many times."""

    query: Int64
    thread: Int64
    start_ns: Int64


def find_creations(events: NodeEvents, node: Int64, launch_thread: Int64) -> Creations:
    """Every recorded creation of the original of each queried node. All of one process: ids are unique in a process.

    Follows all lines of originals, since an id may have been cloned more than once. Where the export does not say on
    which thread a node was made, that is the thread of the query's launch.
    """
    order = np.argsort(events.node, kind="stable").astype(np.int64)
    nodes = events.node[order]
    query, current = np.arange(len(node), dtype=np.int64), node
    queries, rows = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    for _ in range(_LONGEST_LINEAGE):
        if not len(query):
            break
        low, high = np.searchsorted(nodes, current, "left"), np.searchsorted(nodes, current, "right")
        width = high - low
        within = np.arange(int(width.sum()), dtype=np.int64) - np.repeat(np.cumsum(width) - width, width)
        query, row = np.repeat(query, width), order[np.repeat(low, width) + within]
        is_clone = events.original[row] != UNKNOWN
        queries.append(query[~is_clone])
        rows.append(row[~is_clone])
        query, current = _distinct_pairs(query[is_clone], events.original[row[is_clone]])
    found, row = np.concatenate(queries), np.concatenate(rows)
    thread = events.thread[row]
    thread = np.where(thread == UNKNOWN, launch_thread[found], thread)
    return Creations(found, thread, events.start_ns[row])


def choose(
    creations: Creations, innermost: Int64, launch_thread: Int64, launch_ns: Int64
) -> tuple[Int64, NDArray[np.bool_]]:
    """One range per query (-1: none), and whether the query's creation is known at all.

    `innermost`: the range open at each creation (-1: none). A creation on the launching thread wins over those on
    others, one inside a range over those outside, one before the launch over later ones, the latest over the earlier.
    Where none is on the launching thread and several others lay claim to the node, it is nobody's.
    """
    count = len(launch_thread)
    query = creations.query
    on_thread = creations.thread == launch_thread[query]
    has_own = np.zeros(count, np.bool_)
    has_own[query[on_thread]] = True
    foreign = ~has_own[query]
    claims, _ = _distinct_pairs(query[foreign], creations.thread[foreign])
    is_contested = np.bincount(claims, minlength=count) > 1
    rows = np.flatnonzero(np.where(has_own[query], on_thread, ~is_contested[query]))
    is_before = creations.start_ns[rows] <= launch_ns[query[rows]]
    rows = rows[np.lexsort((creations.start_ns[rows], is_before, innermost[rows] != NO_ANNOTATION, query[rows]))]
    chosen = np.full(count, NO_ANNOTATION, np.int64)
    # Assignment goes in this order, so a query's last row wins.
    chosen[query[rows]] = innermost[rows]
    is_known = np.zeros(count, np.bool_)
    is_known[query[rows]] = True
    return chosen, is_known


def _distinct_pairs(first: Int64, second: Int64) -> tuple[Int64, Int64]:
    order = np.lexsort((second, first))
    first, second = first[order], second[order]
    is_new = np.ones(len(first), np.bool_)
    is_new[1:] = (first[1:] != first[:-1]) | (second[1:] != second[:-1])
    return first[is_new], second[is_new]
