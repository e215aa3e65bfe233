"""Which rank the others wait for: the one with the most time outside all-reduce.

All ranks of a tensor-parallel group leave an all-reduce together, so their steps take equally long whoever is to
blame; the slowest rank is the one that spends the least of it waiting. So: mean over the steps that all ranks have
sampled of (step duration - exclusive all-reduce time); the largest is the slowest. Where that cannot be said, this
abstains and says why: also where the lead is within ``LEAD_ERRORS`` standard errors of its mean (paired, step by step),
which of equal ranks happens to be ahead being chance.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import stdev
from typing import Final

from vllm_k25_instrument.model import Category
from vllm_k25_instrument.report.digest import GroupKey, StepDigest

LEAD_ERRORS: Final = 3
"""A lead of fewer standard errors marks nobody."""


@dataclass(frozen=True, slots=True)
class SlowestRank:
    """The verdict over `steps` common sampled steps.

    `rank` is None where it abstains, for the `reason` given. `excess_ns` is how much longer per step the rank is at
    work outside all-reduce than the other ranks are on average.
    """

    rank: int | None = None
    reason: str = ""
    steps: int = 0
    excess_ns: int = 0
    work_ns: int = 0
    """Mean time outside all-reduce per step of the slowest rank."""

    @property
    def sentence(self) -> str:
        """The verdict in words."""
        if self.rank is None:
            return f"slowest rank not marked: {self.reason}"
        others = self.work_ns - self.excess_ns
        percent = f" ({100 * self.excess_ns / others:+.1f} %)" if others > 0 else ""
        return (
            f"slowest rank {self.rank}: {self.excess_ns / 1000:+,.1f} µs{percent} per step outside all-reduce against "
            f"the mean of the others, over {self.steps:,} common steps"
        )


class SlowestTally:
    """Adds up steps, in any order, and says for each group which rank was the slowest."""

    def __init__(self, ranks_expected: int, *, comparable: bool = True) -> None:
        """`comparable`: whether all ranks do the same work (one pipeline stage, one data-parallel replica)."""
        self._expected = ranks_expected
        self._comparable = comparable
        self._work: dict[GroupKey, dict[int, dict[int, int]]] = {}

    def add(self, step: StepDigest) -> None:
        """Count one sampled step of one rank."""
        by_step = self._work.setdefault(step.group, {})
        work_ns = step.duration_ns - step.exclusive_ns(Category.ALL_REDUCE)
        by_step.setdefault(step.step, {})[step.rank] = work_ns

    def verdict(self, group: GroupKey) -> SlowestRank:
        """The slowest rank in the steps of `group`."""
        steps = self._work.get(group, {})
        ranks = {rank for of_step in steps.values() for rank in of_step}
        if self._expected < 2:
            return SlowestRank(reason="there is one rank only")
        if not self._comparable:
            return SlowestRank(reason="pipeline stages and data-parallel replicas do different work")
        if len(ranks) < self._expected:
            return SlowestRank(reason=f"{len(ranks)} of {self._expected} ranks have samples here")
        common = [of_step for of_step in steps.values() if len(of_step) == len(ranks)]
        if not common:
            return SlowestRank(reason="no step was sampled on all ranks")
        totals = {rank: sum(of_step[rank] for of_step in common) for rank in sorted(ranks)}
        slowest = max(totals, key=lambda rank: totals[rank])
        others = (sum(totals.values()) - totals[slowest]) // (len(totals) - 1)
        leads = [of_step[slowest] - (sum(of_step.values()) - of_step[slowest]) / (len(ranks) - 1) for of_step in common]
        if not _is_clear(leads):
            return SlowestRank(reason="the ranks do not differ beyond chance", steps=len(common))
        return SlowestRank(
            rank=slowest,
            steps=len(common),
            excess_ns=(totals[slowest] - others) // len(common),
            work_ns=totals[slowest] // len(common),
        )


def _is_clear(leads_ns: Sequence[float]) -> bool:
    """Whether the mean of the leads is beyond chance. Of a single step there is no telling: it is taken as it is."""
    mean = sum(leads_ns) / len(leads_ns)
    error = stdev(leads_ns) / len(leads_ns) ** 0.5 if len(leads_ns) > 1 else 0.0
    return mean > LEAD_ERRORS * error
