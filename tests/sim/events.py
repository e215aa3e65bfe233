"""`torch.cuda.Event`: what it was last recorded for, and what may be asked of it."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from tests.sim import errors
from tests.sim.errors import CudaError

if TYPE_CHECKING:
    from tests.sim.capture import Capture
    from tests.sim.gpu import SimulatedGpu
    from tests.sim.streams import Stream


@dataclass(frozen=True)
class Record:
    """One record of an event: when the GPU passes it (ns), and from when on it is the one that counts (ns)."""

    at_ns: int
    counts_from_ns: int
    graph: int | None = None
    replay: int | None = None


class EventState:
    """The cudaEvent_t. Graphs refer to it by its node; they do not keep the `Event` alive."""

    __slots__ = ("captured_at", "captured_in", "destroyed", "number", "records")

    def __init__(self, number: int) -> None:
        self.number = number
        self.records: list[Record] = []
        self.captured_in: Capture | None = None
        self.captured_at: frozenset[int] = frozenset()
        self.destroyed = False

    def record(self, record: Record, now: int) -> None:
        counting = self.counting(now)
        still_of_use = [other for other in self.records if other is counting or other.counts_from_ns > now]
        self.captured_in = None
        self.records = [*still_of_use, record]

    def counting(self, now: int) -> Record | None:
        """The record that a query answers for; None before the first one."""
        # Of two that count from the same moment, the later submitted one.
        return max(
            (record for record in reversed(self.records) if record.counts_from_ns <= now),
            key=lambda record: record.counts_from_ns,
            default=None,
        )


class Event:
    """As `torch.cuda.Event`; the CUDA event behind it is made when it is first recorded."""

    gpu: ClassVar[SimulatedGpu]

    def __init__(
        self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False, external: bool = False
    ) -> None:
        self.enable_timing = enable_timing
        self.blocking = blocking
        self.interprocess = interprocess
        self.external = external
        self.state: EventState | None = None

    def record(self, stream: Stream | None = None) -> None:
        gpu = self.gpu
        target = gpu.state_of(stream)
        state = self._create()
        # PyTorch asks whether the *current* stream is being captured, whichever stream it records on.
        as_node = self.external and gpu.is_current_stream_capturing()
        capture = target.capture
        if capture is None:
            if as_node:
                gpu.refuse(CudaError(errors.INVALID_VALUE))
            gpu.called("event_record")
            at = max(gpu.now, target.tail_ns) + gpu.event_ns
            target.tail_ns = at
            state.record(Record(at, gpu.now), gpu.now)
            return
        gpu.refuse_if_invalid(capture)
        gpu.called("event_record", capture)
        if as_node:
            capture.add(target, "event_record", event=state)
        else:
            state.records.clear()
            state.captured_in = capture
            state.captured_at = capture.fronts[target]

    def wait(self, stream: Stream | None = None) -> None:
        gpu = self.gpu
        target = gpu.state_of(stream)
        state = self.state
        if state is None:
            return
        capture = target.capture
        if capture is not None:
            gpu.refuse_if_invalid(capture)
        if self.external and gpu.is_current_stream_capturing():
            if capture is None:
                gpu.refuse(CudaError(errors.INVALID_VALUE))
            capture.add(target, "event_wait", event=state)
            return
        source = state.captured_in
        if source is not None:
            if not source.active:
                gpu.refuse(CudaError(errors.INVALID_VALUE), [capture] if capture else [])
            gpu.refuse_if_invalid(source)
            if capture is not None and capture is not source:
                gpu.refuse(CudaError(errors.CAPTURE_MERGE), [capture, source])
            source.join(target, state.captured_at)
            return
        if not state.records:
            return
        if capture is not None:
            gpu.refuse(CudaError(errors.CAPTURE_ISOLATION), [capture])
        target.tail_ns = max(target.tail_ns, state.records[-1].at_ns)

    def query(self) -> bool:
        record = self._ask()
        return record is None or record.at_ns <= self.gpu.now

    def synchronize(self) -> None:
        record = self._ask()
        if record is not None:
            self.gpu.wait_until(record.at_ns)

    def elapsed_time(self, end_event: Event) -> float:
        """Milliseconds from this event to `end_event`."""
        gpu = self.gpu
        if not (self.enable_timing and end_event.enable_timing):
            gpu.refuse(ValueError("Both events must be created with argument 'enable_timing=True'."))
        if self.state is None or end_event.state is None:
            gpu.refuse(ValueError("Both events must be recorded before calculating elapsed time."))
        if not (self.query() and end_event.query()):
            gpu.refuse(RuntimeError("Both events must be completed before calculating elapsed time."))
        start, end = self.state.counting(gpu.now), end_event.state.counting(gpu.now)
        if start is None or end is None:
            gpu.refuse(CudaError(errors.INVALID_HANDLE))
        unit = gpu.resolution_ns
        ns = end.at_ns // unit * unit - start.at_ns // unit * unit
        return ctypes.c_float(ns / 1e6).value if gpu.single_precision else ns / 1e6

    @property
    def recorded_ns(self) -> int:
        """The truth, for tests: when the record that counts now was passed. Breaks no rule, at any time."""
        record = self.state.counting(self.gpu.now) if self.state is not None else None
        assert record is not None, "never recorded"
        assert record.at_ns <= self.gpu.now, "not completed"
        return record.at_ns

    @property
    def last_record(self) -> Record | None:
        """The truth, for tests: the record that counts now, completed or not."""
        return self.state.counting(self.gpu.now) if self.state is not None else None

    @property
    def cuda_event(self) -> int:
        return self.state.number if self.state is not None else 0

    def _create(self) -> EventState:
        if self.state is None:
            if self.interprocess and self.enable_timing:
                self.gpu.refuse(CudaError(errors.INVALID_VALUE))
            self.gpu.called("event_create")
            self.state = EventState(self.gpu.number())
        return self.state

    def _ask(self) -> Record | None:
        """The record that the event stands for, refused where CUDA refuses to look at it."""
        state = self.state
        if state is None:
            return None
        if state.captured_in is not None:
            if state.captured_in.active:
                self.gpu.refuse(CudaError(errors.CAPTURED_EVENT), [state.captured_in])
            self.gpu.refuse(CudaError(errors.INVALID_VALUE))
        self.gpu.refuse_unsafe()
        return state.counting(self.gpu.now)

    def __del__(self) -> None:
        if getattr(self, "state", None) is not None:
            self.state.destroyed = True  # type: ignore[union-attr]
