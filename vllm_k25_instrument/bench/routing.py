"""Which experts the tokens of a batch are routed to.

uniform    every token picks its experts at random, all equally likely
same       one extreme: all tokens pick the same experts, so that the fewest weights are read
spread     the other: tokens pick distinct experts as long as there are any, so that the most weights are read
measured   every token picks at random, in proportion to counts that were measured
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Final

from vllm_k25_instrument.bench.errors import CannotRunError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Chosen = NDArray[np.int32]
    """Shape (tokens, active experts): the experts of each token, all different."""

SEED: Final = 25
MAX_COUNTS_BYTES: Final = 1 << 22


class Routing(StrEnum):
    """How tokens pick experts."""

    UNIFORM = "uniform"
    SAME = "same"
    SPREAD = "spread"
    MEASURED = "measured"


EXTREMES: Final = (Routing.SAME, Routing.SPREAD)


def choose_experts(
    routing: Routing, tokens: int, experts: int, active: int, counts: Sequence[float] = (), *, seed: int = SEED
) -> Chosen:
    """The experts of each token; the same for the same `seed`.

    `counts`, one per expert, weigh the draw of ``measured``: without replacement, as successive draws would
    (Gumbel-top-k: Kool, van Hoof, Welling 2019, arXiv 1903.06059). Raises CannotRunError where they cannot.
    """
    import numpy as np  # here and not above: every command waits for what this module imports

    if routing is Routing.SAME:
        return np.tile(np.arange(active, dtype=np.int32), (tokens, 1))
    if routing is Routing.SPREAD:
        return (np.arange(tokens * active, dtype=np.int64) % experts).astype(np.int32).reshape(tokens, active)
    weights = np.ones(experts) if routing is Routing.UNIFORM else _weights(counts, experts, active)
    generator = np.random.default_rng(seed)
    with np.errstate(divide="ignore"):  # an expert that was never picked has a weight of 0: it comes last
        keys = np.log(weights) + generator.gumbel(size=(tokens, experts))
    return np.argsort(-keys, axis=1, kind="stable")[:, :active].astype(np.int32)


def distinct_experts(chosen: Chosen) -> int:
    """How many experts at least one token picked."""
    import numpy as np

    return int(np.unique(chosen).size)


def _weights(counts: Sequence[float], experts: int, active: int) -> NDArray[np.float64]:
    import numpy as np

    weights = np.asarray(counts, np.float64)
    if weights.shape != (experts,):
        raise CannotRunError(f"the counts are of {weights.size:,} experts, and {experts:,} are routed to here")
    if np.count_nonzero(weights) < active:
        raise CannotRunError(f"the counts name {np.count_nonzero(weights)} experts, and a token picks {active}")
    return weights


def read_counts(path: Path) -> tuple[float, ...]:
    """How often each expert was picked, from a JSON file: a list of numbers, or an object with ``expert_counts``.

    Raises CannotRunError where it is neither.
    """
    try:
        if path.stat().st_size > MAX_COUNTS_BYTES:
            raise CannotRunError(f"{path}: more than {MAX_COUNTS_BYTES >> 20} MiB: no list of expert counts")
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CannotRunError(f"{path}: cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise CannotRunError(f"{path}: not valid JSON: {error}") from None
    counts = found.get("expert_counts") if isinstance(found, dict) else found
    if not isinstance(counts, list) or not counts:
        raise CannotRunError(
            f"{path}: neither a list of counts nor an object with `expert_counts`, one number per expert"
        )
    for count in counts:
        if isinstance(count, bool) or not isinstance(count, int | float) or not 0 <= count < 1e18:
            raise CannotRunError(f"{path}: {count!r:.40} is no count")
    return tuple(counts)
