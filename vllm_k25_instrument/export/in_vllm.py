"""Our metrics in vLLM's own ``/metrics``, where vLLM's API server can carry them."""

from __future__ import annotations

import os
import shlex
from enum import StrEnum
from pathlib import Path

from vllm_k25_instrument.log import logger
from vllm_k25_instrument.settings import Metrics, Settings

_MULTIPROCESS_VARIABLE = "PROMETHEUS_MULTIPROC_DIR"

_logged_multiprocess = False


class Registration(StrEnum):
    """What became of the registration."""

    REGISTERED = "registered"
    ALREADY = "already"  # by an earlier call, or an earlier load of the plugin
    OFF = "off"  # by the setting K25_METRICS
    ELSEWHERE = "elsewhere"  # this /metrics cannot carry them: `vllm-k25 export` does
    FAILED = "failed"  # logged; the server goes on without metrics


def register_in_vllm(settings: Settings, instance_path: Path) -> Registration:
    """Register a collector of the instance's rings with the registry that vLLM's ``/metrics`` shows.

    To be called in the API server's process. Any number of calls has the effect of one; raises nothing.
    """
    if settings.metrics is Metrics.OFF:
        return Registration.OFF
    if os.environ.get(_MULTIPROCESS_VARIABLE) is not None:
        _say_where_the_metrics_are(settings)
        return Registration.ELSEWHERE
    try:
        from prometheus_client import REGISTRY

        from vllm_k25_instrument.export.collector import RingCollector

        collector = RingCollector(lambda: instance_path)
        try:
            REGISTRY.register(collector)
        except ValueError as error:  # DuplicateTimeseries, where the client has it
            logger.debug("K25: metrics are registered already: %s", error)
            return Registration.ALREADY
    except Exception:  # a server without our metrics is better than no server
        logger.warning("K25: cannot register the metrics; the server goes on without them", exc_info=True)
        return Registration.FAILED
    logger.debug("K25: metrics of %s registered with vLLM's /metrics", instance_path)
    return Registration.REGISTERED


def export_command(settings: Settings) -> str:
    """The command line that serves the metrics of these settings' ring directory."""
    directory = shlex.quote(str(settings.ring_dir))
    return f"vllm-k25 export {directory} --host {shlex.quote(settings.export_host)} --port {settings.export_port}"


def _say_where_the_metrics_are(settings: Settings) -> None:
    global _logged_multiprocess
    if _logged_multiprocess:
        return
    _logged_multiprocess = True
    # vLLM then answers /metrics from files that only its own kinds of metric can write.
    logger.warning(
        "K25: %s is set (several API servers or a Rust front end): vLLM's /metrics cannot carry the vllm_k25_ metrics. "
        "Serve them with: %s",
        _MULTIPROCESS_VARIABLE,
        export_command(settings),
    )
