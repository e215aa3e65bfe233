"""A breakdown adds up, to the nanosecond, whatever the steps are made of."""

import json
import random

import pytest

from vllm_k25_instrument.model import HOOKED_CATEGORIES, NO_PARENT, Category, GraphMode, Phase, Range, StepSample
from vllm_k25_instrument.report.breakdown import (
    SCHEMA,
    Source,
    StepTally,
    StepTimes,
    breakdown_of,
    group_order,
    nearest_rank,
)
from vllm_k25_instrument.report.caveats import (
    INCOMPLETE_CODES,
    Caveat,
    CaveatCode,
    by_rank,
    format_ranks,
    is_complete,
)
from vllm_k25_instrument.report.digest import GroupKey, StepDigest, digest_step
from vllm_k25_instrument.report.slowest import SlowestTally


def step(duration=1000, ranges=(), *, number=0, requests=1, phase=Phase.DECODE, graph=GraphMode.FULL, complete=True):
    return StepSample(
        step=number,
        phase=phase,
        requests=requests,
        tokens=requests,
        padded_tokens=requests,
        graph_mode=graph,
        start_unix_ns=number,
        duration_ns=duration,
        ranges=tuple(ranges),
        complete=complete,
    )


def broken_down(*samples, expected=1, rank=0):
    return breakdown_of(((rank, sample) for sample in samples), source=Source.RING, ranks_expected=expected)


def random_step(rng):
    """A step of random nested ranges on up to three streams, children inside their parents."""
    ranges = []

    def fill(start, end, parent, depth):
        at = start
        while at < end and len(ranges) < 200:
            begin = at + rng.randrange(0, 40)
            length = rng.randrange(0, 400)
            if begin + length > end:
                return
            stream = ranges[parent].stream if parent != NO_PARENT and rng.random() < 0.8 else rng.randrange(3)
            ranges.append(Range(rng.choice(HOOKED_CATEGORIES), begin, length, stream=stream, parent=parent))
            if depth < 4 and rng.random() < 0.6:
                fill(begin, begin + length, len(ranges) - 1, depth + 1)
            at = begin + length

    duration = rng.randrange(1, 5000)
    fill(0, duration, NO_PARENT, 0)
    return step(
        duration,
        ranges,
        number=rng.randrange(1000),
        requests=rng.randrange(1, 600),
        phase=rng.choice(list(Phase)),
        graph=rng.choice(list(GraphMode)),
    )


@pytest.mark.parametrize("seed", range(60))
def test_exclusive_times_and_unattributed_add_up_to_the_total_step_time_in_every_group(seed):
    rng = random.Random(seed)
    pairs = [(rng.randrange(4), random_step(rng)) for _ in range(rng.randrange(1, 40))]
    breakdown = breakdown_of(pairs, source=Source.RING, ranks_expected=4)
    total = dict.fromkeys(((digest_step(rank, s).group, rank) for rank, s in pairs), 0)
    for rank, sample in pairs:
        total[digest_step(rank, sample).group, rank] += sample.duration_ns
    assert {(group.key, group.rank) for group in breakdown.groups} == set(total)
    for group in breakdown.groups:
        exclusive = sum(time.exclusive_ns for time in group.categories.values())
        assert exclusive + group.unattributed_ns == total[group.key, group.rank] == group.step_sum_ns
    assert sum(group.steps for group in breakdown.groups) == len(pairs)


@pytest.mark.parametrize("seed", range(20))
def test_the_order_of_the_steps_changes_nothing(seed):
    rng = random.Random(seed)
    pairs = [(rng.randrange(2), random_step(rng)) for _ in range(20)]
    shuffled = rng.sample(pairs, len(pairs))
    first = breakdown_of(pairs, source=Source.RING, ranks_expected=2).to_json_dict()
    assert breakdown_of(shuffled, source=Source.RING, ranks_expected=2).to_json_dict() == first


def test_a_child_on_the_same_stream_is_taken_from_its_parent_and_one_on_another_gets_what_is_uncovered():
    parent = Range(Category.MOE_EXPERTS, 0, 600)
    same = Range(Category.MOE_SHARED_EXPERTS, 100, 200, parent=0)
    other = Range(Category.ALL_REDUCE, 450, 300, stream=1, parent=0)
    (group,) = broken_down(step(1000, [parent, same, other])).groups
    assert group.categories["moe_experts"].exclusive_ns == 400
    assert group.categories["moe_experts"].sum_ns == 600
    assert group.categories["moe_shared_experts"].exclusive_ns == 200
    assert group.categories["all_reduce"].exclusive_ns == 150
    assert group.categories["all_reduce"].sum_ns == 300
    assert group.unattributed_ns == 250


def test_the_inclusive_sum_counts_nested_ranges_of_one_category_twice_and_the_exclusive_sum_once():
    ranges = [Range(Category.MLA_ATTENTION, 0, 500), Range(Category.MLA_ATTENTION, 100, 300, parent=0)]
    time = broken_down(step(1000, ranges)).groups[0].categories["mla_attention"]
    assert (time.sum_ns, time.exclusive_ns, time.count) == (800, 500, 2)


def test_what_the_main_stream_covers_is_not_counted_again_for_a_side_stream():
    ranges = [Range(Category.MOE_EXPERTS, 0, 900), Range(Category.ALL_REDUCE, 0, 800, stream=1)]
    breakdown = broken_down(step(1000, ranges))
    assert breakdown.groups[0].categories["all_reduce"].exclusive_ns == 0
    assert breakdown.groups[0].unattributed_ns == 100
    assert breakdown.caveats == ()
    assert breakdown.complete


def test_a_range_that_calls_itself_unattributed_stays_unattributed():
    ranges = [Range(Category.UNATTRIBUTED, 0, 500), Range(Category.NORM, 100, 200, parent=0)]
    (group,) = broken_down(step(1000, ranges)).groups
    assert group.unattributed_ns == 800
    assert list(group.categories) == ["norm"]


def test_categories_without_a_range_are_absent_rather_than_zero():
    (group,) = broken_down(step(1000, [Range(Category.SAMPLING, 0, 10)])).groups
    assert list(group.categories) == ["sampling"]


def test_groups_are_told_apart_by_phase_batch_and_graph_mode_and_sorted_decode_first():
    samples = [
        step(requests=300),
        step(phase=Phase.PREFILL),
        step(requests=64),
        step(requests=17),
        step(requests=2, graph=GraphMode.NONE),
    ]
    keys = [(g.key.phase, g.key.batch, g.key.graph_mode, g.steps) for g in broken_down(*samples).groups]
    assert keys == [
        ("decode", "4", "none", 1),
        ("decode", "64", "full", 2),
        ("decode", "+Inf", "full", 1),
        ("prefill", "1", "full", 1),
    ]


def test_percentiles_are_nearest_rank_and_always_observed_values():
    values = [10, 20, 30, 40]
    assert nearest_rank(values, 50) == 20
    assert nearest_rank(values, 51) == 30
    assert nearest_rank(values, 99) == 40
    assert nearest_rank(values, 1) == 10
    assert nearest_rank(list(range(1, 201)), 99) == 198
    assert nearest_rank([7], 50) == 7


@pytest.mark.parametrize(("values", "percent"), [([], 50), ([1], 0), ([1], 101)])
def test_a_percentile_of_nothing_or_out_of_range_is_refused(values, percent):
    with pytest.raises(ValueError, match="percentile"):
        nearest_rank(values, percent)


def test_the_mean_is_an_integer_rounded_half_up():
    assert StepTimes.of([1, 2]).mean == 2
    assert StepTimes.of([1, 1, 2]).mean == 1
    assert StepTimes.of([1, 2, 2]).mean == 2


def test_the_document_follows_the_schema_exactly_and_holds_only_integers():
    sample = step(1000, [Range(Category.ALL_REDUCE, 0, 400), Range(Category.SAMPLING, 500, 100)], requests=64)
    document = broken_down(sample, sample).to_json_dict()
    assert document == {
        "schema": "vllm_k25.breakdown/1",
        "source": "ring",
        "complete": True,
        "warnings": [],
        "ranks": {"found": [0], "expected": 1},
        "groups": [
            {
                "phase": "decode",
                "batch": "64",
                "graph_mode": "full",
                "rank": 0,
                "steps": 2,
                "step_ns": {"mean": 1000, "p50": 1000, "p99": 1000},
                "categories": {
                    "all_reduce": {"sum_ns": 800, "exclusive_ns": 800, "count": 2},
                    "sampling": {"sum_ns": 200, "exclusive_ns": 200, "count": 2},
                },
                "unattributed_ns": 1000,
            }
        ],
    }
    assert json.loads(json.dumps(document)) == document
    assert document["schema"] == SCHEMA


@pytest.mark.parametrize(
    ("source", "name"),
    [
        (Source.RING, "ring"),
        (Source.TORCH_TRACE, "torch-trace"),
        (Source.NSYS, "nsys"),
        (Source.KEY_AVERAGES, "key-averages"),
    ],
)
def test_sources_have_the_names_of_the_schema(source, name):
    assert breakdown_of([(0, step())], source=source, ranks_expected=1).to_json_dict()["source"] == name


def test_without_a_step_there_is_no_group_and_it_says_so():
    breakdown = breakdown_of([], source=Source.NSYS, ranks_expected=1)
    assert breakdown.groups == ()
    assert CaveatCode.NO_SAMPLES in [caveat.code for caveat in breakdown.caveats]
    assert not breakdown.complete


def test_missing_ranks_make_it_incomplete():
    breakdown = broken_down(step(), expected=8, rank=3)
    assert breakdown.to_json_dict()["ranks"] == {"found": [3], "expected": 8}
    assert breakdown.caveats[0].code is CaveatCode.RANKS_MISSING
    assert "ranks 0-2, 4-7 missing" in breakdown.caveats[0].message
    assert not breakdown.complete


def test_incomplete_steps_are_counted_in_and_make_it_incomplete():
    breakdown = broken_down(step(), step(complete=False))
    assert breakdown.groups[0].steps == 2
    assert [caveat.code for caveat in breakdown.caveats] == [CaveatCode.SAMPLES_INCOMPLETE]
    assert not breakdown.complete


@pytest.mark.parametrize("code", list(CaveatCode))
def test_only_missing_or_untrustworthy_data_make_a_breakdown_incomplete(code):
    assert is_complete([Caveat(code, "")]) is (code not in INCOMPLETE_CODES)


def test_a_filter_takes_groups_out_and_keeps_the_warnings():
    breakdown = broken_down(step(requests=1), step(requests=64), step(phase=Phase.MIXED), expected=2)
    only = breakdown.only(phases=["decode"], batches=["64"])
    assert [group.key.batch for group in only.groups] == ["64"]
    assert only.caveats == breakdown.caveats
    assert breakdown.only() == breakdown
    assert breakdown.only(ranks=[1]).groups == ()


def test_a_group_is_sorted_by_the_bounds_of_its_batch_not_by_its_text():
    labels = ["256", "+Inf", "16", "1", "64", "4"]
    keys = sorted((GroupKey(Phase.DECODE, label, GraphMode.NONE) for label in labels), key=group_order)
    assert [key.batch for key in keys] == ["1", "4", "16", "64", "256", "+Inf"]


@pytest.mark.parametrize(
    ("ranks", "text"),
    [([], "no rank"), ([3], "rank 3"), ([1, 0], "ranks 0-1"), ([0, 1, 2, 7, 5, 5], "ranks 0-2, 5, 7")],
)
def test_ranks_are_written_with_runs_contracted(ranks, text):
    assert format_ranks(ranks) == text


def test_ranks_with_the_same_to_say_say_it_once():
    assert by_rank({0: "a", 1: "b", 2: "a"}) == "ranks 0, 2: a; rank 1: b"


def tallied(work_by_rank, *, reduce_ns=0, expected=None, **options):
    """A verdict over steps in which rank r works ``work_by_rank[r][n]`` ns in the n-th and then all-reduces."""
    tally = SlowestTally(len(work_by_rank) if expected is None else expected, **options)
    for rank, works in work_by_rank.items():
        for number, work in enumerate(works):
            wait = 1_000_000 - work if reduce_ns == 0 else reduce_ns
            tally.add(digest_step(rank, step(work + wait, [Range(Category.ALL_REDUCE, work, wait)], number=number)))
    return tally.verdict(GroupKey(Phase.DECODE, "1", GraphMode.FULL))


def test_among_steps_of_equal_length_the_rank_that_waits_least_is_the_slowest():
    verdict = tallied({0: [500, 510], 1: [800, 810], 2: [500, 510]})
    assert (verdict.rank, verdict.excess_ns, verdict.steps) == (1, 300, 2)
    assert verdict.sentence.startswith("slowest rank 1: +0.3 µs (+59.4 %) per step outside all-reduce")


def test_equal_ranks_have_no_slowest():
    assert tallied({0: [500, 500], 1: [500, 500]}).rank is None


def test_a_lead_within_chance_marks_nobody():
    rng = random.Random(1)
    verdict = tallied({rank: [rng.gauss(500_000, 5000) for _ in range(50)] for rank in range(2)})
    assert verdict.rank is None
    assert verdict.reason == "the ranks do not differ beyond chance"


def test_a_single_rank_has_no_slowest():
    assert tallied({0: [500]}).reason == "there is one rank only"


def test_a_missing_rank_or_ranks_with_different_work_abstain():
    assert tallied({0: [500], 1: [800]}, expected=3).reason == "2 of 3 ranks have samples here"
    assert "different work" in tallied({0: [500], 1: [800]}, comparable=False).reason


def test_a_digest_holds_the_sums_of_its_step():
    digest = digest_step(3, step(1000, [Range(Category.ALL_REDUCE, 0, 400)], number=7, requests=5))
    assert isinstance(digest, StepDigest)
    assert (digest.rank, digest.step, digest.group.batch, digest.unattributed_ns) == (3, 7, "16", 600)
    assert digest.exclusive_ns(Category.ALL_REDUCE) == 400
    assert digest.exclusive_ns(Category.COLLECTIVE) == 0


def test_a_tally_can_be_asked_again_as_it_grows():
    tally = StepTally()
    for count in (1, 2):
        tally.add(digest_step(0, step()))
        assert tally.breakdown(source=Source.RING, ranks_found=[0], ranks_expected=1).groups[0].steps == count
