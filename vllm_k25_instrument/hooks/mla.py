"""Hook points of MLA attention: decode (MQA over the latent cache) and prefill (MHA), of every backend.

The range is the backend's own kernel work. The query absorption before it and the value projection after it are
matrix products that vLLM runs outside the backend; they stay unattributed.
"""

from __future__ import annotations

from typing import Final

from vllm_k25_instrument.hooks.arguments import argument, layer_number, own_layer
from vllm_k25_instrument.hooks.point import Args, HookKind, HookPoint, Kwargs
from vllm_k25_instrument.model import Category

_ROOT: Final = "vllm.v1.attention.backend"
_LAYER: Final = "vllm.model_executor.layers.attention.mla_attention"


def _decode_layer(args: Args, kwargs: Kwargs) -> int:
    return layer_number(getattr(argument(args, kwargs, 4, "layer"), "layer_name", ""))


def _forward_layer(args: Args, kwargs: Kwargs) -> int:
    return layer_number(getattr(argument(args, kwargs, 1, "layer"), "layer_name", ""))


def _decode_detail(args: Args, kwargs: Kwargs) -> str:
    return f"decode {type(args[0]).__name__}"


def _prefill_detail(args: Args, kwargs: Kwargs) -> str:
    return f"prefill {type(args[0]).__name__}"


def _decode(module: str, target: str, versions: str) -> HookPoint:
    return HookPoint(
        "mla_decode",
        HookKind.RANGE,
        module,
        target,
        versions=versions,
        category=Category.MLA_ATTENTION,
        subclasses=True,
        detail=_decode_detail,
        layer=_decode_layer,
    )


def _prefill(module: str, target: str, versions: str) -> HookPoint:
    return HookPoint(
        "mla_prefill",
        HookKind.RANGE,
        module,
        target,
        versions=versions,
        category=Category.MLA_ATTENTION,
        subclasses=True,
        detail=_prefill_detail,
        inherits_layer=True,
    )


MLA_POINTS: Final = (
    HookPoint("layer", HookKind.LAYER, _LAYER, "MLAAttention.forward_impl", ">=0.16", layer=own_layer),
    _decode(_ROOT, "MLAAttentionImpl.forward_mqa", ">=0.16"),
    _prefill(_ROOT, "MLAAttentionImpl.forward_mha", ">=0.16"),
    # A family of its own before 0.26, which made it part of the other.
    _decode(_ROOT, "SparseMLAAttentionImpl.forward_mqa", ">=0.16,<0.26"),
    # In 0.15 the backend did all of the layer's work itself, absorption and projection included.
    HookPoint(
        "layer",
        HookKind.LAYER,
        _LAYER,
        "MLACommonImpl.forward",
        ">=0.15,<0.16",
        subclasses=True,
        layer=_forward_layer,
    ),
    _decode(_LAYER, "MLACommonImpl._forward_decode", ">=0.15,<0.16"),
    _prefill(_LAYER, "MLACommonImpl._forward_prefill", ">=0.15,<0.16"),
)
