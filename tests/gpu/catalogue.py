"""What is measured and checked on a GPU, in sentences. Needs nothing, so that documents can be made anywhere."""

from __future__ import annotations

from dataclasses import dataclass

SCHEMA = 1
"""Version of the JSON that `measure.py` writes; described in README.md."""


@dataclass(frozen=True)
class Check:
    """One thing that a machine with a GPU can show; `shows` are the figures worth a place in a table."""

    name: str
    sentence: str
    shows: tuple[str, ...] = ()


CHECKS = (
    Check(
        "timing_in_graph",
        "External events inside a graph time the same kernels as events around them in eager mode: "
        "within 3 us or 5 %, whichever is more",
        ("largest_difference_us",),
    ),
    Check(
        "own_graph_unchanged",
        "The graph that is replayed in steps that are not sampled has the same nodes (kinds, kernels, launch shapes) "
        "and edges as one captured without us, also after its twin was captured and replayed; the twin has the same "
        "kernels and two event nodes per range",
        ("own_nodes", "twin_nodes"),
    ),
    Check(
        "event_node_cost",
        "What event nodes cost per replay of a graph of 500 kernels: 0, 10, 100 and 500 pairs",
        ("ns_per_event_node", "replay_us_0_pairs", "replay_us_500_pairs", "bytes_per_event_node"),
    ),
    Check(
        "twin_swap_full",
        "A full graph and its twin, exchanged from replay to replay, give bit-identical outputs",
    ),
    Check(
        "twin_swap_piecewise",
        "So does a chain of graphs with eager work between them",
    ),
    Check(
        "double_queued",
        "A replay that is queued while the one before it is under way overwrites its events: the pair then tells the "
        "second one's time, and never a mixture",
        ("events_pending_from",),
    ),
    Check(
        "package_steps",
        "With up to three steps queued, every step that was due is a sample or is counted as lost, and every sample "
        "has the times of its own graph",
        ("due", "sampled", "lost"),
    ),
    Check(
        "side_streams",
        "Ranges on a forked stream inside a graph are timed on their own stream, beside those of the main one",
        ("main_us", "side_us", "both_us"),
    ),
    Check(
        "read_back_cost",
        "What one event costs the host: to record, to query, to read",
        ("record_ns", "query_ns", "elapsed_time_ns"),
    ),
    Check(
        "nvtx_log",
        "An NVTX tool sees our ranges: a library injected into the process logs them",
        ("ranges_logged",),
    ),
    Check(
        "simulator_rules",
        "The device refuses, and allows, what the simulated GPU of the tests refuses and allows",
        ("rules", "disagreements"),
    ),
)
