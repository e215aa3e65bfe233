"""What a file is, told by what is in it."""

from __future__ import annotations

import gzip
import os
import sqlite3
from pathlib import Path

import pytest

from tests.traces import Dress, decode_rank, document, encode
from vllm_k25_instrument.analysis.capture import CaptureError, Source
from vllm_k25_instrument.analysis.inputs import Input, expand, recognise

CASES = Path(__file__).parents[1] / "data" / "cases"


def write(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


def database(path: Path, *tables: str) -> Path:
    connection = sqlite3.connect(path)
    for table in tables:
        connection.execute(f"CREATE TABLE {table} (id INTEGER)")
    connection.close()
    return path


@pytest.mark.parametrize(
    ("file", "kind"),
    [
        ("01-invalid-utf8/trace.json", Source.TORCH_TRACE),
        ("02-truncated/cut.json", Source.TORCH_TRACE),
        ("02-truncated/cut.json.gz", Source.TORCH_TRACE),
        ("11-metadata-only-no-cat-dur/trace.json", Source.TORCH_TRACE),
        ("13-key-averages-double-count/profiler_out_0.txt", Source.KEY_AVERAGES),
        ("13-key-averages-double-count/with_log_prefix.txt", Source.KEY_AVERAGES),
    ],
)
@pytest.mark.parametrize("name", ["x", "trace.sqlite", "profiler_out_0.txt", "a.nsys-rep"])
def test_the_name_of_a_file_says_nothing(tmp_path: Path, file: str, kind: Source, name: str) -> None:
    path = write(tmp_path / name, (CASES / file).read_bytes())
    assert recognise(path) == Input(path, kind)


@pytest.mark.parametrize("container", ["object", "array", "nested", "listed"])
@pytest.mark.parametrize("members", [0, 3])
def test_traces_in_any_container_are_traces(tmp_path: Path, container: str, members: int) -> None:
    dress = Dress(container=container, gzip_members=members)
    path = write(tmp_path / "t", encode(document([decode_rank()], dress), dress))
    assert recognise(path).kind is Source.TORCH_TRACE


def test_a_trace_whose_header_is_long_is_a_trace(tmp_path: Path) -> None:
    path = write(tmp_path / "t", b'{"pg": "' + b"x" * (3 << 20) + b'", "traceEvents": []}')
    assert recognise(path).kind is Source.TORCH_TRACE


def test_an_nsys_export_is_told_by_its_tables(tmp_path: Path) -> None:
    assert recognise(database(tmp_path / "a.json", "StringIds")).kind is Source.NSYS
    assert recognise(database(tmp_path / "b.json", "CUPTI_ACTIVITY_KIND_KERNEL_V2")).kind is Source.NSYS
    with pytest.raises(CaptureError, match="no nsys export"):
        recognise(database(tmp_path / "places.sqlite", "moz_places"))


def test_a_damaged_database_is_refused(tmp_path: Path) -> None:
    data = database(tmp_path / "a.sqlite", "StringIds").read_bytes()
    with pytest.raises(CaptureError, match="damaged SQLite"):
        recognise(write(tmp_path / "b.sqlite", data[:100] + b"\xff" * 3_000))


def test_an_nsys_report_needs_an_export(tmp_path: Path) -> None:
    path = write(tmp_path / "rank.nsys-rep", b"\x05\x00\x01report" + bytes(range(256)))
    assert recognise(path) == Input(path, Source.NSYS, needs_export=True)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "is empty"),
        (b'{"schema": "vllm_k25.breakdown/1"}', "no torch.profiler trace"),
        (b"[1, 2, 3]", "no torch.profiler trace"),
        (b"PK\x03\x04rest", "unzip"),
        (b"\x28\xb5\x2f\xfdrest", "unzstd"),
        (b"just a log\n" * 1_000, "not a capture"),
        (b"\x80\x04\x95\x00\x00pickle", "binary file"),
        (gzip.compress(b"hello"), "not a capture"),
        (b"\x1f\x8b\x00\x00garbage", "not a capture"),
        (gzip.compress(b"SQLite format 3\0" + bytes(100)), "gunzip it first"),
    ],
)
def test_anything_else_is_refused_in_one_line_with_what_to_do(tmp_path: Path, data: bytes, reason: str) -> None:
    path = write(tmp_path / "file", data)
    with pytest.raises(CaptureError) as caught:
        recognise(path)
    assert reason in str(caught.value)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_what_is_no_file_is_refused_without_waiting_for_it(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(CaptureError, match="is not a file"):
        expand([pipe])
    with pytest.raises(CaptureError, match="does not exist"):
        expand([tmp_path / "missing"])


def test_a_directory_is_its_captures_in_the_order_of_ranks(tmp_path: Path) -> None:
    trace = encode(document([decode_rank()]))
    (tmp_path / "deep" / "er").mkdir(parents=True)
    for name in ("rank10.json", "rank2.json", "deep/er/rank1.json"):
        write(tmp_path / name, trace)
    notes = write(tmp_path / "notes.md", b"hello")
    ignored: list[Path] = []
    found = expand([tmp_path], ignored)
    assert [str(one.path.relative_to(tmp_path)) for one in found] == ["deep/er/rank1.json", "rank2.json", "rank10.json"]
    assert ignored == [notes]


def test_a_file_named_twice_is_one_input(tmp_path: Path) -> None:
    path = write(tmp_path / "t.json", encode(document([decode_rank()])))
    assert expand([tmp_path, path, tmp_path / ".." / tmp_path.name / "t.json"]) == [Input(path, Source.TORCH_TRACE)]


def test_a_directory_without_captures_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "notes.md", b"hello")
    with pytest.raises(CaptureError, match="holds no captures"):
        expand([tmp_path])


def test_a_report_beside_its_export_is_not_read_twice(tmp_path: Path) -> None:
    write(tmp_path / "run.nsys-rep", bytes(range(256)))
    export = database(tmp_path / "run.sqlite", "StringIds")
    assert expand([tmp_path]) == [Input(export, Source.NSYS)]
