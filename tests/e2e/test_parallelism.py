"""Real servers beyond one tensor-parallel group: who wrote which ring, what a step is, which category the work is in.

What takes long and adds little is marked slow; `make parallelism` runs all of it. docs/parallelism.md says the rest.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import DATA, PROMPTS, READY_SECONDS, Client, Running
from tests.exposition import assert_exposition_is_sound
from tests.samples import wait_for
from tests.tiny_families import DUMMY_WEIGHTS, LAYERS, write_family
from vllm_k25_instrument.demo.server import CPU_SETUP_PATH, VllmServer, free_port, thread_binding
from vllm_k25_instrument.instances import list_instances
from vllm_k25_instrument.model import Category, Phase, StepSample, category_exclusive_ns
from vllm_k25_instrument.ring import RingReader, open_rings

pytestmark = pytest.mark.e2e

MOE_LAYERS = LAYERS - 1
Counts = dict[tuple[str, str], int]


@contextmanager
def serving(
    folder: Path, family: str, *arguments: str, tp: int = 1, eager: bool = True, **env: str
) -> Iterator[Running]:
    """A server of a tiny model, every step sampled, that has answered requests one at a time and together."""
    model = write_family(folder / family, family)
    rings = folder / "rings"
    server = VllmServer(
        model,
        log=folder / "server.log",
        env={"K25_INSTRUMENT": "1", "K25_SAMPLE_EVERY": "1", "K25_RING_DIR": str(rings), **env},
        tensor_parallel_size=tp,
        eager=eager,
        extra_args=(*DUMMY_WEIGHTS, *arguments),
    )
    with server:
        server.wait_ready(READY_SECONDS)
        running = Running(server, Client(server), rings)
        running.client.complete("hello hello hello hello", 16)
        running.client.complete_all([*PROMPTS] * 2, concurrency=4)
        time.sleep(0.5)  # the last step of a rank that nobody waits for
        yield running


@pytest.fixture
def two_workers() -> dict[str, str]:
    """What gives each of two workers cores of its own where they are not a tensor-parallel group."""
    return {"VLLM_CPU_OMP_THREADS_BIND": thread_binding(2, sorted(os.sched_getaffinity(0)))}


def rings_by_rank(running: Running) -> dict[int, RingReader]:
    """The one instance's rings; asserts that each rank has one, and that it is called by its rank."""
    with_rings = [instance for instance in list_instances(running.ring_dir) if any(instance.path.glob("*.ring"))]
    (instance,) = with_rings
    readers, errors = open_rings(instance.path)
    assert errors == []
    for reader in readers:
        assert reader.path.name == f"rank-{reader.identity.coordinates.global_rank:05}.ring"
        assert reader.alive
    return {reader.identity.coordinates.global_rank: reader for reader in readers}


def counts(sample: StepSample) -> Counts:
    return dict(Counter((str(r.category), r.detail) for r in sample.ranges))


def decode_steps(reader: RingReader) -> list[StepSample]:
    samples = list(reader.samples())
    assert [s.step for s in samples] == list(range(len(samples)))
    for s in samples:
        assert s.complete
        assert sum(category_exclusive_ns(s).values()) == s.duration_ns
        assert min(category_exclusive_ns(s).values()) >= 0
    decode = [s for s in samples if s.phase is Phase.DECODE]
    assert len(decode) > 10
    return decode


def every_decode_step_has(reader: RingReader, expected: dict[Category, int]) -> None:
    """Number of ranges by category; of input preparation it depends on the runner."""
    for s in decode_steps(reader):
        found = Counter(r.category for r in s.ranges)
        del found[Category.INPUT_PREPARATION]
        assert found == {category: count for category, count in expected.items() if count}, counts(s)


def engine_steps(metrics: str) -> int:
    """Iterations of the engine by vLLM's own count."""
    return int(sum(float(n) for n in re.findall(r"^vllm:iteration_tokens_total_count\{.*\} (\S+)$", metrics, re.M)))


DEEPSEEK_V3 = {
    Category.MLA_ATTENTION: LAYERS,
    Category.MOE_EXPERTS: MOE_LAYERS,
    Category.MOE_ROUTING: MOE_LAYERS,
    Category.MOE_SHARED_EXPERTS: MOE_LAYERS,
    Category.SAMPLING: 1,
}


# --- data and expert parallel ------------------------------------------------------------------------------


def test_data_parallel_ranks_exchange_experts_and_each_counts_its_own_steps(
    tmp_path: Path, two_workers: dict[str, str]
) -> None:
    arguments = ("--data-parallel-size", "2", "--enable-expert-parallel")
    with serving(tmp_path, "deepseek_v3", *arguments, **two_workers) as running:
        rings = rings_by_rank(running)
        places = {rank: ring.identity.coordinates for rank, ring in rings.items()}
        assert {rank: (c.dp, c.tp, c.pp, c.ep, c.world_size) for rank, c in places.items()} == {
            0: (0, 0, 0, 0, 2),
            1: (1, 0, 0, 1, 2),
        }
        exchange = 2 * MOE_LAYERS  # dispatch and combine
        for ring in rings.values():
            every_decode_step_has(ring, DEEPSEEK_V3 | {Category.COLLECTIVE: exchange + 1})
            details = Counter(r.detail for r in decode_steps(ring)[0].ranges if r.category is Category.COLLECTIVE)
            assert details == {"dispatch": MOE_LAYERS, "combine_into_output": MOE_LAYERS, "dp_sync": 1}
        # With several API servers, which data parallelism brings, the metrics are the exporter's.
        once = subprocess.run(
            [sys.executable, "-m", "vllm_k25_instrument.cli", "export", str(running.ring_dir), "--once"],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        assert_exposition_is_sound(once)
        for rank, ring in rings.items():
            steps = sum(s.phase is Phase.DECODE for s in ring.samples())
            assert f'vllm_k25_steps_total{{phase="decode",rank="{rank}"}} {steps}.0' in once


@pytest.mark.slow
def test_replicas_of_a_dense_model_do_not_share_a_ring(tmp_path: Path, two_workers: dict[str, str]) -> None:
    """VLLM tells each that it is rank 0 of one."""
    with serving(tmp_path, "llama", "--data-parallel-size", "2", **two_workers) as running:
        rings = rings_by_rank(running)
        assert {rank: ring.identity.coordinates.dp for rank, ring in rings.items()} == {0: 0, 1: 1}
        for ring in rings.values():
            every_decode_step_has(ring, {Category.ATTENTION: LAYERS, Category.SAMPLING: 1})


@pytest.mark.slow
def test_experts_of_a_tensor_parallel_group(tmp_path: Path) -> None:
    with serving(tmp_path, "deepseek_v3", "--enable-expert-parallel", tp=2) as running:
        rings = rings_by_rank(running)
        assert {rank: ring.identity.coordinates.ep for rank, ring in rings.items()} == {0: 0, 1: 1}
        for ring in rings.values():
            every_decode_step_has(ring, DEEPSEEK_V3 | {Category.ALL_REDUCE: 1 + 2 * LAYERS, Category.COLLECTIVE: 1})


# --- pipeline parallel -------------------------------------------------------------------------------------


@pytest.mark.slow
def test_pipeline_stages_count_the_same_steps_and_the_last_one_samples(
    tmp_path: Path, two_workers: dict[str, str]
) -> None:
    """Not eager: without a warm-up vLLM's CPU runner has no buffers for what comes from the stage before."""
    compiled = ("--compilation-config", '{"mode": 2, "backend": "eager"}')
    arguments = ("--pipeline-parallel-size", "2", *compiled)
    env = {"K25_DEMO_OPAQUE_OPS": "1", **two_workers}
    with serving(tmp_path, "deepseek_v3", *arguments, eager=False, **env) as running:
        rings = rings_by_rank(running)
        assert {rank: ring.identity.coordinates.pp for rank, ring in rings.items()} == {0: 0, 1: 1}
        first, last = (list(ring.samples()) for ring in rings.values())
        assert [(s.step, s.phase, s.requests, s.tokens) for s in first] == [
            (s.step, s.phase, s.requests, s.tokens) for s in last
        ]
        layers = [
            {r.layer for s in samples for r in s.ranges if r.category is Category.MLA_ATTENTION}
            for samples in (first, last)
        ]
        assert layers[0].isdisjoint(layers[1])
        assert layers[0] | layers[1] == set(range(LAYERS))
        for s in decode_steps(rings[0]):
            assert not {Category.SAMPLING, Category.COLLECTIVE} & {r.category for r in s.ranges}
        for s in decode_steps(rings[1]):
            assert counts(s)["collective", "pipeline recv"] == 1
            assert counts(s)["sampling", ""] == 1


# --- speculative decoding ----------------------------------------------------------------------------------


def assert_drafts_are_one_range(running: Running, expected: dict[Category, int], drafter: str) -> None:
    (ring,) = rings_by_rank(running).values()
    every_decode_step_has(ring, expected | {Category.SPECULATION: 1})
    decode = decode_steps(ring)
    assert {r.detail for s in decode for r in s.ranges if r.category is Category.SPECULATION} == {drafter}
    assert max(s.tokens / s.requests for s in decode) > 1
    metrics = running.client.get("/metrics")
    assert_exposition_is_sound(metrics)
    assert sum(1 for _ in ring.samples()) == engine_steps(metrics)
    assert re.search(
        r'^vllm_k25_step_category_seconds_count\{category="speculation",phase="decode",rank="0"\}', metrics, re.M
    )


def speculative(**config: Any) -> tuple[str, str]:
    return "--speculative-config", json.dumps(config)


@pytest.mark.slow
def test_a_models_own_layer_that_drafts(tmp_path: Path) -> None:
    """The drafter is the model's own multi-token-prediction layer: MLA, experts, shared experts."""
    with serving(tmp_path, "deepseek_v3", *speculative(method="mtp", num_speculative_tokens=1)) as running:
        assert_drafts_are_one_range(running, DEEPSEEK_V3, "EagleProposer")
        (ring,) = rings_by_rank(running).values()
        assert ring.identity.layers == {"mla_attention": LAYERS, "moe": MOE_LAYERS, "moe_shared_experts": MOE_LAYERS}


def test_a_draft_model_is_speculation_and_no_step_of_its_own(tmp_path: Path) -> None:
    drafter = write_family(tmp_path / "drafter", "llama")
    config = speculative(method="draft_model", model=str(drafter), num_speculative_tokens=2)
    with serving(tmp_path, "qwen3_moe", *config) as running:
        model = {Category.ATTENTION: LAYERS, Category.MOE_EXPERTS: LAYERS, Category.MOE_ROUTING: LAYERS}
        assert_drafts_are_one_range(running, model | {Category.SAMPLING: 1}, "DraftModelProposer")


@pytest.mark.slow
def test_drafts_without_a_model(tmp_path: Path) -> None:
    config = speculative(method="ngram", num_speculative_tokens=3, prompt_lookup_max=3, prompt_lookup_min=1)
    with serving(tmp_path, "llama", *config) as running:
        model = {Category.ATTENTION: LAYERS, Category.SAMPLING: 1}
        assert_drafts_are_one_range(running, model, "NgramProposer")


# --- processes that others start ---------------------------------------------------------------------------

EXTERNAL_LAUNCHER = """
import os, sys
from vllm import LLM, SamplingParams
if __name__ == "__main__":
    llm = LLM(
        sys.argv[1], load_format="dummy", enforce_eager=True, max_model_len=256, max_num_seqs=4, dtype="bfloat16",
        kv_cache_memory_bytes=64 << 20, tensor_parallel_size=2, seed=0,
        distributed_executor_backend="external_launcher",
    )
    llm.generate(["hello", "a"], SamplingParams(max_tokens=24, temperature=0, ignore_eos=True))
"""


@pytest.mark.slow
def test_ranks_that_torchrun_starts_share_an_instance(tmp_path: Path, two_workers: dict[str, str]) -> None:
    model = write_family(tmp_path / "llama", "llama")
    script = tmp_path / "external.py"
    script.write_text(EXTERNAL_LAUNCHER)
    environment = {
        **os.environ,
        **two_workers,
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "K25_INSTRUMENT": "1",
        "K25_SAMPLE_EVERY": "1",
        "K25_RING_DIR": str(tmp_path / "rings"),
    }
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port"]
    run = subprocess.run(
        [*command, str(free_port()), str(script), str(model)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=READY_SECONDS,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    (instance,) = (found for found in list_instances(tmp_path / "rings") if any(found.path.glob("*.ring")))
    readers, errors = open_rings(instance.path)
    assert errors == []
    assert [reader.identity.coordinates.tp for reader in readers] == [0, 1]
    steps = [[(s.step, s.phase, s.tokens) for s in reader.samples()] for reader in readers]
    assert steps[0] == steps[1]
    for reader in readers:
        every_decode_step_has(
            reader,
            {
                Category.ATTENTION: LAYERS,
                Category.ALL_REDUCE: 1 + 2 * LAYERS,
                Category.COLLECTIVE: 1,
                Category.SAMPLING: 1,
            },
        )


@pytest.fixture
def ray_cluster(tmp_path: Path) -> Iterator[dict[str, str]]:
    """A Ray of our own on this machine, which believes to have two GPUs; the environment of a server that uses it."""
    if importlib.util.find_spec("ray") is None:
        pytest.skip("needs Ray (pip install ray)")
    port = free_port()
    paths = [str(DATA / "ray_on_cpu"), str(CPU_SETUP_PATH), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "RAY_USAGE_STATS_ENABLED": "0"}
    # Short, since Ray puts sockets into it.
    with tempfile.TemporaryDirectory(prefix="k25-ray-") as folder, (tmp_path / "ray.log").open("wb") as log:
        options = ["--num-cpus=4", "--num-gpus=2", "--object-store-memory=100000000", "--include-dashboard=false"]
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", f"--port={port}"]
        head = subprocess.Popen(
            [*command, f"--temp-dir={folder}", *options],
            env=environment,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            wait_for(lambda: "Ray runtime started" in (tmp_path / "ray.log").read_text(errors="replace"), 120)
            yield {"RAY_ADDRESS": f"127.0.0.1:{port}", "PYTHONPATH": environment["PYTHONPATH"]}
        finally:
            os.killpg(head.pid, signal.SIGTERM)
            try:
                head.wait(20)
            except subprocess.TimeoutExpired:
                os.killpg(head.pid, signal.SIGKILL)
                head.wait()


@pytest.mark.slow
@pytest.mark.parametrize("executor", ["1", "0"], ids=["executor v2", "executor v1"])
def test_workers_that_ray_starts_belong_to_the_front_end_s_instance(
    tmp_path: Path, ray_cluster: dict[str, str], executor: str
) -> None:
    arguments = ("--distributed-executor-backend", "ray")
    env = {**ray_cluster, "VLLM_USE_RAY_V2_EXECUTOR_BACKEND": executor}
    with serving(tmp_path, "llama", *arguments, tp=2, **env) as running:
        rings = rings_by_rank(running)
        assert {rank: ring.identity.coordinates.tp for rank, ring in rings.items()} == {0: 0, 1: 1}
        for ring in rings.values():
            every_decode_step_has(
                ring,
                {
                    Category.ATTENTION: LAYERS,
                    Category.ALL_REDUCE: 1 + 2 * LAYERS,
                    Category.COLLECTIVE: 1,
                    Category.SAMPLING: 1,
                },
            )
        metrics = running.client.get("/metrics")
        assert_exposition_is_sound(metrics)
        for rank in rings:
            assert f'vllm_k25_steps_total{{phase="decode",rank="{rank}"}}' in metrics
