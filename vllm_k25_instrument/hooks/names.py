"""The closed set of hook names: the `hook` label of the metrics, and the index of the per-hook counters.

The order is the index in a ring's totals: append, never reorder.
"""

from __future__ import annotations

from typing import Final

HOOK_NAMES: Final = (
    "step",
    "step_sampling",
    "graph_dispatch",
    "all_reduce",
    "all_reduce_path",
    "all_gather",
    "reduce_scatter",
    "gather",
    "broadcast",
    "send_recv",
    "moe_dispatch",
    "moe_combine",
    "moe_experts",
    "moe_routing",
    "moe_shared_experts",
    "mla_decode",
    "mla_prefill",
    "layer",
    "sampling",
    "input_preparation",
    "graph_capture",
    "graph_replay",
    "graph_memory",
    "graph_release",
    "idle",
    "attention",
    "speculation",
    "dp_sync",
)

HOOK_INDEX: Final = {name: index for index, name in enumerate(HOOK_NAMES)}
