"""One process of an export: its work joined to the calls that launched it and to the ranges that name it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vllm_k25_instrument.analysis.capture import NO_ANNOTATION, ActivityKind, Int64
from vllm_k25_instrument.analysis.nsys.nodes import choose, find_creations
from vllm_k25_instrument.analysis.nsys.ranges import nest
from vllm_k25_instrument.analysis.nsys.tables import UNKNOWN, Calls, HostRanges, NodeEvents, Work

NO_LAUNCH = -1


@dataclass(frozen=True, slots=True)
class Process:
    """The joined tables of a process. `launch` and `annotation` are per row of `work`, `parent` per row of `ranges`.

    `work` has no impossible times; those are in `bad`. `calls` are those that launch something, sorted by start;
    `ranges` are sorted by start, the longer first. `unmapped`: replayed work whose node's creation was not found.
    """

    work: Work
    launch: Int64
    annotation: Int64
    unmapped: NDArray[np.bool_]
    calls: Calls
    ranges: HostRanges
    parent: Int64
    bad: Work
    opaque_twice: Int64
    """Devices of graph rows left out because their kernels are there as well."""


def join(work: Work, calls: Calls, ranges: HostRanges, events: NodeEvents, end_ns: int) -> Process:
    """Join the tables of one process. `end_ns`: the end of the capture, where open ranges are closed."""
    is_bad = work.bad_time == 1
    bad, work = work.only(is_bad), work.only(~is_bad)
    work, opaque_twice = _without_doubles(work)
    calls = calls.only(np.argsort(calls.start_ns, kind="stable"))
    launch = _launch_of(work, calls)
    used = calls.is_launch == 1
    used[launch[launch != NO_LAUNCH]] = True
    renumbered = np.cumsum(used) - 1
    launch = np.where(launch == NO_LAUNCH, NO_LAUNCH, renumbered[launch]) if len(calls) else launch
    calls = calls.only(used)
    is_open = ranges.is_open == 1
    ranges = HostRanges(
        ranges.start_ns,
        np.where(is_open, np.maximum(ranges.start_ns, end_ns), ranges.end_ns),
        ranges.thread,
        ranges.process,
        ranges.name,
        ranges.is_open,
    )
    ranges = ranges.only(np.lexsort((-ranges.end_ns, ranges.start_ns)))
    parent, annotation, unmapped = _annotate(work, launch, calls, ranges, events)
    return Process(work, launch, annotation, unmapped, calls, ranges, parent, bad, opaque_twice)


def _without_doubles(work: Work) -> tuple[Work, Int64]:
    """Where a launch has both kernels and a row for its whole graph, the kernels stay."""
    is_graph = work.kind == ActivityKind.GRAPH
    if not is_graph.any():
        return work, np.zeros(0, np.int64)
    told = np.unique(work.correlation[~is_graph & (work.node != UNKNOWN) & (work.correlation != UNKNOWN)])
    twice = is_graph & np.isin(work.correlation, told)
    return work.only(~twice), work.device[twice]


def _launch_of(work: Work, calls: Calls) -> Int64:
    """The call of each row's correlation. Several calls may bear one id; a launch wins over others, then the first."""
    order = np.lexsort((1 - calls.is_launch, calls.correlation)).astype(np.int64)
    order = order[calls.correlation[order] != UNKNOWN]
    keys, first = np.unique(calls.correlation[order], return_index=True)
    if not len(keys):
        return np.full(len(work), NO_LAUNCH, np.int64)
    at = np.minimum(np.searchsorted(keys, work.correlation), len(keys) - 1)
    return np.where(keys[at] == work.correlation, order[first[at]], NO_LAUNCH)


def _annotate(
    work: Work, launch: Int64, calls: Calls, ranges: HostRanges, events: NodeEvents
) -> tuple[Int64, Int64, NDArray[np.bool_]]:
    """Parents of ranges; the range of each row of work; and which rows are of a node whose making is not recorded.

    A range that was never closed names no work: where a pop was lost, everything later would be its. Replayed work
    belongs to the range open when its node was made; all other work, and replayed work without such a range, to the one
    open at its launch.
    """
    closed = np.flatnonzero(ranges.is_open == 0)
    still_open = np.flatnonzero(ranges.is_open == 1)
    has_launch = launch != NO_LAUNCH
    launch_thread = np.full(len(work), UNKNOWN, np.int64)
    launch_thread[has_launch] = calls.thread[launch[has_launch]]
    launch_ns = work.start_ns.copy()
    launch_ns[has_launch] = calls.start_ns[launch[has_launch]]

    replayed = np.flatnonzero(work.node != UNKNOWN)
    pairs = np.stack([work.node[replayed], launch_thread[replayed]], axis=1)
    queries, query_of = _distinct(pairs)
    first_launch = np.full(len(queries), np.iinfo(np.int64).max, np.int64)
    np.minimum.at(first_launch, query_of, launch_ns[replayed])
    creations = find_creations(events, queries[:, 0], queries[:, 1])

    parent_of_closed, innermost = nest(
        ranges.thread[closed],
        ranges.start_ns[closed],
        ranges.end_ns[closed],
        np.concatenate([calls.thread, creations.thread, ranges.thread[still_open]]),
        np.concatenate([calls.start_ns, creations.start_ns, ranges.start_ns[still_open]]),
    )
    parent_of_closed, innermost = _through(closed, parent_of_closed), _through(closed, innermost)
    at_launch, at_creation, around_open = np.split(innermost, np.cumsum([len(calls), len(creations.query)]))
    parent = np.full(len(ranges), NO_ANNOTATION, np.int64)
    parent[closed], parent[still_open] = parent_of_closed, around_open

    annotation = np.full(len(work), NO_ANNOTATION, np.int64)
    annotation[has_launch] = at_launch[launch[has_launch]]
    of_query, is_known = choose(creations, at_creation, queries[:, 1], first_launch)
    by_node = of_query[query_of]
    annotation[replayed] = np.where(by_node == NO_ANNOTATION, annotation[replayed], by_node)
    unmapped = np.zeros(len(work), np.bool_)
    unmapped[replayed] = ~is_known[query_of]
    return parent, annotation, unmapped


def _distinct(pairs: Int64) -> tuple[Int64, Int64]:
    """Distinct rows of two columns, and the distinct row of each. Sorting two columns beats sorting rows as bytes."""
    if not len(pairs):
        return np.zeros((0, 2), np.int64), np.zeros(0, np.int64)
    order = np.lexsort((pairs[:, 1], pairs[:, 0]))
    ordered = pairs[order]
    is_new = np.concatenate([[True], (ordered[1:] != ordered[:-1]).any(axis=1)])
    number = np.empty(len(pairs), np.int64)
    number[order] = np.cumsum(is_new) - 1
    return ordered[is_new], number


def _through(rows: Int64, index: Int64) -> Int64:
    """Indices of a selection into indices of the whole; -1 stays."""
    if not len(rows):
        return np.full(len(index), NO_ANNOTATION, np.int64)
    return np.where(index < 0, NO_ANNOTATION, rows[index])
