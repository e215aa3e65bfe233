"""`bench moe` and `bench all-reduce` for real, at small sizes, through the installed vLLM's CPU build."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from vllm_k25_instrument.bench.document import BenchDocument, Kind, read_document
from vllm_k25_instrument.demo.build import Build, vllm_build
from vllm_k25_instrument.limits.kimi_k25 import kimi_k25_config

pytestmark = pytest.mark.skipif(vllm_build() is not Build.CPU, reason="needs vLLM's CPU build")

SMALL = {
    "hidden_size": 256,
    "moe_intermediate_size": 64,
    "n_routed_experts": 16,
    "num_experts_per_tok": 2,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 96,
    "kv_lora_rank": 64,
    "qk_rope_head_dim": 32,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
    "vocab_size": 512,
}
CALL = (sys.executable, "-c", "from vllm_k25_instrument.cli import app; app()", "bench")


def left_behind() -> list[str]:
    return [path.name for path in Path("/dev/shm").glob("vllm_k25_bench-*")]


def bench(tmp_path: Path, *arguments: str) -> BenchDocument:
    out = tmp_path / "bench.json"
    result = subprocess.run(
        [*CALL, *arguments, "--json", str(out)], capture_output=True, text=True, timeout=300, check=False
    )
    assert (result.returncode, result.stderr) == (0, ""), result
    return read_document(out)


@pytest.fixture
def config(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(kimi_k25_config(**SMALL)))
    return tmp_path


def test_experts_and_projections_of_a_small_model_are_timed(tmp_path, config):
    document = bench(
        tmp_path,
        *("moe", "--config", str(config), "-tp", "2", "--tokens", "1,4", "--routing", "uniform,worst"),
        *("--repeats", "6", "--seconds", "0.05", "--no-flush"),
    )
    assert document.kind is Kind.MOE
    experts = [row for row in document.rows if row.name == "routed experts"]
    assert {row.path for row in experts} == {"CPUExpertsInt4"}
    active = {(row.routing, row.tokens): row.active_experts for row in experts}
    assert (active["same", 4], active["spread", 4], active["uniform", 1]) == (2, 8, 2)
    # 2 experts x 3 x 256 x 32 weights x 4.5 / 8 bytes
    assert {row.bytes for row in experts if row.routing == "same"} == {27_648}
    names = {row.name for row in document.rows}
    assert {"q_a + kv_a", "q_b", "kv_b absorbed: W_UK", "o", "router gate", "shared experts down", "lm_head"} <= names
    for row in document.rows:
        assert 0 < row.low_ns <= row.median_ns <= row.high_ns
        assert row.repeats >= 6
        assert row.l2_flushed is False
        assert row.floor_ns is None
        assert row.floor_reason
        assert row.achieved_bytes_per_s == pytest.approx(row.bytes / row.median_ns * 1e9)
    assert {"eager_only", "cpu_experts_let_through", "caches_warm"} <= {w.code for w in document.warnings}


COMPUTE = """
import sys, json, numpy as np
from vllm_k25_instrument.bench import in_vllm
in_vllm.prepare_vllm()
assert in_vllm.allow_int4_experts()
import torch
from vllm_k25_instrument.bench.kernels import Experts
from vllm_k25_instrument.bench.sizes import ExpertLayer
from vllm_k25_instrument.limits.model_shape import Precision
torch.manual_seed(0)
layer = Experts(ExpertLayer(12, 2, 256, 64, Precision(4, 32, 16), 1), "cpu")
def out(ids):
    torch.manual_seed(1)
    return layer.call(np.array(ids, np.int32))().float()
first, copy, other = out([[0, 1]]), out([[8, 9]]), out([[2, 3]])
finite = bool(first.isfinite().all())
print(json.dumps([torch.equal(first, copy), torch.equal(first, other), finite, float(first.std())]))
"""


def test_experts_beyond_the_repacked_are_copies_that_compute_the_same():
    result = subprocess.run([sys.executable, "-c", COMPUTE], capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stderr
    same, different, finite, spread = json.loads(result.stdout.splitlines()[-1])
    assert same
    assert not different
    assert finite
    assert spread > 0


def test_two_real_ranks_reduce_through_shared_memory_and_through_gloo(tmp_path):
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("two ranks need two cores")
    document = bench(
        tmp_path, "all-reduce", "--tokens", "1,4", "--burst", "5", "--repeats", "10", "--seconds", "0.2", "--ranks", "2"
    )
    assert document.kind is Kind.ALL_REDUCE
    cases = {(row.path, row.tokens, row.calls): row for row in document.rows}
    assert set(cases) == {(p, t, c) for p in ("cpu_shm", "torch_distributed") for t in (1, 4) for c in (1, 5)}
    assert cases["cpu_shm", 4, 5].bytes == 5 * 4 * 14_336
    for row in document.rows:
        assert 0 < row.low_ns <= row.median_ns <= row.high_ns
        assert row.skew is not None
        assert min(row.skew.by_rank_ns) >= 0
        assert row.skew.last_ns >= max(row.skew.by_rank_ns) / 2
        assert len(row.skew.wait_by_rank_ns) == 2
    assert {(choice.vllm_takes, choice.tokens, choice.calls) for choice in document.choices} == {
        ("cpu_shm", t, c) for t in (1, 4) for c in (1, 5)
    }
    assert all(choice.winner_ns <= (choice.vllm_ns or 0) for choice in document.choices)
    assert left_behind() == []


def ranks_of(pid: int) -> list[int]:
    found = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = status.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == pid and fields[0] != "Z":
            found.append(int(status.parent.name))
    return found


def wait_until(condition: Any, seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_no_rank_outlives_a_command_that_is_ended(number, tmp_path):
    command = subprocess.Popen(
        [*CALL, "all-reduce", "--burst", "10000"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )
    wait_until(lambda: len(ranks_of(command.pid)) == 2)
    ranks = ranks_of(command.pid)
    time.sleep(1.0)  # the ranks have asked to die with their parent by then
    command.send_signal(number)
    assert command.wait(30) != 0
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in ranks), 15)
    command.communicate()
