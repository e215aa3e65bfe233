"""What a reader must know before believing a breakdown: a closed set of warnings with stable codes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final


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
    HOOK_MISSING = "hook_missing"
    STREAMS_OVERLAP = "streams_overlap"
    # From files.
    INVALID_ENCODING = "invalid_encoding"
    TRUNCATED = "truncated"
    BAD_TIMESTAMPS = "bad_timestamps"
    UNRELIABLE = "unreliable"
    ROWS_SKIPPED = "rows_skipped"
    NO_GPU_EVENTS = "no_gpu_events"
    LAUNCHES_WITHOUT_KERNELS = "launches_without_kernels"
    GRAPH_LEVEL_TRACE = "graph_level_trace"
    STEPS_INFERRED = "steps_inferred"
    STEPS_CUT_OFF = "steps_cut_off"
    NO_NVTX = "no_nvtx"
    OPEN_RANGES = "open_ranges"
    GRAPH_NODES_UNMAPPED = "graph_nodes_unmapped"
    UNNAMED_KERNELS = "unnamed_kernels"
    MISSING_TABLE = "missing_table"
    RANK_UNKNOWN = "rank_unknown"
    FOOTER_MISMATCH = "footer_mismatch"
    NAMES_CUT = "names_cut"
    CLOCKS_NOT_COMMON = "clocks_not_common"
    FILE_UNREADABLE = "file_unreadable"
    FILES_SET_ASIDE = "files_set_aside"


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
        CaveatCode.TRUNCATED,
        CaveatCode.UNRELIABLE,
        CaveatCode.NO_GPU_EVENTS,
        CaveatCode.LAUNCHES_WITHOUT_KERNELS,
        CaveatCode.GRAPH_LEVEL_TRACE,
        CaveatCode.FOOTER_MISMATCH,
        CaveatCode.FILE_UNREADABLE,
    }
)
"""With one of these a breakdown is not complete: data that should be there is not, or cannot be trusted."""


@dataclass(frozen=True, slots=True)
class Caveat:
    """One warning: a code for programs, a sentence with the remedy for people, a count where it is countable."""

    code: CaveatCode
    message: str
    count: int = 0

    def to_json_dict(self) -> dict[str, Any]:
        """One entry of the document's ``warnings``; without a count where there is none."""
        return {"code": str(self.code), "message": self.message} | ({"count": self.count} if self.count else {})


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
