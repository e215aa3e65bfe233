"""Rings -> breakdown: the live source, also of a server that is dead."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from vllm_k25_instrument.positions import can_infer
from vllm_k25_instrument.report.breakdown import Breakdown, Source, StepTally
from vllm_k25_instrument.report.caveats import Caveat
from vllm_k25_instrument.report.digest import GroupKey, digest_step
from vllm_k25_instrument.report.ringset import look_at
from vllm_k25_instrument.report.slowest import SlowestRank, SlowestTally
from vllm_k25_instrument.report.subject import Subject
from vllm_k25_instrument.ring import RingError, RingReader

Progress = Callable[[int, int], None]
"""Called with (samples read so far, samples to read)."""


@dataclass(frozen=True, slots=True)
class Report:
    """All that a renderer needs: the breakdown, whom it is about, and the slowest rank of each group."""

    breakdown: Breakdown
    subject: Subject
    slowest: Mapping[GroupKey, SlowestRank]

    @property
    def caveats(self) -> tuple[Caveat, ...]:
        """The warnings of the breakdown."""
        return self.breakdown.caveats


def read_rings(
    readers: Iterable[RingReader], errors: Iterable[RingError] = (), progress: Progress | None = None
) -> Report:
    """Break down every sample still in the rings; `readers` and `errors` as ``ring.open_rings`` returns them.

    Never raises for what is in the rings: what cannot be read is left out and said in the breakdown's caveats. With no
    sample at all the breakdown has no groups.
    """
    rings = look_at(readers, errors)
    tally = StepTally()
    slowest = SlowestTally(rings.ranks_expected, comparable=rings.comparable)
    to_read = sum(min(ring.written, ring.reader.layout.slots) for ring in rings.rings)
    read = 0
    broken: list[RingError] = []
    for ring in rings.rings:
        infer = can_infer(ring.identity.hooks)
        try:
            for sample in ring.reader.samples():
                step = digest_step(ring.rank, sample, infer=infer)
                tally.add(step)
                slowest.add(step)
                read += 1
                if progress is not None:
                    progress(read, to_read)
        except RingError as error:
            broken.append(error)
    # Looked at again: the counters of a living server have moved on, and the readers have counted what they missed.
    rings = rings.looked_at_again(broken)
    breakdown = tally.breakdown(
        source=Source.RING,
        ranks_found=rings.ranks,
        ranks_expected=rings.ranks_expected,
        caveats=rings.caveats(),
    )
    keys = dict.fromkeys(group.key for group in breakdown.groups)
    return Report(breakdown, rings.subject, {key: slowest.verdict(key) for key in keys})
