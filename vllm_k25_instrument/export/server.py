"""The stand-alone exporter: an HTTP server for the metrics of a ring directory."""

from __future__ import annotations

import errno
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from prometheus_client import CollectorRegistry, generate_latest, start_http_server
from prometheus_client.registry import Collector

from vllm_k25_instrument.export.collector import RingCollector
from vllm_k25_instrument.export.follow import InstanceFollower
from vllm_k25_instrument.export.waits import EXPORTER_SAMPLES


class ListenError(Exception):
    """The address cannot be listened on. The message is one line: host, port, reason and remedy."""

    def __init__(self, host: str, port: int, error: OSError) -> None:
        reason = error.strerror or str(error)
        remedy = {
            errno.EADDRINUSE: "is an exporter running already? Choose another port with --port or K25_EXPORT_PORT "
            "(0 picks a free one)",
            errno.EACCES: "ports below 1024 need privileges; choose another with --port or K25_EXPORT_PORT",
        }.get(error.errno or 0, "choose an address of this machine with --host or K25_EXPORT_HOST")
        super().__init__(f"cannot listen on {host}, port {port}: {reason}; {remedy}")
        self.host = host
        self.port = port


def registry_of(path: Path, others: Sequence[Collector] = ()) -> CollectorRegistry:
    """A registry with the metrics of the rings at `path` (as for InstanceFollower), those of `others`, and no more."""
    registry = CollectorRegistry()
    registry.register(RingCollector(InstanceFollower(path), EXPORTER_SAMPLES))
    for other in others:
        registry.register(other)
    return registry


def exposition_of(path: Path) -> str | None:
    """The text that a scrape would get now, or None where no ring can be read."""
    text = generate_latest(RingCollector(InstanceFollower(path), EXPORTER_SAMPLES)).decode()
    has_samples = any(line and not line.startswith("#") for line in text.splitlines())
    return text if has_samples else None


@contextmanager
def serving(path: Path, host: str, port: int, others: Sequence[Collector] = ()) -> Iterator[str]:
    """Serve ``/metrics`` inside the context, in threads of its own; yields its URL. `others` is as for `registry_of`.

    Port 0 picks a free port. Raises ListenError.
    """
    try:
        server, thread = start_http_server(port, addr=host, registry=registry_of(path, others))
    except OSError as error:
        raise ListenError(host, port, error) from error
    try:
        name = f"[{host}]" if ":" in host else host
        yield f"http://{name}:{server.server_port}/metrics"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
