"""SQLite files made to harm their reader: nothing in them is run, and they cost no more than their size."""

from __future__ import annotations

import random
import sqlite3
import time
import tracemalloc
from contextlib import suppress
from pathlib import Path

import pytest

from tests.nsys_exports import SCHEMAS, random_export
from vllm_k25_instrument.analysis.capture import Capture, CaptureError
from vllm_k25_instrument.analysis.inputs import recognise
from vllm_k25_instrument.analysis.nsys.reader import read_nsys
from vllm_k25_instrument.report.caveats import CaveatCode

ENDLESS = "WITH RECURSIVE r(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM r) SELECT n AS start, n AS end FROM r"
LONG = 1_002_732
"""A length of which SQLite keeps the least in the row itself, and the rest on pages of its own."""
TABLE = "CUPTI_ACTIVITY_KIND_KERNEL"


@pytest.fixture
def export(tmp_path: Path) -> Path:
    """A sound export."""
    return random_export(3).write(tmp_path / "export.sqlite", SCHEMAS["2026.2"], random.Random(3))


def change(path: Path, *statements: str) -> None:
    with sqlite3.connect(path, isolation_level=None) as database:
        for statement in ("PRAGMA writable_schema=ON", *statements):
            database.execute(statement)
    database.close()


def end_of(path: Path) -> list[Capture] | str:
    """Captures, or the one line that says why there are none; in seconds and with little memory."""
    tracemalloc.start()
    begun = time.monotonic()
    with suppress(CaptureError):  # a malformed schema ends there, but for who calls the reader alone
        recognise(path)
    try:
        end: list[Capture] | str = read_nsys(path)
    except CaptureError as error:
        end = str(error)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert isinstance(end, list) or len(end.splitlines()) == 1
    assert time.monotonic() - begun < 20
    assert peak < 64 << 20
    return end


def kernels(captures: list[Capture] | str) -> int:
    assert not isinstance(captures, str), captures
    return sum(len(capture.activities) for capture in captures)


def test_the_export_is_sound_before_it_is_made_hostile(export: Path) -> None:
    assert kernels(end_of(export)) > 0


def test_a_view_in_the_place_of_a_table_is_not_run(export: Path) -> None:
    change(export, f"DROP TABLE {TABLE}", f"CREATE VIEW {TABLE} AS {ENDLESS}")
    assert kernels(end_of(export)) >= 0


def test_a_view_that_the_schema_calls_a_table_is_not_run(export: Path) -> None:
    change(
        export,
        f"DROP TABLE {TABLE}",
        f"CREATE VIEW {TABLE} AS {ENDLESS}",
        f"UPDATE sqlite_master SET type = 'table' WHERE name = '{TABLE}'",
    )
    assert kernels(end_of(export)) >= 0


def test_a_view_behind_the_name_of_a_table_is_not_run(export: Path) -> None:
    """SQLite goes by the text of the statement; the columns beside it can say anything."""
    change(
        export,
        f"DROP TABLE {TABLE}",
        f"CREATE VIEW {TABLE} AS {ENDLESS}",
        "CREATE TABLE decoy (start INTEGER, end INTEGER)",
        f"UPDATE sqlite_master SET name = 'other', tbl_name = 'other' WHERE name = '{TABLE}'",
        f"UPDATE sqlite_master SET name = '{TABLE}', tbl_name = '{TABLE}' WHERE name = 'decoy'",
    )
    assert kernels(end_of(export)) >= 0


@pytest.mark.parametrize(
    "statement",
    ["CREATE VIRTUAL TABLE", "CREATE  VIRTUAL TABLE", "create/**/virtual/*x*/table", "CREATE --\nVIRTUAL TABLE"],
)
def test_a_virtual_table_is_refused_however_it_is_written(export: Path, statement: str) -> None:
    change(
        export,
        "CREATE TABLE decoy (x)",
        f"UPDATE sqlite_master SET sql = '{statement} decoy USING fts5(x)', rootpage = 0 WHERE name = 'decoy'",
    )
    assert "holds a virtual table" in str(end_of(export))


def test_a_comment_without_end_in_the_schema_costs_no_time(export: Path) -> None:
    change(
        export,
        "CREATE TABLE decoy (x)",
        "UPDATE sqlite_master SET sql = 'CREATE' || replace(hex(zeroblob(20000)), '00', '/**/') WHERE name = 'decoy'",
    )
    end_of(export)


def test_a_generated_column_is_not_computed(export: Path) -> None:
    change(
        export,
        f"ALTER TABLE {TABLE} RENAME COLUMN gridX TO old",
        f"ALTER TABLE {TABLE} ADD COLUMN gridX INTEGER GENERATED ALWAYS AS (length(hex(zeroblob(400000000)))) VIRTUAL",
    )
    assert kernels(end_of(export)) > 0


def test_triggers_and_attached_files_have_no_effect(export: Path, tmp_path: Path) -> None:
    before = export.read_bytes()
    other = tmp_path / "other.sqlite"
    change(export, f"CREATE TRIGGER t AFTER INSERT ON {TABLE} BEGIN DELETE FROM {TABLE}; END")
    hostile = export.read_bytes()
    assert kernels(end_of(export)) > 0
    assert export.read_bytes() == hostile != before
    assert not other.exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["export.sqlite"]


def shared_text(path: Path, rows: int) -> None:
    """`StringIds` anew: `rows` rows of a megabyte each, which all point at the same pages of the file."""
    with sqlite3.connect(path, isolation_level=None) as database:
        database.execute("DELETE FROM StringIds")
        database.execute("INSERT INTO StringIds (id, value) VALUES (1, ?)", ("x" * LONG,))
        (root,) = database.execute("SELECT rootpage FROM sqlite_master WHERE name = 'StringIds'").fetchone()
        (size,) = database.execute("PRAGMA page_size").fetchone()
    database.close()
    data = bytearray(path.read_bytes())
    at = (root - 1) * size
    assert data[at] == 13, "a leaf of a table"
    assert int.from_bytes(data[at + 3 : at + 5]) == 1
    start = int.from_bytes(data[at + 8 : at + 10])
    cell = bytes(data[at + start : at + size])
    row_id = next(n for n in range(9) if not cell[n] & 0x80) + 1
    assert cell[row_id] == 1
    end = size
    for n in range(rows):
        end -= len(cell)
        copy = cell[:row_id] + bytes((n + 1,)) + cell[row_id + 1 :]
        data[at + end : at + end + len(cell)] = copy
        data[at + 8 + 2 * n : at + 10 + 2 * n] = end.to_bytes(2)
    data[at + 3 : at + 5] = rows.to_bytes(2)
    data[at + 5 : at + 7] = end.to_bytes(2)
    path.write_bytes(data)


def test_rows_that_share_their_text_do_not_make_gigabytes_of_a_megabyte(export: Path) -> None:
    shared_text(export, 7)
    with sqlite3.connect(export) as database:
        assert [length for (length,) in database.execute("SELECT length(value) FROM StringIds")] == [LONG] * 7
        database.execute(f"UPDATE {TABLE} SET shortName = 1 + rowid % 7")
    database.close()
    captures = end_of(export)
    assert not isinstance(captures, str)
    damage = [note for capture in captures for note in capture.notes if note.code is CaveatCode.TRUNCATED]
    assert damage
    assert "more text than the file" in damage[0].message
