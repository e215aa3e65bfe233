"""One row of a trace: its typed form, and its decoding from JSON that may be wrong in every way seen so far.

Three ways, tried in this order: a typed decoder (fast; almost every row of almost every file), the standard library's
decoder (NaN, wrong types, control characters, lone surrogates), and the same after repairing escapes (single rows).
"""

from __future__ import annotations

import enum
import json
import operator
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from decimal import Decimal, InvalidOperation
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta, Raw, Struct

MISSING: Final = -1
"""An integer field that the row does not have."""

NO_TIME: Final = -(2**63)
"""A start, in ns, that is not a number: NaN, infinite, or beyond 64 bits."""

# A double holds a nanosecond of a count of microseconds up to 2**43 (102 days); beyond that the digits must be read.
# Less a day, so that a look at some rows tells: no row of a capture is a day later than the rows around it.
EXACT_US: Final = float(2**43 - 86_400 * 10**6)
_LOOK_EVERY: Final = 16
_MAX_US: Final = 9_000_000_000_000_000
_INT_BOUND: Final = 2**62


class Role(enum.Enum):
    """What a row is to us."""

    KERNEL = 0
    MEMCPY = 1
    MEMSET = 2
    LAUNCH = 3
    OPERATOR = 4
    ANNOTATION = 5
    NONE = 6

    __hash__ = object.__hash__  # the default one is Python code, and runs once a row


class Phase(enum.Enum):
    """Value of `ph`."""

    INTERVAL = "X"
    METADATA = "M"
    OTHER = ""  # instants, flows, counters, asynchronous and object events: nothing that lasts on its own row

    __hash__ = object.__hash__

    @classmethod
    def _missing_(cls, value: object) -> Phase:
        return cls.OTHER


class Category(enum.Enum):
    """Value of `cat`, as spelled by Kineto now and since 2021, for CUDA, ROCm, XPU and out-of-tree devices."""

    KERNEL = "kernel"
    MEMCPY = "gpu_memcpy"
    MEMSET = "gpu_memset"
    CUDA_RUNTIME = "cuda_runtime"
    CUDA_DRIVER = "cuda_driver"
    CPU_OP = "cpu_op"
    USER_ANNOTATION = "user_annotation"
    FLOW = "ac2g"
    KERNEL_OLD = "Kernel"
    MEMCPY_OLD = "Memcpy"
    MEMSET_OLD = "Memset"
    CONCURRENT_KERNEL = "concurrent_kernel"
    RUNTIME_OLD = "Runtime"
    DRIVER_OLD = "Driver"
    OPERATOR_OLD = "Operator"
    HIP_RUNTIME = "hip_runtime"
    HIP_DRIVER = "hip_driver"
    XPU_RUNTIME = "xpu_runtime"
    XPU_DRIVER = "xpu_driver"
    PRIVATEUSE1_RUNTIME = "privateuse1_runtime"
    PRIVATEUSE1_DRIVER = "privateuse1_driver"
    OTHER = ""

    __hash__ = object.__hash__

    @classmethod
    def _missing_(cls, value: object) -> Category:
        return cls.OTHER


_RUNTIMES: Final = {c for c in Category if c.value.lower().endswith(("runtime", "driver"))}

ROLES: Final = {
    **dict.fromkeys(Category, Role.NONE),
    **dict.fromkeys(_RUNTIMES, Role.LAUNCH),
    Category.KERNEL: Role.KERNEL,
    Category.KERNEL_OLD: Role.KERNEL,
    Category.CONCURRENT_KERNEL: Role.KERNEL,
    Category.MEMCPY: Role.MEMCPY,
    Category.MEMCPY_OLD: Role.MEMCPY,
    Category.MEMSET: Role.MEMSET,
    Category.MEMSET_OLD: Role.MEMSET,
    Category.CPU_OP: Role.OPERATOR,
    Category.OPERATOR_OLD: Role.OPERATOR,
    Category.USER_ANNOTATION: Role.ANNOTATION,
}

# Bounded, so that a column of them fits 64 bits; a row beyond goes the slow way, where it is called missing.
Integer = Annotated[int, Meta(ge=-_INT_BOUND, le=_INT_BOUND)]


class Args(Struct, gc=False):
    """The arguments that we use, in Kineto's order (the decoder is fastest when fields come as declared)."""

    external: Integer = msgspec.field(default=MISSING, name="External id")
    device: Integer = MISSING
    stream: Integer = MISSING
    correlation: Integer = MISSING
    bytes: Integer = MISSING
    # What torch.cuda._graph_annotations leaves on the kernels of a graph.
    annotation: str | None = None
    mark: str | None = msgspec.field(default=None, name="str")


class MetadataArgs(Args, gc=False):
    """With what a row of metadata names: a process, or the label of one."""

    name: str | None = None
    labels: str | None = None


class Row(Struct, gc=False):
    """A row with its times in microseconds, as the file has them.

    Without `ph`, which costs a quarter of the decoding and matters only for rows without a category.
    """

    cat: Category | None = None
    name: str | None = None
    pid: Integer | str | None = None
    tid: Integer | str | None = None
    ts: float | None = None
    dur: float | None = None
    args: Args | None = None


class FullRow(Row, gc=False):
    """A row with all that anybody asks for."""

    args: MetadataArgs | None = None
    ph: Phase | None = None


class _DigitsRow(Struct, gc=False):
    """The same, its start left as text."""

    ph: Phase | None = None
    cat: Category | None = None
    name: str | None = None
    pid: Integer | str | None = None
    tid: Integer | str | None = None
    ts: Raw = Raw(b"")
    dur: float | None = None
    args: MetadataArgs | None = None


@dataclass(slots=True)
class Batch:
    """Decoded rows. With `ts_is_ns` their `ts` holds integer nanoseconds instead of microseconds."""

    rows: Sequence[Row]
    full: bool
    """Whether they are ``FullRow``s."""
    ts_is_ns: bool = False
    skipped: int = 0
    """Elements that are no objects."""


class MalformedError(Exception):
    """Bytes that are no JSON array of rows. `offset`: of the offending byte, -1 where it is not known."""

    def __init__(self, offset: int = -1, trailing: bool = False) -> None:
        super().__init__(offset)
        self.offset = offset
        self.trailing = trailing


@dataclass(slots=True)
class Encoding:
    """Where the file is not what its encoding says: byte offsets in the inflated file, one per stretch of it."""

    offsets: set[int] = field(default_factory=set)

    def found(self, offset: int) -> None:
        """Note one place."""
        self.offsets.add(offset)


_TS: Final = operator.attrgetter("ts")
_OFFSET: Final = re.compile(r"\(byte (\d+)\)")
_SURROGATE: Final = re.compile("[\ud800-\udfff]")
_ESCAPE: Final = re.compile(rb'\\(u[0-9a-fA-F]{4}|["\\/bfnrt])?')
_DECIMAL: Final = re.compile(r"(-?)(\d{1,16})(?:\.(\d*))?")


def ns_of_us(text: str) -> int | None:
    """Nanoseconds of a decimal number of microseconds, exactly (a tenth of a ns rounds half up); None if it is none.

    Values beyond 64 bits of nanoseconds are none either.
    """
    match = _DECIMAL.fullmatch(text)
    if match is None:
        try:
            value = Decimal(text)
        except InvalidOperation:
            return None
        if not value.is_finite() or value.adjusted() > 16:
            return None
        us = value if value.adjusted() > -30 else Decimal(0)
        return int((us * 1000).to_integral_value()) if abs(us) <= _MAX_US else None
    sign, whole, fraction = match.groups()
    ns = int(whole) * 1000
    if fraction:
        ns += int((fraction + "00")[:3]) + (fraction[3:4] >= "5")
    if ns > _MAX_US * 1000:
        return None
    return -ns if sign else ns


class RowDecoder:
    """Decodes arrays of rows; remembers whether the file's times need their digits read."""

    def __init__(self, encoding: Encoding) -> None:
        self._fast = msgspec.json.Decoder(list[Row])
        self._full = msgspec.json.Decoder(list[FullRow])
        self._digits = msgspec.json.Decoder(list[_DigitsRow])
        self._encoding = encoding
        self._absolute = False

    def many(self, array: memoryview, origin: int, *, full: bool = False, loose: bool = False) -> Batch:
        """The rows of a JSON array. `origin`: its offset in the inflated file. Raises MalformedError.

        With `full` they are ``FullRow``s, as they may be anyway. With `loose` the forgiving decoder is used at once.
        """
        if loose:
            return self._loose(self._decodable(bytes(array), origin), origin)
        data: memoryview | bytes = array
        try:
            return self._typed(data, full)
        except msgspec.ValidationError:
            pass
        except (msgspec.DecodeError, RecursionError, ValueError) as error:
            message = str(error)
            match = _OFFSET.search(message)
            if match is not None:
                raise MalformedError(int(match[1]), trailing="trailing characters" in message) from error
            if "UTF-8" not in message:
                raise MalformedError from error
            data = self._decodable(bytes(array), origin)
            try:
                return self._typed(data, full)
            except (msgspec.DecodeError, RecursionError, ValueError):
                pass
        return self._loose(bytes(data), origin)

    def one(self, element: bytes, origin: int) -> Batch:
        """The row that is one JSON object, escapes repaired where needed. Raises MalformedError."""
        array = b"[" + element + b"]"
        try:
            return self._typed(array, full=True)
        except (msgspec.DecodeError, RecursionError, ValueError):
            pass
        array = self._decodable(array, origin)
        try:
            return self._loose(array, origin)
        except MalformedError:
            repaired = _ESCAPE.sub(lambda m: m[0] if m[1] else rb"\\", array)
            if repaired == array:
                raise
            batch = self._loose(repaired, origin)
            self._encoding.found(origin)
            return batch

    def _decodable(self, array: bytes, origin: int) -> bytes:
        try:
            array.decode()
        except UnicodeDecodeError as error:
            self._encoding.found(origin + error.start)
            return array.decode(errors="replace").encode()
        return array

    def _typed(self, array: memoryview | bytes, full: bool) -> Batch:
        if not self._absolute:
            rows: Sequence[Row] = self._full.decode(array) if full else self._fast.decode(array)
            if max(filter(None, map(_TS, rows[::_LOOK_EVERY])), default=0.0) < EXACT_US:
                return Batch(rows, full)
            self._absolute = True
        exact = []
        for row in self._digits.decode(array):
            text = bytes(row.ts).decode("ascii", "replace")
            ts = ns_of_us(text.strip('"')) if text and text != "null" else None
            if ts is None and text and text != "null":
                ts = NO_TIME
            exact.append(FullRow(row.cat, row.name, row.pid, row.tid, ts, row.dur, row.args, row.ph))
        return Batch(exact, full=True, ts_is_ns=True)

    def _loose(self, array: bytes, origin: int) -> Batch:
        try:
            # Numbers with a point stay text: their digits count.
            elements = json.loads(array, parse_float=str, parse_constant=str, strict=False)
        except (ValueError, RecursionError) as error:
            raise MalformedError from error
        rows = [self._row(element, origin) for element in elements if isinstance(element, dict)]
        return Batch(rows, full=True, ts_is_ns=True, skipped=len(elements) - len(rows))

    def _row(self, element: dict[str, Any], origin: int) -> FullRow:
        args = element.get("args")
        row = FullRow(
            ph=Phase(element["ph"]) if isinstance(element.get("ph"), str) else None,
            cat=Category(element["cat"]) if isinstance(element.get("cat"), str) else None,
            name=self._text(element.get("name"), origin),
            pid=self._identity(element.get("pid"), origin),
            tid=self._identity(element.get("tid"), origin),
            ts=_start(element.get("ts")),
            dur=_duration(element.get("dur")),
        )
        if isinstance(args, dict):
            row.args = MetadataArgs(
                external=_integer(args.get("External id")),
                device=_integer(args.get("device")),
                stream=_integer(args.get("stream")),
                correlation=_integer(args.get("correlation")),
                bytes=_integer(args.get("bytes")),
                annotation=self._text(args.get("annotation"), origin),
                mark=self._text(args.get("str"), origin),
                name=self._text(args.get("name"), origin),
                labels=self._text(args.get("labels"), origin),
            )
        return row

    def _text(self, value: object, origin: int) -> str | None:
        if not isinstance(value, str):
            return None
        if _SURROGATE.search(value):
            self._encoding.found(origin)
            return _SURROGATE.sub("\N{REPLACEMENT CHARACTER}", value)
        return value

    def _identity(self, value: object, origin: int) -> int | str | None:
        if isinstance(value, int):
            return _integer(value)
        return self._text(value, origin)


def _integer(value: object) -> int:
    if isinstance(value, str):
        try:
            value = int(value) if len(value) < 20 else MISSING
        except ValueError:
            return MISSING
    return int(value) if isinstance(value, int) and -_INT_BOUND <= value <= _INT_BOUND else MISSING


def _start(value: object) -> int | None:
    if value is None or isinstance(value, bool):
        return None
    if isinstance(value, int):
        return value * 1000 if abs(value) <= _MAX_US else NO_TIME
    if isinstance(value, str):
        ns = ns_of_us(value.strip())
        return NO_TIME if ns is None else ns
    return None


def _duration(value: object) -> float | None:
    """Microseconds; -1 for what is no duration."""
    if value is None or isinstance(value, bool):
        return None
    if isinstance(value, int | str):
        ns = ns_of_us(str(value).strip()) if isinstance(value, str) or abs(value) <= _MAX_US else None
        return -1.0 if ns is None else ns / 1000
    return None
