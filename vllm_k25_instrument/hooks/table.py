"""The one table of everything that is wrapped in vLLM."""

from __future__ import annotations

from typing import Final

from vllm_k25_instrument.hooks.attention import ATTENTION_POINTS
from vllm_k25_instrument.hooks.collectives import COLLECTIVE_POINTS
from vllm_k25_instrument.hooks.graphs import GRAPH_POINTS
from vllm_k25_instrument.hooks.mla import MLA_POINTS
from vllm_k25_instrument.hooks.moe import MOE_POINTS
from vllm_k25_instrument.hooks.point import HookPoint
from vllm_k25_instrument.hooks.speculation import SPECULATION_POINTS
from vllm_k25_instrument.hooks.steps import FRAME_POINTS, STEP_POINTS

HOOK_TABLE: Final[tuple[HookPoint, ...]] = (
    *STEP_POINTS,
    *FRAME_POINTS,
    *COLLECTIVE_POINTS,
    *MOE_POINTS,
    *MLA_POINTS,
    *ATTENTION_POINTS,
    *SPECULATION_POINTS,
    *GRAPH_POINTS,
)

READ_VLLM: Final = ">=0.15,<0.34"
"""The releases in whose sources the targets are looked up by `make matrix` (`releases.py` names them)."""

TESTED_VLLM: Final = ">=0.32,<0.33"
"""The releases that the whole suite runs against."""
