"""The phase of a step, from vLLM's own SchedulerOutput."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.config.compilation import CUDAGraphMode
from vllm.forward_context import BatchDescriptor
from vllm.v1.core.sched.output import CachedRequestData, SchedulerOutput
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor

from vllm_k25_instrument.hooks.wrappers import describe_dispatch
from vllm_k25_instrument.model import GraphMode, Phase
from vllm_k25_instrument.recorder.phase import PhaseClassifier

pytestmark = pytest.mark.contract

PROMPT = list(range(100))


def scheduled(
    new: dict[str, int] | None = None,
    cached: dict[str, tuple[int, int, int]] | None = None,
    resumed: dict[str, int] | None = None,
    finished: tuple[str, ...] = (),
) -> SchedulerOutput:
    """`new`: id -> tokens; `cached`: id -> (scheduled, computed, output tokens); `resumed`: id -> tokens it had."""
    cached, resumed = cached or {}, resumed or {}
    output = SchedulerOutput.make_empty()
    output.scheduled_new_reqs = [SimpleNamespace(req_id=req_id) for req_id in new or {}]  # type: ignore[misc]
    output.num_scheduled_tokens = {**(new or {}), **{req_id: tokens for req_id, (tokens, _, _) in cached.items()}}
    output.total_num_scheduled_tokens = sum(output.num_scheduled_tokens.values())
    output.scheduled_cached_reqs = CachedRequestData(
        req_ids=list(cached),
        resumed_req_ids=set(resumed),
        new_token_ids=[],
        all_token_ids={req_id: PROMPT[:tokens] for req_id, tokens in resumed.items()},
        new_block_ids=[None] * len(cached),
        num_computed_tokens=[computed for _, computed, _ in cached.values()],
        num_output_tokens=[outputs for _, _, outputs in cached.values()],
    )
    output.finished_req_ids = set(finished)
    return output


def phases(*outputs: SchedulerOutput) -> list[Phase]:
    classifier = PhaseClassifier()
    return [classifier.classify(output) for output in outputs]


def test_a_new_request_prefills_even_with_one_token() -> None:
    assert phases(scheduled(new={"a": 1}), scheduled(new={"a": 500})) == [Phase.PREFILL, Phase.PREFILL]


def test_the_one_token_last_chunk_of_a_prompt_is_prefill() -> None:
    assert phases(
        scheduled(new={"a": 64}), scheduled(cached={"a": (1, 64, 0)}), scheduled(cached={"a": (1, 65, 1)})
    ) == [Phase.PREFILL, Phase.PREFILL, Phase.DECODE]


def test_speculative_decoding_schedules_several_tokens_and_is_decode() -> None:
    assert phases(scheduled(cached={"a": (4, 80, 9), "b": (4, 80, 2)})) == [Phase.DECODE]


def test_prefill_beside_decode_is_mixed() -> None:
    assert phases(
        scheduled(new={"b": 30}, cached={"a": (1, 80, 5)}), scheduled(cached={"a": (1, 81, 6), "b": (1, 30, 0)})
    ) == [Phase.MIXED, Phase.MIXED]


def test_a_resumed_request_prefills_until_all_tokens_it_had_are_recomputed() -> None:
    assert phases(
        scheduled(cached={"a": (40, 0, 7)}, resumed={"a": 90}),
        scheduled(cached={"a": (40, 40, 7)}),
        scheduled(cached={"a": (10, 80, 7), "b": (1, 20, 3)}),
        scheduled(cached={"a": (1, 90, 8), "b": (1, 21, 4)}),
    ) == [Phase.PREFILL, Phase.PREFILL, Phase.MIXED, Phase.DECODE]


def test_a_resumed_request_that_ends_is_forgotten() -> None:
    classifier = PhaseClassifier()
    classifier.classify(scheduled(cached={"a": (40, 0, 7)}, resumed={"a": 90}))
    classifier.classify(scheduled(cached={"b": (1, 20, 3)}, finished=("a",)))
    assert classifier._recomputing == {}


@pytest.mark.parametrize("mode", ["NONE", "PIECEWISE", "FULL"])
def test_both_runners_say_how_a_step_is_dispatched(mode: str) -> None:
    """V1 returns (mode, descriptor, ...), V2 (descriptor, ...)."""
    expected = GraphMode(mode.lower())
    v1: Any = BatchDescriptor(num_tokens=64)
    v2 = BatchExecutionDescriptor(cg_mode=CUDAGraphMode[mode], num_tokens=64, num_reqs=64)
    assert describe_dispatch((CUDAGraphMode[mode], v1, False, None, None)) == (expected, 64, v1)
    assert describe_dispatch((v2, None)) == (expected, 64, v2)


@pytest.mark.parametrize("result", [None, (), (1,), ("FULL", None), (object(), object())])
def test_a_dispatch_of_unknown_shape_tells_nothing(result: Any) -> None:
    assert describe_dispatch(result) is None
