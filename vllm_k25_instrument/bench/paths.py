"""The ways vLLM has to all-reduce a tensor on this machine, and the one it takes. All on CUDA not yet run on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import torch

from vllm_k25_instrument.hooks.collectives import path_known_beforehand
from vllm_k25_instrument.model import AllReducePath

Reduce = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Path:
    """One way: `reduce` may work in place. `takes` says whether it does tensors like this one."""

    name: AllReducePath
    takes: Callable[[torch.Tensor], bool]
    reduce: Reduce


@dataclass(frozen=True, slots=True)
class _Communicator:
    """An attribute of vLLM's ``CudaCommunicator``: its question and its method."""

    name: AllReducePath
    attribute: str
    question: str | None
    method: str


_OF_CUDA: Final = (
    _Communicator(AllReducePath.CUSTOM, "ca_comm", "should_custom_ar", "custom_all_reduce"),
    _Communicator(AllReducePath.SYMM_MEM, "symm_mem_comm", "should_use_symm_mem", "all_reduce"),
    _Communicator(AllReducePath.QUICK_REDUCE, "qr_comm", "should_quick_allreduce", "quick_all_reduce"),
    _Communicator(AllReducePath.FLASHINFER, "fi_ar_comm", "should_use_fi_ar", "all_reduce"),
    _Communicator(AllReducePath.FLASHINFER_PCIE_IPC, "fi_pcie_ipc_ar_comm", "should_use", "all_reduce"),
    _Communicator(AllReducePath.AITER, "aiter_ar_comm", "should_custom_ar", "custom_all_reduce"),
    _Communicator(AllReducePath.PYNCCL, "pynccl_comm", None, "all_reduce"),
)
"""Of vLLM 0.32; what a release has not is left out."""


def find_paths(group: Any) -> tuple[Path, ...]:
    """Every path that the group's communicator has, switched on as this environment says."""
    communicator = group.device_communicator
    plain = Path(AllReducePath.TORCH_DISTRIBUTED, lambda tensor: True, _torch_distributed(group))
    if type(communicator).__name__ == "CpuCommunicator":
        known = AllReducePath(path_known_beforehand((communicator,), {}))
        own = Path(known, lambda tensor: True, communicator.all_reduce)
        return (plain,) if known is plain.name else (own, plain)
    return (*_of_cuda(communicator), plain)


def _of_cuda(communicator: Any) -> Iterator[Path]:
    for row in _OF_CUDA:
        found = getattr(communicator, row.attribute, None)
        if found is None or getattr(found, "disabled", False):
            continue
        question = (lambda tensor: True) if row.question is None else getattr(found, row.question)
        yield Path(row.name, question, getattr(found, row.method))
    if _has_symmetric_nccl():
        operator = torch.ops.vllm.all_reduce_symmetric_with_copy
        yield Path(AllReducePath.NCCL_SYMM_MEM, lambda tensor: True, operator)


def _has_symmetric_nccl() -> bool:
    try:
        from vllm.distributed.device_communicators.pynccl_allocator import is_symmetric_memory_enabled

        return bool(is_symmetric_memory_enabled()) and hasattr(torch.ops.vllm, "all_reduce_symmetric_with_copy")
    except (ImportError, AttributeError):
        return False


def _torch_distributed(group: Any) -> Reduce:
    def reduce(tensor: torch.Tensor) -> torch.Tensor:
        torch.distributed.all_reduce(tensor, group=group.device_group)
        return tensor

    return reduce


def taken_path(group: Any, tensor: torch.Tensor) -> AllReducePath:
    """The path that vLLM takes for a tensor like this one, found by letting it reduce one and watching.

    A collective call: all ranks make it.
    """
    communicator = group.device_communicator
    known = path_known_beforehand((communicator,), {})
    if known:
        return AllReducePath(known)
    with _watched(communicator) as seen:
        communicator.all_reduce(tensor.clone())
    return seen[-1] if seen else AllReducePath.TORCH_DISTRIBUTED


@contextmanager
def _watched(communicator: Any) -> Iterator[list[AllReducePath]]:
    """The names of the paths that return a result while this is open."""
    seen: list[AllReducePath] = []
    replaced: list[tuple[Any, str]] = []
    for row in _OF_CUDA:
        found = getattr(communicator, row.attribute, None)
        if found is not None:
            setattr(found, row.method, _telling(getattr(found, row.method), row.name, seen))
            replaced.append((found, row.method))
    try:
        yield seen
    finally:
        for found, method in replaced:
            delattr(found, method)


def _telling(method: Callable[..., Any], name: AllReducePath, seen: list[AllReducePath]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        result = method(*args, **kwargs)
        if result is not None:
            # As in the hooks: an output tensor is passed only where it lies in NCCL's symmetric memory.
            symmetric = name is AllReducePath.PYNCCL and (len(args) > 1 or "out_tensor" in kwargs)
            seen.append(AllReducePath.NCCL_SYMM_MEM if symmetric else name)
        return result

    return call
