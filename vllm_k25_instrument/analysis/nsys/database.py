"""An nsys SQLite export, opened without touching it, its tables read as columns of integers.

Columns and tables differ between nsys versions, and tables without rows are not made at all
(https://docs.nvidia.com/nsight-systems/UserGuide/index.html, "SQLite Schema Reference"), so everything is looked up
first. A damaged file gives what can be read of it; `Database.damaged` says that it is not all.
"""

from __future__ import annotations

import re
import shutil
import sqlite3
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from vllm_k25_instrument.analysis.capture import CaptureError, Int64
from vllm_k25_instrument.analysis.nsys.packing import Extent, Packing, constant, pack, unpacked
from vllm_k25_instrument.plain_text import one_line

MAGIC: Final = b"SQLite format 3\0"
EXPORT_AGAIN: Final = "export it again with `nsys export --type sqlite`"

_HEADER_BYTES: Final = 100

_CHUNK: Final = 1 << 16
_SMALLEST_ROW: Final = 4
"""Bytes. No row is stored in fewer; more rows than that can hold come out of a damaged page that points at itself."""

_TEXT_PER_BYTE: Final = 2
"""No table holds more text than the file has bytes or, made UTF-8 of UTF-16, half as much again. More comes out of rows
that point at the same pages: gigabytes out of a megabyte."""
_LONGEST_VALUE: Final = 1_000_000_000
"""Bytes; SQLite's own limit."""

_STEPS: Final = 16
"""Of SQLite's virtual machine per row, beside those for what is asked of it."""
_STEPS_BETWEEN_CHECKS: Final = 100_000

_NO_INTEGER: Final = -(1 << 63)
"""Stands for NULL and anything else that is no integer. As a time it would be impossible anyway."""

_READING: Final = frozenset(
    {sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION, sqlite3.SQLITE_PRAGMA}
)

_VIRTUAL = re.compile(r"CREATE(?>\s|/\*.*?\*/|--[^\n]*\n)++VIRTUAL\b", re.DOTALL)
_VERSION_SUFFIX = re.compile(r"_V\d+$", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Table:
    """A table as this export has it: its real name, and its real column names by lower-case name."""

    name: str
    columns: Mapping[str, str]

    def __contains__(self, column: object) -> bool:
        return isinstance(column, str) and column.lower() in self.columns

    def quoted(self, column: str) -> str:
        """The column as SQL wants it: ``end`` is a word of its own there."""
        return _quote(self.columns[column.lower()])


@dataclass(frozen=True, slots=True)
class Rows:
    """What was read of a table: one integer array per column asked for, and its texts where one was.

    `skipped` counts the rows without an integer where one is needed.
    """

    columns: Mapping[str, Int64]
    texts: tuple[bytes | None, ...]
    text: Int64
    skipped: int = 0

    def __getitem__(self, column: str) -> Int64:
        return self.columns[column]

    def __len__(self) -> int:
        return len(self.text) if not self.columns else len(next(iter(self.columns.values())))


class Database:
    """Reads one export. Never writes, never locks; memory is what the columns take."""

    def __init__(
        self, path: Path, connection: sqlite3.Connection, size: int, share: int, advance: Callable[[int], None]
    ) -> None:
        """`path`: for messages. `size`: bytes of the database. `advance` is told of parts of `share`, in bytes."""
        self.path = path
        self.damaged: list[str] = []
        self._connection = connection
        self._row_limit = size // _SMALLEST_ROW + 1
        self._text_limit = _TEXT_PER_BYTE * size
        self._share = share
        self._advance = advance
        self._tables = self._look_up_tables()

    def table(self, name: str) -> Table | None:
        """The table of this name, else one that some version gave a suffix (``NVTX_EVENTS_V2``); None without either.

        Where there are several, one with rows wins, the plain name before the suffixed, newer before older.
        """
        found = [table for table in self._tables if _VERSION_SUFFIX.sub("", table.name).lower() == name.lower()]
        found.sort(key=lambda table: table.name.lower(), reverse=True)
        found.sort(key=lambda table: (not self._has_rows(table), table.name.lower() != name.lower()))
        return found[0] if found else None

    def has_any(self, names: Sequence[str]) -> bool:
        """Whether one of these tables is there."""
        return any(self.table(name) is not None for name in names)

    def rows(self, table: Table, needed: Sequence[str], wanted: Mapping[str, int], text: str = "") -> Rows:
        """Read columns of integers, and one column of text.

        Rows in which a `needed` column is no integer are skipped and counted. A `wanted` column is its default where it
        is absent, NULL or no integer. Texts are interned: `Rows.text` indexes `Rows.texts`.
        """
        missing = [column for column in needed if column not in table]
        if missing:
            self.damaged.append(f"table {table.name} has no column {missing[0]}")
            return _no_rows((*needed, *wanted))
        present = [column for column in wanted if column in table]
        defaults = {**dict.fromkeys(needed, _NO_INTEGER), **{column: wanted[column] for column in present}}
        packing = self._packing(table, defaults)
        expressions = packing.sql
        width = len(expressions)
        if text:
            expressions.append(table.quoted(text) if text in table else "NULL")
        blocks: list[list[Int64]] = []
        interned = _Interned()
        texts: list[Int64] = []
        weight = self._weight(table)
        sql = f"SELECT {', '.join(expressions)} FROM {_quote(table.name)}"  # noqa: S608
        for chunk in self._chunks(sql, table, texts=bool(text)):
            if text:
                *integers, words = zip(*chunk, strict=True)
                blocks.append([np.array(column, np.int64) for column in integers])
                texts.append(np.fromiter(map(interned.__getitem__, words), np.int64, len(words)))
            else:
                block = np.fromiter(chain.from_iterable(chunk), np.int64, len(chunk) * width).reshape(-1, width)
                blocks.append([column.copy() for column in block.T])
            self._advance(int(weight * len(chunk)))
        packed = [_joined([block[index] for block in blocks]) for index in range(width)]
        blocks.clear()
        columns = packing.unpack(packed)
        count = len(packed[0])
        columns.update({column: constant(wanted[column], count) for column in wanted if column not in columns})
        text_column = _joined(texts)
        usable = np.ones(count, np.bool_)
        for column in needed:
            usable &= columns[column] != _NO_INTEGER
        skipped = count - int(usable.sum())
        if skipped:
            columns = {name: column[usable] for name, column in columns.items()}
            text_column = text_column[usable] if text else text_column
        return Rows(columns, tuple(interned), text_column, skipped)

    def pairs(self, table: Table, first: str, second: str) -> list[tuple[Any, Any]]:
        """Two columns of a small table, as SQLite has them; empty where a column is missing."""
        if first not in table or second not in table:
            return []
        sql = f"SELECT {table.quoted(first)}, {table.quoted(second)} FROM {_quote(table.name)}"  # noqa: S608
        return [row for chunk in self._chunks(sql, table) for row in chunk]

    def lookup(self, table: Table, key: str, value: str, keys: Sequence[int]) -> list[tuple[Any, Any]]:
        """The rows of a large table that have one of these `keys`."""
        found: list[tuple[Any, Any]] = []
        columns = f"{table.quoted(key)}, {table.quoted(value)}"
        for first in range(0, len(keys), 500):
            listed = ",".join(str(int(key)) for key in keys[first : first + 500])
            sql = f"SELECT {columns} FROM {_quote(table.name)} WHERE {table.quoted(key)} IN ({listed})"  # noqa: S608
            found.extend(row for chunk in self._chunks(sql, table) for row in chunk)
        return found

    def _packing(self, table: Table, defaults: Mapping[str, int]) -> Packing:
        """How to fetch these columns with few integers a row.

        Where a column holds anything but integers and NULL, every value is asked for its type, at twice the time; where
        the table is damaged, each column travels alone.
        """
        columns = [(table.quoted(name), default) for name, default in defaults.items()]
        # Numbers sort before texts, so these three tell a column of integers; a real in between makes the sum real.
        asked = ", ".join(f"min({column}), max({column}), count({column})" for column, _ in columns)
        total = "+".join(f"ifnull({column},0)" for column, _ in columns)
        found = self._one_row(table, f"{asked}, min(typeof({total})), max(typeof({total})), count(*)")
        if found is None:
            return unpacked((name, _careful(*column)) for name, column in zip(defaults, columns, strict=True))
        *asked_for, first_type, last_type, rows = found
        extents = []
        for name, (column, default), least, greatest, count in zip(
            defaults, columns, asked_for[::3], asked_for[1::3], asked_for[2::3], strict=True
        ):
            values = [*([least, greatest] if count else []), *([default] if count < rows else [])]
            if not all(isinstance(value, int) for value in values):
                break
            sql = column if count == rows else f"ifnull({column},{default})"
            extents.append(Extent(name, sql, min(values, default=0), max(values, default=0)))
        if len(extents) == len(columns) and first_type in (b"integer", None) and last_type in (b"integer", None):
            return pack(extents)
        careful = [_careful(column, default) for column, default in columns]
        found = self._one_row(table, ", ".join(f"min({sql}), max({sql})" for sql in careful))
        if found is None:
            return unpacked(zip(defaults, careful, strict=True))
        return pack(map(Extent, defaults, careful, found[::2], found[1::2]))

    def _one_row(self, table: Table, expressions: str) -> Sequence[Any] | None:
        """Aggregates over a table; None where it cannot be read to its end, or has none: a page may point at itself."""
        limit = self._row_limit * (_STEPS + 2 * expressions.count("(")) // _STEPS_BETWEEN_CHECKS + 1
        checks = iter(range(limit))
        try:
            self._connection.set_progress_handler(lambda: next(checks, None) is None, _STEPS_BETWEEN_CHECKS)
            found: Sequence[Any] = self._connection.execute(
                f"SELECT {expressions} FROM {_quote(table.name)}"  # noqa: S608
            ).fetchone()
        except (sqlite3.Error, OverflowError):
            return None
        finally:
            self._connection.set_progress_handler(None, 0)
        return found

    def _within_text_limit(self, rows: Iterator[tuple[Any, ...]], table: Table) -> Iterator[tuple[Any, ...]]:
        """These rows, until they have more text than the file can hold."""
        left = self._text_limit
        for row in rows:
            for value in (row[0], row[-1]):  # where texts are; there are a million rows
                if isinstance(value, bytes):
                    left -= len(value)
            if left < 0:
                self.damaged.append(f"table {table.name} has more text than the file")
                return
            yield row

    def _chunks(self, sql: str, table: Table, *, texts: bool = True) -> Iterator[list[tuple[Any, ...]]]:
        """The rows of a query, many at a time. Damage ends them, after the last row that can be read."""
        done = 0
        try:
            cursor: Iterator[tuple[Any, ...]] = self._connection.execute(sql)
        except sqlite3.Error as error:
            self._note_damage(table, error)
            return
        if texts:
            cursor = self._within_text_limit(cursor, table)
        while True:
            try:
                chunk = list(islice(cursor, _CHUNK))
            except (sqlite3.Error, OverflowError) as error:
                self._note_damage(table, error)
                yield from self._rescue(sql, done)
                return
            if chunk:
                yield chunk
            done += len(chunk)
            if done > self._row_limit:
                self.damaged.append(f"table {table.name} repeats itself")
                return
            if len(chunk) < _CHUNK:
                return

    def _rescue(self, sql: str, done: int) -> Iterator[list[tuple[Any, ...]]]:
        """The whole rows between the last full chunk and the damage."""
        rows: list[tuple[Any, ...]] = []
        with suppress(sqlite3.Error, OverflowError):
            for row in islice(self._connection.execute(f"{sql} LIMIT -1 OFFSET {done}"), _CHUNK):
                rows.append(row)
        if rows:
            yield rows

    def _note_damage(self, table: Table, error: Exception) -> None:
        self.damaged.append(f"table {table.name}: {one_line(error)}")

    def _look_up_tables(self) -> list[Table]:
        """Every ordinary table. No view: an export has none, and one can be a query without end (`_tables_only`).

        A file with a virtual table is none of nsys's: what would be run for it is code that has seen no such file.
        """
        try:
            schema = [
                (kind, name, _decoded(sql).upper())
                for kind, name, sql in self._connection.execute("SELECT type, name, sql FROM sqlite_master")
            ]
            if any(_VIRTUAL.match(sql) for _, _, sql in schema):
                raise CaptureError(self.path, "holds a virtual table, which no nsys export does", EXPORT_AGAIN)
            names = [
                _decoded(name)
                for kind, name, sql in schema
                if kind == b"table" and isinstance(name, bytes) and sql.startswith("CREATE TABLE")
            ]
            tables = []
            for name in names:
                described = self._connection.execute(f"PRAGMA table_info({_quote(name)})").fetchall()
                columns = [_decoded(row[1]) for row in described]
                tables.append(Table(name, {column.lower(): column for column in columns}))
        except sqlite3.Error as error:
            raise CaptureError(self.path, f"damaged SQLite database ({one_line(error)})", EXPORT_AGAIN) from error
        return tables

    def _has_rows(self, table: Table) -> bool:
        return self._count(f"SELECT EXISTS (SELECT 1 FROM {_quote(table.name)})") > 0  # noqa: S608

    def _weight(self, table: Table) -> float:
        """Bytes of the file per row of this table, roughly: row ids are dense in an export."""
        total = self._count(f"SELECT max(_rowid_) FROM {_quote(table.name)}")  # noqa: S608
        return self._share / max(1, total) / 8

    def _count(self, sql: str) -> int:
        checks = iter(range(self._row_limit * _STEPS // _STEPS_BETWEEN_CHECKS + 1))
        try:
            self._connection.set_progress_handler(lambda: next(checks, None) is None, _STEPS_BETWEEN_CHECKS)
            (value,) = self._connection.execute(sql).fetchone()
        except (sqlite3.Error, OverflowError):
            return 0
        finally:
            self._connection.set_progress_handler(None, 0)
        return value if isinstance(value, int) else 0


@contextmanager
def open_database(source: Path, path: Path, share: int, advance: Callable[[int], None]) -> Iterator[Database]:
    """Open the export at `source` for reading only. Raises `CaptureError` for what is no SQLite database.

    `path`: what the user calls it, for messages. `share`: the bytes of progress that reading it is to add up to.

    The file is opened as immutable: no lock, no journal, no shared-memory file beside it. Where an interrupted writer
    has left a journal or write-ahead log, SQLite would have to write; then a temporary copy is opened instead.
    """
    with ExitStack() as stack:
        try:
            actual = source.resolve(strict=True)
            size = actual.stat().st_size + sum(leftover.stat().st_size for leftover in _leftovers(actual))
            with actual.open("rb") as file:
                head = file.read(_HEADER_BYTES)
        except OSError as error:
            raise CaptureError(path, f"cannot be read ({error.strerror or error})") from error
        if not head.startswith(MAGIC):
            raise CaptureError(path, "no SQLite database", EXPORT_AGAIN)
        leftovers = _leftovers(actual)
        damaged = [f"{leftover.name} was left behind" for leftover in leftovers if leftover.name.endswith("-journal")]
        if missing := _missing_bytes(head, actual.stat().st_size):
            damaged.append(f"{missing} bytes of its end are missing")
        uri = f"{actual.as_uri()}?mode=ro&immutable=1"
        if leftovers:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="vllm-k25-nsys-")))
            try:
                for file_ in (actual, *leftovers):
                    shutil.copyfile(file_, folder / f"export{file_.name.removeprefix(actual.name)}")
            except OSError as error:
                raise CaptureError(path, f"cannot be copied ({error.strerror or error})", EXPORT_AGAIN) from error
            uri = f"{(folder / 'export').as_uri()}?mode=rw"
        try:
            connection = sqlite3.connect(uri, uri=True, isolation_level=None)
            stack.callback(connection.close)
            # Decoding a million names costs more than reading them; only those in use are decoded.
            connection.text_factory = bytes
            # A writable schema is for reading here: without it SQLite refuses all of a file whose end is missing.
            settings = ("writable_schema=ON", "query_only=ON", "trusted_schema=OFF", "cell_size_check=ON")
            for setting in (*settings, "temp_store=MEMORY"):
                connection.execute(f"PRAGMA {setting}")
            connection.setlimit(sqlite3.SQLITE_LIMIT_ATTACHED, 0)
            connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, min(_TEXT_PER_BYTE * size, _LONGEST_VALUE))
            connection.set_authorizer(_tables_only)
        except sqlite3.Error as error:
            raise CaptureError(path, f"damaged SQLite database ({one_line(error)})", EXPORT_AGAIN) from error
        database = Database(path, connection, size, share, advance)
        database.damaged.extend(damaged)
        yield database


def _tables_only(action: int, _first: str | None, _second: str | None, _base: str | None, view: str | None) -> int:
    """Lets SQLite compile what reads tables, and nothing that a view or a trigger of the file would add to it."""
    return sqlite3.SQLITE_OK if action in _READING and view is None else sqlite3.SQLITE_DENY


class _Interned(dict[Any, int]):
    """Numbers values in the order in which they are first asked for."""

    def __missing__(self, value: Any) -> int:
        self[value] = number = len(self)
        return number


def _careful(column: str, default: int) -> str:
    """A column's value where it is an integer."""
    return f"CASE WHEN typeof({column})='integer' THEN {column} ELSE {default} END"


def _joined(parts: Sequence[NDArray[Any]]) -> Int64:
    return np.concatenate(parts).astype(np.int64, copy=False) if parts else np.zeros(0, np.int64)


def _no_rows(columns: Sequence[str]) -> Rows:
    empty = np.zeros(0, np.int64)
    return Rows(dict.fromkeys(columns, empty), (), empty)


def _missing_bytes(head: bytes, size: int) -> int:
    """Bytes that the header speaks of and the file lacks (https://www.sqlite.org/fileformat.html, 1.3)."""
    if len(head) < _HEADER_BYTES or head[24:28] != head[92:96]:
        return 0
    page = int.from_bytes(head[16:18]) or 1 << 16
    return max(0, (1 << 16 if page == 1 else page) * int.from_bytes(head[28:32]) - size)


def _leftovers(database: Path) -> list[Path]:
    """What an interrupted writer left beside the database, which is not whole without it."""
    beside = (Path(f"{database}{suffix}") for suffix in ("-wal", "-journal"))
    return [path for path in beside if path.is_file() and path.stat().st_size]


def _decoded(text: object) -> str:
    return text.decode("utf-8", "replace") if isinstance(text, bytes) else str(text or "")


def _quote(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'
