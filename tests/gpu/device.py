"""The GPU under test: kernels of known length, and a look into captured graphs."""

from __future__ import annotations

import ctypes
import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

NODE_KINDS = (
    "kernel",
    "memcpy",
    "memset",
    "host",
    "child_graph",
    "empty",
    "event_wait",
    "event_record",
    "semaphore_signal",
    "semaphore_wait",
    "mem_alloc",
    "mem_free",
    "batch_mem_op",
    "conditional",
)
"""By the value of CUgraphNodeType."""


class CudaGpu:
    """The current CUDA device."""

    device = "cuda"

    def __init__(self) -> None:
        self._cycles_per_us = 1000.0
        self._cycles_per_us = self._calibrate()

    def spin(self, us: float) -> None:
        """A kernel that keeps one multiprocessor busy for about so long."""
        torch.cuda._sleep(int(us * self._cycles_per_us))

    def multiply(self, a: Any, b: Any, out: Any) -> None:
        torch.matmul(a, b, out=out)

    def increment(self, x: Any) -> None:
        x.add_(1)

    def matrix(self, n: int) -> Any:
        return torch.randn(n, n, device=self.device, dtype=torch.bfloat16) / n**0.5

    def nodes(self, graph: Any) -> GraphNodes:
        """What a graph captured with ``keep_graph=True`` consists of."""
        return read_nodes(graph.raw_cuda_graph())

    def environment(self) -> dict[str, str]:
        properties = torch.cuda.get_device_properties(0)
        return {
            "gpu": properties.name,
            "compute_capability": f"{properties.major}.{properties.minor}",
            "cuda_of_torch": str(torch.version.cuda),
            "driver_cuda": _driver_version(),
        }

    def _calibrate(self) -> float:
        """Clock cycles of `_sleep` per microsecond."""
        torch.cuda._sleep(500_000_000)  # an idle GPU takes its time to reach its clock
        cycles, rates = 5_000_000, []
        for _ in range(6):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            torch.cuda._sleep(cycles)
            end.record()
            end.synchronize()
            rates.append(cycles / (start.elapsed_time(end) * 1e3))
        return statistics.median(rates[1:])


@contextmanager
def capturing(graph: Any, **options: Any) -> Iterator[None]:
    """Capture into `graph` on a stream of its own; the work before it is done, that after it waits."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.graph(graph, stream=stream, **options):
        yield
    torch.cuda.current_stream().wait_stream(stream)


# --- the driver's own account of a graph ------------------------------------------------------------------


@dataclass(frozen=True)
class GraphNodes:
    """A graph's nodes, in the order of their creation as far as the driver keeps it, and its edges by index."""

    labels: tuple[tuple[str, ...], ...]
    edges: frozenset[tuple[int, int]]

    def without(self, kind: str) -> tuple[tuple[str, ...], ...]:
        return tuple(sorted(label for label in self.labels if label[0] != kind))

    def count(self, kind: str) -> int:
        return sum(label[0] == kind for label in self.labels)


class _KernelParams(ctypes.Structure):
    """CUDA_KERNEL_NODE_PARAMS_v2."""

    _fields_ = (
        ("func", ctypes.c_void_p),
        ("grid_x", ctypes.c_uint),
        ("grid_y", ctypes.c_uint),
        ("grid_z", ctypes.c_uint),
        ("block_x", ctypes.c_uint),
        ("block_y", ctypes.c_uint),
        ("block_z", ctypes.c_uint),
        ("shared_bytes", ctypes.c_uint),
        ("kernel_params", ctypes.c_void_p),
        ("extra", ctypes.c_void_p),
        ("kern", ctypes.c_void_p),
        ("ctx", ctypes.c_void_p),
    )


class DriverError(RuntimeError):
    """The CUDA driver has refused a call."""


def read_nodes(raw_graph: int) -> GraphNodes:
    """Nodes and edges of a cudaGraph_t. Raises DriverError."""
    driver = ctypes.CDLL("libcuda.so.1")

    def call(name: str, *args: Any) -> None:
        code = getattr(driver, name)(*args)
        if code:
            raise DriverError(f"{name} returned {code}")

    graph, count = ctypes.c_void_p(raw_graph), ctypes.c_size_t()
    call("cuGraphGetNodes", graph, None, ctypes.byref(count))
    nodes = (ctypes.c_void_p * count.value)()
    if count.value:
        call("cuGraphGetNodes", graph, nodes, ctypes.byref(count))
    labels = []
    for node in nodes:
        kind = ctypes.c_int()
        call("cuGraphNodeGetType", ctypes.c_void_p(node), ctypes.byref(kind))
        name = NODE_KINDS[kind.value] if kind.value < len(NODE_KINDS) else str(kind.value)
        labels.append((name, *(_kernel(driver, call, node) if name == "kernel" else ())))
    index = {node: position for position, node in enumerate(nodes)}
    tails, heads = _edges(driver, call, graph)
    return GraphNodes(
        tuple(labels), frozenset((index[tail], index[head]) for tail, head in zip(tails, heads, strict=True))
    )


def _edges(driver: Any, call: Any, graph: Any) -> tuple[Any, Any]:
    """The nodes that edges leave, and those that they reach."""
    # The first version refuses graphs whose edges carry data (programmatic dependent launch); drivers before 12.3
    # have no other.
    function, carries_data = "cuGraphGetEdges_v2", True
    if not hasattr(driver, function):
        function, carries_data = "cuGraphGetEdges", False
    count = ctypes.c_size_t()
    call(function, graph, None, None, *([None] if carries_data else []), ctypes.byref(count))
    tails, heads = (ctypes.c_void_p * count.value)(), (ctypes.c_void_p * count.value)()
    if count.value:
        data = ctypes.create_string_buffer(8 * count.value)
        call(function, graph, tails, heads, *([data] if carries_data else []), ctypes.byref(count))
    return tails, heads


def _kernel(driver: Any, call: Any, node: int) -> tuple[str, ...]:
    """A kernel node's function and launch shape."""
    params = _KernelParams()
    call("cuGraphKernelNodeGetParams_v2", ctypes.c_void_p(node), ctypes.byref(params))
    name = ctypes.c_char_p()
    for handle, function in ((params.func, "cuFuncGetName"), (params.kern, "cuKernelGetName")):
        if (
            handle
            and hasattr(driver, function)
            and getattr(driver, function)(ctypes.byref(name), ctypes.c_void_p(handle)) == 0
        ):
            break
    shape = (params.grid_x, params.grid_y, params.grid_z, params.block_x, params.block_y, params.block_z)
    return ((name.value or b"?").decode(), str(shape), str(params.shared_bytes))


def _driver_version() -> str:
    version = ctypes.c_int()
    try:
        ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    except OSError:
        return ""
    return f"{version.value // 1000}.{version.value % 1000 // 10}"
