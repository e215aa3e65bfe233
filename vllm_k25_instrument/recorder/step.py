"""A step that is being recorded, and its ranges: what the wrappers append to."""

from __future__ import annotations

from typing import Any, Final

from vllm_k25_instrument.model import GraphMode, Phase

OpenRange = list[Any]
"""A range of the step that is being recorded, made by the wrapper of a hooked call. A plain list, and not an object,
because every hooked call of a sampled step makes one. Its items have the names below."""

CODE: Final = 0  # the category's code
HOOK: Final = 1  # the index of the hook's name
INDEX: Final = 2  # the range's index in its step
PARENT: Final = 3  # the enclosing range, or None
DETAIL: Final = 4
NBYTES: Final = 5
LAYER: Final = 6
STREAM: Final = 7
STATIC: Final = 8  # what comes before is known when the call begins, and mostly the same in the next step
PUSHED: Final = 8  # whether an NVTX range is open for it
START: Final = 9  # the device's marks
END: Final = 10
BORROWED: Final = 11  # whether it belongs to a graph, which keeps it from replay to replay

OWN_COST_EVERY: Final = 7
"""Our own cost is timed at every seventh range and counted seven times: timing it costs as much as some of it. Which of
the seven changes from sampled step to sampled step, so that every range has its turn."""


class OpenStep:
    """A step between its begin and the moment that its marks have been read."""

    __slots__ = (
        "aborted",
        "complete",
        "done",
        "end",
        "graph_mode",
        "graphs",
        "host_end_ns",
        "host_start_ns",
        "number",
        "overhead_ns",
        "overwritten",
        "own_cost_at",
        "padded_tokens",
        "phase",
        "pushed",
        "ranges",
        "requests",
        "sampled",
        "start",
        "start_unix_ns",
        "tokens",
    )

    def __init__(self, number: int, phase: Phase, requests: int, tokens: int, sampled: bool) -> None:
        self.number = number
        self.phase = phase
        self.requests = requests
        self.tokens = tokens
        self.padded_tokens = tokens
        self.graph_mode = GraphMode.NONE
        self.graphs: Any = None  # the instrumented graphs that this step replays, if any
        self.sampled = sampled
        self.ranges: list[OpenRange] = []
        self.overhead_ns = 0
        self.own_cost_at = 0  # the index of the next range whose cost is timed
        self.complete = True
        self.aborted = False
        self.overwritten = False  # a graph of it was replayed again before its marks were read
        self.done = False  # its marks have been read, or never will be
        self.pushed = False
        self.start_unix_ns = 0
        self.host_start_ns = 0
        self.host_end_ns = 0
        self.start: Any = None
        self.end: Any = None
