"""What a rank has counted since it started: a fixed table of 64-bit counters in its ring file.

The ring forgets old samples; these counters do not, so that a scrape is one copy of a few kilobytes, two
exporters of one server agree, and an exporter's restart loses nothing. The rank's own worker is the only
writer, and every counter only grows. Times are nanoseconds.

Readers get a snapshot. It is taken while the writer runs, so counters of one snapshot can differ by the
step that was just being added, never by more.
"""

from __future__ import annotations

import zlib
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from vllm_k25_instrument.model import (
    ALL_REDUCE_PATHS,
    BATCH_BUCKETS,
    BATCH_LABELS,
    GRAPH_MODES,
    LIVE_CATEGORIES,
    LOST_REASONS,
    PHASES,
    SIZE_BUCKETS,
    SIZE_LABELS,
    bucket_index,
)

_US: Final = 1_000
_MS: Final = 1_000_000

STEP_BOUNDS_NS: Final = tuple(
    int(ms * _MS) for ms in (0.5, 1, 2, 4, 6, 8, 10, 12.5, 16, 20, 25, 32, 50, 100, 250, 1_000, 5_000)
)
CATEGORY_BOUNDS_NS: Final = (50 * _US, 250 * _US, 1 * _MS, 2_500 * _US, 5 * _MS, 10 * _MS, 100 * _MS, 1_000 * _MS)
ALL_REDUCE_BOUNDS_NS: Final = (20 * _US, 50 * _US, 100 * _US, 250 * _US, 1 * _MS, 10 * _MS, 1_000 * _MS)

MAX_HOOKS: Final = 64
"""Room for per-hook counters; a hook's index is its place in the hook table."""

BATCH_ROWS: Final = 16
"""How many (phase, graph mode, batch) groups a rank keeps apart. Later ones share a row per phase, so that
the number of time series stays bounded whatever a server is asked to do."""

_ROW_LABELS: Final = tuple(
    (phase, graph, batch)
    for phase in range(len(PHASES))
    for graph in range(len(GRAPH_MODES))
    for batch in range(len(BATCH_LABELS))
)
_CATEGORIES: Final = len(LIVE_CATEGORIES)


@dataclass(frozen=True, slots=True)
class _Block:
    """A rectangular block of counters: row-major, `shape` of at most three dimensions."""

    offset: int
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        size = 1
        for n in self.shape:
            size *= n
        return size

    def at(self, *index: int) -> int:
        position = 0
        for n, i in zip(self.shape, index, strict=False):
            position = position * n + i
        for n in self.shape[len(index) :]:
            position *= n
        return self.offset + position


def _lay_out(**shapes: tuple[int, ...]) -> tuple[dict[str, _Block], int]:
    blocks: dict[str, _Block] = {}
    offset = 0
    for name, shape in shapes.items():
        blocks[name] = _Block(offset, shape)
        offset += blocks[name].size
    return blocks, offset


_BLOCKS, TOTALS_COUNT = _lay_out(
    steps=(len(PHASES),),
    step_ns=(len(PHASES),),
    step_buckets=(len(PHASES), len(STEP_BOUNDS_NS) + 1),
    host_ns=(len(PHASES),),
    host_buckets=(len(PHASES), len(STEP_BOUNDS_NS) + 1),
    sampled=(len(PHASES),),
    category_ns=(len(PHASES), _CATEGORIES),
    category_buckets=(len(PHASES), _CATEGORIES, len(CATEGORY_BOUNDS_NS) + 1),
    # Row: label code + 1 (0 = free), steps, duration, then exclusive time per category.
    batch=(BATCH_ROWS + len(PHASES), 3 + _CATEGORIES),
    all_reduce_ns=(len(ALL_REDUCE_PATHS),),
    all_reduce_buckets=(len(ALL_REDUCE_PATHS), len(ALL_REDUCE_BOUNDS_NS) + 1),
    all_reduce_bytes=(len(ALL_REDUCE_PATHS), len(SIZE_LABELS)),
    lost=(len(LOST_REASONS),),
    overhead_ns=(1,),
    twin_bytes=(1,),
    twin_capture_ns=(1,),
    hook_calls=(MAX_HOOKS,),
    hook_errors=(MAX_HOOKS,),
)

TOTALS_BYTES: Final = TOTALS_COUNT * 8

FINGERPRINT: Final = zlib.crc32(
    repr(
        (
            [(name, block.shape) for name, block in _BLOCKS.items()],
            [*PHASES, *GRAPH_MODES, *LIVE_CATEGORIES, *ALL_REDUCE_PATHS, *LOST_REASONS],
            (STEP_BOUNDS_NS, CATEGORY_BOUNDS_NS, ALL_REDUCE_BOUNDS_NS, BATCH_BUCKETS, SIZE_BUCKETS),
        )
    ).encode()
)
"""Changes whenever the table or a closed set does; a reader refuses a file with another one."""


@dataclass(frozen=True, slots=True)
class Histogram:
    """Counts per bucket (not cumulative; one more than bounds) and the sum in nanoseconds."""

    bounds_ns: tuple[int, ...]
    counts: tuple[int, ...]
    sum_ns: int

    @property
    def count(self) -> int:
        return sum(self.counts)


@dataclass(frozen=True, slots=True)
class BatchRow:
    """Sampled steps of one (phase, graph mode, batch) group: their number, duration and exclusive times."""

    phase: str
    graph_mode: str
    batch: str
    steps: int
    step_ns: int
    category_ns: dict[str, int]


OTHER_LABEL: Final = "other"


class TotalsWriter:
    """Adds to the counters. Owned by one thread of one worker."""

    def __init__(self, counters: memoryview) -> None:
        """`counters`: a writable memoryview of ``TOTALS_COUNT`` items of format ``Q``."""
        if counters.format != "Q" or len(counters) != TOTALS_COUNT:
            raise ValueError(f"need {TOTALS_COUNT} counters of format Q")
        self._c = counters
        self._rows: dict[int, int] = {}
        self._lost = _BLOCKS["lost"].offset
        self._hook_calls = _BLOCKS["hook_calls"].offset
        self._hook_errors = _BLOCKS["hook_errors"].offset
        self._overhead = _BLOCKS["overhead_ns"].offset
        self._all_reduce_ns = _BLOCKS["all_reduce_ns"].offset
        self._all_reduce_buckets = tuple(_BLOCKS["all_reduce_buckets"].at(p) for p in range(len(ALL_REDUCE_PATHS)))
        self._all_reduce_bytes = tuple(_BLOCKS["all_reduce_bytes"].at(p) for p in range(len(ALL_REDUCE_PATHS)))
        self._category_buckets = tuple(
            tuple(_BLOCKS["category_buckets"].at(p, c) for c in range(_CATEGORIES)) for p in range(len(PHASES))
        )
        self._steps = _BLOCKS["steps"].offset
        self._step_ns = _BLOCKS["step_ns"].offset
        self._step_buckets = tuple(_BLOCKS["step_buckets"].at(p) for p in range(len(PHASES)))
        self._host_ns = _BLOCKS["host_ns"].offset
        self._host_buckets = tuple(_BLOCKS["host_buckets"].at(p) for p in range(len(PHASES)))

    def add_step(self, phase_code: int, duration_ns: int, host_ns: int | None = None) -> None:
        """Count one executed step, sampled or not; `host_ns` is its time on the host's clock where that is another."""
        c = self._c
        host = duration_ns if host_ns is None else host_ns
        c[self._host_ns + phase_code] += host
        c[self._host_buckets[phase_code] + bisect_left(STEP_BOUNDS_NS, host)] += 1
        c[self._steps + phase_code] += 1
        c[self._step_ns + phase_code] += duration_ns
        c[self._step_buckets[phase_code] + bisect_left(STEP_BOUNDS_NS, duration_ns)] += 1

    def add_sample(
        self, phase_code: int, graph_code: int, requests: int, duration_ns: int, category_ns: Sequence[int]
    ) -> None:
        """Count one sampled step; `category_ns` follows ``LIVE_CATEGORIES`` and adds up to `duration_ns`."""
        c = self._c
        c[_BLOCKS["sampled"].at(phase_code)] += 1
        sums = _BLOCKS["category_ns"].at(phase_code)
        buckets = self._category_buckets[phase_code]
        row = self._batch_row(phase_code, graph_code, bucket_index(requests, BATCH_BUCKETS))
        c[row + 1] += 1
        c[row + 2] += duration_ns
        for code, ns in enumerate(category_ns):
            c[sums + code] += ns
            c[buckets[code] + bisect_left(CATEGORY_BOUNDS_NS, ns)] += 1
            c[row + 3 + code] += ns

    def add_all_reduces(self, path_code: int, durations_ns: Sequence[int], nbytes: Sequence[int]) -> None:
        """Count a step's timed all-reduces of one path: the duration and the size of each."""
        c = self._c
        c[self._all_reduce_ns + path_code] += sum(durations_ns)
        # A step has a hundred of them, in few buckets and of one size: counting per bucket beats counting per call.
        ordered = sorted(durations_ns)
        buckets = self._all_reduce_buckets[path_code]
        below = 0
        for bucket, bound in enumerate(ALL_REDUCE_BOUNDS_NS):
            upto = bisect_right(ordered, bound)
            if upto > below:
                c[buckets + bucket] += upto - below
                below = upto
        if below < len(ordered):
            c[buckets + len(ALL_REDUCE_BOUNDS_NS)] += len(ordered) - below
        sizes = self._all_reduce_bytes[path_code]
        for size, count in Counter(nbytes).items():
            c[sizes + bisect_left(SIZE_BUCKETS, size)] += size * count

    def add_lost(self, reason_code: int) -> None:
        self._c[self._lost + reason_code] += 1

    def add_overhead(self, ns: int) -> None:
        self._c[self._overhead] += ns

    def add_twins(self, nbytes: int, capture_ns: int) -> None:
        """Count graph memory and time that a capture of instrumented graphs has cost."""
        self._c[_BLOCKS["twin_bytes"].offset] += nbytes
        self._c[_BLOCKS["twin_capture_ns"].offset] += capture_ns

    def add_hook_calls(self, hook_index: int, count: int) -> None:
        self._c[self._hook_calls + hook_index] += count

    def add_hook_error(self, hook_index: int) -> None:
        self._c[self._hook_errors + hook_index] += 1

    def _batch_row(self, phase_code: int, graph_code: int, batch_code: int) -> int:
        label = (phase_code * len(GRAPH_MODES) + graph_code) * len(BATCH_LABELS) + batch_code
        row = self._rows.get(label)
        if row is None:
            used = len(self._rows)
            if used >= BATCH_ROWS:
                return _BLOCKS["batch"].at(BATCH_ROWS + phase_code)
            row = self._rows[label] = _BLOCKS["batch"].at(used)
            self._c[row] = label + 1
        return row


class Totals:
    """A snapshot of one rank's counters, by name."""

    def __init__(self, data: bytes) -> None:
        """`data`: a copy of the table, ``TOTALS_BYTES`` long. Raises ValueError on another length."""
        if len(data) != TOTALS_BYTES:
            raise ValueError(f"need {TOTALS_BYTES} bytes of counters, got {len(data)}")
        self._c = memoryview(data).cast("Q")

    def steps(self, phase_code: int) -> int:
        return self._get("steps", phase_code)

    def sampled(self, phase_code: int) -> int:
        return self._get("sampled", phase_code)

    def lost(self, reason_code: int) -> int:
        return self._get("lost", reason_code)

    @property
    def overhead_ns(self) -> int:
        return self._get("overhead_ns", 0)

    def hook_calls(self, hook_index: int) -> int:
        """How often the hook made a range in sampled steps: 0 long after start means that it never fires."""
        return self._get("hook_calls", hook_index)

    def hook_errors(self, hook_index: int) -> int:
        return self._get("hook_errors", hook_index)

    def step_duration(self, phase_code: int) -> Histogram:
        """Duration of all executed steps."""
        return self._histogram("step_buckets", "step_ns", STEP_BOUNDS_NS, phase_code)

    def step_host(self, phase_code: int) -> Histogram:
        """Time of all executed steps on the host's clock."""
        return self._histogram("host_buckets", "host_ns", STEP_BOUNDS_NS, phase_code)

    @property
    def twin_bytes(self) -> int:
        """GPU memory that the instrumented graphs took."""
        return self._get("twin_bytes", 0)

    @property
    def twin_capture_ns(self) -> int:
        """How long their capture took."""
        return self._get("twin_capture_ns", 0)

    def category(self, phase_code: int, category_code: int) -> Histogram:
        """Exclusive time of a category (an index of ``LIVE_CATEGORIES``) per sampled step."""
        return self._histogram("category_buckets", "category_ns", CATEGORY_BOUNDS_NS, phase_code, category_code)

    def all_reduce(self, path_code: int) -> Histogram:
        """Duration of the timed all-reduces of one path."""
        return self._histogram("all_reduce_buckets", "all_reduce_ns", ALL_REDUCE_BOUNDS_NS, path_code)

    def all_reduce_bytes(self, path_code: int, size_code: int) -> int:
        return self._get("all_reduce_bytes", path_code, size_code)

    def batch_rows(self) -> Iterator[BatchRow]:
        """The groups that have been seen; steps beyond the ``BATCH_ROWS``-th group come as `other`."""
        for row in range(BATCH_ROWS + len(PHASES)):
            label, steps, step_ns = (self._get("batch", row, column) for column in range(3))
            if not steps:
                continue
            if row < BATCH_ROWS:
                if not 0 < label <= len(_ROW_LABELS):  # copied while the row was being taken, or damaged
                    continue
                phase, graph, batch = _ROW_LABELS[label - 1]
                names = (str(PHASES[phase]), str(GRAPH_MODES[graph]), BATCH_LABELS[batch])
            else:
                names = (str(PHASES[row - BATCH_ROWS]), OTHER_LABEL, OTHER_LABEL)
            yield BatchRow(
                *names,
                steps=steps,
                step_ns=step_ns,
                category_ns={
                    str(category): self._get("batch", row, 3 + code) for code, category in enumerate(LIVE_CATEGORIES)
                },
            )

    def _get(self, block: str, *index: int) -> int:
        return int(self._c[_BLOCKS[block].at(*index)])

    def _histogram(self, buckets: str, sums: str, bounds: tuple[int, ...], *index: int) -> Histogram:
        start = _BLOCKS[buckets].at(*index)
        return Histogram(bounds, tuple(self._c[start : start + len(bounds) + 1]), self._get(sums, *index))
