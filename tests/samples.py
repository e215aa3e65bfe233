"""Samples, rings and processes for the tests of the storage and start-up layers."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from vllm_k25_instrument.model import (
    CATEGORY_CODE,
    GRAPH_MODES,
    HOOKED_CATEGORIES,
    NO_LAYER,
    NO_PARENT,
    PHASES,
    GraphMode,
    Phase,
    Range,
    StepSample,
    pack_sample,
)

ROOT: Final = Path(__file__).resolve().parent.parent
DETAILS: Final = ("", "pynccl", "cpu_shm", "MarlinExperts", "decode TritonMLAImpl")


def pack(sample: StepSample, details: Sequence[str] = DETAILS) -> bytes:
    """The bytes of a sample, its details being those of the table `details`."""
    rows = [
        (
            r.start_ns,
            r.duration_ns,
            r.bytes,
            r.layer,
            r.parent,
            details.index(r.detail),
            r.stream,
            CATEGORY_CODE[r.category],
        )
        for r in sample.ranges
    ]
    columns = {"range_columns": list(zip(*rows, strict=True))} if rows else {}
    return pack_sample(
        step=sample.step,
        phase_code=PHASES.index(sample.phase),
        requests=sample.requests,
        tokens=sample.tokens,
        padded_tokens=sample.padded_tokens,
        graph_code=GRAPH_MODES.index(sample.graph_mode),
        start_unix_ns=sample.start_unix_ns,
        duration_ns=sample.duration_ns,
        host_ns=sample.host_ns,
        gap_ns=sample.gap_ns,
        overhead_ns=sample.overhead_ns,
        complete=sample.complete,
        **columns,
    )


def random_sample(rng: random.Random, ranges: int = 40) -> StepSample:
    """A sample of properly nested ranges on one stream, with values from all over their fields."""
    duration = rng.randrange(1, 1 << rng.randrange(1, 50))
    made: list[Range] = []

    def fill(start: int, end: int, parent: int) -> None:
        at = start
        while len(made) < ranges and at < end and rng.random() < 0.8:
            begin = rng.randint(at, end)
            at = rng.randint(begin, end)
            index = len(made)
            made.append(
                Range(
                    category=rng.choice(HOOKED_CATEGORIES),
                    start_ns=begin,
                    duration_ns=at - begin,
                    detail=rng.choice(DETAILS),
                    layer=rng.choice((NO_LAYER, 0, 60, 32_767)),
                    bytes=rng.choice((0, 14_336, (1 << 64) - 1)),
                    parent=parent,
                )
            )
            fill(begin, at, index)

    fill(0, duration, NO_PARENT)
    return StepSample(
        step=rng.randrange(1 << 64),
        phase=rng.choice(list(Phase)),
        requests=rng.randrange(1 << 32),
        tokens=rng.randrange(1 << 32),
        padded_tokens=rng.randrange(1 << 32),
        graph_mode=rng.choice(list(GraphMode)),
        start_unix_ns=rng.randrange(1 << 64),
        duration_ns=duration,
        ranges=tuple(made),
        host_ns=rng.randrange(1 << 64),
        gap_ns=rng.randrange(-(1 << 63), 1 << 63),
        overhead_ns=rng.randrange(1 << 64),
        complete=rng.random() < 0.5,
    )


def derived_sample(step: int) -> StepSample:
    """A sample all of whose fields follow from the step's number, so that a torn one gives itself away."""
    count = step % 12
    return StepSample(
        step=step,
        phase=PHASES[step % len(PHASES)],
        requests=step % 97,
        tokens=step % 1_009,
        padded_tokens=step % 4_099,
        graph_mode=GRAPH_MODES[step % len(GRAPH_MODES)],
        start_unix_ns=step * 7,
        duration_ns=step * 11,
        ranges=tuple(
            Range(
                category=HOOKED_CATEGORIES[(step + n) % len(HOOKED_CATEGORIES)],
                start_ns=step + n,
                duration_ns=step * 3 + n,
                layer=n,
                bytes=step * 5,
                parent=n - 1,
            )
            for n in range(count)
        ),
        host_ns=step * 17,
        gap_ns=step * 19,
        overhead_ns=step * 13,
        complete=step % 2 == 0,
    )


@contextmanager
def child(work: Callable[[], None]) -> Iterator[int]:
    """A forked process that does `work`; killed with -9, and gone, when the block ends."""
    pid = os.fork()
    if pid == 0:
        try:
            work()
        finally:
            os._exit(0)
    try:
        yield pid
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def wait_for(condition: Callable[[], bool], seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it has not happened"
        time.sleep(0.002)


def run_python(code: str, *arguments: object, **environment: str | None) -> subprocess.CompletedProcess[str]:
    """Run `code` in a fresh interpreter with no K25_* variables but those given (None unsets one)."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("K25_", "VLLM_", "RAY_"))}
    for name, value in environment.items():
        env.pop(name, None)
        if value is not None:
            env[name] = value
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        env=env,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
