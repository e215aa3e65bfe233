"""The bytes of a trace, inflated block by block, with bounds on what a hostile file can cost."""

from __future__ import annotations

import importlib
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, Final

from vllm_k25_instrument.analysis.capture import CaptureError

try:  # Three times as fast as zlib; the reader works without it.
    _inflate: Any = importlib.import_module("isal.isal_zlib")
except ImportError:  # pragma: no cover
    _inflate = zlib

_ERRORS: Final[tuple[type[Exception], ...]] = (zlib.error, _inflate.error)

GZIP_MAGIC: Final = b"\x1f\x8b"

_READ_BYTES: Final = 1 << 16
# What a block is. Small enough to come from the heap again and again; larger ones are mapped, and page-faulted, anew.
_STEP_BYTES: Final = 1 << 18
_CAREFUL_BYTES: Final = 1 << 9  # the same, near damage
_BOMB_FLOOR: Final = 64 << 20
_BOMB_RATIO: Final = 400  # rows differ in their times and ids: real traces stay below 60


class Blocks:
    """The inflated content of a file, plain or gzip (any number of members), in blocks of 256 KiB.

    `damage` says, once the blocks are exhausted, why the content is not all there ("" where it is). `progress` is
    called with the number of bytes of the file read since the last call.

    Raises CaptureError where the file cannot be opened, or inflates as only a decompression bomb does.
    """

    def __init__(self, path: Path, progress: Callable[[int], None] | None = None) -> None:
        self._path = path
        self._progress = progress
        self._read = 0
        self.damage = ""

    def __iter__(self) -> Iterator[bytes]:
        try:
            with self._path.open("rb") as file:
                head = file.read(2)
                file.seek(0)
                yield from self._gunzip(file) if head == GZIP_MAGIC else self._plain(file)
        except OSError as error:
            raise CaptureError(self._path, f"cannot be read ({error.strerror or error})") from error

    def _take(self, file: IO[bytes], size: int) -> bytes:
        data = file.read(size)
        self._read += len(data)
        if data and self._progress is not None:
            self._progress(len(data))
        return data

    def _plain(self, file: IO[bytes]) -> Iterator[bytes]:
        while data := self._take(file, _STEP_BYTES):
            yield data

    def _gunzip(self, file: IO[bytes]) -> Iterator[bytes]:
        total = 0
        for piece in self._members(file):
            total += len(piece)
            if total > _BOMB_FLOOR and total > _BOMB_RATIO * self._read:
                raise CaptureError(
                    self._path,
                    f"inflates more than {_BOMB_RATIO}-fold, which no trace does",
                    "inflate it yourself and pass the .json if you trust it",
                )
            yield piece

    def _members(self, file: IO[bytes]) -> Iterator[bytes]:
        member: Any = _inflate.decompressobj(31)
        started = False  # whether the member at hand has had input
        data = self._take(file, _READ_BYTES)
        start = given = 0  # where the member begins, and what it has inflated to
        while data:
            started = True
            try:
                piece = member.decompress(data, _STEP_BYTES)
            except _ERRORS as error:
                self.damage = f"damaged gzip stream ({error})"
                yield from _up_to_damage(file, start, given)
                return
            given += len(piece)
            if piece:
                yield piece
            if not member.eof:
                data = member.unconsumed_tail or self._take(file, _READ_BYTES)
                continue
            # Between members there may be padding; anything else that is no gzip header ends the content.
            data = member.unused_data.lstrip(b"\0")
            while not data and (more := self._take(file, _READ_BYTES)):
                data = more.lstrip(b"\0")
            started = False
            if len(data) == 1:
                data += self._take(file, _READ_BYTES)
            if data and not data.startswith(GZIP_MAGIC):
                self.damage = "bytes that are not gzip follow the compressed data"
                return
            member = _inflate.decompressobj(31)
            start, given = file.tell() - len(data), 0
        if started:
            self.damage = "the gzip stream is cut off"


def _up_to_damage(file: IO[bytes], start: int, given: int) -> Iterator[bytes]:
    """What the member that begins at `start` inflates to before it is damaged, but for its first `given` bytes.

    An inflater keeps to itself what it inflated in the call that met the damage, so near there it is asked for little.
    """
    file.seek(start)
    member: Any = _inflate.decompressobj(31)
    data = b""
    done = 0
    try:
        while not member.eof and (data := data or file.read(_READ_BYTES)):
            piece = member.decompress(data, _CAREFUL_BYTES if done + _STEP_BYTES > given else _STEP_BYTES)
            data = member.unconsumed_tail
            fresh = min(done + len(piece) - given, len(piece))
            done += len(piece)
            if fresh > 0:
                yield piece[-fresh:]
    except _ERRORS:
        return
