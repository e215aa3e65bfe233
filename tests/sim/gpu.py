"""The simulated GPU: a virtual clock, streams, memory, and a record of every rule that was broken.

Nothing takes host time but `host` and blocking calls. When work is submitted, all that it depends on has been submitted
before, so its start and end are known at once: it starts when its stream, its dependencies and the host's clock allow
it. What it does to memory happens when the clock gets there.
"""

from __future__ import annotations

import heapq
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from typing import TYPE_CHECKING, Any, NoReturn

from tests.sim import errors
from tests.sim.capture import Capture
from tests.sim.errors import CudaError
from tests.sim.memory import DEFAULT_POOL, Buffer, Memory
from tests.sim.work import Duration, Execution, Race, Work

if TYPE_CHECKING:
    from tests.sim.events import Event
    from tests.sim.graphs import CUDAGraph
    from tests.sim.streams import Stream


class StreamState:
    """A stream's state, which the many `Stream` objects of one stream share."""

    __slots__ = ("capture", "id", "tail_ns")

    def __init__(self, stream_id: int) -> None:
        self.id = stream_id
        self.tail_ns = 0
        self.capture: Capture | None = None


class SimulatedGpu:
    """One GPU. `Stream`, `Event` and `CUDAGraph` are the classes that stand in for those of `torch.cuda`."""

    def __init__(
        self,
        *,
        event_ns: int = 0,
        resolution_ns: int = 1,
        single_precision: bool = False,
        events_pending_from: str = "launch",
        total_bytes: int = 80 << 30,
        graph_bytes: int = 0,
        node_bytes: int = 0,
    ) -> None:
        """`event_ns`: what recording an event costs on the GPU, eagerly and as a node.

        `resolution_ns`: event timestamps are cut to multiples of it. `single_precision`: `elapsed_time` returns what
        fits a C float, as CUDA does. `events_pending_from`: when a replay makes its external events pending:
        ``launch``, or ``node``, when the node executes (until then a query answers for the record before). CUDA's
        documentation leaves that open, so code must be right under both. `graph_bytes`, `node_bytes`: memory of an
        instantiated graph.
        """
        from tests.sim import events, graphs, streams

        assert events_pending_from in ("launch", "node")
        self.event_ns = event_ns
        self.resolution_ns = resolution_ns
        self.single_precision = single_precision
        self.events_pending_from = events_pending_from
        self.graph_bytes = graph_bytes
        self.node_bytes = node_bytes
        self.now = 0
        self.memory = Memory(total_bytes)
        self.captures: list[Capture] = []
        self.refusals: list[Exception] = []
        self.executions: list[Execution] = []
        self.races: list[Race] = []
        self.calls: Counter[str] = Counter()
        self.debug_mode = False
        self.default = StreamState(0)
        self._streams = [self.default]
        self._local = threading.local()
        self._numbers = count(1)
        self._effects: list[tuple[int, int, Callable[[], None]]] = []
        self._order = count()
        self._faults: list[tuple[str, int, Exception]] = []
        self.Stream: type[Stream] = type("Stream", (streams.Stream,), {"gpu": self})
        self.Event: type[Event] = type("Event", (events.Event,), {"gpu": self})
        self.CUDAGraph: type[CUDAGraph] = type("CUDAGraph", (graphs.CUDAGraph,), {"gpu": self})

    def number(self) -> int:
        """A number that nothing else of this GPU has."""
        return next(self._numbers)

    # --- time ------------------------------------------------------------------------------------------------

    def host(self, ns: int) -> None:
        """The host works for so many nanoseconds; the GPU goes on meanwhile."""
        assert ns >= 0
        self.wait_until(self.now + ns)

    def wait_until(self, ns: int) -> None:
        """The host waits; no wait at all where the moment has passed."""
        self.now = max(self.now, ns)
        while self._effects and self._effects[0][0] <= self.now:
            heapq.heappop(self._effects)[2]()

    def at(self, ns: int, effect: Callable[[], None]) -> None:
        heapq.heappush(self._effects, (ns, next(self._order), effect))

    # --- refusing --------------------------------------------------------------------------------------------

    def refuse(self, error: Exception, invalidates: Iterable[Capture] = ()) -> NoReturn:
        """Raise, remember that a rule was broken, and invalidate captures as CUDA does."""
        for capture in invalidates:
            capture.invalid = True
        self.refusals.append(error)
        raise error

    def refuse_unsafe(self) -> None:
        """Refuse a potentially unsafe call where a capture is under way that forbids it (cudaStreamCaptureMode)."""
        me = threading.get_ident()
        mode = getattr(self._local, "mode", "global")
        if mode == "relaxed":
            return
        forbidding = [
            capture
            for capture in self.captures
            if (capture.thread == me and capture.mode != "relaxed") or (mode == capture.mode == "global")
        ]
        if forbidding:
            self.refuse(CudaError(errors.CAPTURE_UNSUPPORTED), forbidding)

    def refuse_while_capturing(self) -> None:
        """Refuse what encompasses every stream (a device, a context) while any of them is being captured."""
        if self.captures:
            self.refuse(CudaError(errors.CAPTURE_UNSUPPORTED), self.captures)

    @contextmanager
    def thread_capture_mode(self, mode: str) -> Iterator[None]:
        """As `cudaThreadExchangeStreamCaptureMode`: what this thread may do while something is captured."""
        before = getattr(self._local, "mode", "global")
        self._local.mode = mode
        try:
            yield
        finally:
            self._local.mode = before

    # --- faults for tests ------------------------------------------------------------------------------------

    def fail(self, operation: str, error: Exception | None = None, *, after: int = 0) -> None:
        """Make a coming call fail once: the first one of `operation` after `after` that succeed.

        Operations: ``launch``, ``event_record``, ``event_create``, ``capture_begin``, ``capture_end``,
        ``instantiate``, ``replay``, ``allocate``. A failure inside a capture invalidates it.
        """
        self._faults.append((operation, self.calls[operation] + after, error or CudaError(errors.LAUNCH_FAILURE)))

    def called(self, operation: str, capture: Capture | None = None) -> None:
        """`operation` is called: count it, and fail it where a test has asked for that."""
        index = self.calls[operation]
        self.calls[operation] += 1
        for fault in self._faults:
            if fault[:2] == (operation, index):
                self._faults.remove(fault)
                if capture is not None:
                    capture.invalid = True
                raise fault[2]

    # --- streams ---------------------------------------------------------------------------------------------

    def new_stream(self) -> StreamState:
        self._streams.append(StreamState(len(self._streams)))
        return self._streams[-1]

    @property
    def current(self) -> StreamState:
        """The stream that is current on this thread."""
        return getattr(self._local, "stream", self.default)

    @current.setter
    def current(self, stream: StreamState) -> None:
        self._local.stream = stream

    def synchronize(self, device: object = None) -> None:
        """As `cudaDeviceSynchronize`: wait for all streams."""
        self.refuse_while_capturing()
        self.wait_until(max(stream.tail_ns for stream in self._streams))

    def is_current_stream_capturing(self) -> bool:
        """Whether the current stream is in a capture, an invalidated one included."""
        return self.current.capture is not None

    @contextmanager
    def on(self, stream: Stream) -> Iterator[Stream]:
        """Make `stream` the current one."""
        before, self.current = self.current, stream.state
        try:
            yield stream
        finally:
            self.current = before

    @contextmanager
    def capture(
        self, graph: CUDAGraph | None = None, *, stream: Stream | None = None, mode: str = "global", pool: Any = None
    ) -> Iterator[CUDAGraph]:
        """Capture into `graph`, on `stream` or a new one, and end the capture whatever happens."""
        graph = graph or self.CUDAGraph()
        with self.on(stream or self.Stream()):
            graph.capture_begin(pool, mode)
            try:
                yield graph
            finally:
                graph.capture_end()

    # --- work ------------------------------------------------------------------------------------------------

    def launch(
        self,
        name: str,
        ns: Duration,
        *,
        stream: object = None,
        reads: Sequence[Buffer] = (),
        writes: Sequence[Buffer] = (),
        run: Callable[[], object] | None = None,
    ) -> None:
        """Launch a kernel on `stream` (default: the current one), or capture it."""
        self._submit(Work(name, "kernel", ns, reads, writes, None, run), stream)

    def copy(self, target: Buffer, source: Buffer, ns: Duration = 0, *, stream: object = None) -> None:
        """An asynchronous copy from device to device."""
        self._submit(Work("memcpy", "memcpy", ns, (source,), (target,)), stream)

    def fill(self, target: Buffer, value: int, ns: Duration = 0, *, stream: object = None) -> None:
        """Set a buffer's contents, as an asynchronous copy from pinned host memory or a memset would."""
        self._submit(Work("memset", "memset", ns, (), (target,), value), stream)

    def read(self, buffer: Buffer, *, stream: object = None) -> int:
        """A buffer's contents on the host, as `.item()` reads them: it waits for the stream."""
        state = self.state_of(stream)
        if state.capture is not None:
            self.refuse(CudaError(errors.CAPTURE_UNSUPPORTED), [state.capture])
        self.refuse_unsafe()
        self.wait_until(state.tail_ns)
        return buffer.contents

    def state_of(self, stream: object) -> StreamState:
        return self.current if stream is None else stream.state  # type: ignore[attr-defined, no-any-return]

    def _submit(self, work: Work, stream: object) -> None:
        state = self.state_of(stream)
        capture = state.capture
        if capture is not None:
            self.refuse_if_invalid(capture)
            self.called("launch", capture)
            capture.add(state, work.kind, work=work)
            return
        self.called("launch")
        state.tail_ns = self.execute(work, max(self.now, state.tail_ns), state.id)

    def refuse_if_invalid(self, capture: Capture) -> None:
        """Nothing can be added to an invalidated capture. Not a new breach: the first one is on record."""
        if capture.invalid:
            raise CudaError(errors.CAPTURE_INVALIDATED)

    def execute(
        self,
        work: Work,
        start: int,
        stream: int,
        graph: int | None = None,
        replay: int | None = None,
        node: int | None = None,
    ) -> int:
        """Run `work` from `start` on; returns the nanosecond at which it ends."""
        end = start + work.duration()
        self.executions.append(Execution(work.name, work.kind, start, end, stream, graph, replay, node))
        if work.reads or work.writes or work.run is not None:
            inputs: list[int] = []
            self.at(start, lambda: self._begin(work, inputs))
            self.at(end, lambda: self._finish(work, inputs))
        return end

    def _begin(self, work: Work, inputs: list[int]) -> None:
        for buffer in work.reads:
            if buffer.writers:
                self.races.append(Race(buffer.name, work.name, self.now))
            buffer.readers += 1
        for buffer in work.writes:
            if buffer.writers or buffer.readers > work.reads.count(buffer):
                self.races.append(Race(buffer.name, work.name, self.now))
            buffer.writers += 1
        inputs.extend(buffer.contents for buffer in work.reads)

    def _finish(self, work: Work, inputs: list[int]) -> None:
        for buffer in work.reads:
            buffer.readers -= 1
        for index, buffer in enumerate(work.writes):
            buffer.writers -= 1
            buffer.contents = work.result(index, inputs)
        if work.run is not None:
            work.run()

    # --- memory ----------------------------------------------------------------------------------------------

    def allocate(self, nbytes: int, name: str = "", value: int = 0) -> Buffer:
        """Memory from the pool of the capture that the current stream is in, else from the default pool."""
        self.called("allocate", self.current.capture)
        capture = self.current.capture
        if capture is None:
            if self.captures:
                self.memory.outside_pool_during_capture += nbytes
            return self.memory.allocate(nbytes, DEFAULT_POOL, name, value)
        return self.memory.allocate(nbytes, capture.pool, name, value)

    def empty_cache(self) -> None:
        """As `torch.cuda.empty_cache`: cudaFree, which no capture allows beside it."""
        self.refuse_unsafe()
        self.memory.empty_cache()

    # --- the truth, for tests --------------------------------------------------------------------------------

    def runs(self, name: str) -> list[Execution]:
        """Every execution of the kernels of that name, in the order of submission."""
        return [execution for execution in self.executions if execution.name == name]
