"""Rows turned into columns of integers as they come, so that no row outlives its batch."""

from __future__ import annotations

import itertools
import operator
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from vllm_k25_instrument.analysis.capture import ActivityKind, Int32, Int64
from vllm_k25_instrument.analysis.kineto.rows import MISSING, ROLES, Args, Batch, Category, FullRow, Phase, Role, Row

BAD_DURATION: Final = -1

_MAX_US: Final = 9e15
_KINDS: Final = {
    Role.KERNEL: ActivityKind.KERNEL,
    Role.MEMCPY: ActivityKind.MEMCPY,
    Role.MEMSET: ActivityKind.MEMSET,
}


class Interned:
    """Values numbered in the order in which they are first seen."""

    def __init__(self) -> None:
        self._index: defaultdict[Any, int] = defaultdict(itertools.count().__next__)

    def numbers(self, values: Iterable[Any], count: int) -> Int32:
        """The numbers of `count` values."""
        return np.fromiter(map(self._index.__getitem__, values), np.int32, count)

    @property
    def values(self) -> list[Any]:
        """The values; their positions are their numbers."""
        return list(self._index)

    def __len__(self) -> int:
        return len(self._index)


class Table:
    """Columns of one kind of row, gathered batch by batch."""

    def __init__(self, **dtypes: type) -> None:
        self._dtypes = dtypes
        self._parts: dict[str, list[NDArray[Any]]] = {name: [] for name in dtypes}
        self._length = 0

    def append(self, **columns: NDArray[Any]) -> None:
        """One batch: an array for every column, all of one length."""
        for name, dtype in self._dtypes.items():
            self._parts[name].append(columns[name].astype(dtype, copy=False))
        self._length += len(columns[next(iter(self._dtypes))])

    def __len__(self) -> int:
        return self._length

    def column(self, name: str) -> NDArray[Any]:
        """The whole column."""
        parts = self._parts[name]
        if len(parts) > 1:
            parts[:] = [np.concatenate(parts)]
        return parts[0] if parts else np.empty(0, self._dtypes[name])


@dataclass(slots=True)
class Skipped:
    """Rows that were left out, by reason."""

    no_category: int = 0
    no_time: int = 0
    no_args: int = 0
    no_object: int = 0
    broken: int = 0

    @property
    def total(self) -> int:
        """All of them."""
        return self.no_category + self.no_time + self.no_args + self.no_object + self.broken

    def reasons(self) -> str:
        """The reasons in words, the counts with them."""
        words = {
            "without a category": self.no_category,
            "without ts or dur": self.no_time,
            "without args": self.no_args,
            "that are no objects": self.no_object,
            "that are broken JSON": self.broken,
        }
        return ", ".join(f"{count} {reason}" for reason, count in words.items() if count)


@dataclass(slots=True)
class Section:
    """What one container of events (an object with `traceEvents`, or a bare array) holds."""

    parent: Section | None = None
    metadata: dict[str, Any] = field(default_factory=dict)
    has_events: bool = False
    rows: int = 0
    names: Interned = field(default_factory=Interned)
    pids: Interned = field(default_factory=Interned)
    tids: Interned = field(default_factory=Interned)
    appeared: dict[int | str | None, int] = field(default_factory=dict)
    """Each `pid`, and how many came before it: the file's own order of its processes and devices."""
    process_names: dict[int | str, list[str]] = field(default_factory=dict)
    skipped: Skipped = field(default_factory=Skipped)
    gpu: Table = field(
        default_factory=lambda: Table(
            start=np.int64,
            duration=np.int64,
            kind=np.int8,
            name=np.int32,
            pid=np.int32,
            tid=np.int32,
            device=np.int64,
            stream=np.int64,
            correlation=np.int64,
            external=np.int64,
            bytes=np.int64,
            mark=np.int32,
        )
    )
    calls: Table = field(
        default_factory=lambda: Table(
            start=np.int64,
            duration=np.int64,
            name=np.int32,
            pid=np.int32,
            tid=np.int32,
            correlation=np.int64,
            external=np.int64,
        )
    )
    host: Table = field(
        default_factory=lambda: Table(
            start=np.int64,
            duration=np.int64,
            name=np.int32,
            pid=np.int32,
            tid=np.int32,
            external=np.int64,
            operator=np.bool_,
        )
    )

    def metadatum(self, key: str) -> Any:
        """A value of the container or, where it has none, of the one around it."""
        section: Section | None = self
        while section is not None:
            if key in section.metadata:
                return section.metadata[key]
            section = section.parent
        return None

    def add(self, batch: Batch) -> bool:
        """Take the rows of one batch. False where it takes none, since some can only be told by their full form."""
        by_role: dict[Role, list[Row]] = {role: [] for role in Role}
        unnamed: list[Row] = []
        take: dict[Category | None, Callable[[Row], None]] = {cat: by_role[role].append for cat, role in ROLES.items()}
        take[None] = unnamed.append
        for row in batch.rows:
            take[row.cat](row)
        if unnamed and not batch.full:
            return False
        self.rows += len(batch.rows)
        self.skipped.no_object += batch.skipped
        known_pids = len(self.pids)
        self._add_unnamed(unnamed)
        for role, kind in _KINDS.items():
            if by_role[role]:
                self._add_gpu(by_role[role], kind, batch.ts_is_ns)
        if by_role[Role.LAUNCH]:
            self._add_calls(by_role[Role.LAUNCH], batch.ts_is_ns)
        for role in (Role.OPERATOR, Role.ANNOTATION):
            if by_role[role]:
                self._add_host(by_role[role], role is Role.OPERATOR, batch.ts_is_ns)
        if len(self.pids) > known_pids:
            for pid in dict.fromkeys(map(_PID, batch.rows)):
                self.appeared.setdefault(pid, len(self.appeared))
        return True

    def _add_unnamed(self, rows: list[Row]) -> None:
        for row in rows:
            if not isinstance(row, FullRow):
                continue
            if row.ph is Phase.METADATA:
                if row.pid is not None and row.args is not None:
                    said = self.process_names.setdefault(row.pid, [])
                    if row.name == "process_name" and row.args.name is not None:
                        said.append(row.args.name)
                    elif row.name == "process_labels" and row.args.labels is not None:
                        said.append(row.args.labels)
            elif row.ph is not Phase.OTHER:
                self.skipped.no_category += 1

    def _add_gpu(self, rows: Sequence[Row], kind: ActivityKind, ts_is_ns: bool) -> None:
        try:
            self._append_gpu(rows, kind, ts_is_ns)
        except _LACKING:
            whole = [row for row in rows if row.ts is not None and row.dur is not None and row.args is not None]
            no_time = sum(row.ts is None or row.dur is None for row in rows)
            self.skipped.no_time += no_time
            self.skipped.no_args += len(rows) - len(whole) - no_time
            if whole:
                self._append_gpu(whole, kind, ts_is_ns)

    def _append_gpu(self, rows: Sequence[Row], kind: ActivityKind, ts_is_ns: bool) -> None:
        """Raises one of ``_LACKING``, and has done nothing, where a row lacks its times or its arguments."""
        count = len(rows)
        times = _times(rows, ts_is_ns)
        args: list[Any] = list(map(_ARGS, rows))
        stream = _integers(args, _STREAM)
        if (stream == MISSING).any():
            tid = self.tids.numbers(map(_TID, rows), count)
        else:  # nobody will ask
            tid = np.full(count, self.tids.numbers((None,), 1)[0])
        self.gpu.append(
            **times,
            **self._names(rows),
            tid=tid,
            kind=np.full(count, kind, np.int8),
            device=_integers(args, _DEVICE),
            stream=stream,
            correlation=_integers(args, _CORRELATION),
            external=_integers(args, _EXTERNAL),
            bytes=np.zeros(count, np.int64) if kind is ActivityKind.KERNEL else _integers(args, _BYTES),
            mark=self._marks(args),
        )

    def _add_calls(self, rows: Sequence[Row], ts_is_ns: bool) -> None:
        try:
            self._append_calls(rows, ts_is_ns)
        except _LACKING:
            timed = [row for row in rows if row.ts is not None]
            self.skipped.no_time += len(rows) - len(timed)
            for row in timed:
                row.dur = 0.0 if row.dur is None else row.dur
                row.args = row.args or _NO_ARGS
            if timed:
                self._append_calls(timed, ts_is_ns)

    def _append_calls(self, rows: Sequence[Row], ts_is_ns: bool) -> None:
        """As `_append_gpu`."""
        times = _times(rows, ts_is_ns)
        args: list[Any] = list(map(_ARGS, rows))
        external = _integers(args, _EXTERNAL)
        self.calls.append(
            **times,
            **self._names(rows),
            tid=self.tids.numbers(map(_TID, rows), len(rows)),
            correlation=_integers(args, _CORRELATION),
            external=external,
        )

    def _add_host(self, rows: Sequence[Row], operators: bool, ts_is_ns: bool) -> None:
        try:
            self._append_host(rows, operators, ts_is_ns)
        except _LACKING:
            timed = [row for row in rows if row.ts is not None and row.dur is not None]
            # Begin and end rows ("B", "E") have no duration: Kineto writes none, and nothing here pairs them.
            self.skipped.no_time += len(rows) - len(timed)
            for row in timed:
                row.args = row.args or _NO_ARGS
            if timed:
                self._append_host(timed, operators, ts_is_ns)

    def _append_host(self, rows: Sequence[Row], operators: bool, ts_is_ns: bool) -> None:
        """As `_append_gpu`."""
        times = _times(rows, ts_is_ns)
        external = _integers(list(map(_ARGS, rows)), _EXTERNAL)
        self.host.append(
            **times,
            **self._names(rows),
            tid=self.tids.numbers(map(_TID, rows), len(rows)),
            external=external,
            operator=np.full(len(rows), operators),
        )

    def _names(self, rows: Sequence[Row]) -> dict[str, NDArray[Any]]:
        count = len(rows)
        return {"name": self.names.numbers(map(_NAME, rows), count), "pid": self.pids.numbers(map(_PID, rows), count)}

    def _marks(self, args: Sequence[Args | None]) -> Int32:
        """Numbers of the names that graph-node annotations give; -1 where there is none."""
        if not any(map(_MARK, args)) and not any(map(_ANNOTATION, args)):
            return np.full(len(args), MISSING, np.int32)
        marks = [a.annotation or a.mark for a in args if a is not None]
        numbers = self.names.numbers((mark or "" for mark in marks), len(marks))
        return np.where(np.array([bool(mark) for mark in marks]), numbers, MISSING).astype(np.int32)


_NO_ARGS: Final = Args()
_TS: Final = operator.attrgetter("ts")
_DUR: Final = operator.attrgetter("dur")
_NAME: Final = operator.attrgetter("name")
_PID: Final = operator.attrgetter("pid")
_TID: Final = operator.attrgetter("tid")
_DEVICE: Final = operator.attrgetter("device")
_STREAM: Final = operator.attrgetter("stream")
_CORRELATION: Final = operator.attrgetter("correlation")
_EXTERNAL: Final = operator.attrgetter("external")
_ARGS: Final = operator.attrgetter("args")
_MARK: Final = operator.attrgetter("mark")
_ANNOTATION: Final = operator.attrgetter("annotation")
_BYTES: Final = operator.attrgetter("bytes")


_LACKING: Final = (TypeError, AttributeError)
"""What comes of a row without a time, and of one without arguments, where columns are made of them. Such rows are rare,
and to try costs nothing.
"""


def _times(rows: Sequence[Row], ts_is_ns: bool) -> dict[str, NDArray[Any]]:
    duration_us = _microseconds(rows, _DUR)
    return {
        "start": (
            np.fromiter(map(_TS, rows), np.int64, len(rows)) if ts_is_ns else ns_of_float_us(_microseconds(rows, _TS))
        ),
        "duration": np.where(duration_us < 0, BAD_DURATION, ns_of_float_us(duration_us)),
    }


def _microseconds(rows: Sequence[Row], field_of: Callable[[Any], Any]) -> NDArray[np.float64]:
    """A time of each row. Raises TypeError where one has none: numpy makes NaN of it, which no row has."""
    us = np.fromiter(map(field_of, rows), np.float64, len(rows))
    if np.isnan(us).any():
        raise TypeError("a row without a time")
    return us


def _integers(args: Sequence[Any], field_of: Callable[[Any], Any]) -> Int64:
    return np.fromiter(map(field_of, args), np.int64, len(args))


def ns_of_float_us(us: NDArray[np.float64]) -> Int64:
    """Nanoseconds of microseconds held in doubles: exact to the ns below 2**43 us, clipped at what 64 bits hold.

    The whole and the fractional part are scaled apart, since their product with 1000 rounds where they are together.
    """
    if us.size and us.min() > -_MAX_US and us.max() < _MAX_US:  # false of NaN
        whole = np.floor(us)
        fraction = us - whole
    else:
        whole = np.floor(np.clip(us, -_MAX_US, _MAX_US))
        fraction = np.where(np.abs(us) < _MAX_US, us - whole, 0.0)
    ns: Int64 = whole.astype(np.int64) * 1000 + np.rint(fraction * 1000).astype(np.int64)
    return ns
