"""Ranks compared: which steps are the same on all of them, who waited for whom, who started late.

For the n-th all-reduce of a step, transfer = the least duration of any rank and wait(rank) = its duration - transfer.
All ranks leave an all-reduce together, so the one that came last spent no time waiting. That needs no common clock. The
skew of a rank in a step is its first GPU work's start minus the earliest rank's; that does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from vllm_k25_instrument.report.caveats import format_ranks
from vllm_k25_instrument.report.digest import GroupKey
from vllm_k25_instrument.report.gpu import CrossRank, RankFindings, RankWait, StepRecord
from vllm_k25_instrument.report.slowest import SlowestRank, SlowestTally

MAX_SHIFT: Final = 64
"""Steps by which the captures of two ranks may begin apart."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """The comparison, and the slowest rank of each group for the tables."""

    cross_rank: CrossRank
    slowest: Mapping[GroupKey, SlowestRank]


def compare_ranks(ranks: Sequence[RankFindings], expected: int) -> Comparison:
    """Compare `ranks` of `expected`; abstains, with the reason, where that cannot be done."""
    if expected < 2:
        return Comparison(CrossRank(reason="there is one rank only"), {})
    if len(ranks) < expected:
        return Comparison(CrossRank(reason=f"{len(ranks)} of {expected} ranks found"), {})
    if any(not rank.steps for rank in ranks):
        without = format_ranks(rank.rank for rank in ranks if not rank.steps)
        return Comparison(CrossRank(reason=f"no steps on {without}"), {})
    matched = match_steps(ranks)
    if isinstance(matched, str):
        return Comparison(CrossRank(reason=matched), {})
    slowest = SlowestTally(expected)
    keys: dict[GroupKey, int] = {}
    for number, steps in enumerate(matched):
        # Ranks may name a step's graph mode differently by its launches; the first one's word counts.
        group = steps[0].group
        keys[group] = keys.get(group, 0) + 1
        for step in steps:
            slowest.add(replace(step.digest(), step=number, group=group))
    verdicts = {key: slowest.verdict(key) for key in keys}
    largest = max(keys, key=lambda key: keys[key]) if keys else None
    verdict = verdicts[largest] if largest is not None else SlowestRank(reason="no step is whole on all ranks")
    return Comparison(_waits(ranks, matched, verdict), verdicts)


def _waits(ranks: Sequence[RankFindings], matched: Sequence[Sequence[StepRecord]], verdict: SlowestRank) -> CrossRank:
    comparable = [steps for steps in matched if len({len(step.all_reduce_ns) for step in steps}) == 1]
    if not comparable:
        return CrossRank(reason="no step is whole on all ranks, with equally many all-reduces on each")
    count = len(comparable)
    transfer = 0
    waits = [0] * len(ranks)
    for steps in comparable:
        for durations in zip(*(step.all_reduce_ns for step in steps), strict=True):
            least = min(durations)
            transfer += least
            for n, duration in enumerate(durations):
                waits[n] += duration - least
    bases = [rank.clock_base_ns for rank in ranks]
    skews: list[list[int]] = [[] for _ in ranks]
    if all(base is not None for base in bases):
        for steps in comparable:
            starts = [step.start_ns + (base or 0) for step, base in zip(steps, bases, strict=True)]
            for n, start in enumerate(starts):
                skews[n].append(start - min(starts))
    return CrossRank(
        steps=count,
        calls=sum(len(steps[0].all_reduce_ns) for steps in comparable) / count,
        transfer_ns=round(transfer / count),
        ranks=tuple(
            RankWait(
                rank=rank.rank,
                wait_ns=round(waits[n] / count),
                skew_ns=round(sum(skews[n]) / count) if skews[n] else None,
                largest_skew_ns=max(skews[n], default=None),
            )
            for n, rank in enumerate(ranks)
        ),
        skipped=len(matched) - count,
        slowest=verdict.rank,
        verdict=verdict.sentence,
    )


def match_steps(ranks: Sequence[RankFindings]) -> list[tuple[StepRecord, ...]] | str:
    """The steps that are whole on all ranks, one tuple per step, a record per rank; or why there is no telling.

    By the steps' own numbers where all have one. Else by their order, if the names agree; where captures begin at
    different steps, by the shift at which names agree, and of several such by the clocks.
    """
    if all(step.number is not None for rank in ranks for step in rank.steps):
        by_number = [{step.number: step for step in rank.steps} for rank in ranks]
        common = [number for number in by_number[0] if all(number in steps for steps in by_number[1:])]
        if not common:
            return "the ranks have no step in common"
        return _whole([tuple(steps[number] for steps in by_number) for number in common])
    first = ranks[0]
    shifts = [0]
    for other in ranks[1:]:
        shift = _shift(first, other)
        if shift is None:
            return (
                f"the steps of {format_ranks([first.rank, other.rank])} cannot be matched: they are marked "
                "differently, or begin at different steps and have no common clock"
            )
        shifts.append(shift)
    begin = max(-shift for shift in shifts)
    end = min(len(rank.steps) - shift for rank, shift in zip(ranks, shifts, strict=True))
    return _whole(
        [
            tuple(rank.steps[n + shift] for rank, shift in zip(ranks, shifts, strict=True))
            for n in range(max(begin, 0), end)
        ]
    )


def _whole(steps: list[tuple[StepRecord, ...]]) -> list[tuple[StepRecord, ...]]:
    return [those for those in steps if all(step.averaged for step in those)]


def _shift(first: RankFindings, other: RankFindings) -> int | None:
    """`other`'s step n + shift is `first`'s step n; None where there is no telling."""
    mine = [(step.name, step.phase, step.requests) for step in first.steps]
    others = [(step.name, step.phase, step.requests) for step in other.steps]
    if mine == others:
        return 0
    agreeing = [shift for shift in range(-MAX_SHIFT, MAX_SHIFT + 1) if _agree(mine, others, shift)]
    if len(agreeing) < 2:
        return agreeing[0] if agreeing else None
    if first.clock_base_ns is None or other.clock_base_ns is None:
        return None
    return min(agreeing, key=lambda shift: (_distance(first, other, shift), abs(shift)))


def _agree(mine: Sequence[object], others: Sequence[object], shift: int) -> bool:
    begin = max(0, -shift)
    end = min(len(mine), len(others) - shift)
    # A few steps that happen to agree at the edges are no match.
    if 2 * (end - begin) < min(len(mine), len(others)):
        return False
    return all(mine[n] == others[n + shift] for n in range(begin, end))


def _distance(first: RankFindings, other: RankFindings, shift: int) -> float:
    """Mean distance of the starts of the steps that a shift puts side by side, ns."""
    begin = max(0, -shift)
    end = min(len(first.steps), len(other.steps) - shift)
    between = (other.clock_base_ns or 0) - (first.clock_base_ns or 0)
    apart = [
        abs(other.steps[n + shift].start_ns - first.steps[n].start_ns + between)
        for n in range(begin, end)
        if first.steps[n].span_ns and other.steps[n + shift].span_ns
    ]
    return sum(apart) / len(apart) if apart else float("inf")
