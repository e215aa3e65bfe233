"""Exports as they come: what a reader makes of each kind of trouble, and of a real capture."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np
import pytest

from vllm_k25_instrument.analysis.capture import NO_ANNOTATION, ActivityKind, Capture, CaptureError, Source
from vllm_k25_instrument.analysis.nsys import read_nsys
from vllm_k25_instrument.report.caveats import CaveatCode

CASES = Path(__file__).parents[1] / "data" / "cases"


def sample(name: str) -> Path:
    """A real capture, where the checkout has them beside it."""
    path = Path(__file__).parents[2].parent / "shared" / "samples" / name
    if not path.exists():
        pytest.skip(f"no {name}: the samples are not part of the repository")
    return path


def case(name: str) -> Capture:
    (capture,) = read_nsys(CASES / name)
    return capture


def counts(capture: Capture) -> dict[CaveatCode, int]:
    return {note.code: note.count for note in capture.notes}


def total_ns(capture: Capture, kind: ActivityKind) -> tuple[int, int]:
    rows = capture.activities.kind == kind
    return int(rows.sum()), int(capture.activities.duration_ns[rows].sum())


def kernel_names(capture: Capture) -> list[str]:
    return [capture.names[code] for code in capture.activities.name]


def ranges_of_work(capture: Capture) -> list[str | None]:
    names = capture.annotations.name
    return [None if at == NO_ANNOTATION else capture.names[names[at]] for at in capture.activities.annotation]


# --- a real capture --------------------------------------------------------------------------------------


def test_a_node_level_export_has_the_7440_kernels_and_188_143_ms_of_the_torch_trace() -> None:
    (capture,) = read_nsys(sample("vllm-graph-decode-node-level.sqlite"))
    assert total_ns(capture, ActivityKind.KERNEL) == (7_440, 188_143_692)
    everything = int(capture.activities.duration_ns.sum())
    assert round(everything / 1e6, 3) == 191.450
    assert capture.source is Source.NSYS
    assert capture.process == 30_460


def test_its_durations_are_those_of_the_torch_trace_kernel_by_kernel() -> None:
    (capture,) = read_nsys(sample("vllm-graph-decode-node-level.sqlite"))
    trace = json.loads(gzip.decompress(sample("vllm-graph-decode-rank-0.pt.trace.json.gz").read_bytes()))
    kernels = sorted(
        (event["ts"], event["name"], event["dur"]) for event in trace["traceEvents"] if event.get("cat") == "kernel"
    )
    rows = capture.activities.kind == ActivityKind.KERNEL
    assert [capture.names[code] for code in capture.activities.name[rows]] == [name for _, name, _ in kernels]
    exact = np.array([round(duration * 1_000) for *_, duration in kernels])
    # The export was made of the trace's microseconds, so its starts and ends were rounded.
    assert np.abs(capture.activities.duration_ns[rows] - exact).max() <= 1


def test_each_of_its_65_graph_launches_owns_many_kernels_and_18_ranges_mark_the_steps() -> None:
    (capture,) = read_nsys(sample("vllm-graph-decode-node-level.sqlite"))
    assert int(capture.launches.is_graph.sum()) == 65
    launch = capture.activities.launch
    assert (launch >= 0).all()
    assert int(capture.launches.is_graph[launch].sum()) == 7_440 - 607
    steps = [capture.names[code] for code in capture.annotations.name]
    assert steps[0] == "execute_new_1_cached_0"
    assert len(steps) == 18
    assert all(step.startswith("execute_new_") for step in steps)


def test_its_nodes_were_made_before_the_capture_which_is_said() -> None:
    (capture,) = read_nsys(sample("vllm-graph-decode-node-level.sqlite"))
    assert counts(capture) == {CaveatCode.GRAPH_NODES_UNMAPPED: 6_833}


def test_a_graph_level_export_has_607_kernels_65_opaque_graphs_and_names_the_remedy() -> None:
    (capture,) = read_nsys(sample("vllm-graph-decode-graph-level.sqlite"))
    assert total_ns(capture, ActivityKind.KERNEL)[0] == 607
    assert total_ns(capture, ActivityKind.GRAPH)[0] == 65
    (note,) = capture.notes
    assert (note.code, note.count) == (CaveatCode.GRAPH_LEVEL_TRACE, 65)
    assert "--cuda-graph-trace=node" in note.message
    assert "vllm-graph-decode-graph-level.sqlite" in note.message


# --- the cases -------------------------------------------------------------------------------------------


def test_05_zero_and_backward_times_are_left_out_counted_and_make_the_capture_unreliable() -> None:
    capture = case("05-zero-or-backward-timestamps/export.sqlite")
    assert total_ns(capture, ActivityKind.KERNEL) == (1, 1_000)
    assert kernel_names(capture) == ["good"]
    assert counts(capture)[CaveatCode.BAD_TIMESTAMPS] == 2
    assert CaveatCode.UNRELIABLE in counts(capture)


def test_20_a_graph_level_trace_gives_8_us_of_one_opaque_graph() -> None:
    capture = case("20-graph-level-tracing/export.sqlite")
    assert total_ns(capture, ActivityKind.GRAPH) == (1, 8_000)
    assert total_ns(capture, ActivityKind.KERNEL) == (0, 0)
    assert ranges_of_work(capture) == ["execute_context_0(0)_generation_1(1)"]
    assert counts(capture) == {CaveatCode.GRAPH_LEVEL_TRACE: 1}


def test_22_without_nvtx_there_are_kernels_and_a_note() -> None:
    capture = case("22-nvtx-table-absent-or-suffixed/absent.sqlite")
    assert total_ns(capture, ActivityKind.KERNEL) == (3, 6_000)
    assert len(capture.annotations) == 0
    assert set(counts(capture)) == {CaveatCode.NO_NVTX}


def test_22_a_suffixed_nvtx_table_is_used() -> None:
    capture = case("22-nvtx-table-absent-or-suffixed/suffixed.sqlite")
    assert ranges_of_work(capture) == ["execute_context_0(0)_generation_1(1)"] * 3
    assert capture.notes == ()


@pytest.mark.parametrize("file", ["mixed.sqlite", "no_textid_column.sqlite"])
def test_23_names_in_text_and_in_text_id_are_both_read(file: str) -> None:
    capture = case(f"23-nvtx-text-or-textid/{file}")
    first, second = "execute_context_0(0)_generation_1(1)", "execute_context_0(0)_generation_2(2)"
    assert [capture.names[code] for code in capture.annotations.name] == [first, second]
    assert ranges_of_work(capture) == [first, second, second]


def test_25_a_kernel_without_demangled_name_has_its_short_one_or_a_number() -> None:
    capture = case("25-null-names-no-stringids/null_demangled.sqlite")
    assert kernel_names(capture) == ["Marlin", "<unnamed kernel 1>", "_fwd_grouped_kernel_stage1"]
    assert total_ns(capture, ActivityKind.KERNEL) == (3, 4_000)
    assert counts(capture)[CaveatCode.UNNAMED_KERNELS] == 1


def test_25_a_missing_string_table_is_an_error_that_names_it() -> None:
    with pytest.raises(CaptureError, match=r"no_stringids\.sqlite: table StringIds is missing.*nsys export"):
        read_nsys(CASES / "25-null-names-no-stringids/no_stringids.sqlite")


def test_32_a_range_left_open_is_closed_at_the_end_flagged_and_names_no_work() -> None:
    capture = case("32-nvtx-push-pop-imbalance/export.sqlite")
    assert ranges_of_work(capture) == ["execute_context_0(0)_generation_1(1)"] * 3
    assert capture.activities.annotation.tolist() == [1, 2, 2]
    ranges = capture.annotations
    assert ranges.is_open is not None
    assert ranges.is_open.tolist() == [True, False, False]
    assert ranges.start_ns.tolist() == [300, 400, 10_400]
    assert ranges.duration_ns.tolist() == [40_000 - 300, 8_600, 29_600]
    assert ranges.parent.tolist() == [NO_ANNOTATION] * 3
    assert counts(capture) == {CaveatCode.OPEN_RANGES: 1}
