"""Load until step times stand still, so that no window measures compilation, allocation or clocks that ramp up."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

from vllm_k25_instrument.campaign.load import LoadSpec, WindowLoad

ROUND_TOKENS: Final = 32
MAX_ROUNDS: Final = 12
STEADY_ROUNDS: Final = 3
STEADY: Final = 0.10
HOW: Final = (
    f"stable: the median times per output token of the last {STEADY_ROUNDS} rounds lie within {100 * STEADY:.0f} % of "
    f"each other; {MAX_ROUNDS} rounds at most"
)

Send = Callable[[LoadSpec], WindowLoad]
Progress = Callable[[str], None]


def spread(times: Sequence[float]) -> float | None:
    """(largest - smallest) / smallest of the last rounds; None of too few."""
    last = times[-STEADY_ROUNDS:]
    return (max(last) - min(last)) / min(last) if len(last) == STEADY_ROUNDS and min(last) > 0 else None


def warm_up(send: Send, concurrency: int, input_tokens: int, progress: Progress) -> dict[str, Any]:
    """Rounds of short requests, as many as run together. Raises what `send` raises."""
    times: list[float] = []
    failed = 0
    while len(times) + failed < MAX_ROUNDS:
        done = len(times) + failed
        progress(f"round {done + 1}, {'-' if not times else f'{times[-1] / 1e6:.2f} ms'} per output token")
        load = send(LoadSpec(concurrency, concurrency, input_tokens, ROUND_TOKENS, seed=done))
        if load.tpot is None:
            failed += 1
            continue
        times.append(load.tpot.p50_ns)
        apart = spread(times)
        if apart is not None and apart <= STEADY:
            break
    apart = spread(times)
    return {
        "how": HOW,
        "rounds": len(times),
        "failed_rounds": failed,
        "tpot_p50_ns": [round(time) for time in times],
        "spread": None if apart is None else round(apart, 4),
        "stable": apart is not None and apart <= STEADY,
    }
