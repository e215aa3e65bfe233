"""What becomes of the ranks' measurements, and of ranks that die or hang."""

from __future__ import annotations

import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from vllm_k25_instrument.bench.all_reduce import AllReducePlan, combine  # noqa: E402
from vllm_k25_instrument.bench.document import BenchMachine, Skew  # noqa: E402
from vllm_k25_instrument.bench.errors import BenchError  # noqa: E402
from vllm_k25_instrument.bench.paths import find_paths, taken_path  # noqa: E402
from vllm_k25_instrument.bench.rank import Case, Plan, RankResult  # noqa: E402
from vllm_k25_instrument.bench.spawn import run_ranks  # noqa: E402
from vllm_k25_instrument.limits.gpus import known_links  # noqa: E402

ROOT = Path(__file__).parents[2]
MACHINE = BenchMachine("cpu", "p", "v", "t", 1, ranks=2)
PLAN = AllReducePlan("Kimi-K2.5", 7168, 2, (1,), 122, 50, 1.0, 10.0)


def case(path: str, durations: list[int], entries: list[int] | None = None, calls: int = 1, tokens: int = 1) -> Case:
    first = entries or [0] * len(durations)
    return Case(path, tokens, calls, False, [[at] * calls for at in first], durations)


def results(*ranks: list[Case], taken: str = "cpu_shm") -> list[RankResult]:
    return [RankResult(cases, {1: taken}, [], 1) for cases in ranks]


def test_the_transfer_is_the_quickest_ranks_and_the_rest_is_waiting():
    quick = [100, 110, 120, 130, 140, 150]
    slow = [ns + 40 for ns in quick]
    # The second rank comes 40 ns after the first, which waits for it.
    document = combine(PLAN, MACHINE, None, results([case("cpu_shm", slow)], [case("cpu_shm", quick, [40] * 6)]))
    (row,) = document.rows
    assert (row.median_ns, row.low_ns, row.high_ns, row.repeats) == (125, 100, 150, 6)
    assert row.skew == Skew(last_ns=40, by_rank_ns=(0, 40), wait_by_rank_ns=(40, 0))
    assert (row.bytes, row.floor_ns) == (14_336, None)  # one token: 7168 x 2
    assert row.floor_reason
    assert row.achieved_bytes_per_s == pytest.approx(14_336 / 125e-9)


def test_a_burst_counts_all_its_bytes_and_its_floor_is_of_all_its_calls():
    burst = [case("pynccl", [6_810_000] * 6, calls=122)]
    link = known_links()["pcie5x16"]
    plan = AllReducePlan("Kimi-K2.5", 7168, 8, (1,), 122, 50, 1.0, 10.0)
    document = combine(plan, BenchMachine("cuda", "g", "v", "t", 1, ranks=8), link, results(*[burst] * 8))
    (row,) = document.rows
    assert (row.calls, row.bytes) == (122, 122 * 14_336)
    # Of eight ranks, one shot: 7 x 14,336 bytes at 63.015 GB/s and a hop of 1 us: 2,592.5 ns; two shots: 2 x 7/8 x
    # 14,336 bytes and two hops: 2,398.1 ns, which is less. 122 of them: 292,571 ns.
    assert row.floor_ns == pytest.approx(292_571, abs=2)
    assert row.ratio_to_floor == pytest.approx(6_810_000 / 292_571, rel=1e-4)


def test_the_winner_stands_beside_what_vllm_takes():
    cases = [case("custom", [1_125_000 + n for n in range(6)]), case("pynccl", [78_000 + n for n in range(6)])]
    (choice,) = combine(PLAN, MACHINE, None, results(cases, cases, taken="custom")).choices
    assert (choice.winner, choice.winner_ns, choice.decided) == ("pynccl", 78_002, True)
    assert (choice.vllm_takes, choice.vllm_ns) == ("custom", 1_125_002)


def test_a_win_within_the_intervals_is_not_called_decided():
    cases = [case("a", [10, 11, 12, 13, 14, 15]), case("b", [11, 12, 13, 14, 15, 16])]
    (choice,) = combine(PLAN, MACHINE, None, results(cases, cases)).choices
    assert (choice.winner, choice.decided) == ("a", False)
    assert choice.vllm_ns is None


def test_ranks_that_measured_different_things_are_refused():
    with pytest.raises(BenchError, match="did not measure the same paths"):
        combine(PLAN, MACHINE, None, results([case("a", [1] * 6)], [case("b", [1] * 6)]))
    with pytest.raises(BenchError, match="cannot be lined up"):
        combine(PLAN, MACHINE, None, results([case("a", [1] * 6)], [case("a", [1] * 7)]))


def test_cores_are_shared_out_and_a_burst_of_one_is_measured_once():
    plan = PLAN.of_ranks((0, 2, 4, 6, 8))
    assert plan.cores == ((0, 2), (4, 6))
    assert plan.bursts == (1, 122)
    assert AllReducePlan("m", 8, 2, (1,), 1, 6, 1.0, 1.0).of_ranks(()).bursts == (1,)


# --- processes --------------------------------------------------------------------------------------------


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Runs two stand-ins that behave as told, and asserts that none of them is left."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("K25_TEST_PIDS", str(tmp_path))

    def run(behaviour: str, timeout: float = 60.0) -> list[RankResult]:
        monkeypatch.setenv("K25_TEST_RANK", behaviour)
        plan = Plan(2, 8, (1,), (1,), 6, 0.1, timeout, os.getpid())
        try:
            return run_ranks(plan, lambda text: None, module="tests.bench_ranks")
        finally:
            pids = [int(file.name) for file in tmp_path.iterdir()]
            assert len(pids) == 2
            assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]

    return run


def test_ranks_that_end_well_are_heard_in_their_order(ranks):
    assert [result.threads for result in ranks("fine")] == [1, 2]


def test_a_rank_that_raises_ends_them_all_and_is_quoted(ranks):
    with pytest.raises(BenchError, match=r"^rank 1 ended with 1 while reducing: ValueError: no such buffer$"):
        ranks("raises")


def test_a_rank_that_is_killed_ends_them_all(ranks):
    with pytest.raises(BenchError, match=r"^rank 1 was ended by signal 9 while reducing"):
        ranks("dies")


def test_a_rank_that_ends_without_a_result_is_named(ranks):
    with pytest.raises(BenchError, match=r"^rank 1 ended without a result"):
        ranks("silent")


def test_ranks_that_hang_are_given_up(ranks):
    began = time.monotonic()
    with pytest.raises(BenchError, match="rank 0, 1 still running after 3 s without progress while reducing"):
        ranks("hangs", timeout=3.0)
    assert time.monotonic() - began < 30


# --- vLLM's paths, where there is no GPU to have them -------------------------------------------------------


class FakeCommunicator:
    """What one of ``CudaCommunicator``'s attributes is like: it takes tensors of up to so many numbers."""

    def __init__(self, most: int, disabled: bool = False) -> None:
        self.most, self.disabled, self.calls = most, disabled, 0

    def should_custom_ar(self, tensor: Any) -> bool:
        return tensor.numel() <= self.most

    def custom_all_reduce(self, tensor: Any) -> Any:
        self.calls += 1
        return tensor

    def all_reduce(self, tensor: Any) -> Any:
        self.calls += 1
        return tensor


class CudaCommunicator:
    """vLLM's order, of two paths."""

    def __init__(self, ca_comm: FakeCommunicator, pynccl_comm: FakeCommunicator) -> None:
        self.ca_comm, self.pynccl_comm = ca_comm, pynccl_comm
        self.qr_comm = None

    def all_reduce(self, tensor: Any) -> Any:
        if not self.ca_comm.disabled and self.ca_comm.should_custom_ar(tensor):
            return self.ca_comm.custom_all_reduce(tensor)
        return self.pynccl_comm.all_reduce(tensor)


def cuda_group(**options: Any) -> Any:
    communicator = CudaCommunicator(FakeCommunicator(100, **options), FakeCommunicator(10**9))
    return SimpleNamespace(device_communicator=communicator, device_group=None)


def test_the_paths_are_those_that_the_communicator_has_and_has_not_disabled():
    assert [str(path.name) for path in find_paths(cuda_group())] == ["custom", "pynccl", "torch_distributed"]
    assert [str(path.name) for path in find_paths(cuda_group(disabled=True))] == ["pynccl", "torch_distributed"]


def test_a_path_says_which_tensors_it_takes():
    custom, pynccl, _ = find_paths(cuda_group())
    assert custom.takes(torch.zeros(100))
    assert not custom.takes(torch.zeros(101))
    assert pynccl.takes(torch.zeros(101))


def test_vllms_choice_is_watched_and_nothing_stays_in_its_way():
    group = cuda_group()
    assert [str(taken_path(group, torch.zeros(n))) for n in (100, 101)] == ["custom", "pynccl"]
    communicator = group.device_communicator
    assert communicator.ca_comm.calls == communicator.pynccl_comm.calls == 1
    assert "custom_all_reduce" not in vars(communicator.ca_comm)
