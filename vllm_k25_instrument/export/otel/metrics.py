"""Counters -> OTLP metrics: the same families as Prometheus gets, number for number.

They are made of the Prometheus families, so that the two can only agree: names, labels, bounds, and sums in seconds
that are the floats nearest to the exact nanoseconds. Names keep their unit and ``_total`` suffixes, and have the unit
besides: without them ``all_reduce_seconds`` and ``all_reduce_bytes_total`` would be one metric of two units, and who
translates back to Prometheus adds no suffix that is there already, so that the same queries, dashboards and alert
rules work on both ways. Histograms are cumulative with explicit bounds; minimum and maximum are not known. A summary
without quantiles (count and sum by batch) is a histogram of a single bucket, and an info metric a non-monotonic sum
of 1, as the compatibility rules of OpenTelemetry and Prometheus have it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from opentelemetry.sdk.metrics import export as otel
from prometheus_client.core import Metric, Sample

from vllm_k25_instrument.export.across import AcrossRanks
from vllm_k25_instrument.export.families import rank_families
from vllm_k25_instrument.export.otel.deliveries import Delivery, delivery_families
from vllm_k25_instrument.export.otel.resource import Resources
from vllm_k25_instrument.export.otel.rings import FollowedRing, FollowedRings
from vllm_k25_instrument.export.otel.spans import SCOPE
from vllm_k25_instrument.export.waits import EXPORTER_SAMPLES
from vllm_k25_instrument.model import INF_BUCKET

_INT64_MAX: Final = (1 << 63) - 1
_CUMULATIVE: Final = otel.AggregationTemporality.CUMULATIVE

Points = list[otel.NumberDataPoint] | list[otel.HistogramDataPoint]


@dataclass(frozen=True, slots=True)
class Counted:
    """Families that have been counted since the same moment: a rank's start, or the exporter's."""

    families: Sequence[Metric]
    since_unix_ns: int


class MetricSource:
    """Collects what is to be pushed of the rings, and of the exporter's own accounts."""

    def __init__(self, rings: FollowedRings, resources: Resources, deliveries: Sequence[Delivery]) -> None:
        self._rings = rings
        self._resources = resources
        self._deliveries = deliveries
        self._started_unix_ns = time.time_ns()
        self._begin_anew(self._started_unix_ns)
        self._workers: dict[int, tuple[str, int, int]] = {}

    def _begin_anew(self, now_unix_ns: int) -> None:
        # The Prometheus side of the exporter says what had to be left out.
        self._across = AcrossRanks(EXPORTER_SAMPLES, level=logging.DEBUG)
        self._across_since_unix_ns = now_unix_ns

    def collect(self, now_unix_ns: int) -> otel.MetricsData | None:
        """The metrics as they stand; None where there are no rings."""
        rings = self._rings.refresh()
        counted: list[Counted] = []
        readable: list[FollowedRing] = []
        for ring in rings:
            try:
                families = rank_families(ring.identity, ring.reader.totals())
            except Exception as error:  # one damaged ring must not cost the others their metrics
                self._rings.complain(ring.reader.path, error)
                continue
            counted.append(Counted(families, ring.identity.started_unix_ns))
            readable.append(ring)
        if not readable:
            return None
        counted += self._read_across(readable, now_unix_ns)
        counted.append(Counted(delivery_families(self._deliveries), self._started_unix_ns))
        scope = otel.ScopeMetrics(SCOPE, list(metrics_of(counted, now_unix_ns)), "")
        return otel.MetricsData([otel.ResourceMetrics(self._resources.of(readable[0].identity), [scope], "")])

    def _read_across(self, rings: Sequence[FollowedRing], now_unix_ns: int) -> list[Counted]:
        workers = {
            ring.identity.coordinates.global_rank: (
                ring.identity.instance,
                ring.identity.pid,
                ring.identity.started_unix_ns,
            )
            for ring in rings
        }
        if any(self._workers.get(rank, worker) != worker for rank, worker in workers.items()):
            # Counters that begin again at zero need a new start time.
            self._begin_anew(now_unix_ns)
            self._workers = {}
        self._workers |= workers
        across = self._across.read([ring.reader for ring in rings])
        return [Counted(families, self._across_since_unix_ns) for families in across]


def count_points(data: otel.MetricsData) -> int:
    """How many data points there are."""
    return sum(
        len(metric.data.data_points)
        for resource in data.resource_metrics
        for scope in resource.scope_metrics
        for metric in scope.metrics
    )


def metrics_of(counted: Iterable[Counted], now_unix_ns: int) -> Iterator[otel.Metric]:
    """The families of several ranks as OTLP metrics, one per name; families without samples are left out.

    An info metric, one per server, is the first rank's.
    """
    families: dict[str, tuple[Metric, Points]] = {}
    for part in counted:
        for family in part.families:
            if not family.samples or (family.type == "info" and family.name in families):
                continue
            known = families.setdefault(family.name, (family, []))
            known[1].extend(_points(family, part.since_unix_ns, now_unix_ns))  # type: ignore[arg-type]  # of one kind
    for family, points in families.values():
        name = _name(family)
        yield otel.Metric(name, family.documentation, unit_of(name), _data(family, points))


def unit_of(name: str) -> str:
    """The unit (UCUM) that a metric's name tells; "" where it counts things."""
    plain = name.removesuffix("_total")
    return "s" if plain.endswith("_seconds") else "By" if plain.endswith("_bytes") else ""


def _name(family: Metric) -> str:
    """The name as queries write it: prometheus_client takes the suffix off."""
    return family.name + {"counter": "_total", "info": "_info"}.get(family.type, "")


def _data(family: Metric, points: Points) -> otel.Sum | otel.Gauge | otel.Histogram:
    if family.type in ("histogram", "summary"):
        return otel.Histogram(points, _CUMULATIVE)  # type: ignore[arg-type]  # made by _points of the same type
    if family.type == "gauge":
        return otel.Gauge(points)  # type: ignore[arg-type]
    return otel.Sum(points, _CUMULATIVE, is_monotonic=family.type == "counter")  # type: ignore[arg-type]


def _points(family: Metric, since: int, now: int) -> Points:
    if family.type in ("histogram", "summary"):
        return [_histogram_point(family.name, labels, series, since, now) for labels, series in _series(family)]
    return [otel.NumberDataPoint(sample.labels, since, now, _number(sample.value)) for sample in family.samples]


def _series(family: Metric) -> Iterator[tuple[dict[str, str], list[Sample]]]:
    """The samples of a family by their labels but `le`."""
    groups: dict[tuple[str, ...], list[Sample]] = {}
    for sample in family.samples:
        groups.setdefault(tuple(value for name, value in sample.labels.items() if name != "le"), []).append(sample)
    for series in groups.values():
        yield {name: value for name, value in series[0].labels.items() if name != "le"}, series


def _histogram_point(
    name: str, labels: dict[str, str], series: Sequence[Sample], since: int, now: int
) -> otel.HistogramDataPoint:
    buckets = [sample for sample in series if sample.name == name + "_bucket"]
    count = next(int(sample.value) for sample in series if sample.name == name + "_count")
    total = next(sample.value for sample in series if sample.name == name + "_sum")
    cumulative = [0, *(int(sample.value) for sample in buckets)] if buckets else [0, count]
    return otel.HistogramDataPoint(
        attributes=labels,
        start_time_unix_nano=since,
        time_unix_nano=now,
        count=count,
        sum=total,
        bucket_counts=[upper - lower for lower, upper in pairwise(cumulative)],
        # The labels are the shortest decimals that read back as the same floats.
        explicit_bounds=[float(b.labels["le"]) for b in buckets if b.labels["le"] != INF_BUCKET],
        min=None,  # type: ignore[arg-type]  # optional in OTLP, and the exporters leave it out
        max=None,  # type: ignore[arg-type]
    )


def _number(value: float) -> float:
    """The value as it is, but for counts beyond OTLP's signed 64 bits, which only a damaged ring has."""
    return value if isinstance(value, float) or value <= _INT64_MAX else float(value)
