"""The functions that are put around vLLM's.

All of them take ``*args, **kwargs`` and pass them through, return what the callee returns and raise what it raises.
While TorchDynamo traces, they are transparent: `is_dynamo_compiling` is a constant to the tracer, so that nothing
after it is looked at, guarded on, or able to break the graph. (`torch.compiler.is_compiling` says the same there and
costs more per call everywhere else.)
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from threading import get_ident
from time import perf_counter_ns
from typing import Any, Final

import torch

from vllm_k25_instrument.hooks.arguments import argument
from vllm_k25_instrument.hooks.point import HookKind, HookPoint
from vllm_k25_instrument.log import logger
from vllm_k25_instrument.model import CATEGORY_CODE, HOOKED_CATEGORIES, NO_LAYER, Category, GraphMode
from vllm_k25_instrument.recorder.recorder import Recorder
from vllm_k25_instrument.recorder.step import CODE, END, OWN_COST_EVERY, PUSHED, START

Function = Callable[..., Any]

ADOPTED: Final = "_k25_shared_experts"
"""Set in the instance dictionary of a module that serves as shared experts."""

_is_dynamo_compiling = torch.compiler.is_dynamo_compiling
_SPECULATION: Final = CATEGORY_CODE[Category.SPECULATION]


def wrap(function: Function, point: HookPoint, recorder: Recorder) -> Function:
    """`function` with the behaviour of `point` around it, under its own name, signature and documentation."""
    wrapper = _WRAPPERS[point.kind](function, point, recorder)
    return functools.wraps(function)(wrapper)


def unbound(descriptor: Any) -> Function:
    """A plain function that calls `descriptor`, a class attribute, as a method of its first argument."""

    @functools.wraps(descriptor)
    def call(*args: Any, **kwargs: Any) -> Any:
        return descriptor.__get__(args[0], type(args[0]))(*args[1:], **kwargs)

    return call


def _range(function: Function, point: HookPoint, recorder: Recorder) -> Function:
    """The call is a range.

    A range directly inside one of the same category is that range's implementation and is not recorded, and of what
    the draft model does nothing is: it has layers of the same names. All in one function, what never changes in its
    closure: this runs on every hooked call of a sampled step.
    """
    code, hook_index, category = point.code, point.index, HOOKED_CATEGORIES[point.code]
    detail_of, nbytes_of, layer_of, inherits_layer = point.detail, point.nbytes, point.layer, point.inherits_layer
    device, mark, markers = recorder.device, recorder.device.mark, recorder.markers
    host_time, silenced = recorder.marks_are_host_time, recorder.silenced
    cost_every = OWN_COST_EVERY if markers is None else 1
    speculation = _SPECULATION

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if _is_dynamo_compiling() or not recorder.recording:
            return function(*args, **kwargs)
        step = recorder.step
        if step is None or (silenced and point in silenced):
            return function(*args, **kwargs)
        if get_ident() != recorder.thread:
            step.complete = False
            return function(*args, **kwargs)
        parent = recorder.top
        if parent is not None and (parent[CODE] == code or parent[CODE] == speculation):
            return function(*args, **kwargs)
        if not host_time and not device.may_mark():
            return function(*args, **kwargs)
        ranges = step.ranges
        index = len(ranges)
        if index < step.own_cost_at:
            entered = 0
        else:
            step.own_cost_at = index + cost_every
            entered = perf_counter_ns()
        try:
            if layer_of is not None:
                recorder.layer = layer = layer_of(args, kwargs)
            else:
                layer = recorder.layer if inherits_layer else NO_LAYER
            detail = detail_of(args, kwargs) if detail_of is not None else ""
            nbytes = nbytes_of(args, kwargs) if nbytes_of is not None else 0
            stream = 0 if host_time else device.stream()
            pushed = False
            # Where the detail is still to come (an all-reduce's path), so is the range's name.
            if markers is not None and (detail or detail_of is None):
                markers.push(category, detail, nbytes, layer)
                pushed = True
        except Exception as error:
            recorder.on_error(point, error)
            return function(*args, **kwargs)
        opened = [code, hook_index, index, parent, detail, nbytes, layer, stream, pushed, None, None, False]
        try:
            opened[START] = start = mark()
        except Exception as error:
            if pushed:
                recorder.pop_marker()
            recorder.mark_failed(error)
            return function(*args, **kwargs)
        ranges.append(opened)
        recorder.top = opened
        if host_time:
            began = start
            annotations = None
        else:
            began = perf_counter_ns()
            # Only while a graph is captured that we instrument: replays run no Python that could name its nodes.
            annotations = recorder.annotations
            if annotations is not None:
                annotations.open()
        try:
            result = function(*args, **kwargs)
        except BaseException:
            recorder.range_raised(opened)
            raise
        failure: Exception | None = None
        try:
            opened[END] = mark()
        except Exception as error:
            failure = error
        recorder.top = parent
        if entered:
            step.overhead_ns += (began - entered) * cost_every
        if annotations is not None:
            annotations.close(opened)
        if failure is not None:
            if opened[PUSHED]:
                recorder.pop_marker()
            recorder.mark_failed(failure)
            return result
        # Without a marker to pop, what is left to do here takes less than the clock that would time it.
        if opened[PUSHED]:
            left = perf_counter_ns()
            recorder.pop_marker()
            step.overhead_ns += perf_counter_ns() - left
        return result

    return wrapper


def _adopted_range(function: Function, point: HookPoint, recorder: Recorder) -> Function:
    """A range only for the instances that `after_construction` has marked."""
    timed = _range(function, point, recorder)

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if _is_dynamo_compiling() or not recorder.recording or ADOPTED not in args[0].__dict__:
            return function(*args, **kwargs)
        return timed(*args, **kwargs)

    return wrapper


def after_construction(constructor: Function, point: HookPoint, adopt: Callable[[Any], None]) -> Function:
    """A constructor that hands the shared experts among its arguments to `adopt` when it is done."""

    @functools.wraps(constructor)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        constructor(*args, **kwargs)
        try:
            module = point.shared_experts(args, kwargs) if point.shared_experts is not None else None
            if module is not None:
                adopt(module)
        except Exception as error:
            logger.warning("K25: the shared experts of %s are not timed: %s", type(args[0]).__name__, error)

    return wrapper


def _path(function: Function, point: HookPoint, recorder: Recorder) -> Function:
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if _is_dynamo_compiling() or not recorder.recording:
            return function(*args, **kwargs)
        opened = recorder.take_path(point, args, kwargs)
        result = function(*args, **kwargs)
        if result is None and opened is not None and point.none_is_refusal:
            recorder.refuse_path(opened)
        return result

    return wrapper


def _layer(function: Function, point: HookPoint, recorder: Recorder) -> Function:
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if _is_dynamo_compiling() or not recorder.recording:
            return function(*args, **kwargs)
        recorder.enter_layer(point, args, kwargs)
        return function(*args, **kwargs)

    return wrapper


def _step(function: Function, point: HookPoint, recorder: Recorder) -> Function:
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        # A runner's method that calls its parent's is still one step; a dummy run (profiling, graph capture, an idle
        # data-parallel rank keeping its peers company) is none.
        if recorder.executing or kwargs.get("dummy_run"):
            return function(*args, **kwargs)
        begun = recorder.begin_step(argument(args, kwargs, 1, "scheduler_output"))
        recorder.executing = True
        try:
            result = function(*args, **kwargs)
        except BaseException:
            recorder.abort_step()
            raise
        finally:
            recorder.executing = False
        # None: the model has run and the step goes on in sample_tokens.
        if begun and result is not None:
            recorder.end_step()
        return result

    return wrapper


def _step_sampling(function: Function, point: HookPoint, recorder: Recorder) -> Function:
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if not recorder.in_step:
            return function(*args, **kwargs)
        try:
            result = function(*args, **kwargs)
        except BaseException:
            recorder.abort_step()
            raise
        recorder.end_step()
        return result

    return wrapper


def _idle(function: Function, point: HookPoint, recorder: Recorder) -> Function:
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if recorder.step is None:
            recorder.idle()
        return function(*args, **kwargs)

    return wrapper


_GRAPH_MODES = {"NONE": GraphMode.NONE, "PIECEWISE": GraphMode.PIECEWISE, "FULL": GraphMode.FULL}


def _graph_dispatch(function: Function, point: HookPoint, recorder: Recorder) -> Function:
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        if recorder.recording:
            dispatched = describe_dispatch(result)
            if dispatched is not None:
                recorder.dispatched(*dispatched)
        return result

    return wrapper


def describe_dispatch(result: Any) -> tuple[GraphMode, int, Any] | None:
    """Graph mode, padded number of tokens and graph key from what either model runner's dispatch returns.

    V1 returns ``(mode, descriptor, ...)``, V2 ``(descriptor with cg_mode, ...)``. None where it is neither.
    """
    if not isinstance(result, tuple) or len(result) < 2:
        return None
    if hasattr(result[0], "cg_mode"):
        mode, descriptor = result[0].cg_mode, result[0]
    else:
        mode, descriptor = result[0], result[1]
    graph_mode = _GRAPH_MODES.get(getattr(mode, "name", ""))
    tokens = getattr(descriptor, "num_tokens", None)
    return (graph_mode, tokens, descriptor) if graph_mode is not None and isinstance(tokens, int) else None


def _graphs(function: Function, point: HookPoint, recorder: Recorder) -> Function:
    if point.graphs is None or recorder.graphs is None:
        return function
    return point.graphs(function, recorder.graphs)


_WRAPPERS: dict[HookKind, Callable[[Function, HookPoint, Recorder], Function]] = {
    HookKind.RANGE: _range,
    HookKind.SHARED_EXPERTS: _adopted_range,
    HookKind.PATH: _path,
    HookKind.LAYER: _layer,
    HookKind.STEP: _step,
    HookKind.STEP_SAMPLING: _step_sampling,
    HookKind.GRAPH_DISPATCH: _graph_dispatch,
    HookKind.IDLE: _idle,
    HookKind.GRAPHS: _graphs,
}
