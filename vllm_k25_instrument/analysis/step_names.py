"""What the names of step annotations say: phase, requests, tokens, step number, graph mode.

Formats, as the engines write them:

* ours (:func:`vllm_k25_instrument.markers.step_name`): ``decode step 1234 bs=64 graph=full``
* vLLM until 0.13: ``execute_new_N_cached_M`` (N requests scheduled for the first time, M that were there before)
* vLLM since then: ``execute_context_N(T)_generation_M(T)`` (requests without an output token and their tokens, requests
  with one and theirs)
* vLLM with ``detailed_trace_annotation``: ``execute_T_context_N(sqTsk…sqsq…sqsk…)_generation_M(sqTsk…sqsq…sqsk…)``
* SGLang: ``step[DECODE bs=64]``, ``step[EXTEND bs=2 toks=512]``, ``step[MIXED bs=66 c=2 g=64 …]``, ``step[IDLE]``;
  before that, ``scheduler.run_batch`` around a batch of which nothing more is said
* torch.profiler's ``ProfilerStep#N``
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from vllm_k25_instrument.model import GraphMode, Phase


class StepKind(StrEnum):
    """Who marked the steps, in order of preference where two markers cover equally many kernels."""

    K25 = "k25"
    VLLM = "vllm"
    SGLANG = "sglang"
    PROFILER_STEP = "profiler-step"
    GRAPH_LAUNCHES = "graph-launches"  # inferred from their periodicity: no annotation at all


@dataclass(frozen=True, slots=True)
class StepLabel:
    """What one annotation says of its step. None where it does not say."""

    kind: StepKind
    phase: Phase | None = None
    requests: int | None = None
    tokens: int | None = None
    number: int | None = None
    graph_mode: GraphMode | None = None

    @property
    def idle(self) -> bool:
        """A step that says of itself that nothing was scheduled."""
        return self.requests == 0


_K25: Final = re.compile(r"(decode|prefill|mixed) step(?: (\d{1,18}))? bs=(\d{1,9})(?: graph=(\w+))?")
_VLLM_NEW_CACHED: Final = re.compile(r"execute_new_(\d{1,9})_cached_(\d{1,9})")
_VLLM_CONTEXT: Final = re.compile(
    r"execute(?:_\d+)?_context_(\d{1,9})\((?:sq)?(\d{1,12})[^()]*\)_generation_(\d{1,9})\((?:sq)?(\d{1,12})[^()]*\)"
)
_SGLANG_STEP: Final = re.compile(r"step\[(\w+)(?:\s+([^\]]*))?\]")
_SGLANG_FIELD: Final = re.compile(r"(?<!\w)(\w+)=(\d{1,12})(?!\S)")
_SGLANG_BATCH: Final = re.compile(r"scheduler\.run_batch", re.IGNORECASE)
_PROFILER_STEP: Final = re.compile(r"ProfilerStep#(\d{1,18})")

_SGLANG_PHASES: Final = {
    "DECODE": Phase.DECODE,
    "VERIFY": Phase.DECODE,
    "TARGET_VERIFY": Phase.DECODE,
    "EXTEND": Phase.PREFILL,
    "PREFILL": Phase.PREFILL,
    "SPLIT_PREFILL": Phase.PREFILL,
    "MIXED": Phase.MIXED,
}


def _of_requests(context: int, generation: int) -> Phase | None:
    if not context and not generation:
        return None
    if context and generation:
        return Phase.MIXED
    return Phase.PREFILL if context else Phase.DECODE


def _k25(match: re.Match[str]) -> StepLabel:
    phase, number, requests, graph = match.groups()
    known = graph in tuple(GraphMode)
    return StepLabel(
        StepKind.K25,
        phase=Phase(phase),
        requests=int(requests),
        number=None if number is None else int(number),
        graph_mode=GraphMode(graph) if known else None,
    )


def _vllm_new_cached(match: re.Match[str]) -> StepLabel:
    new, cached = int(match[1]), int(match[2])
    return StepLabel(StepKind.VLLM, phase=_of_requests(new, cached), requests=new + cached)


def _vllm_context(match: re.Match[str]) -> StepLabel:
    context, context_tokens, generation, generation_tokens = (int(text) for text in match.groups())
    return StepLabel(
        StepKind.VLLM,
        phase=_of_requests(context, generation),
        requests=context + generation,
        tokens=context_tokens + generation_tokens,
    )


def _sglang_step(match: re.Match[str]) -> StepLabel | None:
    mode = match[1].upper()
    if mode.startswith("DRAFT"):  # a draft model's forward inside a step of the model that is served
        return None
    fields = {name: int(value) for name, value in _SGLANG_FIELD.findall(match[2] or "")}
    requests = 0 if mode == "IDLE" else fields.get("bs")
    phase = _SGLANG_PHASES.get(mode)
    tokens = fields.get("toks")
    if mode == "MIXED" and "ext" in fields and "dec" in fields:
        tokens = fields["ext"] + fields["dec"]
    elif phase is Phase.DECODE and mode == "DECODE":
        tokens = requests
    return StepLabel(StepKind.SGLANG, phase=phase, requests=requests, tokens=tokens)


def _sglang_batch(match: re.Match[str]) -> StepLabel:
    return StepLabel(StepKind.SGLANG)


def _profiler_step(match: re.Match[str]) -> StepLabel:
    return StepLabel(StepKind.PROFILER_STEP, number=int(match[1]))


_FORMATS: Final[tuple[tuple[re.Pattern[str], Callable[[re.Match[str]], StepLabel | None]], ...]] = (
    (_K25, _k25),
    (_VLLM_NEW_CACHED, _vllm_new_cached),
    (_VLLM_CONTEXT, _vllm_context),
    (_SGLANG_STEP, _sglang_step),
    (_SGLANG_BATCH, _sglang_batch),
    (_PROFILER_STEP, _profiler_step),
)


def parse_step_name(name: str) -> StepLabel | None:
    """What an annotation of this name says of its step; None where it marks no step."""
    for pattern, label in _FORMATS:
        match = pattern.fullmatch(name)
        if match is not None:
            return label(match)
    return None
