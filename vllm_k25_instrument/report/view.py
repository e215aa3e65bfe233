"""What the renderers show of a breakdown: per-step figures of each group, rank beside rank."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

from vllm_k25_instrument.model import Category
from vllm_k25_instrument.positions import INFERRED, POSITIONS, UNNAMED
from vllm_k25_instrument.report.breakdown import Breakdown, Group, StepTimes, category_order
from vllm_k25_instrument.report.caveats import format_ranks
from vllm_k25_instrument.report.digest import GroupKey
from vllm_k25_instrument.report.figures import batch_text
from vllm_k25_instrument.report.slowest import SlowestRank

INFERRED_MARK = "≈"

FEW_RANKS = 4
"""Up to this many ranks a table has a column for each; beyond, their mean and their spread."""


@dataclass(frozen=True, slots=True)
class Terms:
    """What a source calls its times. `step` is what a percentage is of."""

    own: str
    whole: str
    rest: str
    steps: str
    share_note: str


LIVE_TERMS = Terms(
    own="exclusive",
    whole="inclusive",
    rest=str(Category.UNATTRIBUTED),
    steps="sampled ",
    share_note="% is of the step's duration and uses exclusive time: per rank it adds up to 100 with unattributed.",
)

TRACE_TERMS = Terms(
    own="exposed",
    whole="sum",
    rest="idle",
    steps="",
    share_note="% is of the step's span on the GPU and uses exposed time (each instant given to one kernel, compute "
    "first): per rank it adds up to 100 with idle. Sums count what overlaps twice, and are never a share.",
)


@dataclass(frozen=True, slots=True)
class Cell:
    """A category on one rank, or on the mean of all, per step: ns, and calls.

    `share` is exclusive time / step duration (0 to 1). `sum_ns` is the inclusive time. For `unattributed` there is no
    inclusive time and no call.
    """

    exclusive_ns: float
    share: float
    sum_ns: float = 0.0
    calls: float = 0.0

    @property
    def ns_per_call(self) -> float:
        """Mean inclusive time of a call; 0 where there is no call."""
        return self.sum_ns / self.calls if self.calls else 0.0


@dataclass(frozen=True, slots=True)
class Row:
    """A category over the ranks. `cells` lacks the ranks on which the category has no range at all."""

    name: str
    cells: Mapping[int, Cell]
    mean: Cell
    lowest_ns: float
    highest_ns: float
    highest_rank: int

    measured: bool = True
    """False for what is left over, which has no calls."""

    inferred: bool = False
    """Whether it is a part of what is left over, named by its position."""

    @property
    def label(self) -> str:
        """Its name, marked where it is inferred."""
        return f"{INFERRED_MARK} {self.name}" if self.inferred else self.name


@dataclass(frozen=True, slots=True)
class StepRow:
    """A statistic of the step duration over the ranks, ns."""

    name: str
    values: Mapping[int, int]

    @property
    def mean_ns(self) -> float:
        return sum(self.values.values()) / len(self.values)

    @property
    def lowest_ns(self) -> int:
        return min(self.values.values())

    @property
    def highest_ns(self) -> int:
        return max(self.values.values())

    @property
    def highest_rank(self) -> int:
        return max(self.values, key=lambda rank: self.values[rank])


@dataclass(frozen=True, slots=True)
class GroupView:
    """One phase x batch x graph mode on all its ranks. The shares of `rows` add up to 1 on each rank."""

    key: GroupKey
    ranks: tuple[int, ...]
    steps: Mapping[int, int]
    rows: tuple[Row, ...]
    step_rows: tuple[StepRow, ...]
    slowest: SlowestRank
    terms: Terms = LIVE_TERMS
    inferred: tuple[Row, ...] = ()
    """The last of `rows` taken apart by position, `unnamed` last; empty where that cannot be done."""

    @property
    def table_rows(self) -> tuple[Row, ...]:
        """All rows of a table: those that add up to the step, and below the last what it consists of."""
        return self.rows + self.inferred

    @property
    def inferred_note(self) -> str:
        """What the mark of an inferred row means; "" where there is none."""
        return f"{INFERRED_MARK} part of {self.terms.rest}, {INFERRED}." if self.inferred else ""

    @property
    def title(self) -> str:
        """``decode · batch 64 · full graph``."""
        return self.key.title

    @property
    def subtitle(self) -> str:
        """``17-64 requests · 771 sampled steps on each of ranks 0-7``; nobody sampled the steps of a trace."""
        counts = sorted(set(self.steps.values()))
        number = f"{counts[0]:,}" if len(counts) == 1 else f"{counts[0]:,} to {counts[-1]:,}"
        noun = "step" if counts == [1] else "steps"
        each = "each of " if len(self.ranks) > 1 else ""
        return f"{batch_text(self.key.batch)} · {number} {self.terms.steps}{noun} on {each}{format_ranks(self.ranks)}"

    @property
    def step_mean_ns(self) -> float:
        """Mean over the ranks of their mean step duration."""
        return self.step_rows[0].mean_ns


def group_views(breakdown: Breakdown, slowest: Mapping[GroupKey, SlowestRank] | None = None) -> list[GroupView]:
    """A view of each phase x batch x graph mode of the breakdown, in its order."""
    by_key: dict[GroupKey, list[Group]] = {}
    for group in breakdown.groups:
        by_key.setdefault(group.key, []).append(group)
    terms = LIVE_TERMS if breakdown.gpu is None else TRACE_TERMS
    return [_group_view(key, groups, (slowest or {}).get(key, SlowestRank()), terms) for key, groups in by_key.items()]


def _group_view(key: GroupKey, groups: list[Group], slowest: SlowestRank, terms: Terms) -> GroupView:
    names = sorted({name for group in groups for name in group.categories}, key=category_order)
    step_mean = sum(group.step_sum_ns / group.steps for group in groups) / len(groups)
    rows = [
        _row(name, {g.rank: _cell(g, name) for g in groups if name in g.categories}, groups, step_mean)
        for name in names
    ]
    rest = {g.rank: _per_step(g, g.unattributed_ns) for g in groups}
    rows.append(replace(_row(terms.rest, rest, groups, step_mean), measured=False))
    parts: dict[str, dict[int, Cell]] = {}
    for position in POSITIONS:
        if any(position in g.between_ns for g in groups):
            parts[position] = {g.rank: _per_step(g, g.between_ns.get(position, 0)) for g in groups}
    if parts:
        parts[UNNAMED] = {g.rank: _per_step(g, g.unnamed_ns) for g in groups}
    return GroupView(
        key=key,
        ranks=tuple(group.rank for group in groups),
        steps={group.rank: group.steps for group in groups},
        rows=tuple(rows),
        step_rows=tuple(
            StepRow(name, {group.rank: figure(group.step_ns) for group in groups}) for name, figure in _STEP_FIGURES
        ),
        slowest=slowest,
        terms=terms,
        inferred=tuple(
            replace(_row(name, cells, groups, step_mean), measured=False, inferred=True)
            for name, cells in parts.items()
        ),
    )


_STEP_FIGURES: tuple[tuple[str, Callable[[StepTimes], int]], ...] = (
    ("step mean", lambda times: times.mean),
    ("step p50", lambda times: times.p50),
    ("step p99", lambda times: times.p99),
)


def _cell(group: Group, name: str) -> Cell:
    time = group.categories[name]
    return _per_step(group, time.exclusive_ns, time.sum_ns, time.count)


def _per_step(group: Group, exclusive_ns: int, sum_ns: int = 0, count: int = 0) -> Cell:
    share = exclusive_ns / group.step_sum_ns if group.step_sum_ns else 0.0
    return Cell(exclusive_ns / group.steps, share, sum_ns / group.steps, count / group.steps)


def _row(name: str, cells: Mapping[int, Cell], groups: list[Group], step_mean_ns: float) -> Row:
    # A rank without a range of the category spent no time on it: it counts in the mean, so that means add up.
    own = {group.rank: cells[group.rank].exclusive_ns if group.rank in cells else 0.0 for group in groups}
    exclusive = _mean(own.values())
    mean = Cell(
        exclusive_ns=exclusive,
        share=exclusive / step_mean_ns if step_mean_ns else 0.0,
        sum_ns=sum(cell.sum_ns for cell in cells.values()) / len(groups),
        calls=sum(cell.calls for cell in cells.values()) / len(groups),
    )
    highest = max(own, key=lambda rank: own[rank])
    return Row(name, cells, mean, min(own.values()), own[highest], highest)


def _mean(values: Iterable[float]) -> float:
    listed = list(values)
    return sum(listed) / len(listed)
