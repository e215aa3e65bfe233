"""How many time series a server can ever make, counted from the code's own closed sets."""

from __future__ import annotations

from typing import Final

from vllm_k25_instrument.alignment import LEFT_OUT
from vllm_k25_instrument.export import families
from vllm_k25_instrument.export.families import HOOK_LABELS
from vllm_k25_instrument.export.unattributed import POSITION_LABELS
from vllm_k25_instrument.export.waits import TRANSFER_BOUNDS_NS, WAIT_BOUNDS_NS
from vllm_k25_instrument.model import ALL_REDUCE_PATHS, LIVE_CATEGORIES, LOST_REASONS, PHASES, SIZE_LABELS
from vllm_k25_instrument.totals import ALL_REDUCE_BOUNDS_NS, BATCH_ROWS, CATEGORY_BOUNDS_NS, STEP_BOUNDS_NS

NODE_RANKS: Final = 8
MAX_NODE_SERIES: Final = 10_000
"""What a node of ``NODE_RANKS`` ranks may cost a Prometheus server."""

_SUM_AND_COUNT: Final = 2
_ROWS: Final = BATCH_ROWS + len(PHASES)  # the rows for batches beyond the last are one per phase


def _histogram(bounds_ns: tuple[int, ...]) -> int:
    return len(bounds_ns) + 1 + _SUM_AND_COUNT


def worst_case_per_rank() -> dict[str, int]:
    """Upper bound of the number of series of each family for one rank."""
    return {
        families.STEP_DURATION.name: len(PHASES) * _histogram(STEP_BOUNDS_NS),
        families.STEP_HOST.name: len(PHASES) * _histogram(STEP_BOUNDS_NS),
        families.STEP_CATEGORY.name: len(PHASES) * len(LIVE_CATEGORIES) * _histogram(CATEGORY_BOUNDS_NS),
        families.BATCH_STEP.name: _ROWS * _SUM_AND_COUNT,
        families.BATCH_CATEGORY.name: _ROWS * len(LIVE_CATEGORIES) * _SUM_AND_COUNT,
        families.ALL_REDUCE.name: len(ALL_REDUCE_PATHS) * _histogram(ALL_REDUCE_BOUNDS_NS),
        families.ALL_REDUCE_BYTES.name: len(ALL_REDUCE_PATHS) * len(SIZE_LABELS),
        families.ALL_REDUCE_WAIT.name: _histogram(WAIT_BOUNDS_NS),
        families.SLOWEST_RANK.name: 1,
        families.ALIGNMENT_STEPS.name: 1,
        families.STEPS.name: len(PHASES),
        families.STEPS_SAMPLED.name: len(PHASES),
        families.SAMPLES_LOST.name: len(LOST_REASONS),
        families.OVERHEAD.name: 1,
        families.TWIN_BYTES.name: 1,
        families.TWIN_CAPTURE.name: 1,
        families.HOOK_ERRORS.name: len(HOOK_LABELS),
        families.HOOK_ATTACHED.name: len(HOOK_LABELS),
    }


def worst_case_per_server() -> dict[str, int]:
    """Upper bound of the number of series of each family whose series a server's ranks share."""
    return {
        families.ALL_REDUCE_TRANSFER.name: len(ALL_REDUCE_PATHS) * _histogram(TRANSFER_BOUNDS_NS),
        families.ALIGNMENT_SKIPPED.name: len(LEFT_OUT),
        families.UNATTRIBUTED.name: len(PHASES) * len(POSITION_LABELS),
        families.UNATTRIBUTED_STEPS.name: len(PHASES),
        families.BUILD.name + "_info": 1,
    }


def worst_case(ranks: int = NODE_RANKS) -> int:
    """Upper bound of the number of series that a server with this many ranks can make."""
    return ranks * sum(worst_case_per_rank().values()) + sum(worst_case_per_server().values())
