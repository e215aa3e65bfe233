"""The releases of vLLM that the hook table is checked against, and what is not hooked in some of them, and why."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

MATRIX: Final = (
    "0.15.1",
    "0.16.0",
    "0.18.1",
    "0.20.2",
    "0.22.1",
    "0.24.0",
    "0.26.0",
    "0.28.0",
    "0.30.0",
    "0.32.0",
    "0.33.0",
)
"""The two oldest supported releases, then every second minor, to the newest. `docs/compatibility.md` is about these."""

BETWEEN: Final = (
    "0.15.0",
    "0.17.0",
    "0.17.1",
    "0.18.0",
    "0.19.0",
    "0.19.1",
    "0.20.0",
    "0.21.0",
    "0.22.0",
    "0.23.0",
    "0.25.0",
    "0.25.1",
    "0.27.1",
    "0.29.0",
    "0.31.0",
)
"""Releases that bounds in the table lie between: with them a bound is checked to the minor, not to two of them."""

NEWEST: Final = MATRIX[-1]


@dataclass(frozen=True, slots=True)
class Absence:
    """What is not hooked in some releases, and why.

    `what` is a category, a hook, or one target (`HookPoint.id`) that the tree has and the table leaves alone.
    """

    what: str
    versions: str
    reason: str


_TIMED_GRAPHS: Final = "CUDA graphs are not timed there: steps that replay one have a duration only"
_GRAPHS: Final = "vllm.v1.worker.gpu.cudagraph_utils:CudaGraphManager"

ABSENCES: Final = (
    Absence(
        "attention", "<0.16", "the common base of the backends is the MLA backends' too; attention is unattributed"
    ),
    Absence("broadcast", "<0.17", "the device communicator has no broadcast; it goes to torch.distributed directly"),
    Absence("graph_capture", "<0.20", _TIMED_GRAPHS),
    Absence("graph_memory", "<0.20", "no twin graphs are made, so no memory is set aside for them"),
    Absence("graph_release", "<0.18", "nothing drops captured graphs"),
    Absence(f"{_GRAPHS}.capture", "<0.20", _TIMED_GRAPHS),
    Absence(f"{_GRAPHS}.run_fullgraph", "<0.20", _TIMED_GRAPHS),
    Absence("vllm.v1.worker.gpu_model_runner:GPUModelRunner._capture_cudagraphs", "<0.20", _TIMED_GRAPHS),
    Absence("vllm.v1.worker.gpu_model_runner:GPUModelRunner.profile_cudagraph_memory", "<0.20", _TIMED_GRAPHS),
    Absence("vllm.v1.worker.gpu.model_runner:GPUModelRunner.profile_cudagraph_memory", "<0.20", _TIMED_GRAPHS),
    Absence(
        "vllm.v1.attention.backend:AttentionImpl.forward",
        "<0.16",
        "the common base of the backends is the MLA backends' too; attention is unattributed",
    ),
    Absence(
        "vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method:"
        "UnquantizedFusedMoEMethod.forward_monolithic_cpu",
        "<0.16",
        "apply_monolithic is the same function in the class, and hooked",
    ),
    Absence(
        "vllm.model_executor.layers.fused_moe.layer:FusedMoE.__init__",
        "<0.17",
        "shared experts come with SharedFusedMoE, which is hooked",
    ),
    Absence(
        "vllm.model_executor.layers.fused_moe.layer:FusedMoE.__init__",
        ">=0.20",
        "shared experts are wrapped in SharedExperts, which is hooked",
    ),
    Absence(
        "vllm.model_executor.layers.fused_moe.shared_fused_moe:SharedFusedMoE.__init__",
        ">=0.17",
        "FusedMoE takes the shared experts, and is hooked",
    ),
    Absence(
        "vllm.v1.attention.backend:SparseMLAAttentionImpl.forward_mqa",
        ">=0.26",
        "a subclass of MLAAttentionImpl, whose hook reaches it",
    ),
    Absence(
        "vllm.model_executor.layers.attention.mla_attention:MLACommonImpl.forward",
        ">=0.16",
        "the layer calls forward_mqa and forward_mha, which are hooked",
    ),
)
