"""A vLLM plugin of the demo and the tests: lets vLLM's CPU build serve a Kimi-K2.5-shaped INT4 model.

vLLM's CPU experts (`CPUExpertsInt4`) refuse INT4 weights in groups of 32, DeepSeek-V3 routing, and processors without
AMX, though their kernel computes all three right. This lifts those refusals. Where the kernel itself is missing
(it is built for processors with AVX-512 BF16 only), the experts are dequantized and computed with plain torch.

It also adds what expert parallelism needs and that build lacks: its experts crash on a token whose expert is another
rank's, and its communicator cannot gather batches of different sizes.

With ``K25_DEMO_OPAQUE_OPS=1`` it also makes the compiled CPU model behave as the CUDA one does: MoE and all-reduce
stay opaque custom operators, whose Python bodies run at run time, instead of being traced into the graph.

Nobody meets this by accident: the module lies in a folder that is on the path only of servers which the demo and
the tests start. Everything is wrapped, nothing replaced, since other plugins wrap the same functions; and nothing is
imported early, so that those see vLLM's modules arrive in their usual order.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from typing import Any, Final

import wrapt

_CPU_MOE: Final = "vllm.model_executor.layers.fused_moe.experts.cpu_moe"
_MOE_RUNNER: Final = "vllm.model_executor.layers.fused_moe.runner.moe_runner"
_CPU_PLATFORM: Final = "vllm.platforms.cpu"
_CPU_COMMUNICATOR: Final = "vllm.distributed.device_communicators.cpu_communicator"

_Wrapped = Callable[..., Any]
_Arguments = tuple[Any, ...]
_Keywords = dict[str, Any]

_registered = False


def register() -> None:
    """Entry point of ``vllm.general_plugins``; a second call changes nothing."""
    global _registered
    if _registered:
        return
    _registered = True
    wrapt.register_post_import_hook(_allow_int4_experts, _CPU_MOE)
    wrapt.register_post_import_hook(_allow_experts_elsewhere, _CPU_MOE)
    wrapt.register_post_import_hook(_add_ragged_collectives, _CPU_COMMUNICATOR)
    if os.environ.get("K25_DEMO_OPAQUE_OPS") == "1":
        wrapt.register_post_import_hook(_keep_moe_opaque, _MOE_RUNNER)
        wrapt.register_post_import_hook(_use_custom_op_collectives, _CPU_PLATFORM)
        wrapt.register_post_import_hook(_reduce_a_copy, _CPU_COMMUNICATOR)


# --- the INT4 experts ------------------------------------------------------------------------------------


def _allow_int4_experts(module: Any) -> None:
    from vllm.model_executor.layers.quantization.utils.quant_utils import kInt4Static, kInt4Static32

    def supports_quant_scheme(wrapped: _Wrapped, _: Any, args: _Arguments, kwargs: _Keywords) -> bool:
        weight_key, activation_key = _two("weight_key", "activation_key", args, kwargs)
        weight_only = weight_key in (kInt4Static, kInt4Static32) and activation_key is None
        return bool(weight_only or wrapped(*args, **kwargs))

    def supports_routing_method(wrapped: _Wrapped, _: Any, args: _Arguments, kwargs: _Keywords) -> bool:
        # The router has chosen the experts before these are called: the method does not matter to them.
        wrapped(*args, **kwargs)
        return True

    def supports_current_device(wrapped: _Wrapped, _: Any, args: _Arguments, kwargs: _Keywords) -> bool:
        wrapped(*args, **kwargs)
        return True

    experts = "CPUExpertsInt4"
    wrapt.wrap_function_wrapper(module, f"{experts}._supports_quant_scheme", supports_quant_scheme)
    wrapt.wrap_function_wrapper(module, f"{experts}._supports_routing_method", supports_routing_method)
    wrapt.wrap_function_wrapper(module, f"{experts}._supports_current_device", supports_current_device)
    # The same kernel computes FP8 experts, which a test serves.
    wrapt.wrap_function_wrapper(module, "CPUExpertsFp8._supports_routing_method", supports_routing_method)
    wrapt.wrap_function_wrapper(module, "CPUExpertsFp8._supports_current_device", supports_current_device)
    if not _has_int4_kernel():
        wrapt.wrap_function_wrapper(module, "prepare_int4_moe_layer_for_cpu", _prepare_in_torch)
        wrapt.wrap_function_wrapper(module, f"{experts}.apply", _apply_in_torch)


def _two(first: str, second: str, args: _Arguments, kwargs: _Keywords) -> tuple[Any, Any]:
    return (
        args[0] if args else kwargs.get(first),
        args[1] if len(args) > 1 else kwargs.get(second),
    )


def _has_int4_kernel() -> bool:
    import torch

    return hasattr(torch.ops._C, "fused_experts_cpu")


def dequantize_int4(packed: Any, scale: Any) -> Any:
    """[E, in / 8, out] int32 and [E, groups, out] scales -> [E, out, in] bfloat16. Symmetric: nibble - 8."""
    import torch

    experts, rows, out_features = packed.shape
    shifts = torch.arange(0, 32, 4, dtype=torch.int32).view(1, 1, 8, 1)
    nibbles = (packed.unsqueeze(2) >> shifts) & 0xF
    values = (nibbles - 8).reshape(experts, rows * 8, out_features).float()
    per_feature = scale.float().repeat_interleave(rows * 8 // scale.shape[1], dim=1)
    return (values * per_feature).transpose(1, 2).to(torch.bfloat16).contiguous()


def experts_in_torch(x: Any, w13: Any, w2: Any, topk_weights: Any, topk_ids: Any) -> Any:
    """Every expert on every token, weighted by what the router says; fine for a model this small.

    Shapes: x [M, K], w13 [E, 2 I, K] (gate, then up), w2 [E, K, I], both of topk [M, top-k]. Returns [M, K].
    """
    import torch

    gates = torch.zeros(x.shape[0], w13.shape[0], dtype=torch.float32)
    gates.scatter_add_(1, topk_ids.long(), topk_weights.float())
    gate, up = torch.einsum("mk,enk->emn", x, w13).chunk(2, dim=-1)
    each = torch.einsum("emi,eki->emk", torch.nn.functional.silu(gate) * up, w2)
    return torch.einsum("me,emk->mk", gates, each.float()).to(x.dtype)


def _prepare_in_torch(_wrapped: _Wrapped, _: Any, args: _Arguments, kwargs: _Keywords) -> _Arguments:
    import torch

    names = ("w13_packed", "w2_packed", "w13_scale", "w2_scale")
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    w13_packed, w2_packed, w13_scale, w2_scale = (given[name] for name in names)
    no_zero_points = torch.empty(0)
    return (
        dequantize_int4(w13_packed, w13_scale),
        dequantize_int4(w2_packed, w2_scale),
        w13_scale,
        w2_scale,
        no_zero_points,
        no_zero_points,
    )


def _apply_in_torch(_wrapped: _Wrapped, _: Any, args: _Arguments, kwargs: _Keywords) -> None:
    names = ("output", "hidden_states", "w1", "w2", "topk_weights", "topk_ids")
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    output, *rest = (given[name] for name in names)
    output.copy_(experts_in_torch(*rest))


# --- expert parallelism ----------------------------------------------------------------------------------


def _allow_experts_elsewhere(module: Any) -> None:
    for experts in ("CPUUnquantizedExperts", "CPUExpertsInt4"):
        wrapt.wrap_function_wrapper(module, f"{experts}.apply", _apply_own_experts)


def _apply_own_experts(wrapped: _Wrapped, _: Any, args: _Arguments, kwargs: _Keywords) -> Any:
    """Experts of other ranks are computed as the first of ours, with weight zero."""
    bound = inspect.signature(wrapped).bind(*args, **kwargs)
    given = bound.arguments
    if given["expert_map"] is not None:
        local = given["expert_map"][given["topk_ids"].long()]
        given["topk_ids"] = local.clamp(min=0).to(given["topk_ids"].dtype)
        given["topk_weights"] = given["topk_weights"].masked_fill(local < 0, 0)
        given["expert_map"] = None
    return wrapped(*bound.args, **bound.kwargs)


def _add_ragged_collectives(module: Any) -> None:
    module.CpuCommunicator.all_gatherv = _all_gatherv
    module.CpuCommunicator.reduce_scatterv = _reduce_scatterv


def _all_gatherv(self: Any, input_: Any, dim: int = 0, sizes: list[int] | None = None) -> Any:
    import torch

    if isinstance(input_, list):
        return [_all_gatherv(self, tensor, dim, sizes) for tensor in input_]
    shapes = [(size, *input_.shape[1:]) for size in sizes or [input_.shape[0]] * self.world_size]
    parts = [input_.new_empty(shape) for shape in shapes]
    # Gloo gathers equal sizes only, so each rank sends its own to all.
    for rank, part in enumerate(parts):
        if rank == self.rank_in_group:
            part.copy_(input_)
        torch.distributed.broadcast(part, src=self.ranks[rank], group=self.device_group)
    return torch.cat(parts, dim=dim)


def _reduce_scatterv(self: Any, input_: Any, dim: int = -1, sizes: list[int] | None = None) -> Any:
    import torch

    whole = input_.contiguous().clone()
    torch.distributed.all_reduce(whole, group=self.device_group)
    counts = sizes or [whole.shape[0] // self.world_size] * self.world_size
    begin = sum(counts[: self.rank_in_group])
    return whole[begin : begin + counts[self.rank_in_group]].clone()


# --- opaque operators, as on CUDA ------------------------------------------------------------------------


def _keep_moe_opaque(module: Any) -> None:
    import torch

    def select_forward(wrapped: _Wrapped, runner: Any, args: _Arguments, kwargs: _Keywords) -> Any:
        wrapped(*args, **kwargs)
        if runner._shared_experts is None:
            return torch.ops.vllm.moe_forward
        return torch.ops.vllm.moe_forward_shared

    wrapt.wrap_function_wrapper(module, "MoERunner._select_forward", select_forward)


def _use_custom_op_collectives(module: Any) -> None:
    def use_custom_op_collectives(wrapped: _Wrapped, _: Any, args: _Arguments, kwargs: _Keywords) -> bool:
        wrapped(*args, **kwargs)
        return True

    wrapt.wrap_function_wrapper(module, "CpuPlatform.use_custom_op_collectives", use_custom_op_collectives)


def _reduce_a_copy(module: Any) -> None:
    def all_reduce(wrapped: _Wrapped, _: Any, args: _Arguments, kwargs: _Keywords) -> Any:
        # It works in place, which as the body of a functional custom operator would corrupt the output silently.
        if args:
            return wrapped(args[0].clone(), *args[1:], **kwargs)
        return wrapped(**{**kwargs, "input_": kwargs["input_"].clone()})

    wrapt.wrap_function_wrapper(module, "CpuCommunicator.all_reduce", all_reduce)
