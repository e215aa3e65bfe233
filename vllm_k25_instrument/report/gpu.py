"""What a trace tells beyond a breakdown: totals that add up, steps one by one, kernels, a timeline, ranks compared.

Plain data, made by the analysers and shown by the renderers. All times are integer nanoseconds.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from vllm_k25_instrument.model import Category, GraphMode, Phase, batch_label
from vllm_k25_instrument.report.digest import UNKNOWN, CategoryTime, GroupKey, StepDigest


@dataclass(frozen=True, slots=True)
class CategoryTotal:
    """Kernels of one category: how many, their sum, and how much of it is exposed (None: no timeline to tell)."""

    count: int
    sum_ns: int
    exposed_ns: int | None

    def __add__(self, other: CategoryTotal) -> CategoryTotal:
        both = self.exposed_ns is not None and other.exposed_ns is not None
        return CategoryTotal(
            self.count + other.count,
            self.sum_ns + other.sum_ns,
            (self.exposed_ns or 0) + (other.exposed_ns or 0) if both else None,
        )

    def to_json_dict(self) -> dict[str, Any]:
        """As in the schema of the breakdown."""
        return {"count": self.count, "sum_ns": self.sum_ns, "exposed_ns": self.exposed_ns}


def _added(one: int | None, other: int | None) -> int | None:
    return None if one is None or other is None else one + other


@dataclass(frozen=True, slots=True)
class GpuTotals:
    """The GPU work of a capture, or of several ranks added up (then spans are added up too).

    None stands for what the source cannot tell: a table has no span, and with opaque graphs there are no categories.
    Of a timeline: sum - overlap = busy, busy + idle = span, and the exposed times add up to busy.
    """

    kernels: int = 0
    kernel_ns: int = 0
    memcpys: int = 0
    memcpy_ns: int = 0
    memsets: int = 0
    memset_ns: int = 0
    graphs: int = 0
    """Whole graphs in one opaque row each, which `kernels` does not count."""
    graph_ns: int = 0
    kernels_in_steps: int | None = None
    span_ns: int | None = None
    busy_ns: int | None = None
    same_stream_overlap_ns: int | None = None
    launches: int | None = None
    launch_ns: int | None = None
    by_category: Mapping[str, CategoryTotal] | None = field(default_factory=dict)

    @property
    def sum_ns(self) -> int:
        """Kernels, copies, fills and opaque graphs, added up."""
        return self.kernel_ns + self.memcpy_ns + self.memset_ns + self.graph_ns

    @property
    def has_work(self) -> bool:
        """Whether there is a kernel, a copy, a fill or a graph."""
        return bool(self.kernels or self.memcpys or self.memsets or self.graphs)

    @property
    def overlap_ns(self) -> int | None:
        """How much of the sum ran at the same time as something else."""
        return None if self.busy_ns is None else self.sum_ns - self.busy_ns

    @property
    def idle_ns(self) -> int | None:
        """How long nothing ran between the first start and the last end."""
        return None if self.busy_ns is None or self.span_ns is None else self.span_ns - self.busy_ns

    @property
    def kernels_outside_steps(self) -> int | None:
        """Kernels launched outside any step."""
        return None if self.kernels_in_steps is None else self.kernels - self.kernels_in_steps

    def __add__(self, other: GpuTotals) -> GpuTotals:
        by_category: dict[str, CategoryTotal] | None = None
        if self.by_category is not None and other.by_category is not None:
            by_category = dict(self.by_category)
            for name, total in other.by_category.items():
                by_category[name] = by_category[name] + total if name in by_category else total
        return GpuTotals(
            kernels=self.kernels + other.kernels,
            kernel_ns=self.kernel_ns + other.kernel_ns,
            memcpys=self.memcpys + other.memcpys,
            memcpy_ns=self.memcpy_ns + other.memcpy_ns,
            memsets=self.memsets + other.memsets,
            memset_ns=self.memset_ns + other.memset_ns,
            graphs=self.graphs + other.graphs,
            graph_ns=self.graph_ns + other.graph_ns,
            kernels_in_steps=_added(self.kernels_in_steps, other.kernels_in_steps),
            span_ns=_added(self.span_ns, other.span_ns),
            busy_ns=_added(self.busy_ns, other.busy_ns),
            same_stream_overlap_ns=_added(self.same_stream_overlap_ns, other.same_stream_overlap_ns),
            launches=_added(self.launches, other.launches),
            launch_ns=_added(self.launch_ns, other.launch_ns),
            by_category=by_category,
        )

    def to_json_dict(self) -> dict[str, Any]:
        """The ``totals`` of the breakdown's document; null where the source cannot tell."""
        return {
            "kernels": self.kernels,
            "kernel_ns": self.kernel_ns,
            "memcpys": self.memcpys,
            "memcpy_ns": self.memcpy_ns,
            "memsets": self.memsets,
            "memset_ns": self.memset_ns,
            "opaque_graphs": self.graphs,
            "opaque_graph_ns": self.graph_ns,
            "sum_ns": self.sum_ns,
            "kernels_in_steps": self.kernels_in_steps,
            "kernels_outside_steps": self.kernels_outside_steps,
            "launches": self.launches,
            "launch_ns": self.launch_ns,
            "span_ns": self.span_ns,
            "busy_ns": self.busy_ns,
            "overlap_ns": self.overlap_ns,
            "idle_ns": self.idle_ns,
            "by_category": {name: total.to_json_dict() for name, total in (self.by_category or {}).items()},
        }


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One step of one rank, from its GPU work.

    `place` counts from 1 in the order of the capture; `number` is the step's own, where its marker has one. `start_ns`
    is that of its first GPU work, on the capture's clock, and `span_ns` lasts to the end of its last. `period_ns` is
    the time from its start to the next step's (None for the last). None in `phase` and `requests`: the marker does not
    say. `averaged` is False for a step that is cut off or has no GPU work.
    """

    rank: int
    place: int
    name: str
    phase: Phase | None
    requests: int | None
    number: int | None
    graph_mode: GraphMode
    start_ns: int
    span_ns: int
    sum_ns: int
    busy_ns: int
    kernels: int
    launches: int
    launch_ns: int
    cut_off: bool
    categories: Mapping[str, CategoryTotal]
    all_reduce_ns: tuple[int, ...] = ()
    """The durations of its all-reduces, in the order of their starts."""
    period_ns: int | None = None
    copies_ns: int = 0

    @property
    def averaged(self) -> bool:
        """Whether the step counts in averages."""
        return not self.cut_off and self.span_ns > 0

    @property
    def kernel_ns(self) -> int:
        """Sum of its kernels, without copies and fills."""
        return self.sum_ns - self.copies_ns

    @property
    def group(self) -> GroupKey:
        """The group that it is averaged in."""
        batch = batch_label(self.requests) if self.requests else UNKNOWN
        return GroupKey(UNKNOWN if self.phase is None else self.phase, batch, self.graph_mode)

    def digest(self) -> StepDigest:
        """The step as the breakdown takes it: exposed time as exclusive time, so that idle time is left over."""
        return StepDigest(
            rank=self.rank,
            step=self.place if self.number is None else self.number,
            group=self.group,
            start_unix_ns=self.start_ns,
            duration_ns=self.span_ns,
            complete=True,
            categories={
                Category(name): CategoryTime(total.sum_ns, total.exposed_ns or 0, total.count)
                for name, total in self.categories.items()
            },
        )

    def to_json_dict(self) -> dict[str, Any]:
        """One entry of the document's ``steps``."""
        return {
            "rank": self.rank,
            "place": self.place,
            "number": self.number,
            "name": self.name,
            "phase": None if self.phase is None else str(self.phase),
            "requests": self.requests,
            "graph_mode": str(self.graph_mode),
            "averaged": self.averaged,
            "cut_off": self.cut_off,
            "start_ns": self.start_ns,
            "span_ns": self.span_ns,
            "period_ns": self.period_ns,
            "sum_ns": self.sum_ns,
            "kernel_ns": self.kernel_ns,
            "busy_ns": self.busy_ns,
            "overlap_ns": self.sum_ns - self.busy_ns,
            "idle_ns": self.span_ns - self.busy_ns,
            "kernels": self.kernels,
            "launches": self.launches,
            "launch_ns": self.launch_ns,
            "by_category": {name: total.to_json_dict() for name, total in self.categories.items()},
        }


@dataclass(frozen=True, slots=True)
class KernelTotal:
    """All calls of the kernels of one name. `rule` is what gave it its category."""

    name: str
    category: str
    rule: str
    count: int
    sum_ns: int

    def __add__(self, other: KernelTotal) -> KernelTotal:
        larger = self if self.sum_ns >= other.sum_ns else other
        return KernelTotal(
            self.name, larger.category, larger.rule, self.count + other.count, self.sum_ns + other.sum_ns
        )

    def to_json_dict(self) -> dict[str, Any]:
        """One entry of the document's ``kernels``."""
        return {
            "name": self.name,
            "category": self.category,
            "rule": self.rule,
            "count": self.count,
            "sum_ns": self.sum_ns,
        }


def merged_kernels(lists: Iterable[Iterable[KernelTotal]]) -> tuple[KernelTotal, ...]:
    """Kernels of several ranks added up by name and category, largest first."""
    by_name: dict[tuple[str, str], KernelTotal] = {}
    for kernels in lists:
        for kernel in kernels:
            key = (kernel.name, kernel.category)
            by_name[key] = by_name[key] + kernel if key in by_name else kernel
    return tuple(sorted(by_name.values(), key=lambda kernel: (-kernel.sum_ns, kernel.name)))


@dataclass(frozen=True, slots=True)
class TimelineBar:
    """A stretch of a lane: neighbours of one category too close to be told apart are one bar."""

    start_ns: int
    duration_ns: int
    category: str
    kernels: int
    name: str


@dataclass(frozen=True, slots=True)
class Timeline:
    """One step as it ran: a lane per stream. Starts are offsets from the step's start."""

    rank: int
    place: int
    name: str
    span_ns: int
    lanes: tuple[tuple[str, tuple[TimelineBar, ...]], ...]


@dataclass(frozen=True, slots=True)
class StepCounts:
    """How many steps a capture has, and how many of them count. `marker` says who marked them, empty for nobody."""

    found: int = 0
    averaged: int = 0
    cut_off: int = 0
    without_work: int = 0
    marker: str = ""

    def to_json_dict(self) -> dict[str, Any]:
        """One entry of the document's ``step_counts``."""
        return {
            "found": self.found,
            "averaged": self.averaged,
            "cut_off": self.cut_off,
            "without_gpu_work": self.without_work,
            "marker": self.marker or None,
        }


@dataclass(frozen=True, slots=True)
class RankFindings:
    """What one capture tells of one rank. `path` is the file, `clock_base_ns` turns its times into Unix time."""

    rank: int
    path: str
    totals: GpuTotals
    device: int = 0
    world_size: int = 0
    clock_base_ns: int | None = None
    step_counts: StepCounts = field(default_factory=StepCounts)
    steps: tuple[StepRecord, ...] = ()
    kernels: tuple[KernelTotal, ...] = ()
    outside: Mapping[str, CategoryTotal] = field(default_factory=dict)
    """Kernels, copies and fills that were launched outside any step."""
    streams: int = 0
    timeline: Timeline | None = None
    repeated_ns: int = 0
    """What rows of a table that repeat the time of their kernels would add to the sum."""
    repeated_rows: int = 0


@dataclass(frozen=True, slots=True)
class RankWait:
    """One rank over the common steps, means per step, ns: waiting in all-reduces, and starting late."""

    rank: int
    wait_ns: int
    skew_ns: int | None
    largest_skew_ns: int | None


@dataclass(frozen=True, slots=True)
class CrossRank:
    """Ranks compared, step by step. `reason` says why there is nothing to compare; then all else is empty.

    `transfer_ns` is the time that the all-reduces of a step would take if nobody waited: the sum over them of the least
    duration of any rank. A rank's wait is its durations minus that. Means per step.
    """

    reason: str = ""
    steps: int = 0
    calls: float = 0.0
    transfer_ns: int = 0
    ranks: tuple[RankWait, ...] = ()
    skipped: int = 0
    """Steps that are on all ranks, but with different numbers of all-reduces."""
    slowest: int | None = None
    verdict: str = ""

    def to_json_dict(self) -> dict[str, Any]:
        """The document's ``cross_rank``."""
        if self.reason:
            return {"abstained": self.reason}
        return {
            "steps": self.steps,
            "steps_skipped": self.skipped,
            "all_reduce": {
                "calls_per_step": self.calls,
                "transfer_ns": self.transfer_ns,
                "wait_ns": {str(rank.rank): rank.wait_ns for rank in self.ranks},
            },
            "skew_ns": {
                str(rank.rank): {"mean": rank.skew_ns, "max": rank.largest_skew_ns}
                for rank in self.ranks
                if rank.skew_ns is not None
            },
            "slowest_rank": self.slowest,
            "verdict": self.verdict,
        }


@dataclass(frozen=True, slots=True)
class GpuFindings:
    """Everything that the traces of one run tell, rank by rank and together."""

    ranks: tuple[RankFindings, ...]
    cross_rank: CrossRank
    words: tuple[str, ...] = ()
    """Why sums and step times differ, in sentences."""
    table_rows: bool = False
    """Whether there is no timeline, only a table of sums."""

    @property
    def totals(self) -> GpuTotals:
        """All ranks added up."""
        if not self.ranks:
            return GpuTotals()
        total = self.ranks[0].totals
        for rank in self.ranks[1:]:
            total = total + rank.totals
        return total

    @property
    def has_work(self) -> bool:
        """Whether there is any GPU work at all. Without it every figure would be a zero that means nothing."""
        return any(rank.totals.has_work for rank in self.ranks)

    @property
    def kernels(self) -> tuple[KernelTotal, ...]:
        """The kernels of all ranks by name, largest first."""
        return merged_kernels(rank.kernels for rank in self.ranks)

    @property
    def timeline(self) -> Timeline | None:
        """The timeline of the first rank that has one."""
        return next((rank.timeline for rank in self.ranks if rank.timeline is not None), None)

    def to_json_dict(self) -> dict[str, Any]:
        """What an analysis adds to the document of the breakdown."""
        return {
            "totals": _or_null(self.totals),
            "per_rank": {str(rank.rank): _or_null(rank.totals) for rank in self.ranks},
            "files": {str(rank.rank): rank.path for rank in self.ranks},
            "step_counts": {str(rank.rank): rank.step_counts.to_json_dict() for rank in self.ranks},
            "cross_rank": self.cross_rank.to_json_dict(),
            "explanation": list(self.words),
            "steps": [step.to_json_dict() for rank in self.ranks for step in rank.steps],
            "kernels": [kernel.to_json_dict() for kernel in self.kernels],
        }


def _or_null(totals: GpuTotals) -> dict[str, Any] | None:
    """A capture without GPU work has no figures, rather than zeros."""
    return totals.to_json_dict() if totals.has_work else None
