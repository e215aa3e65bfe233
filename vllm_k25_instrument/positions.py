"""What no hook covers, named by the hooked ranges on either side of it.

Between two ranges of a step runs what the model has between them, so the two say what it is: after an all-reduce and
before attention it is the norm and the q and kv projections. That is inferred, not measured, and is marked as such
wherever it is shown. A gap is a stretch of the step that no range of any stream covers; its neighbours are the
outermost ranges of the main stream that end before it and begin after it. Per step, to the nanosecond::

    unattributed = sum of the named gaps + what stays unnamed

The inference holds where all hooks that could have a say are in place (:func:`can_infer`). Here are the words; the
arithmetic is in `gaps.py`, which needs numpy.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Final


class Position(StrEnum):
    """Where in the step a gap is: a closed set."""

    INPUTS_AND_LAYERS = "between_inputs_and_layers"
    ALL_REDUCE_AND_ATTENTION = "between_all_reduce_and_attention"
    ATTENTION_AND_ALL_REDUCE = "between_attention_and_all_reduce"
    ALL_REDUCE_AND_MOE = "between_all_reduce_and_moe"
    MOE_CALLS = "between_moe_calls"
    MOE_AND_ALL_REDUCE = "between_moe_and_all_reduce"
    ALL_REDUCES = "between_all_reduces"
    ATTENTION_AND_MOE = "between_attention_and_moe"
    MOE_AND_ATTENTION = "between_moe_and_attention"
    LAYERS_AND_SAMPLING = "between_layers_and_sampling"


POSITIONS: Final = tuple(Position)

UNNAMED: Final = "unnamed"
"""What is left of `unattributed`."""

MEANING: Final[Mapping[str, str]] = {
    Position.INPUTS_AND_LAYERS: "begin of the model: embedding, or the first layer's norm and projections behind it",
    Position.ALL_REDUCE_AND_ATTENTION: "norm, q and kv projections, query absorption, rope, KV cache",
    Position.ATTENTION_AND_ALL_REDUCE: "value and output projections",
    Position.ALL_REDUCE_AND_MOE: "norm, gate",
    Position.MOE_CALLS: "between routing, experts and shared experts",
    Position.MOE_AND_ALL_REDUCE: "sum of routed and shared experts",
    Position.ALL_REDUCES: "dense MLP with its norm",
    Position.ATTENTION_AND_MOE: "output projection, norm, gate (no all-reduce between)",
    Position.MOE_AND_ATTENTION: "norm, q and kv projections (no all-reduce between)",
    Position.LAYERS_AND_SAMPLING: "final norm, logits, waiting for the engine's call to sample",
}
"""What a DeepSeek-V3-shaped model runs there."""

INFERRED: Final = "inferred by position: what the model runs between two hooked ranges, not measured by itself"

_NEIGHBOURS: Final = (
    "all_reduce",
    "moe_experts",
    "moe_routing",
    "moe_shared_experts",
    "mla_decode",
    "mla_prefill",
    "attention",
    "sampling",
    "input_preparation",
)
"""Hooks whose ranges a gap is named by: where one is not in place, a gap may hold what it would have covered."""

_NOT_IN_PLACE: Final = frozenset({"missing", "off", "quiet"})
"""Of the values of :class:`vllm_k25_instrument.hooks.point.HookState`. A hook that waits is of what the model lacks."""


def can_infer(hooks: Mapping[str, str]) -> bool:
    """Whether the gaps of a rank with these hooks (name to state, as in its identity) can be named."""
    return not any(hooks.get(name) in _NOT_IN_PLACE for name in _NEIGHBOURS)
