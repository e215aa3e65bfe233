"""Which range a range began in, against the obvious way of finding it."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from vllm_k25_instrument.analysis.kineto.ranges import Ranges

ROWS = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 40), st.integers(0, 2)), max_size=40)


def by_stack(rows: list[tuple[int, int, int]]) -> list[int]:
    """A stack of open ranges per thread: who ended before a range begins is taken off, the top is its parent."""
    parents = []
    stacks: dict[int, list[tuple[int, int]]] = {}
    for index, (start, duration, thread) in enumerate(rows):
        stack = stacks.setdefault(thread, [])
        while stack and stack[-1][0] <= start:
            stack.pop()
        parents.append(stack[-1][1] if stack else -1)
        stack.append((start + duration, index))
    return parents


@given(ROWS)
def test_parents_are_those_of_a_stack_of_open_ranges(rows):
    rows.sort(key=lambda row: (row[0], -row[1]))
    start, duration, thread = (np.array([row[n] for row in rows], np.int64) for n in range(3))
    zeros = np.zeros(len(rows), np.int32)

    ranges = Ranges.of(start, duration, zeros, thread, zeros.astype(np.int64), zeros.astype(np.bool_))

    assert ranges.parent.tolist() == by_stack(rows)


def test_a_long_chain_of_siblings_has_no_parents():
    count = 100_000
    start = np.arange(count, dtype=np.int64) * 10
    zeros = np.zeros(count, np.int64)

    ranges = Ranges.of(start, zeros + 10, zeros.astype(np.int32), zeros, zeros, zeros.astype(np.bool_))

    assert (ranges.parent == -1).all()
