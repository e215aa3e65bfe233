"""Ranks compared: transfer is what nobody could avoid, waiting is the rest, and without all ranks nothing is said."""

import pytest

from vllm_k25_instrument.analysis.cross_rank import compare_ranks, match_steps
from vllm_k25_instrument.model import GraphMode, Phase
from vllm_k25_instrument.report.gpu import CategoryTotal, GpuTotals, RankFindings, StepRecord


def step(rank, place, all_reduces=(), *, name="decode", number=None, start=None, work=1000, cut_off=False):
    total = sum(all_reduces)
    return StepRecord(
        rank=rank,
        place=place,
        name=name,
        phase=Phase.DECODE,
        requests=4,
        number=number,
        graph_mode=GraphMode.FULL,
        start_ns=10_000 * place if start is None else start,
        span_ns=work + total,
        sum_ns=work + total,
        busy_ns=work + total,
        kernels=1 + len(all_reduces),
        launches=1,
        launch_ns=1,
        cut_off=cut_off,
        categories={
            "moe_experts": CategoryTotal(1, work, work),
            "all_reduce": CategoryTotal(len(all_reduces), total, total),
        },
        all_reduce_ns=tuple(all_reduces),
    )


def rank_of(number, steps, base=0):
    return RankFindings(
        rank=number, path=f"rank{number}.json", totals=GpuTotals(), clock_base_ns=base, steps=tuple(steps)
    )


def test_transfer_is_the_least_of_any_rank_call_by_call_and_wait_the_rest():
    ranks = [
        rank_of(0, [step(0, 1, (100, 50)), step(0, 2, (80, 50))]),
        rank_of(1, [step(1, 1, (70, 60)), step(1, 2, (90, 55))]),
    ]
    cross = compare_ranks(ranks, 2).cross_rank
    assert (cross.steps, cross.calls) == (2, 2)
    assert cross.transfer_ns == (70 + 50 + 80 + 50) // 2
    assert [wait.wait_ns for wait in cross.ranks] == [30 // 2, round((10 + 10 + 5) / 2)]


def test_a_rank_that_starts_late_has_the_skew():
    ranks = [
        rank_of(0, [step(0, 1, (100,), start=1000), step(0, 2, (100,), start=9000)], base=5_000_000),
        rank_of(1, [step(1, 1, (100,), start=500), step(1, 2, (100,), start=9100)], base=5_000_000),
    ]
    waits = compare_ranks(ranks, 2).cross_rank.ranks
    assert [(wait.skew_ns, wait.largest_skew_ns) for wait in waits] == [(250, 500), (50, 100)]


def test_without_a_common_clock_there_is_no_skew_but_waiting_all_the_same():
    ranks = [rank_of(0, [step(0, 1, (100,))]), rank_of(1, [step(1, 1, (70,))], base=None)]
    cross = compare_ranks(ranks, 2).cross_rank
    assert [(wait.wait_ns, wait.skew_ns) for wait in cross.ranks] == [(30, None), (0, None)]


def test_the_slowest_rank_is_the_one_that_waits_least():
    ranks = [
        rank_of(0, [step(0, n, (500,), work=1000) for n in range(1, 9)]),
        rank_of(1, [step(1, n, (100,), work=1400) for n in range(1, 9)]),
    ]
    cross = compare_ranks(ranks, 2).cross_rank
    assert cross.slowest == 1
    assert cross.verdict.startswith("slowest rank 1: +0.4 µs (+40.0 %)")


@pytest.mark.parametrize(
    ("ranks", "expected", "reason"),
    [
        ([rank_of(0, [step(0, 1)])], 1, "there is one rank only"),
        ([rank_of(0, [step(0, 1)])], 2, "1 of 2 ranks found"),
        ([rank_of(0, [step(0, 1)]), rank_of(1, [])], 2, "no steps on rank 1"),
    ],
)
def test_it_abstains_where_ranks_or_steps_are_missing(ranks, expected, reason):
    comparison = compare_ranks(ranks, expected)
    assert comparison.cross_rank.reason == reason
    assert comparison.cross_rank.to_json_dict() == {"abstained": reason}
    assert comparison.slowest == {}


def test_steps_with_different_numbers_of_all_reduces_are_left_out_and_counted():
    ranks = [
        rank_of(0, [step(0, 1, (10, 10)), step(0, 2, (10,))]),
        rank_of(1, [step(1, 1, (10,)), step(1, 2, (10,))]),
    ]
    cross = compare_ranks(ranks, 2).cross_rank
    assert (cross.steps, cross.skipped) == (1, 1)


def places(matched):
    return [tuple(step.place for step in those) for those in matched]


def test_steps_are_matched_by_their_own_numbers_where_they_have_some():
    first = rank_of(0, [step(0, n, number=n + 10) for n in range(1, 5)])
    second = rank_of(1, [step(1, n, number=n + 12) for n in range(1, 5)])
    assert places(match_steps([first, second])) == [(3, 1), (4, 2)]
    third = rank_of(1, [step(1, n, number=n + 90) for n in range(1, 5)])
    assert match_steps([first, third]) == "the ranks have no step in common"


def test_captures_that_begin_at_different_steps_are_matched_by_the_names_of_their_steps():
    names = ["prefill", "mixed", "decode", "decode", "decode"]
    first = rank_of(0, [step(0, n + 1, name=name) for n, name in enumerate(names)])
    second = rank_of(1, [step(1, n + 1, name=name) for n, name in enumerate(names[1:])], base=None)
    assert places(match_steps([first, second])) == [(2, 1), (3, 2), (4, 3), (5, 4)]


def test_where_names_agree_at_several_shifts_the_clock_decides():
    first = rank_of(0, [step(0, n) for n in range(1, 7)])
    second = rank_of(1, [step(1, n, start=10_000 * (n + 2) + 77) for n in range(1, 5)])
    assert places(match_steps([first, second])) == [(3, 1), (4, 2), (5, 3), (6, 4)]


def test_and_without_a_clock_it_abstains():
    first = rank_of(0, [step(0, n) for n in range(1, 7)], base=None)
    second = rank_of(1, [step(1, n) for n in range(1, 5)])
    assert "cannot be matched" in match_steps([first, second])
    assert "cannot be matched" in compare_ranks([first, second], 2).cross_rank.reason


def test_ranks_with_other_steps_altogether_are_not_matched():
    first = rank_of(0, [step(0, n, name="a") for n in range(1, 4)])
    second = rank_of(1, [step(1, n, name="b") for n in range(1, 4)])
    assert "cannot be matched" in match_steps([first, second])


def test_steps_that_are_cut_off_on_any_rank_are_left_out():
    first = rank_of(0, [step(0, 1, cut_off=True), step(0, 2), step(0, 3)])
    second = rank_of(1, [step(1, 1), step(1, 2), step(1, 3, cut_off=True)])
    assert places(match_steps([first, second])) == [(2, 2)]


def test_eight_ranks_are_matched_to_the_first():
    ranks = [rank_of(r, [step(r, n - r % 3, start=10_000 * n + r) for n in range(1 + r % 3, 11)]) for r in range(8)]
    matched = match_steps(ranks)
    assert len(matched) == 8
    assert all(len({round(step.start_ns, -4) for step in those}) == 1 for those in matched)
