"""The standard ``OTEL_*`` variables: what to push, whereto and how often.

Endpoints, headers, certificates, compression and timeouts are read by OpenTelemetry's own exporters, resource
attributes by its SDK. Here is the rest. ``OTEL_BSP_MAX_QUEUE_SIZE`` has no meaning for us: the rings are the queue.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, TypeVar

from opentelemetry.sdk.environment_variables import (
    OTEL_BSP_MAX_EXPORT_BATCH_SIZE,
    OTEL_BSP_SCHEDULE_DELAY,
    OTEL_EXPORTER_OTLP_ENDPOINT,
    OTEL_EXPORTER_OTLP_METRICS_TEMPORALITY_PREFERENCE,
    OTEL_EXPORTER_OTLP_PROTOCOL,
    OTEL_METRIC_EXPORT_INTERVAL,
    OTEL_SDK_DISABLED,
)
from opentelemetry.sdk.metrics.export import ConsoleMetricExporter, MetricExporter
from opentelemetry.sdk.trace.export import ConsoleSpanExporter, SpanExporter

from vllm_k25_instrument.export.otel.errors import OtlpError

GRPC: Final = "grpc"
HTTP: Final = "http/protobuf"
_DEFAULT_ENDPOINTS: Final = {GRPC: "http://localhost:4317", HTTP: "http://localhost:4318"}
_EXPORTERS: Final = ("otlp", "console", "none")
_MS_PER_SECOND: Final = 1000

Exporter = TypeVar("Exporter", MetricExporter, SpanExporter)


@dataclass(frozen=True, slots=True)
class Schedule:
    """How often each signal is pushed (seconds), and how many spans one request carries at most."""

    metrics_s: float
    spans_s: float
    batch_spans: int


def read_schedule() -> Schedule:
    """Read the intervals. Raises OtlpError, with one line, on the first wrong value."""
    wanted = _variable(OTEL_EXPORTER_OTLP_METRICS_TEMPORALITY_PREFERENCE, "cumulative")
    if wanted.lower() != "cumulative":
        raise OtlpError(
            f"{OTEL_EXPORTER_OTLP_METRICS_TEMPORALITY_PREFERENCE}={wanted!r}: must be cumulative, as the rings' "
            "counters are (a collector's cumulativetodelta processor makes them deltas)"
        )
    return Schedule(
        metrics_s=_positive(OTEL_METRIC_EXPORT_INTERVAL, 60_000) / _MS_PER_SECOND,
        spans_s=_positive(OTEL_BSP_SCHEDULE_DELAY, 5_000) / _MS_PER_SECOND,
        batch_spans=_positive(OTEL_BSP_MAX_EXPORT_BATCH_SIZE, 512),
    )


def metric_exporter() -> tuple[MetricExporter | None, str]:
    """The exporter of the metrics (None: they are not wanted), and where it pushes. Raises OtlpError, ImportError."""
    kind = _kind("METRICS")
    if kind != "otlp":
        return (ConsoleMetricExporter(out=sys.stdout), kind) if kind == "console" else (None, kind)
    protocol = _protocol("METRICS")
    return _made(_grpc_metrics if protocol == GRPC else _http_metrics), _where("METRICS", protocol)


def span_exporter() -> tuple[SpanExporter | None, str]:
    """The exporter of the spans (None: they are not wanted), and where it pushes. Raises OtlpError, ImportError."""
    kind = _kind("TRACES")
    if kind != "otlp":
        return (ConsoleSpanExporter(out=sys.stdout), kind) if kind == "console" else (None, kind)
    protocol = _protocol("TRACES")
    return _made(_grpc_spans if protocol == GRPC else _http_spans), _where("TRACES", protocol)


def _made(make: Callable[[], Exporter]) -> Exporter:
    try:
        return make()
    except ImportError:
        raise
    except Exception as error:  # of whatever kind: OpenTelemetry has one for each variable
        raise OtlpError(f"OTEL_EXPORTER_OTLP_*: {error}") from None


# One import each: who uses HTTP need not have gRPC installed.


def _grpc_metrics() -> MetricExporter:
    from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter

    return OTLPMetricExporter()


def _http_metrics() -> MetricExporter:
    from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter

    return OTLPMetricExporter()


def _grpc_spans() -> SpanExporter:
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter

    return OTLPSpanExporter()


def _http_spans() -> SpanExporter:
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    return OTLPSpanExporter()


def _variable(name: str, default: str) -> str:
    return os.environ.get(name, "").strip() or default


def _kind(signal: str) -> str:
    if _variable(OTEL_SDK_DISABLED, "false").lower() == "true":
        return "none"
    name = f"OTEL_{signal}_EXPORTER"
    kind = _variable(name, "otlp").lower()
    if kind not in _EXPORTERS:
        raise OtlpError(f"{name}={kind!r}: must be one of: {', '.join(_EXPORTERS)}")
    return kind


def _protocol(signal: str) -> str:
    name = f"OTEL_EXPORTER_OTLP_{signal}_PROTOCOL"
    if not _variable(name, ""):
        name = OTEL_EXPORTER_OTLP_PROTOCOL
    protocol = _variable(name, GRPC)
    if protocol not in _DEFAULT_ENDPOINTS:
        raise OtlpError(f"{name}={protocol!r}: must be one of: {', '.join(_DEFAULT_ENDPOINTS)}")
    return protocol


def _where(signal: str, protocol: str) -> str:
    common = _variable(OTEL_EXPORTER_OTLP_ENDPOINT, _DEFAULT_ENDPOINTS[protocol])
    endpoint = _variable(f"OTEL_EXPORTER_OTLP_{signal}_ENDPOINT", common)
    scheme, separator, rest = endpoint.rpartition("://")
    # Some put a password in front of the host.
    return f"{protocol} to {scheme}{separator}{rest.rpartition('@')[2]}"


def _positive(name: str, default: int) -> int:
    text = _variable(name, str(default))
    if not text.isdecimal() or not 0 < int(text) <= 2**31:
        raise OtlpError(f"{name}={text!r}: must be a whole number above 0")
    return int(text)
