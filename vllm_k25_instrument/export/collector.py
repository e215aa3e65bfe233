"""The rings of a server as a Prometheus collector: read at each scrape, never a lock or a write towards a worker."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from threading import Lock

from prometheus_client.core import Metric

from vllm_k25_instrument.export.across import AcrossRanks
from vllm_k25_instrument.export.families import empty_families, join_ranks, rank_families
from vllm_k25_instrument.export.waits import IN_VLLM_SAMPLES
from vllm_k25_instrument.log import logger
from vllm_k25_instrument.ring import RingError, RingReader, ring_paths


@dataclass(frozen=True, slots=True)
class _OpenRing:
    """A ring that stays open between scrapes, and the file that it was when it was opened."""

    reader: RingReader
    file: tuple[int, int]  # device, inode


class RingCollector:
    """Collects the metrics of the rings in a folder (the Collector protocol of prometheus_client).

    New, replaced and vanished rings are noticed at the next scrape. A ring that cannot be read is logged once and left
    out; a scrape raises nothing. It costs one copy of a few kilobytes per rank, whatever the rings hold, and a look at
    no more than `samples_per_scrape` new samples, which tell waiting from transfer, and what is unattributed.
    """

    def __init__(self, locate: Callable[[], Path], samples_per_scrape: int = IN_VLLM_SAMPLES) -> None:
        """`locate` says at each scrape where the rings are: an instance's folder or one ring; it may raise OSError.

        `samples_per_scrape` is of all rings together.
        """
        self._locate = locate
        self._across = AcrossRanks(samples_per_scrape)
        self._lock = Lock()  # scrapes may come in several threads
        self._rings: dict[Path, _OpenRing] = {}
        self._complaints: dict[Path, str] = {}
        self._no_rings_because = ""

    def describe(self) -> list[Metric]:
        """All families, without samples: what a registry compares with what it has."""
        return empty_families()

    def collect(self) -> list[Metric]:
        """All families, with the samples of every readable ring."""
        with self._lock:
            return join_ranks(self._read_rings())

    def close(self) -> None:
        """Close the rings; the next `collect` opens them again."""
        with self._lock:
            self._keep_only(set())

    def _read_rings(self) -> list[list[Metric]]:
        paths = self._find_rings()
        self._keep_only(set(paths))
        ranks: dict[int, list[Metric]] = {}
        readers: dict[int, RingReader] = {}
        for path in paths:
            try:
                rank, families = self._read_ring(path)
                if rank in ranks:
                    # Two series of one name would make Prometheus reject the whole scrape.
                    raise RingError(path, f"a second ring of rank {rank}")
            except Exception as error:  # a scrape must not fail for one file
                self._drop(path)
                self._complain(path, error)
            else:
                ranks[rank] = families
                readers[rank] = self._rings[path].reader
                self._complaints.pop(path, None)
        return [*(ranks[rank] for rank in sorted(ranks)), *self._across.read([readers[rank] for rank in sorted(ranks)])]

    def _find_rings(self) -> list[Path]:
        try:
            paths = ring_paths(self._locate())
        except FileNotFoundError as error:  # no server has run yet, or its folder has been removed
            logger.debug("K25: no rings: %s", error)
            return []
        except Exception as error:
            if self._no_rings_because != str(error):
                self._no_rings_because = str(error)
                logger.warning("K25: no rings can be found: %s", error)
            return []
        self._no_rings_because = ""
        return paths

    def _read_ring(self, path: Path) -> tuple[int, list[Metric]]:
        status = path.stat()
        ring = self._rings.get(path)
        if ring is None or ring.file != (status.st_dev, status.st_ino):
            self._drop(path)
            ring = self._rings[path] = _OpenRing(RingReader(path), (status.st_dev, status.st_ino))
        identity = ring.reader.identity
        return identity.coordinates.global_rank, rank_families(identity, ring.reader.totals())

    def _keep_only(self, paths: set[Path]) -> None:
        for path in self._rings.keys() - paths:
            self._drop(path)
        for path in self._complaints.keys() - paths:
            del self._complaints[path]

    def _drop(self, path: Path) -> None:
        ring = self._rings.pop(path, None)
        if ring is not None:
            ring.reader.close()

    def _complain(self, path: Path, error: Exception) -> None:
        reason = error.reason if isinstance(error, RingError) else f"{type(error).__name__}: {error}"
        if self._complaints.get(path) != reason:
            self._complaints[path] = reason
            logger.warning("K25: %s: %s; left out of the metrics", path, reason)
