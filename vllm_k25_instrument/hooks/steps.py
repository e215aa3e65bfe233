"""Hook points of the model runners (V1, and V2, the default since 0.3x): the step and what frames the model."""

from __future__ import annotations

from typing import Final

from vllm_k25_instrument.hooks.point import HookKind, HookPoint
from vllm_k25_instrument.model import Category

_V1: Final = "vllm.v1.worker.gpu_model_runner"
_V2: Final = "vllm.v1.worker.gpu.model_runner"


def _inputs(module: str, method: str, versions: str = "") -> HookPoint:
    return HookPoint(
        "input_preparation",
        HookKind.RANGE,
        module,
        f"GPUModelRunner.{method}",
        versions=versions,
        category=Category.INPUT_PREPARATION,
        subclasses=True,
    )


def _sampling(module: str, method: str) -> HookPoint:
    return HookPoint(
        "sampling", HookKind.RANGE, module, f"GPUModelRunner.{method}", category=Category.SAMPLING, subclasses=True
    )


STEP_POINTS: Final = tuple(
    point
    for module in (_V1, _V2)
    for point in (
        HookPoint("step", HookKind.STEP, module, "GPUModelRunner.execute_model", subclasses=True),
        HookPoint("step_sampling", HookKind.STEP_SAMPLING, module, "GPUModelRunner.sample_tokens", subclasses=True),
    )
)

FRAME_POINTS: Final = (
    HookPoint("idle", HookKind.IDLE, "vllm.distributed.device_communicators.shm_broadcast", "MessageQueue.dequeue"),
    HookPoint(
        "graph_dispatch",
        HookKind.GRAPH_DISPATCH,
        _V1,
        "GPUModelRunner._determine_batch_execution_and_padding",
        subclasses=True,
    ),
    # The runner's own reference to the function: patching the defining module would come too late.
    HookPoint("graph_dispatch", HookKind.GRAPH_DISPATCH, _V2, "dispatch_cg_and_sync_dp", ">=0.20"),
    _inputs(_V1, "_update_states"),
    _inputs(_V1, "_prepare_inputs"),
    _inputs(_V1, "_build_attention_metadata"),
    _inputs(_V1, "_preprocess"),
    _inputs(_V2, "add_requests", ">=0.15"),
    _inputs(_V2, "update_requests", ">=0.15"),
    _inputs(_V2, "gather_batch_req_state", ">=0.28"),
    _inputs(_V2, "prepare_inputs"),
    _inputs(_V2, "prepare_attn", ">=0.17"),
    _sampling(_V1, "_sample"),
    _sampling(_V2, "sample"),
)
