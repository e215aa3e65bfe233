"""Numbers as every renderer writes them, so that a terminal, a page and a Markdown file say the same."""

from __future__ import annotations

from typing import Final

from vllm_k25_instrument.model import BATCH_BUCKETS, INF_BUCKET
from vllm_k25_instrument.report.digest import UNKNOWN

ABSENT: Final = "-"
"""Where there is nothing to show: never a zero."""


def microseconds(ns: float) -> str:
    """``1,234.5`` (µs)."""
    return f"{ns / 1000:,.1f}"


def milliseconds(ns: float) -> str:
    """``12.10`` (ms)."""
    return f"{ns / 1_000_000:,.2f}"


def milliseconds3(ns: float) -> str:
    """``191.450`` (ms): the whole of a capture, to the microsecond."""
    return f"{ns / 1_000_000:,.3f}"


def percent(share: float) -> str:
    """``51.5`` (%), of a share from 0 to 1."""
    return f"{100 * share:.1f}"


def calls(count: float) -> str:
    """``122``, or ``121.9`` where the number differs from step to step."""
    return f"{count:,.0f}" if count == round(count) else f"{count:,.1f}"


def batch_text(label: str) -> str:
    """What a `batch` label stands for: ``64`` -> ``17-64 requests``."""
    if label == UNKNOWN:
        return "number of requests unknown"
    if label == INF_BUCKET:
        return f"more than {BATCH_BUCKETS[-1]} requests"
    upper = int(label)
    place = BATCH_BUCKETS.index(upper) if upper in BATCH_BUCKETS else -1
    lower = BATCH_BUCKETS[place - 1] + 1 if place > 0 else 1
    return f"{upper} request{'s' if upper > 1 else ''}" if place <= 0 else f"{lower}-{upper} requests"
