"""Ranks lined up: how much of each all-reduce was transfer, how much waiting, and for whom.

For the n-th all-reduce of a step (by order of start) on one tensor-parallel group::

    transfer   = the least duration of any rank
    wait(rank) = the rank's duration - transfer

All ranks leave an all-reduce together, so the one that came last did not wait, and the others waited for it. That needs
no common clock. It needs the same step from every rank, with equally many all-reduces on each; where that is not so,
nothing is said about the step, and it is counted by its reason. Integer nanoseconds, so that over the ranks

    sum of the durations = number of ranks x transfer + sum of the waits.

A group is the ranks of one server that share their pipeline and their data-parallel coordinate; whoever feeds samples
keeps groups apart.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
from typing import Final

import numpy as np
from numpy.typing import NDArray

from vllm_k25_instrument.model import (
    ALL_REDUCE_PATHS,
    CATEGORY_CODE,
    AllReducePath,
    Category,
    StepSample,
    unpack_columns,
)

PATIENCE: Final = 64
"""A step is given up when every rank has come to a step with a number larger by this."""

MAX_PENDING: Final = 256
"""Steps that wait for further ranks at most; then the oldest are given up, whatever the ranks do."""

_REMEMBERED: Final = 1024
"""Steps that are over and still known as such, so that a late rank is not taken for the first of its step."""

_PATH_CODE: Final = {str(path): code for code, path in enumerate(ALL_REDUCE_PATHS)}
_OTHER_PATH: Final = _PATH_CODE[AllReducePath.OTHER]
_ALL_REDUCE: Final = CATEGORY_CODE[Category.ALL_REDUCE]
_DETAIL_INDICES: Final = 1 << 16

DurationsNs = NDArray[np.int64]
PathCodes = NDArray[np.uint8]


class LeftOut(StrEnum):
    """Why nothing is said about a step."""

    MISSING_RANK = "missing_rank"  # a rank of the group has no sample of it, or is not there at all
    COUNTS_DIFFER = "counts_differ"  # the ranks timed different numbers of all-reduces
    INCOMPLETE = "incomplete"  # a rank's sample says of itself that calls are missing
    LATE = "late"  # its first sample came when all ranks had long gone on
    BACKLOG = "backlog"  # more steps than one reading takes, or the ring had forgotten them


LEFT_OUT: Final = tuple(LeftOut)


@dataclass(frozen=True, slots=True)
class AllReduces:
    """The all-reduces of one step on one rank, by order of start.

    `durations_ns` and `paths` (indices of ``ALL_REDUCE_PATHS``) have shape (number of all-reduces,).
    """

    step: int
    durations_ns: DurationsNs
    paths: PathCodes
    complete: bool = True

    @classmethod
    def of(cls, sample: StepSample) -> AllReduces:
        """Those of a sample."""
        ranges = sorted((r for r in sample.ranges if r.category is Category.ALL_REDUCE), key=lambda r: r.start_ns)
        return cls(
            step=sample.step,
            durations_ns=np.array([r.duration_ns for r in ranges], np.int64),
            paths=np.array([_PATH_CODE.get(r.detail, _OTHER_PATH) for r in ranges], np.uint8),
            complete=sample.complete,
        )


def all_reduces_of(samples: Iterable[bytes], details: Sequence[str]) -> list[AllReduces]:
    """The all-reduces of packed samples, by step; `details` is the table of the ring that they come from.

    Samples of the same length, as a server's decode steps mostly are, are taken apart together. Raises ValueError where
    the bytes are not those of samples.
    """
    path_of = np.full(_DETAIL_INDICES, _OTHER_PATH, np.uint8)
    path_of[: len(details)] = [_PATH_CODE.get(detail, _OTHER_PATH) for detail in details]
    by_length: dict[int, list[bytes]] = {}
    for data in samples:
        by_length.setdefault(len(data), []).append(data)
    found = [those for alike in by_length.values() for those in _take_apart(alike, path_of)]
    found.sort(key=lambda all_reduces: all_reduces.step)
    return found


def _take_apart(samples: list[bytes], path_of: PathCodes) -> list[AllReduces]:
    columns = unpack_columns(samples)
    ranges = columns["ranges"]
    wanted = ranges["category"] == _ALL_REDUCE
    if (wanted == wanted[0]).all():
        at = np.flatnonzero(wanted[0])
        starts, durations, details = (ranges[name][:, at] for name in ("start_ns", "duration_ns", "detail"))
        rows = zip(starts, durations.astype(np.int64), path_of[details], strict=True)
        sorted_already = bool((starts[:, 1:] >= starts[:, :-1]).all())
    else:  # of one length by chance: prefill with another kind of attention, say
        rows = zip(
            *(
                [column[mine] for column, mine in zip(whole, wanted, strict=True)]
                for whole in (
                    ranges["start_ns"],
                    ranges["duration_ns"].astype(np.int64),
                    path_of[ranges["detail"]],
                )
            ),
            strict=True,
        )
        sorted_already = False
    found = []
    for step, complete, (starts, durations, paths) in zip(
        columns["step"].tolist(), columns["complete"].tolist(), rows, strict=True
    ):
        if not sorted_already:
            order = np.argsort(starts, kind="stable")
            durations, paths = durations[order], paths[order]
        found.append(AllReduces(step, durations, paths, complete))
    return found


@dataclass(frozen=True, slots=True)
class AlignedStep:
    """One step of a group: of each all-reduce its transfer, and what each rank waited in it.

    `transfer_ns` and `paths` have shape (number of all-reduces,), `wait_ns` (number of ranks, number of all-reduces);
    its rows follow `ranks`. An all-reduce that the ranks say took different paths has the path `other`.
    """

    step: int
    ranks: tuple[int, ...]
    transfer_ns: DurationsNs
    paths: PathCodes
    wait_ns: DurationsNs

    @property
    def waited_ns(self) -> dict[int, int]:
        """What each rank waited in the whole step."""
        return dict(zip(self.ranks, self.wait_ns.sum(axis=1).tolist(), strict=True))

    @property
    def slowest(self) -> int | None:
        """The rank that the others waited for: the one that waited least. None where two waited equally little."""
        (least, first), (second, _) = sorted((ns, rank) for rank, ns in self.waited_ns.items())[:2]
        return first if least < second else None


def align(ranks: Mapping[int, AllReduces]) -> AlignedStep | LeftOut:
    """One step's all-reduces, by rank, lined up; or why they cannot be.

    Whether all ranks of the group are there is for the caller to know; of fewer than two nothing can be said.
    """
    if len(ranks) < 2:
        return LeftOut.MISSING_RANK
    those = list(ranks.values())
    if not all(of_rank.complete for of_rank in those):
        return LeftOut.INCOMPLETE
    if len({len(of_rank.durations_ns) for of_rank in those}) > 1:
        return LeftOut.COUNTS_DIFFER
    durations = np.stack([of_rank.durations_ns for of_rank in those])
    transfer = durations.min(axis=0)
    paths = those[0].paths
    said = paths.tobytes()  # compared in a tenth of the time that the arrays take
    for of_rank in those[1:]:
        if of_rank.paths.tobytes() != said:
            paths = np.where(paths == of_rank.paths, paths, np.uint8(_OTHER_PATH))
    return AlignedStep(those[0].step, tuple(ranks), transfer, paths, durations - transfer)


def _by_step(entry: tuple[int, int, AllReduces]) -> tuple[int, int]:
    return entry[:2]


class StepAligner:
    """Lines up the steps of one group from samples that come rank by rank, in any order.

    Keeps a step until its last rank has come, or until it is given up: when all ranks are past it by ``PATIENCE``
    steps, or more than ``MAX_PENDING`` steps wait. Each step is answered for once: returned by `feed`, or counted in
    `left_out`.
    """

    def __init__(self, ranks: Iterable[int]) -> None:
        """`ranks`: the global ranks of the group. Raises ValueError where there are fewer than two."""
        self.ranks = tuple(sorted(set(ranks)))
        if len(self.ranks) < 2:
            raise ValueError(f"ranks {self.ranks}: a group has two or more")
        self.left_out: Counter[LeftOut] = Counter()
        """Steps left out so far, by reason."""
        self._pending: dict[int, dict[int, AllReduces]] = {}
        self._newest = dict.fromkeys(self.ranks, -1)
        self._given_up_below = 0
        self._starts_at = 0
        self._over: OrderedDict[int, None] = OrderedDict()

    @property
    def pending(self) -> int:
        """How many steps wait for further ranks."""
        return len(self._pending)

    def feed(self, rank: int, all_reduces: AllReduces) -> AlignedStep | None:
        """Take in a rank's all-reduces of one step; the aligned step where that completes it.

        A second sample of the same rank and step changes nothing. Raises KeyError on a rank of another group.
        """
        step = all_reduces.step
        newest = self._newest[rank]
        if step in self._over or step < self._starts_at:
            return None
        if step < self._given_up_below:
            self._leave_out(step, LeftOut.LATE)
            return None
        there = self._pending.setdefault(step, {})
        there.setdefault(rank, all_reduces)
        aligned = self._close(step) if len(there) == len(self.ranks) else None
        if step > newest:
            self._newest[rank] = step
            self._give_up()
        return aligned

    def feed_all(self, samples: Mapping[int, Sequence[AllReduces]]) -> list[AlignedStep]:
        """`feed` for what all ranks have, by rank, each in the order of steps; the steps that this completes.

        Where nothing waits and all ranks bring the same new steps, as they do unless one of them is late or has been
        overtaken while it was read, they are lined up as they come. Raises KeyError on a rank of another group.
        """
        steps = self._same_new_steps(samples)
        if steps is None:
            # By step, so that few wait for their other ranks at a time.
            in_order = sorted(((those.step, rank, those) for rank in samples for those in samples[rank]), key=_by_step)
            aligned = (self.feed(rank, those) for _, rank, those in in_order)
            return [step for step in aligned if step is not None]
        outcomes = [align(dict(zip(self.ranks, those, strict=True))) for those in self._side_by_side(samples)]
        for step, outcome in zip(steps, outcomes, strict=True):
            self._remember(step)
            if isinstance(outcome, LeftOut):
                self.left_out[outcome] += 1
        if steps:
            self._newest = dict.fromkeys(self.ranks, steps[-1])
            self._give_up()
        return [outcome for outcome in outcomes if not isinstance(outcome, LeftOut)]

    def _side_by_side(self, samples: Mapping[int, Sequence[AllReduces]]) -> Iterator[tuple[AllReduces, ...]]:
        return zip(*(samples[rank] for rank in self.ranks), strict=True)

    def _same_new_steps(self, samples: Mapping[int, Sequence[AllReduces]]) -> list[int] | None:
        """The steps, in order, that every rank brings, where none of them has been heard of; else None."""
        if self._pending or samples.keys() != set(self.ranks):
            return None
        steps, *others = ([those.step for those in samples[rank]] for rank in self.ranks)
        if any(other != steps for other in others):
            return None
        heard_of = max(self._starts_at - 1, self._given_up_below - 1, *self._newest.values())
        if any(step <= before for before, step in pairwise([heard_of, *steps])):
            return None
        return steps

    def start_at(self, step: int) -> None:
        """Samples of steps before this one will not come, or not from all ranks, and are answered for by the caller.

        Those that wait are forgotten, and those that come are ignored, without being counted here.
        """
        self._pending = {number: there for number, there in self._pending.items() if number >= step}
        self._starts_at = max(self._starts_at, step)

    def _close(self, step: int) -> AlignedStep | None:
        there = self._pending.pop(step)
        self._remember(step)
        outcome = align({rank: there[rank] for rank in self.ranks})
        if isinstance(outcome, LeftOut):
            self.left_out[outcome] += 1
            return None
        return outcome

    def _give_up(self) -> None:
        horizon = min(self._newest.values()) - PATIENCE + 1
        if horizon > self._given_up_below:
            self._given_up_below = horizon
            for step in [step for step in self._pending if step < horizon]:
                self._leave_out(step, LeftOut.MISSING_RANK)
        if len(self._pending) > MAX_PENDING:
            # A rank has stopped, and the others go on. Several at once, so that this is not done at every step.
            for step in sorted(self._pending)[: MAX_PENDING // 4]:
                self._leave_out(step, LeftOut.MISSING_RANK)

    def _leave_out(self, step: int, reason: LeftOut) -> None:
        self._pending.pop(step, None)
        self.left_out[reason] += 1
        self._remember(step)

    def _remember(self, step: int) -> None:
        self._over[step] = None
        if len(self._over) > _REMEMBERED:
            self._over.popitem(last=False)
