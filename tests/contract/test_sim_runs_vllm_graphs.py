"""vLLM's own graph classes capture and replay over the simulated GPU: the swap of their dictionaries is sound."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

import vllm.compilation.breakable_cudagraph as breakable  # noqa: E402
import vllm.compilation.cuda_graph as cuda_graph  # noqa: E402
import vllm.v1.worker.gpu.cudagraph_utils as cudagraph_utils  # noqa: E402
from vllm.config import CUDAGraphMode  # noqa: E402
from vllm.model_executor.offloader.base import NoopOffloader  # noqa: E402
from vllm.utils.torch_utils import current_stream  # noqa: E402

from tests.sim import SimulatedGpu  # noqa: E402
from tests.sim.torch_cuda import install  # noqa: E402

pytestmark = pytest.mark.contract

CONFIG = SimpleNamespace(use_cumem_cudagraph_pool=False, compilation_config=None)
KERNELS = 5


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> SimulatedGpu:
    """A simulated GPU, and what vLLM takes from a started engine."""
    simulated = install(monkeypatch)
    offloader = NoopOffloader()
    for module in (cuda_graph, cudagraph_utils, breakable):
        monkeypatch.setattr(module, "get_offloader", lambda: offloader)
    for module in (cuda_graph, breakable):
        monkeypatch.setattr(module, "validate_cudagraph_capturing_enabled", lambda: None)

    @contextlib.contextmanager
    def graph_capture(device: object) -> Iterator[None]:
        # What a group of one rank does: a new stream behind the current one.
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            yield

    monkeypatch.setattr(cudagraph_utils, "graph_capture", graph_capture)
    monkeypatch.setattr(cudagraph_utils, "is_global_first_rank", lambda: False)
    return simulated


class Marks:
    """External timing events around kernels, in captures that are to be instrumented."""

    def __init__(self) -> None:
        self.on = False
        self.pairs: list[tuple[Any, Any]] = []

    def around(self, work: Callable[[], None]) -> None:
        # vLLM runs the model once eagerly before it captures it; that is not the graph's time.
        if not (self.on and torch.cuda.is_current_stream_capturing()):
            work()
            return
        pair = tuple(torch.cuda.Event(enable_timing=True, external=True) for _ in range(2))
        pair[0].record()
        work()
        pair[1].record()
        self.pairs.append(pair)

    def durations_ns(self, last: int) -> list[int]:
        return [round(start.elapsed_time(end) * 1e6) for start, end in self.pairs[-last:]]


# --- full graphs: CudaGraphManager ------------------------------------------------------------------------


def full_descriptors(sizes: Iterable[int]) -> list[Any]:
    """Of a full graph for each size, in tokens, of one token per request."""
    return [
        cudagraph_utils.BatchExecutionDescriptor(
            cg_mode=CUDAGraphMode.FULL, num_tokens=size, num_reqs=size, uniform_token_count=1
        )
        for size in sizes
    ]


def bare_manager(descs: list[Any], **more: Any) -> Any:
    """vLLM's CudaGraphManager without the engine that its constructor asks for; `more`: further attributes."""
    manager = object.__new__(cudagraph_utils.CudaGraphManager)
    manager.__dict__.update(
        vllm_config=CONFIG,
        device="cuda:0",
        ubatch_runner=None,
        graphs={},
        pool=torch.cuda.graph_pool_handle(),
        use_breakable_cg=False,
        breakable_cg_runner=None,
        _capture_descs={CUDAGraphMode.FULL: descs},
        _max_full_descs_to_capture=None,
        _capture_mem_samples=None,
        _graphs_captured=False,
        **more,
    )
    return manager


class FullModel:
    """What vLLM's model runner has around its CudaGraphManager, with a model of a few kernels."""

    def __init__(self, gpu: SimulatedGpu, sizes: tuple[int, ...] = (8, 4, 1)) -> None:
        self.gpu = gpu
        self.marks = Marks()
        self.input = gpu.allocate(512, "input")
        self.output = gpu.allocate(512, "output")
        self.descs = full_descriptors(sizes)
        self.manager = bare_manager(self.descs)

    def create_forward(self, desc: Any, warmup: bool) -> Callable[[Any], None]:
        def forward(mode: Any) -> None:
            for index in range(KERNELS):
                source = self.input if index == 0 else self.output
                self.marks.around(
                    lambda index=index, source=source: self.gpu.launch(
                        f"kernel {index} of {desc.num_tokens}", 100 + index, reads=[source], writes=[self.output]
                    )
                )

        return forward

    def capture(self) -> None:
        self.manager.capture(self.create_forward)

    def run(self, desc: Any, value: int) -> int:
        self.gpu.fill(self.input, value)
        self.manager.run_fullgraph(desc)
        return self.gpu.read(self.output)


def test_vllm_captures_and_replays_full_graphs(gpu: SimulatedGpu) -> None:
    model = FullModel(gpu)
    model.capture()
    assert list(model.manager.graphs) == model.descs
    assert [graph.kinds() for graph in model.manager.graphs.values()] == [{"kernel": KERNELS}] * 3

    eager = model.create_forward(model.descs[1], warmup=False)
    gpu.fill(model.input, 42)
    eager(CUDAGraphMode.NONE)
    expected = gpu.read(model.output)
    assert model.run(model.descs[1], 42) == expected
    assert model.run(model.descs[0], 42) != expected
    assert gpu.refusals == []


def test_a_second_capture_into_an_exchanged_dictionary_leaves_the_own_graphs_untouched(gpu: SimulatedGpu) -> None:
    model = FullModel(gpu)
    model.capture()
    own = model.manager.graphs
    before = {desc: (graph, graph.nodes) for desc, graph in own.items()}
    model.manager.graphs, model.marks.on = {}, True
    model.capture()
    twins, model.manager.graphs = model.manager.graphs, own

    assert {desc: (graph, graph.nodes) for desc, graph in own.items()} == before
    assert list(twins) == list(own)
    assert [graph.kinds() for graph in twins.values()] == [{"kernel": KERNELS, "event_record": 2 * KERNELS}] * 3
    expected = model.run(model.descs[2], 5)
    model.manager.graphs = twins
    assert model.run(model.descs[2], 5) == expected
    assert model.marks.durations_ns(KERNELS) == [100, 101, 102, 103, 104]
    model.manager.graphs = own
    assert model.run(model.descs[2], 5) == expected
    assert [graph.replays for graph in own.values()] == [0, 0, 2]
    assert [graph.replays for graph in twins.values()] == [0, 0, 1]
    assert gpu.refusals == []


def test_vllm_measures_the_memory_of_a_graph(monkeypatch: pytest.MonkeyPatch, gpu: SimulatedGpu) -> None:
    gpu.graph_bytes, gpu.node_bytes = 1 << 20, 100
    model = FullModel(gpu)
    samples: list[int] = []
    model.manager._capture_mem_samples = samples
    model.manager._max_full_descs_to_capture = 2
    model.capture()
    assert samples == [(1 << 20) + KERNELS * 100] * 2


def test_a_graph_dropped_by_release_graphs_gives_its_memory_back(gpu: SimulatedGpu) -> None:
    gpu.graph_bytes = 1000
    model = FullModel(gpu)
    free = gpu.memory.free
    model.capture()
    assert gpu.memory.free == free - 3000
    model.manager.release_graphs()
    assert gpu.memory.free == free


# --- piecewise graphs: CUDAGraphWrapper, BreakableCUDAGraphWrapper ----------------------------------------


class Pieces:
    """A chain of pieces, each behind a graph wrapper, with eager work in between as attention is."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, gpu: SimulatedGpu, wrap: Callable[[Any], Any]) -> None:
        self.gpu = gpu
        self.marks = Marks()
        self.context = SimpleNamespace(batch_descriptor="bs4", cudagraph_runtime_mode=CUDAGraphMode.PIECEWISE)
        for module in (cuda_graph, breakable):
            monkeypatch.setattr(module, "get_forward_context", lambda: self.context)
            monkeypatch.setattr(module, "is_forward_context_available", lambda: True)
        self.input = torch.ones(2)
        self.wrappers = [wrap(self.piece(factor)) for factor in (2.0, 3.0, 5.0)]

    def piece(self, factor: float) -> Callable[[Any], Any]:
        out = torch.empty(2)

        def run(x: Any) -> Any:
            self.marks.around(
                lambda: self.gpu.launch(f"times {factor}", int(factor), run=lambda: out.copy_(x * factor))
            )
            return out

        return run

    def forward(self, value: float = 1.0) -> list[float]:
        self.input.fill_(value)
        x = self.input
        for wrapper in self.wrappers:
            x = wrapper(x)
            self.gpu.launch("attention", 50)
        torch.cuda.synchronize()
        return x.tolist()


def wrapped(runnable: Any) -> Any:
    return cuda_graph.CUDAGraphWrapper(runnable, CONFIG, CUDAGraphMode.PIECEWISE)


def breakably_wrapped(runnable: Any) -> Any:
    return breakable.BreakableCUDAGraphWrapper(runnable, CONFIG, CUDAGraphMode.PIECEWISE)


@pytest.mark.parametrize(("wrap", "entries"), [(wrapped, "concrete_cudagraph_entries"), (breakably_wrapped, "entries")])
def test_a_chain_of_wrappers_replays_own_and_exchanged_graphs_with_right_outputs(
    monkeypatch: pytest.MonkeyPatch, gpu: SimulatedGpu, wrap: Callable[[Any], Any], entries: str
) -> None:
    pieces = Pieces(monkeypatch, gpu, wrap)

    def use(dictionaries: list[dict[Any, Any]]) -> None:
        for wrapper, dictionary in zip(pieces.wrappers, dictionaries, strict=True):
            setattr(wrapper, entries, dictionary)

    pieces.forward()  # the first call of a size captures
    own = [getattr(wrapper, entries) for wrapper in pieces.wrappers]
    twins: list[dict[Any, Any]] = [{} for _ in own]
    use(twins)
    pieces.marks.on = True
    pieces.forward()
    pieces.marks.on = False
    use(own)
    assert [list(entry) for entry in own] == [list(entry) for entry in twins] == [["bs4"]] * 3

    assert pieces.forward(1.0) == [30.0, 30.0]
    assert not any(pair[0].last_record for pair in pieces.marks.pairs)
    use(twins)
    assert pieces.forward(2.0) == [60.0, 60.0]
    assert pieces.marks.durations_ns(3) == [2, 3, 5]
    use(own)
    assert pieces.forward(3.0) == [90.0, 90.0]
    assert gpu.refusals == []


def test_another_size_and_another_mode_do_not_meet_the_graphs(
    monkeypatch: pytest.MonkeyPatch, gpu: SimulatedGpu
) -> None:
    pieces = Pieces(monkeypatch, gpu, wrapped)
    pieces.forward()
    pieces.context.cudagraph_runtime_mode = CUDAGraphMode.NONE
    pieces.context.batch_descriptor = None
    assert pieces.forward(2.0) == [60.0, 60.0]
    pieces.context.cudagraph_runtime_mode = CUDAGraphMode.PIECEWISE
    pieces.context.batch_descriptor = "bs8"
    pieces.forward()
    assert [list(w.concrete_cudagraph_entries) for w in pieces.wrappers] == [["bs4", "bs8"]] * 3


def test_vllm_knows_the_simulated_stream_as_the_current_one(gpu: SimulatedGpu) -> None:
    assert current_stream() == torch.cuda.current_stream() != torch.cuda.default_stream()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        assert current_stream() == side
    assert current_stream() == torch.cuda.current_stream() != side


@pytest.mark.parametrize("mode", [CUDAGraphMode.FULL, CUDAGraphMode.PIECEWISE])
def test_own_and_exchanged_graphs_are_replayed_in_the_order_of_the_calls(
    monkeypatch: pytest.MonkeyPatch, gpu: SimulatedGpu, mode: CUDAGraphMode
) -> None:
    pieces = Pieces(monkeypatch, gpu, lambda runnable: cuda_graph.CUDAGraphWrapper(runnable, CONFIG, mode))
    pieces.context.cudagraph_runtime_mode = mode
    pieces.forward()
    own = [wrapper.concrete_cudagraph_entries for wrapper in pieces.wrappers]
    for wrapper in pieces.wrappers:
        wrapper.concrete_cudagraph_entries = {}
    pieces.forward()
    twins = [wrapper.concrete_cudagraph_entries for wrapper in pieces.wrappers]
    gpu.executions.clear()
    for dictionaries in (own, twins, own):
        for wrapper, dictionary in zip(pieces.wrappers, dictionaries, strict=True):
            wrapper.concrete_cudagraph_entries = dictionary
        pieces.forward()
    ran = [(run.graph, run.name) for run in gpu.executions if run.graph is not None]
    assert ran == [
        (dictionary["bs4"].cudagraph.number, f"times {factor}")
        for dictionaries in (own, twins, own)
        for dictionary, factor in zip(dictionaries, (2.0, 3.0, 5.0), strict=True)
    ]


@pytest.mark.parametrize(
    ("owner", "names"),
    [
        (cudagraph_utils.CudaGraphManager, ["capture", "run_fullgraph", "release_graphs", "graphs", "_capture_descs"]),
        (cudagraph_utils.CudaGraphManager, ["_capture_mem_samples", "pool", "use_breakable_cg"]),
        (cuda_graph.CUDAGraphWrapper, ["concrete_cudagraph_entries", "clear_graphs", "clear_all_graphs"]),
        (cuda_graph.CUDAGraphWrapper, ["_all_instances", "runtime_mode", "graph_pool", "__call__"]),
        (breakable.BreakableCUDAGraphWrapper, ["entries", "clear_graphs", "clear_all_graphs", "_all_instances"]),
        (breakable.BreakableCUDAGraphCapture, ["segments", "replay"]),
        (cudagraph_utils, ["profile_cudagraph_memory", "CudaGraphManager"]),
    ],
)
def test_the_names_that_the_swap_relies_on_are_there(owner: Any, names: list[str]) -> None:
    made_in_init = inspect.getsource(owner.__init__) if inspect.isclass(owner) else ""
    missing = [name for name in names if not (hasattr(owner, name) or f"self.{name}" in made_in_init)]
    assert missing == [], f"gone from {owner.__name__}"


def test_vllm_still_calls_what_the_fixture_stands_in_for() -> None:
    for module in (cuda_graph, cudagraph_utils, breakable):
        assert {"get_offloader", "capture_pool", "torch"} <= set(vars(module)), module.__name__
    assert {"graph_capture", "is_global_first_rank", "current_stream"} <= set(vars(cudagraph_utils))
