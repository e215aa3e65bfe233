"""Hook points of the collectives.

The all-reduce itself is hooked where every platform passes: at the device communicator. Which of its paths
a call takes depends on the tensor, so the paths report themselves from inside.
"""

from __future__ import annotations

from typing import Final

from vllm_k25_instrument.hooks.arguments import argument, message_bytes
from vllm_k25_instrument.hooks.point import Args, HookKind, HookPoint, Kwargs
from vllm_k25_instrument.model import AllReducePath, Category

_COMMUNICATORS: Final = "vllm.distributed.device_communicators"
_BASE: Final = f"{_COMMUNICATORS}.base_device_communicator"


def path_known_beforehand(args: Args, kwargs: Kwargs) -> str:
    """The path where the communicator has one only; "" where it picks one per tensor and a PATH hook will tell."""
    kind = type(args[0]).__name__
    if kind == "CpuCommunicator":
        shared_memory = type(args[0].dist_module).__name__ == "_CPUSHMDistributed"
        return "cpu_shm" if shared_memory else "torch_distributed"
    return "" if kind == "CudaCommunicator" else "torch_distributed"


def _pynccl_path(args: Args, kwargs: Kwargs) -> AllReducePath:
    """An output tensor is passed only where it lies in NCCL's symmetric memory."""
    symmetric = argument(args, kwargs, 2, "out_tensor") is not None
    return AllReducePath.NCCL_SYMM_MEM if symmetric else AllReducePath.PYNCCL


def _received_bytes(args: Args, kwargs: Kwargs) -> int:
    """Bytes of a pipeline stage's inputs. Reading the attribute `tensors` would wait for them."""
    return sum(tensor.nbytes for tensor in vars(args[0])["tensors"].values())


def _path(module: str, target: str, path: AllReducePath, versions: str = "") -> HookPoint:
    return HookPoint(
        "all_reduce_path",
        HookKind.PATH,
        f"{_COMMUNICATORS}.{module}",
        target,
        versions=versions,
        path=lambda args, kwargs: path,
        none_is_refusal=True,
    )


def _collective(name: str, method: str, versions: str = "") -> HookPoint:
    return HookPoint(
        name,
        HookKind.RANGE,
        _BASE,
        f"DeviceCommunicatorBase.{method}",
        versions=versions,
        category=Category.COLLECTIVE,
        subclasses=True,
        detail=lambda args, kwargs: method,
        nbytes=message_bytes,
        # Of these only the experts' exchange is certain to belong to the layer seen last.
        inherits_layer=name in ("moe_dispatch", "moe_combine"),
    )


COLLECTIVE_POINTS: Final = (
    HookPoint(
        "all_reduce",
        HookKind.RANGE,
        _BASE,
        "DeviceCommunicatorBase.all_reduce",
        category=Category.ALL_REDUCE,
        subclasses=True,
        detail=path_known_beforehand,
        nbytes=message_bytes,
        inherits_layer=True,
    ),
    HookPoint(
        "all_reduce_path",
        HookKind.PATH,
        f"{_COMMUNICATORS}.pynccl",
        "PyNcclCommunicator.all_reduce",
        path=_pynccl_path,
        none_is_refusal=True,
    ),
    _path("custom_all_reduce", "CustomAllreduce.custom_all_reduce", AllReducePath.CUSTOM),
    _path("symm_mem", "SymmMemCommunicator.all_reduce", AllReducePath.SYMM_MEM),
    _path("quick_all_reduce", "QuickAllReduce.quick_all_reduce", AllReducePath.QUICK_REDUCE),
    _path("flashinfer_all_reduce", "FlashInferAllReduce.all_reduce", AllReducePath.FLASHINFER, ">=0.17"),
    _path(
        "flashinfer_pcie_ipc_all_reduce",
        "FlashInferPcieIpcAllReduce.all_reduce",
        AllReducePath.FLASHINFER_PCIE_IPC,
        ">=0.30",
    ),
    _path("aiter_custom_all_reduce", "AiterCustomAllreduce.custom_all_reduce", AllReducePath.AITER, ">=0.25"),
    _collective("all_gather", "all_gather"),
    _collective("all_gather", "all_gatherv"),
    _collective("reduce_scatter", "reduce_scatter"),
    _collective("reduce_scatter", "reduce_scatterv"),
    _collective("reduce_scatter", "reduce_scatterv_into_output", ">=0.32"),
    _collective("gather", "gather"),
    _collective("broadcast", "broadcast", ">=0.17"),
    _collective("send_recv", "send"),
    _collective("send_recv", "recv"),
    # Between pipeline stages: what a stage waits for, and receives, in the step that needs it.
    HookPoint(
        "send_recv",
        HookKind.RANGE,
        "vllm.v1.worker.gpu_worker",
        "AsyncIntermediateTensors.wait_for_comm",
        versions=">=0.17",
        category=Category.COLLECTIVE,
        detail=lambda args, kwargs: "pipeline recv",
        nbytes=_received_bytes,
    ),
    # Between data-parallel ranks, before each step: the batch size and graph mode that they agree on.
    *(
        HookPoint(
            "dp_sync",
            HookKind.RANGE,
            module,
            function,
            versions=versions,
            category=Category.COLLECTIVE,
            detail=lambda args, kwargs: "dp_sync",
        )
        for module, function, versions in (
            ("vllm.v1.worker.dp_utils", "_run_ar", ""),
            ("vllm.v1.worker.gpu.dp_utils", "sync_cudagraph_and_dp_padding", ">=0.18"),
        )
    ),
    _collective("moe_dispatch", "dispatch"),
    _collective("moe_dispatch", "dispatch_router_logits", ">=0.16"),
    _collective("moe_combine", "combine"),
    _collective("moe_combine", "combine_into_output", ">=0.32"),
    # Kernels that dispatch and combine by themselves, without passing the device communicator. These calls launch the
    # exchange; what waits for it afterwards is in the range around them, the experts'.
    *(
        HookPoint(
            name,
            HookKind.RANGE,
            f"vllm.model_executor.layers.fused_moe.{module}",
            f"{cls}.{method}",
            versions=versions,
            category=Category.COLLECTIVE,
            detail=lambda args, kwargs: type(args[0]).__name__,
            nbytes=message_bytes,
            inherits_layer=True,
        )
        for module, cls, versions in (
            ("prepare_finalize.deepep_ht", "DeepEPHTPrepareAndFinalize", ">=0.19"),
            ("prepare_finalize.deepep_ll", "DeepEPLLPrepareAndFinalize", ">=0.19"),
            ("deepep_ht_prepare_finalize", "DeepEPHTPrepareAndFinalize", ">=0.15,<0.19"),
            ("deepep_ll_prepare_finalize", "DeepEPLLPrepareAndFinalize", ">=0.15,<0.19"),
        )
        for name, method in (("moe_dispatch", "prepare_async"), ("moe_combine", "finalize_async"))
    ),
)
