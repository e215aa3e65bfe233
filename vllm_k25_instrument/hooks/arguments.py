"""Reading what a hook needs out of a call's arguments, without ever touching a tensor's data."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any, Final

from vllm_k25_instrument.hooks.point import Args, Kwargs
from vllm_k25_instrument.model import NO_LAYER

_LAYER: Final = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.(\d+)(?:\.|$)")
_FIRST_NUMBER: Final = re.compile(r"(?:^|\.)(\d+)(?:\.|$)")


@lru_cache(maxsize=4096)
def layer_number(layer_name: str) -> int:
    """Number of the layer in a dotted module name: ``model.layers.17.mlp.experts`` is 17; NO_LAYER if none."""
    match = _LAYER.search(layer_name) or _FIRST_NUMBER.search(layer_name)
    return int(match.group(1)) if match else NO_LAYER


def argument(args: Args, kwargs: Kwargs, position: int, *names: str) -> Any:
    """The argument at `position` (0 is self), or the keyword of one of `names`, or None."""
    if len(args) > position:
        return args[position]
    for name in names:
        if name in kwargs:
            return kwargs[name]
    return None


def message_bytes(args: Args, kwargs: Kwargs) -> int:
    """Bytes of a collective's first tensor argument (0 where there is none)."""
    try:
        return args[1].nbytes  # type: ignore[no-any-return]
    except (AttributeError, IndexError):
        pass
    value = args[1] if len(args) > 1 else next(iter(kwargs.values()), None)
    if isinstance(value, list):
        return sum(getattr(tensor, "nbytes", 0) for tensor in value)
    return int(getattr(value, "nbytes", 0))


def own_layer(args: Args, kwargs: Kwargs) -> int:
    """The layer's number where ``self`` carries its own name."""
    return layer_number(getattr(args[0], "layer_name", ""))


def class_name(args: Args, kwargs: Kwargs) -> str:
    """Name of the class that does the work: ``self``'s."""
    return type(args[0]).__name__
