"""What the instrument sees of a real server, and that the server does not see the instrument."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter, defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import PROMPTS, Answer, Launch, Running
from tests.exposition import assert_exposition_is_sound
from vllm_k25_instrument.markers import DOMAIN
from vllm_k25_instrument.model import Category, GraphMode, Phase, StepSample, category_exclusive_ns, exclusive_ns

pytestmark = pytest.mark.e2e

REPORT = (sys.executable, "-m", "vllm_k25_instrument.cli", "report")

LAYERS, MOE_LAYERS = 4, 3
ALL_REDUCES = 1 + 2 * LAYERS
"""One after the embedding, two per layer."""


@pytest.fixture(scope="module")
def served(every_step: Running) -> Running:
    """Requests one after the other, four at once, and some that arrive while others decode."""
    client = every_step.client
    for prompt in PROMPTS:
        client.complete(prompt, max_tokens=24)
    client.complete_all([*PROMPTS], concurrency=4, max_tokens=24)
    with ThreadPoolExecutor(3) as pool:
        decoding = pool.submit(client.complete, "long " * 10, 120)
        time.sleep(0.3)
        late = [pool.submit(client.complete, "a late one", 8), pool.submit(client.complete, "x", 8)]
        for request in [decoding, *late]:
            request.result()
    return every_step


def count(sample: StepSample, category: Category) -> int:
    return sum(r.category is category for r in sample.ranges)


def test_every_decode_step_has_exactly_the_ranges_of_the_model(served: Running) -> None:
    for rank, samples in served.samples().items():
        decode = [s for s in samples if s.phase is Phase.DECODE]
        assert len(decode) > 100, f"rank {rank}"
        for s in decode:
            assert count(s, Category.ALL_REDUCE) == ALL_REDUCES
            assert count(s, Category.MOE_EXPERTS) == MOE_LAYERS
            assert count(s, Category.MOE_ROUTING) == MOE_LAYERS
            assert count(s, Category.MOE_SHARED_EXPERTS) == MOE_LAYERS
            assert count(s, Category.MLA_ATTENTION) == LAYERS
            assert count(s, Category.SAMPLING) == 1
            assert s.graph_mode is GraphMode.NONE
            assert s.complete


def test_ranges_know_their_layer_backend_path_and_size(served: Running) -> None:
    for samples in served.samples().values():
        step = next(s for s in samples if s.phase is Phase.DECODE and s.requests == 1)
        of = defaultdict(list)
        for r in step.ranges:
            of[r.category].append(r)
        assert [r.layer for r in of[Category.MLA_ATTENTION]] == [0, 1, 2, 3]
        assert [r.layer for r in of[Category.MOE_EXPERTS]] == [1, 2, 3]
        assert [r.layer for r in of[Category.ALL_REDUCE]] == [-1, 0, 0, 1, 1, 2, 2, 3, 3]
        assert {r.detail for r in of[Category.ALL_REDUCE]} == {"cpu_shm"}
        assert {r.bytes for r in of[Category.ALL_REDUCE]} == {256 * 2}  # hidden size x bfloat16, one token
        assert {r.detail for r in of[Category.MOE_EXPERTS]} == {"CPUExpertsInt4"}
        assert all(re.fullmatch(r"decode (CPU|AMX)MLAImpl", r.detail) for r in of[Category.MLA_ATTENTION])


def test_decode_prefill_and_mixed_steps_are_told_apart(served: Running) -> None:
    for samples in served.samples().values():
        phases = Counter(s.phase for s in samples)
        assert set(phases) == set(Phase)
        for s in samples:
            details = {r.detail.split()[0] for r in s.ranges if r.category is Category.MLA_ATTENTION}
            if s.phase is Phase.DECODE:
                assert s.tokens == s.requests
                assert details == {"decode"}
            elif s.phase is Phase.MIXED:
                assert s.requests > 1


def test_a_prompt_of_one_token_is_prefilled_though_it_looks_like_decode(served: Running) -> None:
    for samples in served.samples().values():
        assert [s for s in samples if s.phase is Phase.PREFILL and s.tokens == 1 and s.requests == 1]


def test_every_sample_adds_up_to_the_nanosecond(served: Running) -> None:
    for samples in served.samples().values():
        for s in samples:
            assert sum(category_exclusive_ns(s).values()) == s.duration_ns
            assert all(own >= 0 for own in exclusive_ns(s))
            assert category_exclusive_ns(s)[Category.UNATTRIBUTED] >= 0


def test_both_ranks_sample_the_same_steps_of_the_same_kind(served: Running) -> None:
    first, second = (
        [(s.step, s.phase, s.requests, s.tokens) for s in samples] for samples in served.samples().values()
    )
    assert first == second
    assert [step for step, *_ in first] == list(range(len(first)))


def test_every_hook_of_this_model_is_attached_and_fires(served: Running) -> None:
    for ring in served.rings:
        states = ring.identity.hooks
        assert {
            state for hook, state in states.items() if not hook.startswith("graph_") or hook == "graph_dispatch"
        } == {"attached"}
        assert ring.identity.vllm_version
        assert ring.identity.runner.endswith("CPUModelRunner")
        assert ring.alive
        assert ring.corrupted == 0


def test_vllms_own_metrics_page_carries_ours(served: Running) -> None:
    text = served.client.get("/metrics")
    assert "vllm:num_requests_running" in text
    assert_exposition_is_sound(text)
    for rank, samples in served.samples().items():
        decode = sum(s.phase is Phase.DECODE for s in samples)
        match = re.search(rf'^vllm_k25_steps_total{{phase="decode",rank="{rank}"}} (\S+)$', text, re.M)
        assert match is not None
        assert float(match.group(1)) == decode


def test_the_exporter_serves_the_same_series(served: Running) -> None:
    once = subprocess.run(
        [sys.executable, "-m", "vllm_k25_instrument.cli", "export", str(served.ring_dir), "--once"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert_exposition_is_sound(once.stdout)
    ours = [line for line in served.client.get("/metrics").splitlines() if line.startswith("vllm_k25_")]
    theirs = [line for line in once.stdout.splitlines() if line.startswith("vllm_k25_")]
    # Which of the samples are taken apart depends on when one looks: there the series are the same, the values are not.
    looked = "vllm_k25_unattributed_"
    assert sorted(line for line in ours if not line.startswith(looked)) == sorted(
        line for line in theirs if not line.startswith(looked)
    )
    names = [[line.rpartition(" ")[0] for line in lines if line.startswith(looked)] for lines in (ours, theirs)]
    assert names[0] == names[1] != []


def test_the_report_shows_both_ranks(served: Running, tmp_path: Path) -> None:
    written = tmp_path / "report.json"
    page = tmp_path / "report.html"
    run = subprocess.run(
        [*REPORT, str(served.ring_dir), "--json", str(written), "--html", str(page)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    breakdown = json.loads(written.read_text())
    assert breakdown["schema"] == "vllm_k25.breakdown/1"
    assert breakdown["complete"] is True
    assert breakdown["ranks"] == {"found": [0, 1], "expected": 2}
    samples = served.samples()
    for group in breakdown["groups"]:
        mine = [
            s
            for s in samples[group["rank"]]
            if (s.phase, s.graph_mode) == (group["phase"], group["graph_mode"]) and group["steps"]
        ]
        assert len(mine) >= group["steps"]
        total = sum(c["exclusive_ns"] for c in group["categories"].values()) + group["unattributed_ns"]
        assert abs(total - group["step_ns"]["mean"] * group["steps"]) < group["steps"]
    assert "<html" in page.read_text()


# --- NVTX ------------------------------------------------------------------------------------------------


def nvtx_events(log: Path, pid: int) -> list[dict[str, Any]]:
    lines = Path(f"{log}.{pid}").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["domain"] == DOMAIN]


def test_an_nvtx_tool_sees_every_range_balanced_and_by_name(served: Running) -> None:
    samples = served.samples()
    assert len(served.server.worker_pids) == 2
    for ring, pid in zip(served.rings, served.server.worker_pids, strict=True):
        assert ring.identity.pid == pid
        mine = samples[ring.identity.coordinates.global_rank]
        events = nvtx_events(served.nvtx_log, pid)
        pushes = [event for event in events if event["ev"] == "push"]
        pops = [event for event in events if event["ev"] == "pop"]
        assert len(pushes) == len(pops) == sum(1 + len(s.ranges) for s in mine)
        depth = 0
        for event in events:
            depth += {"push": 1, "pop": -1}.get(event["ev"], 0)
            assert depth >= 0
        assert depth == 0

        rank = ring.identity.coordinates.global_rank
        assert {event["msg"] for event in events if event["ev"] == "mark"} == {f"rank={rank} world_size=2"}

        names = Counter(event["msg"] for event in pushes)
        decode = next(s for s in mine if s.phase is Phase.DECODE and s.requests == 1)
        assert f"decode step {decode.step} bs=1 graph=none" in names
        assert names["all_reduce cpu_shm 512 B L2"] >= 2
        assert names["moe_experts CPUExpertsInt4 L3"] >= 1
        assert any(re.fullmatch(r"mla_attention decode \w+ L0", name) for name in names)
        assert any(re.fullmatch(r"mla_attention prefill \w+ L0", name) for name in names)
        # Registered strings, a colour and a category each, the number in the payload.
        assert {event["msgtype"] for event in pushes} == {3}
        assert all(event["color"].startswith("ff") and event["category"] > 0 for event in pushes)
        assert {event["payload"] for event in pushes if event["msg"].startswith("all_reduce cpu_shm 512 B")} == {512}


# --- the server does not notice --------------------------------------------------------------------------


def answers(running: Running) -> list[Answer]:
    return [running.client.complete(prompt, max_tokens=32) for prompt in PROMPTS]


def test_tokens_and_logprobs_are_bit_identical_off_on_and_with_every_step_sampled(
    served: Running, default_sampling: Running, launch: Launch
) -> None:
    with launch("off") as off:
        expected = answers(off)
        assert off.our_log() == []
        assert not off.ring_dir.exists()
        assert "vllm_k25" not in off.client.get("/metrics")
    assert answers(default_sampling) == expected
    assert answers(served) == expected


def test_by_default_every_sixteenth_step_is_sampled_on_both_ranks(default_sampling: Running) -> None:
    default_sampling.client.complete("some more steps", max_tokens=100)
    numbers = [[s.step for s in samples] for samples in default_sampling.samples().values()]
    assert numbers[0] == numbers[1]
    assert numbers[0]
    assert all(step % 16 == 0 for step in numbers[0])
    for ring in default_sampling.rings:
        totals = ring.totals()
        assert sum(totals.steps(phase) for phase in range(3)) > 100


def test_killed_workers_leave_readable_rings(launch: Launch) -> None:
    with launch("killed", K25_INSTRUMENT="1", K25_SAMPLE_EVERY="1") as running:
        with ThreadPoolExecutor(1) as pool:
            dying = pool.submit(running.client.complete, "about to die", 900)
            deadline = time.monotonic() + 120
            while min((ring.written for ring in running.rings), default=0) < 50 and time.monotonic() < deadline:
                time.sleep(0.05)
            for pid in running.server.worker_pids:
                os.kill(pid, signal.SIGKILL)
            with pytest.raises(Exception):  # noqa: B017, PT011 (whatever a dying server makes of the request)
                dying.result()
        deadline = time.monotonic() + 10
        while any(ring.alive for ring in running.rings) and time.monotonic() < deadline:
            time.sleep(0.1)
        rings = running.rings
        assert [ring.identity.coordinates.global_rank for ring in rings] == [0, 1]
        for ring in rings:
            assert not ring.alive
            samples = list(ring.samples())
            assert len(samples) >= 49
            assert ring.corrupted <= 1  # the one that was being written
            assert count(samples[-1], Category.ALL_REDUCE) == ALL_REDUCES
    report = subprocess.run(
        [*REPORT, str(running.ring_dir), "--json", "-"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert json.loads(report.stdout)["ranks"]["found"] == [0, 1]
