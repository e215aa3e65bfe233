"""The rings of the server that lives, followed: which there are now, and what in them is new."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from vllm_k25_instrument.log import logger
from vllm_k25_instrument.model import RankIdentity, StepSample, unpack_sample
from vllm_k25_instrument.ring import RingError, RingReader, ring_paths


@dataclass(slots=True)
class FollowedRing:
    """One rank's ring, open. `next` is the number of the first sample that has not been read yet."""

    reader: RingReader
    file: tuple[int, int]  # device, inode
    identity: RankIdentity
    next: int = 0
    overwritten: int = 0
    """Samples that the writer overwrote before they were read."""
    unreadable: int = 0

    def samples(self) -> Iterator[StepSample]:
        """The samples that are new, one by one: nothing is read before it is asked for, and nothing twice.

        So the ring itself is the queue of a slow reader. What the writer has overtaken is counted. Raises RingError
        where the file has been damaged.
        """
        written = self.reader.written
        oldest = written - self.reader.layout.slots
        if self.next < oldest:
            self.overwritten += oldest - self.next
            self.next = oldest
        lost_before = self.reader.overwritten
        while self.next < written:
            number = self.next
            self.next += 1
            packed, details = self.reader.packed(number, number + 1)
            if packed:
                try:
                    sample = unpack_sample(packed[0], details)
                except ValueError:
                    self.unreadable += 1
                else:
                    yield sample
            elif self.reader.overwritten > lost_before:
                self.overwritten += 1
            else:
                self.unreadable += 1
            lost_before = self.reader.overwritten


class FollowedRings:
    """Keeps the rings of a folder open; new, replaced and vanished ones are noticed at each `refresh`."""

    def __init__(self, locate: Callable[[], Path], *, history: bool) -> None:
        """`locate` says where the rings are now; it may raise OSError.

        Without `history`, what is in them at the first `refresh` counts as read; rings that come later are read from
        their beginning.
        """
        self._locate = locate
        self._skip = not history
        self._rings: dict[Path, FollowedRing] = {}
        self._complaints: dict[Path, str] = {}

    def refresh(self) -> list[FollowedRing]:
        """The rings there are, by global rank, of one instance. One that cannot be read is logged once and left out."""
        try:
            paths = ring_paths(self._locate())
        except OSError as error:
            logger.debug("K25: no rings: %s", error)
            paths = []
        for path in self._rings.keys() - set(paths):
            self._rings.pop(path).reader.close()
        for path in self._complaints.keys() - set(paths):
            del self._complaints[path]
        ranks: dict[int, FollowedRing] = {}
        for path in paths:
            try:
                ring = self._open(path)
                if ranks.setdefault(ring.identity.coordinates.global_rank, ring) is not ring:
                    raise RingError(path, f"a second ring of rank {ring.identity.coordinates.global_rank}")
            except (RingError, OSError) as error:
                self.complain(path, error)
        self._skip = False
        return [ranks[rank] for rank in sorted(ranks)]

    def complain(self, path: Path, error: Exception) -> None:
        """Log what is wrong with a ring, once."""
        reason = error.reason if isinstance(error, RingError) else str(error)
        if self._complaints.get(path) != reason:
            self._complaints[path] = reason
            logger.warning("K25: OTLP: %s: %s; left out", path, reason)

    def close(self) -> None:
        """Close the rings."""
        for ring in self._rings.values():
            ring.reader.close()
        self._rings.clear()

    def _open(self, path: Path) -> FollowedRing:
        status = path.stat()
        file = (status.st_dev, status.st_ino)
        ring = self._rings.get(path)
        if ring is None or ring.file != file:
            reader = RingReader(path)
            if ring is not None:
                ring.reader.close()
            first = reader.written if self._skip else 0
            ring = self._rings[path] = FollowedRing(reader, file, reader.identity, first)
        ring.identity = ring.reader.identity  # hooks attach as vLLM imports its modules
        return ring
