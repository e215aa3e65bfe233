"""`bench overhead`: what this package itself costs on this machine, piece by piece.

A step is taken to have as many ranges as one of Kimi-K2.5 (:data:`CALLS_PER_STEP`). All variants take turns in every
repeat, so that a drifting machine drifts under all of them, and differences are taken repeat by repeat.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter_ns
from typing import Any, Final

import torch
from prometheus_client import CollectorRegistry, generate_latest

from vllm_k25_instrument.bench.document import BenchDocument, BenchMachine, Kind, Remark, Row
from vllm_k25_instrument.bench.hooked_calls import CALLS_PER_STEP, SCHEDULED, HookedCalls, make_recorder
from vllm_k25_instrument.bench.intervals import median_interval
from vllm_k25_instrument.bench.timing import CudaTimer, Repeats, Timer, no_collection
from vllm_k25_instrument.export.collector import RingCollector
from vllm_k25_instrument.model import (
    CATEGORY_CODE,
    GRAPH_MODES,
    NO_PARENT,
    PHASES,
    Category,
    GraphMode,
    Phase,
    pack_sample,
)
from vllm_k25_instrument.settings import Settings

KERNELS: Final = 64
"""Kernels of the graph that is replayed with and without timing events between them."""

WARM_UP: Final = 3
CALLS: Final = 10 * CALLS_PER_STEP

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class OverheadPlan:
    """How often everything is repeated, and of how many steps one is taken to be sampled."""

    repeats: int
    sample_every: int = Settings.model_fields["sample_every"].default

    def settings(self) -> dict[str, Any]:
        """The options, for the document."""
        return {"repeats": self.repeats, "calls_per_step": CALLS_PER_STEP, "sample_every": self.sample_every}


def run_overhead(
    plan: OverheadPlan, machine: BenchMachine, *, say: Say, in_memory: Path | None = None
) -> BenchDocument:
    """Measure all of it; the rings are in a folder made in `in_memory` (the default is that of temporary files)."""
    rows: list[Row] = []
    warnings: list[Remark] = []
    with tempfile.TemporaryDirectory(prefix="vllm_k25_bench-", dir=in_memory) as name:
        folder = Path(name)
        say("hooked calls")
        called = hooked_rows(plan.repeats, folder)
        rows += called.rows
        say("ring and scrape")
        rows += ring_rows(plan.repeats, folder)
    summary = per_step(called, plan.sample_every)
    if machine.device == "cpu":
        warnings.append(Remark("no_gpu_events", "no CUDA events and no twin graphs on a CPU: their cost is not here"))
    else:
        say("timing events")
        rows += cuda_rows(plan.repeats)
        warnings.append(
            Remark("not_run_on_gpu", "the rows of CUDA events have not yet been run on a GPU by its authors")
        )
    return BenchDocument(
        Kind.OVERHEAD, machine, tuple(rows), settings=plan.settings(), summary=summary, warnings=tuple(warnings)
    )


@dataclass(frozen=True, slots=True)
class HookedRows:
    """The rows of the hooked calls, and what each adds to a bare call: ns, repeat by repeat."""

    rows: tuple[Row, ...]
    added_not_sampled: tuple[float, ...]
    added_sampled: tuple[float, ...]


def hooked_rows(repeats: int, folder: Path) -> HookedRows:
    """A call bare, hooked in unsampled steps, hooked in sampled steps, and the end of a sampled step."""
    hooked = HookedCalls.make(folder)
    bare, not_sampled, sampled, ends = [], [], [], []
    with no_collection():
        for repeat in range(-WARM_UP, repeats):
            one, two = hooked.bare(CALLS), hooked.not_sampled(CALLS)
            steps = [hooked.sampled_step() for _ in range(CALLS // CALLS_PER_STEP)]
            if repeat >= 0:
                bare.append(one)
                not_sampled.append(two)
                sampled.append(sum(a + b for a, b in steps) / CALLS)
                ends.append(sum(b for _, b in steps) / len(steps))
    text = f"a step's {CALLS_PER_STEP} calls"
    rows = (
        *(
            _row(name, path, text, [CALLS_PER_STEP * ns for ns in each], calls=CALLS_PER_STEP)
            for name, path, each in (
                ("call, bare", "Python", bare),
                ("call, hooked, step not sampled", "hooks.wrappers", not_sampled),
                ("call, hooked, step sampled", "hooks.wrappers, recorder, ring", sampled),
            )
        ),
        _row("end of a sampled step", "recorder, ring", f"a sample of {CALLS_PER_STEP} ranges made and written", ends),
    )
    return HookedRows(
        rows,
        tuple(a - b for a, b in zip(not_sampled, bare, strict=True)),
        tuple(a - b for a, b in zip(sampled, bare, strict=True)),
    )


def per_step(called: HookedRows, sample_every: int) -> dict[str, float]:
    """Derived, in ns: what a hooked call adds, what that makes per step, and per step in the mean at 1 of N sampled."""
    not_sampled = max(float(median_interval(called.added_not_sampled).ns), 0.0)
    sampled = max(float(median_interval(called.added_sampled).ns), 0.0)
    unsampled_step, sampled_step = CALLS_PER_STEP * not_sampled, CALLS_PER_STEP * sampled
    return {
        "added_per_call_not_sampled_ns": not_sampled,
        "added_per_call_sampled_ns": sampled,
        "added_per_step_not_sampled_ns": unsampled_step,
        "added_per_step_sampled_ns": sampled_step,
        f"added_per_step_at_1_of_{sample_every}_ns": ((sample_every - 1) * unsampled_step + sampled_step)
        / sample_every,
    }


def ring_rows(repeats: int, folder: Path) -> list[Row]:
    """Appending a sample to a ring, and a scrape of one rank that finds a new sample, its text included."""
    recorder = make_recorder(folder, 1_000)
    ring = recorder.ring
    packed = sample_bytes()
    appended = []
    with no_collection():
        for _ in range(WARM_UP + repeats):
            began = perf_counter_ns()
            ring.append(packed)
            appended.append(perf_counter_ns() - began)
    recorder.begin_step(SCHEDULED)
    recorder.end_step()
    registry = CollectorRegistry()
    registry.register(RingCollector(lambda: ring.path))
    scraped = []
    text = b""
    for _ in range(WARM_UP + repeats):
        ring.append(packed)
        with no_collection():
            began = perf_counter_ns()
            text = generate_latest(registry)
            scraped.append(perf_counter_ns() - began)
    return [
        _row("append to the ring", "ring", f"{len(packed):,} bytes", appended[WARM_UP:], nbytes=len(packed)),
        _row("scrape of one rank", "export", f"{len(text):,} bytes of text", scraped[WARM_UP:], nbytes=len(text)),
    ]


def sample_bytes() -> bytes:
    """A packed sample with as many ranges as a step of Kimi-K2.5 has."""
    code = CATEGORY_CODE[Category.ALL_REDUCE]
    ranges = [(at * 30_000, 20_000, 14_336, at // 6, NO_PARENT, 0, 0, code) for at in range(CALLS_PER_STEP)]
    return pack_sample(
        step=0,
        phase_code=PHASES.index(Phase.DECODE),
        requests=1,
        tokens=1,
        padded_tokens=1,
        graph_code=GRAPH_MODES.index(GraphMode.NONE),
        start_unix_ns=time.time_ns(),
        duration_ns=12_100_000,
        overhead_ns=90_000,
        complete=True,
        range_columns=list(zip(*ranges, strict=True)),
    )


def cuda_rows(repeats: int, timer: Timer | None = None, kernel: Callable[[], object] | None = None) -> list[Row]:
    """What timing events cost: the host per range in an eager step, the device per replay of a twin.

    A twin is a graph with two external events around each range; the same graph without is replayed beside it.
    `kernel` launches one. Not yet run on a GPU.
    """
    from vllm_k25_instrument.recorder.cuda import CudaDevice

    timer = timer or CudaTimer()
    launch = kernel or _adding_one()
    device = CudaDevice()

    def bare() -> None:
        for _ in range(KERNELS):
            launch()

    kept: list[Any] = []  # a graph's events must outlive it

    def marked() -> None:
        for _ in range(KERNELS):
            kept.append(device.mark())
            launch()
            kept.append(device.mark())

    hosts = []
    for _ in range(WARM_UP + repeats):
        began = perf_counter_ns()
        marks = [device.mark() for _ in range(2 * KERNELS)]
        hosts.append(perf_counter_ns() - began)
        torch.cuda.synchronize()
        device.release(marks)
    often = Repeats(repeats, 60.0)
    plain = timer.times(timer.graphed(bare), often, flush=False)
    timed = timer.times(_graph_with_events(device, marked), often, flush=False)
    text = f"a graph of {KERNELS} kernels"
    return [
        _row("timing events of a range, eager", "recorder.cuda", "two events recorded", hosts[WARM_UP:], calls=KERNELS),
        _row("replay of a graph", "torch.cuda.CUDAGraph", text, plain, calls=KERNELS),
        _row("replay of its twin", "recorder.cuda", f"{text}, two events around each", timed, calls=KERNELS),
    ]


def _adding_one() -> Callable[[], object]:
    tensor = torch.zeros(7168, dtype=torch.bfloat16, device="cuda")
    return lambda: tensor.add_(1)


def _graph_with_events(device: Any, marked: Callable[[], None]) -> Callable[[], object]:
    graph = torch.cuda.CUDAGraph()
    marked()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        device.instrumenting = True
        try:
            marked()
        finally:
            device.instrumenting = False
    replay: Callable[[], object] = graph.replay
    return replay


def _row(name: str, path: str, shape: str, times: Sequence[float], *, calls: int = 1, nbytes: int | None = None) -> Row:
    median = median_interval(times)
    return Row(
        name=name,
        path=path,
        shape=shape,
        median_ns=median.ns,
        low_ns=median.low_ns,
        high_ns=median.high_ns,
        repeats=median.count,
        calls=calls,
        bytes=nbytes,
        floor_reason="no physical floor of a program's own bookkeeping",
    )
