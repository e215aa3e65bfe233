"""Where should a sampled step's marks be read and its sample be made: on the engine's thread, or on one beside it?

An engine loop (Python work of about a decode step's host time, with a K2.5 step's worth of hooked calls) is run with
every step sampled: read back on the engine's own thread between two steps, and by a reader thread that waits on a
queue. Both run in turn, round by round; what counts is how much longer a step takes than without any sampling, at the
median and at the 99th percentile.

Usage: python benchmarks/read_back.py [--rounds N] [--steps N]
"""

from __future__ import annotations

import argparse
import queue
import statistics
import tempfile
import threading
from pathlib import Path
from time import perf_counter_ns
from typing import Any

from vllm_k25_instrument.bench.hooked_calls import (
    CALLS_PER_STEP,
    OWNER,
    SCHEDULED,
    TENSOR,
    Communicator,
    make_recorder,
)
from vllm_k25_instrument.hooks.arguments import message_bytes
from vllm_k25_instrument.hooks.point import HookKind, HookPoint
from vllm_k25_instrument.hooks.wrappers import wrap
from vllm_k25_instrument.model import Category
from vllm_k25_instrument.recorder.recorder import Recorder


class ThreadedRecorder(Recorder):
    """A recorder that leaves the making of samples to a thread."""

    __slots__ = ("queue", "reader")

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.queue: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    def drain(self) -> None:
        while self._pending:
            self.queue.put(self._pending.popleft())

    def _read(self) -> None:
        while (step := self.queue.get()) is not None:
            self._finish(step)


def engine_steps(recorder: Recorder, call: Any, steps: int) -> list[int]:
    """Wall time of each step of an engine loop, in ns: hooked calls with Python work between them."""
    durations = []
    for _ in range(steps):
        began = perf_counter_ns()
        recorder.begin_step(SCHEDULED)
        for _ in range(CALLS_PER_STEP):
            call(OWNER, TENSOR)
            sum(range(120))
        recorder.end_step()
        sum(range(20_000))  # the next step's scheduling
        durations.append(perf_counter_ns() - began)
    return durations


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=300)
    options = parser.parse_args()
    point = HookPoint(
        "all_reduce",
        HookKind.RANGE,
        "m",
        "Communicator.all_reduce",
        category=Category.ALL_REDUCE,
        detail=lambda args, kwargs: "pynccl",
        nbytes=message_bytes,
    )
    with tempfile.TemporaryDirectory() as folder:
        made = {"not sampled": make_recorder(Path(folder), 1_000_000), "engine thread": make_recorder(Path(folder), 1)}
        (Path(folder) / "thread").mkdir()
        made["reader thread"] = make_recorder(Path(folder) / "thread", 1, ThreadedRecorder)
        calls = {name: wrap(Communicator.all_reduce, point, recorder) for name, recorder in made.items()}
        results: dict[str, list[tuple[float, float]]] = {name: [] for name in made}
        for name, recorder in made.items():
            engine_steps(recorder, calls[name], options.steps // 3)
        for _ in range(options.rounds):
            for name, recorder in made.items():
                durations = engine_steps(recorder, calls[name], options.steps)
                results[name].append((statistics.median(durations), statistics.quantiles(durations, n=100)[98]))
    print(f"{'samples made on':18}{'p50, us':>10}{'p99, us':>10}{'p50 ratio':>12}{'p99 ratio':>12}")
    for name, rounds in results.items():
        ratios = [
            statistics.median(a[i] / b[i] for a, b in zip(rounds, results["not sampled"], strict=True)) for i in (0, 1)
        ]
        middle = [statistics.median(r[i] for r in rounds) / 1000 for i in (0, 1)]
        print(f"{name:18}{middle[0]:10.0f}{middle[1]:10.0f}{ratios[0]:12.3f}{ratios[1]:12.3f}")


if __name__ == "__main__":
    main()
