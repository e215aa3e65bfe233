"""Nesting of ranges and packing of columns, against the plain way to say the same."""

from __future__ import annotations

import sqlite3

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_k25_instrument.analysis.capture import Int64
from vllm_k25_instrument.analysis.nsys import ranges as module
from vllm_k25_instrument.analysis.nsys.packing import Extent, pack, unpacked
from vllm_k25_instrument.analysis.nsys.ranges import NONE, nest

Interval = tuple[int, int, int]

intervals = st.lists(
    st.tuples(st.integers(0, 2), st.integers(0, 40), st.integers(0, 20)).map(lambda it: (it[0], it[1], it[1] + it[2])),
    max_size=40,
)
moments = st.lists(st.tuples(st.integers(0, 2), st.integers(-1, 60)), max_size=40)


def column(rows: list[tuple[int, ...]], index: int) -> Int64:
    return np.array([row[index] for row in rows], np.int64)


def nested(rows: list[Interval], at: list[tuple[int, int]]) -> tuple[list[int], list[int]]:
    parent, innermost = nest(*(column(rows, n) for n in range(3)), *(column(at, n) for n in range(2)))
    return parent.tolist(), innermost.tolist()


def opened(rows: list[Interval]) -> list[int]:
    """The order in which ranges were opened: of those that start together the longer first."""
    return sorted(range(len(rows)), key=lambda n: (rows[n][1], -rows[n][2], n))


def last(candidates: list[int]) -> int:
    return candidates[-1] if candidates else NONE


def plainly(rows: list[Interval], at: list[tuple[int, int]]) -> tuple[list[int], list[int]]:
    order = opened(rows)
    parents = [NONE] * len(rows)
    for place, each in enumerate(order):
        thread, _, end = rows[each]
        parents[each] = last([n for n in order[:place] if rows[n][0] == thread and rows[n][2] >= end])
    still_open = ([n for n in order if rows[n][0] == thread and rows[n][1] <= t < rows[n][2]] for thread, t in at)
    return parents, [last(each) for each in still_open]


@settings(max_examples=300, deadline=None)
@given(intervals, moments)
def test_the_innermost_range_is_the_one_opened_last_of_those_still_open(
    rows: list[Interval], at: list[tuple[int, int]]
) -> None:
    assert nested(rows, at) == plainly(rows, at)


@settings(max_examples=300, deadline=None)
@given(intervals, moments)
def test_one_by_one_finds_the_same_as_jumping(rows: list[Interval], at: list[tuple[int, int]]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_ROUNDS", 0)
        assert nested(rows, at) == plainly(rows, at)


def test_ranges_that_overlap_as_wildly_as_they_can_take_no_time() -> None:
    half = 50_000
    shrinking = [(0, n, 4 * half - n) for n in range(half)]
    growing = [(0, half + n, 5 * half + n) for n in range(half)]
    parent, innermost = nested(shrinking + growing, [(0, 2 * half)])
    assert parent[: half + 1] == [NONE, *range(half - 1), NONE]
    assert innermost == [2 * half - 1]


numbers = st.integers(-(2**63), 2**63 - 1) | st.integers(-5, 5) | st.integers(2**40, 2**40 + 9)


@settings(max_examples=150, deadline=None)
@given(st.integers(1, 6).flatmap(lambda width: st.lists(st.tuples(*[numbers] * width), min_size=1, max_size=20)))
def test_packed_columns_come_back_exactly(rows: list[tuple[int, ...]]) -> None:
    names = [f"c{n}" for n in range(len(rows[0]))]
    connection = sqlite3.connect(":memory:")
    connection.execute(f"CREATE TABLE t ({', '.join(f'{name} INTEGER' for name in names)})")
    connection.executemany(f"INSERT INTO t VALUES ({', '.join('?' * len(names))})", rows)
    extents = [
        Extent(name, name, min(values), max(values))
        for name, values in zip(names, zip(*rows, strict=True), strict=True)
    ]
    for packing in (pack(extents), unpacked([(name, name) for name in names])):
        found = connection.execute(f"SELECT {', '.join(packing.sql)} FROM t").fetchall()
        columns = packing.unpack([np.array(values, np.int64) for values in zip(*found, strict=True)])
        assert list(zip(*(columns[name].tolist() for name in names), strict=True)) == rows


def test_columns_of_few_bits_share_a_word_and_those_of_one_value_stay_at_home() -> None:
    extents = [
        Extent("a", "a", 0, 2**40),
        Extent("b", "b", 7, 7),
        Extent("c", "c", -3, 100),
        Extent("d", "d", 0, 2**50),
    ]
    packing = pack(extents)
    assert [[extent.name for extent in word.extents] for word in packing.words] == [["d", "c"], ["a"]]
    assert packing.constants == (("b", 7),)
