"""A collector that is away, slow or refusing costs a counted drop, and nothing else."""

from __future__ import annotations

import gc
import logging
import os
import time
import tracemalloc
import urllib.request

import grpc
import pytest

from tests.export_rings import STEP_NS, make_ring
from tests.exposition import our_samples, value_of
from tests.otlp_receivers import RECEIVERS, attributes, elapsed, free_port, grpc_receiver
from tests.samples import pack, wait_for
from vllm_k25_instrument.export.otel.push import FLUSH_S, SpanPump
from vllm_k25_instrument.export.otel.start import open_pusher
from vllm_k25_instrument.export.server import serving
from vllm_k25_instrument.model import Category, GraphMode, Phase, Range, StepSample
from vllm_k25_instrument.ring import RingLayout

PROMPT_S = FLUSH_S + 1.5
ROOMY = RingLayout(slots=1024, slot_bytes=1024)
REFUSALS = [
    ("grpc", grpc.StatusCode.UNAVAILABLE),
    ("grpc", grpc.StatusCode.INVALID_ARGUMENT),
    ("grpc", grpc.StatusCode.UNAUTHENTICATED),
    ("http/protobuf", 503),
    ("http/protobuf", 400),
]


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    """No variables but these: short intervals, and a short time-out."""
    for name in [name for name in os.environ if name.startswith("OTEL_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")
    monkeypatch.setenv("OTEL_METRIC_EXPORT_INTERVAL", "20")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "0.3")


def point_to(monkeypatch, protocol: str, endpoint: str) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", protocol)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", endpoint)


def a_step(step: int) -> StepSample:
    ranges = tuple(Range(Category.ALL_REDUCE, 100 * n, 50, bytes=14_336) for n in range(20))
    return StepSample(step, Phase.DECODE, 1, 1, 1, GraphMode.FULL, 1_764_400_000_000_000_000 + step, 12_000, ranges)


class Server:
    """A ring and how many steps it has seen."""

    def __init__(self, folder, layout=ROOMY) -> None:
        self.writer = make_ring(folder, layout=layout)
        self.steps = 0

    def work(self, steps: int = 1) -> None:
        for _ in range(steps):
            self.writer.append(pack(a_step(self.steps), ("",)))
            self.writer.totals.add_step(0, STEP_NS)
            self.steps += 1


@pytest.mark.parametrize("protocol", RECEIVERS)
def test_a_collector_that_is_down_is_a_counted_drop_and_one_line(tmp_path, monkeypatch, caplog, protocol):
    caplog.set_level(logging.INFO)
    endpoint = f"http://127.0.0.1:{free_port()}"
    point_to(monkeypatch, protocol, endpoint)
    server = Server(tmp_path / "server")
    pusher = open_pusher(tmp_path, history=True)
    metrics, spans = pusher.deliveries
    with pusher:
        for dropped in (1, 2, 3):
            server.work()
            wait_for(lambda dropped=dropped: spans.lost >= dropped)
        wait_for(lambda: metrics.lost > 0)
        begin = time.monotonic()
    assert time.monotonic() - begin < PROMPT_S
    assert (metrics.sent, spans.sent, spans.lost) == (0, 0, 3)
    warnings = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(warnings) == 2, "one per signal, however often it was tried"
    assert all(f" by {protocol} to {endpoint} fails (" in warning and "\n" not in warning for warning in warnings)
    assert protocol != "grpc" or all("UNAVAILABLE" in warning for warning in warnings)
    assert f"K25: OTLP: {pusher.accounts}" in caplog.messages


@pytest.mark.parametrize(("protocol", "refusal"), REFUSALS)
def test_a_refusal_is_a_counted_drop_and_the_collector_is_asked_again(tmp_path, monkeypatch, caplog, protocol, refusal):
    caplog.set_level(logging.INFO)
    server = Server(tmp_path / "server")
    with RECEIVERS[protocol]() as receiver:
        receiver.answer = refusal
        point_to(monkeypatch, protocol, receiver.endpoint)
        with open_pusher(tmp_path, history=True) as pusher:
            metrics, spans = pusher.deliveries
            server.work(5)
            wait_for(lambda: spans.lost > 0 and metrics.lost > 0)
            receiver.answer = None
            server.work(7)
            wait_for(lambda: spans.sent + spans.lost == 12 and metrics.sent > 0)
            wait_for(lambda: not spans.failing or spans.sent == 0)
    assert len(receiver.spans) == spans.sent
    assert sum("pushing spans" in message and " fails (" in message for message in caplog.messages) == 1
    dropped = {
        (attributes(point)["signal"], attributes(point)["reason"]): point.as_int
        for point in receiver.newest_metrics["vllm_k25_otlp_dropped_total"].sum.data_points
    }
    assert dropped["spans", "failed"] == spans.lost, "the collector learns of it when it is back"
    assert any("pushing metrics" in message and "works again" in message for message in caplog.messages)


@pytest.mark.parametrize("protocol", RECEIVERS)
def test_a_slow_collector_holds_up_neither_the_other_signal_nor_a_scrape_nor_the_end(tmp_path, monkeypatch, protocol):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "30")
    server = Server(tmp_path / "server")
    server.work(3)
    with RECEIVERS[protocol]() as receiver, RECEIVERS[protocol]() as slow:
        slow.answer = 60.0
        point_to(monkeypatch, protocol, receiver.endpoint)
        path = "/v1/traces" if protocol == "http/protobuf" else ""
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", slow.endpoint + path)
        pusher = open_pusher(tmp_path, history=True)
        with serving(tmp_path, "127.0.0.1", 0, [pusher]) as url:
            pusher.__enter__()
            wait_for(lambda: slow.tries == 1)
            pushes = len(receiver.metrics)
            wait_for(lambda: len(receiver.metrics) > pushes + 3)
            begin = time.monotonic()
            with urllib.request.urlopen(url, timeout=10) as answer:
                text = answer.read().decode()
            assert time.monotonic() - begin < 2
            assert value_of(text, "vllm_k25_steps_total", rank="0", phase="decode") == 3
            assert value_of(text, "vllm_k25_otlp_sent_total", signal="metrics") > 0
            assert elapsed(pusher.close) < PROMPT_S


@pytest.mark.parametrize("protocol", RECEIVERS)
def test_a_collector_that_answers_too_late_has_not_answered(tmp_path, monkeypatch, protocol):
    server = Server(tmp_path / "server")
    with RECEIVERS[protocol]() as receiver:
        receiver.answer = 20.0
        point_to(monkeypatch, protocol, receiver.endpoint)
        with open_pusher(tmp_path, history=True) as pusher:
            spans = pusher.deliveries[1]
            for dropped in (1, 2):
                server.work()
                wait_for(lambda dropped=dropped: spans.lost >= dropped)
            assert spans.sent == 0
            begin = time.monotonic()
        assert time.monotonic() - begin < PROMPT_S


@pytest.mark.parametrize("protocol", RECEIVERS)
def test_a_collector_that_has_failed_does_not_hold_up_the_end(tmp_path, monkeypatch, protocol):
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "60000")
    monkeypatch.setenv("OTEL_METRIC_EXPORT_INTERVAL", "60000")
    server = Server(tmp_path / "server")
    server.work()
    with RECEIVERS[protocol]() as receiver:
        receiver.answer = 20.0
        point_to(monkeypatch, protocol, receiver.endpoint)
        with open_pusher(tmp_path, history=True) as pusher:
            wait_for(lambda: all(delivery.failing for delivery in pusher.deliveries))
            server.work()
            tries = receiver.tries
            begin = time.monotonic()
        assert time.monotonic() - begin < 1
        assert receiver.tries == tries


def test_what_the_ring_forgets_meanwhile_is_counted(tmp_path, monkeypatch):
    server = Server(tmp_path / "server", RingLayout(slots=16, slot_bytes=1024))
    with grpc_receiver() as receiver:
        point_to(monkeypatch, "grpc", receiver.endpoint)
        pusher = open_pusher(tmp_path, history=True)
        server.work(100)
        assert not pusher.push_once()
        server.work(3)
        pusher.push_once()
        pusher.close()
        assert len(receiver.spans) == 16 + 3
    assert {str(reason): count for reason, count in pusher.deliveries[1].dropped.items()} == {
        "failed": 0,
        "overwritten": 84,
        "unreadable": 0,
    }
    text_of = {(s.labels["signal"], s.labels.get("reason")): s.value for f in pusher.collect() for s in f.samples}
    assert text_of["spans", "overwritten"] == 84


@pytest.mark.parametrize("ranges", [False, True])
def test_after_a_failed_batch_the_rest_waits_in_the_ring(tmp_path, monkeypatch, ranges):
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "42")
    per_step = 21 if ranges else 1
    server = Server(tmp_path / "server")
    server.work(420)
    with grpc_receiver() as receiver:
        point_to(monkeypatch, "grpc", receiver.endpoint)
        pusher = open_pusher(tmp_path, history=True, ranges=ranges)
        spans = pusher.deliveries[1]
        receiver.answer = grpc.StatusCode.INVALID_ARGUMENT
        pusher.push_once()
        assert spans.lost == 42
        receiver.answer = None
        pusher.push_once()
        pusher.close()
        assert (spans.sent, spans.lost) == (420 * per_step - 42, 42)
        assert max(len(r.resource_spans[0].scope_spans[0].spans) for r in receiver.traces) == 42


def test_memory_is_bounded_while_a_collector_refuses(tmp_path, monkeypatch):
    monkeypatch.setenv("OTEL_METRICS_EXPORTER", "none")
    server = Server(tmp_path / "server")
    with grpc_receiver() as receiver:
        receiver.answer = grpc.StatusCode.INVALID_ARGUMENT
        point_to(monkeypatch, "grpc", receiver.endpoint)
        pusher = open_pusher(tmp_path, history=True, ranges=True)
        (pump,) = pusher._pumps
        assert isinstance(pump, SpanPump)

        def outage(turns: int) -> None:
            for _ in range(turns):
                server.work(1_000)
                pump.turn()

        outage(3)
        tracemalloc.start()
        try:
            gc.collect()
            before, _ = tracemalloc.get_traced_memory()
            outage(12)
            gc.collect()
            after, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        pusher.close()
    assert pusher.deliveries[1].lost > 10_000
    assert after - before < 256 * 1024
    assert peak - before < 8 * 1024 * 1024


def test_an_exporter_that_raises_is_a_counted_drop(tmp_path, monkeypatch):
    point_to(monkeypatch, "grpc", f"http://127.0.0.1:{free_port()}")
    Server(tmp_path / "server").work(3)
    pusher = open_pusher(tmp_path, history=True)

    def fail(*_, **__):
        raise RuntimeError("out of luck")

    for pump in pusher._pumps:
        monkeypatch.setattr(pump._exporter, "export", fail)
    assert not pusher.push_once()
    assert all(delivery.lost for delivery in pusher.deliveries)
    pusher.close()


def test_without_rings_nothing_is_pushed_and_nothing_is_wrong(tmp_path, monkeypatch, caplog):
    with grpc_receiver() as receiver:
        point_to(monkeypatch, "grpc", receiver.endpoint)
        with open_pusher(tmp_path / "yet to come"):
            time.sleep(0.1)
        assert receiver.tries == 0
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_what_was_sent_and_dropped_is_on_the_prometheus_endpoint(tmp_path, monkeypatch):
    point_to(monkeypatch, "grpc", f"http://127.0.0.1:{free_port()}")
    Server(tmp_path / "server").work(3)
    pusher = open_pusher(tmp_path, history=True)
    with serving(tmp_path, "127.0.0.1", 0, [pusher]) as url:
        pusher.push_once()
        with urllib.request.urlopen(url, timeout=10) as answer:
            text = answer.read().decode()
    pusher.close()
    assert value_of(text, "vllm_k25_otlp_dropped_total", signal="spans", reason="failed") == 3
    assert sum(name.startswith("vllm_k25_otlp_") for name, _ in our_samples(text)) == 8
