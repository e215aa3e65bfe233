"""The ring file: one per rank, written by the worker, readable by its user at any time, even after the worker's death.

Layout (little-endian, format 1)::

    0      preamble (256 bytes): magic, format, fingerprint of the closed sets, sizes, number of samples written
    256    metadata (2 x 64 KiB): identity and table of detail strings, as JSON behind a sequence number and a CRC
    ...    totals: cumulative counters (see totals.py)
    ...    slots: each a sequence number, a length, a CRC-32 and the bytes of one StepSample

Protocol. The n-th sample (from 0) goes to slot ``n % slots``, in one call, with the sequence number ``2n + 2``; then
the writer raises the preamble's number of samples. It takes no lock and never waits. A reader copies a slot in one
go and checks sequence and CRC, so that it never returns a torn sample, not even of a writer that was killed in the
middle of one. The metadata are written to the older of two copies, so that a writer killed meanwhile leaves the
newer one whole. The counters are kept in the writer's own memory, and published as a whole at the end of a step.

Neither end maps the file: a mapping of a file that somebody cuts short (``cp`` or ``>`` onto it is enough) is
death by SIGBUS, for the worker as well as for the API server that answers /metrics. ``pwrite`` and ``pread``
return an error instead, and the writer never reads, and so never believes, what is in the file. It makes a file
that has been cut short whole again.

The file's blocks are allocated when it is created: a file system that is full by then is an OSError at start that
costs us the ring and nobody else anything, and one that fills up later costs nothing.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import stat
import struct
import threading
import weakref
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, fields, replace
from io import FileIO
from pathlib import Path
from typing import Any, Final

from vllm_k25_instrument.liveness import hold, is_held
from vllm_k25_instrument.log import logger
from vllm_k25_instrument.model import (
    MAX_RANGES,
    RANGE_BYTES,
    SAMPLE_BYTES,
    RankCoordinates,
    RankIdentity,
    StepSample,
    unpack_sample,
)
from vllm_k25_instrument.plain_text import one_line
from vllm_k25_instrument.totals import FINGERPRINT, TOTALS_BYTES, Totals, TotalsWriter

MAGIC: Final = b"K25RING\0"
FORMAT: Final = 1
RING_SUFFIX: Final = ".ring"

_PREAMBLE = struct.Struct("<8sIIIIIIQ")  # magic, format, fingerprint, metadata, totals, slots, slot bytes, written
_WRITTEN_OFFSET: Final = _PREAMBLE.size - 8
_PREAMBLE_BYTES: Final = 256
_PAGE_BYTES: Final = 4096
_METADATA_COPY_BYTES: Final = 64 * 1024
_METADATA_BYTES: Final = 2 * _METADATA_COPY_BYTES
_METADATA_COPIES: Final = (_PREAMBLE_BYTES, _PREAMBLE_BYTES + _METADATA_COPY_BYTES)
_TOTALS_OFFSET: Final = _PREAMBLE_BYTES + _METADATA_BYTES
_HEAD = struct.Struct("<QII")  # of a slot and of a copy of the metadata: sequence, length, CRC-32
_METADATA_ROOM: Final = _METADATA_COPY_BYTES - _HEAD.size
_SEQUENCE = struct.Struct("<Q")
_WORD: Final = _SEQUENCE.size
_MAX_SLOT_BYTES: Final = -(-(_HEAD.size + SAMPLE_BYTES + MAX_RANGES * RANGE_BYTES) // 64) * 64

MIN_SLOTS: Final = 16
MAX_SLOTS: Final = 1_000_000
MAX_DETAILS: Final = 1024
MAX_RANKS: Final = 65_536
"""Of one server. No more are believed: readers list the ranks that are missing."""
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
    """Sizes of a ring's parts, in bytes but for `slots`. Raises ValueError where no sample fits a slot."""

    slots: int
    slot_bytes: int

    def __post_init__(self) -> None:
        least = _HEAD.size + SAMPLE_BYTES
        if not (0 < self.slots <= MAX_SLOTS and least <= self.slot_bytes <= _MAX_SLOT_BYTES) or self.slot_bytes % _WORD:
            raise ValueError(f"{self.slots} slots of {self.slot_bytes} bytes")

    @property
    def slots_offset(self) -> int:
        return _align(_TOTALS_OFFSET + TOTALS_BYTES, _PAGE_BYTES)

    @property
    def file_bytes(self) -> int:
        return self.slots_offset + self.slots * self.slot_bytes

    @property
    def max_ranges(self) -> int:
        """How many ranges a sample may have."""
        return (self.slot_bytes - _HEAD.size - SAMPLE_BYTES) // RANGE_BYTES

    @classmethod
    def plan(cls, samples: int, total_bytes: int) -> RingLayout:
        """Slots for `samples` samples in `total_bytes` bytes of samples, whichever limit is met first.

        Never fewer than ``MIN_SLOTS``, of 512 bytes at least and of what a sample of ``MAX_RANGES`` takes at most.
        """
        slot_bytes = min(max(_align(total_bytes // max(samples, 1) - 63, 64), 512), _MAX_SLOT_BYTES)
        return cls(slots=max(min(samples, total_bytes // slot_bytes), MIN_SLOTS), slot_bytes=slot_bytes)


def _align(n: int, to: int) -> int:
    return -(-n // to) * to


class RingWriter:
    """The writing end. One thread writes samples; totals and metadata belong to the same process."""

    def __init__(self, path: Path, identity: RankIdentity, layout: RingLayout) -> None:
        """Create the file anew with mode 0600, all its blocks allocated; it appears at `path` when it is complete.

        Where the file system is short of space, halves the number of slots until it fits or fewer than
        ``MIN_SLOTS`` are left. Raises OSError where the file cannot be made or another living process has one at
        `path`, ValueError where the identity does not fit its metadata.
        """
        if _written_by_another(path):
            raise OSError(errno.EBUSY, "another living process writes this ring", str(path))
        self.path = path
        self._written = 0
        self._was_cut = False
        self._identity = identity
        self._details: dict[str, int] = {"": 0}
        self._metadata_sequence = 0
        self._metadata_lock = threading.Lock()  # hooks attach in whatever thread imports their module
        self._counters = bytearray(TOTALS_BYTES)
        self.totals = TotalsWriter(memoryview(self._counters).cast("Q"))
        """What `publish` brings to the file."""
        metadata = self._metadata(identity, self._details)
        partial = path.with_suffix(f".{os.getpid()}.partial")
        self._fd, self.layout = _allocate(partial, layout)
        try:
            self._write_preamble()
            self._write_metadata(metadata)
            hold(self._fd)  # so the descriptor stays open for as long as the writer lives
            os.rename(partial, path)
            weakref.finalize(self, os.close, self._fd).atexit = False  # until the very end somebody may write
        except BaseException:
            os.close(self._fd)
            with contextlib.suppress(OSError):
                partial.unlink()
            raise

    @property
    def identity(self) -> RankIdentity:
        return self._identity

    def set_identity(self, identity: RankIdentity) -> None:
        """Replace the identity (hooks attach as vLLM imports its modules).

        Raises ValueError, and keeps the old one, where the new one does not fit the metadata.
        """
        with self._metadata_lock:
            self._write_metadata(self._metadata(identity, self._details))
            self._identity = identity

    def detail_index(self, detail: str) -> int:
        """Index of a detail string, entered into the table when new; 0 (no detail) when the table is full."""
        index = self._details.get(detail)
        return self._enter_detail(detail) if index is None else index

    def _enter_detail(self, detail: str) -> int:
        with self._metadata_lock:
            index = len(self._details)
            if index >= MAX_DETAILS:
                return 0
            try:
                self._write_metadata(self._metadata(self._identity, [*self._details, detail]))
            except ValueError:
                return 0
            self._details[detail] = index
            return index

    def append(self, sample: bytes) -> bool:
        """Write one packed sample; False where it does not fit a slot."""
        size = len(sample)
        if size > self.layout.slot_bytes - _HEAD.size:
            return False
        self._mend()
        n = self._written
        at = self.layout.slots_offset + (n % self.layout.slots) * self.layout.slot_bytes
        self._write(at, _HEAD.pack(2 * n + 2, size, zlib.crc32(sample)) + sample)
        self._written = n + 1
        self._write(_WRITTEN_OFFSET, _SEQUENCE.pack(n + 1))
        return True

    def publish(self) -> None:
        """Bring the file's counters up to date. Raises OSError where the file system refuses."""
        self._write(_TOTALS_OFFSET, self._counters)

    def _write(self, at: int, data: bytes | bytearray) -> None:
        if os.pwrite(self._fd, data, at) != len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))

    def _mend(self) -> None:
        """Make a file whole again that somebody has cut short. Its samples are gone, its counters are not."""
        if os.fstat(self._fd).st_size >= self.layout.file_bytes:
            return
        if not self._was_cut:  # said once: whoever does this may do it again and again
            self._was_cut = True
            logger.warning("K25: %s has been cut short by another process; its samples so far are gone", self.path)
        os.posix_fallocate(self._fd, 0, self.layout.file_bytes)
        self._write_preamble()
        self.publish()
        with self._metadata_lock:
            for _ in _METADATA_COPIES:
                self._write_metadata(self._metadata(self._identity, self._details))

    def _write_preamble(self) -> None:
        sizes = (_METADATA_BYTES, TOTALS_BYTES, self.layout.slots, self.layout.slot_bytes)
        self._write(0, _PREAMBLE.pack(MAGIC, FORMAT, FINGERPRINT, *sizes, self._written))

    @staticmethod
    def _metadata(identity: RankIdentity, details: Iterable[str]) -> bytes:
        document = json.dumps({"identity": asdict(identity), "details": list(details)}, separators=(",", ":")).encode()
        if len(document) > _METADATA_ROOM:
            raise ValueError(f"ring metadata of {len(document)} bytes do not fit {_METADATA_ROOM}")
        return document

    def _write_metadata(self, document: bytes) -> None:
        sequence = self._metadata_sequence = self._metadata_sequence + 2
        at = _METADATA_COPIES[(sequence // 2 - 1) % len(_METADATA_COPIES)]
        self._write(at, _HEAD.pack(sequence - 1, len(document), zlib.crc32(document)) + document)
        self._write(at, _SEQUENCE.pack(sequence))


def _written_by_another(path: Path) -> bool:
    """Whether `path` is the ring of another living process: a second engine with the same ranks in one server."""
    if not is_held(path):
        return False
    try:
        reader = RingReader(path)
    except RingError:
        return False  # nobody can use it
    try:
        return reader.identity.pid != os.getpid()
    finally:
        reader.close()


def _allocate(partial: Path, layout: RingLayout) -> tuple[int, RingLayout]:
    """A new file with all its blocks, and the layout that there was room for. Raises OSError, leaving no file."""
    with contextlib.suppress(FileNotFoundError):
        partial.unlink()
    fd = os.open(partial, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        while True:
            try:
                os.posix_fallocate(fd, 0, layout.file_bytes)
            except OSError as error:
                if error.errno not in (errno.ENOSPC, errno.EDQUOT) or layout.slots // 2 < MIN_SLOTS:
                    raise
                os.ftruncate(fd, 0)
                layout = RingLayout(slots=layout.slots // 2, slot_bytes=layout.slot_bytes)
            else:
                return fd, layout
    except BaseException:
        os.close(fd)
        with contextlib.suppress(OSError):
            partial.unlink()
        raise


class RingReader:
    """The reading end: works on the ring of a live or a dead writer and never disturbs it."""

    def __init__(self, path: Path) -> None:
        """Open the file. Raises RingError where it is not a whole ring of this format."""
        self.path = path
        self.overwritten = 0
        """Samples that the writer overwrote before `samples` reached them."""
        self.corrupted = 0
        """Slots whose bytes do not match their checksum, or that a dying writer left unfinished."""
        self._file = _open_file(path)
        self._whole = _PREAMBLE_BYTES  # how long the file must be at least
        try:
            self.layout = self._read_layout()
            self._whole = self.layout.file_bytes
            self._check_not_truncated()
            self._read_metadata()
        except BaseException:
            self._file.close()
            raise

    def _read_layout(self) -> RingLayout:
        self._check_not_truncated()
        magic, form, fingerprint, metadata, totals, slots, slot_bytes, _ = _PREAMBLE.unpack(
            self._read(0, _PREAMBLE.size)
        )
        if magic != MAGIC:
            raise RingError(self.path, "not a ring file (wrong magic number)")
        if form != FORMAT or fingerprint != FINGERPRINT or metadata != _METADATA_BYTES or totals != TOTALS_BYTES:
            raise RingError(
                self.path,
                f"written by another version of vllm-k25-instrument (format {form}, vocabulary {fingerprint:08x}; "
                f"this one reads format {FORMAT}, vocabulary {FINGERPRINT:08x}): read it with that version",
            )
        try:
            return RingLayout(slots=slots, slot_bytes=slot_bytes)
        except ValueError as error:
            raise RingError(self.path, f"corrupted: {error}") from error

    def _check_not_truncated(self) -> None:
        size = os.fstat(self._file.fileno()).st_size
        if size < self._whole:
            raise RingError(self.path, f"truncated: {size} of {self._whole} bytes")

    def _read(self, at: int, size: int) -> bytes:
        try:
            data = os.pread(self._file.fileno(), size, at)
        except OSError as error:
            raise RingError(self.path, error.strerror or str(error)) from error
        if len(data) != size:
            self._check_not_truncated()
            raise RingError(self.path, "truncated while it was read")
        return data

    def _read_metadata(self) -> None:
        reason = "its metadata do not match their checksum"
        for _ in range(100):
            newest = self._newest_metadata()
            # A copy that is being written, or damaged, leaves the other one, which lacks the last change.
            for at in sorted(_METADATA_COPIES, key=self._sequence_at, reverse=True):
                document = self._metadata_copy(at)
                if document is None:
                    continue
                try:
                    self._identity, self._details = _parse_metadata(document)
                except (ValueError, KeyError, TypeError, RecursionError) as error:
                    reason = one_line(f"unreadable metadata ({error})")
                else:
                    self._metadata_sequence = newest
                    return
        raise RingError(self.path, f"corrupted: {reason}")

    def _metadata_copy(self, at: int) -> bytes | None:
        sequence, length, crc = _HEAD.unpack(self._read(at, _HEAD.size))
        if sequence == 0 or sequence % 2 or length > _METADATA_ROOM:
            return None
        document = self._read(at + _HEAD.size, length)
        whole = self._sequence_at(at) == sequence and zlib.crc32(document) == crc
        return document if whole else None

    def _newest_metadata(self) -> int:
        return max(self._sequence_at(at) for at in _METADATA_COPIES)

    def _refresh_metadata(self) -> None:
        if self._newest_metadata() != self._metadata_sequence:
            self._read_metadata()

    def _sequence_at(self, at: int) -> int:
        return int(_SEQUENCE.unpack(self._read(at, _WORD))[0])

    @property
    def identity(self) -> RankIdentity:
        """The writer's identity as it stands now. Raises RingError where it has become unreadable."""
        self._check_not_truncated()
        self._refresh_metadata()
        return self._identity

    @property
    def alive(self) -> bool:
        """Whether the writer lives."""
        return is_held(self.path)

    @property
    def written(self) -> int:
        """How many samples have been written since the ring was made. Raises RingError where it has been truncated."""
        self._check_not_truncated()
        return self._sequence_at(_WRITTEN_OFFSET)

    def totals(self) -> Totals:
        """A snapshot of the cumulative counters. Raises RingError where the file has been truncated."""
        self._check_not_truncated()
        data = self._copy_totals()
        for _ in range(10):  # who is interrupted while copying may miss many steps in some counters and not in others
            again = self._copy_totals()
            if again == data:
                break
            data = again
        return Totals(data)

    def _copy_totals(self) -> bytes:
        return self._read(_TOTALS_OFFSET, TOTALS_BYTES)

    def samples(self, since: int = 0) -> Iterator[StepSample]:
        """The samples still in the ring, oldest first, from the `since`-th written (0 is the first).

        Samples that are gone or unreadable are counted in `overwritten` and `corrupted`. Raises RingError where the
        file has been truncated or its metadata damaged since it was opened.
        """
        written = self.written
        since = max(since, 0)
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

    def packed(self, first: int, end: int) -> tuple[list[bytes], tuple[str, ...]]:
        """The bytes of the samples from the `first`-th written to before the `end`-th, and the table of their details.

        For those who read many samples at once (:func:`vllm_k25_instrument.model.unpack_columns`). What is gone or
        unreadable is counted as in `samples`, which see for the errors raised.
        """
        copies = [data for n in range(first, end) if (data := self._copy(n)) is not None]
        # A detail is entered before the sample that has it: read afterwards, the table knows them all.
        self._refresh_metadata()
        return copies, tuple(self._details)

    def _copy(self, n: int) -> bytes | None:
        """The bytes of the n-th sample, whole, or None (counted)."""
        at = self.layout.slots_offset + (n % self.layout.slots) * self.layout.slot_bytes
        for _ in range(3):  # it may be the one that is being written
            slot = self._read(at, self.layout.slot_bytes)
            sequence, length, crc = _HEAD.unpack_from(slot)
            if sequence != 2 * n + 2 or length > self.layout.slot_bytes - _HEAD.size:
                break
            data = slot[_HEAD.size : _HEAD.size + length]
            if zlib.crc32(data) == crc:
                return data
        if self._sequence_at(at) > 2 * n + 2:
            self.overwritten += 1
        else:
            self.corrupted += 1
        return None

    def close(self) -> None:
        self._file.close()


def _parse_metadata(document: bytes) -> tuple[RankIdentity, list[str]]:
    """Identity and table of details, all text in them fit to be shown.

    Raises ValueError, KeyError, TypeError or RecursionError where it is neither.
    """
    parsed = json.loads(document)
    identity = RankIdentity(
        **{**parsed["identity"], "coordinates": RankCoordinates(**parsed["identity"]["coordinates"])}
    )
    details = parsed["details"]
    if not isinstance(details, list) or not all(isinstance(table, dict) for table in (identity.hooks, identity.layers)):
        raise TypeError("tables of another type")
    for record in (identity, identity.coordinates):
        for name, kind in _plain_fields(type(record)):
            if type(getattr(record, name)) is not kind:
                raise TypeError(f"{name} of another type")
            if kind is int and not _LEAST.get(name, 0) <= getattr(record, name) < 1 << 63:
                raise ValueError(f"{name} out of range")
    if max(identity.coordinates.global_rank + 1, identity.coordinates.world_size) > MAX_RANKS:
        raise ValueError(f"more than {MAX_RANKS} ranks")
    if not all(isinstance(word, str) for table in (identity.hooks.items(), [details]) for row in table for word in row):
        raise TypeError("tables of another type")
    texts: dict[str, Any] = {
        name: one_line(getattr(identity, name)) for name, kind in _plain_fields(RankIdentity) if kind is str
    }
    hooks = {one_line(name): one_line(state) for name, state in identity.hooks.items()}
    if not all(type(count) is int and count >= 0 for count in identity.layers.values()):
        raise TypeError("numbers of layers of another type")
    layers = {one_line(kind): count for kind, count in identity.layers.items()}
    return replace(identity, hooks=hooks, layers=layers, **texts), [one_line(detail) for detail in details]


_LEAST: Final = {"ep": -1, "tp_size": 1, "pp_size": 1, "dp_size": 1, "sample_every": 1}
"""Of the identity's numbers; of all others it is 0."""


def _plain_fields(record: type[RankIdentity | RankCoordinates]) -> Iterator[tuple[str, type]]:
    for field in fields(record):
        if field.type in ("int", "str"):
            yield field.name, int if field.type == "int" else str


def _open_file(path: Path) -> FileIO:
    """The file, open for reading. Raises RingError."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a pipe of that name must not block us
    except OSError as error:
        raise RingError(path, error.strerror or str(error)) from error
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise RingError(path, "not a regular file")
    return FileIO(fd)


def ring_file_name(global_rank: int) -> str:
    """File name of a rank's ring inside its instance's folder."""
    return f"rank-{global_rank:05d}{RING_SUFFIX}"


def ring_paths(path: Path) -> list[Path]:
    """The ring files at `path`: the file itself, or those of an instance's folder, sorted; none where it is gone."""
    if path.is_file():
        return [path]
    try:
        names = os.listdir(path)
    except OSError:
        return []
    return sorted(path / name for name in names if name.endswith(RING_SUFFIX))


def open_rings(path: Path) -> tuple[list[RingReader], list[RingError]]:
    """Every readable ring at `path`, by global rank, and an error for each file that is not one."""
    readers: list[tuple[int, RingReader]] = []
    errors: list[RingError] = []
    for file in ring_paths(path):
        try:
            reader = RingReader(file)
            readers.append((reader.identity.coordinates.global_rank, reader))
        except RingError as error:
            errors.append(error)
    return [reader for _, reader in sorted(readers, key=lambda entry: entry[0])], errors
