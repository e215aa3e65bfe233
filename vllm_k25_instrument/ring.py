"""The ring file: one per rank, memory-mapped, written by the worker, readable by anybody, even after its death.

Layout (little-endian, format 1)::

    0      preamble (256 bytes): magic, format, fingerprint of the closed sets, sizes, number of samples written
    256    metadata (64 KiB): identity and table of detail strings, as JSON behind a sequence number and a CRC
    ...    totals: cumulative counters (see totals.py)
    ...    slots: each a sequence number, a length, a CRC-32 and the bytes of one StepSample

Protocol. The n-th sample (from 0) goes to slot ``n % slots``. The writer sets the slot's sequence to
``2n + 1``, writes, sets it to ``2n + 2``, and then raises the preamble's number of samples. It takes no lock
and never waits. A reader copies a slot between two looks at its sequence and checks the CRC, so that it never
returns a torn sample, not even of a writer that was killed in the middle of one.

The file's blocks are allocated when it is created: writing to a sparse file on a full tmpfs would kill the
worker with SIGBUS, whereas a failed allocation is an OSError at start that costs us the ring and nobody else
anything.
"""

from __future__ import annotations

import contextlib
import errno
import json
import mmap
import os
import struct
import zlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from vllm_k25_instrument.liveness import hold, is_held
from vllm_k25_instrument.model import (
    RANGE_BYTES,
    SAMPLE_BYTES,
    RankCoordinates,
    RankIdentity,
    StepSample,
    unpack_sample,
)
from vllm_k25_instrument.totals import FINGERPRINT, TOTALS_BYTES, Totals, TotalsWriter

MAGIC: Final = b"K25RING\0"
FORMAT: Final = 1
RING_SUFFIX: Final = ".ring"

_PREAMBLE = struct.Struct("<8sIIIIIIQ")  # magic, format, fingerprint, metadata, totals, slots, slot bytes, written
_WRITTEN_OFFSET: Final = _PREAMBLE.size - 8
_PREAMBLE_BYTES: Final = 256
_METADATA_BYTES: Final = 64 * 1024
_METADATA_HEAD = struct.Struct("<QII")
_SLOT_HEAD = struct.Struct("<QII")
_SEQUENCE = struct.Struct("<Q")

MIN_SLOTS: Final = 16
MAX_DETAILS: Final = 1024
DEFAULT_SAMPLES: Final = 4096
DEFAULT_BYTES: Final = 64 * 1024 * 1024


class RingError(Exception):
    """A file that is not a readable ring. Carries the path and the reason, each for its own column."""

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(f"{path}: {reason}")
        self.path = path
        self.reason = reason


@dataclass(frozen=True, slots=True)
class RingLayout:
    """Sizes of a ring's parts, in bytes but for `slots`."""

    slots: int
    slot_bytes: int

    @property
    def slots_offset(self) -> int:
        return _align(_PREAMBLE_BYTES + _METADATA_BYTES + TOTALS_BYTES, mmap.PAGESIZE)

    @property
    def file_bytes(self) -> int:
        return self.slots_offset + self.slots * self.slot_bytes

    @property
    def max_ranges(self) -> int:
        """How many ranges a sample may have."""
        return (self.slot_bytes - _SLOT_HEAD.size - SAMPLE_BYTES) // RANGE_BYTES

    @classmethod
    def plan(cls, samples: int, total_bytes: int) -> RingLayout:
        """Slots for `samples` samples in `total_bytes` bytes of samples, whichever limit is met first."""
        slot_bytes = max(_align(total_bytes // max(samples, 1) - 63, 64), 512)
        return cls(slots=max(min(samples, total_bytes // slot_bytes), MIN_SLOTS), slot_bytes=slot_bytes)


def _align(n: int, to: int) -> int:
    return -(-n // to) * to


class RingWriter:
    """The writing end. One thread writes samples; totals and metadata belong to the same process."""

    def __init__(self, path: Path, identity: RankIdentity, layout: RingLayout) -> None:
        """Create the file anew with mode 0600, all its blocks allocated.

        Where the file system is short of space, halves the number of slots until it fits or fewer than
        ``MIN_SLOTS`` are left. Raises OSError where the file cannot be made.
        """
        self.path = path
        self.layout, self._map, self._fd = _create(path, layout)
        view = memoryview(self._map)
        totals_at = _PREAMBLE_BYTES + _METADATA_BYTES
        self.totals = TotalsWriter(view[totals_at : totals_at + TOTALS_BYTES].cast("Q"))
        self._view = view
        self._written = 0
        self._metadata_sequence = 0
        self._identity = identity
        self._details: dict[str, int] = {"": 0}
        _PREAMBLE.pack_into(
            self._map,
            0,
            MAGIC,
            FORMAT,
            FINGERPRINT,
            _METADATA_BYTES,
            TOTALS_BYTES,
            self.layout.slots,
            self.layout.slot_bytes,
            0,
        )
        self._write_metadata()

    @property
    def identity(self) -> RankIdentity:
        return self._identity

    def set_identity(self, identity: RankIdentity) -> None:
        """Replace the identity (hooks attach as vLLM imports its modules)."""
        self._identity = identity
        self._write_metadata()

    def detail_index(self, detail: str) -> int:
        """Index of a detail string, entered into the table when new; 0 (no detail) when the table is full."""
        index = self._details.get(detail)
        if index is None:
            if len(self._details) >= MAX_DETAILS:
                return 0
            index = self._details[detail] = len(self._details)
            self._write_metadata()
        return index

    def append(self, sample: bytes) -> bool:
        """Write one packed sample; False where it does not fit a slot."""
        size = len(sample)
        if size > self.layout.slot_bytes - _SLOT_HEAD.size:
            return False
        n = self._written
        at = self.layout.slots_offset + (n % self.layout.slots) * self.layout.slot_bytes
        ring = self._map
        _SEQUENCE.pack_into(ring, at, 2 * n + 1)
        body = at + _SLOT_HEAD.size
        ring[body : body + size] = sample
        _SLOT_HEAD.pack_into(ring, at, 2 * n + 1, size, zlib.crc32(sample))
        _SEQUENCE.pack_into(ring, at, 2 * n + 2)
        self._written = n + 1
        _SEQUENCE.pack_into(ring, _WRITTEN_OFFSET, self._written)
        return True

    def _write_metadata(self) -> None:
        document = json.dumps(
            {"identity": asdict(self._identity), "details": list(self._details)}, separators=(",", ":")
        ).encode()
        room = _METADATA_BYTES - _METADATA_HEAD.size
        if len(document) > room:
            raise ValueError(f"ring metadata of {len(document)} bytes do not fit {room}")
        sequence = self._metadata_sequence
        at = _PREAMBLE_BYTES
        _SEQUENCE.pack_into(self._map, at, sequence + 1)
        self._map[at + _METADATA_HEAD.size : at + _METADATA_HEAD.size + len(document)] = document
        _METADATA_HEAD.pack_into(self._map, at, sequence + 1, len(document), zlib.crc32(document))
        _SEQUENCE.pack_into(self._map, at, sequence + 2)
        self._metadata_sequence = sequence + 2


def _create(path: Path, layout: RingLayout) -> tuple[RingLayout, mmap.mmap, int]:
    """Make the file under a temporary name and move it into place, so that no reader sees half of one."""
    partial = path.with_suffix(f".{os.getpid()}.partial")
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
    with contextlib.suppress(FileNotFoundError):
        partial.unlink()
    fd = os.open(partial, flags, 0o600)
    try:
        while True:
            try:
                os.posix_fallocate(fd, 0, layout.file_bytes)
                break
            except OSError as error:
                if error.errno not in (errno.ENOSPC, errno.EDQUOT) or layout.slots // 2 < MIN_SLOTS:
                    raise
                os.ftruncate(fd, 0)
                layout = RingLayout(slots=layout.slots // 2, slot_bytes=layout.slot_bytes)
        mapped = mmap.mmap(fd, layout.file_bytes)
        hold(fd)  # so the descriptor stays open for as long as the writer lives
        os.rename(partial, path)
    except BaseException:
        os.close(fd)
        with contextlib.suppress(FileNotFoundError):
            partial.unlink()
        raise
    return layout, mapped, fd


class RingReader:
    """The reading end: works on the ring of a live or a dead writer and never disturbs it."""

    def __init__(self, path: Path) -> None:
        """Open the file. Raises RingError where it is not a whole ring of this format."""
        self.path = path
        self.overwritten = 0
        """Samples that the writer overwrote before `samples` reached them."""
        self.corrupted = 0
        """Slots whose bytes do not match their checksum, or that a dying writer left unfinished."""
        try:
            with path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                if size < _PREAMBLE_BYTES:
                    raise RingError(path, f"truncated: {size} bytes, shorter than a ring's preamble")
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise RingError(path, error.strerror or str(error)) from error
        try:
            self.layout = self._check(size)
            self._read_metadata()
        except RingError:
            self._map.close()
            raise

    def _check(self, size: int) -> RingLayout:
        magic, form, fingerprint, metadata, totals, slots, slot_bytes, _ = _PREAMBLE.unpack_from(self._map, 0)
        if magic != MAGIC:
            raise RingError(self.path, "not a ring file (wrong magic number)")
        if form != FORMAT or fingerprint != FINGERPRINT or metadata != _METADATA_BYTES or totals != TOTALS_BYTES:
            raise RingError(
                self.path,
                f"written by another version of vllm-k25-instrument (format {form}, vocabulary {fingerprint:08x}; "
                f"this one reads format {FORMAT}, vocabulary {FINGERPRINT:08x}): read it with that version",
            )
        layout = RingLayout(slots=slots, slot_bytes=slot_bytes)
        if slots < 1 or slot_bytes < _SLOT_HEAD.size + SAMPLE_BYTES:
            raise RingError(self.path, f"corrupted: {slots} slots of {slot_bytes} bytes")
        if size < layout.file_bytes:
            raise RingError(self.path, f"truncated: {size} of {layout.file_bytes} bytes")
        return layout

    def _read_metadata(self) -> None:
        at = _PREAMBLE_BYTES
        for _ in range(100):
            sequence, length, crc = _METADATA_HEAD.unpack_from(self._map, at)
            if length <= _METADATA_BYTES - _METADATA_HEAD.size and sequence % 2 == 0:
                document = self._map[at + _METADATA_HEAD.size : at + _METADATA_HEAD.size + length]
                if _SEQUENCE.unpack_from(self._map, at)[0] == sequence and zlib.crc32(document) == crc:
                    break
        else:
            raise RingError(self.path, "corrupted: its metadata do not match their checksum")
        try:
            parsed = json.loads(document)
            identity = dict(parsed["identity"])
            identity["coordinates"] = RankCoordinates(**identity["coordinates"])
            self._identity = RankIdentity(**identity)
            self._details: list[str] = parsed["details"]
        except (ValueError, KeyError, TypeError) as error:
            raise RingError(self.path, f"corrupted: unreadable metadata ({error})") from error
        self._metadata_sequence = sequence

    def _refresh_metadata(self) -> None:
        if _SEQUENCE.unpack_from(self._map, _PREAMBLE_BYTES)[0] != self._metadata_sequence:
            self._read_metadata()

    @property
    def identity(self) -> RankIdentity:
        """The writer's identity as it stands now. Raises RingError where it has become unreadable."""
        self._refresh_metadata()
        return self._identity

    @property
    def alive(self) -> bool:
        """Whether the writer lives."""
        return is_held(self.path)

    @property
    def written(self) -> int:
        """How many samples have been written since the ring was made."""
        return int(_SEQUENCE.unpack_from(self._map, _WRITTEN_OFFSET)[0])

    def totals(self) -> Totals:
        """A snapshot of the cumulative counters."""
        at = _PREAMBLE_BYTES + _METADATA_BYTES
        return Totals(self._map[at : at + TOTALS_BYTES])

    def samples(self, since: int = 0) -> Iterator[StepSample]:
        """The samples still in the ring, oldest first, from the `since`-th written (0 is the first).

        Samples that are gone or unreadable are counted in `overwritten` and `corrupted`.
        """
        written = self.written
        first = max(since, written - self.layout.slots)
        self.overwritten += first - since
        for n in range(first, written):
            data = self._copy(n)
            if data is None:
                continue
            try:
                self._refresh_metadata()
                yield unpack_sample(data, self._details)
            except ValueError:
                self.corrupted += 1

    def _copy(self, n: int) -> bytes | None:
        """The bytes of the n-th sample, whole, or None (counted)."""
        at = self.layout.slots_offset + (n % self.layout.slots) * self.layout.slot_bytes
        sequence, length, crc = _SLOT_HEAD.unpack_from(self._map, at)
        if sequence == 2 * n + 2 and length <= self.layout.slot_bytes - _SLOT_HEAD.size:
            data = self._map[at + _SLOT_HEAD.size : at + _SLOT_HEAD.size + length]
            if _SEQUENCE.unpack_from(self._map, at)[0] == sequence:
                if zlib.crc32(data) == crc:
                    return data
                self.corrupted += 1
                return None
        if _SEQUENCE.unpack_from(self._map, at)[0] > 2 * n + 2:
            self.overwritten += 1
        else:
            self.corrupted += 1
        return None

    def close(self) -> None:
        self._map.close()


def ring_file_name(global_rank: int) -> str:
    """File name of a rank's ring inside its instance's folder."""
    return f"rank-{global_rank:05d}{RING_SUFFIX}"


def ring_paths(path: Path) -> list[Path]:
    """The ring files at `path`: the file itself, or those of an instance's folder, sorted."""
    if path.is_file():
        return [path]
    return sorted(path.glob(f"*{RING_SUFFIX}"))


def open_rings(path: Path) -> tuple[list[RingReader], list[RingError]]:
    """Every readable ring at `path`, by global rank, and an error for each file that is not one."""
    readers: list[RingReader] = []
    errors: list[RingError] = []
    for file in ring_paths(path):
        try:
            readers.append(RingReader(file))
        except RingError as error:
            errors.append(error)
    readers.sort(key=lambda reader: reader.identity.coordinates.global_rank)
    return readers, errors
