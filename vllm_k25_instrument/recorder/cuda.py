"""Marks on a CUDA (or ROCm) device: timing events.

Eager work gets pooled events on the stream that is current. Inside a capture that we instrument a mark is an
*external* event: it becomes an event-record node of the graph, and every replay records it again. In a capture that
is somebody else's nothing is recorded at all, and while anything is captured no event is asked or read.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence
from typing import Any, Final

import torch

NS_PER_MS: Final = 1_000_000

POOL_SIZE: Final = 4096
"""Events kept for reuse: making one costs microseconds and a driver handle."""


class CudaDevice:
    """The device of the calling process, behind the recorder's protocol. One thread uses it."""

    def __init__(self) -> None:
        self.instrumenting = False
        """Whether the capture under way, if there is one, is ours to instrument."""
        self._pool: list[Any] = []
        self._streams: dict[int, int] = {}

    def mark(self) -> Any:
        """An event recorded on the current stream."""
        if self.instrumenting:
            event = torch.cuda.Event(enable_timing=True, external=True)
        else:
            pool = self._pool
            event = pool.pop() if pool else torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def may_mark(self) -> bool:
        """True outside of captures, and inside of one that is ours."""
        return bool(torch.cuda.is_current_stream_capturing()) == self.instrumenting

    def completed(self, mark: Any) -> bool:
        """Whether the device has passed the event; False, unasked, while the current stream is being captured."""
        if torch.cuda.is_current_stream_capturing():
            return False
        return bool(mark.query())

    def offsets_ns(self, start: Any, marks: Sequence[Any]) -> list[int]:
        """Nanoseconds from `start` to each mark. CUDA tells milliseconds, to about half a microsecond."""
        elapsed = start.elapsed_time
        return [round(elapsed(mark) * NS_PER_MS) for mark in marks]

    def begin(self) -> None:
        """The stream that is current becomes stream 0."""
        self._streams = {torch.cuda.current_stream().cuda_stream: 0}

    def stream(self) -> int:
        """Number of the current stream, in the order of first appearance since `begin`."""
        streams = self._streams
        return streams.setdefault(torch.cuda.current_stream().cuda_stream, len(streams))

    def release(self, marks: Iterable[Any]) -> None:
        """Take events back into the pool."""
        for event in marks:
            if len(self._pool) < POOL_SIZE:
                self._pool.append(event)


def in_graph_timing_problem() -> str:
    """Why CUDA graphs cannot carry timing events here; "" where they can. Touches no device."""
    if torch.version.hip is not None:
        return "ROCm: external timing events have not been tried there"
    if "external" not in inspect.signature(torch.cuda.Event.__new__).parameters:
        return f"PyTorch {torch.__version__} has no external events (2.8 and later have)"
    return ""
