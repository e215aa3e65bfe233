"""How a step is timed: ranges are appended while it runs and made into a StepSample when it is over.

The recorder belongs to one worker and records the ranges of one thread, the one that executes the model. Its public
methods never raise: an error in our own code is reported to `on_error` and costs a range or a sample, nothing else.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from threading import get_ident
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any, Final

from vllm_k25_instrument.hooks.point import Args, HookPoint, Kwargs
from vllm_k25_instrument.markers import Markers
from vllm_k25_instrument.model import (
    CATEGORY_CODE,
    LOST_REASONS,
    NO_LAYER,
    Category,
    GraphMode,
    LostReason,
    Phase,
)
from vllm_k25_instrument.recorder.device import Device, HostClock
from vllm_k25_instrument.recorder.phase import PhaseClassifier
from vllm_k25_instrument.recorder.samples import PHASE_CODE, SampleWriter
from vllm_k25_instrument.recorder.step import (
    BORROWED,
    CODE,
    DETAIL,
    END,
    INDEX,
    LAYER,
    NBYTES,
    OWN_COST_EVERY,
    PARENT,
    PUSHED,
    START,
    OpenRange,
    OpenStep,
)
from vllm_k25_instrument.ring import RingWriter

if TYPE_CHECKING:
    from vllm_k25_instrument.recorder.annotations import GraphAnnotations
    from vllm_k25_instrument.recorder.graphs import TimedGraphs

_LOST_CODE: Final = {reason: code for code, reason in enumerate(LOST_REASONS)}
_ALL_REDUCE: Final = CATEGORY_CODE[Category.ALL_REDUCE]
_SPECULATION: Final = CATEGORY_CODE[Category.SPECULATION]

ErrorHandler = Callable[[HookPoint | None, Exception], None]


class Recorder:
    """Times one worker's steps.

    `recording` is True exactly while a sampled step runs; wrappers look at it first, and do nothing else when it is
    False. While it is True they append to `step.ranges` (see `hooks.wrappers`): `top` is the range that is open,
    `layer` the layer seen last, `thread` the one whose ranges count.
    """

    __slots__ = (
        "_classifier",
        "_graph_hint",
        "_idles",
        "_last_end",
        "_next_step",
        "_on_first_step",
        "_pending",
        "_ring",
        "_sample_every",
        "_samples",
        "annotations",
        "device",
        "executing",
        "graphs",
        "layer",
        "markers",
        "marks_are_host_time",
        "on_error",
        "recording",
        "silenced",
        "step",
        "thread",
        "thread_of_steps",
        "top",
    )

    def __init__(
        self,
        ring: RingWriter,
        device: Device[Any],
        *,
        sample_every: int,
        on_error: ErrorHandler,
        markers: Markers | None = None,
        graph_hint: str = "",
        on_first_step: Callable[[], None] = lambda: None,
    ) -> None:
        """`graph_hint` is the graph mode of every step where only one is possible (it names NVTX step ranges).

        `on_first_step` runs once, before the first step: by then vLLM has imported all that its model needs.
        """
        self.recording = False
        self.executing = False  # a model runner's execute_model is on the stack
        self._ring = ring
        self._samples = SampleWriter(ring)
        self.device = device
        # Where marks are the host's clock, they save the wrappers reading it once more.
        self.marks_are_host_time = isinstance(device, HostClock)
        self._sample_every = sample_every
        self.on_error = on_error
        self.markers = markers
        self._graph_hint = graph_hint
        self._on_first_step = on_first_step
        self.silenced: set[HookPoint] = set()
        self._classifier = PhaseClassifier()
        self._next_step = 0
        self.step: OpenStep | None = None
        self._pending: deque[OpenStep] = deque()
        self._last_end: Any = None  # the end mark of the step finished last
        self.graphs: TimedGraphs | None = None
        self.annotations: GraphAnnotations | None = None  # while a graph is captured whose nodes are to be named
        self.top: OpenRange | None = None
        self.layer = NO_LAYER
        self.thread = 0
        self.thread_of_steps = 0
        self._idles = False

    # --- steps -----------------------------------------------------------------------------------------------

    @property
    def in_step(self) -> bool:
        return self.step is not None

    @property
    def speculating(self) -> bool:
        """Whether the open sampled step is drafting tokens."""
        return self.top is not None and self.top[CODE] == _SPECULATION

    @property
    def ring(self) -> RingWriter:
        """Where the samples go."""
        return self._ring

    def begin_step(self, scheduler_output: Any) -> bool:
        """A step with `scheduler_output` begins; False where it does not count as one (nothing is scheduled)."""
        entered = perf_counter_ns()
        try:
            if self.step is not None:
                self.abort_step()
            tokens = scheduler_output.total_num_scheduled_tokens
            if tokens <= 0:
                return False
            number = self._next_step
            self._next_step = number + 1
            if number == 0:
                self._on_first_step()
            step = OpenStep(
                number,
                self._classifier.classify(scheduler_output),
                len(scheduler_output.num_scheduled_tokens),
                tokens,
                number % self._sample_every == 0,
            )
            self.step = step
            self.thread_of_steps = get_ident()
            self.drain()
            self.device.begin()
            if self.markers is not None:
                self.markers.push_step(step.phase, number, step.requests, self._graph_hint)
                step.pushed = True
            if step.sampled:
                self.thread = get_ident()
                self.top = None
                self.layer = NO_LAYER
                if self.markers is None:  # with them every range's cost is timed
                    step.own_cost_at = number // self._sample_every % OWN_COST_EVERY
                step.start_unix_ns = time.time_ns()
                self.recording = True
            step.host_start_ns = perf_counter_ns()
            self._ring.totals.add_overhead(step.host_start_ns - entered)
            step.start = self.device.mark()
            return True
        except Exception as error:
            self.step = None
            self.recording = False
            self.on_error(None, error)
            return False

    def dispatched(self, graph_mode: GraphMode, padded_tokens: int, descriptor: Any) -> None:
        """The open step will run in this graph mode, padded to this many tokens.

        `descriptor` is vLLM's key of the graph. A sampled step that will replay a graph stays sampled only where
        there is an instrumented one for it whose last marks have been read.
        """
        step = self.step
        if step is None:
            return
        step.graph_mode = graph_mode
        step.padded_tokens = padded_tokens
        if not self.recording or graph_mode is GraphMode.NONE:
            return
        try:
            found = self.graphs.find(graph_mode, descriptor) if self.graphs is not None else None
            if found is None:
                self.abandon_sample(LostReason.UNTIMED)
            elif not found.claim(step):
                self.abandon_sample(LostReason.UNREAD)
            else:
                step.graphs = found
        except Exception as error:
            self.abandon_sample(LostReason.ERROR)
            self.on_error(None, error)

    def abandon_sample(self, reason: LostReason) -> None:
        """The open step is not sampled after all; it still counts, with its duration."""
        step = self.step
        self.recording = False
        if step is not None and step.sampled:
            step.sampled = False
            self._release_ranges(step)
            step.ranges = []
            self._lose(reason)

    def end_step(self) -> None:
        """The open step is over."""
        step = self.step
        if step is None:
            return
        try:
            step.end = self.device.mark()
            step.host_end_ns = entered = perf_counter_ns()
            self.step = None
            self.recording = False
            if step.pushed:
                self.pop_marker()
            self._pending.append(step)
            if self._idles:
                self._idles = False
            else:
                self.drain()
            self._ring.totals.add_overhead(perf_counter_ns() - entered)
        except Exception as error:
            self.step = None
            self.recording = False
            self._lose(LostReason.ERROR, error)

    def idle(self) -> None:
        """Between two steps: the worker has answered, and is about to wait for what comes next.

        The best moment to make a sample. Not all executors have it; a step that had one before it leaves its sample to
        the one after it, and any other step makes its sample at its end.
        """
        if get_ident() != self.thread_of_steps:
            return
        self._idles = True
        if self._pending:
            entered = perf_counter_ns()
            try:
                self.drain()
                self._ring.totals.add_overhead(perf_counter_ns() - entered)
            except Exception as error:
                self._lose(LostReason.ERROR, error)

    def abort_step(self) -> None:
        """The open step raised, or will never be finished: it is not a step that can be compared with others."""
        step = self.step
        self.step = None
        self.recording = False
        if step is None:
            return
        try:
            if step.pushed:
                self.pop_marker()
            if step.sampled:
                self._ring.totals.add_lost(_LOST_CODE[LostReason.ABORTED])
            step.aborted = True
            step.end = self.device.mark()
            self._pending.append(step)
        except Exception as error:
            self.on_error(None, error)
        self._publish()  # there may be no step after one that raised

    def drain(self) -> None:
        """Make samples of the steps whose last mark the device has passed."""
        pending = self._pending
        if not pending or not self.device.completed(pending[0].end):
            return
        try:
            while pending and self.device.completed(pending[0].end):
                step = pending.popleft()
                try:
                    self._finish(step)
                except Exception as error:  # this step's, and not that of the step which is being begun or ended
                    if step.sampled and not step.aborted:
                        self._lose(LostReason.ERROR)
                    self.on_error(None, error)
        finally:
            self._publish()

    def _publish(self) -> None:
        try:
            self._ring.publish()
        except Exception as error:
            self.on_error(None, error)

    def silence(self, point: HookPoint) -> None:
        """Make nothing of `point`'s calls from now on."""
        self.silenced.add(point)

    # --- ranges ----------------------------------------------------------------------------------------------

    def take_path(self, point: HookPoint, args: Args, kwargs: Kwargs) -> OpenRange | None:
        """The open all-reduce runs through `point`'s path; None where none is open or its path is known."""
        opened = self.top
        if opened is None or opened[DETAIL] or opened[CODE] != _ALL_REDUCE or get_ident() != self.thread:
            return None
        if point.path is None or point in self.silenced:
            return None
        try:
            opened[DETAIL] = point.path(args, kwargs)
            self._ring.totals.add_hook_calls(point.index, 1)
            if self.markers is not None and not opened[PUSHED]:
                self.markers.push(Category.ALL_REDUCE, opened[DETAIL], opened[NBYTES], opened[LAYER])
                opened[PUSHED] = True
        except Exception as error:
            self.on_error(point, error)
        return opened

    def refuse_path(self, opened: OpenRange) -> None:
        """The path that was taken has declined the call; another one will report itself."""
        opened[DETAIL] = ""
        if opened[PUSHED] and self.markers is not None:
            opened[PUSHED] = False
            self.pop_marker()

    def range_raised(self, opened: OpenRange) -> None:
        """The call behind the range has raised; that exception, and none of ours, is what its caller is to see."""
        self.top = opened[PARENT]
        if self.annotations is not None:
            self.annotations.discard()
        if opened[PUSHED]:
            self.pop_marker()
        try:
            opened[END] = self.device.mark()
        except Exception as error:
            if not self._in_capture:  # one that has broken takes no marks, and gives no graph
                self.mark_failed(error)

    def mark_failed(self, error: Exception) -> None:
        """A mark could not be taken: the open step leaves no sample.

        Raises `error` in a capture: a graph that lacks a mark must not be taken for a timed one.
        """
        if self._in_capture:
            raise error
        self.abandon_sample(LostReason.ERROR)
        self.on_error(None, error)

    @property
    def _in_capture(self) -> bool:
        return self.step is not None and self.step.number < 0

    def pop_marker(self) -> None:
        """Close the NVTX range opened last."""
        try:
            if self.markers is not None:
                self.markers.pop()
        except Exception as error:
            self.on_error(None, error)

    def enter_layer(self, point: HookPoint, args: Args, kwargs: Kwargs) -> None:
        """The call tells which layer the next ranges belong to."""
        if point.layer is not None and point not in self.silenced and get_ident() == self.thread:
            try:
                self.layer = point.layer(args, kwargs)
            except Exception as error:
                self.on_error(point, error)

    # --- graphs ----------------------------------------------------------------------------------------------

    def begin_graph(self, label: str) -> bool:
        """A graph that is to be instrumented begins to be captured; False, and nothing done, where a step is open."""
        if self.step is not None:
            return False
        self.device.begin()
        if self.markers is not None:
            self.markers.push_capture(label)
        # After what may raise, so that a graph that is not instrumented leaves no step open.
        self.step = OpenStep(-1, Phase.DECODE, 0, 0, sampled=True)
        self.thread = get_ident()
        self.top = None
        self.layer = NO_LAYER
        self.recording = True
        return True

    def end_graph(self) -> list[OpenRange]:
        """The capture that `begin_graph` announced ends; returns the graph's ranges."""
        step = self.step
        self.step = None
        self.recording = False
        self.top = None
        if step is None:
            return []
        if self.markers is not None:
            self.pop_marker()
        for r in step.ranges:
            r[BORROWED] = True
        return step.ranges

    def replayed(self, ranges: list[OpenRange]) -> None:
        """The open step has replayed an instrumented graph with these ranges."""
        step = self.step
        if step is None or not step.sampled:
            return
        base = len(step.ranges)
        for index, r in enumerate(ranges):
            r[INDEX] = base + index
        step.ranges += ranges

    # --- from marks to a sample ------------------------------------------------------------------------------

    def _finish(self, step: OpenStep) -> None:
        try:
            if not step.aborted:
                self._account(step)
        finally:
            step.done = True
            self._release_ranges(step)
            if self._last_end is not None:
                self.device.release((self._last_end,))
            self.device.release((step.start,))
            self._last_end = step.end

    def _release_ranges(self, step: OpenStep) -> None:
        """Give the marks of the step's own ranges back; those of a graph's ranges stay with the graph."""
        if not self.marks_are_host_time:
            for r in step.ranges:
                if not r[BORROWED]:
                    self.device.release(mark for mark in (r[START], r[END]) if mark is not None)

    def _account(self, step: OpenStep) -> None:
        (duration,) = self.device.offsets_ns(step.start, (step.end,))
        self._ring.totals.add_step(PHASE_CODE[step.phase], duration, step.host_end_ns - step.host_start_ns)
        if not step.sampled:
            return
        if step.overwritten:
            self._lose(LostReason.OVERWRITTEN)
            return
        gap = 0 if self._last_end is None else self.device.offsets_ns(self._last_end, (step.start,))[0]
        if not self._samples.write(step, duration, gap, self.device):
            self._lose(LostReason.TOO_LARGE)

    def _lose(self, reason: LostReason, error: Exception | None = None) -> None:
        self._ring.totals.add_lost(_LOST_CODE[reason])
        if error is not None:
            self.on_error(None, error)
