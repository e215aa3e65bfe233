"""One colour per category, for reports, timelines and dashboards alike."""

from __future__ import annotations

from typing import Final

from vllm_k25_instrument.model import Category

COLORS: Final[dict[Category, str]] = {
    Category.ALL_REDUCE: "#d1495b",
    Category.COLLECTIVE: "#e58a9b",
    Category.MOE_EXPERTS: "#2e6fbb",
    Category.MOE_ROUTING: "#7aa6dc",
    Category.MOE_SHARED_EXPERTS: "#4bb3c9",
    Category.MLA_ATTENTION: "#3a9d5d",
    Category.SAMPLING: "#8e6bbf",
    Category.INPUT_PREPARATION: "#c9a227",
    Category.UNATTRIBUTED: "#a3a8b0",
}

STEP_COLOR: Final = "#5b6470"
