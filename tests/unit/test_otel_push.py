"""What an OpenTelemetry collector gets, by gRPC and by HTTP, is what the rings hold, to the nanosecond."""

from __future__ import annotations

import os
import random
import time
from itertools import accumulate

import pytest
from prometheus_client import generate_latest

from tests.export_rings import STEP_NS, kill, make_ring, touch_everything
from tests.exposition import FAMILIES, our_samples
from tests.otlp_receivers import RECEIVERS, attributes, nanoseconds
from tests.samples import pack, wait_for
from vllm_k25_instrument.export.collector import RingCollector
from vllm_k25_instrument.export.otel.start import open_pusher
from vllm_k25_instrument.model import (
    LIVE_CATEGORIES,
    NO_PARENT,
    Category,
    GraphMode,
    Phase,
    Range,
    RankCoordinates,
    StepSample,
    category_exclusive_ns,
    exposed_ns,
)
from vllm_k25_instrument.ring import RingLayout, RingReader
from vllm_k25_instrument.totals import ALL_REDUCE_BOUNDS_NS, CATEGORY_BOUNDS_NS, STEP_BOUNDS_NS

STARTED = 1_764_400_000_123_456_789
START = 1_764_400_001_000_000_007
BOUNDS = {
    "vllm_k25_step_duration_seconds": STEP_BOUNDS_NS,
    "vllm_k25_step_host_seconds": STEP_BOUNDS_NS,
    "vllm_k25_step_category_seconds": CATEGORY_BOUNDS_NS,
    "vllm_k25_all_reduce_seconds": ALL_REDUCE_BOUNDS_NS,
}
ROOMY = RingLayout(slots=256, slot_bytes=4096)


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch):
    for name in [name for name in os.environ if name.startswith("OTEL_")]:
        monkeypatch.delenv(name)


@pytest.fixture(params=RECEIVERS)
def receiver(request, monkeypatch):
    with RECEIVERS[request.param]() as received:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", request.param)
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", received.endpoint)
        yield received


def a_step(step: int) -> StepSample:
    """A decode step with two all-reduces, one inside the experts, and sampling."""
    start = START + step * 12_000_001
    return StepSample(
        step=step,
        phase=Phase.DECODE,
        requests=64,
        tokens=64,
        padded_tokens=72,
        graph_mode=GraphMode.FULL,
        start_unix_ns=start,
        duration_ns=11_999_993,
        ranges=(
            Range(Category.ALL_REDUCE, 1_003, 78_125, "pynccl", layer=0, bytes=917_504),
            Range(Category.MOE_EXPERTS, 100_000, 3_000_001, "MarlinExperts", layer=1),
            Range(Category.ALL_REDUCE, 200_007, 81_013, "cpu_shm", layer=1, bytes=917_504, parent=1),
            Range(Category.SAMPLING, 11_000_000, 500_009),
        ),
        host_ns=12_345_678,
        gap_ns=-1_234,
        overhead_ns=4_321,
    )


def push(path, **wanted) -> bool:
    pusher = open_pusher(path, history=True, **wanted)
    try:
        return pusher.push_once()
    finally:
        pusher.close()


def test_metrics_are_those_of_prometheus_number_for_number(tmp_path, receiver):
    for rank in range(2):
        touch_everything(make_ring(tmp_path / "server", rank, started_unix_ns=STARTED + rank).totals)
    before = time.time_ns()
    assert push(tmp_path)
    pushed = dict(series_of(receiver.newest_metrics))
    scraped = our_samples(generate_latest(RingCollector(lambda: tmp_path / "server")).decode())
    assert pushed == scraped

    points = [(name, point) for name, _, point in points_of(receiver.newest_metrics)]
    assert all(before <= point.time_unix_nano <= time.time_ns() for _, point in points)
    starts = {
        (attributes(point)["rank"], point.start_time_unix_nano)
        for name, point in points
        if name in BOUNDS or name == "vllm_k25_steps_total"
    }
    assert starts == {("0", STARTED), ("1", STARTED + 1)}


def test_histograms_are_cumulative_and_have_exactly_the_bounds_of_the_counters(tmp_path, receiver):
    touch_everything(make_ring(tmp_path / "server").totals)
    push(tmp_path)
    for name, bounds in BOUNDS.items():
        metric = receiver.newest_metrics[name]
        assert metric.unit == "s"
        assert metric.histogram.aggregation_temporality == 2  # cumulative
        for point in metric.histogram.data_points:
            assert [nanoseconds(bound) for bound in point.explicit_bounds] == list(bounds)
            assert list(point.explicit_bounds) == [bound / 1e9 for bound in bounds]
            assert sum(point.bucket_counts) == point.count
            assert not point.HasField("min")
            assert not point.HasField("max")


def test_sums_agree_with_the_ring_to_the_nanosecond(tmp_path, receiver):
    writer = make_ring(tmp_path / "server")
    rng = random.Random(1)
    for _ in range(100):
        writer.totals.add_step(0, rng.randrange(10_000_000))
    push(tmp_path)
    (point,) = receiver.newest_metrics["vllm_k25_step_duration_seconds"].histogram.data_points
    duration = RingReader(writer.path).totals().step_duration(0)
    assert nanoseconds(point.sum) == duration.sum_ns
    assert tuple(point.bucket_counts) == duration.counts
    assert point.count == 100


def test_units_and_kinds_are_those_of_the_names(tmp_path, receiver):
    touch_everything(make_ring(tmp_path / "server").totals)
    push(tmp_path)
    metrics = receiver.newest_metrics
    assert {name: metric.unit for name, metric in metrics.items() if metric.unit == "By"} == {
        "vllm_k25_all_reduce_bytes_total": "By",
        "vllm_k25_graph_twin_bytes": "By",
    }
    for name, metric in metrics.items():
        kind = metric.WhichOneof("data")
        if name.endswith(("_total", "_info")):
            assert kind == "sum"
            assert metric.sum.is_monotonic == name.endswith("_total")
            assert metric.sum.aggregation_temporality == 2
        assert metric.description
        assert metric.unit == ("s" if name.removesuffix("_total").endswith("_seconds") else metric.unit)
    assert metrics["vllm_k25_hook_attached"].WhichOneof("data") == "gauge"


def test_waiting_between_ranks_is_pushed_too(tmp_path, receiver):
    for rank in range(2):
        where = RankCoordinates(global_rank=rank, local_rank=rank, tp=rank, tp_size=2)
        writer = make_ring(tmp_path / "server", rank, ROOMY, coordinates=where, started_unix_ns=STARTED)
        writer.detail_index("pynccl")
        for step in range(4):
            ranges = (Range(Category.ALL_REDUCE, 10, 1_000 + 500 * rank, "pynccl", bytes=14_336),)
            sample = StepSample(step, Phase.DECODE, 1, 1, 1, GraphMode.NONE, START, 10_000, ranges)
            writer.append(pack(sample, ("", "pynccl")))
    began = time.time_ns()
    push(tmp_path)
    waits = {
        attributes(point)["rank"]: point
        for point in receiver.newest_metrics["vllm_k25_all_reduce_wait_seconds"].histogram.data_points
    }
    assert {rank: nanoseconds(point.sum) for rank, point in waits.items()} == {"0": 0, "1": 4 * 500}
    assert all(point.start_time_unix_nano >= began for point in waits.values())


def test_a_span_is_a_step_to_the_nanosecond(tmp_path, receiver):
    writer = make_ring(tmp_path / "server", 3, ROOMY, started_unix_ns=STARTED)
    append(writer, [a_step(step) for step in range(0, 160, 16)])
    assert push(tmp_path)
    assert len(receiver.spans) == 10
    for (span, _), sample in zip(receiver.spans, RingReader(writer.path).samples(), strict=True):
        assert span.name == "decode step"
        assert span.start_time_unix_nano == sample.start_unix_ns
        assert span.end_time_unix_nano - span.start_time_unix_nano == sample.duration_ns
        assert (span.parent_span_id, list(span.links)) == (b"", [])
        known = {name.removeprefix("vllm_k25."): value for name, value in attributes(span).items()}
        exclusive = {category: known.pop(f"exclusive_ns.{category}") for category in LIVE_CATEGORIES}
        assert exclusive == category_exclusive_ns(sample)
        assert sum(exclusive.values()) == sample.duration_ns
        assert known == {
            "step": sample.step,
            "rank": 3,
            "local_rank": 3,
            "tp": 3,
            "pp": 0,
            "dp": 0,
            "phase": "decode",
            "requests": 64,
            "tokens": 64,
            "padded_tokens": 72,
            "graph_mode": "full",
            "device": "host",
            "host_ns": 12_345_678,
            "gap_ns": -1_234,
            "overhead_ns": 4_321,
            "complete": True,
            "all_reduce.calls": 2,
            "all_reduce.paths": ["cpu_shm", "pynccl"],
            "all_reduce.bytes": 1_835_008,
        }


def test_on_demand_every_range_is_a_child_span(tmp_path, receiver):
    writer = make_ring(tmp_path / "server", layout=ROOMY)
    append(writer, [a_step(16)])
    push(tmp_path, ranges=True)
    (step, _), *children = receiver.spans
    sample = a_step(16)
    assert [span.name for span, _ in children] == [
        "all_reduce pynccl",
        "moe_experts MarlinExperts",
        "all_reduce cpu_shm",
        "sampling",
    ]
    for (span, _), r, exposed in zip(children, sample.ranges, exposed_ns(sample), strict=True):
        parent = step if r.parent == NO_PARENT else children[r.parent][0]
        assert span.parent_span_id == parent.span_id
        assert span.trace_id == step.trace_id
        assert span.start_time_unix_nano == sample.start_unix_ns + r.start_ns
        assert span.end_time_unix_nano - span.start_time_unix_nano == r.duration_ns
        assert attributes(span)["vllm_k25.exclusive_ns"] == exposed
        assert attributes(span).get("vllm_k25.bytes", 0) == r.bytes


def test_the_ranks_of_a_step_meet_in_one_trace_and_other_steps_do_not(tmp_path, receiver):
    for rank in range(2):
        append(make_ring(tmp_path / "server", rank, ROOMY), [a_step(16), a_step(32)])
    push(tmp_path)
    traces: dict[bytes, set[object]] = {}
    for span, _ in receiver.spans:
        traces.setdefault(span.trace_id, set()).add(
            (attributes(span)["vllm_k25.step"], attributes(span)["vllm_k25.rank"])
        )
    assert sorted(traces.values(), key=sorted) == [{(16, 0), (16, 1)}, {(32, 0), (32, 1)}]
    assert len({span.span_id for span, _ in receiver.spans}) == 4


def test_other_groups_of_ranks_have_traces_of_their_own(tmp_path, receiver):
    for rank in range(4):
        where = RankCoordinates(global_rank=rank, tp=rank % 2, dp=rank // 2, tp_size=2, dp_size=2)
        append(make_ring(tmp_path / "server", rank, ROOMY, coordinates=where), [a_step(16)])
    push(tmp_path)
    traces = [span.trace_id for span, _ in receiver.spans]
    assert traces[0] == traces[1] != traces[2] == traces[3]


def test_pushed_twice_the_spans_are_the_same_spans(tmp_path, receiver):
    append(make_ring(tmp_path / "server", layout=ROOMY), [a_step(16)])
    push(tmp_path, ranges=True)
    push(tmp_path, ranges=True)
    first, second = (
        [span.SerializeToString() for span in r.resource_spans[0].scope_spans[0].spans] for r in receiver.traces
    )
    assert first == second


def test_the_resource_is_the_server_instance(tmp_path, receiver):
    make_ring(tmp_path / "server").totals.add_step(0, STEP_NS)
    push(tmp_path)
    assert (
        attributes(receiver.metrics[0].resource_metrics[0].resource).items()
        >= {
            "service.name": "vllm-k25",
            "service.instance.id": "test",
            "vllm.version": "0.32.0",
            "vllm.model": "moonshotai/Kimi-K2.5",
            "vllm_k25.version": "0.1.0",
            "vllm_k25.tp_size": 8,
            "telemetry.sdk.name": "opentelemetry",
        }.items()
    )


def test_the_standard_variables_have_precedence(tmp_path, receiver, monkeypatch):
    monkeypatch.setenv("OTEL_SERVICE_NAME", "kimi")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment=prod,vllm.model=mine")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-tenant=lab")
    append(make_ring(tmp_path / "server", layout=ROOMY), [a_step(16)])
    push(tmp_path)
    for resource in (receiver.metrics[0].resource_metrics[0].resource, receiver.spans[0][1]):
        named = attributes(resource)
        assert (named["service.name"], named["deployment.environment"], named["vllm.model"]) == ("kimi", "prod", "mine")
    assert {headers["x-tenant"] for headers in receiver.headers} == {"lab"}


@pytest.mark.parametrize(("signal", "kept"), [("TRACES", "metrics"), ("METRICS", "traces")])
def test_a_signal_that_is_not_wanted_is_not_pushed(tmp_path, receiver, monkeypatch, signal, kept):
    monkeypatch.setenv(f"OTEL_{signal}_EXPORTER", "none")
    append(make_ring(tmp_path / "server", layout=ROOMY), [a_step(16)])
    assert push(tmp_path)
    assert (len(receiver.traces), len(receiver.metrics)) == ((0, 1) if kept == "metrics" else (1, 0))


def test_running_it_pushes_what_is_new_and_nothing_twice(tmp_path, receiver, monkeypatch):
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")
    monkeypatch.setenv("OTEL_METRIC_EXPORT_INTERVAL", "20")
    writer = make_ring(tmp_path / "server", layout=ROOMY)
    append(writer, [a_step(0)])  # before anybody looks
    with open_pusher(tmp_path) as pusher:
        wait_for(lambda: bool(receiver.metrics))
        time.sleep(0.1)
        for step in range(16, 96, 16):
            append(writer, [a_step(step)])
            writer.totals.add_step(0, STEP_NS)
            time.sleep(0.03)
        append(make_ring(tmp_path / "server", 1, ROOMY), [a_step(0)])  # a rank that comes later is read from its start
        wait_for(lambda: len(receiver.spans) >= 6)
    steps = [(attributes(span)["vllm_k25.rank"], attributes(span)["vllm_k25.step"]) for span, _ in receiver.spans]
    assert steps == [(0, 16), (0, 32), (0, 48), (0, 64), (0, 80), (1, 0)]
    assert steps_counted(receiver) == 5, "the last push, at the end, has everything"
    assert pusher.accounts.startswith("metrics: ")
    assert pusher.deliveries[1].sent == 6
    assert pusher.deliveries[1].lost == 0


def test_the_next_server_is_followed(tmp_path, receiver, monkeypatch):
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")
    first = make_ring(tmp_path / "first", layout=ROOMY, instance="first")
    with open_pusher(tmp_path):
        wait_for(lambda: bool(receiver.metrics))
        time.sleep(0.1)
        append(first, [a_step(16)])
        wait_for(lambda: len(receiver.spans) == 1)
        kill(first)
        append(make_ring(tmp_path / "second", layout=ROOMY, instance="second"), [a_step(16)])
        wait_for(lambda: len(receiver.spans) == 2)
    assert [attributes(resource)["service.instance.id"] for _, resource in receiver.spans] == ["first", "second"]
    assert receiver.spans[0][0].trace_id != receiver.spans[1][0].trace_id


def test_pushing_leaves_the_rings_as_they_are(tmp_path, receiver):
    writer = make_ring(tmp_path / "server", layout=ROOMY)
    touch_everything(writer.totals)
    append(writer, [a_step(step) for step in range(20)])
    before = (writer.path.read_bytes(), writer.path.stat().st_mtime_ns)
    assert push(tmp_path, ranges=True)
    assert (writer.path.read_bytes(), writer.path.stat().st_mtime_ns) == before


def test_the_console_will_do_for_a_collector(tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("OTEL_METRICS_EXPORTER", "console")
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "console")
    writer = make_ring(tmp_path / "server", layout=ROOMY)
    touch_everything(writer.totals)
    append(writer, [a_step(16)])
    assert push(tmp_path)
    shown = capfd.readouterr().out
    assert '"name": "decode step"' in shown
    assert '"name": "vllm_k25_step_duration_seconds"' in shown


def test_a_damaged_ring_costs_the_others_nothing(tmp_path, receiver, caplog):
    append(make_ring(tmp_path / "server", layout=ROOMY), [a_step(16)])
    (tmp_path / "server" / "rank-00001.ring").write_bytes(b"nonsense" * 100)
    assert push(tmp_path)
    assert len(receiver.spans) == 1
    assert "rank-00001.ring: not a ring file" in caplog.text


def test_a_sample_that_otlp_cannot_hold_is_left_out_and_counted(tmp_path, receiver):
    writer = make_ring(tmp_path / "server", layout=ROOMY)
    writer.append(pack(StepSample(1 << 63, Phase.DECODE, 1, 1, 1, GraphMode.NONE, START, 1)))
    append(writer, [a_step(16)])
    assert not push(tmp_path)
    assert [attributes(span)["vllm_k25.step"] for span, _ in receiver.spans] == [16]


def append(writer, samples) -> None:
    details = ("", "pynccl", "MarlinExperts", "cpu_shm")
    for detail in details:
        writer.detail_index(detail)
    for sample in samples:
        assert writer.append(pack(sample, details))


def points_of(metrics):
    for name, metric in metrics.items():
        for point in getattr(metric, metric.WhichOneof("data")).data_points:
            yield name, metric, point


def series_of(metrics):
    """The series that Prometheus would make of OTLP metrics, but for those about the pushing itself."""
    for name, metric, point in points_of(metrics):
        if name.startswith("vllm_k25_otlp_"):
            continue
        labels = attributes(point).items()
        if metric.WhichOneof("data") != "histogram":
            kind = point.WhichOneof("value")
            yield (name, frozenset(labels)), float(getattr(point, kind))
            continue
        yield (name + "_count", frozenset(labels)), float(point.count)
        yield (name + "_sum", frozenset(labels)), point.sum
        if FAMILIES[name][0] == "histogram":
            bounds = [*(repr(bound) for bound in point.explicit_bounds), "+Inf"]
            for bound, count in zip(bounds, accumulate(point.bucket_counts), strict=True):
                yield (name + "_bucket", frozenset([*labels, ("le", bound)])), float(count)


def steps_counted(receiver) -> int:
    points = receiver.newest_metrics["vllm_k25_steps_total"].sum.data_points
    return sum(point.as_int for point in points if attributes(point)["rank"] == "0")
