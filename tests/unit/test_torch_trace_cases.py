"""What the reader makes of each trace that once fooled one."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.traces import sample
from vllm_k25_instrument.analysis.capture import ActivityKind, Capture
from vllm_k25_instrument.analysis.torch_trace import read_torch_trace
from vllm_k25_instrument.report.caveats import CaveatCode

CASES = Path(__file__).parents[1] / "data" / "cases"


def read(case: str) -> Capture:
    (capture,) = read_torch_trace(CASES / case)
    return capture


def kernels(capture: Capture) -> tuple[int, int]:
    """Their number, and the sum of their durations in ns."""
    durations = capture.activities.duration_ns[capture.activities.kind == ActivityKind.KERNEL]
    return len(durations), int(durations.sum())


def codes(capture: Capture) -> dict[CaveatCode, int]:
    return {note.code: note.count for note in capture.notes}


def message(capture: Capture, code: CaveatCode) -> str:
    (found,) = [note.message for note in capture.notes if note.code is code]
    assert "\n" not in found
    assert str(capture.path) in found
    return found


def test_invalid_utf8_costs_no_event_and_is_said_once_with_its_offset() -> None:
    capture = read("01-invalid-utf8/trace.json")
    assert kernels(capture) == (9, 114_000)
    assert capture.complete
    offset = (CASES / "01-invalid-utf8/trace.json").read_bytes().index(b"_fwd\xff\xfe") + 4
    assert f"first at byte {offset}" in message(capture, CaveatCode.INVALID_ENCODING)
    assert any("�" in name for name in capture.names)


@pytest.mark.parametrize(
    ("file", "expected", "events"), [("cut.json", (6, 76_000), 10), ("cut.json.gz", (3, 38_000), 7)]
)
def test_a_cut_file_gives_its_whole_events_marked_incomplete(file: str, expected: tuple[int, int], events: int) -> None:
    capture = read(f"02-truncated/{file}")
    assert kernels(capture) == expected
    assert not capture.complete
    assert f"{events} whole events recovered" in message(capture, CaveatCode.TRUNCATED)


def test_zero_and_backward_timestamps_are_left_out_and_counted() -> None:
    capture = read("05-zero-or-backward-timestamps/trace.json")
    assert kernels(capture) == (3, 38_000)
    assert codes(capture) == {CaveatCode.BAD_TIMESTAMPS: 2, CaveatCode.UNRELIABLE: 2}
    assert "2 of 5" in message(capture, CaveatCode.BAD_TIMESTAMPS)


def test_fractions_of_a_microsecond_are_kept() -> None:
    capture = read("06-sub-microsecond-rounding/trace.json")
    assert capture.activities.duration_ns.tolist() == [200, 300, 900]
    assert capture.activities.start_ns.tolist() == [100_700, 101_950, 102_400]


def test_overlapping_kernels_of_two_streams_are_both_kept() -> None:
    capture = read("08-overlap-two-streams/trace.json")
    assert kernels(capture) == (2, 30_000)
    assert capture.activities.stream.tolist() == [20, 7]


def test_one_graph_launch_owns_many_kernels() -> None:
    capture = read("09-one-graph-launch-many-kernels/trace.json")
    assert capture.activities.launch.tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert [int(capture.activities.duration_ns[capture.activities.launch == n].sum()) for n in range(3)] == [38_000] * 3
    assert len(capture.launches) == 3
    assert capture.launches.is_graph.all()


def test_annotations_are_there_for_the_steps_and_absent_where_the_file_has_none() -> None:
    annotated = read("10-no-profiler-step/annotated.json")
    names = [annotated.names[n] for n in annotated.annotations.name]
    assert names == ["execute_context_0(0)_generation_4(4)"] * 3
    bare = read("10-no-profiler-step/bare.json")
    assert len(bare.annotations) == 0
    assert kernels(bare) == (4, 40_000)


def test_metadata_alone_is_said_to_hold_no_kernels() -> None:
    capture = read("11-metadata-only-no-cat-dur/trace.json")
    assert kernels(capture) == (0, 0)
    assert f"no GPU kernel events in {capture.path}" in message(capture, CaveatCode.NO_GPU_EVENTS)


def test_rows_that_lack_cat_dur_or_args_are_left_out_one_by_one() -> None:
    capture = read("11-metadata-only-no-cat-dur/mixed.json")
    assert kernels(capture) == (3, 38_000)
    assert codes(capture) == {CaveatCode.ROWS_SKIPPED: 4}
    found = message(capture, CaveatCode.ROWS_SKIPPED)
    assert "2 without a category, 1 without ts or dur, 1 without args" in found


def test_ranks_line_up_whether_their_times_are_relative_or_absolute() -> None:
    captures = [
        read(f"14-relative-vs-absolute-time/{name}.json") for name in ("rank0", "rank1_base_last", "rank2_absolute")
    ]
    starts = [int(c.activities.start_ns[0]) + (c.clock_base_ns or 0) for c in captures]
    assert starts == [1_767_225_600_001_030_000, 1_767_225_600_051_030_000, 1_767_225_600_001_030_000]
    assert [c.rank for c in captures] == [0, 1, 2]
    assert [c.world_size for c in captures] == [1, 2, 3]
    assert {kernels(c) for c in captures} == {(3, 38_000)}


@pytest.mark.parametrize("unit", ["ns", "ms"])
def test_the_display_unit_scales_nothing(unit: str) -> None:
    assert kernels(read(f"15-display-time-unit/unit_{unit}.json")) == (9, 114_000)


def test_the_world_size_is_read_so_that_missing_ranks_show() -> None:
    capture = read("18-missing-rank-files/x-rank-0.1.pt.trace.json")
    assert (capture.rank, capture.world_size) == (0, 2)


def test_launches_without_kernels_are_counted_and_explained() -> None:
    capture = read("19-no-kernels-cupti-busy/trace.json")
    assert codes(capture) == {CaveatCode.LAUNCHES_WITHOUT_KERNELS: 3}
    found = message(capture, CaveatCode.LAUNCHES_WITHOUT_KERNELS)
    assert "3 launches but 0 kernels: GPU tracing was not active (another CUPTI client such as nsys?)" in found


def test_the_real_capture_is_read_to_the_nanosecond() -> None:
    (capture,) = read_torch_trace(sample("vllm-graph-decode-rank-0.pt.trace.json.gz"))
    assert kernels(capture) == (7_440, 188_143_454)
    work = capture.activities
    assert len(work) == 7_440 + 210 + 167
    assert round(int(work.duration_ns.sum()) / 1e6, 3) == 191.450
    assert (work.launch >= 0).all()
    assert int(capture.launches.is_graph.sum()) == 65
    assert (capture.rank, capture.world_size, capture.process, capture.device) == (0, 1, 30_460, 0)
    assert capture.clock_base_ns == 1_759_300_074_000_000_000
    assert capture.complete
    assert not capture.notes
    steps = [capture.names[n] for n in capture.annotations.name if capture.names[n].startswith("execute_")]
    assert len(steps) == 18


def test_in_the_real_capture_most_kernels_lie_inside_a_step_by_their_launch() -> None:
    (capture,) = read_torch_trace(sample("vllm-graph-decode-rank-0.pt.trace.json.gz"))
    spans = capture.annotations
    outermost = np.arange(len(spans))
    while (spans.parent[outermost] >= 0).any():
        outermost = np.where(spans.parent[outermost] >= 0, spans.parent[outermost], outermost)
    is_step = np.array([capture.names[n].startswith("execute_") for n in spans.name])
    in_step = is_step[outermost[capture.activities.annotation]] & (capture.activities.annotation >= 0)
    is_kernel = capture.activities.kind == ActivityKind.KERNEL
    assert int((in_step & is_kernel).sum()) == 7_001
    assert int((~in_step & is_kernel).sum()) == 439


def test_in_the_real_capture_eager_kernels_know_the_operator_that_launched_them() -> None:
    (capture,) = read_torch_trace(sample("vllm-graph-decode-rank-0.pt.trace.json.gz"))
    work = capture.activities
    scans = [n for n, name in enumerate(work.name) if "tensor_kernel_scan_innermost_dim" in capture.names[name]]
    operators = {capture.names[capture.annotations.name[work.annotation[n]]] for n in scans}
    assert operators == {"aten::cumsum"}
