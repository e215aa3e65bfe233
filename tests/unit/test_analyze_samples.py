"""A real capture in four forms, through `vllm-k25 analyze`: one truth."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from vllm_k25_instrument.cli import app

SAMPLES = Path(__file__).resolve().parents[2].parent / "shared" / "samples"

pytestmark = pytest.mark.skipif(
    not SAMPLES.is_dir(), reason=f"no {SAMPLES}: the samples are not part of the repository"
)

TRACE = SAMPLES / "vllm-graph-decode-rank-0.pt.trace.json.gz"
NODES = SAMPLES / "vllm-graph-decode-node-level.sqlite"
GRAPHS = SAMPLES / "vllm-graph-decode-graph-level.sqlite"
TABLE = SAMPLES / "vllm-graph-decode-profiler_out_0.txt"


def analyzed(*arguments, code=0):
    result = CliRunner().invoke(app, ["analyze", *(str(argument) for argument in arguments), "--json", "-"])
    assert result.exit_code == code, result.stderr
    return json.loads(result.stdout)


@pytest.fixture(scope="module")
def trace():
    return analyzed(TRACE)


def test_the_trace_has_7440_kernels_of_188_143454_ms_and_191_450_with_copies_and_fills(trace):
    totals = trace["totals"]
    assert (totals["kernels"], totals["kernel_ns"]) == (7440, 188_143_454)
    assert round(totals["sum_ns"] / 1e6, 3) == 191.450
    assert (totals["memcpys"], totals["memsets"]) == (210, 167)


def test_7001_kernels_belong_to_a_step_and_439_to_none(trace):
    assert trace["totals"]["kernels_in_steps"] == 7001
    assert trace["totals"]["kernels_outside_steps"] == 439
    assert sum(step["kernels"] for step in trace["steps"]) == 7001


def test_there_are_18_steps_of_which_the_last_has_no_work(trace):
    assert trace["step_counts"]["0"] == {
        "found": 18,
        "averaged": 17,
        "cut_off": 0,
        "without_gpu_work": 1,
        "marker": "vllm",
    }
    assert [(g["phase"], g["batch"], g["graph_mode"], g["steps"]) for g in trace["groups"]] == [
        ("decode", "4", "full", 15),
        ("prefill", "1", "piecewise", 1),
        ("mixed", "4", "piecewise", 1),
    ]


def test_the_fourth_step_is_what_it_was_measured_to_be(trace):
    step = trace["steps"][3]
    assert (step["kernels"], step["kernel_ns"]) == (413, 9_539_304)
    assert step["by_category"]["moe_experts"]["sum_ns"] == 4_763_617
    assert step["by_category"]["dense_gemm"]["sum_ns"] == 3_903_955
    alone = analyzed(TRACE, "--steps", "4")
    (group,) = alone["groups"]
    assert (group["steps"], group["step_ns"]["mean"]) == (1, step["span_ns"])
    assert group["categories"]["moe_experts"]["sum_ns"] == 4_763_617
    assert alone["totals"]["kernel_ns"] == 9_539_304


def test_exposed_and_idle_time_add_up_to_the_span_of_each_step_and_of_all(trace):
    for each in (trace["totals"], *trace["steps"]):
        exposed = sum(total["exposed_ns"] for total in each["by_category"].values())
        assert exposed + each["idle_ns"] == each["span_ns"]
        assert each["idle_ns"] >= 0
    for group in trace["groups"]:
        own = sum(time["exclusive_ns"] for time in group["categories"].values())
        whole = sum(step["span_ns"] for step in trace["steps"] if step["phase"] == group["phase"] and step["averaged"])
        assert own + group["unattributed_ns"] == whole


def test_steps_begin_every_12_ms_though_their_annotations_last_one(trace):
    periods = [step["period_ns"] for step in trace["steps"] if step["phase"] == "decode" and step["period_ns"]]
    assert all(11_500_000 < period < 14_500_000 for period in periods)
    assert any("steps begin every 12.1" in sentence for sentence in trace["explanation"])


def test_traced_by_nodes_nsys_says_the_same(trace):
    document = analyzed(NODES)
    totals = document["totals"]
    assert totals["kernels"] == 7440
    assert round(totals["kernel_ns"] / 1e6, 3) == 188.144  # its times are rounded to whole ns
    assert totals["kernels_in_steps"] == 7001
    assert [step["kernels"] for step in document["steps"]] == [step["kernels"] for step in trace["steps"]]
    for name, total in trace["totals"]["by_category"].items():
        same = totals["by_category"][name]
        assert same["count"] == total["count"]
        assert abs(same["sum_ns"] - total["sum_ns"]) < total["count"]


def test_traced_by_graphs_nsys_has_busy_time_and_no_categories():
    result = CliRunner().invoke(app, ["analyze", str(GRAPHS)])
    assert result.exit_code == 3
    assert "--cuda-graph-trace=node" in result.stderr
    assert "INCOMPLETE" in result.stdout
    document = analyzed(GRAPHS, code=3)
    totals = document["totals"]
    assert (totals["kernels"], totals["opaque_graphs"]) == (607, 65)
    assert totals["by_category"] == {}
    assert document["groups"] == []
    assert 191_000_000 < totals["busy_ns"] < 192_000_000


def test_the_table_says_the_same_to_its_own_precision(trace):
    totals = analyzed(TABLE)["totals"]
    assert totals["kernels"] == 7440
    assert abs(totals["sum_ns"] - trace["totals"]["sum_ns"]) < 10_000  # 57 rows in three decimals
    assert abs(totals["by_category"]["moe_experts"]["sum_ns"] - 96_755_402) < 1_000


def test_a_directory_with_the_trace_and_its_table_is_one_capture(tmp_path):
    for path in (TRACE, TABLE):
        (tmp_path / path.name).symlink_to(path)
    document = analyzed(tmp_path)
    assert document["totals"]["kernels"] == 7440
    assert [warning["code"] for warning in document["warnings"]] == ["files_set_aside"]
    assert document["complete"]


def test_the_trace_and_the_export_of_one_run_agree():
    result = CliRunner().invoke(app, ["compare", str(TRACE), str(NODES), "--agree", "0.1", "--threshold", "0.1"])
    assert result.exit_code == 0, result.stderr


def test_both_in_one_go_are_refused_with_the_remedy():
    result = CliRunner().invoke(app, ["analyze", str(TRACE), str(NODES)])
    assert result.exit_code == 2
    assert "vllm-k25 compare A B" in result.stderr
