"""Transfer is what no rank could avoid, waiting is the rest, and of a step that is not whole nothing is said."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from tests.samples import DETAILS, pack, random_sample
from vllm_k25_instrument.alignment import (
    MAX_PENDING,
    PATIENCE,
    AlignedStep,
    AllReduces,
    LeftOut,
    StepAligner,
    align,
    all_reduces_of,
)
from vllm_k25_instrument.model import (
    ALL_REDUCE_PATHS,
    CATEGORY_CODE,
    GRAPH_MODES,
    PHASES,
    SAMPLE_BYTES,
    AllReducePath,
    Category,
    GraphMode,
    Phase,
    Range,
    StepSample,
    unpack_columns,
)

PYNCCL = ALL_REDUCE_PATHS.index(AllReducePath.PYNCCL)
CUSTOM = ALL_REDUCE_PATHS.index(AllReducePath.CUSTOM)
OTHER = ALL_REDUCE_PATHS.index(AllReducePath.OTHER)


def timed(*durations, step=16, paths=None, complete=True):
    codes = [PYNCCL] * len(durations) if paths is None else paths
    return AllReduces(step, np.array(durations, np.int64), np.array(codes, np.uint8), complete)


def sample_of(*ranges, step=16, complete=True):
    return StepSample(
        step=step,
        phase=Phase.DECODE,
        requests=1,
        tokens=1,
        padded_tokens=1,
        graph_mode=GraphMode.NONE,
        start_unix_ns=0,
        duration_ns=10_000,
        ranges=tuple(ranges),
        complete=complete,
    )


def all_reduce(start, duration, detail="pynccl"):
    return Range(category=Category.ALL_REDUCE, start_ns=start, duration_ns=duration, detail=detail)


# --- one step --------------------------------------------------------------------------------------------


def test_transfer_is_the_least_of_any_rank_call_by_call_and_wait_the_rest():
    step = align({0: timed(100, 50), 1: timed(70, 60)})
    assert step.transfer_ns.tolist() == [70, 50]
    assert step.wait_ns.tolist() == [[30, 0], [0, 10]]
    assert step.waited_ns == {0: 30, 1: 10}


def test_the_rank_that_waited_least_is_the_slowest():
    step = align({0: timed(100, 50), 1: timed(70, 60), 2: timed(90, 90)})
    assert step.waited_ns == {0: 30, 1: 10, 2: 60}
    assert step.slowest == 1


def test_of_ranks_that_waited_equally_little_none_is_the_slowest():
    assert align({0: timed(100, 50), 1: timed(50, 100), 2: timed(300, 300)}).slowest is None


def test_a_step_without_all_reduces_names_nobody():
    step = align({0: timed(), 1: timed()})
    assert (step.transfer_ns.size, step.waited_ns, step.slowest) == (0, {0: 0, 1: 0}, None)


@pytest.mark.parametrize("seed", range(20))
def test_durations_are_transfer_and_waiting_to_the_nanosecond(seed):
    rng = random.Random(seed)
    calls, ranks = rng.randrange(1, 200), rng.randrange(2, 17)
    durations = {rank: [rng.randrange(1 << rng.randrange(1, 45)) for _ in range(calls)] for rank in range(ranks)}
    step = align({rank: timed(*own) for rank, own in durations.items()})
    assert sum(map(sum, durations.values())) == ranks * int(step.transfer_ns.sum()) + sum(step.waited_ns.values())
    assert step.wait_ns.min(axis=0).tolist() == [0] * calls
    assert step.transfer_ns.tolist() == [min(call) for call in zip(*durations.values(), strict=True)]


@pytest.mark.parametrize(
    ("ranks", "reason"),
    [
        ({0: timed(1)}, LeftOut.MISSING_RANK),
        ({0: timed(1, 2), 1: timed(1)}, LeftOut.COUNTS_DIFFER),
        ({0: timed(1), 1: timed(1, complete=False)}, LeftOut.INCOMPLETE),
    ],
)
def test_it_abstains_and_says_why(ranks, reason):
    assert align(ranks) is reason


def test_a_path_on_which_the_ranks_disagree_is_other():
    step = align({0: timed(1, 1, paths=[PYNCCL, CUSTOM]), 1: timed(1, 1, paths=[PYNCCL, PYNCCL])})
    assert step.paths.tolist() == [PYNCCL, OTHER]


# --- from samples ----------------------------------------------------------------------------------------


def test_the_order_is_that_of_the_starts_whatever_the_place_in_the_sample():
    sample = sample_of(all_reduce(500, 5), all_reduce(100, 1, "custom"), all_reduce(300, 3, "never heard of"))
    for those in (AllReduces.of(sample), *all_reduces_of([pack(sample, ("", "custom", "pynccl", "never heard of"))],
                                                         ("", "custom", "pynccl", "never heard of"))):  # fmt: skip
        assert those.durations_ns.tolist() == [1, 3, 5]
        assert those.paths.tolist() == [CUSTOM, OTHER, PYNCCL]


def test_packed_samples_give_the_same_as_their_objects():
    rng = random.Random(5)
    samples = [replace(random_sample(rng, rng.choice((0, 3, 40))), step=n) for n in range(300)]
    packed = [pack(sample) for sample in samples]
    rng.shuffle(packed)
    found = all_reduces_of(packed, DETAILS)
    assert [those.step for those in found] == [sample.step for sample in samples]
    for mine, sample in zip(found, samples, strict=True):
        theirs = AllReduces.of(sample)
        assert mine.durations_ns.tolist() == theirs.durations_ns.tolist()
        assert mine.paths.tolist() == theirs.paths.tolist()
        assert mine.complete == theirs.complete


def test_samples_of_one_length_whose_all_reduces_stand_elsewhere_are_told_apart():
    moe = Range(category=Category.MOE_EXPERTS, start_ns=0, duration_ns=7)
    first, second = sample_of(moe, all_reduce(9, 2), step=1), sample_of(all_reduce(0, 3), moe, step=2)
    assert [those.durations_ns.tolist() for those in all_reduces_of([pack(first), pack(second)], DETAILS)] == [[2], [3]]


def test_columns_are_the_fields_of_the_samples():
    rng = random.Random(7)
    samples = [random_sample(rng) for _ in range(200)]
    for count in {len(sample.ranges) for sample in samples}:
        alike = [sample for sample in samples if len(sample.ranges) == count]
        columns = unpack_columns([pack(sample) for sample in alike])
        for name in ("step", "start_unix_ns", "duration_ns", "overhead_ns", "host_ns", "gap_ns", "requests", "tokens",
                     "padded_tokens", "complete"):  # fmt: skip
            assert columns[name].tolist() == [getattr(sample, name) for sample in alike]
        assert [PHASES[code] for code in columns["phase"]] == [sample.phase for sample in alike]
        assert [GRAPH_MODES[code] for code in columns["graph_mode"]] == [sample.graph_mode for sample in alike]
        for name in ("start_ns", "duration_ns", "bytes", "layer", "parent", "stream"):
            assert columns["ranges"][name].tolist() == [[getattr(r, name) for r in s.ranges] for s in alike]
        assert columns["ranges"]["category"].tolist() == [[CATEGORY_CODE[r.category] for r in s.ranges] for s in alike]
        assert columns["ranges"]["detail"].tolist() == [[DETAILS.index(r.detail) for r in s.ranges] for s in alike]


@pytest.mark.parametrize(
    "samples",
    [
        [b""],
        [b"\0" * (SAMPLE_BYTES + 1)],
        [pack(sample_of()), pack(sample_of(all_reduce(0, 1)))],
        [pack(sample_of()) + b"\0" * 32],
    ],
    ids=["nothing", "half a range", "two lengths", "a count that is not the length"],
)
def test_what_is_no_sample_is_refused(samples):
    with pytest.raises(ValueError, match="not step samples"):
        unpack_columns(samples)


# --- many steps ------------------------------------------------------------------------------------------


def feed_all(aligner, entries):
    return [aligned for rank, those in entries if (aligned := aligner.feed(rank, those)) is not None]


@pytest.mark.parametrize("seed", range(10))
def test_samples_may_come_in_any_order(seed):
    rng = random.Random(seed)
    ranks, steps = range(4), range(0, PATIENCE, 4)
    entries = [(rank, timed(100 + rank, step=step)) for rank in ranks for step in steps]
    rng.shuffle(entries)
    aligner = StepAligner(ranks)
    aligned = feed_all(aligner, entries)
    assert sorted(step.step for step in aligned) == [*steps]
    assert {(step.ranks, step.slowest) for step in aligned} == {((0, 1, 2, 3), 0)}
    assert (aligner.pending, aligner.left_out) == (0, {})


def test_a_step_that_one_rank_lacks_is_given_up_when_all_have_gone_on():
    aligner = StepAligner((0, 1))
    feed_all(aligner, [(0, timed(1, step=0)), (0, timed(1, step=16)), (1, timed(1, step=16))])
    assert (aligner.pending, aligner.left_out) == (1, {})
    feed_all(aligner, [(0, timed(1, step=PATIENCE + 16)), (1, timed(1, step=PATIENCE - 1))])
    assert aligner.left_out == {}
    feed_all(aligner, [(1, timed(1, step=PATIENCE + 16))])
    # The step that rank 1 had alone is not old enough yet.
    assert aligner.left_out == {LeftOut.MISSING_RANK: 1}
    assert aligner.pending == 1


def test_a_rank_that_comes_late_to_a_step_is_not_counted_a_second_time():
    aligner = StepAligner((0, 1))
    on = [(rank, timed(1, step=10 * PATIENCE)) for rank in (0, 1)]
    feed_all(aligner, [(0, timed(1, step=0)), *on, (1, timed(1, step=0)), (1, timed(1, step=0))])
    assert aligner.left_out == {LeftOut.MISSING_RANK: 1}


def test_a_step_that_nobody_had_when_all_went_on_is_late():
    aligner = StepAligner((0, 1))
    on = [(rank, timed(1, step=10 * PATIENCE)) for rank in (0, 1)]
    feed_all(aligner, [*on, (1, timed(1, step=0)), (0, timed(1, step=0))])
    assert aligner.left_out == {LeftOut.LATE: 1}
    assert aligner.pending == 0


def test_a_second_sample_of_a_step_changes_nothing():
    aligner = StepAligner((0, 1))
    aligned = feed_all(
        aligner,
        [(0, timed(5, step=0)), (0, timed(9, step=0)), (1, timed(1, step=0)), (0, timed(5, step=0))],
    )
    assert [step.waited_ns for step in aligned] == [{0: 4, 1: 0}]
    assert aligner.pending == 0


def test_what_cannot_be_lined_up_is_counted_by_its_reason():
    aligner = StepAligner((0, 1))
    aligned = feed_all(
        aligner,
        [
            (0, timed(1, 2, step=0)),
            (1, timed(1, step=0)),
            (0, timed(1, step=16, complete=False)),
            (1, timed(1, step=16)),
        ],
    )
    assert aligned == []
    assert aligner.left_out == {LeftOut.COUNTS_DIFFER: 1, LeftOut.INCOMPLETE: 1}


def test_a_rank_that_has_stopped_costs_no_memory_and_every_step_is_counted():
    aligner = StepAligner((0, 1, 2))
    steps = 10_000
    for step in range(steps):
        aligner.feed(0, timed(1, step=step))
        aligner.feed(1, timed(1, step=step))
        assert aligner.pending <= MAX_PENDING
    assert aligner.left_out[LeftOut.MISSING_RANK] + aligner.pending == steps
    assert len(aligner._over) <= 1024


def test_every_step_is_answered_for_once_whatever_is_lost_on_the_way():
    rng = random.Random(11)
    ranks, steps = range(3), range(0, 16 * 500, 16)
    aligner = StepAligner(ranks)
    known, aligned = set(), []
    for step in steps:
        for rank in rng.sample(ranks, 3):
            if rng.random() > 0.05:
                known.add(step)
                aligned += feed_all(aligner, [(rank, timed(*range(rng.choice((3, 3, 3, 4))), step=step))])
    for rank in ranks:
        aligned += feed_all(aligner, [(rank, timed(step=10**6))])
    assert aligner.pending == 0
    assert len({step.step for step in aligned}) == len(aligned)
    assert len(aligned) - 1 + sum(aligner.left_out.values()) == len(known)
    assert min(aligner.left_out[reason] for reason in (LeftOut.MISSING_RANK, LeftOut.COUNTS_DIFFER)) > 0


@pytest.mark.parametrize("seed", range(20))
def test_many_samples_at_once_give_what_they_give_one_by_one(seed):
    """Readings in which all ranks bring the same steps, and readings in which one is late, lacks or repeats some."""
    rng = random.Random(seed)
    ranks = (2, 3, 5)
    at_once, one_by_one = StepAligner(ranks), StepAligner(ranks)
    late: list[tuple[int, AllReduces]] = []
    begin, shortcuts = 0, 0
    for _ in range(40):
        steps = range(begin, begin + 4 * rng.randrange(12), 4)
        begin = steps.stop + rng.choice((0, 0, 0, -4, 400))
        samples = {rank: [timed(*range(rank, rank + 3), step=step) for step in steps] for rank in ranks}
        if rng.random() < 0.5:
            rank = rng.choice(ranks)
            samples[rank] += [those for other, those in late if other == rank]
            late = [(other, those) for other, those in late if other != rank]
            for those in [those for those in samples[rank] if rng.random() < 0.1]:
                samples[rank].remove(those)
                if rng.random() < 0.7:
                    late.append((rank, those))
        if rng.random() < 0.1:
            at_once.start_at(begin)
            one_by_one.start_at(begin)
        shortcuts += at_once._same_new_steps(samples) is not None
        entries = sorted(
            ((r, those) for r in ranks for those in samples[r]), key=lambda entry: (entry[1].step, entry[0])
        )
        expected = feed_all(one_by_one, entries)
        aligned = at_once.feed_all(samples)
        assert [step.step for step in aligned] == [step.step for step in expected]
        assert all(np.array_equal(a.wait_ns, b.wait_ns) for a, b in zip(aligned, expected, strict=True))
        assert (at_once.left_out, at_once.pending) == (one_by_one.left_out, one_by_one.pending)
    assert 0 < shortcuts < 40


def test_what_is_before_the_start_is_not_waited_for_and_not_counted():
    aligner = StepAligner((0, 1))
    aligned = feed_all(aligner, [(0, timed(1, step=0)), (0, timed(1, step=48))])
    aligner.start_at(48)
    aligned += feed_all(aligner, [(1, timed(1, step=0)), (1, timed(1, step=32)), (1, timed(1, step=48))])
    assert [step.step for step in aligned] == [48]
    assert (aligner.pending, aligner.left_out) == (0, {})


def test_a_group_has_two_ranks_or_more():
    with pytest.raises(ValueError, match="two or more"):
        StepAligner((3, 3))


def test_a_rank_of_another_group_is_refused():
    with pytest.raises(KeyError):
        StepAligner((0, 1)).feed(2, timed(1))


def test_ranks_need_not_begin_at_zero():
    aligner = StepAligner((9, 8))
    (aligned,) = feed_all(aligner, [(9, timed(5)), (8, timed(2))])
    assert isinstance(aligned, AlignedStep)
    assert (aligned.ranks, aligned.waited_ns, aligned.slowest) == ((8, 9), {8: 0, 9: 3}, 8)
