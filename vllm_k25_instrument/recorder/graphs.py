"""Twin graphs: a second, instrumented set of vLLM's CUDA graphs, replayed in the steps that are sampled.

vLLM captures its graphs untouched. Then the capture runs again for the decode sizes, with the dictionary that vLLM
looks its graphs up in exchanged for an empty one, and with `torch.cuda.CUDAGraph` exchanged for `TimedGraph`, which
tells the recorder when its capture begins and ends. A sampled step exchanges the dictionary for the time of its
replay; every other step replays vLLM's own graph, node for node the one it would have had without us.

A twin's events are overwritten by its next replay. So a twin belongs to a step from its replay until its marks have
been read, and a step that is due while its twin is taken is not sampled.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from time import perf_counter_ns
from typing import Any, Final

import torch

from vllm_k25_instrument.log import logger
from vllm_k25_instrument.model import GraphMode
from vllm_k25_instrument.recorder.annotations import GraphAnnotations, annotations_file_name, find_annotations
from vllm_k25_instrument.recorder.cuda import CudaDevice
from vllm_k25_instrument.recorder.recorder import Recorder
from vllm_k25_instrument.recorder.step import OpenRange, OpenStep
from vllm_k25_instrument.settings import GraphTiming

MEMORY_RESERVE: Final = 256 * 1024 * 1024
"""Bytes of GPU memory that a capture of twins leaves free."""


class TimedSet:
    """The instrumented graphs of one batch shape: one full graph, or the pieces of a chain."""

    __slots__ = ("_step", "overwrites")

    def __init__(self, overwrites: bool = False) -> None:
        """`overwrites`: these are vLLM's own graphs, which replay whether their marks have been read or not."""
        self._step: OpenStep | None = None
        self.overwrites = overwrites

    @property
    def busy(self) -> bool:
        """Whether a step's marks are still to be read."""
        return self._step is not None and not self._step.done

    def claim(self, step: OpenStep) -> bool:
        """Take the set for a sampled step; False where another step's marks are still to be read."""
        if self.busy and not self.overwrites:
            return False
        self.overwrite()
        self._step = step
        return True

    def overwrite(self) -> None:
        """The marks are about to be recorded again, whoever was to read them."""
        if self.busy and self._step is not None:
            self._step.overwritten = True


Key = Hashable


def set_key(mode: GraphMode, descriptor: Any) -> Key:
    """Which set a dispatched step replays. Pieces are looked up by size, whatever class the descriptor is of."""
    if mode is GraphMode.PIECEWISE:
        return (mode, descriptor.num_tokens, getattr(descriptor, "num_active_loras", 0))
    return (mode, descriptor)


class TimedGraphs:
    """The instrumented graphs of one worker, and how vLLM is made to capture and to replay them."""

    def __init__(
        self,
        recorder: Recorder,
        device: CudaDevice,
        timing: GraphTiming,
        *,
        sizes: frozenset[int] | None = None,
        agree: Callable[[bool], bool] = lambda ok: ok,
        on_captured: Callable[[int, int], None] = lambda nbytes, ns: None,
        annotations: GraphAnnotations | None = None,
    ) -> None:
        """`sizes`: the batch sizes (tokens) to instrument, None for all. `agree`: whether all ranks say yes; a capture
        runs collectives, so ranks capture together or not at all. `on_captured` is told its bytes and ns.
        `annotations`: what names the graphs' nodes, None for PyTorch's own where it is there.
        """
        self.timing = timing
        self._recorder = recorder
        self._device = device
        self._sizes = sizes
        self._agree = agree
        self._on_captured = on_captured
        self._annotations = annotations or find_annotations()
        self._sets: dict[Key, TimedSet] = {}
        self._twins: dict[int, tuple[Any, str, dict[Any, Any]]] = {}  # id(owner) -> owner, attribute, dictionary
        self._label = ""
        self.profiled_bytes_per_graph = 0
        recorder.graphs = self

    # --- looking up ------------------------------------------------------------------------------------------

    def find(self, mode: GraphMode, descriptor: Any) -> TimedSet | None:
        """The instrumented graphs of a dispatched step, None where there are none."""
        return self._sets.get(set_key(mode, descriptor))

    def wanted(self, num_tokens: int) -> bool:
        """Whether graphs of this size are to be instrumented."""
        return self._sizes is None or num_tokens in self._sizes

    # --- capturing -------------------------------------------------------------------------------------------

    @contextmanager
    def instrumented(self, label: str) -> Iterator[None]:
        """Graphs that are captured inside carry timing events. `label` names the capture in NVTX."""
        original = torch.cuda.CUDAGraph
        torch.cuda.CUDAGraph = _timed_graph_class(self)
        self._label = label
        try:
            yield
        finally:
            torch.cuda.CUDAGraph = original
            if self.timing is GraphTiming.INPLACE:
                self._publish_names()

    def capture_twins(
        self,
        owners: Iterable[tuple[Any, str]],
        descriptors: Iterable[Any],
        capture: Callable[[Any], None],
        mode: GraphMode,
    ) -> None:
        """Capture a twin of every descriptor: ``capture(descriptor)`` with the owners' dictionaries exchanged.

        `owners`: (object, name of its attribute that holds the dictionary). Whatever goes wrong, vLLM's own graphs
        stay; a descriptor whose twin is not whole is left out. Never raises.
        """
        owners = list(owners)
        began, free_before = perf_counter_ns(), _free_bytes()
        captured = 0
        try:
            for descriptor in descriptors:
                enough = _free_bytes() > MEMORY_RESERVE
                if not self._agree(enough):
                    logger.warning(
                        "K25: GPU memory is short: twins of %d graph sizes, the others are not timed (lower "
                        "--gpu-memory-utilization, or set K25_GRAPH_SIZES)",
                        captured,
                    )
                    break
                if not self._agree(self._capture_twin(owners, descriptor, capture, mode)):
                    logger.warning(
                        "K25: the capture of twin graphs ends after %d sizes; the others are not timed", captured
                    )
                    break
                self._register(owners, descriptor, mode)
                captured += 1
        except Exception:
            logger.exception("K25: twin graphs could not be captured; graph steps are not timed")
        self._publish_names()
        nbytes, ns = max(free_before - _free_bytes(), 0), perf_counter_ns() - began
        if captured:
            self._on_captured(nbytes, ns)
            logger.info(
                "K25: twins of %d %s graphs took %.1f s and %.0f MiB", captured, mode, ns / 1e9, nbytes / (1024 * 1024)
            )

    def _capture_twin(
        self, owners: list[tuple[Any, str]], descriptor: Any, capture: Callable[[Any], None], mode: GraphMode
    ) -> bool:
        try:
            with self._exchanged(owners), self.instrumented(f"capture bs={descriptor.num_tokens} {mode} twin"):
                capture(descriptor)
        except Exception:
            logger.exception("K25: the twin of %s could not be captured", descriptor)
            self._recorder.end_graph()
            self._recorder.annotations = None
            if self._annotations is not None:
                self._annotations.abandon()
            self._device.instrumenting = False
            # A forward that broke off has left work on side streams that nothing waits for.
            torch.cuda.synchronize()
            return False
        return True

    def _register(self, owners: list[tuple[Any, str]], descriptor: Any, mode: GraphMode) -> None:
        """Make one set of the descriptor's graphs."""
        timed = TimedSet()
        for owner, attribute in owners:
            for key, entry in self._twin_dictionary(owner, attribute).items():
                graph = getattr(entry, "cudagraph", entry)
                segments = getattr(getattr(entry, "capture", None), "segments", ())
                for candidate in (graph, *(getattr(segment, "__self__", None) for segment in segments)):
                    if getattr(candidate, "timed_set", False) is None and _same_size(key, descriptor):
                        candidate.timed_set = timed
        self._sets[set_key(mode, descriptor)] = timed

    def adopt(self, owner: Any, attribute: str, mode: GraphMode) -> None:
        """Make sets of graphs that were captured in place: vLLM's own, with events."""
        for key, entry in getattr(owner, attribute).items():
            found = self._sets.setdefault(set_key(mode, key), TimedSet(overwrites=True))
            graph = getattr(entry, "cudagraph", entry)
            if hasattr(graph, "timed_set"):
                graph.timed_set = found

    # --- replaying -------------------------------------------------------------------------------------------

    @property
    def replays_twins(self) -> bool:
        """Whether the step that is open replays twins: those of the model, a drafter's graphs are vLLM's own always."""
        step = self._recorder.step
        return (
            step is not None
            and step.graphs is not None
            and not step.graphs.overwrites
            and not self._recorder.speculating
        )

    @contextmanager
    def replaying(self, owner: Any, attribute: str) -> Iterator[None]:
        """`owner` looks its graphs up in the twins' dictionary: for the replay of a sampled step."""
        own = getattr(owner, attribute)
        setattr(owner, attribute, self._twin_dictionary(owner, attribute))
        try:
            yield
        finally:
            setattr(owner, attribute, own)

    def has_twin(self, owner: Any, key: Any) -> bool:
        """Whether `owner` has captured a twin for `key`: looking one up that is not there would capture it."""
        found = self._twins.get(id(owner))
        if found is None or key not in found[2]:
            return False
        entry = found[2][key]
        return getattr(entry, "cudagraph", entry) is not None and getattr(entry, "capture", entry) is not None

    def replayed(self, graph: Any) -> None:
        """An instrumented graph has been put on the stream."""
        timed, step = graph.timed_set, self._recorder.step
        if timed is None or self._recorder.speculating:
            return
        if step is not None and step.graphs is timed and self._recorder.recording:
            self._recorder.replayed(graph.ranges)
        else:
            timed.overwrite()

    # --- forgetting ------------------------------------------------------------------------------------------

    def drop(self) -> None:
        """Forget all twins: vLLM has dropped or will recapture its graphs."""
        if self._sets:
            logger.info("K25: vLLM has dropped its CUDA graphs, and so have we our twins")
        self._sets.clear()
        for _, _, dictionary in self._twins.values():
            dictionary.clear()
        self._twins.clear()

    def begin_capture(self, graph: Any) -> None:
        """`graph` has begun to be captured. Never raises: at worst it is captured without events."""
        try:
            self._device.instrumenting = self._recorder.begin_graph(self._label)
        except Exception:
            self._device.instrumenting = False
            logger.exception("K25: a graph is captured without timing events")
        annotations = self._annotations
        if self._device.instrumenting and annotations is not None and annotations.begin():
            self._recorder.annotations = annotations

    def end_capture(self, graph: Any) -> None:
        """`graph` is about to end its capture."""
        if self._device.instrumenting:
            self._device.instrumenting = False
            self._recorder.annotations = None
            if self._annotations is not None:
                self._annotations.end()
            graph.ranges = self._recorder.end_graph()

    def captured(self, graph: Any) -> None:
        """The capture of `graph` has ended well."""
        if self._annotations is not None:
            self._annotations.captured(graph)

    def _publish_names(self) -> None:
        if self._annotations is not None:
            ring = self._recorder.ring
            self._annotations.publish(ring.path.with_name(annotations_file_name(ring.identity.coordinates.global_rank)))

    @contextmanager
    def _exchanged(self, owners: list[tuple[Any, str]]) -> Iterator[None]:
        own = [getattr(owner, attribute) for owner, attribute in owners]
        for owner, attribute in owners:
            setattr(owner, attribute, self._twin_dictionary(owner, attribute))
        try:
            yield
        finally:
            for (owner, attribute), dictionary in zip(owners, own, strict=True):
                setattr(owner, attribute, dictionary)

    def _twin_dictionary(self, owner: Any, attribute: str) -> dict[Any, Any]:
        # The owner is kept alive with it, so that its id stays its own.
        return self._twins.setdefault(id(owner), (owner, attribute, {}))[2]


def _same_size(key: Any, descriptor: Any) -> bool:
    return bool(getattr(key, "num_tokens", key) == getattr(descriptor, "num_tokens", descriptor))


def _free_bytes() -> int:
    return int(torch.cuda.mem_get_info()[0])


def _timed_graph_class(graphs: TimedGraphs) -> type:
    """A `torch.cuda.CUDAGraph` whose captures and replays the recorder hears of."""
    base: Any = torch.cuda.CUDAGraph

    class TimedGraph(base):  # type: ignore[misc]
        """A CUDA graph with timing events."""

        timed_set: TimedSet | None = None
        ranges: list[OpenRange] = []  # noqa: RUF012 (replaced when the capture ends)

        def capture_begin(self, *args: Any, **kwargs: Any) -> None:
            self.shared_pool = args[0] if args else kwargs.get("pool")
            try:
                super().capture_begin(*args, **kwargs)
            except Exception:
                _stop_allocating_to(self.shared_pool)
                raise
            graphs.begin_capture(self)

        def capture_end(self) -> None:
            graphs.end_capture(self)
            try:
                super().capture_end()
            except Exception:
                _stop_allocating_to(self.shared_pool)
                raise
            graphs.captured(self)

        def replay(self) -> None:
            super().replay()
            try:
                graphs.replayed(self)
            except Exception:
                logger.exception("K25: error after the replay of an instrumented graph; vLLM is not affected")

    return TimedGraph


def _stop_allocating_to(pool: Any) -> None:
    """PyTorch leaves its allocator recording to the pool of a capture that failed.

    The pool is vLLM's, and vLLM's next capture into it would be refused ("already recording to mempool_id").
    """
    end = getattr(torch._C, "_cuda_endAllocateToPool", None)
    if end is not None and pool is not None:
        with contextlib.suppress(RuntimeError):  # it was not recording, and that is what we want
            end(torch.cuda.current_device(), pool)


def all_ranks_agree(ok: bool) -> bool:
    """Whether every rank that captures with us says yes (vLLM's world group, and the data-parallel one)."""
    from vllm.distributed import parallel_state

    flag = torch.tensor([int(ok)], dtype=torch.int32)
    groups = [parallel_state.get_world_group()]
    with contextlib.suppress(AssertionError):  # not initialised
        groups.append(parallel_state.get_dp_group())
    for group in groups:
        if group.world_size > 1:
            torch.distributed.all_reduce(flag, op=torch.distributed.ReduceOp.MIN, group=group.cpu_group)
    return bool(flag.item())
