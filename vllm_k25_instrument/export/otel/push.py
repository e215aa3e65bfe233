"""The pusher: two threads of the exporter process, one per signal, that read the rings and send what is new.

Nothing is kept that is not being sent: samples wait in their rings, which forget the oldest, and a batch that a
collector does not take (after the exporters' own retries) is dropped and counted. So a collector that is away, slow or
refusing costs a thread that waits, whatever happens to the server, to the Prometheus endpoint or to the other signal.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Final

from opentelemetry.sdk.metrics.export import MetricExporter, MetricExportResult
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from prometheus_client.core import Metric

from vllm_k25_instrument.export.follow import InstanceFollower
from vllm_k25_instrument.export.otel.deliveries import (
    Complaints,
    Delivery,
    DropReason,
    Signal,
    complaints_held_back,
    delivery_families,
)
from vllm_k25_instrument.export.otel.metrics import MetricSource, count_points
from vllm_k25_instrument.export.otel.resource import Resources
from vllm_k25_instrument.export.otel.rings import FollowedRing, FollowedRings
from vllm_k25_instrument.export.otel.settings import Schedule, metric_exporter, read_schedule, span_exporter
from vllm_k25_instrument.export.otel.spans import spans_of
from vllm_k25_instrument.log import logger
from vllm_k25_instrument.ring import RingError

FLUSH_S: Final = 2.0
"""How long the end waits for what is being sent, before it breaks off."""

_ABORT_S: Final = 0.5


class _Pump(ABC):
    """Does its turn again and again in a thread of its own."""

    def __init__(self, rings: FollowedRings, delivery: Delivery, complaints: Complaints, period_s: float) -> None:
        self.rings = rings
        self.delivery = delivery
        self._complaints = complaints
        self._period_s = period_s
        self.stopping = threading.Event()
        self.thread = threading.Thread(target=self._run, name=f"k25-otlp-{delivery.signal}", daemon=True)

    def turn(self) -> None:
        """Push what is new. Raises nothing."""
        try:
            self._push()
        except Exception as error:  # the next turn may be luckier, and the exporter has other things to do
            logger.warning("K25: OTLP: %s: %s: %s", self.delivery.signal, type(error).__name__, error)

    def _run(self) -> None:
        self.turn()
        while not self.stopping.wait(self._period_s):
            self.turn()
        if not self.delivery.failing:  # a collector that is away would only hold up the end
            self.turn()

    def _deliver(self, count: int, export: Callable[[], bool]) -> bool:
        """Export `count` points or spans, and account for them. Raises nothing."""
        try:
            taken = export()
            why = self._complaints.take()
        except Exception as error:
            taken, why = False, f"{type(error).__name__}: {error}"
        if taken:
            self.delivery.succeed(count)
        else:
            self.delivery.fail(count, why)
        return taken

    @abstractmethod
    def _push(self) -> None: ...

    @abstractmethod
    def shut_down(self) -> None:
        """Break off what is being sent."""


class MetricPump(_Pump):
    """Pushes all metrics, every time."""

    def __init__(
        self,
        exporter: MetricExporter,
        source: MetricSource,
        rings: FollowedRings,
        delivery: Delivery,
        schedule: Schedule,
        complaints: Complaints,
    ) -> None:
        super().__init__(rings, delivery, complaints, schedule.metrics_s)
        self._exporter = exporter
        self._source = source

    def shut_down(self) -> None:
        self._exporter.shutdown()

    def _push(self) -> None:
        data = self._source.collect(time.time_ns())
        if data is not None:
            self._deliver(count_points(data), lambda: self._exporter.export(data) is MetricExportResult.SUCCESS)


class SpanPump(_Pump):
    """Pushes the spans of the samples that are new, batch by batch, until there are none or one fails."""

    def __init__(
        self,
        exporter: SpanExporter,
        resources: Resources,
        rings: FollowedRings,
        delivery: Delivery,
        schedule: Schedule,
        complaints: Complaints,
        *,
        ranges: bool,
    ) -> None:
        super().__init__(rings, delivery, complaints, schedule.spans_s)
        self._exporter = exporter
        self._resources = resources
        self._batch = schedule.batch_spans
        self._ranges = ranges

    def shut_down(self) -> None:
        self._exporter.shutdown()

    def _push(self) -> None:
        batch: list[ReadableSpan] = []
        for ring in self.rings.refresh():
            for spans in self._new_spans(ring):
                batch += spans
                while len(batch) >= self._batch:
                    full, batch = batch[: self._batch], batch[self._batch :]
                    if not self._send(full):
                        # The rest waits in the rings. Of this sample some have been tried, so all are over.
                        self._drop(DropReason.FAILED, len(batch))
                        return
        if batch:
            self._send(batch)

    def _new_spans(self, ring: FollowedRing) -> Iterator[list[ReadableSpan]]:
        resource = self._resources.of(ring.identity)
        try:
            for sample in ring.samples():
                try:
                    spans = spans_of(sample, ring.identity, resource, ranges=self._ranges)
                except ValueError:
                    ring.unreadable += 1
                else:
                    yield spans
        except RingError as error:
            self.rings.complain(error.path, error)
        finally:
            self._drop(DropReason.OVERWRITTEN, ring.overwritten)
            self._drop(DropReason.UNREADABLE, ring.unreadable)
            ring.overwritten = ring.unreadable = 0

    def _drop(self, reason: DropReason, count: int) -> None:
        if count:
            self.delivery.drop(reason, count)

    def _send(self, spans: list[ReadableSpan]) -> bool:
        return self._deliver(len(spans), lambda: self._exporter.export(spans) is SpanExportResult.SUCCESS)


class Pusher:
    """Pushes the metrics and spans of a server's rings. A context manager: runs inside, and ends promptly.

    It is a collector of prometheus_client too, with the accounts of what was sent and dropped.
    """

    def __init__(self, path: Path, *, ranges: bool, history: bool) -> None:
        """Raises OtlpError on a wrong ``OTEL_*`` variable, ImportError where a package is missing."""
        schedule = read_schedule()
        metrics, metrics_to = metric_exporter()
        spans, spans_to = span_exporter()
        self._open = ExitStack()
        complaints = self._open.enter_context(complaints_held_back())
        resources = Resources()
        of_metrics, of_spans = Delivery(Signal.METRICS, metrics_to), Delivery(Signal.SPANS, spans_to)
        self.deliveries = (of_metrics, of_spans)
        self._pumps: list[_Pump] = []
        locate = InstanceFollower(path)
        pushed = []
        if metrics is not None:
            rings = FollowedRings(locate, history=True)
            source = MetricSource(rings, resources, self.deliveries)
            self._pumps.append(MetricPump(metrics, source, rings, of_metrics, schedule, complaints))
            pushed.append(f"metrics by {metrics_to}")
        if spans is not None:
            rings = FollowedRings(locate, history=history)
            self._pumps.append(SpanPump(spans, resources, rings, of_spans, schedule, complaints, ranges=ranges))
            pushed.append(f"spans by {spans_to}")
        self.destination = ", ".join(pushed) or "nothing (OTEL_SDK_DISABLED, OTEL_*_EXPORTER)"
        """What is pushed whereto, in words."""

    @property
    def accounts(self) -> str:
        """What was sent and dropped so far, in words."""
        return "; ".join(f"{d.signal}: {d.sent} sent, {d.lost} dropped" for d in self.deliveries)

    def describe(self) -> list[Metric]:
        """The families of the accounts (the Collector protocol of prometheus_client)."""
        return delivery_families(())

    def collect(self) -> list[Metric]:
        """The accounts."""
        return delivery_families(self.deliveries)

    def push_once(self) -> bool:
        """Push what there is, in the calling thread; True where there was something and nothing was dropped."""
        for pump in self._pumps:
            pump.turn()
        return any(d.sent for d in self.deliveries) and not any(d.lost for d in self.deliveries)

    def __enter__(self) -> Pusher:
        for pump in self._pumps:
            pump.thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End: what is being sent has ``FLUSH_S`` seconds, then it is broken off."""
        for pump in self._pumps:
            pump.stopping.set()
        self._join(FLUSH_S)
        for pump in self._pumps:
            pump.shut_down()
        self._join(_ABORT_S)
        for pump in self._pumps:
            if not pump.thread.is_alive():  # else it is waiting for an answer, and dies with the process
                pump.rings.close()
        self._open.close()
        logger.info("K25: OTLP: %s", self.accounts)

    def _join(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        for pump in self._pumps:
            if pump.thread.ident is not None:
                pump.thread.join(max(deadline - time.monotonic(), 0.0))
