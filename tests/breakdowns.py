"""Documents of breakdowns, as `--json` writes them."""

from __future__ import annotations


def breakdown(groups, *, source="torch-trace", complete=True, totals=None):
    """`groups`: (phase, batch, graph mode, rank, steps, {category: exclusive of all steps}, the rest)."""
    made = {
        "schema": "vllm_k25.breakdown/1",
        "source": source,
        "complete": complete,
        "warnings": [],
        "ranks": {"found": [0], "expected": 1},
        "groups": [
            {
                "phase": phase,
                "batch": batch,
                "graph_mode": graph,
                "rank": rank,
                "steps": steps,
                "step_ns": {"mean": 0, "p50": 0, "p99": 0},
                "categories": {
                    name: {"sum_ns": time, "exclusive_ns": time, "count": steps} for name, time in times.items()
                },
                "unattributed_ns": rest,
            }
            for phase, batch, graph, rank, steps, times, rest in groups
        ],
    }
    if totals is not None:
        made["totals"] = {"by_category": {name: {"sum_ns": ns} for name, ns in totals.items()}}
    return made
