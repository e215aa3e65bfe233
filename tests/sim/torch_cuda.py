"""Puts a simulated GPU in the place of the device behind `torch.cuda`.

`torch.cuda.graph`, the context manager, stays PyTorch's own: it runs over the simulated parts.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

import pytest
import torch

from tests.sim.gpu import SimulatedGpu
from tests.sim.streams import Stream


class StreamContext:
    """`torch.cuda.stream`: a class as there, since a context that is never left must not be left by the collector."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream
        self._before: Any = None

    def __enter__(self) -> None:
        if self.stream is not None:
            self._before = torch.cuda.current_stream()
            torch.cuda.set_stream(self.stream)

    def __exit__(self, *_: object) -> None:
        if self.stream is not None:
            torch.cuda.set_stream(self._before)


def install(monkeypatch: pytest.MonkeyPatch, gpu: SimulatedGpu | None = None, **options: Any) -> SimulatedGpu:
    """Let `torch.cuda` and `torch.accelerator` mean `gpu` until `monkeypatch` is undone; returns the GPU.

    `options` are those of `SimulatedGpu`, for a new one. Where vLLM's modules are loaded, its own idea of the current
    stream follows, and as on CUDA that is a stream of its own, never the default one.
    """
    gpu = gpu or SimulatedGpu(**options)

    def stream_of(stream: Any) -> Stream:
        return gpu.Stream(state=stream.state)

    def current_stream(device: object = None) -> Stream:
        return gpu.Stream(state=gpu.current)

    def set_stream(stream: Any) -> None:
        if stream is not None:
            gpu.current = stream.state

    def mem_get_info(device: object = None) -> tuple[int, int]:
        return gpu.memory.free, gpu.memory.total

    # vLLM's own `set_stream` remembers the current stream and then calls the one that it found.
    vllm_utils = sys.modules.get("vllm.utils.torch_utils")
    if vllm_utils is not None and torch.cuda.set_stream is vllm_utils._patched_set_stream:
        monkeypatch.setattr(vllm_utils, "prev_set_stream", set_stream)
    else:
        monkeypatch.setattr(torch.cuda, "set_stream", set_stream)

    cuda = {
        "CUDAGraph": gpu.CUDAGraph,
        "Event": gpu.Event,
        "Stream": gpu.Stream,
        "current_device": lambda: 0,
        "current_stream": current_stream,
        "default_stream": lambda device=None: gpu.Stream(state=gpu.default),
        "device_count": lambda: 1,
        "empty_cache": gpu.empty_cache,
        "graph_pool_handle": lambda: gpu.memory.new_pool_id(user_created=True),
        "is_available": lambda: True,
        "is_current_stream_capturing": gpu.is_current_stream_capturing,
        "is_initialized": lambda: True,
        "max_memory_allocated": lambda device=None: gpu.memory.peak_allocated,
        "max_memory_reserved": lambda device=None: gpu.memory.peak_reserved,
        "mem_get_info": mem_get_info,
        "memory_allocated": lambda device=None: gpu.memory.allocated,
        "memory_reserved": lambda device=None: gpu.memory.reserved,
        "memory_stats": lambda device=None: gpu.memory.stats(),
        "StreamContext": StreamContext,
        "stream": StreamContext,
        "synchronize": gpu.synchronize,
    }
    for name, value in cuda.items():
        monkeypatch.setattr(torch.cuda, name, value)
    for module, names in {
        "torch.cuda.graphs": ("CUDAGraph", "graph_pool_handle", "is_current_stream_capturing"),
        "torch.cuda.streams": ("Event", "Stream"),
        "torch.cuda.memory": ("empty_cache", "mem_get_info", "memory_allocated", "memory_reserved", "memory_stats"),
    }.items():
        for name in names:
            monkeypatch.setattr(importlib.import_module(module), name, cuda[name])
    monkeypatch.setattr(torch.cuda.graph, "default_capture_stream", None)
    for name, value in {
        "_host_emptyCache": lambda: None,
        "_cuda_endAllocateToPool": lambda device, pool: gpu.memory.end_recording(tuple(pool)),
        "_cuda_releasePool": lambda device, pool: gpu.memory.release(tuple(pool)),
    }.items():
        monkeypatch.setattr(torch._C, name, value, raising=False)
    for name, value in {
        "current_stream": current_stream,
        "empty_cache": gpu.empty_cache,
        "get_memory_info": mem_get_info,
        "memory_allocated": cuda["memory_allocated"],
        "memory_reserved": cuda["memory_reserved"],
        "memory_stats": cuda["memory_stats"],
        "set_stream": lambda stream: torch.cuda.set_stream(stream_of(stream)),
        "synchronize": gpu.synchronize,
    }.items():
        monkeypatch.setattr(torch.accelerator, name, value, raising=False)

    if vllm_utils is not None:
        _install_in_vllm(monkeypatch, gpu, vllm_utils)
    return gpu


def _install_in_vllm(monkeypatch: pytest.MonkeyPatch, gpu: SimulatedGpu, vllm_utils: Any) -> None:
    """What vLLM decides by the platform, which on the test machine is the CPU."""
    own = gpu.Stream()
    monkeypatch.setattr(vllm_utils._current_stream_tls, "value", own, raising=False)
    gpu.current = own.state
    from vllm.platforms import current_platform

    platform = type(current_platform)
    monkeypatch.setattr(
        platform, "graph_pool_handle", staticmethod(lambda: torch.cuda.graph_pool_handle()), raising=False
    )
    monkeypatch.setattr(platform, "_global_graph_pool", None)
    # Weak references only matter for memory; the operator exists in the CUDA build only.
    for module in ("vllm.compilation.cuda_graph", "vllm.compilation.breakable_cudagraph"):
        if module in sys.modules:
            monkeypatch.setattr(sys.modules[module], "weak_ref_tensors", lambda tensors: tensors)
    if "vllm.compilation.breakable_cudagraph" in sys.modules:
        monkeypatch.setattr(
            sys.modules["vllm.compilation.breakable_cudagraph"], "weak_ref_tensor", lambda tensor: tensor
        )
