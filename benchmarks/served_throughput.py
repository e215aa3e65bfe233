"""Does the instrument slow a server down? A paired A/B of served tokens per second, plugin off and on.

Starts one warm server per configuration (off; on with default sampling; on with every step sampled), all with the tiny
Kimi-K2.5 on two tensor-parallel workers. Each round measures every configuration once, in an order that rotates; while
one is measured, the others' processes are stopped, so that they take nothing from it. The ratio on/off is taken round
by round; the interval is the 95 % Student interval of the mean of its logarithm.

Usage: python benchmarks/served_throughput.py [--pairs N] [--requests N] [--concurrency N] [--json FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import signal
import statistics
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from vllm_k25_instrument.bench.intervals import median_bounds
from vllm_k25_instrument.demo.load import run_load
from vllm_k25_instrument.demo.server import VllmServer
from vllm_k25_instrument.demo.tiny_model import write_tiny_k25
from vllm_k25_instrument.instances import default_ring_directory

CONFIGURATIONS: dict[str, dict[str, str]] = {
    "off": {},
    "default sampling": {"K25_INSTRUMENT": "1"},
    "every step": {"K25_INSTRUMENT": "1", "K25_SAMPLE_EVERY": "1"},
}
AIMS = {"default sampling": 0.99, "every step": 0.97}

# Two-sided 95 % quantiles of Student's t by degrees of freedom; above the last, the normal distribution's.
_T95 = {9: 2.262, 11: 2.201, 14: 2.145, 19: 2.093, 24: 2.064, 29: 2.045, 39: 2.023, 59: 2.001}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--requests", type=int, default=12)
    parser.add_argument("--concurrency", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.pairs < 10:
        parser.error("an interval from fewer than 10 pairs says nothing")
    rates: dict[str, list[float]] = {name: [] for name in CONFIGURATIONS}
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        rings = stack.enter_context(tempfile.TemporaryDirectory(dir=default_ring_directory().parent))
        servers = start(Path(folder), Path(rings), stack)
        for name, server in servers.items():
            with running(server):
                measure(server, options)  # warm-up
            print(f"warm: {name}", file=sys.stderr)
        names = list(CONFIGURATIONS)
        for n in range(options.pairs):
            for name in names[n % len(names) :] + names[: n % len(names)]:
                with running(servers[name]):
                    load(servers[name], options, requests=options.concurrency, tokens=8)  # what a stop left behind
                    rates[name].append(measure(servers[name], options))
            print(f"pair {n + 1}/{options.pairs}", file=sys.stderr)
        for server in servers.values():
            signal_group(server, signal.SIGCONT)
    report(rates)
    if options.json:
        options.json.write_text(json.dumps({"tokens_per_second": rates}, indent=1))


def start(folder: Path, rings: Path, stack: ExitStack) -> dict[str, VllmServer]:
    """One server per configuration, each ready and stopped (SIGSTOP)."""
    model = folder / "model"
    write_tiny_k25(model, "k25")
    servers = {}
    for name, env in CONFIGURATIONS.items():
        server = VllmServer(model, log=folder / f"{name}.log", env={"K25_RING_DIR": str(rings / name), **env})
        stack.callback(server.stop)
        stack.callback(signal_group, server, signal.SIGCONT)
        server.start()
        server.wait_ready(300)
        signal_group(server, signal.SIGSTOP)
        servers[name] = server
    return servers


def signal_group(server: VllmServer, number: signal.Signals) -> None:
    os.killpg(server.pid, number)


@contextmanager
def running(server: VllmServer) -> Iterator[None]:
    """Lets the server run for as long as the context lasts."""
    signal_group(server, signal.SIGCONT)
    try:
        yield
    finally:
        signal_group(server, signal.SIGSTOP)


def measure(server: VllmServer, options: argparse.Namespace) -> float:
    """Served tokens per second. Raises RuntimeError where a request failed."""
    return load(server, options, requests=options.requests, tokens=options.tokens)


def load(server: VllmServer, options: argparse.Namespace, *, requests: int, tokens: int) -> float:
    """Send requests, return tokens per second. Raises RuntimeError where one failed."""
    result = asyncio.run(
        run_load(
            server.url,
            server.model,
            concurrency=options.concurrency,
            requests=requests,
            max_tokens=tokens,
            stream=False,
        )
    )
    if result.failed:
        raise RuntimeError(f"{result.failed} requests failed: {result.errors}")
    return result.tokens_per_second


def report(rates: dict[str, list[float]]) -> None:
    """Print the medians, and the ratios with their intervals."""
    pairs = len(rates["off"])
    print(f"{pairs} pairs; median tokens/s: " + ", ".join(f"{n} {statistics.median(r):.0f}" for n, r in rates.items()))
    for name in CONFIGURATIONS:
        if name == "off":
            continue
        logs = [math.log(on / off) for on, off in zip(rates[name], rates["off"], strict=True)]
        low, mid, high = map(math.exp, median_bounds(logs))
        print(f"{name:18} median on/off = {mid:.4f}, 95 % interval {low:.4f} to {high:.4f} (aim >= {AIMS[name]})")
        center = statistics.fmean(logs)
        half = t95(pairs - 1) * statistics.stdev(logs) / math.sqrt(pairs)
        low, mid, high = (math.exp(x) for x in (center - half, center, center + half))
        print(f"{name:18} mean   on/off = {mid:.4f}, 95 % interval {low:.4f} to {high:.4f}")


def t95(degrees: int) -> float:
    """The next smaller tabled quantile's value: never narrower than right."""
    known = [d for d in _T95 if d <= degrees]
    return _T95[max(known)] if known else _T95[9]


if __name__ == "__main__":
    main()
