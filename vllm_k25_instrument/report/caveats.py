"""What a reader must know before believing a breakdown: a closed set of warnings with stable codes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final


class CaveatCode(StrEnum):
    """Code of a warning. Codes are part of the JSON schema: add, never rename."""

    NO_SAMPLES = "no_samples"
    NO_STEPS = "no_steps"
    RANKS_MISSING = "ranks_missing"
    RANK_WITHOUT_SAMPLES = "rank_without_samples"
    RANK_TWICE = "rank_twice"
    INSTANCES_MIXED = "instances_mixed"
    RING_UNREADABLE = "ring_unreadable"
    SAMPLES_CORRUPTED = "samples_corrupted"
    SAMPLES_INCOMPLETE = "samples_incomplete"
    SAMPLES_OVERWRITTEN = "samples_overwritten"
    SAMPLES_LOST = "samples_lost"
    HOOK_NEVER_FIRED = "hook_never_fired"
    HOOK_ERRORS = "hook_errors"
    STREAMS_OVERLAP = "streams_overlap"


INCOMPLETE_CODES: Final = frozenset(
    {
        CaveatCode.NO_SAMPLES,
        CaveatCode.NO_STEPS,
        CaveatCode.RANKS_MISSING,
        CaveatCode.RANK_WITHOUT_SAMPLES,
        CaveatCode.RANK_TWICE,
        CaveatCode.INSTANCES_MIXED,
        CaveatCode.RING_UNREADABLE,
        CaveatCode.SAMPLES_CORRUPTED,
        CaveatCode.SAMPLES_INCOMPLETE,
    }
)
"""With one of these a breakdown is not complete: data that should be there is not, or cannot be trusted."""


@dataclass(frozen=True, slots=True)
class Caveat:
    """One warning: a code for programs, a sentence with the remedy for people."""

    code: CaveatCode
    message: str


def is_complete(caveats: Iterable[Caveat]) -> bool:
    """Whether none of the caveats says that data are missing or untrustworthy."""
    return not any(caveat.code in INCOMPLETE_CODES for caveat in caveats)


def format_ranks(ranks: Iterable[int]) -> str:
    """Ranks in words, runs contracted: ``rank 3``, ``ranks 0-3, 7``."""
    ordered = sorted(set(ranks))
    if not ordered:
        return "no rank"
    runs: list[list[int]] = []
    for rank in ordered:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    text = ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
    return f"{'rank' if len(ordered) == 1 else 'ranks'} {text}"


def by_rank(texts: Mapping[int, str]) -> str:
    """One clause per distinct text, each with the ranks that it is true of."""
    ranks: dict[str, list[int]] = {}
    for rank, text in sorted(texts.items()):
        ranks.setdefault(text, []).append(rank)
    return "; ".join(f"{format_ranks(those)}: {text}" for text, those in ranks.items())
