"""Whose work a GPU does: the process behind each device of a trace, which matters once traces are merged.

A trace of one process needs no thought. In a merged file several processes launch work, and correlation ids count from
one in each: an id alone says nothing. SGLang's merger marks each process id with its rank (``[TP03] 1234``); where
nothing is marked, a device belongs to the process whose launches its kernels match best, in number, then in time.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from vllm_k25_instrument.analysis.capture import Int64

NO_OWNER: Final = -1

_PID: Final = re.compile(r"(.*?)\s*(-?\d{1,18})", re.DOTALL)
_COORDINATE: Final = re.compile(r"(?<![A-Za-z])(TP|PP|DP|EP|rank)[-_ ]?(\d{1,6})", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Pid:
    """A process id of the file: what a merger put before it, and the number."""

    realm: str
    number: int

    @classmethod
    def parse(cls, raw: int | str | None) -> Pid:
        """The parts of a `pid`. Text without a number has the number -1."""
        if isinstance(raw, int):
            return cls("", raw)
        match = _PID.fullmatch(raw or "")
        return cls(match[1], int(match[2])) if match is not None else cls(raw or "", -1)


def coordinates(text: str) -> dict[str, int]:
    """Parallel coordinates named in a text: ``{"tp": 3}`` of ``VLLM::Worker_TP3``; also of file names."""
    return {axis.lower(): int(number) for axis, number in _COORDINATE.findall(text)}


def global_ranks(found: list[dict[str, int]]) -> list[int | None]:
    """Global ranks of processes with these coordinates, tensor-parallel rank fastest, as vLLM counts them.

    The sizes of the groups are taken from the coordinates themselves. None where a process names none, or where two
    processes would get one rank.
    """
    tp = 1 + max((c.get("tp", 0) for c in found), default=0)
    pp = 1 + max((c.get("pp", 0) for c in found), default=0)
    ranks: list[int | None] = []
    for c in found:
        if "rank" in c:
            ranks.append(c["rank"])
        elif c.keys() & {"tp", "pp", "dp"}:
            ranks.append((c.get("dp", 0) * pp + c.get("pp", 0)) * tp + c.get("tp", 0))
        else:
            ranks.append(None)
    return ranks


@dataclass(frozen=True, slots=True)
class Work:
    """One device's work: correlation ids, and starts in ns."""

    correlation: Int64
    start: Int64


@dataclass(frozen=True, slots=True)
class Owners:
    """Index of the owning process per device, and whether some were told apart by nothing but their order."""

    process: list[int]
    guessed: bool


def match_devices(devices: list[Work], processes: list[Work]) -> Owners:
    """Which process drives which device, each process at most one while others are free.

    A pair scores by how many of the device's kernels find a launch in the process; then by how many of those start
    after that launch; then by the median time between the two. Pairs that tie in all are taken in the file's order.
    """
    if not processes:
        return Owners([NO_OWNER] * len(devices), guessed=False)
    if len(processes) == 1:
        return Owners([0] * len(devices), guessed=False)
    scores = {
        (d, p): _score(device, process) for d, device in enumerate(devices) for p, process in enumerate(processes)
    }
    owner = [NO_OWNER] * len(devices)
    used: set[int] = set()
    guessed = False
    ranked = sorted(scores, key=lambda pair: (*(-x for x in scores[pair]), pair))
    for device, process in ranked:
        if owner[device] == NO_OWNER and process not in used:
            rivals = [p for p in range(len(processes)) if p != process and p not in used]
            guessed |= any(scores[device, rival] == scores[device, process] for rival in rivals)
            owner[device] = process
            used.add(process)
    for device, process in ranked:  # more devices than processes: some process drives several
        if owner[device] == NO_OWNER:
            owner[device] = process
    return Owners(owner, guessed)


def _score(device: Work, process: Work) -> tuple[int, int, int]:
    launch = latest_launch(device, process)
    matched = launch >= 0
    if not matched.any():
        return 0, 0, 0
    lag = device.start[matched] - process.start[launch[matched]]
    causal = lag >= 0
    return int(matched.sum()), int(causal.sum()), -int(np.median(lag[causal])) if causal.any() else 0


def latest_launch(work: Work, launches: Work) -> NDArray[np.int64]:
    """For each row of work the launch with its correlation id; -1 where there is none.

    Ids are 32 bits and wrap, and some tools reuse them: of several launches with one id, the last that starts before
    the work does (the first, where all start after it).
    """
    order = np.lexsort((launches.start, launches.correlation))
    ids = launches.correlation[order]
    first = np.searchsorted(ids, work.correlation, "left")
    last = np.searchsorted(ids, work.correlation, "right") - 1
    found = last >= first
    chosen = np.where(found, first, 0)
    several = np.flatnonzero(found & (last > first))
    for row in several:
        low, high = first[row], last[row] + 1
        before = np.searchsorted(launches.start[order[low:high]], work.start[row], "right") - 1
        chosen[row] = low + max(int(before), 0)
    if not len(ids):
        return np.full(len(work.correlation), -1, np.int64)
    return np.where(found, order[np.minimum(chosen, len(ids) - 1)], -1)
