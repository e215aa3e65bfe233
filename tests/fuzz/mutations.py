"""Damage: what happens to files on their way, and what nobody thought of. All of it from one seed."""

from __future__ import annotations

import copy
import gzip
import json
import random
import sqlite3
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ODD_VALUES: tuple[Any, ...] = (
    None,
    True,
    -1,
    0,
    1e300,
    -1e300,
    float("nan"),
    float("inf"),
    2**63 - 1,
    -(2**63),
    2**64,
    10**40,
    "",
    "x",
    "NaN",
    "1e999",
    "\ud800",
    "\0",
    "a" * 5000,
    [],
    {},
    [[[]]],
    {"a": {"b": []}},
)

MAX_PLACES = 20_000
"""A document with more values than this does not grow any further."""

ODD_BYTES = (
    b"\0",
    b"\xff",
    b"\xed\xa0\x80",
    b"[",
    b"]",
    b"{",
    b"}",
    b'"',
    b"\\",
    b"\\u",
    b",",
    b":",
    b"NaN",
    b"-",
    b"1e99",
)


@dataclass(frozen=True)
class Damaged:
    """A mutated file. `cut`: its end is missing, so that it can never pass as complete."""

    data: bytes
    how: str
    cut: bool = False


def damage(data: bytes, kind: str, rng: random.Random, folder: Path) -> Damaged:
    """One to three mutations of a file of `kind` (``trace``, ``gzip``, ``table``, ``nsys``, ``breakdown``)."""
    if kind == "gzip":
        inner = damage(gzip.decompress(data), "trace", rng, folder)
        choice = rng.randrange(4)
        if choice == 0:
            return _bytes(data, rng)
        packed = gzip.compress(inner.data, 1)
        if choice == 1:
            at = rng.randrange(20, len(packed))
            return Damaged(packed[:at], f"{inner.how}, gzip cut", cut=at < len(packed) - 8)
        if choice == 2:
            return Damaged(packed + rng.randbytes(rng.randrange(1, 50)), f"{inner.how}, rubbish after gzip")
        return Damaged(packed, inner.how, inner.cut)
    steps: list[Callable[[bytes, random.Random], Damaged]] = [_bytes]
    if kind in ("trace", "breakdown"):
        steps += [_json, _json, _json]
    elif kind == "table":
        steps += [_lines, _lines]
    elif kind == "nsys":
        steps += [lambda data, rng: _sqlite(data, rng, folder)] * 4
    made = Damaged(data, "")
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        more = rng.choice(steps)(made.data, rng)
        made = Damaged(more.data, f"{made.how}; {more.how}".strip("; "), made.cut or more.cut)
    return made


def _bytes(data: bytes, rng: random.Random) -> Damaged:
    if not data:
        return Damaged(rng.randbytes(20), "rubbish")
    at = rng.randrange(len(data))
    match rng.randrange(7):
        case 0:
            changed = bytearray(data)
            for _ in range(rng.choice((1, 1, 5, 50))):
                changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
            return Damaged(bytes(changed), "bits flipped")
        case 1:
            return Damaged(data[:at], f"cut at {at}", cut=bool(data[at:].strip()))
        case 2:
            end = min(len(data), at + rng.choice((1, 10, 1000)))
            return Damaged(data[:at] + data[end:], f"bytes {at} to {end} missing")
        case 3:
            return Damaged(data[:at] + rng.choice(ODD_BYTES) * rng.choice((1, 1, 3, 20_000)) + data[at:], "inserted")
        case 4:
            end = min(len(data), at + rng.randrange(1, 2000))
            return Damaged(data[:end] + data[at:end] + data[end:], "a stretch twice")
        case 5:
            return Damaged(data[:at] + rng.randbytes(min(200, len(data) - at)) + data[at + 200 :], "rubbish in between")
        case _:
            return Damaged(data[at:], "the beginning is missing")


def _json(data: bytes, rng: random.Random) -> Damaged:
    try:
        whole = json.loads(data)
    except (ValueError, RecursionError):
        return _bytes(data, rng)
    how = []
    for _ in range(rng.choice((1, 2, 10))):
        how.append(_tree(whole, rng))
    try:
        text = json.dumps(whole, ensure_ascii=rng.random() < 0.5)
    except (ValueError, RecursionError):
        return _bytes(data, rng)
    return Damaged(text.encode("utf-8", "surrogatepass"), ", ".join(dict.fromkeys(how)))


def _tree(whole: Any, rng: random.Random) -> str:
    """Change one value somewhere in the tree."""
    places: list[tuple[Any, Any]] = []

    def collect(node: Any, depth: int = 0) -> None:
        if depth > 20 or len(places) > MAX_PLACES:
            return
        if isinstance(node, dict):
            for key, value in node.items():
                places.append((node, key))
                collect(value, depth + 1)
        elif isinstance(node, list):
            for key, value in enumerate(node):
                places.append((node, key))
                collect(value, depth + 1)

    collect(whole)
    if not places:
        return "nothing"
    node, key = rng.choice(places)
    match rng.randrange(6):
        case 0:
            del node[key]
            return f"{key} dropped"
        case 1:
            node[key] = rng.choice(ODD_VALUES)
            return f"{key} is odd"
        case 2 if isinstance(node[key], int | float):
            node[key] = rng.choice((-node[key], node[key] * 1e9, node[key] + rng.random() * 1e-3, str(node[key])))
            return f"{key} is another number"
        case 3 if isinstance(node, list) and len(node) > 1:
            rng.shuffle(node)
            return "rows swapped"
        case 4 if isinstance(node, list) and len(places) < MAX_PLACES:
            node += [copy.deepcopy(node[key]) for _ in range(rng.choice((1, 3, 100)))]
            return "a row many times"
        case _:
            other, other_key = rng.choice(places)
            if isinstance(other, dict) and isinstance(node, dict):
                try:
                    node[key], other[other_key] = other[other_key], node[key]
                except KeyError:
                    return "nothing"
            return f"{key} and {other_key} swapped"


def _lines(data: bytes, rng: random.Random) -> Damaged:
    lines = data.split(b"\n")
    at = rng.randrange(len(lines))
    match rng.randrange(7):
        case 0:
            del lines[at]
            how = "a line dropped"
        case 1:
            lines.insert(at, rng.choice(lines))
            how = "a line twice"
        case 2:
            other = rng.randrange(len(lines))
            lines[at], lines[other] = lines[other], lines[at]
            how = "lines swapped"
        case 3:
            words = lines[at].split()
            if words:
                words[rng.randrange(len(words))] = rng.choice(
                    (b"NaN", b"-1.5us", b"1e400s", b"99999999999999999999", b"", b"ms")
                )
            lines[at] = b"  ".join(words)
            how = "a word replaced"
        case 4:
            lines[at] = lines[at][: rng.randrange(len(lines[at]) + 1)]
            how = "a line cut"
        case 5:
            lines = lines[:at]
            how = "the rest is missing"
        case _:
            lines[at] = b"(EngineCore pid=7) INFO 01-02 03:04:05 [x.py:1] " + lines[at]
            how = "a log's prefix"
    return Damaged(b"\n".join(lines), how)


def _sqlite(data: bytes, rng: random.Random, folder: Path) -> Damaged:
    path = folder / "mutating.sqlite"
    path.write_bytes(data)
    try:
        connection = sqlite3.connect(path, isolation_level=None)
        try:
            connection.execute("PRAGMA journal_mode=MEMORY")
            connection.execute("PRAGMA synchronous=OFF")
            how = _sql(connection, rng)
        finally:
            connection.close()
    except (sqlite3.Error, OverflowError, UnicodeError) as error:
        return Damaged(path.read_bytes(), f"sql refused ({error})")
    return Damaged(path.read_bytes(), how)


def _sql(connection: sqlite3.Connection, rng: random.Random) -> str:
    tables = [name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
    if not tables:
        return "nothing"
    table = rng.choice(tables)
    columns = [row[1] for row in connection.execute(f'PRAGMA table_info("{table}")')]
    column = rng.choice(columns)
    rows = [row for (row,) in connection.execute(f'SELECT rowid FROM "{table}" LIMIT 5000')]
    match rng.randrange(6):
        case 0:
            connection.execute(f'DROP TABLE "{table}"')
            return f"{table} dropped"
        case 1 if len(columns) > 1:
            connection.execute(f'ALTER TABLE "{table}" DROP COLUMN "{column}"')
            return f"{table}.{column} dropped"
        case 2:
            connection.execute(f'ALTER TABLE "{table}" RENAME TO "{table}_V{rng.randrange(2, 4)}"')
            return f"{table} renamed"
        case 3 if rows:
            connection.execute(f'DELETE FROM "{table}" WHERE rowid >= ?', (rng.choice(rows),))
            return f"rows of {table} deleted"
        case 4 if rows:
            first, second = rng.choice(rows), rng.choice(rows)
            value = connection.execute(f'SELECT "{column}" FROM "{table}" WHERE rowid = ?', (first,)).fetchone()
            connection.execute(f'UPDATE "{table}" SET "{column}" = ? WHERE rowid = ?', (*(value or (None,)), second))
            return f"{table}.{column} of two rows equal"
        case _ if rows:
            value = rng.choice(
                (None, -1, 0, 2**63 - 1, -(2**63), "text", b"\xff\x00blob", 1.5, float("inf"), "", 10**15)
            )
            some = rng.sample(rows, min(len(rows), rng.choice((1, 1, 5, 1000))))
            connection.executemany(
                f'UPDATE "{table}" SET "{column}" = ? WHERE rowid = ?', [(value, row) for row in some]
            )
            return f"{table}.{column} is odd"
        case _:
            return "nothing"
