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
from vllm_k25_instrument.analysis.kineto.rows import MISSING

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
    """Index of the owning process per device, and whether nothing but their order decided somewhere."""

    process: list[int]
    guessed: bool


@dataclass(frozen=True, slots=True, order=True)
class _Fit:
    """How well a process explains a device's work; larger is better.

    `matched`: rows whose id the process launched; `causal`: those of them that start after that launch; `spread_ns`:
    minus the deviation of the time between the two, which is less the more the launches are the true ones.
    """

    matched: int = 0
    causal: int = 0
    spread_ns: int = 0

    def ties(self, other: _Fit) -> bool:
        """Whether only the spread tells the two apart, which proves nothing."""
        return self.matched > 0 and (self.matched, self.causal) == (other.matched, other.causal)

    def __add__(self, other: _Fit) -> _Fit:
        return _Fit(self.matched + other.matched, self.causal + other.causal, self.spread_ns + other.spread_ns)


def match_devices(devices: list[Work], processes: list[Work]) -> Owners:
    """Which process drives which device: each process one, unless there are more devices than processes.

    The assignment is that with the best sum of fits, as far as exchanges of two lead; where several tie, the one in the
    given order of devices and processes.
    """
    if not processes:
        return Owners([NO_OWNER] * len(devices), guessed=False)
    if len(processes) == 1:
        return Owners([0] * len(devices), guessed=False)
    fits = [[_fit(device, process) for process in processes] for device in devices]
    choices = range(len(processes))
    if len(devices) > len(processes):
        owner = [max(choices, key=lambda p: (fit[p], -p)) for fit in fits]
        guessed = any(fit[p].ties(fit[o]) for fit, o in zip(fits, owner, strict=True) for p in choices if p != o)
        return Owners(owner, guessed)
    owner = list(range(len(devices)))
    improved = True
    while improved:
        improved = False
        for one, other in _exchanges(owner, len(processes)):
            now, then = _pair(fits, owner, one, other)
            if then > now:
                _exchange(owner, one, other)
                improved = True
    guessed = False
    for one, other in _exchanges(owner, len(processes)):
        now, then = _pair(fits, owner, one, other)
        guessed |= now.ties(then)
    return Owners(owner, guessed)


# An exchange names a device and either another device (to swap owners with) or, negative, a free process to take.


def _exchanges(owner: list[int], processes: int) -> list[tuple[int, int]]:
    swaps = [(one, other) for other in range(len(owner)) for one in range(other)]
    return swaps + [(one, -1 - p) for one in range(len(owner)) for p in range(processes) if p not in owner]


def _pair(fits: list[list[_Fit]], owner: list[int], one: int, other: int) -> tuple[_Fit, _Fit]:
    """The fit of what an exchange touches, before and after it."""
    if other < 0:
        return fits[one][owner[one]], fits[one][-1 - other]
    now = fits[one][owner[one]] + fits[other][owner[other]]
    return now, fits[one][owner[other]] + fits[other][owner[one]]


def _exchange(owner: list[int], one: int, other: int) -> None:
    if other < 0:
        owner[one] = -1 - other
    else:
        owner[one], owner[other] = owner[other], owner[one]


def _fit(device: Work, process: Work) -> _Fit:
    launch = latest_launch(device, process)
    matched = np.flatnonzero(launch >= 0)
    if not len(matched):
        return _Fit()
    # Of a graph's kernels only the first waits for nothing but its launch.
    _, first = np.unique(launch[matched], return_index=True)
    lag = device.start[matched] - process.start[launch[matched]]
    first_lag = lag[first]
    spread = int(np.abs(first_lag - int(np.median(first_lag))).sum())
    return _Fit(len(matched), int((lag >= 0).sum()), -spread)


def latest_launch(work: Work, launches: Work) -> NDArray[np.int64]:
    """For each row of work the launch with its correlation id; -1 where there is none.

    Ids are 32 bits and wrap, and some tools reuse them: of several launches with one id, the last that starts before
    the work does (the first, where all start after it).
    """
    order = np.lexsort((launches.start, launches.correlation))
    ids = launches.correlation[order]
    first = np.searchsorted(ids, work.correlation, "left")
    last = np.searchsorted(ids, work.correlation, "right") - 1
    found = (last >= first) & (work.correlation != MISSING)
    chosen = np.where(found, first, 0)
    several = np.flatnonzero(found & (last > first))
    for row in several:
        low, high = first[row], last[row] + 1
        before = np.searchsorted(launches.start[order[low:high]], work.start[row], "right") - 1
        chosen[row] = low + max(int(before), 0)
    if not len(ids):
        return np.full(len(work.correlation), -1, np.int64)
    return np.where(found, order[np.minimum(chosen, len(ids) - 1)], -1)
