"""Hook points of vLLM's CUDA graphs: their capture, their replay, the memory they are given, their end.

V2 keeps full graphs in `CudaGraphManager.graphs`; V1 keeps all of them, and V2 its pieces, in
`CUDAGraphWrapper.concrete_cudagraph_entries`, one wrapper per piece; the breakable wrapper keeps them in `entries`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Final

from vllm_k25_instrument.hooks.arguments import argument
from vllm_k25_instrument.hooks.point import HookKind, HookPoint
from vllm_k25_instrument.log import logger
from vllm_k25_instrument.model import GraphMode
from vllm_k25_instrument.recorder.graphs import TimedGraphs
from vllm_k25_instrument.settings import GraphTiming

Function = Callable[..., Any]

_MANAGER_MODULE: Final = "vllm.v1.worker.gpu.cudagraph_utils"
_WRAPPER_MODULE: Final = "vllm.compilation.cuda_graph"
_BREAKABLE_MODULE: Final = "vllm.compilation.breakable_cudagraph"
_V1: Final = "vllm.v1.worker.gpu_model_runner"
_V2: Final = "vllm.v1.worker.gpu.model_runner"

_MODEL_MANAGERS: Final = ("CudaGraphManager", "ModelCudaGraphManager")
"""Managers of the model's own graphs; those of a drafter are left alone."""

_MODES: Final = {"FULL": GraphMode.FULL, "PIECEWISE": GraphMode.PIECEWISE}


def _decode_mode(config: Any) -> Any:
    """The graph mode that vLLM runs decode batches in (a `CUDAGraphMode`), from its `compilation_config`."""
    return config.cudagraph_mode.decode_mode()


def _piece_owners(mode: Any) -> list[tuple[Any, str]]:
    """VLLM's wrappers around pieces that graphs of this mode live in, and where in them."""
    import sys

    owners: list[tuple[Any, str]] = []
    for module, cls, attribute in (
        (_WRAPPER_MODULE, "CUDAGraphWrapper", "concrete_cudagraph_entries"),
        (_BREAKABLE_MODULE, "BreakableCUDAGraphWrapper", "entries"),
    ):
        wrapper = getattr(sys.modules.get(module), cls, None)
        for instance in sorted(getattr(wrapper, "_all_instances", ()), key=id):
            if getattr(instance, "runtime_mode", None) in (mode, None):
                owners.append((instance, attribute))
    return owners


def _memory_samples(manager: Any) -> list[int] | None:
    """What vLLM has measured each graph to cost so far; None unless it is in its memory profiling."""
    samples: list[int] | None = getattr(manager, "_capture_mem_samples", None)
    return samples


# --- capture -----------------------------------------------------------------------------------------------


def _manager_capture(function: Function, graphs: TimedGraphs) -> Function:
    """V2: capture vLLM's graphs, then the twins of the decode sizes."""

    @functools.wraps(function)
    def capture(manager: Any, *args: Any, **kwargs: Any) -> Any:
        if type(manager).__name__ not in _MODEL_MANAGERS:
            return function(manager, *args, **kwargs)
        if graphs.timing is GraphTiming.INPLACE and _memory_samples(manager) is None:
            with graphs.instrumented("capture in place"):
                result = function(manager, *args, **kwargs)
            graphs.adopt(manager, "graphs", GraphMode.FULL)
            for owner, attribute in _piece_owners(None):
                graphs.adopt(owner, attribute, GraphMode.PIECEWISE)
            return result
        result = function(manager, *args, **kwargs)
        try:
            samples = _memory_samples(manager)
            if samples is not None:
                # vLLM is measuring what graphs cost; what it finds is what a twin will cost.
                graphs.profiled_bytes_per_graph = max(samples[1:], default=0)
            elif graphs.timing is GraphTiming.TWIN:
                _capture_manager_twins(function, graphs, manager, args, kwargs)
        except Exception:
            logger.exception("K25: twin graphs could not be captured; graph steps are not timed")
        return result

    return capture


def _capture_manager_twins(function: Function, graphs: TimedGraphs, manager: Any, args: Any, kwargs: Any) -> None:
    mode = _decode_mode(manager.compilation_config)
    graph_mode = _MODES.get(mode.name)
    all_descriptors = manager._capture_descs
    if graph_mode is None:
        return
    wanted = [d for d in all_descriptors.get(mode, ()) if graphs.wanted(d.num_tokens)]

    kwargs = {**kwargs, "progress_bar_desc": "Capturing twin graphs"} if len(args) < 2 else kwargs

    def capture_one(descriptor: Any) -> None:
        manager._capture_descs = {mode: [descriptor]}
        try:
            function(manager, *args, **kwargs)
        finally:
            manager._capture_descs = all_descriptors

    graphs.capture_twins([(manager, "graphs"), *_piece_owners(mode)], wanted, capture_one, graph_mode)


def _runner_capture(function: Function, graphs: TimedGraphs) -> Function:
    """V1: capture vLLM's graphs of one mode, then the twins if it is the mode of decode."""

    @functools.wraps(function)
    def capture(runner: Any, *args: Any, **kwargs: Any) -> Any:
        descriptors = list(argument((runner, *args), kwargs, 1, "batch_descriptors") or ())
        mode = argument((runner, *args), kwargs, 2, "cudagraph_runtime_mode")
        graph_mode = _MODES.get(getattr(mode, "name", ""))
        if graphs.timing is GraphTiming.INPLACE and graph_mode is not None:
            with graphs.instrumented("capture in place"):
                result = function(runner, *args, **kwargs)
            for owner, attribute in _piece_owners(mode):
                graphs.adopt(owner, attribute, graph_mode)
            return result
        result = function(runner, *args, **kwargs)
        try:
            if graphs.timing is GraphTiming.TWIN and graph_mode is not None:
                _capture_runner_twins(function, graphs, runner, descriptors, mode, args, kwargs)
        except Exception:
            logger.exception("K25: twin graphs could not be captured; graph steps are not timed")
        return result

    return capture


def _capture_runner_twins(
    function: Function, graphs: TimedGraphs, runner: Any, descriptors: list[Any], mode: Any, args: Any, kwargs: Any
) -> None:
    if mode != _decode_mode(runner.compilation_config):
        return
    wanted = [d for d in descriptors if graphs.wanted(d.num_tokens)]
    rest = {
        name: value for name, value in kwargs.items() if name not in ("batch_descriptors", "cudagraph_runtime_mode")
    }

    def capture_one(descriptor: Any) -> None:
        function(runner, [descriptor], mode, *args[2:], **rest)

    graphs.capture_twins(_piece_owners(mode), wanted, capture_one, _MODES[mode.name])


# --- replay ------------------------------------------------------------------------------------------------


def _manager_replay(function: Function, graphs: TimedGraphs) -> Function:
    @functools.wraps(function)
    def run_fullgraph(manager: Any, desc: Any, *args: Any, **kwargs: Any) -> Any:
        if graphs.replays_twins and graphs.has_twin(manager, desc):
            with graphs.replaying(manager, "graphs"):
                return function(manager, desc, *args, **kwargs)
        return function(manager, desc, *args, **kwargs)

    return run_fullgraph


def _wrapper_call(attribute: str) -> Callable[[Function, TimedGraphs], Function]:
    def make(function: Function, graphs: TimedGraphs) -> Function:
        @functools.wraps(function)
        def call(wrapper: Any, *args: Any, **kwargs: Any) -> Any:
            if graphs.replays_twins and graphs.has_twin(wrapper, _descriptor_in_context()):
                with graphs.replaying(wrapper, attribute):
                    return function(wrapper, *args, **kwargs)
            return function(wrapper, *args, **kwargs)

        return call

    return make


def _descriptor_in_context() -> Any:
    from vllm.forward_context import get_forward_context, is_forward_context_available

    return get_forward_context().batch_descriptor if is_forward_context_available() else None


# --- memory and end ----------------------------------------------------------------------------------------


def _profile_memory(function: Function, graphs: TimedGraphs) -> Function:
    """What vLLM sets aside for its graphs must hold the twins as well."""

    @functools.wraps(function)
    def profile_cudagraph_memory(runner: Any, *args: Any, **kwargs: Any) -> Any:
        estimate = function(runner, *args, **kwargs)
        try:
            if graphs.timing is GraphTiming.TWIN and isinstance(estimate, int) and estimate > 0:
                twins = _estimate_twins(graphs, runner, estimate)
                logger.info("K25: setting aside %.0f MiB of GPU memory for twin graphs", twins / (1024 * 1024))
                return estimate + twins
        except Exception:
            logger.exception("K25: cannot estimate the memory of twin graphs")
        return estimate

    return profile_cudagraph_memory


_MIN_GRAPH_BYTES: Final = 1024 * 1024
"""vLLM's own floor for what the driver keeps per graph."""


def _estimate_twins(graphs: TimedGraphs, runner: Any, estimate: int) -> int:
    """Bytes: number of twins times what one graph was measured to cost, else their share of vLLM's own estimate.

    The share is an upper bound, since twins live in the same pool and share the activations.
    """
    mode = _decode_mode(runner.compilation_config)
    manager = getattr(runner, "cudagraph_manager", None)
    by_mode = dict(runner.cudagraph_dispatcher.get_capture_descs()) if manager is None else manager._capture_descs
    total = sum(len(descriptors) for descriptors in by_mode.values())
    twins = sum(graphs.wanted(d.num_tokens) for d in by_mode.get(mode, ()))
    if graphs.profiled_bytes_per_graph:
        return twins * max(graphs.profiled_bytes_per_graph, _MIN_GRAPH_BYTES)
    return estimate * twins // max(total, 1)


def _release(function: Function, graphs: TimedGraphs) -> Function:
    @functools.wraps(function)
    def release(*args: Any, **kwargs: Any) -> Any:
        graphs.drop()
        return function(*args, **kwargs)

    return release


def _point(
    name: str, module: str, target: str, versions: str, make: Callable[[Function, TimedGraphs], Function]
) -> HookPoint:
    return HookPoint(name, HookKind.GRAPHS, module, target, versions=versions, graphs=make)


GRAPH_POINTS: Final = (
    _point("graph_capture", _MANAGER_MODULE, "CudaGraphManager.capture", ">=0.20", _manager_capture),
    _point("graph_capture", _V1, "GPUModelRunner._capture_cudagraphs", ">=0.20", _runner_capture),
    _point("graph_replay", _MANAGER_MODULE, "CudaGraphManager.run_fullgraph", ">=0.20", _manager_replay),
    _point(
        "graph_replay",
        _WRAPPER_MODULE,
        "CUDAGraphWrapper.__call__",
        "",
        _wrapper_call("concrete_cudagraph_entries"),
    ),
    _point("graph_replay", _BREAKABLE_MODULE, "BreakableCUDAGraphWrapper.__call__", ">=0.22", _wrapper_call("entries")),
    _point("graph_memory", _V1, "GPUModelRunner.profile_cudagraph_memory", ">=0.20", _profile_memory),
    _point("graph_memory", _V2, "GPUModelRunner.profile_cudagraph_memory", ">=0.20", _profile_memory),
    _point("graph_release", _MANAGER_MODULE, "CudaGraphManager.release_graphs", ">=0.32", _release),
    _point("graph_release", _WRAPPER_MODULE, "CUDAGraphWrapper.clear_graphs", ">=0.18", _release),
    _point("graph_release", _BREAKABLE_MODULE, "BreakableCUDAGraphWrapper.clear_graphs", ">=0.22", _release),
)
