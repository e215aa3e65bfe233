"""A stand-in for `torch.cuda._graph_annotations` over the simulated GPU, which refuses what PyTorch's would get wrong.

It finds the nodes of a mark as PyTorch's does: those reachable from where the stream stood, over edges that were not
there before.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tests.sim import SimulatedGpu
from tests.sim.capture import Capture, Node


class RefusedError(AssertionError):
    """The protocol was not kept."""


class StrictAnnotations:
    """The functions of the module, with its state. `fail` makes the next call of a function raise."""

    def __init__(self, gpu: SimulatedGpu) -> None:
        self.gpu = gpu
        self._annotations_enabled = False
        self.calls: list[str] = []
        self.refused: list[str] = []
        self._failing: set[str] = set()
        self._open: list[object] = []
        self._pending: list[tuple[Any, list[int]]] = []
        self._annotations: dict[int, list[Any]] = {}
        self._capture_ids: dict[Capture, int] = {}
        self._last: int | None = None

    def fail(self, function: str) -> None:
        self._failing.add(function)

    # --- the module's functions --------------------------------------------------------------------------------

    def enable_annotations(self) -> None:
        self._called("enable_annotations")
        self._annotations_enabled = True

    def disable_annotations(self) -> None:
        self._called("disable_annotations")
        self._annotations_enabled = False

    @contextmanager
    def mark_kernels(self, annotation: Any) -> Iterator[None]:
        self._called("mark_kernels")
        if not self._annotations_enabled:
            self._refuse("mark_kernels does nothing before enable_annotations")
        stream = self.gpu.current
        capture = stream.capture
        if capture is None:
            self._refuse("mark_kernels on a stream that is not captured")
        mark = object()
        self._open.append(mark)
        front = capture.fronts[stream]
        before = len(capture.nodes)
        try:
            yield
        except GeneratorExit:
            self._open.remove(mark)
            raise
        self._called("exit")
        if self._open.pop() is not mark:
            self._refuse("marks do not nest")
        if not capture.active or capture.invalid:
            self._refuse("nodes of a capture that is over or broken are looked at")
        inside = set(front)
        ids = []
        for node in capture.nodes[before:]:
            if node.after & inside or (not front and not node.after):
                inside.add(node.index)
                if node.kind in ("kernel", "memcpy"):
                    ids.append(self._tools_id(capture, node))
        if ids:
            self._pending.append((annotation, ids))

    def resolve_pending_annotations(self) -> None:
        self._called("resolve_pending_annotations")
        if self._open:
            self._refuse("resolved while a mark is open")
        if self._pending and not self.gpu.captures:
            self._refuse("resolved after the capture has ended")
        by_id: dict[int, list[Any]] = {}
        for annotation, ids in self._pending:
            for tools_id in ids:
                by_id.setdefault(tools_id, []).append(annotation)
        if by_id:
            self._last = next(iter(by_id)) >> 32
        for tools_id, marks in by_id.items():
            merged: dict[str, Any] = {}
            for annotation in reversed(marks):
                merged.update(annotation)
            self._annotations.setdefault(tools_id, []).append(merged)
        self._pending.clear()

    def remap_to_exec_graph(self, graph: Any) -> None:
        self._called("remap_to_exec_graph")
        if self.gpu.captures or graph._exec is None:
            self._refuse("remapped before the graph is instantiated")
        mine = [tools_id for tools_id in self._annotations if tools_id >> 32 == self._last]
        if not mine:
            self._refuse("remapped a graph of which nothing was resolved")
        for tools_id in mine:
            self._annotations[graph._exec << 32 | tools_id & 0xFFFFFFFF] = self._annotations.pop(tools_id)

    def get_kernel_annotations(self) -> dict[int, list[Any]]:
        return self._annotations

    # --- for the tests -----------------------------------------------------------------------------------------

    def names(self, graph: Any, key: str) -> dict[str, str]:
        """What each kernel of `graph` is called in a trace, by the kernel's own name; kernels without are absent."""
        found = {}
        for node in graph.nodes:
            for annotation in self._annotations.get(graph._exec << 32 | node.index, ()):
                found[node.work.name] = annotation[key]
        return found

    def _tools_id(self, capture: Capture, node: Node) -> int:
        return self._capture_ids.setdefault(capture, self.gpu.number()) << 32 | node.index

    def _called(self, function: str) -> None:
        self.calls.append(function)
        if function in self._failing:
            self._failing.remove(function)
            raise RuntimeError(f"CUDA error in {function}")

    def _refuse(self, why: str) -> None:
        self.refused.append(why)
        raise RefusedError(why)
