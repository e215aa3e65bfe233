"""Samples -> spans: one per sampled step and rank, and on demand one per range below it.

Times are those of the sample, to the nanosecond. Ids are made of who and which step, not drawn: the ranks of a
tensor-parallel group meet in one trace per step though nobody passes a context between them, and who pushes a ring
twice pushes the same spans twice, not others. Nothing is linked: which requests were in a step is not known here.
"""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import blake2b
from typing import Final

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, TraceFlags
from opentelemetry.util.types import AttributeValue

from vllm_k25_instrument import __version__
from vllm_k25_instrument.model import (
    NO_LAYER,
    NO_PARENT,
    Category,
    Range,
    RankIdentity,
    StepSample,
    category_exclusive_ns,
    exposed_ns,
)

SCOPE: Final = InstrumentationScope("vllm_k25_instrument", __version__)

PREFIX: Final = "vllm_k25."

_TRACE_ID_BYTES: Final = 16
_SPAN_ID_BYTES: Final = 8
_STEP: Final = -1
"""Where a range has its index, a step has this."""
_INT64_MAX: Final = (1 << 63) - 1

Attributes = Mapping[str, AttributeValue]


def trace_id(identity: RankIdentity, step: int) -> int:
    """The id that the spans of a step have in common on all ranks of a tensor-parallel group."""
    where = identity.coordinates
    return _number(_TRACE_ID_BYTES, identity.instance, where.dp, where.pp, step)


def span_id(identity: RankIdentity, sample: StepSample, index: int = _STEP) -> int:
    """The id of a step's span on a rank, or of the span of its `index`-th range."""
    rank = identity.coordinates.global_rank
    return _number(
        _SPAN_ID_BYTES, identity.instance, rank, identity.started_unix_ns, sample.step, sample.start_unix_ns, index
    )


def spans_of(sample: StepSample, identity: RankIdentity, resource: Resource, *, ranges: bool) -> list[ReadableSpan]:
    """The span of a step, and with `ranges` those of its ranges after it.

    Raises ValueError where a number does not fit OTLP's signed 64 bits.
    """
    _check(sample)
    trace = trace_id(identity, sample.step)
    contexts = [_context(trace, span_id(identity, sample))]
    spans = [
        _span(
            f"{sample.phase} step",
            contexts[0],
            None,
            resource,
            step_attributes(sample, identity),
            sample.start_unix_ns,
            sample.duration_ns,
        )
    ]
    if ranges:
        contexts += [_context(trace, span_id(identity, sample, index)) for index in range(len(sample.ranges))]
        for index, (r, exposed) in enumerate(zip(sample.ranges, exposed_ns(sample), strict=True)):
            parent = contexts[0] if r.parent == NO_PARENT else contexts[1 + r.parent]
            name = f"{r.category} {r.detail}" if r.detail else str(r.category)
            start = sample.start_unix_ns + r.start_ns
            attributes = range_attributes(r, exposed)
            spans.append(_span(name, contexts[1 + index], parent, resource, attributes, start, r.duration_ns))
    return spans


def step_attributes(sample: StepSample, identity: RankIdentity) -> Attributes:
    """What is known of a step. The exclusive times, `unattributed` included, add up to the span's duration."""
    where = identity.coordinates
    all_reduces = [r for r in sample.ranges if r.category is Category.ALL_REDUCE]
    attributes: dict[str, AttributeValue] = {
        "step": sample.step,
        "rank": where.global_rank,
        "local_rank": where.local_rank,
        "tp": where.tp,
        "pp": where.pp,
        "dp": where.dp,
        "phase": str(sample.phase),
        "requests": sample.requests,
        "tokens": sample.tokens,
        "padded_tokens": sample.padded_tokens,
        "graph_mode": str(sample.graph_mode),
        "device": identity.device,
        "host_ns": sample.host_ns,
        "gap_ns": sample.gap_ns,
        "overhead_ns": sample.overhead_ns,
        "complete": sample.complete,
        "all_reduce.calls": len(all_reduces),
        "all_reduce.paths": sorted({r.detail for r in all_reduces if r.detail}),
        "all_reduce.bytes": sum(r.bytes for r in all_reduces),
    }
    if where.ep >= 0:
        attributes["ep"] = where.ep
    for category, ns in category_exclusive_ns(sample).items():
        attributes[f"exclusive_ns.{category}"] = ns
    return {PREFIX + name: value for name, value in attributes.items()}


def range_attributes(r: Range, exposed: int) -> Attributes:
    """What is known of a range; `exposed` is its exposed time in ns."""
    attributes: dict[str, AttributeValue] = {
        "category": str(r.category),
        "stream": r.stream,
        "exclusive_ns": exposed,
    }
    if r.detail:
        attributes["detail"] = r.detail
    if r.layer != NO_LAYER:
        attributes["layer"] = r.layer
    if r.bytes:
        attributes["bytes"] = r.bytes
    return {PREFIX + name: value for name, value in attributes.items()}


def _span(
    name: str,
    context: SpanContext,
    parent: SpanContext | None,
    resource: Resource,
    attributes: Attributes,
    start_unix_ns: int,
    duration_ns: int,
) -> ReadableSpan:
    return ReadableSpan(
        name,
        context=context,
        parent=parent,
        resource=resource,
        attributes=attributes,
        start_time=start_unix_ns,
        end_time=start_unix_ns + duration_ns,
        instrumentation_scope=SCOPE,
    )


def _context(trace: int, span: int) -> SpanContext:
    return SpanContext(trace, span, is_remote=False, trace_flags=TraceFlags(TraceFlags.SAMPLED))


def _number(size: int, *parts: object) -> int:
    """A number of `size` bytes that follows from the parts; never 0, which is no valid id."""
    digest = blake2b(repr(parts).encode(), digest_size=size).digest()
    return int.from_bytes(digest, "big") or 1


def _check(sample: StepSample) -> None:
    numbers = [sample.step, sample.start_unix_ns + sample.duration_ns, sample.host_ns, sample.overhead_ns]
    numbers += [sample.start_unix_ns + r.start_ns + r.duration_ns for r in sample.ranges]
    numbers.append(sum(r.bytes for r in sample.ranges))
    if max(numbers) > _INT64_MAX:
        raise ValueError(f"step {sample.step}: {max(numbers)} does not fit 64 bits")
