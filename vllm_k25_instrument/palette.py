"""The colour of each category, in one place, so that a table, a page and a timeline agree.

Plain hex strings: whoever shows them (a terminal, SVG, NVTX) converts them. Each has enough contrast for a bar on a
white and on a near-black ground. Communication is warm, experts are blue, attention is green, unexplained is grey.
"""

from __future__ import annotations

from typing import Final

from vllm_k25_instrument.model import Category

STEP_COLOR: Final = "#5b6470"

CATEGORY_COLORS: Final[dict[Category, str]] = {
    Category.ALL_REDUCE: "#d1495b",
    Category.COLLECTIVE: "#e58b4a",
    Category.MOE_EXPERTS: "#2f6fb0",
    Category.MOE_ROUTING: "#6fb1e0",
    Category.MOE_SHARED_EXPERTS: "#7c6fc4",
    Category.MLA_ATTENTION: "#2a9d7f",
    Category.SAMPLING: "#d4a72c",
    Category.SPECULATION: "#c2557f",
    Category.INPUT_PREPARATION: "#8a9a5b",
    Category.UNATTRIBUTED: "#9aa1a9",
    Category.ATTENTION: "#56b68b",
    Category.DENSE_GEMM: "#4453a6",
    Category.KV_CACHE: "#1f7a8c",
    Category.NORM: "#b07aa1",
    Category.ROPE: "#c98bb9",
    Category.ACTIVATION: "#e0a3a3",
    Category.CAST_QUANT: "#a8432f",
    Category.ELEMENTWISE: "#b59f7b",
    Category.MEMORY: "#7a6a58",
    Category.OTHER: "#5f6670",
}


def category_color(name: str) -> str:
    """``#rrggbb`` of a category's name; the colour of `other` where the name is not in the closed set.

    A trace calls ``idle`` what live sources call `unattributed`.
    """
    if name == "idle":
        return CATEGORY_COLORS[Category.UNATTRIBUTED]
    try:
        return CATEGORY_COLORS[Category(name)]
    except ValueError:
        return CATEGORY_COLORS[Category.OTHER]
