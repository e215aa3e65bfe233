"""What runs between hooked ranges is named by its neighbours, and adds up with what stays unnamed."""

from __future__ import annotations

import dataclasses
import random

import numpy as np
import pytest

from tests.samples import pack, random_sample
from vllm_k25_instrument.gaps import gaps_of, gaps_of_packed
from vllm_k25_instrument.model import (
    PHASES,
    Category,
    GraphMode,
    Phase,
    Range,
    StepSample,
    category_exclusive_ns,
)
from vllm_k25_instrument.positions import (
    POSITIONS,
    Position,
    can_infer,
)

R, C, E, T, H, A, S, P = (
    Category.ALL_REDUCE,
    Category.COLLECTIVE,
    Category.MOE_EXPERTS,
    Category.MOE_ROUTING,
    Category.MOE_SHARED_EXPERTS,
    Category.MLA_ATTENTION,
    Category.SAMPLING,
    Category.INPUT_PREPARATION,
)


def step(*parts: int | Category, phase: Phase = Phase.DECODE, number: int = 0, **fields) -> StepSample:
    """A step of gaps (ns) and ranges of 100 ns, one after the other, on the main stream."""
    at, ranges = 0, []
    for part in parts:
        if isinstance(part, Category):
            ranges.append(Range(part, at, 100))
            at += 100
        else:
            at += part
    return StepSample(number, phase, 1, 1, 1, GraphMode.NONE, 10**18, at, tuple(ranges), **fields)


# One dense layer, one of experts, the logits gathered: as vLLM runs a DeepSeek-V3-shaped model.
LAYERS = (P, 7, P, 11, R, 13, A, 17, R, 19, R, 23, A, 29, R, 31, T, 37, E, 41, H, 43, R, 47, C, 53, S)


def test_the_gaps_of_a_decode_step_are_named_by_their_neighbours():
    sample = step(3, *LAYERS, 59)
    assert gaps_of(sample) == {
        Position.INPUTS_AND_LAYERS: 11,
        Position.ALL_REDUCE_AND_ATTENTION: 13 + 23,
        Position.ATTENTION_AND_ALL_REDUCE: 17 + 29,
        Position.ALL_REDUCES: 19,
        Position.ALL_REDUCE_AND_MOE: 31,
        Position.MOE_CALLS: 37 + 41,
        Position.MOE_AND_ALL_REDUCE: 43,
        Position.LAYERS_AND_SAMPLING: 47 + 53,
    }
    # Before the first range, between two of input preparation, behind the last one: nothing is inferred.
    unnamed = category_exclusive_ns(sample)[Category.UNATTRIBUTED] - sum(gaps_of(sample).values())
    assert unnamed == 3 + 7 + 59


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        # A collective is told by what surrounds it.
        ((R, 5, C, 7, S), {Position.LAYERS_AND_SAMPLING: 12}),
        ((T, 5, C, 7, E, 9, C, 11, R), {Position.MOE_CALLS: 12, Position.MOE_AND_ALL_REDUCE: 20}),
        ((R, 5, C, 7, E), {Position.ALL_REDUCE_AND_MOE: 5, Position.MOE_CALLS: 7}),
        # Sequence parallelism: reduce-scatter and all-gather where there were all-reduces.
        ((A, 5, C, 7, T), {Position.ATTENTION_AND_MOE: 12}),
        ((E, 5, C, 7, A), {Position.MOE_AND_ATTENTION: 12}),
        # One GPU has no all-reduce.
        ((A, 5, T, 7, E, 9, A, 11, S), {
            Position.ATTENTION_AND_MOE: 5,
            Position.MOE_CALLS: 7,
            Position.MOE_AND_ATTENTION: 9,
            Position.LAYERS_AND_SAMPLING: 11,
        }),
        # What nobody can tell.
        ((S, 5, P), {}),
        ((C, 5, C), {}),
        ((A, 5, A), {}),
        ((), {}),
        ((P,), {}),
    ],
)  # fmt: skip
def test_other_neighbours(parts, expected):
    assert gaps_of(step(*parts)) == expected


def test_a_range_on_another_stream_fills_its_part_of_a_gap_and_names_nothing():
    sample = step(R, 100, A)
    filled = dataclasses.replace(sample, ranges=(*sample.ranges, Range(H, 130, 50, stream=1)))
    assert gaps_of(filled) == {Position.ALL_REDUCE_AND_ATTENTION: 50}


def test_a_range_inside_another_one_names_nothing():
    sample = StepSample(
        0,
        Phase.DECODE,
        1,
        1,
        1,
        GraphMode.NONE,
        0,
        300,
        (Range(E, 0, 100), Range(C, 50, 50, parent=0), Range(R, 140, 60)),
    )
    assert gaps_of(sample) == {Position.MOE_AND_ALL_REDUCE: 40}


def test_ranges_in_another_order_say_the_same():
    sample = step(3, *LAYERS, 59)
    shuffled = list(sample.ranges)
    random.Random(1).shuffle(shuffled)
    assert gaps_of(dataclasses.replace(sample, ranges=tuple(shuffled))) == gaps_of(sample)


def test_a_range_that_outlasts_the_step_leaves_no_gap_behind_its_end():
    sample = dataclasses.replace(step(R, 50, A), duration_ns=120)  # the rest is after the step
    assert gaps_of(sample) == {Position.ALL_REDUCE_AND_ATTENTION: 20}


@pytest.mark.parametrize("seed", range(30))
def test_named_gaps_never_exceed_what_is_unattributed(seed):
    sample = random_sample(random.Random(seed))
    named_ns = sum(gaps_of(sample).values())
    assert 0 <= named_ns <= category_exclusive_ns(sample)[Category.UNATTRIBUTED]


def test_packed_samples_many_at_once_say_what_each_says_alone():
    rng = random.Random(7)
    samples = [step(3, *LAYERS, rng.randrange(100), phase=rng.choice(PHASES), number=n) for n in range(20)]
    # Of one length with those, but with other categories in other places; and of other lengths.
    swapped = [dataclasses.replace(r, category=A if r.category is R else r.category) for r in samples[0].ranges]
    samples.append(dataclasses.replace(samples[0], step=20, ranges=tuple(swapped)))
    samples += [random_sample(rng, ranges) for ranges in (1, 5, 40, 40)]
    samples += [step(50), step(R, 5, A, complete=False)]

    phases, gaps = gaps_of_packed([pack(sample) for sample in samples])

    def row(sample: StepSample) -> list[int]:
        by_name = gaps_of(sample)
        unnamed = category_exclusive_ns(sample)[Category.UNATTRIBUTED] - sum(by_name.values())
        return [PHASES.index(sample.phase), *(by_name.get(position, 0) for position in POSITIONS), unnamed]

    assert sorted([phase, *ns] for phase, ns in zip(phases.tolist(), gaps.tolist(), strict=True)) == sorted(
        row(sample) for sample in samples if sample.ranges and sample.complete
    )
    assert gaps.dtype == np.int64


def test_bytes_that_are_no_samples_are_refused():
    with pytest.raises(ValueError, match="samples"):
        gaps_of_packed([pack(step(R, 5, A))[:-3]])


def test_no_samples_have_no_gaps():
    phases, gaps = gaps_of_packed([])
    assert len(phases) == len(gaps) == 0


@pytest.mark.parametrize("state", ["missing", "off", "quiet"])
@pytest.mark.parametrize("hook", ["all_reduce", "moe_experts", "mla_decode", "sampling", "moe_shared_experts"])
def test_nothing_is_inferred_where_a_hook_that_could_have_been_a_neighbour_is_not_in_place(hook, state):
    attached = {"all_reduce": "attached", "attention": "waiting", "moe_routing": "not_in_version"}
    assert can_infer(attached)
    assert not can_infer({**attached, hook: state})


def test_a_hook_that_makes_no_range_does_not_matter():
    assert can_infer({"graph_memory": "missing", "moe_dispatch": "off"})
