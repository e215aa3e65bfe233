"""The tables of an export that matter, in one form whatever the version."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from vllm_k25_instrument.analysis.capture import Int64

UNKNOWN: Final = -1
"""Of a process, thread, correlation or graph node: the export does not say."""

THREAD_BITS: Final = 0xFFFFFF
"""A thread's serialized id is hardware (8 bits), VM (8), process (24), thread (24); a process's ends in 24 zeros."""

Chosen = NDArray[np.bool_] | NDArray[np.int64]
"""Rows of a table: as a mask, or by index."""


@dataclass(frozen=True, slots=True)
class Work:
    """GPU work of all processes, one row each. `node` is the graph node that it replays, `name` a code of `Names`."""

    start_ns: Int64
    end_ns: Int64
    kind: Int64
    process: Int64
    device: Int64
    context: Int64
    stream: Int64
    correlation: Int64
    node: Int64
    name: Int64
    bytes: Int64
    bad_time: Int64
    """1 where the times cannot be: no row of these is anybody's work."""
    unnamed: Int64

    def __len__(self) -> int:
        return len(self.start_ns)

    def only(self, rows: Chosen) -> Work:
        """These rows of it."""
        return self if _is_all(rows) else Work(*(getattr(self, field)[rows] for field in self.__slots__))


@dataclass(frozen=True, slots=True)
class Calls:
    """API calls of all processes. `is_launch`, `is_graph`, `is_kernel`: what the function's name says that it does."""

    start_ns: Int64
    end_ns: Int64
    thread: Int64
    process: Int64
    correlation: Int64
    name: Int64
    is_launch: Int64
    is_graph: Int64
    is_kernel: Int64

    def __len__(self) -> int:
        return len(self.start_ns)

    def only(self, rows: Chosen) -> Calls:
        """These rows of it."""
        return self if _is_all(rows) else Calls(*(getattr(self, field)[rows] for field in self.__slots__))


@dataclass(frozen=True, slots=True)
class HostRanges:
    """NVTX ranges of all processes. `is_open`: never closed; their end is the end of the capture."""

    start_ns: Int64
    end_ns: Int64
    thread: Int64
    process: Int64
    name: Int64
    is_open: Int64

    def __len__(self) -> int:
        return len(self.start_ns)

    def only(self, rows: Chosen) -> HostRanges:
        """These rows of it."""
        return self if _is_all(rows) else HostRanges(*(getattr(self, field)[rows] for field in self.__slots__))


@dataclass(frozen=True, slots=True)
class NodeEvents:
    """Moments at which graph nodes were made; `original` is the node that one was cloned from, or `UNKNOWN`."""

    start_ns: Int64
    thread: Int64
    process: Int64
    node: Int64
    original: Int64

    def only(self, rows: Chosen) -> NodeEvents:
        """These rows of it."""
        return self if _is_all(rows) else NodeEvents(*(getattr(self, field)[rows] for field in self.__slots__))


@dataclass(frozen=True, slots=True)
class Text:
    """A text that the export ties to a process: an NVTX mark, a thread's name, a process's name."""

    process: int
    text: str
    domain: str = ""


@dataclass(frozen=True, slots=True)
class Tables:
    """All that is read of an export."""

    work: Work
    calls: Calls
    ranges: HostRanges
    nodes: NodeEvents
    texts: Sequence[Text]
    gpu_of_device: Mapping[tuple[int, int], int]
    """(process id, CUDA device) -> GPU: a process under CUDA_VISIBLE_DEVICES counts its own devices from 0."""
    unix_start_ns: int | None
    traces_graphs_whole: bool
    has_calls: bool
    skipped: Mapping[str, int]
    """Table -> rows that lacked what they cannot do without."""

    def processes(self) -> list[int]:
        """Processes with work or launches, `UNKNOWN` alone where there is none."""
        launching = self.calls.process[(self.calls.is_launch == 1) & (self.calls.is_kernel == 1)]
        return np.unique(np.concatenate([self.work.process, launching])).tolist() or [UNKNOWN]

    def of_process(self, process: int) -> tuple[Work, Calls, HostRanges, NodeEvents]:
        """The rows of one process."""
        return (
            self.work.only(self.work.process == process),
            self.calls.only(self.calls.process == process),
            self.ranges.only(self.ranges.process == process),
            self.nodes.only(self.nodes.process == process),
        )

    def end_ns(self) -> int:
        """The last moment that is recorded."""
        good = self.work.bad_time == 0
        ends = [self.work.end_ns[good], self.calls.end_ns, self.ranges.end_ns[self.ranges.is_open == 0]]
        ends.append(self.ranges.start_ns)
        return max((int(each.max()) for each in ends if len(each)), default=0)


def _is_all(rows: Chosen) -> bool:
    """Whether a mask leaves nothing out: most exports are of one process, and copying a million rows takes time."""
    return rows.dtype == np.bool_ and bool(rows.all())


def pid_of(process: int) -> int:
    """The process id in a serialized one; 0 where it is not known."""
    return 0 if process == UNKNOWN else (process >> 24) & THREAD_BITS


def process_of(thread: Int64) -> Int64:
    """The serialized id of the process of each thread."""
    return np.where(thread == UNKNOWN, UNKNOWN, thread & ~np.int64(THREAD_BITS))
