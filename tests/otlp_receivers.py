"""Receivers of OTLP for the tests: a real gRPC server and a real HTTP server, with the protocol's own messages."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import grpc
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2 as metrics_pb
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2_grpc as metrics_grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as trace_pb
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as trace_grpc

from vllm_k25_instrument.model import NS_PER_SECOND

Answer = int | grpc.StatusCode | float | None
"""What a receiver does: takes it (None), refuses with a status, or (a float) takes that many seconds."""


class Received:
    """What a receiver has got: whole requests, in order."""

    def __init__(self, endpoint: str) -> None:
        self.endpoint = endpoint
        self.traces: list[trace_pb.ExportTraceServiceRequest] = []
        self.metrics: list[metrics_pb.ExportMetricsServiceRequest] = []
        self.headers: list[dict[str, str]] = []
        self.answer: Answer = None
        self.tries = 0
        self.released = threading.Event()

    def take(self, request, headers) -> Answer:
        self.tries += 1
        answer = self.answer
        if isinstance(answer, float):
            self.released.wait(answer)
            answer = None
        if answer is None:
            (self.traces if isinstance(request, trace_pb.ExportTraceServiceRequest) else self.metrics).append(request)
            self.headers.append(headers)
        return answer

    @property
    def spans(self):
        """Every span, with the resource that it is of."""
        return [
            (span, resource.resource)
            for request in self.traces
            for resource in request.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]

    @property
    def newest_metrics(self):
        """The metrics of the newest request, by name."""
        found = [
            metric
            for resource in self.metrics[-1].resource_metrics
            for scope in resource.scope_metrics
            for metric in scope.metrics
        ]
        assert len({metric.name for metric in found}) == len(found), "a metric that appears twice"
        return {metric.name: metric for metric in found}


def attributes(of) -> dict[str, object]:
    """The attributes of a span, a data point or a resource."""
    return {item.key: _value(item.value) for item in of.attributes}


def _value(value):
    kind = value.WhichOneof("value")
    return [_value(v) for v in value.array_value.values] if kind == "array_value" else getattr(value, kind)


@contextmanager
def grpc_receiver() -> Iterator[Received]:
    received = Received("")

    class Traces(trace_grpc.TraceServiceServicer):
        def Export(self, request, context):  # noqa: N802 (the protocol's name)
            return _answer_grpc(received, request, context, trace_pb.ExportTraceServiceResponse())

    class Metrics(metrics_grpc.MetricsServiceServicer):
        def Export(self, request, context):  # noqa: N802
            return _answer_grpc(received, request, context, metrics_pb.ExportMetricsServiceResponse())

    server = grpc.server(ThreadPoolExecutor(4))
    trace_grpc.add_TraceServiceServicer_to_server(Traces(), server)
    metrics_grpc.add_MetricsServiceServicer_to_server(Metrics(), server)
    received.endpoint = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        yield received
    finally:
        received.released.set()
        server.stop(None).wait()


def _answer_grpc(received, request, context, response):
    answer = received.take(request, dict(context.invocation_metadata()))
    if answer is not None:
        context.abort(answer, "refused")
    return response


@contextmanager
def http_receiver() -> Iterator[Received]:
    received = Received("")
    messages = {
        "/v1/traces": trace_pb.ExportTraceServiceRequest,
        "/v1/metrics": metrics_pb.ExportMetricsServiceRequest,
    }

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers["Content-Length"]))
            request = messages[self.path].FromString(body)
            answer = received.take(request, {key.lower(): value for key, value in self.headers.items()})
            self.send_response(200 if answer is None else answer)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    received.endpoint = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield received
    finally:
        received.released.set()
        server.shutdown()
        server.server_close()
        thread.join()


RECEIVERS = {"grpc": grpc_receiver, "http/protobuf": http_receiver}


def nanoseconds(seconds: float) -> int:
    return round(seconds * NS_PER_SECOND)


def free_port() -> int:
    """A port that nobody listens on."""
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def elapsed(work) -> float:
    begin = time.monotonic()
    work()
    return time.monotonic() - begin
