"""Every instant of busy time belongs to one activity, and everything adds up, to the nanosecond."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_k25_instrument.analysis.exposure import CATEGORIES, CATEGORY_CODE, NO_CATEGORY, expose, standing_of
from vllm_k25_instrument.model import Category

COMPUTE = CATEGORY_CODE[Category.MOE_EXPERTS]
COMMUNICATION = CATEGORY_CODE[Category.ALL_REDUCE]
COPY = CATEGORY_CODE[Category.MEMORY]


def exposed(rows, groups=1):
    """`rows`: (start, duration, category code, stream[, group])."""
    start, duration, category, stream, group = zip(*((*row, 0)[:5] for row in rows), strict=True)
    return expose(
        np.array(start, np.int64),
        np.array(duration, np.int64),
        np.array(category, np.int8),
        np.array(stream, np.int32),
        np.array(group, np.int32),
        groups,
    )


def nanosecond_by_nanosecond(rows):
    """The truth, one instant at a time."""
    standings = standing_of(np.array([row[2] for row in rows], np.int8))
    own = [0] * len(rows)
    busy = 0
    for instant in range(min(r[0] for r in rows), max(r[0] + r[1] for r in rows)):
        running = [n for n, (start, duration, *_) in enumerate(rows) if start <= instant < start + duration]
        if not running:
            continue
        busy += 1
        winner = min(
            running,
            key=lambda n: (standings[n], rows[n][0], rows[n][3], rows[n][2], -rows[n][1], n),
        )
        own[winner] += 1
    return own, busy


activities = st.lists(
    st.tuples(
        st.integers(0, 60),
        st.integers(0, 25),
        st.sampled_from([COMPUTE, CATEGORY_CODE[Category.NORM], COMMUNICATION, COPY, NO_CATEGORY]),
        st.integers(0, 2),
    ),
    min_size=1,
    max_size=25,
)


@settings(max_examples=400, deadline=None)
@given(activities)
def test_the_sweep_agrees_with_counting_every_nanosecond(rows):
    result = exposed(rows)
    own, busy = nanosecond_by_nanosecond(rows)
    assert result.exposed_ns.tolist() == own
    assert result.busy_ns.tolist() == [busy]


@settings(max_examples=200, deadline=None)
@given(activities, st.integers(-(10**18), 10**18))
def test_exposed_and_idle_add_up_to_the_span_wherever_the_clock_stands(rows, epoch):
    result = exposed([(start + epoch, *rest) for start, *rest in rows])
    assert result.exposed_ns.sum() + result.idle_ns[0] == result.span_ns[0]
    assert result.idle_ns[0] >= 0
    assert result.overlap_ns[0] >= 0
    assert result.sum_ns[0] == sum(row[1] for row in rows)
    assert result.start_ns[0] == min(row[0] for row in rows) + epoch


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(activities, st.integers(-50, 50)), min_size=1, max_size=5))
def test_groups_that_overlap_in_time_do_not_hide_each_other(sets):
    rows = [(start + shift, *rest, group) for group, (those, shift) in enumerate(sets) for start, *rest in those]
    together = exposed(rows, groups=len(sets))
    at = 0
    for group, (those, _) in enumerate(sets):
        alone = exposed(those)
        assert together.exposed_ns[at : at + len(those)].tolist() == alone.exposed_ns.tolist()
        for figure in ("span_ns", "sum_ns", "busy_ns", "overlap_ns", "idle_ns"):
            assert getattr(together, figure)[group] == getattr(alone, figure)[0]
        at += len(those)


@settings(max_examples=100, deadline=None)
@given(activities, st.randoms())
def test_the_order_of_the_rows_changes_nothing_per_category(rows, random):
    def by_category(of):
        result = exposed(of)
        totals = {}
        for row, own in zip(of, result.exposed_ns.tolist(), strict=True):
            totals[row[2]] = totals.get(row[2], 0) + own
        return totals

    shuffled = list(rows)
    random.shuffle(shuffled)
    assert by_category(shuffled) == by_category(rows)


def test_compute_takes_the_instants_it_shares_with_communication():
    result = exposed([(1000, 20_000, COMMUNICATION, 20), (6000, 10_000, COMPUTE, 7)])
    assert result.exposed_ns.tolist() == [10_000, 10_000]
    assert (result.sum_ns[0], result.busy_ns[0], result.overlap_ns[0], result.idle_ns[0]) == (30_000, 20_000, 10_000, 0)


def test_communication_takes_the_instants_it_shares_with_a_copy():
    assert exposed([(0, 10, COPY, 1), (5, 10, COMMUNICATION, 2)]).exposed_ns.tolist() == [5, 10]


def test_of_two_of_a_kind_the_first_keeps_the_instant_until_it_ends():
    assert exposed([(0, 10, COMPUTE, 9), (4, 10, COMPUTE, 1)]).exposed_ns.tolist() == [10, 4]
    assert exposed([(0, 10, COMPUTE, 9), (0, 14, COMPUTE, 1)]).exposed_ns.tolist() == [0, 14]


def test_a_kernel_inside_another_has_nothing_of_its_own():
    assert exposed([(0, 100, COMPUTE, 1), (10, 20, COMPUTE, 2), (50, 70, COMPUTE, 2)]).exposed_ns.tolist() == [
        100,
        0,
        20,
    ]


def test_a_group_without_an_activity_is_all_zeros():
    result = exposed([(5, 5, COMPUTE, 0, 2)], groups=4)
    assert result.span_ns.tolist() == [0, 0, 5, 0]
    assert result.start_ns.tolist() == [0, 0, 5, 0]


def test_no_activity_at_all_is_no_error():
    nothing = np.zeros(0, np.int64)
    result = expose(nothing, nothing, nothing.astype(np.int8), nothing.astype(np.int32))
    assert (result.span_ns[0], result.busy_ns[0]) == (0, 0)


@pytest.mark.parametrize("category", CATEGORIES)
def test_every_category_has_a_standing(category):
    communication = category in (Category.ALL_REDUCE, Category.COLLECTIVE)
    expected = 1 if communication else 2 if category is Category.MEMORY else 0
    assert standing_of(np.array([CATEGORY_CODE[category]], np.int8))[0] == expected


def test_a_million_kernels_add_up():
    random = np.random.default_rng(4)
    start = np.sort(random.integers(0, 10**10, 10**6)) + 1_767_225_600 * 10**9
    duration = random.integers(0, 30_000, 10**6)
    category = random.integers(0, len(CATEGORIES), 10**6).astype(np.int8)
    result = expose(start, duration, category, random.integers(0, 9, 10**6).astype(np.int32))
    assert result.exposed_ns.sum() + result.idle_ns[0] == (start + duration).max() - start.min()
    assert (result.exposed_ns >= 0).all()
    assert (result.exposed_ns <= duration).all()
