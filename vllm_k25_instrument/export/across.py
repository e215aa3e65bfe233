"""What is counted from the samples of all ranks of a server side by side, by whoever exports."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from prometheus_client.core import Metric

from vllm_k25_instrument.export.families import unattributed_families, wait_families
from vllm_k25_instrument.export.unattributed import UnattributedByPosition
from vllm_k25_instrument.export.waits import AllReduceWaits
from vllm_k25_instrument.log import logger
from vllm_k25_instrument.ring import RingReader


class AcrossRanks:
    """The waiting between ranks, and the unattributed time by position."""

    def __init__(self, samples_per_reading: int, *, level: int = logging.WARNING) -> None:
        """`samples_per_reading` is of all rings together; `level`: of the line that says what had to be left out."""
        self._waits = AllReduceWaits(samples_per_reading)
        self._unattributed = UnattributedByPosition()
        self._level = level
        self._left_out: dict[str, str] = {}  # of what samples are left out, and why

    def read(self, rings: Sequence[RingReader]) -> list[list[Metric]]:
        """Take in what is new in `rings`, one per rank, and give the families filled. Never raises."""
        self._take_in("the waiting between ranks", self._waits.read, rings)
        self._take_in("the unattributed time by position", self._unattributed.read, rings)
        waits, unattributed = self._waits.totals(), self._unattributed.totals()
        return [
            *([] if waits is None else [wait_families(waits)]),
            *([] if unattributed is None else [unattributed_families(unattributed)]),
        ]

    def _take_in(self, what: str, read: Callable[[Sequence[RingReader]], None], rings: Sequence[RingReader]) -> None:
        try:
            read(rings)
        except Exception as error:  # what has been counted is still right
            if self._left_out.get(what) != str(error):
                self._left_out[what] = str(error)
                logger.log(self._level, "K25: samples left out of %s: %s", what, error)
        else:
            self._left_out.pop(what, None)
