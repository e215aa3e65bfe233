"""Names on graph nodes, against a strict stand-in for PyTorch's module over the simulated GPU."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from tests.annotating import StrictAnnotations  # noqa: E402
from tests.sim import SimulatedGpu  # noqa: E402
from tests.sim.torch_cuda import install  # noqa: E402
from tests.simulated import decode  # noqa: E402
from vllm_k25_instrument.hooks.point import HookKind, HookPoint  # noqa: E402
from vllm_k25_instrument.hooks.wrappers import wrap  # noqa: E402
from vllm_k25_instrument.model import AllReducePath, Category, GraphMode, RankCoordinates, RankIdentity  # noqa: E402
from vllm_k25_instrument.recorder import annotations as annotations_module  # noqa: E402
from vllm_k25_instrument.recorder.annotations import ANNOTATION_KEY, GraphAnnotations, find_annotations  # noqa: E402
from vllm_k25_instrument.recorder.cuda import CudaDevice  # noqa: E402
from vllm_k25_instrument.recorder.graphs import TimedGraphs  # noqa: E402
from vllm_k25_instrument.recorder.recorder import Recorder  # noqa: E402
from vllm_k25_instrument.ring import RingLayout, RingReader, RingWriter  # noqa: E402
from vllm_k25_instrument.settings import GraphTiming  # noqa: E402


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> SimulatedGpu:
    return install(monkeypatch)


class Model:
    """Hooked kernels, one of them on a side stream, and the dictionary that its graphs are in."""

    def __init__(self, gpu: SimulatedGpu, folder: Path) -> None:
        self.gpu = gpu
        self.torch = StrictAnnotations(gpu)
        identity = RankIdentity("t", 1, RankCoordinates(global_rank=3))
        self.ring = RingWriter(folder / "rank.ring", identity, RingLayout(slots=16, slot_bytes=4096))
        self.errors: list[Exception] = []
        self.device = CudaDevice()
        self.recorder = Recorder(
            self.ring, self.device, sample_every=1, on_error=lambda point, error: self.errors.append(error)
        )
        self.annotations = GraphAnnotations(self.torch)
        self.timed = TimedGraphs(self.recorder, self.device, GraphTiming.TWIN, annotations=self.annotations)
        self.graphs: dict[int, Any] = {}
        self.side = torch.cuda.Stream()
        self.file = folder / "kernel_annotations_rank3_k25.pkl"
        experts = HookPoint(
            "moe_experts",
            HookKind.RANGE,
            "m",
            "C.f",
            category=Category.MOE_EXPERTS,
            detail=lambda args, kwargs: "marlin",
            layer=lambda args, kwargs: args[0],
        )
        shared = HookPoint("moe_shared_experts", HookKind.RANGE, "m", "C.s", category=Category.MOE_SHARED_EXPERTS)
        gather = HookPoint("all_gather", HookKind.RANGE, "m", "C.g", category=Category.COLLECTIVE)
        reduce = HookPoint(
            "all_reduce",
            HookKind.RANGE,
            "m",
            "C.r",
            category=Category.ALL_REDUCE,
            detail=lambda args, kwargs: "",
            nbytes=lambda args, kwargs: 14_336,
            inherits_layer=True,
        )
        path = HookPoint("all_reduce_path", HookKind.PATH, "m", "C.p", path=lambda args, kwargs: AllReducePath.PYNCCL)
        self._experts = wrap(self._run_experts, experts, self.recorder)
        self._shared = wrap(lambda: gpu.launch("shared", 40), shared, self.recorder)
        self._gather = wrap(lambda: gpu.launch("gather", 5), gather, self.recorder)
        self._path = wrap(lambda: gpu.launch("nccl", 9), path, self.recorder)
        self._reduce = wrap(lambda: self._path(), reduce, self.recorder)

    def _run_experts(self, layer: int) -> None:
        self.gpu.launch("gemm", 100)
        self._gather()
        self.gpu.launch("gemm 2", 100)

    def forward(self) -> None:
        main = torch.cuda.current_stream()
        self.side.wait_stream(main)
        with torch.cuda.stream(self.side):
            self._shared()
        self._experts(17)
        self.gpu.launch("unhooked", 3)
        main.wait_stream(self.side)
        self._reduce()

    def capture(self, size: int) -> Any:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.forward()
        self.graphs[size] = graph
        return graph

    def capture_twins(self, *sizes: int) -> list[Any]:
        """The twins of these sizes, as far as they could be captured."""
        keys = [_Key(size) for size in sizes]
        self.timed.capture_twins([(self, "graphs")], keys, lambda key: self.capture(key.num_tokens), GraphMode.FULL)
        return list(self.timed._twins[id(self)][2].values()) if id(self) in self.timed._twins else []


class _Key(int):
    """A batch size that is its own descriptor."""

    @property
    def num_tokens(self) -> int:
        return int(self)


@pytest.fixture
def model(gpu: SimulatedGpu, tmp_path: Path) -> Model:
    return Model(gpu, tmp_path)


NAMES = {
    "shared": "moe_shared_experts",
    "gemm": "moe_experts marlin L17",
    "gather": "collective",
    "gemm 2": "moe_experts marlin L17",
    "nccl": "all_reduce pynccl 14 KiB L17",
}
"""What the kernels of a graph are called; of nested ranges the inner one counts, and unhooked work has no name."""


def test_every_kernel_of_a_twin_has_the_name_of_its_range(model: Model) -> None:
    twins = model.capture_twins(8, 4, 1)
    assert len(twins) == 3
    for twin in twins:
        assert model.torch.names(twin, ANNOTATION_KEY) == NAMES
    assert model.torch.refused == []


def test_an_all_reduce_is_named_by_the_path_that_reports_itself_inside(model: Model) -> None:
    (twin,) = model.capture_twins(8)
    assert model.torch.names(twin, ANNOTATION_KEY)["nccl"] == "all_reduce pynccl 14 KiB L17"


def test_vllms_own_graphs_are_captured_without_a_call_to_pytorchs_annotations(model: Model) -> None:
    model.capture(8)
    assert model.torch.calls == []


def test_steps_make_no_call_to_pytorchs_annotations(model: Model) -> None:
    (_twin,) = model.capture_twins(8)
    before = list(model.torch.calls)
    model.recorder.begin_step(decode())
    model.forward()
    model.recorder.end_step()
    torch.cuda.synchronize()
    model.recorder.drain()
    assert len(RingReader(model.ring.path).samples().__next__().ranges) == 4
    assert model.torch.calls == before
    assert model.recorder.annotations is None


def test_annotations_are_on_during_our_captures_only(model: Model) -> None:
    model.capture_twins(8)
    assert not model.torch._annotations_enabled


def test_annotations_that_somebody_else_turned_on_stay_on(model: Model) -> None:
    model.torch.enable_annotations()
    model.capture_twins(8)
    assert model.torch._annotations_enabled


def test_the_names_are_written_for_pytorchs_own_tool(model: Model) -> None:
    twins = model.capture_twins(8, 4)
    with model.file.open("rb") as file:
        written = pickle.load(file)
    assert written == model.torch.get_kernel_annotations()
    assert len(written) == len(twins) * len(NAMES)
    assert {tools_id >> 32 for tools_id in written} == {twin._exec for twin in twins}
    assert model.file.stat().st_mode & 0o777 == 0o600


def test_graphs_instrumented_in_place_are_named_too(model: Model) -> None:
    model.timed.timing = GraphTiming.INPLACE
    with model.timed.instrumented("capture in place"):
        graph = model.capture(8)
    assert model.torch.names(graph, ANNOTATION_KEY) == NAMES
    assert model.file.exists()


def test_a_graph_without_a_named_node_does_not_take_the_names_of_the_one_before(model: Model) -> None:
    model.timed.timing = GraphTiming.INPLACE
    with model.timed.instrumented("capture in place"):
        named = model.capture(8)
        bare = torch.cuda.CUDAGraph()
        with torch.cuda.graph(bare):
            model.gpu.launch("unhooked", 1)
    assert model.torch.names(named, ANNOTATION_KEY) == NAMES
    assert model.torch.names(bare, ANNOTATION_KEY) == {}
    assert model.torch.refused == []


@pytest.mark.parametrize("after", range(5))
def test_a_failed_capture_leaves_nothing_to_the_next_one(model: Model, after: int) -> None:
    """Five launches in a twin; each of them fails once, and vLLM captures again later."""
    model.gpu.fail("launch", after=after)
    assert model.capture_twins(8) == []
    model.timed.drop()
    (twin,) = model.capture_twins(4)
    assert model.torch.names(twin, ANNOTATION_KEY) == NAMES
    assert {tools_id >> 32 for tools_id in model.torch.get_kernel_annotations()} == {twin._exec}
    assert model.torch.refused == []
    assert not model.torch._annotations_enabled


@pytest.mark.parametrize(
    "function",
    [
        "enable_annotations",
        "disable_annotations",
        "mark_kernels",
        "exit",
        "resolve_pending_annotations",
        "remap_to_exec_graph",
    ],
)
def test_an_error_in_pytorchs_annotations_costs_the_names_and_no_capture(
    model: Model, function: str, caplog: pytest.LogCaptureFixture
) -> None:
    model.torch.fail(function)
    twins = model.capture_twins(8, 4)
    assert len(twins) == 2
    assert [twin.kinds()["event_record"] for twin in twins] == [8, 8]
    assert all(len(twin.ranges) == 4 for twin in twins)
    assert model.recorder.annotations is None
    assert model.errors == []
    assert not model.torch._annotations_enabled or function == "disable_annotations"
    assert sum("graph nodes are not named" in record.message for record in caplog.records) == 1


def test_a_file_that_cannot_be_written_costs_the_file_only(model: Model) -> None:
    model.file.with_suffix(".partial").mkdir()
    (twin,) = model.capture_twins(8)
    assert model.torch.names(twin, ANNOTATION_KEY) == NAMES
    assert not model.file.exists()


# --- where they can be had ---------------------------------------------------------------------------------


@contextmanager
def modules(patch: pytest.MonkeyPatch, **found: Any) -> Iterator[None]:
    names = {"runtime": "cuda.bindings.runtime", "annotations": "torch.cuda._graph_annotations"}

    def import_module(name: str) -> Any:
        for key, full in names.items():
            if name == full and key in found:
                return found[key]
        raise ImportError(name)

    with patch.context() as inner:
        inner.setattr(annotations_module.importlib, "import_module", import_module)
        yield


def test_there_are_annotations_only_with_bindings_that_can_name_a_node(monkeypatch: pytest.MonkeyPatch) -> None:
    new, old = SimpleNamespace(cudaGraphNodeGetToolsId=lambda node: None), SimpleNamespace()
    with modules(monkeypatch, runtime=new, annotations=object()):
        assert isinstance(find_annotations(), GraphAnnotations)
    for found in ({"runtime": old, "annotations": object()}, {"runtime": new}, {"annotations": object()}, {}):
        with modules(monkeypatch, **found):
            assert find_annotations() is None


def test_pytorchs_module_has_the_functions_that_we_call() -> None:
    module = pytest.importorskip("torch.cuda._graph_annotations")
    for function in (
        "enable_annotations",
        "disable_annotations",
        "mark_kernels",
        "resolve_pending_annotations",
        "remap_to_exec_graph",
        "get_kernel_annotations",
    ):
        assert callable(getattr(module, function)), function
    assert module._annotations_enabled is False
