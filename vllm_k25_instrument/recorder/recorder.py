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
from typing import Any, Final

from vllm_k25_instrument.hooks.point import Args, HookPoint, Kwargs
from vllm_k25_instrument.markers import Markers
from vllm_k25_instrument.model import (
    ALL_REDUCE_PATHS,
    CATEGORY_CODE,
    GRAPH_MODES,
    HOOKED_CATEGORIES,
    LOST_REASONS,
    MAX_STREAM,
    NO_LAYER,
    NO_PARENT,
    PHASES,
    RANGE_FIELDS,
    AllReducePath,
    Category,
    GraphMode,
    LostReason,
    Phase,
    pack_sample,
)
from vllm_k25_instrument.recorder.device import Device
from vllm_k25_instrument.recorder.phase import PhaseClassifier
from vllm_k25_instrument.ring import RingWriter

_PHASE_CODE: Final = {phase: code for code, phase in enumerate(PHASES)}
_GRAPH_CODE: Final = {mode: code for code, mode in enumerate(GRAPH_MODES)}
_PATH_CODE: Final = {str(path): code for code, path in enumerate(ALL_REDUCE_PATHS)}
_LOST_CODE: Final = {reason: code for code, reason in enumerate(LOST_REASONS)}
_ALL_REDUCE: Final = CATEGORY_CODE[Category.ALL_REDUCE]
_OTHER_PATH: Final = _PATH_CODE[AllReducePath.OTHER]

ErrorHandler = Callable[[HookPoint | None, Exception], None]


class OpenRange:
    """A range of the step that is being recorded; `end` is None until its call has returned."""

    __slots__ = ("code", "detail", "end", "index", "layer", "nbytes", "parent", "pushed", "start", "stream")

    def __init__(
        self, index: int, code: int, detail: str, nbytes: int, layer: int, stream: int, parent: OpenRange | None
    ) -> None:
        self.index = index
        self.code = code
        self.detail = detail
        self.nbytes = nbytes
        self.layer = layer
        self.stream = stream
        self.parent = parent
        self.start: Any = None
        self.end: Any = None
        self.pushed = False


class OpenStep:
    """A step between its begin and the moment that its marks have been read."""

    __slots__ = (
        "complete",
        "end",
        "graph_mode",
        "number",
        "overhead_ns",
        "padded_tokens",
        "phase",
        "pushed",
        "ranges",
        "requests",
        "sampled",
        "start",
        "start_unix_ns",
        "tokens",
    )

    def __init__(self, number: int, phase: Phase, requests: int, tokens: int, sampled: bool) -> None:
        self.number = number
        self.phase = phase
        self.requests = requests
        self.tokens = tokens
        self.padded_tokens = tokens
        self.graph_mode = GraphMode.NONE
        self.sampled = sampled
        self.ranges: list[OpenRange] = []
        self.overhead_ns = 0
        self.complete = True
        self.pushed = False
        self.start_unix_ns = 0
        self.start: Any = None
        self.end: Any = None


class Recorder:
    """Times one worker's steps.

    `recording` is True exactly while a sampled step runs; wrappers look at it first, and do nothing else when it
    is False.
    """

    __slots__ = (
        "_classifier",
        "_device",
        "_graph_hint",
        "_layer",
        "_markers",
        "_next_step",
        "_on_error",
        "_on_first_step",
        "_pending",
        "_ring",
        "_sample_every",
        "_silenced",
        "_step",
        "_thread",
        "_top",
        "executing",
        "recording",
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
        self._device = device
        self._sample_every = sample_every
        self._on_error = on_error
        self._markers = markers
        self._graph_hint = graph_hint
        self._on_first_step = on_first_step
        self._silenced: set[HookPoint] = set()
        self._classifier = PhaseClassifier()
        self._next_step = 0
        self._step: OpenStep | None = None
        self._pending: deque[OpenStep] = deque()
        self._top: OpenRange | None = None
        self._layer = NO_LAYER
        self._thread = 0

    # --- steps -----------------------------------------------------------------------------------------------

    @property
    def in_step(self) -> bool:
        return self._step is not None

    def begin_step(self, scheduler_output: Any) -> bool:
        """A step with `scheduler_output` begins; False where it does not count as one (nothing is scheduled)."""
        entered = perf_counter_ns()
        try:
            if self._step is not None:
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
            self._step = step
            if step.sampled:
                self._thread = get_ident()
                self._top = None
                self._layer = NO_LAYER
                step.start_unix_ns = time.time_ns()
                if self._markers is not None:
                    self._markers.push_step(step.phase, number, step.requests, self._graph_hint)
                    step.pushed = True
                self.recording = True
            self._ring.totals.add_overhead(perf_counter_ns() - entered)
            step.start = self._device.mark()
            return True
        except Exception as error:
            self._step = None
            self.recording = False
            self._on_error(None, error)
            return False

    def dispatched(self, graph_mode: GraphMode, padded_tokens: int) -> None:
        """The open step will run in this graph mode, padded to this many tokens."""
        step = self._step
        if step is not None:
            step.graph_mode = graph_mode
            step.padded_tokens = padded_tokens

    def end_step(self) -> None:
        """The open step is over."""
        step = self._step
        if step is None:
            return
        try:
            step.end = self._device.mark()
            entered = perf_counter_ns()
            self._step = None
            self.recording = False
            if step.pushed and self._markers is not None:
                self._markers.pop()
            self._pending.append(step)
            self.drain()
            self._ring.totals.add_overhead(perf_counter_ns() - entered)
        except Exception as error:
            self._lose(LostReason.ERROR, error)

    def abort_step(self) -> None:
        """The open step raised, or will never be finished: it is not a step that can be compared with others."""
        step = self._step
        self._step = None
        self.recording = False
        if step is None:
            return
        try:
            if step.pushed and self._markers is not None:
                self._markers.pop()
            if step.sampled:
                self._ring.totals.add_lost(_LOST_CODE[LostReason.ABORTED])
        except Exception as error:
            self._on_error(None, error)

    def drain(self) -> None:
        """Make samples of the steps whose last mark the device has passed."""
        pending = self._pending
        while pending and self._device.completed(pending[0].end):
            self._finish(pending.popleft())

    def silence(self, point: HookPoint) -> None:
        """Make nothing of `point`'s calls from now on."""
        self._silenced.add(point)

    # --- ranges ----------------------------------------------------------------------------------------------

    def enter(self, point: HookPoint, args: Args, kwargs: Kwargs) -> OpenRange | None:
        """A call of `point` begins; None where it makes no range of its own.

        A range directly inside one of the same category is that range's implementation and is not recorded.
        """
        entered = perf_counter_ns()
        step = self._step
        if step is None:
            return None
        if get_ident() != self._thread:
            step.complete = False
            return None
        parent = self._top
        category = point.category
        if category is None or point in self._silenced:
            return None
        code = CATEGORY_CODE[category]
        if parent is not None and parent.code == code:
            return None
        try:
            if point.layer is not None:
                self._layer = point.layer(args, kwargs)
            layer = self._layer if point.layer is not None or point.inherits_layer else NO_LAYER
            opened = OpenRange(
                len(step.ranges),
                code,
                point.detail(args, kwargs) if point.detail is not None else "",
                point.nbytes(args, kwargs) if point.nbytes is not None else 0,
                layer,
                self._device.stream(),
                parent,
            )
            if self._markers is not None and (opened.detail or point.detail is None):
                self._markers.push(category, opened.detail, opened.nbytes, layer)
                opened.pushed = True
        except Exception as error:
            self._on_error(point, error)
            return None
        step.ranges.append(opened)
        self._top = opened
        self._ring.totals.add_hook_call(point.index)
        step.overhead_ns += perf_counter_ns() - entered
        opened.start = self._device.mark()
        return opened

    def leave(self, opened: OpenRange) -> None:
        """The call that `enter` opened has returned or raised."""
        opened.end = self._device.mark()
        entered = perf_counter_ns()
        self._top = opened.parent
        if opened.pushed and self._markers is not None:
            try:
                self._markers.pop()
            except Exception as error:
                self._on_error(None, error)
        step = self._step
        if step is not None:
            step.overhead_ns += perf_counter_ns() - entered

    def take_path(self, point: HookPoint, args: Args, kwargs: Kwargs) -> OpenRange | None:
        """The open all-reduce runs through `point`'s path; None where none is open or its path is known."""
        opened = self._top
        if opened is None or opened.code != _ALL_REDUCE or opened.detail or get_ident() != self._thread:
            return None
        if point.path is None or point in self._silenced:
            return None
        try:
            opened.detail = point.path(args, kwargs)
            self._ring.totals.add_hook_call(point.index)
            if self._markers is not None and not opened.pushed:
                self._markers.push(Category.ALL_REDUCE, opened.detail, opened.nbytes, opened.layer)
                opened.pushed = True
        except Exception as error:
            self._on_error(point, error)
        return opened

    def refuse_path(self, opened: OpenRange) -> None:
        """The path that was taken has declined the call; another one will report itself."""
        opened.detail = ""
        if opened.pushed and self._markers is not None:
            opened.pushed = False
            self._markers.pop()

    def enter_layer(self, point: HookPoint, args: Args, kwargs: Kwargs) -> None:
        """The call tells which layer the next ranges belong to."""
        if point.layer is not None and point not in self._silenced and get_ident() == self._thread:
            try:
                self._layer = point.layer(args, kwargs)
            except Exception as error:
                self._on_error(point, error)

    # --- from marks to a sample ------------------------------------------------------------------------------

    def _finish(self, step: OpenStep) -> None:
        totals = self._ring.totals
        phase = _PHASE_CODE[step.phase]
        duration = self._device.elapsed_ns(step.start, step.end)
        totals.add_step(phase, duration)
        if not step.sampled:
            return
        fields, exclusive = self._resolve(step)
        sample = pack_sample(
            step=step.number,
            phase_code=phase,
            requests=step.requests,
            tokens=step.tokens,
            padded_tokens=step.padded_tokens,
            graph_code=_GRAPH_CODE[step.graph_mode],
            start_unix_ns=step.start_unix_ns,
            duration_ns=duration,
            overhead_ns=step.overhead_ns,
            complete=step.complete,
            range_count=len(step.ranges),
            range_fields=fields,
        )
        totals.add_overhead(step.overhead_ns)
        if not self._ring.append(sample):
            self._lose(LostReason.TOO_LARGE)
            return
        totals.add_sample(
            phase,
            _GRAPH_CODE[step.graph_mode],
            step.requests,
            duration,
            [*exclusive, duration - sum(exclusive)],
        )
        for index, r in enumerate(step.ranges):
            if r.code == _ALL_REDUCE:
                totals.add_all_reduce(_PATH_CODE.get(r.detail, _OTHER_PATH), fields[index * RANGE_FIELDS + 1], r.nbytes)

    def _resolve(self, step: OpenStep) -> tuple[list[int], list[int]]:
        """The ranges as integers for `pack_sample`, and the exclusive time per hooked category."""
        elapsed = self._device.elapsed_ns
        detail_index = self._ring.detail_index
        fields: list[int] = []
        exclusive = [0] * len(HOOKED_CATEGORIES)
        for r in step.ranges:
            duration = elapsed(r.start, r.end)
            exclusive[r.code] += duration
            parent = r.parent
            if parent is not None and parent.stream == r.stream:
                exclusive[parent.code] -= duration
            fields += (
                elapsed(step.start, r.start),
                duration,
                r.nbytes,
                r.layer,
                NO_PARENT if parent is None else parent.index,
                r.code,
                min(r.stream, MAX_STREAM),
                detail_index(r.detail),
            )
        return fields, exclusive

    def _lose(self, reason: LostReason, error: Exception | None = None) -> None:
        self._ring.totals.add_lost(_LOST_CODE[reason])
        if error is not None:
            self._on_error(None, error)
