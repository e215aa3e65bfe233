"""Installed, the simulated GPU is what `torch.cuda` means, PyTorch's own `graph` included; undone, nothing is left."""

import pytest

torch = pytest.importorskip("torch")

from tests.sim import CudaError  # noqa: E402
from tests.sim.refusing import refused  # noqa: E402
from tests.sim.torch_cuda import install  # noqa: E402


@pytest.fixture
def gpu(monkeypatch):
    return install(monkeypatch)


def test_torch_captures_and_replays_on_the_simulated_gpu(gpu):
    assert torch.cuda.graph.__module__ == "torch.cuda.graphs"
    start, end = (torch.cuda.Event(enable_timing=True, external=True) for _ in range(2))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=torch.cuda.graph_pool_handle()):
        assert torch.cuda.is_current_stream_capturing()
        start.record()
        gpu.launch("k", 1234)
        end.record()
    assert not torch.cuda.is_current_stream_capturing()
    graph.replay()
    torch.cuda.synchronize()
    assert start.elapsed_time(end) == 1234 / 1e6
    assert gpu.refusals == []


def test_torch_refuses_what_the_simulated_gpu_refuses(gpu):
    with refused(CudaError, "previous error during capture"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        gpu.launch("k", 1)
        with refused(CudaError, "not permitted when stream is capturing"):
            torch.cuda.synchronize()
        with refused(CudaError, "not permitted when stream is capturing"):
            torch.accelerator.synchronize()


def test_a_capture_whose_end_fails_leaves_its_stream_current_and_its_pool_recording(gpu):
    before, side, pool = torch.cuda.current_stream(), torch.cuda.Stream(), torch.cuda.graph_pool_handle()
    gpu.fail("capture_end")
    with refused(CudaError, "launch failure"), torch.cuda.graph(torch.cuda.CUDAGraph(), pool=pool, stream=side):
        gpu.launch("k", 1)
    assert torch.cuda.current_stream() == side != before

    def capture_into_the_pool():
        with torch.cuda.graph(torch.cuda.CUDAGraph(), pool=pool, stream=side):
            gpu.launch("k", 1)

    with refused(RuntimeError, "already recording to mempool_id"):
        capture_into_the_pool()
    torch._C._cuda_endAllocateToPool(0, pool)
    capture_into_the_pool()
    with refused(RuntimeError, "not currently recording to mempool_id"):
        torch._C._cuda_endAllocateToPool(0, pool)


def test_the_current_stream_is_set_by_the_context_and_by_set_stream(gpu):
    first, second = torch.cuda.Stream(), torch.cuda.Stream()
    with torch.cuda.stream(first):
        assert torch.cuda.current_stream() == first
        torch.cuda.set_stream(second)
        assert torch.cuda.current_stream() == second
        with torch.cuda.stream(None):
            assert torch.cuda.current_stream() == second
    assert torch.cuda.default_stream().cuda_stream == 0


def test_torch_reports_the_simulated_memory(gpu):
    before, total = torch.cuda.mem_get_info()
    x = gpu.allocate(1000)
    assert torch.accelerator.get_memory_info() == (before - 1000, total)
    assert (torch.cuda.memory_allocated(), torch.cuda.memory_reserved()) == (1000, 1000)
    assert torch.cuda.memory_stats()["allocated_bytes.all.current"] == 1000
    x.free()
    torch.cuda.empty_cache()
    assert torch.cuda.mem_get_info()[0] == before


def test_undone_it_leaves_torch_as_it_was():
    def names():
        return {name: getattr(torch.cuda, name) for name in dir(torch.cuda) if not name.startswith("__")}

    before = names()
    with pytest.MonkeyPatch.context() as monkeypatch:
        install(monkeypatch)
        assert torch.cuda.is_available()
    assert names() == before
    assert not hasattr(torch._C, "_host_emptyCache") or torch.backends.cuda.is_built()
