"""Which range was open: nesting of host ranges, and the innermost one at a moment, for millions at once."""

from __future__ import annotations

from typing import Final

import numpy as np

from vllm_k25_instrument.analysis.capture import Int64

NONE: Final = -1

_ROUNDS: Final = 64


def nest(thread: Int64, start: Int64, end: Int64, at_thread: Int64, at: Int64) -> tuple[Int64, Int64]:
    """Parents of ranges, and the innermost range open at each of a number of moments.

    `thread`, `start`, `end` (ns): the ranges. `at_thread`, `at`: the moments. Returns (parent, innermost), both indices
    of ranges or `NONE`. The innermost range is the one opened last of those with start <= moment < end; of ranges with
    the same start the longer counts as opened before the shorter. Ranges need not nest properly.
    """
    ranges, moments = len(start), len(at)
    threads = np.concatenate([thread, at_thread])
    begins = np.concatenate([start, at])
    # A moment is an empty range; a range has to reach beyond it, but need only reach the end of a range inside it.
    reach = np.concatenate([end, at])
    need = np.concatenate([end, at + 1])
    is_moment = np.zeros(ranges + moments, np.bool_)
    is_moment[ranges:] = True
    # Of ranges that start together the longer one is outside; moments come last.
    order = np.lexsort((-reach, is_moment, begins, threads))
    found = _previous_reaching(threads[order], reach[order], need[order])
    answer = np.full(ranges + moments, NONE, np.int64)
    answer[order] = np.where(found >= 0, order[found], NONE)
    return answer[:ranges], answer[ranges:]


def _previous_reaching(group: Int64, reach: Int64, need: Int64) -> Int64:
    """For each row the nearest row before it, in its group, whose reach is at least its need; -1 where there is none.

    Pointer jumping: a row's candidate that does not reach far enough is replaced by that row's own candidate. This is
    right also while the other's search is not over: all rows in between have been found to reach less than it needs.
    """
    count = len(group)
    candidate = np.arange(-1, count - 1, dtype=np.int64)
    if not count:
        return candidate
    candidate[np.concatenate([[True], group[1:] != group[:-1]])] = -1
    active = np.flatnonzero(candidate >= 0)
    for _ in range(_ROUNDS):
        active = active[reach[candidate[active]] < need[active]]
        if not len(active):
            return candidate
        candidate[active] = candidate[candidate[active]]
        active = active[candidate[active] >= 0]
    return _previous_reaching_one_by_one(group, reach, need)


def _previous_reaching_one_by_one(group: Int64, reach: Int64, need: Int64) -> Int64:
    """The same with a stack, for ranges that overlap so wildly that jumping takes for ever."""
    found = np.full(len(group), -1, np.int64)
    groups, reaches, needs = group.tolist(), reach.tolist(), need.tolist()
    stack: list[int] = []
    for index, needed in enumerate(needs):
        if stack and groups[stack[-1]] != groups[index]:
            stack.clear()
        # A row that does not reach what this one needs is of no use to later ones either: they need at least as much.
        while stack and reaches[stack[-1]] < needed:
            stack.pop()
        if stack:
            found[index] = stack[-1]
        stack.append(index)
    return found
