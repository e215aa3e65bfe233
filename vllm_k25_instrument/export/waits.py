"""Transfer, waiting and the slowest rank, counted from the samples that the rings have got since the last scrape.

Unlike a rank's own counters these need all ranks of a group side by side, so they are counted here, by whoever exports:
they begin at zero with the exporter, and cover what it has read. A scrape reads a bounded number of samples, the
newest; the steps before them are counted as left out (`backlog`), since old ones would only be late.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from vllm_k25_instrument.alignment import AlignedStep, AllReduces, LeftOut, StepAligner, all_reduces_of
from vllm_k25_instrument.model import ALL_REDUCE_PATHS, RankIdentity
from vllm_k25_instrument.ring import RingReader
from vllm_k25_instrument.totals import Histogram

_US: Final = 1_000
_MS: Final = 1_000_000

TRANSFER_BOUNDS_NS: Final = (
    *(us * _US for us in (10, 20, 35, 50, 75, 100, 150, 250)),
    1 * _MS,
    10 * _MS,
)
WAIT_BOUNDS_NS: Final = (
    *(us * _US for us in (2, 10, 25, 50, 100, 250)),
    1 * _MS,
    2_500 * _US,
    10 * _MS,
    100 * _MS,
)

IN_VLLM_SAMPLES: Final = 2048
"""Samples of all rings together that a scrape of vLLM's own /metrics reads: it runs in the loop that streams tokens.

Of 8 ranks with steps of 12 ms, every 16th sampled, that is 49 s of samples.
"""

EXPORTER_SAMPLES: Final = 8192
"""Samples of all rings together that a scrape of the stand-alone exporter reads."""

_AT_ONCE: Final = 256
"""Samples of a ring whose bytes are held in memory at a time."""

Counts = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class WaitTotals:
    """What has been counted so far, over all groups. Paths are codes; ranks are global ranks, those with a ring."""

    transfer: Mapping[int, Histogram]
    wait: Mapping[int, Histogram]
    steps: Mapping[int, int]
    """Steps in which the rank was lined up with the others of its group."""
    slowest: Mapping[int, int]
    """Those of them in which the others waited for it."""
    left_out: Mapping[LeftOut, int]


class AllReduceWaits:
    """Follows the rings of a server, and counts what its groups of ranks waited for each other.

    Groups are the ranks of one instance that share their pipeline and data-parallel coordinates. A group counts anew
    when one of its workers is another one than before.
    """

    def __init__(self, samples_per_reading: int) -> None:
        """`samples_per_reading`: how many samples one `read` takes at most, of all rings together."""
        self._samples = samples_per_reading
        self._groups: dict[tuple[str, int, int], _Group] = {}

    def read(self, rings: Iterable[RingReader]) -> None:
        """Take in what is new in `rings`, one per rank. Raises RingError or ValueError where one of them is damaged.

        Nothing is read twice, also after an error.
        """
        found: dict[tuple[str, int, int], dict[int, _Ring]] = {}
        for reader in rings:
            identity = reader.identity
            where = identity.coordinates
            if where.tp_size > 1:  # alone there is nobody to wait for
                key = (identity.instance, where.dp, where.pp)
                found.setdefault(key, {})[where.global_rank] = _Ring(reader, identity)
        count = sum(map(len, found.values()))
        for key in self._groups.keys() - found.keys():
            del self._groups[key]
        for key, members in found.items():
            group = self._groups.get(key)
            if group is None or group.is_another(members):
                group = self._groups[key] = _Group()
            group.read(members, max(self._samples // count, 1))

    def totals(self) -> WaitTotals | None:
        """What has been counted; None where there is no group of ranks."""
        groups = self._groups.values()
        if not groups:
            return None
        ranks = {rank: group.ranks[rank] for group in groups for rank in group.present}
        transfer_counts = sum((group.transfer_counts for group in groups), np.zeros_like(_no_transfers()))
        left_out = sum((group.left_out for group in groups), Counter[LeftOut]())
        return WaitTotals(
            transfer={
                path: Histogram(
                    TRANSFER_BOUNDS_NS, tuple(counts), sum(group.transfer_ns.get(path, 0) for group in groups)
                )
                for path, counts in enumerate(transfer_counts.tolist())
            },
            wait={
                rank: Histogram(WAIT_BOUNDS_NS, tuple(of_rank.wait_counts.tolist()), of_rank.wait_ns)
                for rank, of_rank in ranks.items()
            },
            steps={rank: of_rank.steps for rank, of_rank in ranks.items()},
            slowest={rank: of_rank.slowest for rank, of_rank in ranks.items()},
            left_out={reason: left_out[reason] for reason in LeftOut},
        )


@dataclass(frozen=True, slots=True)
class _Ring:
    """A ring and whose it is."""

    reader: RingReader
    identity: RankIdentity

    @property
    def worker(self) -> tuple[int, int]:
        return self.identity.pid, self.identity.started_unix_ns


@dataclass(slots=True)
class _Rank:
    """One rank: how far its ring has been read, and what has been counted."""

    worker: tuple[int, int]
    next: int
    wait_counts: Counts = field(default_factory=lambda: np.zeros(len(WAIT_BOUNDS_NS) + 1, np.int64))
    wait_ns: int = 0
    steps: int = 0
    slowest: int = 0


def _no_transfers() -> Counts:
    return np.zeros((len(ALL_REDUCE_PATHS), len(TRANSFER_BOUNDS_NS) + 1), np.int64)


class _Group:
    """The ranks of one tensor-parallel group."""

    def __init__(self) -> None:
        self.ranks: dict[int, _Rank] = {}
        self.present: frozenset[int] = frozenset()
        """The ranks whose rings can be read now; the others stay known, lest they are counted twice."""
        self.transfer_counts = _no_transfers()
        self.transfer_ns: Counter[int] = Counter()
        self._aligner: StepAligner | None = None
        self._left_out: Counter[LeftOut] = Counter()

    @property
    def left_out(self) -> Counter[LeftOut]:
        return self._left_out + (self._aligner.left_out if self._aligner is not None else Counter())

    def is_another(self, rings: Mapping[int, _Ring]) -> bool:
        """Whether one of these rings is that of another worker than the one followed so far."""
        known = ((self.ranks[rank], ring) for rank, ring in rings.items() if rank in self.ranks)
        return any(rank.worker != ring.worker or rank.next > ring.reader.written for rank, ring in known)

    def read(self, rings: Mapping[int, _Ring], most: int) -> None:
        """Take in at most so many new samples of each ring."""
        self.present = frozenset(rings)
        written = {rank: ring.reader.written for rank, ring in rings.items()}
        for rank, ring in rings.items():
            if rank not in self.ranks:
                # What was forgotten before anybody looked is nobody's backlog.
                oldest = max(0, written[rank] - ring.reader.layout.slots)
                self.ranks[rank] = _Rank(ring.worker, oldest)
        new = {rank: written[rank] - self.ranks[rank].next for rank in rings}
        if len(rings) < max(ring.identity.coordinates.tp_size for ring in rings.values()):
            # Still starting, or spread over nodes: without all ranks there is no minimum to speak of.
            self._left_out[LeftOut.MISSING_RANK] += max(new.values())
            for rank in rings:
                self.ranks[rank].next = written[rank]
            return
        if self._aligner is None:
            self._aligner = StepAligner(rings)
        taken: dict[int, list[AllReduces]] = {}
        passed_over: dict[int, int] = {}
        for rank, ring in rings.items():
            first = max(self.ranks[rank].next, written[rank] - min(most, ring.reader.layout.slots))
            passed_over[rank] = first - self.ranks[rank].next
            self.ranks[rank].next = written[rank]
            taken[rank] = [
                those
                for begin in range(first, written[rank], _AT_ONCE)
                for those in all_reduces_of(*ring.reader.packed(begin, min(begin + _AT_ONCE, written[rank])))
            ]
        self._pass_over(self._aligner, taken, passed_over)
        self._add(self._aligner.feed_all(taken))

    def _pass_over(
        self, aligner: StepAligner, taken: Mapping[int, Sequence[AllReduces]], passed_over: Mapping[int, int]
    ) -> None:
        """Begin at the first step that no rank has passed over; those before it are a backlog."""
        if not any(passed_over.values()):
            return
        begin = max((taken[rank][0].step for rank, count in passed_over.items() if count and taken[rank]), default=0)
        aligner.start_at(begin)
        # Of what is passed over the numbers are not known. The rank that has passed over most has passed over them all.
        self._left_out[LeftOut.BACKLOG] += max(
            count + sum(those.step < begin for those in taken[rank]) for rank, count in passed_over.items()
        )

    def _add(self, steps: Sequence[AlignedStep]) -> None:
        """Count these steps: all of them in one go, since there are a hundred all-reduces in each."""
        if not steps:
            return
        transfer = np.concatenate([step.transfer_ns for step in steps])
        paths = np.concatenate([step.paths for step in steps])
        buckets = len(TRANSFER_BOUNDS_NS) + 1
        cells = paths.astype(np.intp) * buckets + np.searchsorted(TRANSFER_BOUNDS_NS, transfer)
        self.transfer_counts += np.bincount(cells, minlength=self.transfer_counts.size).reshape(-1, buckets)
        for path in np.unique(paths).tolist():
            self.transfer_ns[path] += int(transfer[paths == path].sum())
        waits = np.concatenate([step.wait_ns for step in steps], axis=1)
        slowest = Counter(step.slowest for step in steps)
        for rank, wait in zip(steps[0].ranks, waits, strict=True):
            of_rank = self.ranks[rank]
            of_rank.wait_counts += np.bincount(
                np.searchsorted(WAIT_BOUNDS_NS, wait), minlength=len(of_rank.wait_counts)
            )
            of_rank.wait_ns += int(wait.sum())
            of_rank.steps += len(steps)
            of_rank.slowest += slowest[rank]
