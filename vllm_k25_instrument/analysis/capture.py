"""What an analyser reads out of a file, whatever the file: the GPU work of one rank, its launches, its annotations.

Columns of integers, since a capture has a million of them. Times are nanoseconds on one clock per capture; a reader
that has no common clock with other ranks says so in `clock_base_ns`. Readers drop nothing in silence: what they leave
out is counted in `notes`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from vllm_k25_instrument.plain_text import one_line
from vllm_k25_instrument.report.caveats import Caveat

Int64 = NDArray[np.int64]
Int32 = NDArray[np.int32]
Int8 = NDArray[np.int8]

NO_RANK: Final = -1
NO_STEP: Final = -1
NO_ANNOTATION: Final = -1


class Source(StrEnum):
    """Where a breakdown comes from: the `source` of its JSON."""

    RING = "ring"
    TORCH_TRACE = "torch-trace"
    NSYS = "nsys"
    KEY_AVERAGES = "key-averages"


class ActivityKind(IntEnum):
    """What a row of GPU work is."""

    KERNEL = 0
    MEMCPY = 1
    MEMSET = 2
    GRAPH = 3  # a whole graph launch, opaque (graph-level nsys capture): busy time, no categories


class CaptureError(Exception):
    """A file that cannot be analysed at all. One line: the path, what is wrong, what to do."""

    def __init__(self, path: Path, reason: str, remedy: str = "") -> None:
        super().__init__(one_line(f"{path}: {reason}" + (f": {remedy}" if remedy else "")))
        self.path = path
        self.reason = reason
        self.remedy = remedy


@dataclass(frozen=True, slots=True)
class Activities:
    """GPU work, one row each, sorted by start; all columns have the same length.

    `name` indexes `Capture.names`. `launch` indexes `Capture.launches` (-1: launched outside the capture, or
    unknown); many rows share the launch of one graph. `annotation` indexes `Capture.annotations`: the innermost named
    range (NVTX at capture time, graph-node annotation, or the CPU operator's record) that the work belongs to, where
    there is one (-1 else). `bytes` is what a copy or fill moved. `stream` is unique within the capture.
    """

    start_ns: Int64
    duration_ns: Int64
    kind: Int8
    name: Int32
    stream: Int32
    launch: Int32
    annotation: Int32
    bytes: Int64

    def __len__(self) -> int:
        return len(self.start_ns)


@dataclass(frozen=True, slots=True)
class Launches:
    """API calls that put work on the GPU (kernel, copy, fill and graph launches), sorted by start."""

    start_ns: Int64
    duration_ns: Int64
    name: Int32
    thread: Int64
    is_graph: NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.start_ns)


@dataclass(frozen=True, slots=True)
class Annotations:
    """Named host ranges (profiler annotations, NVTX), sorted by start: step markers and context for names.

    `parent` indexes this table (-1: outermost on its thread). `is_open`: the range was never closed, so its end is that
    of the capture, and it is nobody's parent; None where a reader has no such ranges.
    """

    start_ns: Int64
    duration_ns: Int64
    name: Int32
    thread: Int64
    parent: Int32
    is_open: NDArray[np.bool_] | None = None

    def __len__(self) -> int:
        return len(self.start_ns)


@dataclass(frozen=True, slots=True)
class Capture:
    """The GPU work of one rank (one process on one device) as one file tells it.

    `rank` is the global rank (``NO_RANK``: the file does not say); `world_size` 0 means the same. `device` is the
    GPU's index. `clock_base_ns` added to a time gives Unix time; None means that the capture cannot be lined up with
    others. `complete` is False for a truncated file.
    """

    source: Source
    path: Path
    names: Sequence[str]
    activities: Activities
    launches: Launches
    annotations: Annotations
    rank: int = NO_RANK
    world_size: int = 0
    process: int = 0
    device: int = 0
    clock_base_ns: int | None = None
    complete: bool = True
    notes: tuple[Caveat, ...] = field(default=())


@dataclass(frozen=True, slots=True)
class KernelTable:
    """A key_averages table: totals per kernel name, no timeline. `sum_ns` and `count` per row of `names`.

    `repeated_rows` rows of operators, annotations and the like claim `repeated_ns` of GPU time of their own, which is
    that of kernels that are rows too: it is not part of `sum_ns`.
    """

    path: Path
    names: Sequence[str]
    kind: Int8
    sum_ns: Int64
    count: Int64
    footer_ns: int | None = None
    repeated_ns: int = 0
    repeated_rows: int = 0
    rank: int = NO_RANK
    complete: bool = True
    notes: tuple[Caveat, ...] = field(default=())
