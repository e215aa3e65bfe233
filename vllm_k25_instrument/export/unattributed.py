"""What is between the hooked ranges, counted by position from samples that the rings have got since the last scrape."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np

from vllm_k25_instrument.gaps import gaps_of_packed
from vllm_k25_instrument.model import PHASES
from vllm_k25_instrument.positions import POSITIONS, UNNAMED, can_infer
from vllm_k25_instrument.ring import RingReader

POSITION_LABELS: Final = (*POSITIONS, UNNAMED)
"""All values of the `position` label."""

SAMPLES_PER_READING: Final = 64
"""Samples of all rings together that one reading takes apart, the newest: a mean over some of them is what is asked."""


@dataclass(frozen=True, slots=True)
class UnattributedTotals:
    """What has been counted so far, over all ranks; phases are codes."""

    steps: Mapping[int, int]
    """Samples taken apart."""
    gaps_ns: Mapping[int, Mapping[str, int]]
    """By phase and by `position` label: per phase they add up to the unattributed time of those samples."""


class UnattributedByPosition:
    """Follows the rings of a server, and counts some of their samples.

    Begins at zero with whoever exports, and anew with a server none of whose workers is known.
    """

    def __init__(self, samples_per_reading: int = SAMPLES_PER_READING) -> None:
        self._samples = samples_per_reading
        self._next: dict[tuple[str, int, int], int] = {}
        self._forget()

    def _forget(self) -> None:
        self._steps = np.zeros(len(PHASES), np.int64)
        self._gaps = np.zeros((len(PHASES), len(POSITION_LABELS)), np.int64)

    def read(self, rings: Iterable[RingReader]) -> None:
        """Take in some of what is new. Raises RingError or ValueError where a ring is damaged; nothing is read twice.

        Rings of workers of which nothing can be inferred are passed over.
        """
        found = {}
        for reader in rings:
            identity = reader.identity
            if can_infer(identity.hooks):
                found[identity.instance, identity.pid, identity.coordinates.global_rank] = reader
        if not found.keys() & self._next.keys():
            self._forget()
        self._next = {worker: self._next.get(worker, 0) for worker in found}
        for worker, reader in found.items():
            written = reader.written
            share = max(self._samples // len(found), 1)
            first = max(self._next[worker], written - min(share, reader.layout.slots))
            self._next[worker] = written
            samples, _ = reader.packed(first, written)
            phases, gaps = gaps_of_packed(samples)
            self._steps += np.bincount(phases, minlength=len(PHASES))
            np.add.at(self._gaps, phases, gaps)

    def totals(self) -> UnattributedTotals | None:
        """What has been counted; None where there is no ring that anything can be inferred of."""
        if not self._next:
            return None
        return UnattributedTotals(
            steps=dict(enumerate(self._steps.tolist())),
            gaps_ns={
                phase: dict(zip(POSITION_LABELS, gaps, strict=True)) for phase, gaps in enumerate(self._gaps.tolist())
            },
        )
