"""Which phase a step is in, from what the scheduler says rather than from token counts."""

from __future__ import annotations

from typing import Any

from vllm_k25_instrument.model import Phase


class PhaseClassifier:
    """Tells decode, prefill and mixed steps apart, from one SchedulerOutput after the other.

    A request prefills while it has no output token yet, so the last chunk of a prompt is prefill even when it
    is one token long. One that was preempted and resumed prefills again until all tokens it had are recomputed.
    """

    def __init__(self) -> None:
        self._recomputing: dict[str, int] = {}

    def classify(self, scheduler_output: Any) -> Phase:
        """The phase of a step; `scheduler_output` is vLLM's v1 SchedulerOutput with at least one token scheduled."""
        cached = scheduler_output.scheduled_cached_reqs
        prefilling = len(scheduler_output.scheduled_new_reqs) + cached.num_output_tokens.count(0)
        if cached.resumed_req_ids or self._recomputing:
            prefilling += self._count_recomputing(scheduler_output, cached)
        if prefilling == 0:
            return Phase.DECODE
        if prefilling >= len(scheduler_output.num_scheduled_tokens):
            return Phase.PREFILL
        return Phase.MIXED

    def _count_recomputing(self, scheduler_output: Any, cached: Any) -> int:
        """How many requests with output tokens are being recomputed in this step."""
        recomputing = self._recomputing
        for req_id in scheduler_output.finished_req_ids:
            recomputing.pop(req_id, None)
        count = 0
        for index, req_id in enumerate(cached.req_ids):
            if req_id in cached.resumed_req_ids:
                recomputing[req_id] = len(cached.all_token_ids.get(req_id, ()))
            target = recomputing.get(req_id)
            if target is None:
                continue
            count += cached.num_output_tokens[index] > 0
            if cached.num_computed_tokens[index] + scheduler_output.num_scheduled_tokens[req_id] >= target:
                del recomputing[req_id]
        return count
