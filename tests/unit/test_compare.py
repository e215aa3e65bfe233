"""`vllm-k25 compare`: two breakdowns of any sources side by side, and checks that fail when they should."""

import json

import pytest
from typer.testing import CliRunner

from tests.breakdowns import breakdown
from tests.traces import Rank, Work, decode_rank, document, encode
from tests.unit.test_report_rings import open_rank
from vllm_k25_instrument.cli import app
from vllm_k25_instrument.model import Category, GraphMode, Phase
from vllm_k25_instrument.report.compare import REST, DocumentError, Side, compare_sides


def run(*arguments):
    return CliRunner().invoke(app, ["compare", *(str(argument) for argument in arguments)])


def decode(times, rest=0, *, steps=10, rank=0, graph="full", **options):
    return breakdown([("decode", "64", graph, rank, steps, times, rest)], **options)


def saved(path, made):
    path.write_text(json.dumps(made))
    return path


def test_each_category_has_its_difference_and_its_share_of_the_change():
    a = Side.of("a", decode({"all_reduce": 100_000, "moe_experts": 50_000}, 10_000))
    b = Side.of("b", decode({"all_reduce": 180_000, "moe_experts": 40_000, "sampling": 10_000}, 30_000))
    (group,) = compare_sides(a, b).groups
    assert (group.step.a_ns, group.step.b_ns, group.step.difference_ns) == (16_000, 26_000, 10_000)
    assert {row.name: (row.difference_ns, row.share) for row in group.rows} == {
        "all_reduce": (8_000, 0.8),
        "moe_experts": (-1_000, -0.1),
        "sampling": (1_000, 0.1),
        REST: (2_000, 0.2),
    }
    assert sum(row.difference_ns for row in group.rows) == group.step.difference_ns


def test_ranks_are_averaged_and_one_without_a_category_spent_no_time_on_it():
    made = breakdown(
        [
            ("decode", "64", "full", 0, 10, {"all_reduce": 100}, 0),
            ("decode", "64", "full", 1, 5, {"all_reduce": 100, "sampling": 100}, 0),
        ]
    )
    (steps,) = Side.of("a", made).groups.values()
    assert steps.by_category == {"all_reduce": 15, "sampling": 10}
    assert steps.step_ns == 25


def test_a_trace_that_infers_another_graph_mode_is_matched_by_phase_and_batch():
    a, b = Side.of("a", decode({"norm": 10}, graph="full")), Side.of("b", decode({"norm": 20}, graph="piecewise"))
    (group,) = compare_sides(a, b).groups
    assert group.title == "decode · batch 64 · full graph / piecewise graph"


def test_groups_of_one_side_only_are_listed(tmp_path):
    a = saved(tmp_path / "a.json", decode({"norm": 10}))
    both = breakdown([("decode", "64", "full", 0, 1, {"norm": 10}, 0), ("prefill", "1", "none", 0, 1, {"norm": 10}, 0)])
    result = run(a, saved(tmp_path / "b.json", both))
    assert result.exit_code == 0
    assert "Only in B: prefill batch 1, eager" in result.stdout


@pytest.mark.parametrize(
    ("before", "after", "options", "code"),
    [
        (1000, 1000, ["--threshold", 0], 0),
        (1000, 1040, ["--threshold", 5], 0),
        (1000, 1060, ["--threshold", 5], 1),
        (1000, 500, ["--threshold", 5], 0),
        (1000, 1040, ["--agree", 5], 0),
        (1000, 1060, ["--agree", 5], 1),
        (1060, 1000, ["--agree", 5], 1),
        (1000, 2000, [], 0),
    ],
)
def test_checks_fail_with_exit_1(tmp_path, before, after, options, code):
    a = saved(tmp_path / "a.json", decode({"all_reduce": before}))
    b = saved(tmp_path / "b.json", decode({"all_reduce": after}))
    result = run(a, b, *options)
    assert result.exit_code == code
    assert bool(result.stderr) is (code == 1)


def test_what_is_too_small_to_matter_is_not_judged(tmp_path):
    a = saved(tmp_path / "a.json", decode({"all_reduce": 100_000, "sampling": 10}))
    b = saved(tmp_path / "b.json", decode({"all_reduce": 100_000, "sampling": 500}))
    assert run(a, b, "--agree", 1).exit_code == 0


def test_between_hooks_and_a_trace_only_what_both_measure_is_judged(tmp_path):
    ring = saved(tmp_path / "ring.json", decode({"all_reduce": 500}, 500, source="ring"))
    trace = saved(tmp_path / "trace.json", decode({"all_reduce": 500, "dense_gemm": 300, "norm": 100}, 100))
    assert run(ring, trace, "--agree", 1).exit_code == 0
    off = saved(tmp_path / "off.json", decode({"all_reduce": 400, "dense_gemm": 500}, 100))
    result = run(ring, off, "--agree", 1)
    assert result.exit_code == 1
    assert "all_reduce" in result.stderr
    assert "dense_gemm" not in result.stderr


def test_an_incomplete_side_exits_3_but_a_failed_check_comes_first(tmp_path):
    a = saved(tmp_path / "a.json", decode({"all_reduce": 100}))
    b = saved(tmp_path / "b.json", decode({"all_reduce": 200}, complete=False))
    result = run(a, b)
    assert result.exit_code == 3
    assert "INCOMPLETE" in result.stdout
    assert run(a, b, "--threshold", 10).exit_code == 1


def test_without_steps_the_sums_are_compared(tmp_path):
    a = saved(tmp_path / "a.json", breakdown([], source="key-averages", totals={"norm": 100, "memory": 50}))
    b = saved(tmp_path / "b.json", breakdown([], source="key-averages", totals={"norm": 150, "memory": 50}))
    result = run(a, b, "--json", "-")
    assert result.exit_code == 0
    assert json.loads(result.stdout)["totals"]["norm"]["share_of_change"] == 1
    assert run(a, b, "--agree", 5).exit_code == 1


def test_nothing_in_common_exits_3(tmp_path):
    a = saved(tmp_path / "a.json", decode({"norm": 1}))
    b = saved(tmp_path / "b.json", breakdown([("prefill", "1", "none", 0, 1, {"norm": 1}, 0)]))
    result = run(a, b)
    assert result.exit_code == 3
    assert "nothing in common" in result.stderr


def test_a_saved_breakdown_equals_the_trace_it_was_made_of(tmp_path):
    trace = tmp_path / "trace.json"
    trace.write_bytes(encode(document([decode_rank(3)])))
    CliRunner().invoke(app, ["analyze", str(trace), "--json", str(tmp_path / "saved.json")])
    result = run(tmp_path / "saved.json", trace, "--agree", 0, "--json", "-")
    assert result.exit_code == 0, result.stderr
    (group,) = json.loads(result.stdout)["groups"]
    assert group["step"]["difference_ns"] == 0
    assert group["step"]["a_ns"] == 40_000


def test_live_rings_agree_with_a_trace_of_the_same_run_or_do_not(tmp_path):
    def ring(reduce_ns):
        folder = tmp_path / f"ring{reduce_ns}"
        rank = open_rank(folder, 0, 1)
        ranges = [
            (Category.MOE_EXPERTS, 0, 20_000, "", -1, -1, 0),
            (Category.ATTENTION, 20_000, 8_000, "", -1, -1, 0),
            (Category.ALL_REDUCE, 28_000, reduce_ns, "", -1, -1, 0),
        ]
        for _ in range(3):
            rank.write(4, Phase.DECODE, GraphMode.FULL, ranges=ranges, duration_ns=30_000 + reduce_ns)
        return folder

    trace = tmp_path / "trace.json"
    trace.write_bytes(encode(document([decode_rank(3)])))
    assert run(ring(10_100), trace, "--agree", 5).exit_code == 0
    result = run(ring(13_000), trace, "--agree", 5)
    assert result.exit_code == 1
    assert "disagreement: decode · batch 4 · full graph: all_reduce 13.0 and 10.0 µs, 23.1 % apart" in result.stderr


def test_a_slower_kernel_is_found_between_two_traces(tmp_path):
    fast, slow = tmp_path / "fast.json", tmp_path / "slow.json"
    rank = decode_rank(3)
    fast.write_bytes(encode(document([rank])))
    calls = tuple(
        type(call)(
            call.name,
            call.start_ns,
            call.duration_ns,
            tuple(Work(w.name, w.start_ns, w.duration_ns + (5000 if n == 2 else 0)) for n, w in enumerate(call.work)),
        )
        for call in rank.calls
    )
    slow.write_bytes(encode(document([Rank(calls, rank.ranges)])))
    result = run(fast, slow, "--threshold", 10, "--json", tmp_path / "out.json")
    assert result.exit_code == 1
    assert "slower: decode · batch 4 · full graph: 40.0 -> 45.0 µs a step, +12.5 %" in result.stderr
    (group,) = json.loads((tmp_path / "out.json").read_text())["groups"]
    assert group["categories"]["attention"]["share_of_change"] == 1


@pytest.mark.parametrize(
    "broken",
    [
        {"schema": "vllm_k25.breakdown/2"},
        {"schema": "vllm_k25.breakdown/1"},
        decode({"norm": 1}) | {"groups": 5},
        decode({"norm": 1}) | {"source": "elsewhere"},
        decode({"norm": "1"}),
        decode({"norm": 1}, steps=0),
        decode({"norm": 1e300}),
        [],
    ],
)
def test_a_document_that_is_no_breakdown_is_refused(broken):
    with pytest.raises(DocumentError):
        Side.of("a", broken)


def test_broken_and_missing_files_are_one_line_and_exit_2(tmp_path):
    good = saved(tmp_path / "a.json", decode({"norm": 1}))
    for name, text in (
        ("b.json", '{"schema": "vllm_k25.breakdown/1", '),
        ("c.json", '{"schema": "vllm_k25.breakdown/1"}'),
        ("d.json", '{"schema": "vllm_k25.breakdown/1", "x": ' + "[" * 100_000),
        ("e.txt", "hello"),
    ):
        (tmp_path / name).write_text(text)
        result = run(good, tmp_path / name)
        assert result.exit_code == 2, name
        assert name in result.stderr
        assert len(result.stderr.strip().splitlines()) == 1
    assert run(good, tmp_path / "nowhere").exit_code == 2
