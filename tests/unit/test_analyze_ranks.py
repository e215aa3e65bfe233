"""Whose findings are whose: ranks known, unknown, there twice, and those that must exist since others do."""

from pathlib import Path

import pytest

from vllm_k25_instrument.analysis.analyze import Options, analyze
from vllm_k25_instrument.analysis.capture import NO_RANK, CaptureError, Source
from vllm_k25_instrument.analysis.findings import Reduced
from vllm_k25_instrument.analysis.inputs import Input
from vllm_k25_instrument.analysis.workers import Done, Failure
from vllm_k25_instrument.report.caveats import Caveat, CaveatCode
from vllm_k25_instrument.report.gpu import GpuTotals, RankFindings


def findings(rank, path="a.json", *, kernel_ns=100, device=0, world_size=0, base=0):
    totals = GpuTotals(kernels=1, kernel_ns=kernel_ns, span_ns=kernel_ns, busy_ns=kernel_ns, kernels_in_steps=0)
    return RankFindings(rank=rank, path=path, totals=totals, device=device, world_size=world_size, clock_base_ns=base)


def analyzed(*files, source=Source.TORCH_TRACE, options=None):
    """Each file: the findings in it, or a failure; with notes where it is a tuple."""
    inputs = [Input(Path(f"file{n}"), source) for n in range(len(files))]

    def run(jobs, advance):
        done = []
        for job, content in zip(jobs, files, strict=True):
            if isinstance(content, Failure):
                done.append(Done(job.input.path, source, failure=content))
                continue
            ranks, notes, complete = content if isinstance(content, tuple) else (content, (), True)
            done.append(Done(job.input.path, source, tuple(Reduced(rank, notes, complete) for rank in ranks)))
        return done

    return analyze([], options, run=run, inputs=inputs).breakdown


def codes(breakdown):
    return [str(caveat.code) for caveat in breakdown.caveats]


def test_ranks_are_sorted_whatever_the_order_of_the_files():
    breakdown = analyzed([findings(2)], [findings(0)], [findings(1)])
    assert [rank.rank for rank in breakdown.gpu.ranks] == [0, 1, 2]
    assert breakdown.ranks_expected == 3


def test_a_rank_that_says_five_has_five_others():
    breakdown = analyzed([findings(5)])
    assert (breakdown.ranks_found, breakdown.ranks_expected) == ((5,), 6)
    assert "1 of 6 ranks found, ranks 0-4 missing" in breakdown.caveats[0].message


def test_a_single_file_without_a_rank_is_rank_0_and_nothing_is_said():
    breakdown = analyzed([findings(NO_RANK)])
    assert breakdown.ranks_found == (0,)
    assert codes(breakdown) == []


def test_several_without_a_rank_are_numbered_in_order_and_said():
    breakdown = analyzed([findings(NO_RANK, "x", device=3), findings(NO_RANK, "x", device=1)], source=Source.NSYS)
    assert [(rank.rank, rank.device) for rank in breakdown.gpu.ranks] == [(0, 3), (1, 1)]
    assert codes(breakdown) == ["rank_unknown"]
    assert "x (device 3) is called rank 0, x (device 1) is called rank 1" in breakdown.caveats[0].message


def test_one_without_a_rank_beside_others_takes_a_free_number():
    breakdown = analyzed([findings(0)], [findings(NO_RANK)], [findings(2)])
    assert breakdown.ranks_found == (0, 1, 2)
    assert codes(breakdown) == ["rank_unknown"]


@pytest.mark.parametrize("first_is_larger", [True, False])
def test_of_two_captures_of_a_rank_the_one_with_more_work_is_used(first_is_larger):
    small, large = findings(0, "small"), findings(0, "large", kernel_ns=500)
    pair = (large, small) if first_is_larger else (small, large)
    breakdown = analyzed([pair[0]], [pair[1]])
    assert [rank.path for rank in breakdown.gpu.ranks] == ["large"]
    assert codes(breakdown) == ["rank_twice"]
    assert not breakdown.complete


def test_a_file_that_fails_is_said_and_if_all_fail_that_is_the_error():
    failure = Failure(Path("broken.json"), "is no JSON", "write it again")
    breakdown = analyzed([findings(0)], failure)
    assert codes(breakdown) == ["file_unreadable"]
    assert breakdown.caveats[0].message == "broken.json: is no JSON: write it again"
    with pytest.raises(CaptureError, match=r"broken\.json: is no JSON: write it again"):
        analyzed(failure, failure)


def test_equal_notes_are_said_once_and_many_like_ones_share_a_line():
    note = Caveat(CaveatCode.GRAPH_NODES_UNMAPPED, "export: 5 nodes", 5)
    breakdown = analyzed(([findings(0), findings(1)], (note,), True))
    assert [(str(c.code), c.count) for c in breakdown.caveats] == [("graph_nodes_unmapped", 5)]
    many = [([findings(n)], (Caveat(CaveatCode.ROWS_SKIPPED, f"rank{n}: 2 rows left out", 2),), True) for n in range(8)]
    (caveat,) = analyzed(*many).caveats
    assert (caveat.message, caveat.count) == ("rank0: 2 rows left out (and the like of 7 more files)", 16)


def test_a_capture_that_is_incomplete_without_saying_why_is_incomplete():
    breakdown = analyzed(([findings(0)], (), False))
    assert codes(breakdown) == ["truncated"]


def test_without_a_common_clock_that_is_said():
    breakdown = analyzed([findings(0)], [findings(1, base=None)])
    assert codes(breakdown) == ["clocks_not_common"]
    assert breakdown.complete


@pytest.mark.parametrize(("expect", "found"), [(4, "2 of 4"), (2, ""), (1, "")])
def test_the_number_of_ranks_can_be_said_by_the_user(expect, found):
    breakdown = analyzed([findings(0)], [findings(1)], options=Options(expect_ranks=expect))
    assert (found in breakdown.caveats[0].message) if found else breakdown.caveats == ()
