"""A campaign on a real server: live breakdown, the torch profiler, and a concurrency above what the server runs."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import Launch, Running

pytestmark = pytest.mark.e2e

MAX_NUM_SEQS = 8
ABOVE = 12


@pytest.fixture(scope="module")
def profiled(launch: Launch, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    traces = tmp_path_factory.mktemp("traces")
    config = {"profiler": "torch", "torch_profiler_dir": str(traces), "torch_profiler_with_stack": False}
    with launch(
        "campaign",
        K25_INSTRUMENT="1",
        K25_SAMPLE_EVERY="2",
        extra_args=("--profiler-config", json.dumps(config)),
    ) as running:
        yield running


def campaign(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", "-c", "from vllm_k25_instrument.cli import app; app()", "campaign", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=400)


@pytest.fixture(scope="module")
def ran(profiled: Running, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    out = tmp_path_factory.mktemp("campaign") / "out"
    ran = campaign(
        *("run", "--url", profiled.server.url, "--model", profiled.server.model, "--out", str(out)),
        *("--concurrency", f"1,{ABOVE}", "--windows", "2", "--requests-per-client", "2", "--output-tokens", "32"),
        *("--rings", str(profiled.ring_dir), "--client", "openai", "--no-micro"),
    )
    assert ran.returncode == 0, ran.stderr
    return out, ran.stdout


@pytest.fixture(scope="module")
def document(ran: tuple[Path, str]) -> dict[str, Any]:
    return json.loads((ran[0] / "report.json").read_text())


def test_the_table_has_intervals_and_adds_up(document: dict[str, Any]) -> None:
    assert document["complete"]
    for column in document["concurrency"]:
        assert column["sources"] == ["ring"]
        assert column["tpot_ns"]["low"] < column["tpot_ns"]["mean"] < column["tpot_ns"]["high"]
        components = column["components"]
        assert {"all_reduce", "moe_experts", "mla_attention", "sampling", "unattributed"} <= set(components)
        step = column["step_ns"]["mean"]
        assert sum(one["exposed_ns"]["mean"] for one in components.values()) == pytest.approx(step, rel=1e-6)
        rows = ("step_ns", "between_steps_ns", "other_steps_ns", "unsampled_steps_ns", "unexplained_ns")
        assert sum(column[row]["mean"] for row in rows) == pytest.approx(column["tpot_ns"]["mean"], rel=1e-6)
        assert components["all_reduce"]["calls"]["mean"] == 9
        assert 0 < column["all_reduce_wait_ns"]["mean"] < step


def test_the_batch_that_the_server_runs_is_what_the_column_is_about(document: dict[str, Any]) -> None:
    one, above = document["concurrency"]
    assert one["reached"]
    assert one["batch"]["mean"] == 1
    assert not above["reached"]
    assert above["batch"]["mean"] == pytest.approx(MAX_NUM_SEQS, abs=0.8)
    assert any(f"concurrency {ABOVE} was not reached" in note for note in document["notes"])


def test_the_torch_profiler_says_what_it_can_on_a_cpu(ran: tuple[Path, str], document: dict[str, Any]) -> None:
    for column in document["concurrency"]:
        ranks = column["cpu_operators"]["ranks"]
        assert [rank["rank"] for rank in ranks] == [0, 1]
        for rank in ranks:
            reduces = [row for row in rank["operators"] if row["name"] == "_C::shm_allreduce"]
            assert reduces[0]["calls"] >= 9 * rank["decode_steps"] > 0
    (casts,) = [answer for answer in document["answers"] if "cast" in answer["question"]]
    assert casts["verdict"] in ("yes", "no")
    assert "aten::_to_copy" in " ".join(casts["text"])
    assert list(ran[0].glob("profile/c00001/traces/*.pt.trace.json.gz"))


def test_the_path_is_the_shared_memory_one_and_launches_are_not_guessed(document: dict[str, Any]) -> None:
    verdicts = {answer["question"].split()[1]: answer for answer in document["answers"]}
    assert verdicts["all-reduce"]["verdict"] == "cpu_shm"
    assert verdicts["many"]["verdict"] == "unknown"
    assert "--profiler-config" in verdicts["many"]["needs"]


def test_the_terminal_shows_the_table_and_the_words(ran: tuple[Path, str]) -> None:
    assert "Component by concurrency" in ran[1]
    assert "CPU operators at concurrency 1" in ran[1]
    assert "What dominates at each concurrency" in ran[1]
