"""Hook points of the mixture-of-experts layers: routing, routed experts, shared experts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from vllm_k25_instrument.hooks.arguments import argument, class_name, layer_number, own_layer
from vllm_k25_instrument.hooks.point import Args, HookKind, HookPoint, Kwargs
from vllm_k25_instrument.model import Category

_MOE: Final = "vllm.model_executor.layers.fused_moe"
_UNQUANTIZED: Final = f"{_MOE}.unquantized_fused_moe_method"


def _experts_backend(args: Args, kwargs: Kwargs) -> str:
    """The class that computes the experts (``MarlinExperts``), or the quantization method's where it does so itself."""
    method = args[0]
    kernel = getattr(method, "moe_kernel", None)
    if kernel is None:
        kernel = getattr(method, "moe_mk", None) or getattr(method, "kernel", None)  # in 0.16; in 0.15
    experts = getattr(kernel, "fused_experts", None)
    return type(method if experts is None else experts).__name__


def _layer(module: str, target: str, versions: str, layer: Callable[[Args, Kwargs], int]) -> HookPoint:
    return HookPoint("layer", HookKind.LAYER, f"{_MOE}.{module}", target, versions, layer=layer)


def _layer_argument(args: Args, kwargs: Kwargs) -> int:
    return layer_number(getattr(argument(args, kwargs, 1, "layer"), "layer_name", ""))


def _shared_experts_first(args: Args, kwargs: Kwargs) -> Any:
    return argument(args, kwargs, 1, "layer", "shared_experts")


def _shared_experts_by_name(args: Args, kwargs: Kwargs) -> Any:
    return kwargs.get("shared_experts")


def _shared(
    module: str, cls: str, versions: str, find: Callable[[Args, Kwargs], Any] = _shared_experts_first
) -> HookPoint:
    return HookPoint(
        "moe_shared_experts",
        HookKind.SHARED_EXPERTS,
        f"{_MOE}.{module}",
        f"{cls}.__init__",
        versions=versions,
        category=Category.MOE_SHARED_EXPERTS,
        detail=class_name,
        inherits_layer=True,
        shared_experts=find,
    )


def _experts(module: str, cls: str, method: str, versions: str = "", *, subclasses: bool = False) -> HookPoint:
    return HookPoint(
        "moe_experts",
        HookKind.RANGE,
        module,
        f"{cls}.{method}",
        versions=versions,
        category=Category.MOE_EXPERTS,
        subclasses=subclasses,
        detail=_experts_backend,
        layer=_layer_argument,
    )


MOE_POINTS: Final = (
    _layer("runner.moe_runner", "MoERunner._forward_impl", ">=0.20", own_layer),
    _layer("runner.default_moe_runner", "DefaultMoERunner.forward_impl", ">=0.17,<0.20", _layer_argument),
    _layer("layer", "FusedMoE.forward_impl", ">=0.15,<0.17", own_layer),
    # Every quantization method, CompressedTensorsWNA16MoEMethod (Kimi-K2.5's) and its predecessor
    # CompressedTensorsWNA16MarlinMoEMethod among them.
    _experts(f"{_MOE}.fused_moe_method_base", "FusedMoEMethodBase", "apply", subclasses=True),
    _experts(f"{_MOE}.fused_moe_method_base", "FusedMoEMethodBase", "apply_monolithic", ">=0.15", subclasses=True),
    # Put over apply_monolithic in every instance, from where it hides what is wrapped in the class.
    _experts(_UNQUANTIZED, "UnquantizedFusedMoEMethod", "forward_monolithic_cuda", ">=0.16,<0.20"),
    _experts(_UNQUANTIZED, "UnquantizedFusedMoEMethod", "forward_monolithic_cpu", ">=0.16,<0.20"),
    HookPoint(
        "moe_routing",
        HookKind.RANGE,
        f"{_MOE}.router.fused_moe_router",
        "FusedMoERouter.select_experts",
        versions=">=0.15",
        category=Category.MOE_ROUTING,
        subclasses=True,
        detail=class_name,
        inherits_layer=True,
    ),
    _shared("runner.shared_experts", "SharedExperts", ">=0.20"),
    # The layer itself: the last of eighteen parameters, or thereabouts.
    _shared("layer", "FusedMoE", ">=0.17,<0.20", _shared_experts_by_name),
    _shared("shared_fused_moe", "SharedFusedMoE", ">=0.15,<0.17"),
)
