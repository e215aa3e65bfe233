"""A tensor-parallel group of vLLM's, joined as its workers join theirs."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import torch

SHARED_MEMORY: Final = Path("/dev/shm")  # noqa: S108 - where POSIX shared memory is on Linux


def join_group(rank: int, ranks: int, meeting: Path, *, seconds: float) -> Any:
    """Join the group of `ranks` that meets in the file `meeting`, and return vLLM's ``GroupCoordinator`` of it.

    What ``init_worker_distributed_environment`` does of a worker, without a model. On CUDA rank n takes device n.
    """
    import vllm._custom_ops  # noqa: F401 - registers the operators, the CPU's shared memory among them
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed.parallel_state import (
        get_tp_group,
        init_distributed_environment,
        initialize_model_parallel,
    )
    from vllm.platforms import current_platform

    os.environ["VLLM_DIST_IDENT"] = shared_memory_name(meeting)  # as `CPUWorker` sets it
    if not current_platform.is_cpu():
        torch.cuda.set_device(rank)
    with set_current_vllm_config(VllmConfig()):
        init_distributed_environment(
            ranks,
            rank,
            f"file://{meeting}",
            rank,
            current_platform.dist_backend,
            timedelta(seconds=seconds),
        )
        initialize_model_parallel(ranks, 1)
    return get_tp_group()


def shared_memory_name(meeting: Path) -> str:
    """What the names of the CPU communicator's shared memory begin with: no two groups have the same."""
    return meeting.parent.name


def remove_shared_memory(meeting: Path, folder: Path = SHARED_MEMORY) -> None:
    """Remove what the CPU communicator leaves in /dev/shm: it never unlinks it."""
    for left in folder.glob(f"{shared_memory_name(meeting)}-*"):
        left.unlink(missing_ok=True)


def leave_group() -> None:
    """Take the group apart."""
    from vllm.distributed.parallel_state import destroy_distributed_environment, destroy_model_parallel

    destroy_model_parallel()
    destroy_distributed_environment()
