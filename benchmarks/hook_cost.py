"""What a hooked call costs, beside the same call under other instruments, in one run.

Times a call of a trivial function: bare, hooked with the plugin on but the step not sampled, hooked in a sampled step
(with the sample's share of being made and written to the ring), and under `nvtx.annotate` with no tool attached,
`torch.profiler.record_function` with no profiler active, and an OpenTelemetry span. Every round times all of them, one
after the other, so that a drifting machine drifts under all; ratios are taken round by round.

Usage: python benchmarks/hook_cost.py [--rounds N] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nvtx
import torch
from opentelemetry.sdk.trace import TracerProvider

from vllm_k25_instrument.bench.hooked_calls import Communicator, HookedCalls, timed


def variants(folder: Path) -> dict[str, Callable[[int], float]]:
    """Name -> a function that times so many calls, in ns per call."""
    hooked, bare = HookedCalls.make(folder), Communicator.all_reduce

    def annotated(owner: Communicator, tensor: torch.Tensor) -> Any:
        with nvtx.annotate("all_reduce"):
            return bare(owner, tensor)

    def recorded(owner: Communicator, tensor: torch.Tensor) -> Any:
        with torch.profiler.record_function("all_reduce"):
            return bare(owner, tensor)

    tracer = TracerProvider().get_tracer("bench")

    def traced(owner: Communicator, tensor: torch.Tensor) -> Any:
        with tracer.start_as_current_span("all_reduce"):
            return bare(owner, tensor)

    return {
        "bare": hooked.bare,
        "hooked, not sampled": hooked.not_sampled,
        "hooked, sampled": hooked.sampled,
        "nvtx.annotate": lambda calls: timed(annotated, calls),
        "record_function": lambda calls: timed(recorded, calls // 8),
        "OpenTelemetry span": lambda calls: timed(traced, calls // 32),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--calls", type=int, default=22_500)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        timers = variants(Path(folder))
        for timer in timers.values():
            timer(options.calls // 4)
        rounds = [{name: timer(options.calls) for name, timer in timers.items()} for _ in range(options.rounds)]

    added = {name: [r[name] - r["bare"] for r in rounds] for name in timers if name != "bare"}
    print(f"{'variant':24}{'ns per call':>14}{'added, ns':>12}")
    for name in timers:
        extra = f"{statistics.median(added[name]):12.0f}" if name in added else ""
        print(f"{name:24}{statistics.median(r[name] for r in rounds):14.0f}{extra}")
    ratios = {
        "not sampled / nvtx.annotate": (ratio(added, "hooked, not sampled", "nvtx.annotate"), 0.5),
        "sampled / record_function": (ratio(added, "hooked, sampled", "record_function"), 0.25),
        "sampled / OpenTelemetry span": (ratio(added, "hooked, sampled", "OpenTelemetry span"), None),
    }
    print(f"\n{'ratio of what is added':32}{'median':>9}{'min':>8}{'max':>8}{'aim':>8}")
    for name, (values, aim) in ratios.items():
        goal = f"<= {aim}" if aim is not None else "-"
        print(f"{name:32}{statistics.median(values):9.3f}{min(values):8.3f}{max(values):8.3f}{goal:>8}")
    if options.json:
        options.json.write_text(json.dumps({"rounds_ns": rounds}, indent=1))


def ratio(added: dict[str, list[float]], one: str, other: str) -> list[float]:
    """The ratio of two variants' cost, round by round."""
    return [a / b for a, b in zip(added[one], added[other], strict=True)]


if __name__ == "__main__":
    main()
