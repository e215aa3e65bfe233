"""Timers: on the host, and over the simulated GPU, eager and in a graph."""

from __future__ import annotations

from time import perf_counter_ns

import pytest

torch = pytest.importorskip("torch")

from tests.sim.torch_cuda import install  # noqa: E402
from vllm_k25_instrument.bench.document import BenchMachine  # noqa: E402
from vllm_k25_instrument.bench.in_vllm import foreign_floors  # noqa: E402
from vllm_k25_instrument.bench.overhead import KERNELS, cuda_rows  # noqa: E402
from vllm_k25_instrument.bench.timing import CudaTimer, HostTimer, Repeats, last_level_cache_bytes  # noqa: E402
from vllm_k25_instrument.limits.gpus import find_gpu  # noqa: E402


def spin(ns: int) -> None:
    end = perf_counter_ns() + ns
    while perf_counter_ns() < end:
        pass


@pytest.mark.parametrize("flush", [False, True])
def test_the_host_timer_measures_the_call_and_not_the_flush(flush):
    times = HostTimer().times(lambda: spin(200_000), Repeats(7, 60.0), flush=flush)
    assert len(times) == 7
    assert min(times) >= 200_000
    assert min(times) < 2_000_000  # a flush of 64 MiB takes longer


def test_repeats_end_with_their_time_but_never_below_an_interval():
    assert len(HostTimer().times(lambda: spin(1_000_000), Repeats(1000, 0.0), flush=False)) == 6


def test_the_largest_cache_counts(tmp_path):
    for index, size in enumerate(("32K", "1024K", "32M", "junk")):
        (tmp_path / f"index{index}").mkdir()
        (tmp_path / f"index{index}" / "size").write_text(f"{size}\n")
    assert last_level_cache_bytes(tmp_path) == 32 << 20
    assert last_level_cache_bytes(tmp_path / "nowhere") == 0


@pytest.fixture
def gpu(monkeypatch):
    return install(monkeypatch)


@pytest.mark.parametrize("flush", [False, True])
@pytest.mark.parametrize("in_graph", [False, True])
def test_the_cuda_timer_measures_the_call_alone(gpu, flush, in_graph):
    timer = CudaTimer(fill=lambda: gpu.launch("fill", 90_000))

    def call() -> None:
        gpu.launch("a", 3_000)
        gpu.launch("b", 2_000)

    what = timer.graphed(call) if in_graph else call
    times = timer.times(what, Repeats(8, 60.0), flush=flush)
    assert len(times) == 8
    assert all(5_000 <= ns < 6_500 for ns in times), times  # the kernels and the events' own time
    assert gpu.refusals == []


def test_without_a_flush_the_call_itself_warms_the_caches_again(gpu):
    timer = CudaTimer(fill=lambda: gpu.launch("fill", 90_000))
    timer.times(lambda: gpu.launch("a", 1_000), Repeats(6, 60.0), flush=False)
    names = [execution.name for execution in gpu.executions][-3:]
    assert names == ["fill", "a", "a"]


def test_the_events_of_a_twin_are_what_its_replay_takes_longer(gpu):
    timer = CudaTimer(fill=lambda: gpu.launch("fill", 90_000))
    eager, plain, twin = cuda_rows(6, timer, lambda: gpu.launch("k", 1_000))
    assert plain.median_ns == pytest.approx(KERNELS * 1_000, abs=2 * gpu.event_ns)
    assert twin.median_ns - plain.median_ns == pytest.approx(2 * KERNELS * gpu.event_ns, rel=0.05)
    assert eager.median_ns > 0
    assert {row.calls for row in (eager, plain, twin)} == {KERNELS}
    assert gpu.refusals == []


def test_floors_of_another_machine_are_said_to_be():
    machine = BenchMachine("cpu", "p", "v", "t", 1)
    assert foreign_floors(None, machine) is None
    assert foreign_floors(find_gpu("h200"), BenchMachine("cuda", "H200", "v", "t", 1, gpu="h200")) is None
    remark = foreign_floors(find_gpu("h200"), machine)
    assert remark is not None
    assert "H200" in remark.message
