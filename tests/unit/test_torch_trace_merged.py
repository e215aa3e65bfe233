"""Several processes in one file: who did what, though their correlation ids are the same."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.traces import PLAIN, Call, Dress, HostRange, Rank, Work, container, decode_rank, document, encode, rows
from vllm_k25_instrument.analysis.capture import NO_RANK, Capture
from vllm_k25_instrument.analysis.torch_trace import read_torch_trace
from vllm_k25_instrument.report.caveats import CaveatCode


def read(folder: Path, data: bytes, name: str = "merged.json") -> list[Capture]:
    path = folder / name
    path.write_bytes(data)
    return read_torch_trace(path)


def codes(capture: Capture) -> set[CaveatCode]:
    return {note.code for note in capture.notes}


def busy_rank(pid: int, device: int, *, shift_ns: int = 0, scale: int = 1, name: str = "kernel") -> Rank:
    """Three graph launches with two kernels each, whose names say which launch they belong to."""
    calls = tuple(
        Call(
            "cudaGraphLaunch",
            at := 1_000_000 + 100_000 * n + shift_ns,
            5_000,
            (
                Work(f"{name} {n}", at + 10_000, 1_000 * scale),
                Work(f"{name} {n}", at + 20_000, 2_000 * scale),
            ),
        )
        for n in range(3)
    )
    return Rank(calls, (HostRange("step", 900_000 + shift_ns, 900_000),), pid=pid, device=device)


def test_interleaved_ranks_with_the_same_correlation_ids_are_told_apart(tmp_path: Path) -> None:
    merged = document([busy_rank(100, 0), busy_rank(200, 1, shift_ns=3_000, scale=10, name="other")])
    first, second = read(tmp_path, encode(merged))
    assert [(c.process, c.device) for c in (first, second)] == [(100, 0), (200, 1)]
    assert int(first.activities.duration_ns.sum()) == 9_000
    assert int(second.activities.duration_ns.sum()) == 90_000
    for capture, start in ((first, 1_000_000), (second, 1_003_000)):
        assert capture.activities.launch.tolist() == [0, 0, 1, 1, 2, 2]
        assert capture.launches.start_ns.tolist() == [start, start + 100_000, start + 200_000]
        assert len(capture.annotations) == 1


def test_devices_are_not_given_by_their_order_but_by_their_launches(tmp_path: Path) -> None:
    merged = document([busy_rank(100, 1), busy_rank(200, 0, shift_ns=50_000_000)])
    captures = read(tmp_path, encode(merged))
    assert {(c.process, c.device) for c in captures} == {(100, 1), (200, 0)}
    assert all((c.activities.launch >= 0).all() for c in captures)


def test_devices_that_nothing_tells_apart_go_by_the_order_of_the_file_with_a_note(tmp_path: Path) -> None:
    events = rows(busy_rank(100, 1)) + rows(busy_rank(200, 0, scale=2))
    captures = read(tmp_path, encode(container(events, Rank())))
    assert {(c.process, c.device) for c in captures} == {(100, 1), (200, 0)}
    assert all("in the order in which they appear" in " ".join(n.message for n in c.notes) for c in captures)


def test_ranks_that_nobody_names_get_their_devices_numbers_with_a_note(tmp_path: Path) -> None:
    captures = read(tmp_path, encode(document([busy_rank(100, 0), busy_rank(200, 1, shift_ns=3_000)])))
    assert [c.rank for c in captures] == [0, 1]
    assert all(CaveatCode.RANK_UNKNOWN in codes(c) for c in captures)


def test_a_process_is_named_after_its_rank(tmp_path: Path) -> None:
    events = rows(busy_rank(100, 1)) + rows(busy_rank(200, 0, shift_ns=50_000_000))
    for event in events:
        if event.get("name") == "process_name":
            event["args"] = {"name": f"VLLM::Worker_TP{7 if event['pid'] == 100 else 3}"}
    captures = read(tmp_path, encode(container(events, Rank(world_size=8))))
    assert {c.process: (c.rank, c.device) for c in captures} == {100: (7, 1), 200: (3, 0)}
    assert all(CaveatCode.RANK_UNKNOWN not in codes(c) for c in captures)


def test_sglang_marks_each_process_id_with_its_rank(tmp_path: Path) -> None:
    # All ranks see their GPU as device 0, and may even have one process id.
    ranks = [busy_rank(100, 0, scale=n + 1) for n in range(4)]
    merged = document(ranks, PLAIN, prefixes=[f"[DP{n // 2:02d}-TP{n % 2:02d}]" for n in range(4)])
    captures = read(tmp_path, encode(merged))
    assert sorted((c.rank, int(c.activities.duration_ns.sum())) for c in captures) == [
        (0, 9_000),
        (1, 18_000),
        (2, 27_000),
        (3, 36_000),
    ]
    assert all((c.activities.launch >= 0).all() for c in captures)


def test_a_kernel_whose_launch_is_missing_is_not_given_to_the_other_process(tmp_path: Path) -> None:
    events = [
        event
        for event in rows(busy_rank(100, 0))
        if not (event.get("name") == "cudaGraphLaunch" and event["args"]["correlation"] == 51)  # type: ignore[index]
    ]
    events += rows(busy_rank(200, 1, shift_ns=3_000))
    first, second = read(tmp_path, encode(container(events, Rank())))
    assert first.activities.launch.tolist() == [0, 0, -1, -1, 1, 1]
    assert second.activities.launch.tolist() == [0, 0, 1, 1, 2, 2]


def test_two_processes_on_one_device_are_split_with_a_note(tmp_path: Path) -> None:
    first, second = busy_rank(100, 0), busy_rank(200, 0, shift_ns=50_000_000)
    captures = read(tmp_path, encode(document([first, second])))
    assert sorted((c.process, len(c.activities)) for c in captures) == [(100, 6), (200, 6)]
    assert {c.rank for c in captures} == {NO_RANK}
    assert all(CaveatCode.RANK_UNKNOWN in codes(c) for c in captures)


def test_a_process_on_two_devices_is_two_captures_and_its_launches_count_once(tmp_path: Path) -> None:
    one = busy_rank(100, 0)
    other = Rank((Call("cudaMemcpyAsync", 2_000_000, 100, (Work("Memcpy", 2_001_000, 5),)),), pid=100, device=3)
    other = Rank(**{**other.__dict__, "first_correlation": 90})
    captures = read(tmp_path, encode(container(rows(one) + rows(other), Rank())))
    assert [(c.process, c.device, len(c.activities)) for c in captures] == [(100, 0, 6), (100, 3, 1)]
    assert sum(len(c.launches) for c in captures) == 4
    assert all((c.activities.launch >= 0).all() for c in captures)


def test_a_process_that_launched_in_vain_is_shown_beside_one_that_did_not(tmp_path: Path) -> None:
    blind = Rank(tuple(Call(call.name, call.start_ns, call.duration_ns) for call in busy_rank(200, 1).calls), pid=200)
    captures = read(tmp_path, encode(document([busy_rank(100, 0), blind])))
    by_process = {c.process: c for c in captures}
    assert len(by_process[100].activities) == 6
    assert CaveatCode.LAUNCHES_WITHOUT_KERNELS in codes(by_process[200])


def test_an_id_used_twice_in_one_process_joins_the_launch_before_it(tmp_path: Path) -> None:
    calls = tuple(
        Call("cudaLaunchKernel", at, 500, (Work(f"k{at}", at + 1_000, 100),)) for at in (1_000_000, 5_000_000)
    )
    early, late = Rank((calls[0],)), Rank((calls[1],))
    (capture,) = read(tmp_path, encode(container(rows(early) + rows(late), Rank())))
    assert capture.activities.launch.tolist() == [0, 1]


@pytest.mark.parametrize(
    ("name", "rank"),
    [
        ("x-rank-3.17.pt.trace.json", 3),
        ("1712-TP-2.trace.json.gz", 2),
        ("dp0_pp0_tp1_dcp0_ep1_rank5.1.pt.trace.json", 5),
        ("worker.json", NO_RANK),
    ],
)
def test_where_the_file_names_no_rank_its_name_may(tmp_path: Path, name: str, rank: int) -> None:
    data = encode(document([decode_rank()])).replace(b'"rank": 0, "world_size": 1', b'"backend": "nccl"')
    (capture,) = read(tmp_path, data, name)
    assert (capture.rank, capture.world_size) == (rank, 0)


def test_the_rank_in_the_file_wins_over_its_name(tmp_path: Path) -> None:
    (capture,) = read(tmp_path, encode(document([decode_rank(rank=Rank(rank=6))])), "rank-3.json")
    assert capture.rank == 6


@pytest.mark.parametrize("info", [b"null", b"[]", b'"x"', b'{"rank": "one", "world_size": -1}', b'{"rank": true}'])
def test_distributed_info_of_another_shape_is_no_rank(tmp_path: Path, info: bytes) -> None:
    data = encode(document([decode_rank()]))
    data = data.replace(b'{"backend": "nccl", "rank": 0, "world_size": 1}', info)
    (capture,) = read(tmp_path, data, "trace.json")
    assert (capture.rank, capture.world_size) == (NO_RANK, 0)


def test_traces_listed_in_one_file_keep_their_own_clock_and_rank(tmp_path: Path) -> None:
    listed = [document([decode_rank(n + 1, rank=Rank(rank=n, world_size=2))], Dress()) for n in range(2)]
    captures = read(tmp_path, encode({"traces": listed}))
    assert [(c.rank, int(c.activities.duration_ns.sum())) for c in captures] == [(0, 38_000), (1, 76_000)]
    assert all(c.clock_base_ns == 1_767_225_600_000_000_000 for c in captures)
