"""The nsys reader, one rule at a time."""

from __future__ import annotations

import hashlib
import os
import random
import sqlite3
from pathlib import Path

import pytest

from tests.nsys_exports import DOMAIN_CREATE, KERNEL, SCHEMAS, Clock, Export, Process, process_id
from vllm_k25_instrument.analysis.capture import NO_ANNOTATION, NO_RANK, Capture, CaptureError
from vllm_k25_instrument.analysis.nsys import read_nsys
from vllm_k25_instrument.report.caveats import CaveatCode


@pytest.fixture
def clock() -> Clock:
    return Clock(random.Random(0))


@pytest.fixture
def export() -> Export:
    return Export()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "export.sqlite"


def only(captures: list[Capture]) -> Capture:
    (capture,) = captures
    return capture


def ranges_of_work(capture: Capture) -> list[str | None]:
    names = capture.annotations.name
    return [None if at == NO_ANNOTATION else capture.names[names[at]] for at in capture.activities.annotation]


def notes(capture: Capture) -> dict[CaveatCode, int]:
    return {note.code: note.count for note in capture.notes}


# --- processes, devices, ranks ---------------------------------------------------------------------------


def test_equal_correlation_ids_of_two_processes_are_two_launches(export: Export, clock: Clock, file: Path) -> None:
    for number in range(2):
        process = Process(export, clock, 100 + number)
        process.device = number
        clock._rng.seed(1)  # so that both count their correlations alike
        process.thread().launch(f"kernel of {number}")
    assert len({call["correlationId"] for call in export.calls}) == 1
    first, second = read_nsys(export.write(file))
    for number, capture in enumerate((first, second)):
        assert (capture.process, capture.device) == (100 + number, number)
        assert [capture.names[code] for code in capture.activities.name] == [f"kernel of {number}"]
        assert capture.launches.start_ns.tolist() == [export.calls[number]["start"]]


def test_two_devices_of_one_process_are_two_captures_with_their_own_launches(
    export: Export, clock: Clock, file: Path
) -> None:
    process = Process(export, clock, 100)
    thread = process.thread()
    thread.launch("on 0")
    process.device = 1
    thread.launch("on 1")
    thread.launch("on 1")
    captures = read_nsys(export.write(file))
    assert [(capture.device, len(capture.activities), len(capture.launches)) for capture in captures] == [
        (0, 1, 1),
        (1, 2, 2),
    ]


@pytest.mark.parametrize(
    ("titles", "ranks", "world_size"),
    [
        (["VLLM::Worker_TP1", "VLLM::Worker_TP0"], [1, 0], 2),
        ([f"VLLM::Worker_{place}" for place in ("PP0_TP0", "PP0_TP1", "PP1_TP0", "PP1_TP1")], [0, 1, 2, 3], 4),
        ([f"VLLM::Worker_{place}_EP0" for place in ("DP1_TP0", "DP0_TP1", "DP1_TP1", "DP0_TP0")], [2, 1, 3, 0], 4),
        (["VllmWorker-3", "VllmWorker-0"], [3, 0], 4),
        (["VLLM::Worker_TP5"], [5], 0),
        # Half a grid does not say how wide it is; two of one rank are none; python says nothing.
        (["VLLM::Worker_PP0_TP1", "VLLM::Worker_PP1_TP0"], [NO_RANK, NO_RANK], 0),
        (["VLLM::Worker_TP0", "VLLM::Worker_TP0"], [NO_RANK, NO_RANK], 0),
        (["python", "python"], [NO_RANK, NO_RANK], 0),
    ],
)  # fmt: skip
def test_process_titles_tell_the_ranks(
    export: Export, clock: Clock, file: Path, titles: list[str], ranks: list[int], world_size: int
) -> None:
    for number, title in enumerate(titles):
        Process(export, clock, 100 + number, title).thread().launch("kernel")
    captures = sorted(read_nsys(export.write(file)), key=lambda capture: capture.process)
    assert [capture.rank for capture in captures] == ranks
    assert {capture.world_size for capture in captures} == {world_size}
    unknown = len(ranks) > 1 and ranks.count(NO_RANK)
    assert notes(captures[0]).get(CaveatCode.RANK_UNKNOWN, 0) == unknown


def test_captures_come_in_the_order_of_ranks(export: Export, clock: Clock, file: Path) -> None:
    for number in (2, 0, 1):
        Process(export, clock, 100 - number, f"VLLM::Worker_TP{number}").thread().launch("kernel")
    assert [capture.rank for capture in read_nsys(export.write(file))] == [0, 1, 2]


def test_a_worker_that_did_nothing_on_a_gpu_still_counts_as_expected(export: Export, clock: Clock, file: Path) -> None:
    Process(export, clock, 100, "VLLM::Worker_TP0").thread().launch("kernel")
    Process(export, clock, 101, "VLLM::Worker_TP1")
    capture = only(read_nsys(export.write(file)))
    assert (capture.rank, capture.world_size) == (0, 2)


def test_our_own_mark_tells_the_rank_before_any_title(export: Export, clock: Clock, file: Path) -> None:
    thread = Process(export, clock, 100, "VLLM::Worker_TP0").thread()
    thread.mark("vllm_k25", DOMAIN_CREATE, domain=3)
    thread.mark("rank=6 world_size=8", domain=3)
    thread.mark("rank=1 world_size=2", domain=4)
    thread.launch("kernel")
    capture = only(read_nsys(export.write(file)))
    assert (capture.rank, capture.world_size) == (6, 8)
    assert len(capture.annotations) == 0


def test_a_stray_copy_on_another_gpu_is_no_second_rank(export: Export, clock: Clock, file: Path) -> None:
    process = Process(export, clock, 100, "VLLM::Worker_TP1", device=1)
    for _ in range(9):
        process.thread().launch("kernel")
    process.device = 0
    process.thread().launch("Memcpy HtoD", kind=1)
    captures = read_nsys(export.write(file))
    assert [(capture.rank, capture.device) for capture in captures] == [(1, 1), (NO_RANK, 0)]
    assert CaveatCode.NO_GPU_EVENTS not in notes(captures[1])


def test_the_device_is_the_gpu_and_not_what_cuda_visible_devices_made_of_it(
    export: Export, clock: Clock, file: Path
) -> None:
    Process(export, clock, 100).thread().launch("kernel")
    export.write(file)
    with sqlite3.connect(file) as connection:
        connection.execute("CREATE TABLE TARGET_INFO_CUDA_DEVICE (gpuId INTEGER, cudaId INTEGER, pid INTEGER)")
        connection.execute("INSERT INTO TARGET_INFO_CUDA_DEVICE VALUES (5, 0, 100), (0, 0, 101)")
    assert only(read_nsys(file)).device == 5


def test_streams_of_two_contexts_are_kept_apart(export: Export, clock: Clock, file: Path) -> None:
    thread = Process(export, clock, 100).thread()
    for _ in range(3):
        thread.launch("kernel", stream=7)
    export.work[KERNEL][1]["contextId"] = 2
    streams = only(read_nsys(export.write(file))).activities.stream.tolist()
    assert streams[0] == streams[2] == 7
    assert streams[1] != 7


# --- graphs and ranges -----------------------------------------------------------------------------------


def test_a_replayed_kernel_belongs_to_the_range_open_when_its_node_was_made(
    export: Export, clock: Clock, file: Path
) -> None:
    thread = Process(export, clock, 100).thread()
    clones = thread.instantiate(thread.capture([("gemm", "moe_experts marlin L17"), ("nccl", "all_reduce pynccl L17")]))
    thread.push("decode step 1 bs=1 graph=full")
    thread.replay(clones)
    thread.pop()
    capture = only(read_nsys(export.write(file)))
    assert ranges_of_work(capture) == ["moe_experts marlin L17", "all_reduce pynccl L17"]
    assert capture.launches.is_graph.tolist() == [True]


def test_a_replayed_kernel_made_outside_any_range_belongs_to_the_range_of_its_launch(
    export: Export, clock: Clock, file: Path
) -> None:
    thread = Process(export, clock, 100).thread()
    clones = thread.instantiate(thread.capture([("gemm", "")]))
    thread.push("decode step 1 bs=1 graph=full")
    thread.replay(clones)
    thread.pop()
    capture = only(read_nsys(export.write(file)))
    assert ranges_of_work(capture) == ["decode step 1 bs=1 graph=full"]
    assert CaveatCode.GRAPH_NODES_UNMAPPED not in notes(capture)


def test_a_node_instantiated_a_hundred_times_is_still_one_kernel_per_replay(
    export: Export, clock: Clock, file: Path
) -> None:
    thread = Process(export, clock, 100).thread()
    clones = thread.instantiate(thread.capture([("gemm", "moe_experts")]), times=100)
    thread.replay(clones)
    thread.replay(clones)
    assert ranges_of_work(only(read_nsys(export.write(file)))) == ["moe_experts", "moe_experts"]


def test_originals_are_followed_through_clones_of_clones(export: Export, clock: Clock, file: Path) -> None:
    thread = Process(export, clock, 100).thread()
    clones = thread.instantiate(thread.capture([("gemm", "moe_experts")]))
    for _ in range(5):
        clones = thread.clone(clones)
    thread.replay(clones)
    assert ranges_of_work(only(read_nsys(export.write(file)))) == ["moe_experts"]


def test_creations_on_other_threads_do_not_count_where_the_launching_thread_has_one(
    export: Export, clock: Clock, file: Path
) -> None:
    process = Process(export, clock, 100)
    main, other = process.thread(), process.thread(1)
    graph = main.capture([("gemm", "right")])
    other.push("wrong")
    other._node(graph[0].id, None)
    other.pop()
    main.replay(main.instantiate(graph))
    assert ranges_of_work(only(read_nsys(export.write(file)))) == ["right"]


def test_a_graph_captured_on_one_thread_and_replayed_on_another_is_mapped(
    export: Export, clock: Clock, file: Path
) -> None:
    process = Process(export, clock, 100)
    main, other = process.thread(), process.thread(1)
    other.replay(main.instantiate(main.capture([("gemm", "moe_experts")])))
    assert ranges_of_work(only(read_nsys(export.write(file)))) == ["moe_experts"]


def test_a_node_that_two_foreign_threads_claim_is_nobodys(export: Export, clock: Clock, file: Path) -> None:
    process = Process(export, clock, 100)
    main, other, third = (process.thread(number) for number in range(3))
    graph = main.capture([("gemm", "one")])
    other.push("two")
    other._node(graph[0].id, None)
    other.pop()
    third.replay(main.instantiate(graph))
    capture = only(read_nsys(export.write(file)))
    assert ranges_of_work(capture) == [None]
    assert notes(capture)[CaveatCode.GRAPH_NODES_UNMAPPED] == 1


def test_equal_node_ids_of_two_processes_are_two_nodes(export: Export, clock: Clock, file: Path) -> None:
    for number in range(2):
        thread = Process(export, clock, 100 + number).thread()
        thread.replay(thread.instantiate(thread.capture([("gemm", f"of {number}")])))
    found = {capture.process: ranges_of_work(capture) for capture in read_nsys(export.write(file))}
    assert found == {100: ["of 0"], 101: ["of 1"]}


def test_a_lineage_that_runs_in_a_circle_ends(export: Export, clock: Clock, file: Path) -> None:
    thread = Process(export, clock, 100).thread()
    thread._node(1, 2)
    thread._node(2, 1)
    thread._work(KERNEL, "gemm", 7, 0, *thread._call("cudaGraphLaunch_v10000"), 1, ())
    thread.push("a range")
    thread.pop()
    capture = only(read_nsys(export.write(file)))
    assert ranges_of_work(capture) == [None]
    assert notes(capture)[CaveatCode.GRAPH_NODES_UNMAPPED] == 1


def test_a_creation_at_an_impossible_time_is_skipped_and_counted(export: Export, clock: Clock, file: Path) -> None:
    thread = Process(export, clock, 100).thread()
    thread.replay(thread.instantiate(thread.capture([("gemm", "moe_experts"), ("gemm", "moe_experts")])))
    export.nodes[0]["start"] = 2**63 - 1
    capture = only(read_nsys(export.write(file)))
    assert ranges_of_work(capture) == [None, "moe_experts"]
    assert notes(capture) == {CaveatCode.ROWS_SKIPPED: 1, CaveatCode.GRAPH_NODES_UNMAPPED: 1}


def test_ranges_on_another_thread_name_nothing(export: Export, clock: Clock, file: Path) -> None:
    process = Process(export, clock, 100)
    main, other = process.thread(), process.thread(1)
    other.push("elsewhere")
    main.launch("kernel")
    other.pop()
    assert ranges_of_work(only(read_nsys(export.write(file)))) == [None]


def test_ranges_that_overlap_without_nesting_name_by_the_one_opened_last(
    file: Path, export: Export, clock: Clock
) -> None:
    thread = Process(export, clock, 100).thread()
    for begin, end, name in ((0, 30, "first"), (10, 50, "second")):
        export.nvtx.append({"start": begin, "end": end, "eventType": 60, "text": name, "globalTid": thread.id})
    for start in (5, 20, 40, 60):
        thread.launch("kernel")
        export.calls[-1]["start"] = start
    assert ranges_of_work(only(read_nsys(export.write(file)))) == ["first", "second", "second", None]


def test_an_opaque_graph_gives_way_to_its_own_kernels(export: Export, clock: Clock, file: Path) -> None:
    thread = Process(export, clock, 100).thread()
    thread.replay(thread.instantiate(thread.capture([("gemm", "moe_experts")])))
    thread.replay_opaque(4)
    export.work[3][0]["correlationId"] = export.work[KERNEL][0]["correlationId"]
    capture = only(read_nsys(export.write(file)))
    assert len(capture.activities) == 1
    assert notes(capture) == {CaveatCode.ROWS_SKIPPED: 1}


@pytest.mark.parametrize("prefix", ["", "PROCESS_0:"])
def test_graph_mode_and_graph_launches_without_any_row_are_recognised(
    export: Export, clock: Clock, file: Path, prefix: str
) -> None:
    thread = Process(export, clock, 100).thread()
    thread.launch("kernel")
    thread._call("cudaGraphLaunch_v10000")
    export.mode = "Graph"
    schema = SCHEMAS["2022.1"] if prefix else SCHEMAS["2026.2"]
    assert notes(only(read_nsys(export.write(file, schema))))[CaveatCode.GRAPH_LEVEL_TRACE] == 1


# --- what is missing -------------------------------------------------------------------------------------


def test_launches_without_a_kernel_table_are_said_and_not_shown_as_zeros(
    export: Export, clock: Clock, file: Path
) -> None:
    thread = Process(export, clock, 100).thread()
    for _ in range(4):
        thread._call("cudaLaunchKernel_v7000")
    thread.other_call()
    capture = only(read_nsys(export.write(file)))
    assert len(capture.activities) == 0
    (note,) = [note for note in capture.notes if note.code is CaveatCode.LAUNCHES_WITHOUT_KERNELS]
    assert note.count == 4
    assert "4 launches but 0 kernels: GPU tracing was not active" in note.message


def test_an_export_with_neither_launches_nor_kernels_says_so(export: Export, file: Path) -> None:
    capture = only(read_nsys(export.write(file)))
    (note,) = [note for note in capture.notes if note.code is CaveatCode.NO_GPU_EVENTS]
    assert f"no GPU kernel events in {file}" in note.message


def test_without_the_table_of_calls_there_are_kernels_and_a_note(export: Export, clock: Clock, file: Path) -> None:
    Process(export, clock, 100).thread().launch("kernel")
    export.calls.clear()
    capture = only(read_nsys(export.write(file)))
    assert capture.activities.launch.tolist() == [-1]
    assert notes(capture)[CaveatCode.MISSING_TABLE] == 1


def test_a_single_process_need_not_be_named(export: Export, clock: Clock, file: Path) -> None:
    Process(export, clock, 100).thread().launch("kernel")
    del export.work[KERNEL][0]["globalPid"]
    capture = only(read_nsys(export.write(file)))
    assert (capture.process, capture.activities.launch.tolist()) == (100, [0])


def test_of_a_plain_and_a_suffixed_table_the_one_with_rows_is_read(export: Export, clock: Clock, file: Path) -> None:
    Process(export, clock, 100).thread().launch("kernel")
    export.write(file, SCHEMAS["suffixed"])
    with sqlite3.connect(file) as connection:
        connection.execute(
            "CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL AS SELECT * FROM CUPTI_ACTIVITY_KIND_KERNEL_V3 LIMIT 0"
        )
    assert len(only(read_nsys(file)).activities) == 1


@pytest.mark.parametrize("value", [None, "soon", 1.5, b"\x00"])
def test_a_row_whose_start_is_no_integer_is_skipped_and_counted(
    export: Export, clock: Clock, file: Path, value: object
) -> None:
    thread = Process(export, clock, 100).thread()
    for _ in range(3):
        thread.launch("kernel")
    export.write(file)
    with sqlite3.connect(file) as connection:
        connection.execute("ALTER TABLE CUPTI_ACTIVITY_KIND_KERNEL RENAME TO strict")
        connection.execute("CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL AS SELECT * FROM strict")
        connection.execute("UPDATE CUPTI_ACTIVITY_KIND_KERNEL SET start = ? WHERE rowid = 2", (value,))
    capture = only(read_nsys(file))
    assert capture.activities.start_ns.tolist() == [export.truth[0].start_ns, export.truth[2].start_ns]
    assert notes(capture)[CaveatCode.ROWS_SKIPPED] == 1


@pytest.mark.parametrize("value", ["seven", 1.5, b"\x07", 2**62, -(2**63)])
def test_a_value_of_the_wrong_kind_elsewhere_costs_only_itself(
    export: Export, clock: Clock, file: Path, value: object
) -> None:
    thread = Process(export, clock, 100).thread()
    for _ in range(3):
        thread.launch("kernel")
    export.work[KERNEL][1]["streamId"] = value
    work = only(read_nsys(export.write(file))).activities
    assert work.start_ns.tolist() == [truth.start_ns for truth in export.truth]
    assert work.launch.tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("start", "end"), [(0, 0), (5_000, 4_000), (5, 2**63 - 1), (-(2**63), 5), (1_000, 1_000 + 25 * 3_600 * 10**9)]
)
def test_impossible_times_are_left_out_and_counted(
    export: Export, clock: Clock, file: Path, start: int, end: int
) -> None:
    thread = Process(export, clock, 100).thread()
    for _ in range(2):
        thread.launch("kernel")
    export.work[KERNEL][1] |= {"start": start, "end": end}
    capture = only(read_nsys(export.write(file)))
    assert len(capture.activities) == 1
    found = notes(capture)
    assert found.get(CaveatCode.BAD_TIMESTAMPS, 0) + found.get(CaveatCode.ROWS_SKIPPED, 0) == 1


def test_a_name_that_is_not_utf8_is_kept_with_a_note(export: Export, clock: Clock, file: Path) -> None:
    Process(export, clock, 100).thread().launch("kernel")
    export.write(file)
    with sqlite3.connect(file) as connection:
        connection.execute("UPDATE StringIds SET value = CAST(x'6bff72' AS TEXT) WHERE value = 'kernel'")
    capture = only(read_nsys(file))
    assert capture.names[capture.activities.name[0]] == "k\N{REPLACEMENT CHARACTER}r"
    assert notes(capture)[CaveatCode.INVALID_ENCODING] == 1


# --- files -----------------------------------------------------------------------------------------------


def test_progress_adds_up_to_the_size_of_the_file(export: Export, clock: Clock, file: Path) -> None:
    thread = Process(export, clock, 100).thread()
    for _ in range(1_000):
        thread.launch("kernel")
    told: list[int] = []
    read_nsys(export.write(file), told.append)
    assert sum(told) == file.stat().st_size
    assert min(told) > 0


def test_reading_leaves_the_file_and_its_folder_as_they_were(export: Export, clock: Clock, file: Path) -> None:
    Process(export, clock, 100).thread().launch("kernel")
    export.write(file)
    with sqlite3.connect(file) as connection:
        connection.execute("PRAGMA journal_mode=WAL")
    connection.close()
    before = (hashlib.sha256(file.read_bytes()).digest(), file.stat().st_mtime_ns, os.listdir(file.parent))
    assert len(only(read_nsys(file)).activities) == 1
    assert (hashlib.sha256(file.read_bytes()).digest(), file.stat().st_mtime_ns, os.listdir(file.parent)) == before


def test_a_file_that_somebody_holds_locked_is_read_all_the_same(export: Export, clock: Clock, file: Path) -> None:
    Process(export, clock, 100).thread().launch("kernel")
    export.write(file)
    holder = sqlite3.connect(file, isolation_level=None)
    holder.execute("BEGIN EXCLUSIVE")
    try:
        assert len(only(read_nsys(file)).activities) == 1
    finally:
        holder.close()


def test_rows_that_are_still_in_a_write_ahead_log_are_read_from_a_copy(
    export: Export, clock: Clock, tmp_path: Path
) -> None:
    Process(export, clock, 100).thread().launch("kernel")
    original = export.write(tmp_path / "original.sqlite")
    writer = sqlite3.connect(original, isolation_level=None)
    writer.execute("PRAGMA journal_mode=WAL")
    writer.execute("PRAGMA wal_autocheckpoint=0")
    writer.execute("INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL SELECT * FROM CUPTI_ACTIVITY_KIND_KERNEL")
    folder = tmp_path / "left behind"
    folder.mkdir()
    for suffix in ("", "-wal"):
        (folder / f"export.sqlite{suffix}").write_bytes(Path(f"{original}{suffix}").read_bytes())
    writer.close()
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert len(only(read_nsys(folder / "export.sqlite")).activities) == 2
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_a_name_with_odd_characters_is_a_name(export: Export, clock: Clock, tmp_path: Path) -> None:
    Process(export, clock, 100).thread().launch("kernel")
    file = export.write(tmp_path / "a ?mode=rw#%41 b.sqlite")
    assert len(only(read_nsys(file)).activities) == 1


def test_a_truncated_export_gives_its_whole_rows_and_says_that_it_is_not_complete(
    export: Export, clock: Clock, file: Path
) -> None:
    thread = Process(export, clock, 100).thread()
    for _ in range(20_000):
        thread.launch("kernel")
    export.write(file)
    with sqlite3.connect(file) as connection:
        # The strings first, so that it is the kernels that are cut.
        connection.execute("CREATE TABLE again AS SELECT * FROM CUPTI_ACTIVITY_KIND_KERNEL")
        connection.execute("DROP TABLE CUPTI_ACTIVITY_KIND_KERNEL")
        connection.execute("ALTER TABLE again RENAME TO CUPTI_ACTIVITY_KIND_KERNEL")
        connection.execute("DELETE FROM CUPTI_ACTIVITY_KIND_RUNTIME")
    with sqlite3.connect(file, isolation_level=None) as connection:
        connection.execute("VACUUM")
    size = file.stat().st_size
    with file.open("r+b") as opened:
        opened.truncate(size * 3 // 5)
    capture = only(read_nsys(file))
    assert not capture.complete
    assert CaveatCode.TRUNCATED in notes(capture)
    found = capture.activities.start_ns.tolist()
    assert 1_000 < len(found) < 20_000
    assert found == [truth.start_ns for truth in export.truth[: len(found)]]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"SQLite format 3\0", "damaged SQLite database"),
        (b"SQLite format 3\0" + bytes(4_096), "damaged SQLite database"),
    ],
)
def test_a_file_that_only_begins_like_a_database_is_an_error(file: Path, content: bytes, message: str) -> None:
    file.write_bytes(content)
    with pytest.raises(CaptureError, match=message) as caught:
        read_nsys(file)
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith(str(file))


def test_another_database_is_no_export(file: Path) -> None:
    with sqlite3.connect(file) as connection:
        connection.execute("CREATE TABLE songs (title TEXT)")
    with pytest.raises(CaptureError, match="no nsys export"):
        read_nsys(file)


def test_a_file_that_is_neither_export_nor_report_is_an_error(file: Path) -> None:
    file.write_bytes(b"anything")
    with pytest.raises(CaptureError, match="neither an nsys SQLite export nor an nsys report"):
        read_nsys(file)


def test_a_file_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(CaptureError, match="cannot be read"):
        read_nsys(tmp_path / "nothing.sqlite")


# --- .nsys-rep -------------------------------------------------------------------------------------------


def fake_nsys(folder: Path, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    program = folder / "bin" / "nsys"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")


def test_a_report_is_converted_by_the_nsys_that_is_installed_with_progress(
    export: Export, clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Process(export, clock, 100).thread().launch("kernel")
    prepared = export.write(tmp_path / "prepared.sqlite")
    report = tmp_path / "my report.nsys-rep"
    report.write_bytes(bytes(1_000))
    # nsys export --type sqlite --force-overwrite true --output TARGET REPORT
    script = f'test "$8" = "{report}" || exit 9; echo "[==   ] 40%"; echo "[=====] 100%"; cp "{prepared}" "$7"'
    fake_nsys(tmp_path, script, monkeypatch)
    told: list[int] = []
    capture = only(read_nsys(report, told.append))
    assert (capture.path, len(capture.activities)) == (report, 1)
    assert sum(told) == 1_000
    assert told[0] in (200, 500)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bin", "my report.nsys-rep", "prepared.sqlite"]


def test_a_failing_nsys_is_quoted_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report = tmp_path / "run.nsys-rep"
    report.write_bytes(b"?")
    fake_nsys(tmp_path, 'echo "Importer error:"; echo "no such report"; exit 3', monkeypatch)
    with pytest.raises(
        CaptureError, match=r"failed with status 3 \(Importer error: no such report\): run `nsys export"
    ):
        read_nsys(report)


def test_without_nsys_the_command_to_run_is_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report = tmp_path / "run.nsys-rep"
    report.write_bytes(b"?")
    monkeypatch.setenv("PATH", str(tmp_path))
    command = f"nsys export --type sqlite --force-overwrite true --output {tmp_path}/run.sqlite {report}"
    with pytest.raises(CaptureError) as caught:
        read_nsys(report)
    assert str(caught.value).endswith(f"run `{command}`")


def test_process_ids_survive_their_serialized_form() -> None:
    assert process_id(4_194_303) >> 24 & 0xFFFFFF == 4_194_303
