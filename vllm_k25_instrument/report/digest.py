"""One step, reduced to what a breakdown needs: a few integers per category in place of hundreds of ranges."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from vllm_k25_instrument.model import Category, GraphMode, Phase, StepSample, batch_label, exposed_ns
from vllm_k25_instrument.positions import Position

UNKNOWN: Final = "unknown"
"""Phase, batch or graph mode of a step whose marker does not say."""


def graph_text(graph_mode: str) -> str:
    """A graph mode in words: ``eager``, ``piecewise graph``, ``full graph``."""
    return "eager" if graph_mode == "none" else f"{graph_mode} graph"


class GroupKey(NamedTuple):
    """Steps that are comparable: same phase, same `batch` label, same graph mode; ``unknown`` where nothing says."""

    phase: Phase | str
    batch: str
    graph_mode: GraphMode | str

    @property
    def title(self) -> str:
        """As a heading: ``decode · batch 64 · full graph``."""
        return f"{self.phase} · batch {self.batch} · {graph_text(self.graph_mode)}"

    @property
    def words(self) -> str:
        """In a sentence: ``decode batch 64, full graph``."""
        return f"{self.phase} batch {self.batch}, {graph_text(self.graph_mode)}"


@dataclass(frozen=True, slots=True)
class CategoryTime:
    """Time of one category, ns, over one step or over the steps of a group.

    `sum_ns` is the plain sum of the inclusive times (nested ranges of one category count twice), `exclusive_ns` the
    sum of the exclusive times, `count` the number of ranges.
    """

    sum_ns: int
    exclusive_ns: int
    count: int

    def __add__(self, other: CategoryTime) -> CategoryTime:
        return CategoryTime(
            self.sum_ns + other.sum_ns, self.exclusive_ns + other.exclusive_ns, self.count + other.count
        )


@dataclass(frozen=True, slots=True)
class StepDigest:
    """One sampled step of one rank. Categories without a range in this step are absent."""

    rank: int
    step: int
    group: GroupKey
    start_unix_ns: int
    duration_ns: int
    complete: bool
    categories: Mapping[Category, CategoryTime]
    between_ns: Mapping[Position, int] = field(default_factory=dict)
    """Parts of the unattributed time, named by position; empty where nobody could tell."""

    @property
    def unattributed_ns(self) -> int:
        """Duration minus the sum of the exclusive times: negative where ranges of several streams overlap."""
        return self.duration_ns - sum(time.exclusive_ns for time in self.categories.values())

    def exclusive_ns(self, category: Category) -> int:
        """Exclusive time of `category` in this step, 0 where it has no range."""
        time = self.categories.get(category)
        return time.exclusive_ns if time is not None else 0


def digest_step(rank: int, sample: StepSample, *, infer: bool = False) -> StepDigest:
    """The digest of `sample`, taken on the global rank `rank`; `infer`: name the gaps between its ranges, too.

    A range that says `unattributed` of itself adds nothing: its time stays part of what nobody has accounted for.
    """
    sums: dict[Category, int] = {}
    own: dict[Category, int] = {}
    counts: dict[Category, int] = {}
    for r, exclusive in zip(sample.ranges, exposed_ns(sample), strict=True):
        category = r.category
        sums[category] = sums.get(category, 0) + r.duration_ns
        own[category] = own.get(category, 0) + exclusive
        counts[category] = counts.get(category, 0) + 1
    return StepDigest(
        rank=rank,
        step=sample.step,
        group=GroupKey(sample.phase, batch_label(sample.requests), sample.graph_mode),
        start_unix_ns=sample.start_unix_ns,
        duration_ns=sample.duration_ns,
        complete=sample.complete,
        categories={
            category: CategoryTime(sums[category], own[category], counts[category])
            for category in sums
            if category is not Category.UNATTRIBUTED
        },
        between_ns=_gaps_of(sample) if infer and sample.complete else {},
    )


def _gaps_of(sample: StepSample) -> dict[Position, int]:
    # Here and not above, since it brings numpy, which no command should wait for before it has work.
    from vllm_k25_instrument.gaps import gaps_of

    return gaps_of(sample)
