"""What became of what was to be pushed: counted, shown as metrics, and said in the log once, not at each failure."""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from typing import Final

from prometheus_client.core import CounterMetricFamily, Metric

from vllm_k25_instrument.log import logger
from vllm_k25_instrument.plain_text import one_line

REMINDER_S: Final = 300.0
"""While a collector is away, the log says so again after this time."""

_SDK_LOGGER: Final = "opentelemetry.exporter.otlp"
_MAX_SHOWN: Final = 300
_CREDENTIALS: Final = re.compile(r"[^\s/@]+:[^\s/@]*@")
"""A user and a password in front of a host, as gRPC's own messages quote them."""


class Signal(StrEnum):
    """What is pushed."""

    METRICS = "metrics"
    SPANS = "spans"


class DropReason(StrEnum):
    """Why something was not pushed."""

    FAILED = "failed"  # the collector was away, too slow, or refused
    OVERWRITTEN = "overwritten"  # the ring went on while the collector was waited for
    UNREADABLE = "unreadable"  # a damaged sample, or one that OTLP's integers cannot hold


class Delivery:
    """The account of one signal: spans one by one, metrics by data point. Written by one thread, read by any."""

    def __init__(self, signal: Signal, destination: str) -> None:
        """`destination` is by which protocol and whereto, in words."""
        self.signal = signal
        self.destination = destination
        self.sent = 0
        self.dropped = dict.fromkeys(DropReason, 0)
        self.failing = False
        self._said_at = 0.0
        self._dropped_when_well = 0

    @property
    def lost(self) -> int:
        """All that was dropped, whyever."""
        return sum(self.dropped.values())

    def succeed(self, count: int) -> None:
        """Count what the collector has taken."""
        self.sent += count
        if self.failing:
            self.failing = False
            logger.info(
                "K25: OTLP: pushing %s by %s works again; %d dropped meanwhile",
                self.signal,
                self.destination,
                self.lost - self._dropped_when_well,
            )

    def fail(self, count: int, why: str) -> None:
        """Count what the collector has not taken, and say so where that is news."""
        now = time.monotonic()
        if not self.failing:
            self.failing = True
            self._dropped_when_well = self.lost
            self._said_at = -REMINDER_S + now
        self.dropped[DropReason.FAILED] += count
        if now - self._said_at >= REMINDER_S:
            self._said_at = now
            logger.warning(
                "K25: OTLP: pushing %s by %s fails (%s); %d dropped, going on",
                self.signal,
                self.destination,
                why,
                self.lost - self._dropped_when_well,
            )

    def drop(self, reason: DropReason, count: int = 1) -> None:
        """Count what never got as far as the collector."""
        self.dropped[reason] += count


def delivery_families(deliveries: Iterable[Delivery]) -> list[Metric]:
    """The accounts as metric families. They count from the exporter's start, and begin at zero."""
    sent = CounterMetricFamily(
        "vllm_k25_otlp_sent_total", "Spans and metric data points that a collector has taken.", labels=("signal",)
    )
    dropped = CounterMetricFamily(
        "vllm_k25_otlp_dropped_total",
        "Spans and metric data points that were not pushed; metrics are cumulative: the next push makes up for them.",
        labels=("signal", "reason"),
    )
    for delivery in deliveries:
        sent.add_metric((delivery.signal,), delivery.sent)
        for reason, count in delivery.dropped.items():
            dropped.add_metric((delivery.signal, reason), count)
    return [sent, dropped]


class Complaints(logging.Handler):
    """Keeps what OpenTelemetry's exporters complain of, each thread's for itself."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._of_thread = threading.local()

    def emit(self, record: logging.LogRecord) -> None:
        self._messages().append(_CREDENTIALS.sub("", one_line(record.getMessage())))

    def take(self) -> str:
        """What has been complained of since the last time, as one line."""
        messages = self._messages()
        text = " ".join(dict.fromkeys(messages[-2:])) or "no reason given"
        messages.clear()
        return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}…"

    def _messages(self) -> list[str]:
        messages: list[str] = self._of_thread.__dict__.setdefault("messages", [])
        del messages[:-2]
        return messages


@contextmanager
def complaints_held_back() -> Iterator[Complaints]:
    """Inside, OpenTelemetry's exporters log nothing themselves: several lines at each try, for as long as it fails.

    Exporters that are to be heard have been imported before.
    """
    sdk = logging.getLogger(_SDK_LOGGER)
    handler = Complaints()
    propagate = sdk.propagate
    # Their filters let a message pass once in 20 s, whichever signal it is of: the other one would have no reason.
    filters = {
        name: known.filters
        for name, known in logging.root.manager.loggerDict.items()
        if name.startswith(_SDK_LOGGER) and isinstance(known, logging.Logger)
    }
    for name in filters:
        logging.getLogger(name).filters = []
    sdk.addHandler(handler)
    sdk.propagate = False
    try:
        yield handler
    finally:
        sdk.removeHandler(handler)
        sdk.propagate = propagate
        for name, those in filters.items():
            logging.getLogger(name).filters = those
