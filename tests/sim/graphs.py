"""`torch.cuda.CUDAGraph`: capture, instantiation, replay."""

from __future__ import annotations

import threading
import warnings
from collections import Counter
from typing import TYPE_CHECKING, ClassVar

from tests.sim import errors
from tests.sim.capture import Capture, Node
from tests.sim.errors import CudaError, UndefinedError
from tests.sim.events import Record
from tests.sim.memory import PoolId

if TYPE_CHECKING:
    from tests.sim.gpu import SimulatedGpu, StreamState


class CUDAGraph:
    """A captured graph and its executable."""

    gpu: ClassVar[SimulatedGpu]

    def __init__(self, keep_graph: bool = False) -> None:
        self.number = self.gpu.number()
        self.nodes: tuple[Node, ...] = ()
        self.replays = 0
        self._keep_graph = keep_graph
        self._capture_stream: StreamState = self.gpu.current
        self._capture: Capture | None = None
        self._pool: PoolId | None = None
        self._capture_ended = False
        self._has_graph = False
        self._exec: int | None = None
        self._exec_bytes = 0
        self._last_end_ns = 0

    # --- capture ---------------------------------------------------------------------------------------------

    def capture_begin(
        self, pool: PoolId | None = None, capture_error_mode: str = "global", check_input_liveness: bool = False
    ) -> None:
        gpu = self.gpu
        if self._exec is not None:
            gpu.refuse(
                RuntimeError(
                    "This CUDAGraph instance already owns a captured graph. "
                    "To capture a new graph, create a new instance."
                )
            )
        if capture_error_mode not in ("global", "thread_local", "relaxed"):
            gpu.refuse(
                RuntimeError(
                    "Unknown capture error mode. Expected `global`, `thread_local`, or `relaxed`, "
                    f"got {capture_error_mode}"
                )
            )
        stream = gpu.current
        if stream is gpu.default:
            gpu.refuse(
                RuntimeError(
                    "CUDA graphs must be captured on a non-default stream. "
                    "(However, after capture, it's ok to replay them on the default stream.)"
                )
            )
        self._capture_stream = stream
        self._pool = tuple(pool) if pool is not None else gpu.memory.new_pool_id(user_created=False)
        try:
            gpu.memory.begin_recording(self._pool)
        except RuntimeError as error:
            gpu.refuse(error)
        # Here PyTorch has told its allocator, and takes nothing back when CUDA refuses.
        gpu.called("capture_begin", stream.capture)
        if stream.capture is not None:
            gpu.refuse(CudaError(errors.ILLEGAL_STATE))
        self._capture = Capture(capture_error_mode, threading.get_ident(), stream, self._pool)
        gpu.captures.append(self._capture)

    def capture_end(self) -> None:
        gpu = self.gpu
        stream = gpu.current
        if stream is not self._capture_stream:
            gpu.refuse(RuntimeError("Capture must end on the same stream it began on."))
        capture = stream.capture
        if capture is None:
            gpu.refuse(CudaError(errors.ILLEGAL_STATE))
        if stream is not capture.origin:
            gpu.refuse(CudaError(errors.CAPTURE_UNMATCHED), [capture])
        if capture.mode != "relaxed" and capture.thread != threading.get_ident():
            gpu.refuse(CudaError(errors.CAPTURE_WRONG_THREAD), [capture])
        try:
            gpu.called("capture_end", capture)
        finally:
            # The capture is over, whether it gives a graph or not. If not, PyTorch leaves its allocator recording.
            capture.end()
            gpu.captures.remove(capture)
        if capture.invalid:
            raise CudaError(errors.CAPTURE_INVALIDATED)
        if capture.unjoined():
            gpu.refuse(CudaError(errors.CAPTURE_UNJOINED))
        assert self._capture is capture, "capture_end() called before capture_begin()."
        assert self._pool is not None
        gpu.memory.end_recording(self._pool)
        self.nodes = tuple(capture.nodes)
        if not self.nodes:
            warnings.warn(
                "The CUDA Graph is empty. This usually means that the graph was attempted to be captured on wrong "
                "device or stream.",
                stacklevel=2,
            )
        self._capture_ended = True
        self._has_graph = True
        if not self._keep_graph:
            self.instantiate()
            self._has_graph = gpu.debug_mode

    def instantiate(self) -> None:
        gpu = self.gpu
        if not self._capture_ended:
            gpu.refuse(RuntimeError("capture_end() must have been called before calling instantiate"))
        if self._exec is not None:
            if not self._keep_graph:
                gpu.refuse(RuntimeError("instantiate() is intended to be called by the user only when keep_graph=true"))
            self._destroy_exec()
        gpu.called("instantiate")
        nbytes = gpu.graph_bytes + gpu.node_bytes * len(self.nodes)
        try:
            gpu.memory.take_for_graph(nbytes)
        except MemoryError:
            raise CudaError(errors.MEMORY_ALLOCATION) from None
        self._exec_bytes = nbytes
        self._exec = gpu.number()

    # --- replay ----------------------------------------------------------------------------------------------

    def replay(self) -> None:
        gpu = self.gpu
        if not self._capture_ended:
            gpu.refuse(RuntimeError("Called CUDAGraph::replay without a preceding successful capture."))
        if self._exec is None:
            self.instantiate()
        stream = gpu.current
        if stream.capture is not None:
            gpu.refuse(UndefinedError("a replay inside a capture makes a child graph, which is not simulated"))
        if any(node.event is not None and node.event.destroyed for node in self.nodes):
            gpu.refuse(UndefinedError("the graph has nodes of an event that has been destroyed"))
        gpu.called("replay")
        # A launch is ordered behind the stream's work and behind the graph's own previous launch.
        launched = max(gpu.now, stream.tail_ns, self._last_end_ns)
        waits = {
            node.index: node.event.records[-1].at_ns
            for node in self.nodes
            if node.kind == "event_wait" and node.event is not None and node.event.records
        }
        replay = self.replays
        self.replays += 1
        ends: list[int] = []
        for node in self.nodes:
            start = max([launched, *(ends[index] for index in node.after)])
            if node.work is not None:
                end = gpu.execute(node.work, start, node.stream, self.number, replay, node.index)
            elif node.kind == "event_record":
                assert node.event is not None
                end = start + gpu.event_ns
                counts_from = gpu.now if gpu.events_pending_from == "launch" else end
                node.event.record(Record(end, counts_from, self.number, replay), gpu.now)
            else:
                end = max(start, waits.get(node.index, start))
            ends.append(end)
        self._last_end_ns = max([launched, *ends])
        stream.tail_ns = self._last_end_ns

    # --- the rest --------------------------------------------------------------------------------------------

    def reset(self) -> None:
        if self._capture_ended:
            assert self._pool is not None
            self.gpu.memory.release(self._pool)
            self._capture_ended = False
        self._has_graph = False
        self.nodes = ()
        self._destroy_exec()

    def pool(self) -> PoolId:
        if not self._capture_ended or self._pool is None:
            self.gpu.refuse(RuntimeError("Called CUDAGraph::pool() without a preceding successful capture."))
        return self._pool

    def enable_debug_mode(self) -> None:
        self.gpu.debug_mode = True

    def debug_dump(self, debug_path: str) -> None:
        if not (self.gpu.debug_mode or self._keep_graph):
            warnings.warn("CUDA Graphs debug not enabled, set with [graph].enable_debug_mode()", stacklevel=2)
            return
        if not self._has_graph:
            return
        lines = [f'  n{node.index} [label="{node.kind}"];' for node in self.nodes]
        lines += [f"  n{before} -> n{node.index};" for node in self.nodes for before in sorted(node.after)]
        with open(debug_path, "w", encoding="utf-8") as file:
            file.write("digraph dot {\n" + "\n".join(lines) + "\n}\n")
        if not self._keep_graph:
            self._has_graph = False

    def raw_cuda_graph(self) -> int:
        if not self._keep_graph:
            self.gpu.refuse(
                RuntimeError(
                    "You cannot access the raw cudaGraph_t instance unless CUDAGraph was initialized with "
                    "keep_graph=true"
                )
            )
        if not self._has_graph:
            self.gpu.refuse(
                RuntimeError("You cannot access the raw cudaGraph_t instance until capture_end() has been called")
            )
        return self.number

    def raw_cuda_graph_exec(self) -> int:
        if self._exec is None:
            self.gpu.refuse(
                RuntimeError("You cannot access the raw cudaGraphExec_t instance until instantiate() has been called")
            )
        return self._exec

    def kinds(self) -> Counter[str]:
        """The truth, for tests: how many nodes of each kind."""
        return Counter(node.kind for node in self.nodes)

    def _destroy_exec(self) -> None:
        if self._exec is not None:
            self.gpu.memory.graphs -= self._exec_bytes
            self._exec = None

    def __del__(self) -> None:
        if getattr(self, "_capture_ended", False):
            self.reset()
