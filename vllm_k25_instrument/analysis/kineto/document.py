"""Where the events are in the JSON: containers of any order and nesting, open, cut off or broken.

The elements of an array of events are decoded many at a time. Where to cut the stream is guessed from the text, and the
decoder proves the guess: what it accepts as an array, closed at the cut, ends between two elements and nowhere else.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from vllm_k25_instrument.analysis.capture import CaptureError
from vllm_k25_instrument.analysis.kineto.columns import Section
from vllm_k25_instrument.analysis.kineto.rows import Batch, Encoding, MalformedError, RowDecoder

CHUNK_BYTES: Final = 2 << 20

_MIN_CHUNK: Final = 16 << 10
_LOOSE_BYTES: Final = 256 << 10
_MAX_ROW: Final = 4 << 20
_MAX_VALUE: Final = 1 << 20  # of a value beside the events that is worth keeping
_MAX_STRING: Final = 1 << 20
_MAX_DEPTH: Final = 32  # of containers around events
_MAX_VALUE_DEPTH: Final = 500  # of a row or a value; decoders recurse, and give up at about 1,000
_SCAN_BUDGET: Final = 64 << 20  # bytes that may be scanned token by token in search of a broken row's end
_TAIL: Final = 16 << 10

_SPACE: Final = re.compile(rb"[\s\0,]*")
_STRING: Final = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*("?)', re.DOTALL)
_TOKEN: Final = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*("?)|[{}\[\]]', re.DOTALL)
_SCALAR: Final = re.compile(rb"[^,\]}\[{\"\s]+")
_SCALARS: Final = re.compile(rb"[^\]}\[{\"]+")
_SEAM: Final = re.compile(rb"\}\s*,\s*(?=\{)")
_ROW_SEAM: Final = re.compile(rb'\}\s*,\s*(?=\{\s*"(?:ph|cat|name|pid|tid|ts|dur|args|id|bp|s)"\s*:)')

_KEPT: Final = frozenset({"distributedInfo", "baseTimeNanoseconds"})
_NEEDED: Final = "a torch.profiler trace is needed"
_EVENTS: Final = "traceEvents"
_EVENTS_KEY: Final = b'"traceEvents"'
_EVENTS_ARRAY: Final = re.compile(rb'"traceEvents"\s*:\s*\[')


class _EndOfInputError(Exception):
    """The input ends inside a container."""


class _DamagedError(Exception):
    """The JSON around the events cannot be followed further."""


class Window:
    """The part of the inflated file that is being looked at."""

    def __init__(self, blocks: Iterator[bytes]) -> None:
        self._blocks = blocks
        self._dropped = 0
        self.data = bytearray(b" ")  # one byte before the first, for a bracket to be put there
        self.position = 1
        self.ended = False

    @property
    def offset(self) -> int:
        """Where in the inflated file the position is."""
        return self._dropped + self.position - 1

    def more(self) -> bool:
        """Take one more block; False at the end of the file."""
        block = next(self._blocks, None)
        if block is None:
            self.ended = True
            return False
        if self.position > _MIN_CHUNK:
            drop = self.position - 1
            del self.data[:drop]
            self._dropped += drop
            self.position = 1
        self.data += block
        return True

    def fill(self, size: int) -> None:
        """See to it that `size` bytes follow the position, or all there are."""
        while len(self.data) - self.position < size and not self.ended:
            self.more()

    def peek(self) -> int:
        """The byte after white space, commas and padding; -1 at the end of the file. Moves there."""
        while True:
            match = _SPACE.match(self.data, self.position)
            if match is not None:
                self.position = match.end()
            if self.position < len(self.data):
                return self.data[self.position]
            if self.ended or not self.more():
                return -1


class Document:
    """A trace, read from its blocks into sections.

    After `read`: `sections`, `damage` ("" or why the trace is not whole), `encoding`. `read` raises CaptureError for
    what is no JSON, holds no events, or nests deeper than any trace.
    """

    def __init__(self, path: Path, blocks: Iterator[bytes]) -> None:
        self.path = path
        self.sections: list[Section] = []
        self.damage = ""
        self.encoding = Encoding()
        self._window = Window(blocks)
        self._decoder = RowDecoder(self.encoding)
        self._scanned = 0

    def read(self) -> None:
        """Read it all."""
        window = self._window
        window.fill(4)
        if window.data.startswith(b"\xef\xbb\xbf", window.position):
            window.position += 3
        first = window.peek()
        if first not in (ord("{"), ord("[")):
            raise CaptureError(self.path, "is empty" if first < 0 else "is not JSON", _NEEDED)
        try:
            while (byte := window.peek()) >= 0:
                if byte == ord("{"):
                    self._object(None, 0)
                elif byte == ord("["):
                    self._top_array()
                else:
                    self.damage = f"something else follows the JSON at byte {window.offset}"
                    break
        except _EndOfInputError:
            self.damage = "the JSON ends in the middle"
        except _DamagedError as error:
            self.damage = str(error)
        if not any(section.has_events for section in self.sections):
            if self.damage:
                raise CaptureError(self.path, f"no events could be read ({self.damage})", "profile again")
            raise CaptureError(self.path, "is JSON without traceEvents", _NEEDED)

    # --- containers --------------------------------------------------------------------------------------

    def _object(self, parent: Section | None, depth: int) -> None:
        self._check_depth(depth)
        window = self._window
        window.position += 1
        section = Section(parent)
        self.sections.append(section)
        while True:
            byte = window.peek()
            if byte == ord("}"):
                window.position += 1
                return
            if byte < 0:
                raise _EndOfInputError
            if byte != ord('"'):
                self._resume_at_events()
                continue
            try:
                key = self._string()
            except (_DamagedError, _EndOfInputError):
                self._resume_at_events()
                continue
            if window.peek() == ord(":"):
                window.position += 1
                self._value(section, key, depth)
            # else: a key without a value; the next key, or the damage, is where we are

    def _value(self, section: Section, key: str, depth: int) -> None:
        window = self._window
        byte = window.peek()
        if byte < 0:
            raise _EndOfInputError
        if key == _EVENTS and byte == ord("["):
            self._events(section, depth + 1)
            return
        if byte in b"{[":
            offset = window.offset
            raw = self._small_value()
            if raw is not None:
                value = _loads(raw)
                if value is None:
                    self.damage = f"broken JSON at byte {offset}"
                if key in _KEPT:
                    section.metadata[key] = value
                return
            if byte == ord("{"):
                self._object(section, depth + 1)
            else:
                self._array(section, depth + 1)
        elif byte == ord('"'):
            text = self._string()
            if key in _KEPT:
                section.metadata[key] = text
        else:
            scalar = self._scalar()
            if key in _KEPT:
                section.metadata[key] = _loads(scalar)

    def _array(self, parent: Section | None, depth: int) -> None:
        """An array that may hold traces somewhere."""
        self._check_depth(depth)
        window = self._window
        window.position += 1
        while (byte := window.peek()) != ord("]"):
            if byte < 0:
                raise _EndOfInputError
            if byte == ord("{"):
                self._object(parent, depth + 1)
            elif byte == ord("["):
                self._array(parent, depth + 1)
            elif byte == ord('"'):
                self._string()
            elif byte == ord("}"):
                return  # the array was left open
            else:
                self._scalars()
        window.position += 1

    def _top_array(self) -> None:
        """A bare array: of events, or of traces."""
        window = self._window
        window.fill(_MIN_CHUNK * 4)
        space = _SPACE.match(window.data, window.position + 1)
        first = space.end() if space is not None else window.position
        end = _container_end(window.data, first, _MIN_CHUNK * 4)
        if _EVENTS_KEY in window.data[first : end if end > 0 else first + _MIN_CHUNK * 4]:
            self._array(None, 0)
            return
        section = Section()
        self.sections.append(section)
        self._events(section, 0)

    def _check_depth(self, depth: int) -> None:
        if depth > _MAX_DEPTH:
            raise CaptureError(self.path, f"nests deeper than {_MAX_DEPTH} levels", _NEEDED)

    def _small_value(self) -> bytes | None:
        """The text of the container at the position, consumed; None (not consumed) for one that may hold events."""
        window = self._window
        end = self._element_end(_MAX_VALUE)
        if end < 0:
            return None
        raw = bytes(window.data[window.position : end])
        if _EVENTS_KEY in raw:
            return None
        window.position = end
        return raw

    def _string(self) -> str:
        window = self._window
        while True:
            match = _STRING.match(window.data, window.position)
            if match is not None and match[1]:
                window.position = match.end()
                return str(_loads(match[0]) or "")
            if len(window.data) - window.position > _MAX_STRING:
                raise _DamagedError(f"a string without end at byte {window.offset}")
            if not window.more():
                raise _EndOfInputError

    def _scalar(self) -> bytes:
        window = self._window
        window.fill(64)
        match = _SCALAR.match(window.data, window.position)
        if match is None:
            window.position += 1  # a stray bracket
            return b"null"
        window.position = match.end()
        return match[0]

    def _scalars(self) -> None:
        """Step over a run of scalars."""
        window = self._window
        match = _SCALARS.match(window.data, window.position)
        window.position = match.end() if match is not None else window.position + 1

    def _resume_at_events(self) -> None:
        """The object is broken here: go on at the next array of events, if there is one."""
        window = self._window
        self.damage = f"broken JSON at byte {window.offset}"
        while True:
            found = _EVENTS_ARRAY.search(window.data, window.position)
            if found is not None:
                window.position = found.start()
                return
            window.position = max(window.position, len(window.data) - 256)
            if not window.more():
                raise _DamagedError(self.damage)

    # --- events ------------------------------------------------------------------------------------------

    def _events(self, section: Section, depth: int) -> None:
        self._check_depth(depth)
        section.has_events = True
        window = self._window
        window.position += 1
        size = CHUNK_BYTES
        while True:
            byte = window.peek()
            if byte == ord("{"):
                size = self._batch(section, size)
            elif byte == ord("]"):
                window.position += 1
                return
            elif byte < 0:
                raise _EndOfInputError
            elif byte == ord("["):
                self._events(section, depth + 1)
            elif byte == ord("}"):
                self.damage = f"an array of events is not closed at byte {window.offset}"
                return
            elif byte == ord('"'):
                self._stray_string(section)
            else:
                self._scalar()
                section.skipped.no_object += 1

    def _stray_string(self, section: Section) -> None:
        section.skipped.no_object += 1
        try:
            self._string()
        except _DamagedError:
            self._resync(section)

    def _batch(self, section: Section, size: int) -> int:
        """Decode some of what follows; returns how many bytes to try next."""
        window = self._window
        window.fill(size)
        start = window.position
        cut = self._last_seam(start, min(start + size, len(window.data)))
        while cut > start:
            try:
                batch = self._decode(start, cut)
                if not section.add(batch):
                    section.add(self._decode(start, cut, full=True))
            except MalformedError as error:
                if error.offset < 0:
                    break
                # The offset counts from the bracket put before `start`. Everything up to the element there is sound.
                bad = start - 1 + error.offset
                if error.trailing:
                    closed = window.data.rfind(b"]", start, bad)
                    cut = window.data.rfind(b"}", start, closed) + 1 if closed > 0 else -1
                else:
                    seam = self._last_seam(start, min(bad, cut - 1))
                    cut = seam if seam < cut else -1
                continue
            window.position = cut
            return min(max(size, _MIN_CHUNK) * 2, CHUNK_BYTES)
        if size > _MIN_CHUNK and cut > start:
            return size // 2
        if cut > start or not self._loose(section):
            self._single(section)
        return max(_MIN_CHUNK, size // 2 if cut > start else size)

    def _loose(self, section: Section) -> bool:
        """Decode some rows by the slower decoder that forgives more, since the next row needs it; whether it could."""
        window = self._window
        cut = self._last_seam(window.position, min(window.position + _LOOSE_BYTES, len(window.data)))
        if cut < 0:
            return False
        try:
            batch = self._decode(window.position, cut, loose=True)
        except MalformedError:
            return False
        section.add(batch)
        window.position = cut
        return True

    def _decode(self, start: int, cut: int, *, full: bool = False, loose: bool = False) -> Batch:
        """The rows in [start, cut) of the window, where an element begins at `start`. Raises MalformedError."""
        window = self._window
        data = window.data
        before = data[start - 1]
        data[start - 1] = ord("[")
        padded = cut == len(data)
        if padded:
            data += b" "
        after = data[cut]
        data[cut] = ord("]")
        try:
            with memoryview(data) as view, view[start - 1 : cut + 1] as array:
                return self._decoder.many(array, window.offset - 1, full=full, loose=loose)
        finally:
            data[start - 1] = before
            data[cut] = after
            if padded:
                del data[-1]

    def _last_seam(self, start: int, end: int) -> int:
        """Where the last element that ends before `end` seems to end; -1 if none does."""
        data = self._window.data
        for pattern in (_ROW_SEAM, _SEAM):
            span = _TAIL
            while True:
                low = max(start, end - span)
                seams = [seam.start() for seam in pattern.finditer(data, low, end)]
                if seams:
                    return seams[-1] + 1
                if low == start:
                    break
                span *= 16
        return -1

    def _single(self, section: Section) -> None:
        """Take the one element at the position, or step over it where it is broken beyond repair."""
        window = self._window
        window.fill(_MIN_CHUNK * 4)
        for attempt, seam in enumerate(_ROW_SEAM.finditer(window.data, window.position)):
            if attempt == 4:
                break
            if self._take(section, seam.start() + 1):
                return
        if self._scanned < _SCAN_BUDGET:
            end = self._element_end(_MAX_ROW)
            self._scanned += (end if end > 0 else len(window.data)) - window.position
            if end > 0 and self._take(section, end):
                return
            at_end = window.ended and len(window.data) - window.position < _MAX_ROW
            if end < 0 and at_end and _ROW_SEAM.search(window.data, window.position) is None:
                raise _EndOfInputError
        section.skipped.broken += 1
        self._resync(section)

    def _take(self, section: Section, end: int) -> bool:
        window = self._window
        try:
            batch = self._decoder.one(bytes(window.data[window.position : end]), window.offset)
        except MalformedError:
            return False
        section.add(batch)
        window.position = end
        return True

    def _resync(self, section: Section) -> None:
        """Go to the next thing that looks like the start of a row."""
        window = self._window
        while True:
            seam = _ROW_SEAM.search(window.data, window.position)
            if seam is not None:
                window.position = seam.end()
                return
            window.position = max(window.position + 1, len(window.data) - 256)
            if window.ended or not window.more():
                raise _EndOfInputError

    def _element_end(self, limit: int) -> int:
        """One past the end of the container at the position; -1 where it does not end within `limit` bytes."""
        window = self._window
        size = _MIN_CHUNK * 4
        while True:
            window.fill(size)
            end = _container_end(window.data, window.position, min(size, limit))
            if end > 0 or size >= limit or len(window.data) - window.position < size:
                return end
            size *= 4


def _container_end(data: bytearray, start: int, limit: int) -> int:
    """One past the end of the object or array that begins at `start`.

    -1 where it does not end within `limit` bytes, or nests deeper than any decoder goes.
    """
    depth = 0
    for token in _TOKEN.finditer(data, start, start + limit):
        first = data[token.start()]
        if first == ord('"'):
            if not token[1]:
                return -1
        elif first in b"{[":
            depth += 1
            if depth > _MAX_VALUE_DEPTH:
                return -1
        else:
            depth -= 1
            if depth <= 0:
                return token.end()
    return -1


def _loads(raw: bytes) -> Any:
    try:
        return json.loads(raw.decode(errors="replace"), strict=False)
    except (ValueError, RecursionError):
        return None
