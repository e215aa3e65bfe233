"""Where a worker stands, from what vLLM tells it of the parallel groups."""

from __future__ import annotations

from types import SimpleNamespace as Some
from typing import Any

import pytest

from vllm_k25_instrument.model import RankCoordinates
from vllm_k25_instrument.worker import coordinates_of, engine_of


def config(*, tp: int = 1, pp: int = 1, dp: int = 1, dp_rank: int = 0, **more: Any) -> Any:
    parallel = Some(
        tensor_parallel_size=tp, pipeline_parallel_size=pp, data_parallel_size=dp, data_parallel_rank=dp_rank, **more
    )
    return Some(parallel_config=parallel)


def world(*, dp: int = 1, **sizes: int) -> list[RankCoordinates]:
    """All workers of a server, replica by replica."""
    ranks = sizes.get("tp", 1) * sizes.get("pp", 1) * sizes.get("prefill_context_parallel_size", 1)
    return [
        coordinates_of(config(dp=dp, dp_rank=replica, data_parallel_index=replica, **sizes), rank, rank)
        for replica in range(dp)
        for rank in range(ranks)
    ]


@pytest.mark.parametrize(
    "sizes", [{"tp": 8}, {"pp": 2}, {"tp": 2, "pp": 2}, {"dp": 2}, {"tp": 2, "pp": 2, "dp": 2}, {"tp": 4, "dp": 2}]
)
def test_every_worker_has_a_global_rank_of_its_own_and_they_are_as_many_as_the_world(sizes: dict[str, int]) -> None:
    found = world(**sizes)
    assert [c.global_rank for c in found] == list(range(len(found)))
    assert {c.world_size for c in found} == {len(found)}
    assert len({(c.dp, c.pp, c.tp) for c in found}) == len(found)


def test_tensor_parallelism_is_innermost_then_pipeline_then_data() -> None:
    found = world(tp=2, pp=2, dp=2)
    assert [(c.dp, c.pp, c.tp) for c in found] == [(d, p, t) for d in (0, 1) for p in (0, 1) for t in (0, 1)]


def test_the_experts_are_spread_over_the_data_and_tensor_parallel_ranks_of_a_stage() -> None:
    assert [c.ep for c in world(tp=2, dp=2, enable_expert_parallel=True)] == [0, 1, 2, 3]
    assert [c.ep for c in world(tp=2, pp=2, enable_expert_parallel=True)] == [0, 1, 0, 1]
    assert {c.ep for c in world(tp=2, enable_expert_parallel=False)} == {-1}


def test_replicas_of_a_dense_model_are_told_apart_though_vllm_tells_each_that_it_is_the_only_one() -> None:
    alone = [
        coordinates_of(config(tp=2, dp=1, dp_rank=0, data_parallel_index=index), rank, rank)
        for index in (0, 1)
        for rank in (0, 1)
    ]
    assert [c.global_rank for c in alone] == [0, 1, 2, 3]
    assert [c.dp for c in alone] == [0, 0, 1, 1]
    assert max(c.world_size for c in alone) == 4


def test_a_vllm_without_an_index_has_the_rank() -> None:
    assert coordinates_of(config(dp=2, dp_rank=1), 0, 0).global_rank == 1


def test_the_replicas_of_an_engine_are_one_engine_and_another_is_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    ids = [engine_of(Some(instance_id=name)) for name in ("3f2a1", "3f2a1_dp0", "3f2a1_dp1", "77b0c")]
    assert ids == ["3f2a1", "3f2a1", "3f2a1", "77b0c"]


def test_the_ranks_that_torchrun_started_are_one_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert engine_of(Some(instance_id="3f2a1")) == engine_of(Some(instance_id="77b0c"))
