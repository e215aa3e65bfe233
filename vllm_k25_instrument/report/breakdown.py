"""The breakdown: where the time of the steps went, by phase, batch, graph mode and rank.

The core that all sources share (rings, torch traces, nsys): it takes steps and knows no file. All times are integer
nanoseconds, and in each group the sum of the exclusive times plus unattributed is the total step time, exactly.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, Final

from vllm_k25_instrument.model import BATCH_LABELS, GRAPH_MODES, PHASES, Category, StepSample
from vllm_k25_instrument.positions import POSITIONS, Position
from vllm_k25_instrument.report.caveats import Caveat, CaveatCode, by_rank, format_ranks, is_complete
from vllm_k25_instrument.report.digest import CategoryTime, GroupKey, StepDigest, digest_step
from vllm_k25_instrument.report.gpu import GpuFindings

SCHEMA: Final = "vllm_k25.breakdown/1"


class Source(StrEnum):
    """Where the steps come from."""

    RING = "ring"
    TORCH_TRACE = "torch-trace"
    NSYS = "nsys"
    KEY_AVERAGES = "key-averages"


def nearest_rank(ordered: Sequence[int], percent: int) -> int:
    """The `percent`-th percentile of `ordered` (ascending) by the nearest-rank definition.

    The value at position ceil(percent / 100 * n), counted from 1: always a value that was observed, never an
    interpolation. Raises ValueError where `ordered` is empty or `percent` is outside 1 to 100.
    """
    if not ordered or not 1 <= percent <= 100:
        raise ValueError(f"no {percent}th percentile of {len(ordered)} values")
    return ordered[-(-percent * len(ordered) // 100) - 1]


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Distribution of the step durations of a group, ns. `mean` is rounded half up, percentiles are nearest-rank."""

    mean: int
    p50: int
    p99: int

    @classmethod
    def of(cls, durations: Iterable[int]) -> StepTimes:
        """Of at least one duration. Raises ValueError where there is none."""
        ordered = sorted(durations)
        p50, p99 = nearest_rank(ordered, 50), nearest_rank(ordered, 99)
        return cls(mean=(2 * sum(ordered) + len(ordered)) // (2 * len(ordered)), p50=p50, p99=p99)


@dataclass(frozen=True, slots=True)
class Group:
    """The sampled steps of one rank that are comparable. Sums are over all `steps` of the group, ns.

    Categories without a range in any of the steps are absent. `step_sum_ns` is the total step time:
    sum of exclusive + `unattributed_ns`.
    """

    key: GroupKey
    rank: int
    steps: int
    step_sum_ns: int
    step_ns: StepTimes
    categories: Mapping[str, CategoryTime]
    unattributed_ns: int
    between_ns: Mapping[str, int] = field(default_factory=dict)
    """Parts of `unattributed_ns`, inferred by position (:mod:`vllm_k25_instrument.positions`)."""

    @property
    def unnamed_ns(self) -> int:
        """What is left of `unattributed_ns`."""
        return self.unattributed_ns - sum(self.between_ns.values())

    def to_json_dict(self) -> dict[str, Any]:
        """The group as in the schema of the breakdown."""
        return {
            "phase": str(self.key.phase),
            "batch": self.key.batch,
            "graph_mode": str(self.key.graph_mode),
            "rank": self.rank,
            "steps": self.steps,
            "step_ns": {"mean": self.step_ns.mean, "p50": self.step_ns.p50, "p99": self.step_ns.p99},
            "categories": {
                name: {"sum_ns": time.sum_ns, "exclusive_ns": time.exclusive_ns, "count": time.count}
                for name, time in self.categories.items()
            },
            "unattributed_ns": self.unattributed_ns,
        } | ({"between_ns": dict(self.between_ns)} if self.between_ns else {})


@dataclass(frozen=True, slots=True)
class Breakdown:
    """What was measured, and how far it can be believed."""

    source: Source
    ranks_found: tuple[int, ...]
    ranks_expected: int
    groups: tuple[Group, ...]
    caveats: tuple[Caveat, ...] = ()
    gpu: GpuFindings | None = None
    """What traces tell beyond that; None for rings."""

    @property
    def complete(self) -> bool:
        """Whether all ranks are there and everything of them could be read."""
        return is_complete(self.caveats)

    def only(
        self,
        *,
        phases: Collection[str] = (),
        batches: Collection[str] = (),
        ranks: Collection[int] = (),
    ) -> Breakdown:
        """The same breakdown with fewer groups; an empty collection leaves everything in."""
        return replace(
            self,
            groups=tuple(
                group
                for group in self.groups
                if (not phases or group.key.phase in phases)
                and (not batches or group.key.batch in batches)
                and (not ranks or group.rank in ranks)
            ),
        )

    def to_json_dict(self) -> dict[str, Any]:
        """The document of schema ``vllm_k25.breakdown/1``: plain dictionaries, lists, strings, integers, booleans."""
        return {
            "schema": SCHEMA,
            "source": str(self.source),
            "complete": self.complete,
            "warnings": [caveat.to_json_dict() for caveat in self.caveats],
            "ranks": {"found": list(self.ranks_found), "expected": self.ranks_expected},
            "groups": [group.to_json_dict() for group in self.groups],
        } | ({} if self.gpu is None else self.gpu.to_json_dict())


_CATEGORY_ORDER: Final = {str(category): place for place, category in enumerate(Category)}


def category_order(name: str) -> tuple[int, str]:
    """Sort key that puts categories in the order of the closed set, unknown ones last."""
    return _CATEGORY_ORDER.get(name, len(_CATEGORY_ORDER)), name


def group_order(key: GroupKey) -> tuple[int, int, int]:
    """Sort key of groups: decode first, then by batch, then by graph mode; what is unknown comes last."""
    return _place(PHASES, key.phase), _place(BATCH_LABELS, key.batch), _place(GRAPH_MODES, key.graph_mode)


def _place(known: Sequence[str], value: str) -> int:
    return known.index(value) if value in known else len(known)


class _GroupSum:
    """The running sums of one group on one rank."""

    def __init__(self) -> None:
        self.durations: list[int] = []
        self.times: dict[Category, CategoryTime] = {}
        self.unattributed_ns = 0
        self.between_ns: Counter[Position] = Counter()

    def add(self, step: StepDigest) -> None:
        self.durations.append(step.duration_ns)
        self.unattributed_ns += step.unattributed_ns
        self.between_ns.update(step.between_ns)
        for category, time in step.categories.items():
            so_far = self.times.get(category)
            self.times[category] = time if so_far is None else so_far + time

    def group(self, key: GroupKey, rank: int) -> Group:
        names = sorted((str(category) for category in self.times), key=category_order)
        return Group(
            key=key,
            rank=rank,
            steps=len(self.durations),
            step_sum_ns=sum(self.durations),
            step_ns=StepTimes.of(self.durations),
            categories={name: self.times[Category(name)] for name in names},
            unattributed_ns=self.unattributed_ns,
            between_ns={
                str(position): self.between_ns[position] for position in POSITIONS if self.between_ns[position]
            },
        )


class StepTally:
    """Adds up steps, in any order, as they are read: a ring of thousands of steps is never held in memory."""

    def __init__(self) -> None:
        self._sums: dict[tuple[GroupKey, int], _GroupSum] = {}
        self._incomplete: dict[int, int] = {}
        self._overlapping: dict[int, int] = {}

    def add(self, step: StepDigest) -> None:
        """Count one sampled step of one rank."""
        self._sums.setdefault((step.group, step.rank), _GroupSum()).add(step)
        if not step.complete:
            self._incomplete[step.rank] = self._incomplete.get(step.rank, 0) + 1
        if step.unattributed_ns < 0:
            self._overlapping[step.rank] = self._overlapping.get(step.rank, 0) + 1

    def breakdown(
        self, *, source: Source, ranks_found: Iterable[int], ranks_expected: int, caveats: Iterable[Caveat] = ()
    ) -> Breakdown:
        """The breakdown of the steps so far.

        `ranks_found` are the ranks of which there is data at all, `ranks_expected` is the world size, `caveats` what
        the source has to say for itself; missing ranks, ranks without steps, incomplete and overlapping ones are
        added here.
        """
        found = tuple(sorted(set(ranks_found)))
        keys = sorted(self._sums, key=lambda at: (group_order(at[0]), at[1]))
        return Breakdown(
            source=source,
            ranks_found=found,
            ranks_expected=ranks_expected,
            groups=tuple(self._sums[key, rank].group(key, rank) for key, rank in keys),
            caveats=(*caveats, *self._own_caveats(found, ranks_expected)),
        )

    def _own_caveats(self, found: tuple[int, ...], expected: int) -> Iterable[Caveat]:
        missing = sorted(set(range(expected)) - set(found))
        if missing:
            yield Caveat(
                CaveatCode.RANKS_MISSING,
                f"{len(found)} of {expected} ranks found, {format_ranks(missing)} missing: what they did, and which "
                "rank is the slowest, is not known",
            )
        seen = {rank for _, rank in self._sums}
        without = sorted(set(found) - seen)
        if without and seen:
            yield Caveat(
                CaveatCode.RANK_WITHOUT_SAMPLES,
                f"{format_ranks(without)}: no sampled step, though other ranks have some",
            )
        if self._incomplete:
            counts = {rank: f"{n:,} incomplete" for rank, n in self._incomplete.items()}
            yield Caveat(
                CaveatCode.SAMPLES_INCOMPLETE,
                f"samples with ranges missing ({by_rank(counts)}): the missing ranges' time counts as unattributed",
            )
        if self._overlapping:
            counts = {rank: f"{n:,} step{'s' if n > 1 else ''}" for rank, n in self._overlapping.items()}
            yield Caveat(
                CaveatCode.STREAMS_OVERLAP,
                f"exclusive times add up to more than the step ({by_rank(counts)}): ranges of several streams ran at "
                "the same time, so unattributed is negative there",
            )


def breakdown_of(
    samples: Iterable[tuple[int, StepSample]],
    *,
    source: Source,
    ranks_expected: int,
    caveats: Iterable[Caveat] = (),
) -> Breakdown:
    """The breakdown of ``(global rank, sample)`` pairs of any source; the ranks found are those of the pairs."""
    tally = StepTally()
    ranks: set[int] = set()
    for rank, sample in samples:
        ranks.add(rank)
        tally.add(digest_step(rank, sample))
    own = list(caveats)
    if not ranks:
        own.append(Caveat(CaveatCode.NO_SAMPLES, "there is no step to break down"))
    return tally.breakdown(source=source, ranks_found=ranks, ranks_expected=ranks_expected, caveats=own)
