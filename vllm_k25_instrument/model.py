"""The one model of the data: what a step is, what a range is, and the words for them.

Everything that measures produces a :class:`StepSample`; everything that shows consumes it. Times are
integer nanoseconds from end to end. This module imports nothing of the package, and it alone knows how a
sample is laid out in bytes.

Definitions (used with these meanings everywhere):

* *inclusive*: a range's own duration.
* *exclusive*: inclusive minus the durations of its child ranges on the same stream.
* *exposed*: of the exclusive time, what no range on an earlier stream (0 is the main one) covers.
* *unattributed*: the step's duration minus the sum of the exposed times. Never negative.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import lru_cache
from itertools import chain
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

NS_PER_SECOND: Final = 1_000_000_000

NO_LAYER: Final = -1
NO_PARENT: Final = -1


class Category(StrEnum):
    """What a stretch of time was spent on: a closed set."""

    ALL_REDUCE = "all_reduce"
    COLLECTIVE = "collective"
    MOE_EXPERTS = "moe_experts"
    MOE_ROUTING = "moe_routing"
    MOE_SHARED_EXPERTS = "moe_shared_experts"
    MLA_ATTENTION = "mla_attention"
    ATTENTION = "attention"  # all other than MLA
    SAMPLING = "sampling"
    SPECULATION = "speculation"  # drafting tokens: all that the draft model does, its all-reduces included
    INPUT_PREPARATION = "input_preparation"
    UNATTRIBUTED = "unattributed"
    # From kernel names only (trace analysis); hooks never produce these.
    DENSE_GEMM = "dense_gemm"
    KV_CACHE = "kv_cache"
    NORM = "norm"
    ROPE = "rope"
    ACTIVATION = "activation"
    CAST_QUANT = "cast_quant"
    ELEMENTWISE = "elementwise"
    MEMORY = "memory"
    OTHER = "other"


HOOKED_CATEGORIES: Final = (
    Category.ALL_REDUCE,
    Category.COLLECTIVE,
    Category.MOE_EXPERTS,
    Category.MOE_ROUTING,
    Category.MOE_SHARED_EXPERTS,
    Category.MLA_ATTENTION,
    Category.SAMPLING,
    Category.INPUT_PREPARATION,
    Category.SPECULATION,
    Category.ATTENTION,
)
"""The categories a hook can produce. The order is the code in a ring file: append, never reorder."""

LIVE_CATEGORIES: Final = (*HOOKED_CATEGORIES, Category.UNATTRIBUTED)
"""The categories of a live breakdown; their exclusive times add up to the step's duration."""

CATEGORY_CODE: Final = {category: code for code, category in enumerate(HOOKED_CATEGORIES)}


class Phase(StrEnum):
    """What the scheduler put into a step. A prefill's last chunk is prefill even if it is one token."""

    DECODE = "decode"
    PREFILL = "prefill"
    MIXED = "mixed"


class GraphMode(StrEnum):
    """How vLLM dispatched the step's forward pass: eager, piecewise or full CUDA graphs."""

    NONE = "none"
    PIECEWISE = "piecewise"
    FULL = "full"


class AllReducePath(StrEnum):
    """The implementation that an all-reduce really ran through."""

    CUSTOM = "custom"
    PYNCCL = "pynccl"
    SYMM_MEM = "symm_mem"
    NCCL_SYMM_MEM = "nccl_symm_mem"
    QUICK_REDUCE = "quick_reduce"
    FLASHINFER = "flashinfer"
    FLASHINFER_PCIE_IPC = "flashinfer_pcie_ipc"
    AITER = "aiter"
    CPU_SHM = "cpu_shm"
    TORCH_DISTRIBUTED = "torch_distributed"
    OTHER = "other"


class LostReason(StrEnum):
    """Why a step that was due for sampling left no sample."""

    ABORTED = "aborted"  # the step itself raised, or was never finished
    TOO_LARGE = "too_large"  # more ranges than a slot of the ring holds
    ERROR = "error"  # our own code failed
    UNREAD = "unread"  # the timing events of its graph had not been read since the last sample
    UNTIMED = "untimed"  # it replayed a CUDA graph that carries no timing events
    OVERWRITTEN = "overwritten"  # its graph's events were recorded again before they were read


PHASES: Final = tuple(Phase)
GRAPH_MODES: Final = tuple(GraphMode)
ALL_REDUCE_PATHS: Final = tuple(AllReducePath)
LOST_REASONS: Final = tuple(LostReason)

BATCH_BUCKETS: Final = (1, 4, 16, 64, 256)
"""Upper bounds, in requests, of the `batch` label; above the last it is ``+Inf``."""

SIZE_BUCKETS: Final = (4096, 16_384, 65_536, 262_144, 1_048_576, 4_194_304)
"""Upper bounds, in bytes, of the `size` label; above the last it is ``+Inf``."""

INF_BUCKET: Final = "+Inf"
BATCH_LABELS: Final = (*(str(bound) for bound in BATCH_BUCKETS), INF_BUCKET)
SIZE_LABELS: Final = (*(str(bound) for bound in SIZE_BUCKETS), INF_BUCKET)


def bucket_index(value: int, bounds: Sequence[int]) -> int:
    """Index of the first bound that is not below `value`; ``len(bounds)`` where all are.

    A bucket's label is its upper bound, inclusive, as in a Prometheus histogram: batch 64 means 17 to 64.
    """
    for index, bound in enumerate(bounds):
        if value <= bound:
            return index
    return len(bounds)


def batch_label(requests: int) -> str:
    """The `batch` label (a power-of-four upper bound) of a step with this many requests."""
    return BATCH_LABELS[bucket_index(requests, BATCH_BUCKETS)]


def size_label(nbytes: int) -> str:
    """The `size` label (a power-of-four upper bound) of a message of this many bytes."""
    return SIZE_LABELS[bucket_index(nbytes, SIZE_BUCKETS)]


@dataclass(frozen=True, slots=True)
class Range:
    """One timed stretch inside a step.

    `start_ns` is an offset from the step's start. `parent` is the index of the enclosing range in the same
    sample, or ``NO_PARENT``. `detail` is an all-reduce path, a backend class, or empty. `bytes` is the size
    of the message of a collective, else 0.
    """

    category: Category
    start_ns: int
    duration_ns: int
    detail: str = ""
    layer: int = NO_LAYER
    stream: int = 0
    bytes: int = 0
    parent: int = NO_PARENT


@dataclass(frozen=True, slots=True)
class StepSample:
    """One sampled step on one rank.

    `step` counts executed model steps and is equal on all ranks of a tensor-parallel group.
    `duration_ns` is the GPU's time where there is a GPU, from the step's first event to its last; `host_ns` is the time
    on the host's clock from begin to end, and `gap_ns` the device's time between the step before and this one.
    `overhead_ns` is the time our own code took inside the step, as far as it can time itself.
    """

    step: int
    phase: Phase
    requests: int
    tokens: int
    padded_tokens: int
    graph_mode: GraphMode
    start_unix_ns: int
    duration_ns: int
    ranges: tuple[Range, ...] = ()
    host_ns: int = 0
    gap_ns: int = 0
    overhead_ns: int = 0
    complete: bool = True


@dataclass(frozen=True, slots=True)
class RankCoordinates:
    """Where a worker stands. `*_size` are the sizes of the groups; an `ep` of -1 means no expert parallelism."""

    global_rank: int = 0
    local_rank: int = 0
    tp: int = 0
    pp: int = 0
    dp: int = 0
    ep: int = -1
    tp_size: int = 1
    pp_size: int = 1
    dp_size: int = 1

    @property
    def world_size(self) -> int:
        """Number of ranks of the whole server instance."""
        return self.tp_size * self.pp_size * self.dp_size


@dataclass(frozen=True, slots=True)
class RankIdentity:
    """Who wrote a ring: kept in its header, readable after the writer's death."""

    instance: str
    pid: int
    coordinates: RankCoordinates
    model: str = ""
    vllm_version: str = ""
    plugin_version: str = ""
    runner: str = ""
    sample_every: int = 1
    started_unix_ns: int = 0
    device: str = "host"
    """Whose clock the durations are from: ``host``, or ``cuda``."""
    hooks: dict[str, str] = field(default_factory=dict)
    """Hook name -> state, a value of :class:`vllm_k25_instrument.hooks.point.HookState`."""
    layers: dict[str, int] = field(default_factory=dict)
    """Kind of layer -> how many this rank's model has (see `hooks.layers`), from the first step on; {}: not known."""


# --- arithmetic ----------------------------------------------------------------------------------------


def exclusive_ns(sample: StepSample) -> list[int]:
    """Exclusive time of each range, in the order of `sample.ranges`.

    exclusive = duration - sum of the durations of its direct children on the same stream.
    """
    exclusive = [r.duration_ns for r in sample.ranges]
    for r in sample.ranges:
        if r.parent != NO_PARENT and sample.ranges[r.parent].stream == r.stream:
            exclusive[r.parent] -= r.duration_ns
    return exclusive


def exposed_ns(sample: StepSample) -> list[int]:
    """Exposed time of each range, in the order of `sample.ranges`: the values add up to the busy time of the step."""
    ranges = sample.ranges
    if all(r.stream == 0 for r in ranges):
        return exclusive_ns(sample)
    return expose(
        [r.start_ns for r in ranges], [r.start_ns + r.duration_ns for r in ranges], [r.stream for r in ranges]
    )


def expose(starts: Sequence[int], ends: Sequence[int], streams: Sequence[int]) -> list[int]:
    """Give each instant that ranges cover to one of them; returns what each of them gets, in ns.

    The lowest stream that has a range open gets it, and of that stream's ranges the innermost. Ranges of one stream
    nest: the one that starts later, or at the same time with a higher index, is the inner one.
    """
    edges = sorted(
        [(start, 1, index) for index, start in enumerate(starts) if ends[index] > start]
        + [(end, 0, -index) for index, end in enumerate(ends) if end > starts[index]]
    )
    shares = [0] * len(starts)
    open_ranges: dict[int, list[int]] = {}
    before = 0
    for at, is_start, index in edges:
        owner = next((stack[-1] for _, stack in sorted(open_ranges.items()) if stack), None)
        if owner is not None:
            shares[owner] += at - before
        before = at
        if is_start:
            open_ranges.setdefault(streams[index], []).append(index)
        else:
            open_ranges[streams[-index]].remove(-index)
    return shares


def category_exclusive_ns(sample: StepSample) -> dict[Category, int]:
    """Exposed time per category, `unattributed` included: the values add up to the step's duration."""
    totals = dict.fromkeys(LIVE_CATEGORIES, 0)
    attributed = 0
    for r, own in zip(sample.ranges, exposed_ns(sample), strict=True):
        totals[r.category] += own
        attributed += own
    totals[Category.UNATTRIBUTED] = sample.duration_ns - attributed
    return totals


# --- the bytes of a sample -------------------------------------------------------------------------------

# A header, then the ranges column by column: a reader that wants one column need not touch the others.
_SAMPLE = struct.Struct("<QQQQQqIIIBBBxIxxxx")
_COLUMNS: Final = "QQQhhHBB"

SAMPLE_BYTES: Final = _SAMPLE.size
RANGE_BYTES: Final = struct.calcsize("<" + _COLUMNS)
RANGE_COLUMNS: Final = len(_COLUMNS)
"""start_ns, duration_ns, bytes, layer, parent, detail index, stream, category code."""

MAX_RANGES: Final = 0x7FFF


_TIMES: Final = 2
"""The first columns, which differ from step to step; the others are mostly those of the step before."""


@lru_cache(maxsize=1024)
def _ranges_struct(count: int, first: int = 0, end: int = RANGE_COLUMNS) -> struct.Struct:
    return struct.Struct("<" + "".join(f"{count}{column}" for column in _COLUMNS[first:end]))


def pack_unchanging(columns: Sequence[Sequence[int]]) -> bytes:
    """The bytes of all columns of ranges but their starts and durations, for samples that share them.

    Raises ``struct.error`` where a value does not fit its field or the columns differ in length.
    """
    return _ranges_struct(len(columns[0]), _TIMES).pack(*chain.from_iterable(columns))


def pack_sample(
    *,
    step: int,
    phase_code: int,
    requests: int,
    tokens: int,
    padded_tokens: int,
    graph_code: int,
    start_unix_ns: int,
    duration_ns: int,
    host_ns: int = 0,
    gap_ns: int = 0,
    overhead_ns: int = 0,
    complete: bool = True,
    range_columns: Sequence[Sequence[int]] = ((),) * RANGE_COLUMNS,
    unchanging: bytes = b"",
) -> bytes:
    """The bytes of one sample, from plain integers (the writer's hot path builds no objects).

    `range_columns`: ``RANGE_COLUMNS`` sequences, each with one integer per range; only the first two, starts and
    durations, where `unchanging` holds what `pack_unchanging` made of the others. Raises ``struct.error`` where a value
    does not fit its field or the columns differ in length.
    """
    count = len(range_columns[0])
    head = _SAMPLE.pack(
        step,
        start_unix_ns,
        duration_ns,
        overhead_ns,
        host_ns,
        gap_ns,
        requests,
        tokens,
        padded_tokens,
        phase_code,
        graph_code,
        complete,
        count,
    )
    ranges = _ranges_struct(count, 0, len(range_columns)).pack(*chain.from_iterable(range_columns))
    return head + ranges + unchanging


def unpack_sample(data: bytes | memoryview, details: Sequence[str]) -> StepSample:
    """The sample that `pack_sample` wrote; `details` is the ring's table of detail strings.

    Raises ValueError where the bytes are not those of a sample.
    """
    try:
        (
            step,
            start_unix_ns,
            duration_ns,
            overhead_ns,
            host_ns,
            gap_ns,
            requests,
            tokens,
            padded_tokens,
            phase_code,
            graph_code,
            complete,
            count,
        ) = _SAMPLE.unpack_from(data, 0)
        if count > MAX_RANGES or SAMPLE_BYTES + count * RANGE_BYTES > len(data):
            raise ValueError(f"{count} ranges do not fit {len(data)} bytes")
        flat = _ranges_struct(count).unpack_from(data, SAMPLE_BYTES)
        columns = [flat[n * count : (n + 1) * count] for n in range(RANGE_COLUMNS)]
        if any(not NO_PARENT <= parent < index for index, parent in enumerate(columns[4])):
            raise ValueError("a range that begins before its parent")
        ranges = tuple(
            Range(
                category=HOOKED_CATEGORIES[category],
                start_ns=start,
                duration_ns=duration,
                detail=details[detail],
                layer=layer,
                stream=stream,
                bytes=nbytes,
                parent=parent,
            )
            for start, duration, nbytes, layer, parent, detail, stream, category in zip(*columns, strict=True)
        )
        return StepSample(
            step=step,
            phase=PHASES[phase_code],
            requests=requests,
            tokens=tokens,
            padded_tokens=padded_tokens,
            graph_mode=GRAPH_MODES[graph_code],
            start_unix_ns=start_unix_ns,
            duration_ns=duration_ns,
            ranges=ranges,
            host_ns=host_ns,
            gap_ns=gap_ns,
            overhead_ns=overhead_ns,
            complete=bool(complete),
        )
    except (struct.error, IndexError) as error:
        raise ValueError(f"not a step sample: {error}") from error


_SAMPLE_FIELDS: Final = (
    ("step", "<u8"),
    ("start_unix_ns", "<u8"),
    ("duration_ns", "<u8"),
    ("overhead_ns", "<u8"),
    ("host_ns", "<u8"),
    ("gap_ns", "<i8"),
    ("requests", "<u4"),
    ("tokens", "<u4"),
    ("padded_tokens", "<u4"),
    ("phase", "u1"),
    ("graph_mode", "u1"),
    ("complete", "?"),
    ("", "V1"),
    ("count", "<u4"),
    ("", "V4"),
)
"""`_SAMPLE`, for numpy; its padding has no name."""

_RANGE_FIELDS: Final = (
    ("start_ns", "<u8"),
    ("duration_ns", "<u8"),
    ("bytes", "<u8"),
    ("layer", "<i2"),
    ("parent", "<i2"),
    ("detail", "<u2"),
    ("stream", "u1"),
    ("category", "u1"),
)
"""`_COLUMNS`, for numpy: `phase`, `graph_mode` and `category` are codes, `detail` an index of the ring's table."""


@lru_cache(maxsize=1024)
def _sample_dtype(count: int) -> np.dtype[Any]:
    import numpy as np

    ranges = np.dtype([(name, kind, (count,)) for name, kind in _RANGE_FIELDS])
    return np.dtype([*_SAMPLE_FIELDS, ("ranges", ranges)])


def unpack_columns(samples: Sequence[bytes]) -> NDArray[np.void]:
    """Samples of one and the same length as a structured array: many at once, and no object for any of their ranges.

    `samples` are n things that `pack_sample` wrote, all of as many bytes. The fields of the array are those of
    ``_SAMPLE_FIELDS``, of shape (n,), and `ranges`, whose fields are those of ``_RANGE_FIELDS``, of shape
    (n, number of ranges). Times are ns, sizes bytes. Raises ValueError where the bytes are not those of samples.
    """
    # Here and not above: what only writes samples, or shows a table, need not load numpy.
    import numpy as np

    size = len(samples[0]) if samples else SAMPLE_BYTES
    count, rest = divmod(size - SAMPLE_BYTES, RANGE_BYTES)
    if rest or not 0 <= count <= MAX_RANGES or any(len(sample) != size for sample in samples):
        raise ValueError(f"not step samples of one length: {sorted({len(sample) for sample in samples})} bytes")
    columns = np.frombuffer(b"".join(samples), _sample_dtype(count))
    if (columns["count"] != count).any():
        raise ValueError(f"not step samples: {columns['count'].tolist()} ranges in {size} bytes each")
    return columns
