"""Which graph modes a run has timed, and why samples are missing: the lines below the demo's table."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from vllm_k25_instrument.model import GRAPH_MODES, LOST_REASONS, PHASES, LostReason
from vllm_k25_instrument.report.breakdown import Breakdown
from vllm_k25_instrument.report.digest import graph_text
from vllm_k25_instrument.report.ringset import LOST_REMEDY
from vllm_k25_instrument.ring import RingError, RingReader

Lost = Mapping[LostReason, int]


def lost_of(reader: RingReader) -> dict[LostReason, int]:
    """Samples that a rank has lost since it started, by reason; reasons that never happened are absent."""
    totals = reader.totals()
    counts = {reason: totals.lost(code) for code, reason in enumerate(LOST_REASONS)}
    return {reason: count for reason, count in counts.items() if count}


def most_lost(readers: Iterable[RingReader], before: Mapping[object, Lost]) -> dict[LostReason, int]:
    """Samples lost since `before` (by the path of the ring), of several ranks the largest of each reason."""
    most: dict[LostReason, int] = {}
    for reader in readers:
        earlier = before.get(reader.path, {})
        try:
            counts = lost_of(reader)
        except RingError:
            continue
        for reason, count in counts.items():
            since = count - earlier.get(reason, 0)
            if since > most.get(reason, 0):
                most[reason] = since
    return most


def graph_mode_lines(breakdown: Breakdown, lost: Lost) -> list[str]:
    """``decode: full graph 85 steps, eager 3 steps · prefill: …``, then a line per reason of a lost sample.

    Steps are of one rank; of several, the one with the most.
    """
    phases = []
    for phase in PHASES:
        modes = {mode: _most_steps(breakdown, phase, mode) for mode in GRAPH_MODES}
        timed = [f"{graph_text(mode)} {_steps(count)}" for mode, count in modes.items() if count]
        if timed:
            phases.append(f"{phase}: {', '.join(timed)}")
    lines = [f"graph modes  {' · '.join(phases) or 'no step was timed'}"]
    return lines + [
        f"not timed    {_steps(lost[reason])} {reason} ({LOST_REMEDY[reason]})"
        for reason in LOST_REASONS
        if lost.get(reason)
    ]


def _most_steps(breakdown: Breakdown, phase: str, mode: str) -> int:
    by_rank: dict[int, int] = {}
    for group in breakdown.groups:
        if group.key.phase == phase and group.key.graph_mode == mode:
            by_rank[group.rank] = by_rank.get(group.rank, 0) + group.steps
    return max(by_rank.values(), default=0)


def _steps(count: int) -> str:
    return f"{count:,} step{'' if count == 1 else 's'}"
