"""The `bench` commands: options, tables, exit codes; and the arithmetic of our own cost."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

torch = pytest.importorskip("torch")

from tests.kimi_k25 import kimi_k25_config  # noqa: E402
from vllm_k25_instrument.bench.document import BenchDocument, BenchMachine, Choice, Kind, Remark, Row, Skew  # noqa: E402
from vllm_k25_instrument.bench.hooked_calls import CALLS_PER_STEP  # noqa: E402
from vllm_k25_instrument.bench.moe import MoePlan, run_moe, step_sums  # noqa: E402
from vllm_k25_instrument.bench.overhead import HookedRows, per_step, ring_rows, sample_bytes  # noqa: E402
from vllm_k25_instrument.bench.routing import Routing  # noqa: E402
from vllm_k25_instrument.bench.table import BenchTable  # noqa: E402
from vllm_k25_instrument.bench.timing import HostTimer, Repeats  # noqa: E402
from vllm_k25_instrument.cli import app  # noqa: E402
from vllm_k25_instrument.commands.bench import parse_numbers, parse_routings  # noqa: E402
from vllm_k25_instrument.limits.model_shape import model_shape  # noqa: E402
from vllm_k25_instrument.model import unpack_columns  # noqa: E402

CPU = BenchMachine("cpu", "a processor", "0.32.0+cpu", "2.13.0", 2)
GPU = BenchMachine("cuda", "a card", "0.32.0", "2.13.0", 8, ranks=8, gpu="h200", link="nvlink")
ROW = Row("routed experts", "MarlinExperts", "384 x (7168 -> 2 x 256 -> 7168)", 20_000, 19_000, 21_000, 50)


def run(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["bench", *arguments])
    return result.exit_code, result.stdout, result.stderr


def shown(document: BenchDocument) -> str:
    console = Console(file=io.StringIO(), width=200)
    console.print(BenchTable(document))
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_numbers_and_routings_are_lists():
    assert parse_numbers("--tokens", "256, 1,64,1") == (1, 64, 256)
    assert parse_routings("worst,uniform,same") == (Routing.SAME, Routing.SPREAD, Routing.UNIFORM)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("moe", "--tokens", "1,,2"), "--tokens 1,,2: nothing is no number from 1 to 65,536"),
        (("moe", "--tokens", "65537"), "65537 is no number"),
        (("moe", "--routing", "best"), "best is none of uniform, same, spread, measured, worst"),
        (("moe", "--routing", "measured"), "--routing measured and --expert-counts need each other"),
        (("moe", "--only", "lunch"), "--only lunch: experts or dense"),
        (("moe", "--config", "/nowhere/config.json"), "/nowhere/config.json: cannot be read"),
        (("all-reduce", "--config", "/nowhere/config.json"), "/nowhere/config.json: cannot be read"),
        (("all-reduce", "--tokens", "0"), "0 is no number"),
    ],
)
def test_wrong_options_are_one_line_and_exit_with_2(arguments, message):
    code, out, err = run(*arguments)
    assert (code, out) == (2, "")
    assert message in err
    assert err.startswith(f"vllm-k25 bench {arguments[0]}: ")
    assert err.count("\n") == 1


def test_without_vllm_it_says_what_to_install(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *rest: None)
    code, _, err = run("overhead", "--repeats", "6")
    assert code == 2
    assert "vLLM is not installed for this Python" in err


def test_too_few_repeats_are_refused():
    code, _, err = run("overhead", "--repeats", "5")
    assert code == 2
    assert "--repeats" in err


# --- tables -----------------------------------------------------------------------------------------------


def test_the_table_of_experts_has_time_bandwidth_and_floor():
    row = replace(
        ROW,
        tokens=1,
        routing="uniform",
        active_experts=8,
        calls_per_step=60,
        bytes=24_772_608,
        achieved_bytes_per_s=1.2386e12,
        achieved_flop_per_s=4.4e12,
        floor_ns=5_161,
        ratio_to_floor=3.875,
        in_graph=True,
    )
    text = shown(BenchDocument(Kind.MOE, GPU, (row,), summary=step_sums([row]), warnings=(Remark("c", "beware"),)))
    for part in (
        "routed experts, uniform (graph)",
        "20.0",
        "19.0 to 21.0",
        "24.8",
        "1,238.6",
        "5.2",
        "3.88",
        "beware.",
    ):
        assert part in text
    assert "per step, experts uniform tokens=1 graph: 1.200 ms" in text  # 60 x 20 us


def test_the_table_of_all_reduces_has_skew_and_choice():
    row = replace(
        ROW, name="all_reduce", path="pynccl", tokens=1, bytes=122 * 14_336, calls=122, skew=Skew(7, (0, 7), (9, 0))
    )
    choice = Choice(1, 14_336, 122, False, "pynccl", 78_000, True, "custom", 1_125_000)
    text = shown(BenchDocument(Kind.ALL_REDUCE, GPU, (row,), choices=(choice,)))
    assert "14.42" in text  # 1,125 / 78 times as long as the winner
    assert "8 ranks" in text
    assert "custom" in text


def test_what_has_no_floor_says_why():
    assert "No floor: no data sheet." in shown(
        BenchDocument(Kind.MOE, CPU, (replace(ROW, floor_reason="no data sheet"),))
    )


# --- what is measured, without a kernel --------------------------------------------------------------------


def test_experts_that_are_not_int4_are_left_out_and_said_so():
    shape = model_shape(kimi_k25_config(quantization_config=None), "k25")
    plan = MoePlan(shape, "m", 8, (1,), (Routing.UNIFORM,), Repeats(6, 0.1), dense=False)
    document = run_moe(plan, CPU, HostTimer(), None, say=lambda text: None)
    assert document.rows == ()
    assert "experts_not_int4" in [warning.code for warning in document.warnings]


def test_nothing_measured_exits_with_2_and_the_reason_alone(tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps(kimi_k25_config(quantization_config=None)))
    code, out, err = run("moe", "--config", str(tmp_path), "--only", "experts")
    assert (code, out) == (2, "")
    expected = "vllm-k25 bench moe: nothing could be measured: the experts have 16 bits: only INT4 is measured here\n"
    assert err.endswith(expected)


def test_a_processor_without_the_int4_kernel_is_said_so():
    plan = MoePlan(model_shape(kimi_k25_config(), "k"), "m", 8, (1,), (Routing.SAME,), Repeats(6, 0.1), dense=False)
    document = run_moe(plan, CPU, HostTimer(), None, int4_allowed=False, say=lambda text: None)
    assert "no_int4_kernel" in [warning.code for warning in document.warnings]


def test_a_step_is_the_sum_of_its_calls():
    rows = [
        replace(ROW, tokens=1, median_ns=1000, calls_per_step=61),
        replace(ROW, tokens=1, median_ns=10, calls_per_step=60),
        replace(ROW, tokens=1, median_ns=77, calls_per_step=0),  # in another form
        replace(ROW, tokens=1, median_ns=500, calls_per_step=60, routing="same"),
        replace(ROW, tokens=64, median_ns=3, calls_per_step=1, in_graph=True),
    ]
    assert step_sums(rows) == {"dense tokens=1": 61_600, "experts same tokens=1": 30_000, "dense tokens=64 graph": 3}


# --- our own cost -----------------------------------------------------------------------------------------


def test_the_cost_per_step_is_that_of_its_calls_and_of_one_sampled_step_in_sixteen():
    called = HookedRows((), (40.0,) * 6, (1_000.0,) * 6)
    found = per_step(called, 16)
    assert found["added_per_step_not_sampled_ns"] == 40 * CALLS_PER_STEP == 15_000
    assert found["added_per_step_sampled_ns"] == 375_000
    assert found["added_per_step_at_1_of_16_ns"] == (15 * 15_000 + 375_000) / 16


def test_the_sample_that_is_appended_has_a_steps_ranges():
    columns = unpack_columns([sample_bytes()])
    assert columns["ranges"]["category"].shape == (1, CALLS_PER_STEP)


def test_a_ring_is_really_appended_to_and_scraped(tmp_path: Path):
    append, scrape = ring_rows(6, tmp_path)
    assert append.bytes == len(sample_bytes())
    assert scrape.bytes is not None
    assert scrape.bytes > 1000
    assert 0 < append.median_ns < scrape.median_ns


def test_overhead_runs_and_its_document_is_read_again(tmp_path: Path):
    code, out, err = run("overhead", "--repeats", "6", "--json", str(tmp_path / "o.json"))
    assert (code, err) == (0, "")
    assert "call, hooked, step not sampled" in out
    from vllm_k25_instrument.bench.document import read_document

    document = read_document(tmp_path / "o.json")
    by_name = {row.name: row for row in document.rows}
    assert by_name["call, bare"].median_ns < by_name["call, hooked, step sampled"].median_ns
    assert json.loads((tmp_path / "o.json").read_text())["kind"] == "overhead"
