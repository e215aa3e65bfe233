"""The reference campaign: from inputs with the published figures, the analysis comes to the right conclusions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tests import campaigns
from tests.campaigns import CASTS, Scene, write_campaign
from vllm_k25_instrument.cli import app

runner = CliRunner()


def report_of(folder: Path) -> dict[str, Any]:
    outcome = runner.invoke(app, ["campaign", "report", str(folder), "--json", "-"])
    assert outcome.exit_code == 0, outcome.output
    return json.loads(outcome.stdout)


def answer(document: dict[str, Any], word: str) -> dict[str, Any]:
    (found,) = [each for each in document["answers"] if word in each["question"]]
    return found | {"text": " ".join(found["text"])}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_campaign(tmp_path_factory.mktemp("reference") / "campaign")


@pytest.fixture(scope="module")
def document(folder: Path) -> dict[str, Any]:
    return report_of(folder)


@pytest.fixture(scope="module")
def column(document: dict[str, Any]) -> dict[str, Any]:
    (column,) = document["concurrency"]
    return column


def test_the_scene_is_that_of_the_published_figures() -> None:
    customs = sum(campaigns.customs(step) for step in range(campaigns.STEPS))
    assert customs == campaigns.CUSTOM_CALLS
    reduces = [ns for step in range(campaigns.STEPS) for _, ns in campaigns.all_reduces(step)]
    assert len(reduces) == campaigns.STEPS * campaigns.ALL_REDUCES
    per_step = sum(reduces) / campaigns.STEPS
    assert per_step == pytest.approx(11.17e6, rel=1e-3)
    whole = per_step + sum(calls * ns for _, calls, ns in campaigns.COMPUTE)
    assert whole == pytest.approx(campaigns.KERNEL_SUM_NS, rel=1e-3)
    assert per_step / whole == pytest.approx(0.515, abs=5e-4)


def test_the_trace_gives_the_kernel_sum_of_all_ranks_and_steps(column: dict[str, Any]) -> None:
    trace = column["trace"]
    assert trace["steps"] == campaigns.RANKS * campaigns.STEPS
    assert trace["ranks"] == {"found": campaigns.RANKS, "expected": campaigns.RANKS}
    assert trace["sum_ns"] == pytest.approx(21.7e6, rel=1e-3)
    assert trace["categories"]["all_reduce"]["share_of_sum"] == pytest.approx(0.515, abs=5e-4)
    assert trace["categories"]["all_reduce"]["calls"] == campaigns.ALL_REDUCES
    assert trace["span_ns"] < column["tpot_ns"]["mean"] == campaigns.TPOT_NS


def test_all_reduce_dominates_and_marlin_does_not(document: dict[str, Any]) -> None:
    found = answer(document, "dominates")
    assert found["verdict"] == "all_reduce"
    assert "all_reduce 11.169 ms (51.5 %)" in found["text"]
    assert "all_reduce dominates; by exposed time all_reduce does" in found["text"]
    assert "Marlin expert GEMMs do not dominate: 14.9 %" in found["text"]


def test_the_slow_path_is_named_with_what_a_call_of_it_costs(document: dict[str, Any], column: dict[str, Any]) -> None:
    paths = column["all_reduce_paths"]
    assert paths["pynccl"]["ns_per_call"]["mean"] == pytest.approx(campaigns.NCCL_NS)
    assert paths["custom"]["ns_per_call"]["mean"] == pytest.approx(campaigns.CUSTOM_NS)
    found = answer(document, "path is taken")
    assert found["verdict"] == "pynccl"
    assert "custom takes 1.125 ms a call, 14.4 times the 78.0 µs of pynccl" in found["text"]
    assert "vllm::cross_device_reduce_1stage" in found["text"]


def test_the_two_totals_are_explained_by_overlap_and_by_rows_that_repeat_their_kernels(
    document: dict[str, Any], column: dict[str, Any]
) -> None:
    found = answer(document, "critical path")
    assert found["verdict"] == "overlap"
    overlap = column["trace"]["overlap_ns"]
    assert column["trace"]["sum_ns"] - overlap == column["trace"]["busy_ns"] < campaigns.TPOT_NS
    assert "add up to 21.699 ms; the time per output token is 12.100 ms, 1.79 times less" in found["text"]
    assert "run at the same time as something else" in found["text"]
    repeated = column["key_averages"]
    assert repeated["repeated_rows"] == 3
    once = campaigns.STEPS * (11_169_219 + 20 * 162_000)
    assert repeated["repeated_ns"] == pytest.approx(once, rel=1e-4)
    assert "repeat" in found["text"]
    assert "whoever adds up the whole column gets" in found["text"]


def test_there_is_no_cast_overhead(document: dict[str, Any]) -> None:
    assert answer(document, "cast")["verdict"] == "no"


def test_one_graph_launch_hides_the_kernels_of_a_step(document: dict[str, Any], column: dict[str, Any]) -> None:
    assert column["trace"]["launches_per_step"] == 1
    assert column["trace"]["kernels_per_step"] == campaigns.ALL_REDUCES + 90
    found = answer(document, "kernel launches")
    assert found["verdict"] == "hidden"
    assert "217 kernels a step from 1 launches" in found["text"]


def test_the_rows_add_up_to_the_time_per_output_token(column: dict[str, Any]) -> None:
    parts = [column[name]["mean"] for name in ("step_ns", "between_steps_ns", "other_steps_ns", "unexplained_ns")]
    assert sum(parts) == pytest.approx(campaigns.TPOT_NS)
    assert column["unexplained_ns"]["mean"] == pytest.approx(50_000)
    components = sum(one["exposed_ns"]["mean"] for one in column["components"].values())
    assert components == pytest.approx(column["step_ns"]["mean"])


def test_waiting_is_what_the_ranks_are_apart(column: dict[str, Any]) -> None:
    # Rank 0 is the quickest; the others are 400 ns x rank behind it, 1,400 ns in the mean.
    assert column["all_reduce_wait_ns"]["mean"] == pytest.approx(campaigns.ALL_REDUCES * 1_400)


def test_every_figure_of_the_windows_has_an_interval(column: dict[str, Any]) -> None:
    reduce = column["components"]["all_reduce"]
    assert reduce["exposed_ns"]["windows"] == len(campaigns.WINDOW_STEPS)
    assert reduce["exposed_ns"]["low"] < reduce["exposed_ns"]["mean"] < reduce["exposed_ns"]["high"]


def test_the_other_paths_trap_is_caught(tmp_path: Path) -> None:
    document = report_of(write_campaign(tmp_path / "casts", Scene(compute=CASTS, reduces=False, ranks=1)))
    found = answer(document, "cast")
    assert found["verdict"] == "yes"
    assert "69.0 % of the kernels' time" in found["text"]
    assert "direct_copy_kernel" in found["text"]
    assert answer(document, "dominates")["verdict"] != "all_reduce"
    assert "cast_quant dominates" in answer(document, "dominates")["text"]


def test_without_traces_nothing_is_guessed(tmp_path: Path) -> None:
    folder = write_campaign(tmp_path / "live-only", Scene(ranks=2))
    for path in (folder / "profile").rglob("*.json"):
        path.unlink()
    document = report_of(folder)
    for word in ("cast", "launches", "critical path"):
        found = answer(document, word)
        assert found["verdict"] == "unknown", word
        assert "--profiler-config" in found["needs"]
    assert answer(document, "dominates")["verdict"] == "all_reduce"


def test_markdown_and_page_say_the_same(folder: Path, tmp_path: Path) -> None:
    page, text = tmp_path / "page.html", tmp_path / "text.md"
    outcome = runner.invoke(app, ["campaign", "report", str(folder), "--html", str(page), "--markdown", str(text)])
    assert outcome.exit_code == 0
    for shown in (outcome.stdout, page.read_text(), text.read_text()):
        assert "Marlin expert GEMMs do not dominate: 14.9 %" in " ".join(shown.split())
        assert "Component by concurrency" in shown
