"""Does a bad OpenTelemetry receiver reach a worker? Its steps and its memory, with receivers down, slow and refusing.

One server with the tiny Kimi-K2.5 on two tensor-parallel workers, every step sampled. Each round serves the same load
once in each state: an exporter that pushes to a receiver that takes everything, that is not there, that takes longer
than it may, that refuses; the order rotates. Compared with the good receiver, round by round: the mean duration of the
executed decode steps, and by how much the workers' own memory (RssAnon, the larger of the two) has grown. Medians, with
their 95 % intervals by order statistics.

Usage: python benchmarks/otlp_receivers.py [--rounds N] [--requests N]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.otlp_receivers import http_receiver  # noqa: E402
from vllm_k25_instrument.bench.intervals import FEWEST, median_bounds  # noqa: E402
from vllm_k25_instrument.demo.load import run_load  # noqa: E402
from vllm_k25_instrument.demo.server import VllmServer  # noqa: E402
from vllm_k25_instrument.demo.tiny_model import write_tiny_k25  # noqa: E402
from vllm_k25_instrument.instances import default_ring_directory, find_rings  # noqa: E402
from vllm_k25_instrument.model import PHASES, Phase  # noqa: E402
from vllm_k25_instrument.ring import open_rings  # noqa: E402

DECODE: Final = PHASES.index(Phase.DECODE)
NOWHERE: Final = "http://127.0.0.1:9"  # the discard port: nobody listens
ANSWERS: Final = {"takes everything": None, "slow": 60.0, "refusing": 503}
GOOD: Final = "takes everything"
WARM_UP: Final = 5  # loads before the first round: a new server's memory still grows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--requests", type=int, default=8)
    options = parser.parse_args()
    if options.rounds < FEWEST:
        parser.error(f"no interval from fewer than {FEWEST} rounds")
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        rings = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=default_ring_directory().parent)))
        endpoints = {"down": NOWHERE}
        for name, answer in ANSWERS.items():
            receiver = stack.enter_context(http_receiver())
            receiver.answer = answer
            endpoints[name] = receiver.endpoint
        write_tiny_k25(folder / "model", "k25")
        env = {"K25_INSTRUMENT": "1", "K25_SAMPLE_EVERY": "1", "K25_RING_DIR": str(rings)}
        server = stack.enter_context(VllmServer(folder / "model", log=folder / "vllm.log", env=env))
        server.wait_ready(300)
        for _ in range(WARM_UP):
            load(server, options.requests)
        names = list(endpoints)
        step_ns: dict[str, list[float]] = {name: [] for name in names}
        grown_kib: dict[str, list[int]] = {name: [] for name in names}
        for n in range(options.rounds):
            for name in names[n % len(names) :] + names[: n % len(names)]:
                duration, grown = measure(server, rings, endpoints[name], options.requests)
                step_ns[name].append(duration)
                grown_kib[name].append(grown)
            seen = ", ".join(f"{name} {step_ns[name][-1] / 1e3:.0f} us {grown_kib[name][-1]:+d} KiB" for name in names)
            print(f"round {n + 1}/{options.rounds}: {seen}", file=sys.stderr)
    print(json.dumps(report(step_ns, grown_kib), indent=2))
    return 0


def measure(server: VllmServer, rings: Path, endpoint: str, requests: int) -> tuple[float, int]:
    """Mean duration of a decode step, ns, and by how many KiB the larger of the workers has grown, while pushing."""
    command = [sys.executable, "-m", "vllm_k25_instrument.cli", "export", str(rings), "--port", "0", "--otlp"]
    environment = os.environ | {
        "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf",
        "OTEL_EXPORTER_OTLP_ENDPOINT": endpoint,
        "OTEL_EXPORTER_OTLP_TIMEOUT": "1",
        "OTEL_METRIC_EXPORT_INTERVAL": "500",
        "OTEL_BSP_SCHEDULE_DELAY": "200",
    }
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as exporter:
        assert exporter.stdout is not None
        try:
            exporter.stdout.readline()
            before = look(rings)
            load(server, requests)
            after = look(rings)
        finally:
            exporter.kill()
    steps = sum(now["steps"] - was["steps"] for was, now in zip(before, after, strict=True))
    duration = sum(now["ns"] - was["ns"] for was, now in zip(before, after, strict=True))
    return duration / steps, max(now["kib"] - was["kib"] for was, now in zip(before, after, strict=True))


def look(rings: Path) -> list[dict[str, int]]:
    """Of each worker: executed decode steps, their duration, and the resident memory that is its own."""
    readers, errors = open_rings(find_rings(rings))
    assert not errors, errors
    found = []
    for reader in readers:
        decode = reader.totals().step_duration(DECODE)
        status = Path(f"/proc/{reader.identity.pid}/status").read_text()
        kib = int(status.split("RssAnon:")[1].split()[0])
        found.append({"steps": decode.count, "ns": decode.sum_ns, "kib": kib})
        reader.close()
    return found


def load(server: VllmServer, requests: int) -> None:
    result = asyncio.run(
        run_load(server.url, server.model, concurrency=4, requests=requests, max_tokens=128, stream=False)
    )
    assert not result.failed, result.errors


def report(step_ns: dict[str, list[float]], grown_kib: dict[str, list[int]]) -> dict[str, Any]:
    """By receiver: the step's duration over that with a good receiver, and how much more memory has grown."""
    found: dict[str, Any] = {}
    for name, durations in step_ns.items():
        found[name] = {
            "step_us": round(statistics.median(durations) / 1e3, 1),
            "worker_grown_kib": statistics.median(grown_kib[name]),
        }
        if name != GOOD:
            ratios = [bad / good for bad, good in zip(durations, step_ns[GOOD], strict=True)]
            more = [bad - good for bad, good in zip(grown_kib[name], grown_kib[GOOD], strict=True)]
            found[name] |= {"step_to_good": median(ratios), "grown_more_kib": median(more)}
    return found


def median(values: Sequence[float]) -> dict[str, float]:
    """A median and its 95 % interval."""
    low, middle, high = median_bounds(values)
    return {"median": round(middle, 3), "low": round(low, 3), "high": round(high, 3)}


if __name__ == "__main__":
    sys.exit(main())
