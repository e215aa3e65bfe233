"""Hook points of the mixture-of-experts layers: routing, routed experts, shared experts."""

from __future__ import annotations

from typing import Final

from vllm_k25_instrument.hooks.arguments import argument, class_name, layer_number, own_layer
from vllm_k25_instrument.hooks.point import Args, HookKind, HookPoint, Kwargs
from vllm_k25_instrument.model import Category

_MOE: Final = "vllm.model_executor.layers.fused_moe"


def _experts_backend(args: Args, kwargs: Kwargs) -> str:
    """The class that computes the experts (``MarlinExperts``), or the quantization method's where it does so itself."""
    method = args[0]
    experts = getattr(getattr(method, "moe_kernel", None), "fused_experts", None)
    return type(method if experts is None else experts).__name__


def _layer_argument(args: Args, kwargs: Kwargs) -> int:
    return layer_number(getattr(argument(args, kwargs, 1, "layer"), "layer_name", ""))


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
    HookPoint(
        "layer", HookKind.LAYER, f"{_MOE}.runner.moe_runner", "MoERunner._forward_impl", ">=0.20", layer=own_layer
    ),
    # Every quantization method, CompressedTensorsWNA16MoEMethod (Kimi-K2.5's) and its predecessor
    # CompressedTensorsWNA16MarlinMoEMethod among them.
    _experts(f"{_MOE}.fused_moe_method_base", "FusedMoEMethodBase", "apply", subclasses=True),
    _experts(f"{_MOE}.fused_moe_method_base", "FusedMoEMethodBase", "apply_monolithic", ">=0.15", subclasses=True),
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
    HookPoint(
        "moe_shared_experts",
        HookKind.SHARED_EXPERTS,
        f"{_MOE}.runner.shared_experts",
        "SharedExperts.__init__",
        versions=">=0.20",
        category=Category.MOE_SHARED_EXPERTS,
        detail=class_name,
        inherits_layer=True,
    ),
)
