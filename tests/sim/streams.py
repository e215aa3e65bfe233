"""`torch.cuda.Stream`, and the stream that is current."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from tests.sim import errors
from tests.sim.errors import CudaError

if TYPE_CHECKING:
    from tests.sim.events import Event
    from tests.sim.gpu import SimulatedGpu, StreamState


class Stream:
    """A handle on a stream. As in PyTorch, two handles on one stream are equal, not identical."""

    gpu: ClassVar[SimulatedGpu]

    def __init__(self, device: object = None, priority: int = 0, *, state: StreamState | None = None) -> None:
        self.state = state or self.gpu.new_stream()
        self.priority = priority
        self.device_index = 0
        self.device = device if device is not None else "cuda:0"
        self._before: StreamState | None = None

    @property
    def cuda_stream(self) -> int:
        """The cudaStream_t as a number; 0 is the default stream."""
        return self.state.id * 0x1000

    @property
    def stream_id(self) -> int:
        return self.state.id

    def wait_event(self, event: Event) -> None:
        event.wait(self)

    def wait_stream(self, stream: Stream) -> None:
        self.wait_event(stream.record_event())

    def record_event(self, event: Event | None = None) -> Event:
        if event is None:
            event = self.gpu.Event()
        event.record(self)
        return event

    def query(self) -> bool:
        self._refuse_while_capturing()
        return self.state.tail_ns <= self.gpu.now

    def synchronize(self) -> None:
        self._refuse_while_capturing()
        self.gpu.wait_until(self.state.tail_ns)

    def _refuse_while_capturing(self) -> None:
        if self.state.capture is not None:
            self.gpu.refuse(CudaError(errors.CAPTURE_UNSUPPORTED), [self.state.capture])
        self.gpu.refuse_unsafe()

    def __enter__(self) -> Stream:
        self._before = self.gpu.current
        self.gpu.current = self.state
        return self

    def __exit__(self, *_: object) -> None:
        assert self._before is not None
        self.gpu.current = self._before

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and other.state is self.state

    def __hash__(self) -> int:
        return hash(self.cuda_stream)

    def __repr__(self) -> str:
        return f"<simulated stream {self.state.id}>"

    def __cuda_stream__(self) -> tuple[int, int]:
        return (0, self.cuda_stream)

    @property
    def _as_parameter_(self) -> Any:
        raise NotImplementedError("there is no CUDA behind the simulated stream")
