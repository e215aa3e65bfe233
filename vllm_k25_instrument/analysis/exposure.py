"""Sum, busy, overlap, idle and exposed time of a set of GPU activities, to the nanosecond.

Definitions, for a set of half-open intervals ``[start, start + duration)``:

* *sum*: the plain sum of the durations; *span*: first start to last end.
* *busy*: the length of their union; *overlap* = sum - busy; *idle* = span - busy, never negative.
* *exposed*: each instant of busy time belongs to exactly one activity, so the exposed times add up to busy and
  Σ exposed + idle = span.

Who an instant belongs to, of the activities that run at it, in this order:

1. compute before communication before copies and fills: hidden communication costs nothing, and a copy that runs beside
   either is not what the step waits for;
2. the one that started first: it keeps the instant until it ends;
3. the lower stream id;
4. the lower category code, then the longer one, then the one that comes first in the table.

An opaque graph counts as compute. The order is total, so that the result depends on nothing but the intervals.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Final

import numpy as np
from numpy.typing import NDArray

from vllm_k25_instrument.analysis.capture import Int8, Int32, Int64
from vllm_k25_instrument.model import Category

CATEGORIES: Final = tuple(Category)
"""A category's code in a column is its place in this tuple."""

CATEGORY_CODE: Final = {category: code for code, category in enumerate(CATEGORIES)}

NO_CATEGORY: Final = -1
"""The code of an opaque graph: it has no category."""


class Standing(IntEnum):
    """Who takes an instant at which several activities run: the lowest."""

    COMPUTE = 0
    COMMUNICATION = 1
    COPY = 2


_STANDING_OF: Final = {
    Category.ALL_REDUCE: Standing.COMMUNICATION,
    Category.COLLECTIVE: Standing.COMMUNICATION,
    Category.MEMORY: Standing.COPY,
}
# The last place is for NO_CATEGORY, which numpy's negative index finds.
_STANDINGS: Final = np.array(
    [_STANDING_OF.get(category, Standing.COMPUTE) for category in CATEGORIES] + [Standing.COMPUTE], np.int8
)


def standing_of(categories: Int8) -> Int8:
    """The :class:`Standing` of each category code."""
    return _STANDINGS[categories]


@dataclass(frozen=True, slots=True)
class Exposure:
    """One figure per group, ns, and the exposed time of each activity, ns, in the order of the input.

    `start_ns` is the first start. A group without an activity has zeros throughout.
    """

    start_ns: Int64
    span_ns: Int64
    sum_ns: Int64
    busy_ns: Int64
    exposed_ns: Int64

    @property
    def overlap_ns(self) -> Int64:
        """Time counted more than once in the sum."""
        return self.sum_ns - self.busy_ns

    @property
    def idle_ns(self) -> Int64:
        """Time in the span at which nothing runs."""
        return self.span_ns - self.busy_ns


def expose(
    start_ns: Int64,
    duration_ns: Int64,
    category: Int8,
    stream: Int32,
    group: Int32 | None = None,
    groups: int = 1,
) -> Exposure:
    """The times of each group of activities, each group for itself.

    All columns have the same length; `group` holds 0 to `groups` - 1 (None: all in one group). Durations are not
    negative. Activities of different groups do not hide each other, wherever they lie in time.
    """
    count = len(start_ns)
    of_group = np.zeros(count, np.int32) if group is None else group
    first, last = _bounds(start_ns, duration_ns, of_group, groups)
    span = last - first
    # Every group gets a stretch of time for itself, so that one sweep serves all of them.
    base = np.zeros(groups, np.int64)
    np.cumsum(span[:-1], out=base[1:])
    begin = start_ns - first[of_group] + base[of_group]
    end = begin + duration_ns
    exposed = np.zeros(count, np.int64)
    standing = standing_of(category)
    taken = _Union.empty()
    for level in Standing:
        rows = np.flatnonzero(standing == level)
        if not len(rows):
            continue
        b, e = begin[rows], end[rows]
        order = np.lexsort((-e, category[rows], stream[rows], b))
        rows, b, e = rows[order], b[order], e[order]
        own = _own_stretches(b, e)
        exposed[rows] = (own.end - own.begin) - taken.covered(own.begin, own.end)
        taken = taken.joined(b, e)
    sums = np.zeros(groups, np.int64)
    np.add.at(sums, of_group, duration_ns)
    busy = np.zeros(groups, np.int64)
    np.add.at(busy, of_group, exposed)
    return Exposure(start_ns=first, span_ns=span, sum_ns=sums, busy_ns=busy, exposed_ns=exposed)


def _bounds(start_ns: Int64, duration_ns: Int64, group: Int32, groups: int) -> tuple[Int64, Int64]:
    """First start and last end of each group; (0, 0) where it is empty."""
    info = np.iinfo(np.int64)
    first = np.full(groups, info.max, np.int64)
    last = np.full(groups, info.min, np.int64)
    np.minimum.at(first, group, start_ns)
    np.maximum.at(last, group, start_ns + duration_ns)
    empty = first > last
    first[empty] = last[empty] = 0
    return first, last


@dataclass(frozen=True, slots=True)
class _Stretches:
    begin: Int64
    end: Int64


def _own_stretches(begin: Int64, end: Int64) -> _Stretches:
    """What each interval gets if whoever comes first keeps an instant: ``[max(begin, all earlier ends), end)``.

    The intervals are in order of precedence and of `begin`; the stretches do not overlap.
    """
    earlier = np.maximum.accumulate(end)
    before = np.concatenate((begin[:1], earlier[:-1]))
    own_begin = np.minimum(np.maximum(begin, before), end)
    return _Stretches(own_begin, end)


@dataclass(frozen=True, slots=True)
class _Union:
    """Disjoint intervals in order of time, and how much they cover up to the begin of each."""

    begin: Int64
    end: Int64
    before: Int64

    @classmethod
    def empty(cls) -> _Union:
        nothing = np.zeros(0, np.int64)
        return cls(nothing, nothing, nothing)

    def covered(self, begin: Int64, end: Int64) -> Int64:
        """How much of each ``[begin, end)`` is covered."""
        if not len(self.begin):
            return np.zeros(len(begin), np.int64)
        return self._up_to(end) - self._up_to(begin)

    def joined(self, begin: Int64, end: Int64) -> _Union:
        """The union with these intervals."""
        b = np.concatenate((self.begin, begin))
        e = np.concatenate((self.end, end))
        order = np.argsort(b, kind="stable")
        b, e = b[order], e[order]
        reach = np.maximum.accumulate(e)
        opens: NDArray[np.bool_] = np.ones(len(b), np.bool_)
        opens[1:] = b[1:] > reach[:-1]
        closes = np.concatenate((opens[1:], np.ones(1, np.bool_)))
        merged_begin, merged_end = b[opens], reach[closes]
        lengths = merged_end - merged_begin
        return _Union(merged_begin, merged_end, np.cumsum(lengths) - lengths)

    def _up_to(self, instant: Int64) -> Int64:
        at = np.searchsorted(self.begin, instant, side="right") - 1
        inside = np.minimum(instant, self.end[at]) - self.begin[at]
        return np.where(at < 0, 0, self.before[at] + inside)
