"""What a sample is: its bytes, its arithmetic, its labels."""

from __future__ import annotations

import itertools
import random
import struct
from dataclasses import replace

import pytest

from tests.samples import DETAILS, derived_sample, pack, random_sample
from vllm_k25_instrument.model import (
    BATCH_BUCKETS,
    BATCH_LABELS,
    CATEGORY_CODE,
    HOOKED_CATEGORIES,
    LIVE_CATEGORIES,
    MAX_RANGES,
    RANGE_BYTES,
    RANGE_COLUMNS,
    SAMPLE_BYTES,
    SIZE_BUCKETS,
    SIZE_LABELS,
    Category,
    GraphMode,
    Phase,
    Range,
    RankCoordinates,
    StepSample,
    batch_label,
    category_exclusive_ns,
    exclusive_ns,
    pack_sample,
    size_label,
    unpack_sample,
)

STEP = StepSample(0, Phase.DECODE, 1, 1, 1, GraphMode.NONE, 0, 1_000)


def with_ranges(*ranges, duration_ns=1_000):
    return replace(STEP, ranges=ranges, duration_ns=duration_ns)


@pytest.mark.parametrize("seed", range(200))
def test_a_sample_comes_back_from_its_bytes_as_it_was(seed):
    sample = random_sample(random.Random(seed))
    assert unpack_sample(pack(sample), DETAILS) == sample


def test_a_sample_without_ranges_and_one_with_as_many_as_there_may_be_come_back():
    one = Range(Category.ALL_REDUCE, 1, 2, "pynccl", 3, 0, 14_336)
    for count in (0, 1, MAX_RANGES):
        sample = with_ranges(*[replace(one, parent=n - 1) for n in range(count)])
        data = pack(sample)
        assert len(data) == SAMPLE_BYTES + count * RANGE_BYTES
        assert unpack_sample(data, DETAILS) == sample


def test_every_field_holds_its_largest_value():
    wide = (1 << 64) - 1
    sample = StepSample(
        step=wide,
        phase=Phase.MIXED,
        requests=(1 << 32) - 1,
        tokens=(1 << 32) - 1,
        padded_tokens=(1 << 32) - 1,
        graph_mode=GraphMode.FULL,
        start_unix_ns=wide,
        duration_ns=wide,
        ranges=(Range(HOOKED_CATEGORIES[-1], wide, wide, DETAILS[-1], 32_767, 255, wide),),
        host_ns=wide,
        gap_ns=-(1 << 63),
        overhead_ns=wide,
    )
    assert unpack_sample(pack(sample), DETAILS) == sample


@pytest.mark.parametrize(
    "field", [{"step": -1}, {"requests": 1 << 32}, {"duration_ns": 1 << 64}, {"overhead_ns": -1}, {"tokens": -1}]
)
def test_a_value_that_does_not_fit_its_field_is_refused(field):
    with pytest.raises(struct.error):
        pack(replace(STEP, **field))


def test_columns_of_different_lengths_are_refused():
    columns = [[1]] * (RANGE_COLUMNS - 1) + [[1, 2]]
    with pytest.raises(struct.error):
        pack_sample(
            step=1,
            phase_code=0,
            requests=1,
            tokens=1,
            padded_tokens=1,
            graph_code=0,
            start_unix_ns=1,
            duration_ns=1,
            overhead_ns=1,
            complete=True,
            range_columns=columns,
        )


# --- damaged bytes ---------------------------------------------------------------------------------------


def value_error_or_sample(data, details=DETAILS):
    try:
        sample = unpack_sample(data, details)
    except ValueError:
        return None
    # What is let through must be usable.
    assert sum(category_exclusive_ns(sample).values()) == sample.duration_ns
    return sample


@pytest.mark.parametrize("size", [0, 1, SAMPLE_BYTES - 1])
def test_too_few_bytes_are_no_sample(size):
    with pytest.raises(ValueError, match="not a step sample"):
        unpack_sample(bytes(size), DETAILS)


def test_every_truncation_of_a_sample_is_a_value_error():
    data = pack(derived_sample(11))
    for size in range(len(data)):
        with pytest.raises(ValueError, match=r"sample|do not fit"):
            unpack_sample(data[:size], DETAILS)


def test_random_bytes_are_a_sample_or_a_value_error_and_nothing_else():
    rng = random.Random(1)
    for _ in range(3_000):
        value_error_or_sample(rng.randbytes(rng.randrange(400)))


def test_a_flipped_bit_makes_another_sample_or_a_value_error_and_nothing_else():
    rng = random.Random(2)
    data = pack(derived_sample(11))
    for bit in range(8 * len(data)):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        value_error_or_sample(bytes(flipped))
    for _ in range(2_000):
        damaged = bytearray(data)
        for _ in range(rng.randrange(1, 6)):
            damaged[rng.randrange(len(damaged))] = rng.randrange(256)
        value_error_or_sample(bytes(damaged))


@pytest.mark.parametrize("parent", [0, 1, 7, -2, -32_768])
def test_a_range_whose_parent_does_not_precede_it_is_damage(parent):
    sample = with_ranges(Range(Category.SAMPLING, 0, 1, parent=parent))
    with pytest.raises(ValueError, match="parent"):
        unpack_sample(pack(sample), DETAILS)


def test_a_detail_that_is_not_in_the_table_is_damage():
    sample = with_ranges(Range(Category.ALL_REDUCE, 0, 1, DETAILS[-1]))
    with pytest.raises(ValueError, match="not a step sample"):
        unpack_sample(pack(sample), DETAILS[:-1])


# --- arithmetic ------------------------------------------------------------------------------------------


def test_exclusive_time_is_the_duration_minus_the_children_on_the_same_stream():
    sample = with_ranges(
        Range(Category.MOE_EXPERTS, 0, 900),
        Range(Category.ALL_REDUCE, 100, 300, parent=0),
        Range(Category.MOE_ROUTING, 150, 100, parent=1),
        Range(Category.MOE_SHARED_EXPERTS, 0, 500, stream=1, parent=0),
        Range(Category.COLLECTIVE, 10, 20, stream=1, parent=3),
    )
    assert exclusive_ns(sample) == [600, 200, 100, 480, 20]


def test_grandchildren_are_taken_from_their_parent_alone():
    sample = with_ranges(*(Range(Category.SAMPLING, n, 1_000 - 2 * n, parent=n - 1) for n in range(20)))
    assert exclusive_ns(sample) == [2] * 19 + [1_000 - 38]


@pytest.mark.parametrize("seed", range(100))
def test_exclusive_times_and_unattributed_add_up_to_the_step_to_the_nanosecond(seed):
    sample = random_sample(random.Random(1_000 + seed))
    totals = category_exclusive_ns(sample)
    assert sum(totals.values()) == sample.duration_ns
    assert min(totals.values()) >= 0
    assert list(totals) == list(LIVE_CATEGORIES)


def test_a_step_without_ranges_is_unattributed_altogether():
    totals = category_exclusive_ns(STEP)
    assert totals[Category.UNATTRIBUTED] == STEP.duration_ns
    assert sum(totals.values()) == STEP.duration_ns


# --- labels ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("requests", "label"),
    [
        *((0, "1"), (1, "1"), (2, "4"), (4, "4"), (5, "16"), (16, "16")),
        *((17, "64"), (64, "64"), (65, "256"), (256, "256"), (257, "+Inf"), (1 << 31, "+Inf")),
    ],
)
def test_a_batch_is_labelled_with_the_power_of_four_that_it_does_not_exceed(requests, label):
    assert batch_label(requests) == label


@pytest.mark.parametrize("bound", SIZE_BUCKETS)
def test_a_message_is_labelled_with_the_bound_that_it_does_not_exceed(bound):
    at = SIZE_LABELS.index(str(bound))
    assert size_label(bound) == str(bound)
    assert size_label(bound - 1) == str(bound)
    assert size_label(bound + 1) == SIZE_LABELS[at + 1]


def test_the_labels_are_the_powers_of_four_in_rising_order_and_infinity():
    for bounds, labels in ((BATCH_BUCKETS, BATCH_LABELS), (SIZE_BUCKETS, SIZE_LABELS)):
        assert all(upper == 4 * lower for lower, upper in itertools.pairwise(bounds))
        assert labels == (*map(str, bounds), "+Inf")


def test_a_category_s_code_is_its_place():
    assert [CATEGORY_CODE[category] for category in HOOKED_CATEGORIES] == list(range(len(HOOKED_CATEGORIES)))
    assert (*HOOKED_CATEGORIES, Category.UNATTRIBUTED) == LIVE_CATEGORIES


def test_the_world_is_all_ranks_of_all_groups():
    assert RankCoordinates(tp_size=8, pp_size=2, dp_size=3).world_size == 48
