"""What the torch profiler says on a CPU: the table of operators that vLLM writes beside each trace."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final

_UNIT_NS: Final = {"ns": 1.0, "us": 1e3, "ms": 1e6, "s": 1e9}
_TIME: Final = re.compile(r"(\d+(?:\.\d+)?)(ns|us|ms|s)")
_ROW: Final = re.compile(
    r"^\s*(?P<name>\S.*?)\s{2,}(?P<share>[\d.]+)%\s+(?P<own>\S+)\s+[\d.]+%\s+(?P<total>\S+)\s+\S+\s+(?P<calls>\d+)\s*$"
)
_WHOLE: Final = re.compile(r"Self CPU time total:\s+(\S+)")
_STEP: Final = re.compile(r"execute_context_(\d+)\(\d+\)_generation_(\d+)\(\d+\)")
_DEVICE: Final = re.compile(r"Self (?:CUDA|XPU|HIP|PrivateUse1)")
_CASTS: Final = ("aten::_to_copy",)
_RANK: Final = re.compile(r"rank(\d+)")


def read_cpu_tables(paths: Iterable[Path]) -> dict[str, Any]:
    """The operators of all ranks whose table has CPU times only; empty where there is none.

    Per rank: steps with decoding requests, ns of self time by operator and its calls, and the inclusive time of casts.
    """
    ranks = []
    for place, path in enumerate(sorted(paths)):
        try:
            text = path.read_text(encoding="utf-8", errors="replace")
        except OSError:
            continue
        match = _RANK.search(path.name)
        found = None if _DEVICE.search(text) else _table(text)
        if found is not None:
            ranks.append({"rank": int(match[1]) if match else place, **found})
    return {"ranks": ranks} if ranks else {}


def _table(text: str) -> dict[str, Any] | None:
    whole = _WHOLE.search(text)
    rows = [match for line in text.splitlines() if (match := _ROW.match(line)) is not None]
    if whole is None or not rows:
        return None
    operators = []
    steps = casts = 0.0
    for row in rows:
        step = _STEP.fullmatch(row["name"])
        if step is not None:
            steps += int(row["calls"]) if int(step[2]) and not int(step[1]) else 0
        if row["name"] in _CASTS:
            casts += _ns(row["total"])
        operators.append({"name": row["name"], "self_ns": _ns(row["own"]), "calls": int(row["calls"])})
    return {
        "total_ns": _ns(whole[1]),
        "decode_steps": int(steps),
        "cast_ns": casts,
        "cast_calls": sum(row["calls"] for row in operators if row["name"] in _CASTS),
        "operators": operators,
    }


def _ns(text: str) -> float:
    match = _TIME.fullmatch(text)
    return float(match[1]) * _UNIT_NS[match[2]] if match is not None else 0.0


def cast_share(document: dict[str, Any]) -> float | None:
    """Share of the CPU time of all ranks that went to dtype casts; None where nothing was measured."""
    ranks: Sequence[dict[str, Any]] = document.get("ranks", [])
    whole = sum(float(rank["total_ns"]) for rank in ranks)
    return sum(float(rank["cast_ns"]) for rank in ranks) / whole if whole else None
