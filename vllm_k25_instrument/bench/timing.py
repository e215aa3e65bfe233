"""How long a call takes, again and again: on the host's clock, by CUDA events, and inside a CUDA graph."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter_ns
from typing import Any, Final, Protocol

import torch

from vllm_k25_instrument.bench.intervals import FEWEST
from vllm_k25_instrument.model import NS_PER_SECOND

WARM_UP: Final = 3
CACHE_TIMES: Final = 2
"""A buffer of so many times the last cache's size goes through it before every repeat."""
LEAST_FLUSH: Final = 64 * 1024 * 1024

_NS_PER_MS: Final = 1_000_000
_CACHES: Final = Path("/sys/devices/system/cpu/cpu0/cache")

Call = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Repeats:
    """How often a call is timed: `most` times, or fewer once `seconds` are over, but as often as an interval needs."""

    most: int
    seconds: float

    def left(self, done: int, since_ns: int) -> bool:
        """Whether to go on after so many, begun at `since_ns`."""
        if done < FEWEST:
            return True
        return done < self.most and perf_counter_ns() - since_ns < self.seconds * NS_PER_SECOND


class Timer(Protocol):
    """Times calls on one kind of device."""

    has_graphs: bool

    def times(self, call: Call, repeats: Repeats, *, flush: bool) -> list[float]:
        """Nanoseconds of each repeat; with `flush` after the caches have been overwritten."""

    def graphed(self, call: Call) -> Call:
        """The call captured in a CUDA graph: what is returned replays it."""


def last_level_cache_bytes(caches: Path = _CACHES) -> int:
    """Size of the largest cache of this processor; 0 where the kernel does not say."""
    units = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
    sizes = [0]
    for file in caches.glob("index*/size"):
        text = file.read_text().strip()
        if text[:-1].isdigit():
            sizes.append(int(text[:-1]) * units.get(text[-1], 0))
    return max(sizes)


@contextmanager
def no_collection() -> Iterator[None]:
    """Without the garbage collector, whose pauses would be measured as the call's."""
    was_on = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


class HostTimer:
    """The host's monotonic clock around the call, which must have done its work when it returns."""

    has_graphs = False

    def __init__(self) -> None:
        self._buffer: torch.Tensor | None = None

    def times(self, call: Call, repeats: Repeats, *, flush: bool) -> list[float]:
        """See :class:`Timer`."""
        found: list[float] = []
        for _ in range(WARM_UP):
            call()
        with no_collection():
            began = perf_counter_ns()
            while repeats.left(len(found), began):
                if flush:
                    self._flush()
                start = perf_counter_ns()
                call()
                found.append(perf_counter_ns() - start)
        return found

    def graphed(self, call: Call) -> Call:
        """Not on a CPU. Raises NotImplementedError."""
        raise NotImplementedError

    def _flush(self) -> None:
        if self._buffer is None:
            size = max(CACHE_TIMES * last_level_cache_bytes(), LEAST_FLUSH)
            self._buffer = torch.zeros(size // 8, dtype=torch.int64)
        self._buffer.add_(1)


class CudaTimer:
    """CUDA events on either side of the call, on the current stream. Not yet run on a GPU.

    Before the first of them the stream gets the flush, or a memory fill of the same length, to do: so the host is
    ahead when the call's kernels start, and what is timed is the device's work and not the host's delay in giving it.
    """

    has_graphs = True

    def __init__(self, fill: Call | None = None) -> None:
        """`fill` overwrites the caches; the default writes a buffer larger than the second-level cache."""
        self._fill = fill or _filling_l2()

    def times(self, call: Call, repeats: Repeats, *, flush: bool) -> list[float]:
        """See :class:`Timer`. One pair of events per repeat, read after the last."""
        for _ in range(WARM_UP):
            call()
        torch.cuda.synchronize()
        pairs: list[tuple[Any, Any]] = []
        with no_collection():
            began = perf_counter_ns()
            while repeats.left(len(pairs), began):
                start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                self._fill()
                if not flush:
                    call()  # brings back into the caches what the fill has pushed out
                start.record()
                call()
                end.record()
                pairs.append((start, end))
                end.synchronize()
        return [start.elapsed_time(end) * _NS_PER_MS for start, end in pairs]

    def graphed(self, call: Call) -> Call:
        """See :class:`Timer`."""
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):  # lazy set-up must not happen inside of the capture
            for _ in range(WARM_UP):
                call()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call()
        replay: Call = graph.replay
        return replay


def _filling_l2() -> Call:
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    size = max(CACHE_TIMES * int(properties.L2_cache_size), LEAST_FLUSH)
    buffer = torch.empty(size, dtype=torch.int8, device="cuda")
    return lambda: buffer.zero_()


def make_timer(device: str) -> Timer:
    """The timer of a vLLM platform: ``cpu`` or ``cuda``."""
    return HostTimer() if device == "cpu" else CudaTimer()
