"""Traces that are broken, hostile or odd: what can be read is read, what cannot is said, and nothing blows up."""

from __future__ import annotations

import gzip
import json
import resource
import tracemalloc
import zlib
from pathlib import Path

import pytest

from tests.traces import Dress, Rank, container, decode_rank, document, encode, k25_rank, rows
from vllm_k25_instrument.analysis.capture import Capture, CaptureError
from vllm_k25_instrument.analysis.kineto import document as document_module
from vllm_k25_instrument.analysis.torch_trace import read_torch_trace
from vllm_k25_instrument.report.caveats import CaveatCode

STEP_NS = 38_000


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    return tmp_path / "rank.json"


def read(path: Path, data: bytes) -> Capture:
    path.write_bytes(data)
    (capture,) = read_torch_trace(path)
    return capture


def total(capture: Capture) -> int:
    return int(capture.activities.duration_ns.sum())


def count(capture: Capture, code: CaveatCode) -> int:
    return sum(note.count for note in capture.notes if note.code is code)


def whole(steps: int = 3) -> bytes:
    return encode(document([decode_rank(steps)]))


# --- content ---------------------------------------------------------------------------------------------


def test_bare_nan_and_infinity_beside_the_times_cost_nothing(trace: Path) -> None:
    data = whole().replace(b'"context": 1', b'"occupancy": NaN, "memory bandwidth (GB/s)": -Infinity')
    capture = read(trace, data)
    assert total(capture) == 3 * STEP_NS
    assert not capture.notes


@pytest.mark.parametrize(
    "bad", [b"NaN", b"Infinity", b"-Infinity", b"1e999", b"-5.0", b"9223372036854775.807", b"1e30"]
)
def test_a_duration_that_cannot_be_is_left_out_and_counted(trace: Path, bad: bytes) -> None:
    capture = read(
        trace, whole().replace(b'"dur": 20.000, "args": {"device"', b'"dur": ' + bad + b', "args": {"device"', 1)
    )
    assert total(capture) == 3 * STEP_NS - 20_000
    assert count(capture, CaveatCode.BAD_TIMESTAMPS) == 1
    assert count(capture, CaveatCode.UNRELIABLE) == 1


@pytest.mark.parametrize("bad", [b"NaN", b"-1e300", b"18446744073709551.615", b"-1800000000000000.0", b"1e16"])
def test_a_start_that_cannot_be_is_left_out_and_counted(trace: Path, bad: bytes) -> None:
    capture = read(trace, whole().replace(b'"ts": 1041.000, "dur": 20', b'"ts": ' + bad + b', "dur": 20'))
    assert total(capture) == 3 * STEP_NS - 20_000
    assert count(capture, CaveatCode.BAD_TIMESTAMPS) == 1


def test_one_bad_row_in_two_hundred_does_not_make_a_capture_unreliable(trace: Path) -> None:
    capture = read(trace, whole(70).replace(b'"ts": 1041.000, "dur": 20.000', b'"ts": 0, "dur": 0'))
    assert count(capture, CaveatCode.BAD_TIMESTAMPS) == 1
    assert count(capture, CaveatCode.UNRELIABLE) == 0


def test_a_kernel_shorter_than_the_clock_ticks_is_kept(trace: Path) -> None:
    capture = read(trace, whole().replace(b'"ts": 1041.000, "dur": 20.000', b'"ts": 1041, "dur": 0'))
    assert len(capture.activities) == 9
    assert not capture.notes


@pytest.mark.parametrize(
    "escape", [rb"C:\Users\x", rb"a\xffb", rb"\u12g4", rb"\ud800 alone", rb"\ude00\ud800", b"tab\there"]
)
def test_broken_escapes_cost_no_event(trace: Path, escape: bytes) -> None:
    data = whole().replace(b"_fwd_grouped_kernel_stage1", b"_fwd_" + escape, 1)
    capture = read(trace, data)
    assert total(capture) == 3 * STEP_NS
    for name in capture.names:
        name.encode()  # printable: no lone surrogate is left


def test_a_quote_that_is_not_escaped_costs_one_event(trace: Path) -> None:
    capture = read(trace, whole().replace(b"_fwd_grouped_kernel_stage1", b'_fwd_"grouped"_kernel', 1))
    assert total(capture) == 3 * STEP_NS - 8_000
    assert count(capture, CaveatCode.ROWS_SKIPPED) == 1


@pytest.mark.parametrize("encoding_error", [b"\xff", b"\xc3(", b"\xed\xa0\x80", b"\xf0\x9f"])
def test_invalid_utf8_in_every_row_is_replaced(trace: Path, encoding_error: bytes) -> None:
    capture = read(trace, whole(200).replace(b"_fwd_", b"_fwd" + encoding_error))
    assert total(capture) == 200 * STEP_NS
    assert count(capture, CaveatCode.INVALID_ENCODING) >= 1


def test_numbers_written_as_text_are_numbers(trace: Path) -> None:
    data = whole().replace(b'"correlation": 51', b'"correlation": "51"').replace(b'"stream": 7', b'"stream": "7"')
    capture = read(trace, data)
    assert capture.activities.launch.tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert set(capture.activities.stream.tolist()) == {7}


def test_integers_beyond_64_bits_are_no_ids(trace: Path) -> None:
    capture = read(trace, whole().replace(b'"correlation": 51', b'"correlation": 99999999999999999999999999'))
    assert capture.activities.launch.tolist() == [0, 0, 0, -1, -1, -1, 2, 2, 2]


def test_elements_that_are_no_events_are_counted(trace: Path) -> None:
    data = whole().replace(b'"traceEvents": [', b'"traceEvents": [1, null, "x", true, 2.5, [], {"ph": "X"}, ')
    capture = read(trace, data)
    assert total(capture) == 3 * STEP_NS
    assert count(capture, CaveatCode.ROWS_SKIPPED) == 6


def test_events_inside_arrays_of_events_are_found(trace: Path) -> None:
    events = rows(decode_rank())
    capture = read(trace, encode({"traceEvents": [events[:5], [events[5:]]]}))
    assert total(capture) == 3 * STEP_NS


def test_two_arrays_of_events_in_one_container_are_one_trace(trace: Path) -> None:
    events = rows(decode_rank())
    first, second = encode(events[:7]), encode(events[7:])
    capture = read(trace, b'{"traceEvents": ' + first + b', "traceEvents": ' + second + b"}")
    assert total(capture) == 3 * STEP_NS


def test_a_byte_order_mark_and_padding_do_no_harm(trace: Path) -> None:
    assert total(read(trace, b"\xef\xbb\xbf \n" + whole() + b"\n\0\0\0\0")) == 3 * STEP_NS


def test_rows_of_old_writers_are_read(trace: Path) -> None:
    dress = Dress(old_categories=True)
    assert total(read(trace, encode(document([decode_rank()], dress), dress))) == 3 * STEP_NS


def test_ranges_of_the_gpu_timeline_are_no_work(trace: Path) -> None:
    data = whole().replace(b'"cat": "kernel", "name": "_fwd', b'"cat": "gpu_user_annotation", "name": "_fwd')
    assert total(read(trace, data)) == 3 * (STEP_NS - 8_000)


def test_marks_of_graph_nodes_name_the_work(trace: Path) -> None:
    data = whole().replace(b'"block": [128, 1, 1]', b'"graph node id": 5, "str": "moe_experts marlin L17"')
    capture = read(trace, data)
    work, spans = capture.activities, capture.annotations
    assert {capture.names[spans.name[n]] for n in work.annotation} == {"moe_experts marlin L17"}
    parents = spans.parent[work.annotation]
    assert {capture.names[spans.name[n]] for n in parents} == {"execute_context_0(0)_generation_4(4)"}
    assert spans.start_ns[work.annotation].tolist() == capture.launches.start_ns[work.launch].tolist()


# --- containers ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("end", [b"", b",", b"]", b"\n  "])
def test_a_container_left_open_is_incomplete(trace: Path, end: bytes) -> None:
    data = whole()
    data = data[: data.rindex(b"]")] + end
    capture = read(trace, data)
    assert total(capture) == 3 * STEP_NS
    assert not capture.complete
    assert count(capture, CaveatCode.TRUNCATED) > 0


def every_cut_is_refused_or_marked(trace: Path, data: bytes, cuts: range) -> None:
    refusals: set[str] = set()
    for cut in cuts:
        trace.write_bytes(data[:cut])
        try:
            captures = read_torch_trace(trace)
        except CaptureError as error:
            refusals.add(str(error))
        else:
            assert not any(capture.complete for capture in captures), cut
    assert refusals
    assert all(line.startswith(f"{trace}: ") and "\n" not in line for line in refusals)


def test_every_cut_of_a_trace_ends_in_a_capture_marked_incomplete_or_one_line(trace: Path) -> None:
    data = whole(1)
    every_cut_is_refused_or_marked(trace, data, range(len(data) - 1))


def test_every_cut_of_a_gzip_stream_ends_likewise(trace: Path) -> None:
    data = gzip.compress(whole(20))
    every_cut_is_refused_or_marked(trace, data, range(2, len(data)))


def test_a_header_that_is_broken_does_not_hide_the_events(trace: Path) -> None:
    capture = read(trace, whole().replace(b'"schemaVersion": 1', b'"schemaVersion": {]'))
    assert total(capture) == 3 * STEP_NS
    assert not capture.complete


def test_a_merge_of_documents_is_read_to_its_end(trace: Path) -> None:
    trace.write_bytes(whole(1) + b"\n" + encode(document([decode_rank(2, rank=Rank(rank=1, world_size=2))])))
    captures = read_torch_trace(trace)
    assert [total(capture) for capture in captures] == [STEP_NS, 2 * STEP_NS]
    assert [capture.rank for capture in captures] == [0, 1]


def test_many_gzip_members_with_padding_are_one_stream(trace: Path) -> None:
    data = whole(50)
    parts = [gzip.compress(data[at : at + 700]) for at in range(0, len(data), 700)]
    assert total(read(trace, b"\0\0".join(parts))) == 50 * STEP_NS


def test_bytes_after_the_gzip_data_make_it_incomplete(trace: Path) -> None:
    capture = read(trace, gzip.compress(whole()) + b"garbage")
    assert total(capture) == 3 * STEP_NS
    assert not capture.complete


def test_a_damaged_checksum_makes_it_incomplete(trace: Path) -> None:
    data = bytearray(gzip.compress(whole()))
    data[-6] ^= 1
    capture = read(trace, bytes(data))
    assert not capture.complete


def test_a_damaged_stream_loses_what_follows_the_damage_only(trace: Path) -> None:
    data = bytearray(gzip.compress(whole(2_000), 1))
    data[len(data) * 3 // 4] ^= 0xFF
    capture = read(trace, bytes(data))
    assert not capture.complete
    assert 1_000 * STEP_NS < total(capture) < 2_000 * STEP_NS


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "is empty"),
        (b"   \n", "is empty"),
        (b"hello", "is not JSON"),
        (b"{}", "without traceEvents"),
        (b'{"traceEvents": null}', "without traceEvents"),
        (b'{"traceEvents"', "no events could be read"),
        (b'{"a": "' + b"x" * 100, "no events could be read"),
        (b"[" * 1_000, "nests deeper"),
        (b'{"a":' * 200_000, "nests deeper"),
        (b'{"traceEvents": [' + b"[" * 100_000, "nests deeper"),
    ],
)
def test_what_is_no_trace_is_refused_in_one_line(trace: Path, data: bytes, reason: str) -> None:
    trace.write_bytes(data)
    with pytest.raises(CaptureError) as caught:
        read_torch_trace(trace)
    assert reason in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_file_is_an_error_of_ours(trace: Path) -> None:
    with pytest.raises(CaptureError, match="cannot be read"):
        read_torch_trace(trace)


# --- size ------------------------------------------------------------------------------------------------


def test_rows_longer_than_what_is_decoded_at_once_are_read(trace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(document_module, "CHUNK_BYTES", 20_000)
    long = json.dumps([{"a": n, "b": {"c": "}, {"}} for n in range(20_000)]).encode()
    capture = read(trace, whole().replace(b'"context": 1', b'"context": ' + long, 1))
    assert total(capture) == 3 * STEP_NS
    assert not capture.notes


def test_arguments_nested_without_end_cost_their_row_only(trace: Path) -> None:
    capture = read(trace, whole().replace(b'"context": 1', b'"x": ' + b"[" * 50_000 + b"]" * 50_000, 1))
    assert total(capture) == 3 * STEP_NS - 10_000
    assert count(capture, CaveatCode.ROWS_SKIPPED) == 1


def test_chunks_of_any_size_give_the_same(trace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = b"".join(k25_rank(2, kernels=60)).replace(b'"dur": 78.', b'"bw": NaN, "dur": 78.', 1)
    expected = total(read(trace, data))
    for size in (1, 500, 5_000, 50_000):
        monkeypatch.setattr(document_module, "CHUNK_BYTES", size)
        monkeypatch.setattr(document_module, "_MIN_CHUNK", min(size, 16 << 10))
        assert total(read(trace, data)) == expected


def test_a_gzip_bomb_is_stopped(trace: Path) -> None:
    packer = zlib.compressobj(9, zlib.DEFLATED, 31)
    with trace.open("wb") as file:
        file.write(packer.compress(b'{"traceEvents": ['))
        row = b'{"ph": "X"},' * 87_381
        for _ in range(300):
            file.write(packer.compress(row))
        file.write(packer.flush())
    with pytest.raises(CaptureError, match="inflates more than"):
        read_torch_trace(trace)


def test_the_memory_for_a_trace_does_not_grow_with_its_text(trace: Path) -> None:
    with trace.open("wb") as file:
        size = sum(file.write(piece) for piece in k25_rank(30))
    read_torch_trace(trace)
    tracemalloc.start()
    read_torch_trace(trace)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert size > 20_000_000
    assert peak < 2 * size


def test_a_string_without_end_is_not_held_in_memory(trace: Path) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    trace.write_bytes(b'{"a": "' + b"x" * (64 << 20))
    with pytest.raises(CaptureError, match="no events could be read"):
        read_torch_trace(trace)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 150 << 10


def test_progress_adds_up_to_the_size_of_the_file(trace: Path) -> None:
    for data in (whole(500), gzip.compress(whole(500))):
        trace.write_bytes(data)
        seen: list[int] = []
        read_torch_trace(trace, seen.append)
        assert sum(seen) == len(data)


def test_an_event_array_with_nothing_in_it_has_no_gpu_events(trace: Path) -> None:
    capture = read(trace, encode(container([], Rank())))
    assert count(capture, CaveatCode.NO_GPU_EVENTS) == 0
    assert [note.code for note in capture.notes] == [CaveatCode.NO_GPU_EVENTS]
