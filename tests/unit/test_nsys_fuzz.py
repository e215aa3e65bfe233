"""Damaged exports end in captures that hold together, or in one clear line; never in a traceback, and soon."""

from __future__ import annotations

import random
import sqlite3
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.nsys_exports import SCHEMAS, random_export
from vllm_k25_instrument.analysis.capture import Capture, CaptureError
from vllm_k25_instrument.analysis.nsys import read_nsys

EXAMPLES = 300


def flip_bytes(file: Path, rng: random.Random) -> None:
    content = bytearray(file.read_bytes())
    for _ in range(rng.choice((1, 3, 30, 300))):
        content[rng.randrange(16, len(content))] = rng.choice((0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)))
    file.write_bytes(content)


def flip_bits_of_one_page(file: Path, rng: random.Random) -> None:
    content = bytearray(file.read_bytes())
    page = rng.randrange(len(content) // 4096) * 4096
    for _ in range(rng.choice((1, 5, 50))):
        content[min(len(content) - 1, page + rng.randrange(rng.choice((16, 128, 4096))))] ^= 1 << rng.randrange(8)
    file.write_bytes(content)


def truncate(file: Path, rng: random.Random) -> None:
    content = file.read_bytes()
    file.write_bytes(content[: rng.randrange(len(content))])


def blank(file: Path, rng: random.Random) -> None:
    content = bytearray(file.read_bytes())
    begin = rng.randrange(len(content))
    length = min(rng.choice((8, 512, 4096, 20_000)), len(content) - begin)
    content[begin : begin + length] = bytes(length)
    file.write_bytes(content)


def copy_page_over_another(file: Path, rng: random.Random) -> None:
    content = bytearray(file.read_bytes())
    pages = len(content) // 4096
    one, two = rng.randrange(pages) * 4096, rng.randrange(1, pages) * 4096
    content[two : two + 4096] = content[one : one + 4096]
    file.write_bytes(content)


def point_a_page_elsewhere(file: Path, rng: random.Random) -> None:
    """Page numbers in interior pages of a table: rows that repeat, or circles."""
    content = bytearray(file.read_bytes())
    pages = len(content) // 4096
    interior = [page for page in range(1, pages) if content[page * 4096] == 5]
    for page in interior:
        if rng.random() < 0.7:
            at = page * 4096 + 8
            content[at : at + 4] = rng.randrange(1, pages + 1).to_bytes(4)
    file.write_bytes(content)


def change_tables(file: Path, rng: random.Random) -> None:
    """Tables and columns dropped, values of every kind anywhere, rows doubled and deleted."""
    connection = sqlite3.connect(file, isolation_level=None)
    for _ in range(rng.randint(1, 6)):
        tables = [name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type='table'")]
        if not tables:
            break
        table = rng.choice(tables)
        columns = [row[1] for row in connection.execute(f'PRAGMA table_info("{table}")')]
        column = rng.choice(columns)
        change = rng.randrange(7)
        try:
            if change == 0:
                connection.execute(f'DROP TABLE "{table}"')
            elif change == 1:
                connection.execute(f'ALTER TABLE "{table}" DROP COLUMN "{column}"')
            elif change == 2:
                connection.execute(f'ALTER TABLE "{table}" RENAME COLUMN "{column}" TO "{column}_"')
            elif change == 3:
                connection.execute(f'INSERT INTO "{table}" SELECT * FROM "{table}" LIMIT 5')
            elif change == 4:
                connection.execute(f'DELETE FROM "{table}" WHERE rowid % 3 = {rng.randrange(3)}')
            else:
                values = (None, 0, -1, 1.5, "x", b"\xff\xfe", 2**63 - 1, -(2**63), 2**62, "9" * 30, float("inf"))
                where = f"rowid % {rng.choice((1, 2, 7))} = 0"
                connection.execute(f'UPDATE "{table}" SET "{column}" = ? WHERE {where}', (rng.choice(values),))
        except sqlite3.Error:
            continue  # a constraint of the table's own
    connection.close()


MUTATIONS: tuple[Callable[[Path, random.Random], None], ...] = (
    flip_bytes,
    flip_bits_of_one_page,
    truncate,
    blank,
    copy_page_over_another,
    point_a_page_elsewhere,
    change_tables,
    change_tables,
)


def assert_holds_together(capture: Capture) -> None:
    work, launches, ranges = capture.activities, capture.launches, capture.annotations
    for table in (work, launches, ranges):
        columns = {name: getattr(table, name) for name in table.__slots__}
        assert {len(column) for column in columns.values()} == {len(table)}
        assert (table.start_ns[1:] >= table.start_ns[:-1]).all()
        assert (table.duration_ns >= 0).all()
        assert ((table.name >= 0) & (table.name < len(capture.names))).all()
    for index, length in ((work.launch, len(launches)), (work.annotation, len(ranges)), (ranges.parent, len(ranges))):
        assert ((index >= -1) & (index < length)).all()
    rows = np.flatnonzero(ranges.parent >= 0)
    assert (ranges.thread[ranges.parent[rows]] == ranges.thread[rows]).all()
    assert all("\n" not in note.message and str(capture.path) in note.message for note in capture.notes)


def damaged(file: Path, seed: int) -> None:
    rng = random.Random(seed)
    operations = rng.choice((0, 10, 60, 60, 400))
    export = random_export(seed, processes=rng.randint(1, 2), operations=operations)
    export.write(file, SCHEMAS[rng.choice(sorted(SCHEMAS))])
    chosen = rng.choices(MUTATIONS, k=rng.randint(1, 2))
    # What goes through SQLite comes first: afterwards it may refuse.
    for mutate in sorted(chosen, key=lambda each: each is not change_tables):
        if file.stat().st_size > 2 * 4096:
            mutate(file, rng)


def attempt(file: Path) -> tuple[str, list[Capture]]:
    try:
        return "", read_nsys(file)
    except CaptureError as error:
        return str(error), []


@pytest.mark.parametrize("first", range(0, EXAMPLES, 50))
def test_damage_ends_in_a_capture_that_holds_together_or_in_one_line(first: int, tmp_path: Path) -> None:
    for seed in range(first, first + 50):
        file = tmp_path / f"{seed}.sqlite"
        damaged(file, seed)
        error, captures = attempt(file)
        file.unlink()
        assert captures or error, seed
        if error:
            assert "\n" not in error, seed
            assert error.startswith(str(file)), seed
        for capture in captures:
            assert_holds_together(capture)
