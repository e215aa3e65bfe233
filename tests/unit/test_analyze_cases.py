"""Each kind of trouble that files come with, through `vllm-k25 analyze`: the right numbers, words and exit code."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from vllm_k25_instrument.cli import app

CASES = Path(__file__).parents[1] / "data" / "cases"


def run(*arguments):
    return CliRunner().invoke(app, ["analyze", *(str(argument) for argument in arguments)])


def analyzed(*paths, code):
    """The document that the command writes, after it exited with `code` and without a traceback."""
    result = run(*(CASES / path for path in paths), "--json", "-")
    assert result.exit_code == code, result.stderr
    assert "Traceback" not in result.stderr
    document = json.loads(result.stdout)
    assert document["complete"] is (code == 0)
    return document, result.stderr


def codes(document):
    return [warning["code"] for warning in document["warnings"]]


def groups(document):
    return [
        (group["phase"], group["batch"], group["graph_mode"], group["rank"], group["steps"], group["step_ns"]["mean"])
        for group in document["groups"]
    ]


def kernel_ns(document):
    return document["totals"]["kernels"], document["totals"]["kernel_ns"]


def sums(document):
    return {name: total["sum_ns"] for name, total in document["totals"]["by_category"].items()}


THREE_STEPS = {"all_reduce": 30_000, "moe_experts": 60_000, "attention": 24_000}


@pytest.mark.parametrize(
    ("path", "warned"),
    [
        ("01-invalid-utf8/trace.json", ["invalid_encoding"]),
        ("09-one-graph-launch-many-kernels/trace.json", []),
        ("10-no-profiler-step/annotated.json", []),
        ("15-display-time-unit/unit_ms.json", []),
        ("15-display-time-unit/unit_ns.json", []),
    ],
)
def test_three_graph_replays_are_three_decode_steps_of_38_us(path, warned):
    document, _ = analyzed(path, code=0)
    assert kernel_ns(document) == (9, 114_000)
    assert sums(document) == THREE_STEPS
    assert [step["kernel_ns"] for step in document["steps"]] == [38_000] * 3
    assert groups(document) == [("decode", "4", "full", 0, 3, 40_000)]
    assert document["totals"]["kernels_in_steps"] == 9
    assert (document["totals"]["launches"], document["totals"]["launch_ns"]) == (3, 30_000)
    assert codes(document) == warned


def test_01_the_place_of_the_bad_byte_is_named():
    _, stderr = analyzed("01-invalid-utf8/trace.json", code=0)
    assert "first at byte 1125" in stderr


@pytest.mark.parametrize(
    ("path", "recovered", "kernels", "averaged"),
    [("02-truncated/cut.json", 10, (6, 76_000), 1), ("02-truncated/cut.json.gz", 7, (3, 38_000), 0)],
)
def test_02_a_truncated_file_is_incomplete_and_its_last_step_is_in_no_average(path, recovered, kernels, averaged):
    document, stderr = analyzed(path, code=3)
    assert codes(document) == ["truncated", "steps_cut_off"]
    assert document["warnings"][0]["count"] == recovered
    assert f"{recovered} whole events recovered" in stderr
    assert path in stderr
    assert kernel_ns(document) == kernels
    assert document["step_counts"]["0"]["averaged"] == averaged
    assert sum(group["steps"] for group in document["groups"]) == averaged


@pytest.mark.parametrize(
    ("path", "kernels", "bad"),
    [
        ("05-zero-or-backward-timestamps/trace.json", (3, 38_000), 2),
        ("05-zero-or-backward-timestamps/export.sqlite", (1, 1000), 2),
    ],
)
def test_05_impossible_times_are_left_out_counted_and_make_it_unreliable(path, kernels, bad):
    document, _ = analyzed(path, code=3)
    assert kernel_ns(document) == kernels
    assert codes(document)[:2] == ["bad_timestamps", "unreliable"]
    assert document["warnings"][0]["count"] == bad
    assert document["totals"]["span_ns"] <= 40_000


def test_06_fractions_of_a_microsecond_are_kept():
    document, _ = analyzed("06-sub-microsecond-rounding/trace.json", code=3)
    assert kernel_ns(document) == (3, 1400)
    assert codes(document) == ["no_steps"]


def test_08_overlapping_streams_have_a_sum_of_30_and_20_us_that_pass():
    document, _ = analyzed("08-overlap-two-streams/trace.json", code=0)
    totals = document["totals"]
    assert (totals["sum_ns"], totals["busy_ns"], totals["overlap_ns"], totals["idle_ns"]) == (30_000, 20_000, 10_000, 0)
    assert {name: total["exposed_ns"] for name, total in totals["by_category"].items()} == {
        "all_reduce": 10_000,
        "moe_experts": 10_000,
    }
    assert groups(document) == [("decode", "1", "none", 0, 1, 20_000)]
    text = run(CASES / "08-overlap-two-streams/trace.json").stdout
    assert "uses exposed time" in text
    words = " ".join(text.split())
    assert "add up to 30.0 µs, and the step takes 20.0 µs on the GPU" in words
    assert (
        "10.0 µs of the sum ran at the same time as something else (hidden: all_reduce 10.0 µs of its 20.0 µs)" in words
    )


def test_10_without_any_marker_there_are_totals_and_no_step():
    document, stderr = analyzed("10-no-profiler-step/bare.json", code=3)
    assert kernel_ns(document) == (4, 40_000)
    assert document["groups"] == document["steps"] == []
    assert document["step_counts"]["0"]["found"] == 0
    assert "no steps found" in stderr
    text = run(CASES / "10-no-profiler-step/bare.json").stdout
    assert "no steps" in text
    assert "1 step" not in text


def test_11_metadata_alone_is_no_capture_and_no_table_of_zeros():
    document, stderr = analyzed("11-metadata-only-no-cat-dur/trace.json", code=3)
    assert document["totals"] is None
    assert document["per_rank"] == {"0": None}
    assert "no GPU kernel events in" in stderr
    assert codes(document) == ["no_gpu_events"]
    assert "kernels" not in run(CASES / "11-metadata-only-no-cat-dur/trace.json").stdout


def test_11_rows_without_cat_dur_or_args_are_skipped_one_by_one():
    document, _ = analyzed("11-metadata-only-no-cat-dur/mixed.json", code=0)
    assert kernel_ns(document) == (3, 38_000)
    assert codes(document) == ["rows_skipped"]


@pytest.mark.parametrize("name", ["profiler_out_0.txt", "with_log_prefix.txt"])
def test_13_a_table_counts_kernels_copies_and_fills_once(name):
    document, _ = analyzed(f"13-key-averages-double-count/{name}", code=0)
    totals = document["totals"]
    assert (totals["sum_ns"], totals["kernel_ns"]) == (10_000_000, 8_500_000)
    assert totals["memcpy_ns"] + totals["memset_ns"] == 1_500_000
    assert totals["span_ns"] is totals["busy_ns"] is totals["kernels_in_steps"] is None
    assert document["groups"] == []
    assert document["source"] == "key-averages"
    assert "whoever adds up the whole column gets" in document["explanation"][0]


def test_14_ranks_are_compared_on_one_clock_wherever_their_file_keeps_it():
    names = ["rank0.json", "rank1_base_last.json", "rank2_absolute.json"]
    paths = [f"14-relative-vs-absolute-time/{name}" for name in names]
    document, _ = analyzed(*paths, code=0)
    assert document["ranks"] == {"found": [0, 1, 2], "expected": 3}
    cross = document["cross_rank"]
    assert {rank: skew["mean"] for rank, skew in cross["skew_ns"].items()} == {"0": 0, "1": 50_000_000, "2": 0}
    assert cross["all_reduce"]["wait_ns"] == {"0": 0, "1": 0, "2": 0}
    assert cross["all_reduce"]["transfer_ns"] == 10_000
    per_rank = document["per_rank"]
    assert [per_rank[str(rank)]["by_category"] for rank in range(3)] == [per_rank["0"]["by_category"]] * 3
    assert document["totals"]["kernel_ns"] == 3 * 38_000
    shuffled, _ = analyzed(*reversed(paths), code=0)
    assert shuffled["groups"] == document["groups"]
    assert shuffled["cross_rank"] == cross


def test_18_one_of_two_ranks_gives_its_own_figures_and_none_across_ranks():
    document, stderr = analyzed("18-missing-rank-files/x-rank-0.1.pt.trace.json", code=3)
    assert document["ranks"] == {"found": [0], "expected": 2}
    assert "1 of 2 ranks found" in stderr
    assert document["cross_rank"] == {"abstained": "1 of 2 ranks found"}
    assert groups(document) == [("decode", "4", "full", 0, 1, 40_000)]
    text = run(CASES / "18-missing-rank-files/x-rank-0.1.pt.trace.json").stdout
    assert "1 of 2 ranks" in text
    assert "lowest rank" not in text.replace("Slowest rank not marked", "")


def test_19_launches_without_kernels_say_so_and_show_no_zeros():
    document, stderr = analyzed("19-no-kernels-cupti-busy/trace.json", code=3)
    assert "3 launches but 0 kernels: GPU tracing was not active (another CUPTI client such as nsys?)" in stderr
    assert document["totals"] is None
    assert document["groups"] == []
    assert codes(document) == ["launches_without_kernels"]


def test_20_an_opaque_graph_is_busy_time_without_categories_and_names_the_remedy():
    document, stderr = analyzed("20-graph-level-tracing/export.sqlite", code=3)
    totals = document["totals"]
    assert (totals["opaque_graphs"], totals["opaque_graph_ns"], totals["busy_ns"]) == (1, 8000, 8000)
    assert totals["by_category"] == {}
    assert document["groups"] == []
    assert "--cuda-graph-trace=node" in stderr
    assert codes(document) == ["graph_level_trace"]


def test_22_without_nvtx_there_are_totals_and_a_suffixed_table_is_used():
    document, _ = analyzed("22-nvtx-table-absent-or-suffixed/absent.sqlite", code=3)
    assert kernel_ns(document) == (3, 6000)
    assert codes(document) == ["no_nvtx", "no_steps"]
    document, _ = analyzed("22-nvtx-table-absent-or-suffixed/suffixed.sqlite", code=0)
    assert groups(document) == [("decode", "1", "none", 0, 1, 22_000)]


@pytest.mark.parametrize("name", ["mixed.sqlite", "no_textid_column.sqlite"])
def test_23_text_and_text_id_are_both_names_so_there_are_two_steps(name):
    document, _ = analyzed(f"23-nvtx-text-or-textid/{name}", code=0)
    assert [(step["name"], step["kernels"]) for step in document["steps"]] == [
        ("execute_context_0(0)_generation_1(1)", 1),
        ("execute_context_0(0)_generation_2(2)", 2),
    ]


def test_25_kernels_without_a_name_keep_their_time_and_no_strings_is_an_error():
    document, _ = analyzed("25-null-names-no-stringids/null_demangled.sqlite", code=3)
    assert kernel_ns(document) == (3, 4000)
    assert sums(document)["other"] == 1000
    assert "unnamed_kernels" in codes(document)
    result = run(CASES / "25-null-names-no-stringids/no_stringids.sqlite")
    assert result.exit_code == 2
    assert result.stdout == ""
    assert "StringIds" in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1


def test_32_a_leaked_range_is_flagged_and_takes_neither_time_nor_steps():
    document, _ = analyzed("32-nvtx-push-pop-imbalance/export.sqlite", code=0)
    assert codes(document) == ["open_ranges"]
    assert sums(document) == {"all_reduce": 2000, "moe_experts": 2000, "attention": 2000}
    assert groups(document) == [("decode", "1", "none", 0, 2, 7000)]
