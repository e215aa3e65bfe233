"""Hook points of attention other than MLA, of whatever kind (GQA, MQA, sliding window): the backend's own kernel work.

Projections, rotary embedding and, where the backend does not do it itself, the write into the cache are outside of the
range and stay unattributed.
"""

from __future__ import annotations

from typing import Final

from vllm_k25_instrument.hooks.arguments import argument, class_name, layer_number
from vllm_k25_instrument.hooks.point import Args, HookKind, HookPoint, Kwargs
from vllm_k25_instrument.model import Category


def _layer_argument(args: Args, kwargs: Kwargs) -> int:
    return layer_number(getattr(argument(args, kwargs, 1, "layer"), "layer_name", ""))


ATTENTION_POINTS: Final = (
    HookPoint(
        "attention",
        HookKind.RANGE,
        "vllm.v1.attention.backend",
        "AttentionImpl.forward",
        versions=">=0.16",  # before, the MLA backends were of this class too
        category=Category.ATTENTION,
        subclasses=True,
        detail=class_name,
        layer=_layer_argument,
    ),
)
