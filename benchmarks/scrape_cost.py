"""What a scrape costs, and whether the worker whose ring is read notices it.

    python benchmarks/scrape_cost.py [--rounds N] [--directory DIR]

Builds the full rings of an 8-rank node (8 x 64 MiB, by default on /dev/shm) with the ranges of Kimi-K2.5's decode
steps, and prints

* the CPU milliseconds of a scrape, its text included: the first over full rings, those that find what the ranks have
  sampled in the seconds between two scrapes, those that find nothing new, those that find more than they may read, and
  those with every series that there can be;
* the latency of appending a sampled step, in a process of its own, while this process (a) sleeps, (b) renders the
  same text over and over without reading the rings, (c) scrapes without a pause, hundreds of times more often than a
  Prometheus does. The three alternate, so that the ratios come from one run; (c) against (b) is what reading the rings
  does to the writer, (b) against (a) is what a busy neighbour does on this machine.
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from prometheus_client import CollectorRegistry, Metric, generate_latest

from vllm_k25_instrument.export.cardinality import NODE_RANKS
from vllm_k25_instrument.export.collector import RingCollector
from vllm_k25_instrument.export.waits import EXPORTER_SAMPLES, IN_VLLM_SAMPLES
from vllm_k25_instrument.hooks.names import HOOK_NAMES
from vllm_k25_instrument.instances import default_ring_directory
from vllm_k25_instrument.model import (
    ALL_REDUCE_PATHS,
    BATCH_BUCKETS,
    CATEGORY_CODE,
    GRAPH_MODES,
    LIVE_CATEGORIES,
    LOST_REASONS,
    NO_LAYER,
    NO_PARENT,
    PHASES,
    SIZE_BUCKETS,
    AllReducePath,
    Category,
    GraphMode,
    Phase,
    RankCoordinates,
    RankIdentity,
    pack_sample,
)
from vllm_k25_instrument.ring import DEFAULT_BYTES, DEFAULT_SAMPLES, RingLayout, RingWriter, ring_file_name
from vllm_k25_instrument.totals import MAX_HOOKS, TotalsWriter

LAYERS: Final = 61
BYTES_PER_TOKEN: Final = 14_336
STEP_NS: Final = 12_100_000
SAMPLE_EVERY: Final = 16
SCRAPE_INTERVAL_NS: Final = 15 * 10**9
BETWEEN_SCRAPES: Final = SCRAPE_INTERVAL_NS // (SAMPLE_EVERY * STEP_NS)
"""Sampled steps of a rank between two scrapes."""
PYNCCL: Final = ALL_REDUCE_PATHS.index(AllReducePath.PYNCCL)
SERVED: Final = (  # (phase, graph mode, requests): what such a server comes across
    *((Phase.DECODE, GraphMode.FULL, requests) for requests in (1, 4, 16, 64, 256)),
    *((Phase.PREFILL, GraphMode.NONE, requests) for requests in (1, 4, 16)),
    *((Phase.MIXED, GraphMode.PIECEWISE, requests) for requests in (4, 16, 64, 256)),
)

SLEEPING, RENDERING, SCRAPING, DONE = range(4)
PHASE_SECONDS: Final = 1.0
APPEND_PERIOD: Final = 0.002


class Step:
    """One sampled decode step of Kimi-K2.5, ready to be appended."""

    def __init__(self, phase: Phase, graph_mode: GraphMode, requests: int) -> None:
        self.phase = PHASES.index(phase)
        self.graph_mode = GRAPH_MODES.index(graph_mode)
        self.requests = requests
        self.category_ns = dict.fromkeys(LIVE_CATEGORIES, 0)
        self._ranges: list[tuple[int, ...]] = []
        self._at = 0
        self._add(Category.INPUT_PREPARATION, 180_000)
        for layer in range(LAYERS):
            self._add(Category.MLA_ATTENTION, 21_000, layer)
            self._add(Category.ALL_REDUCE, 56_000, layer, requests * BYTES_PER_TOKEN)
            if layer:  # the first layer is dense
                self._add(Category.MOE_ROUTING, 6_000, layer)
                self._add(Category.MOE_EXPERTS, 31_000, layer)
                self._add(Category.MOE_SHARED_EXPERTS, 5_000, layer)
            self._add(Category.ALL_REDUCE, 56_000, layer, requests * BYTES_PER_TOKEN)
        self._add(Category.SAMPLING, 210_000)
        self.category_ns[Category.UNATTRIBUTED] = STEP_NS - self._at

    def packed(self, number: int) -> bytes:
        """The sample of the `number`-th sampled step."""
        return pack_sample(
            step=SAMPLE_EVERY * number,
            phase_code=self.phase,
            requests=self.requests,
            tokens=self.requests,
            padded_tokens=self.requests,
            graph_code=self.graph_mode,
            start_unix_ns=time.time_ns(),
            duration_ns=STEP_NS,
            overhead_ns=90_000,
            complete=True,
            range_columns=list(zip(*self._ranges, strict=True)),
        )

    def _add(self, category: Category, duration_ns: int, layer: int = NO_LAYER, nbytes: int = 0) -> None:
        self._ranges.append((self._at, duration_ns, nbytes, layer, NO_PARENT, 0, 0, CATEGORY_CODE[category]))
        self.category_ns[category] += duration_ns
        self._at += duration_ns

    def append_to(self, ring: RingWriter, packed: bytes) -> None:
        """What a worker does at the end of a sampled step, but for the all-reduces, counted as they happen."""
        ring.append(packed)
        ring.totals.add_step(self.phase, STEP_NS)
        ring.totals.add_sample(self.phase, self.graph_mode, self.requests, STEP_NS, tuple(self.category_ns.values()))
        ring.totals.add_overhead(90_000)

    def count_all_reduces(self, totals: TotalsWriter) -> None:
        for _ in range(2 * LAYERS):
            totals.add_all_reduces(PYNCCL, [56_000], [self.requests * BYTES_PER_TOKEN])


def new_ring(folder: Path, rank: int) -> RingWriter:
    coordinates = RankCoordinates(global_rank=rank, local_rank=rank, tp=rank, tp_size=NODE_RANKS)
    identity = RankIdentity(
        instance="benchmark",
        pid=0,
        coordinates=coordinates,
        model="moonshotai/Kimi-K2.5",
        hooks=dict.fromkeys(HOOK_NAMES, "attached"),
    )
    return RingWriter(folder / ring_file_name(rank), identity, RingLayout.plan(DEFAULT_SAMPLES, DEFAULT_BYTES))


class Node:
    """The rings of a server, whose ranks sample the same steps."""

    def __init__(self, folder: Path) -> None:
        self.steps = [Step(*kind) for kind in SERVED]
        self.rings = [new_ring(folder, rank) for rank in range(NODE_RANKS)]
        self.sampled = 0

    def sample(self, steps: int) -> None:
        for number in range(self.sampled, self.sampled + steps):
            step = self.steps[number % len(self.steps)]
            packed = step.packed(number)
            for ring in self.rings:
                step.append_to(ring, packed)
                step.count_all_reduces(ring.totals)
                ring.publish()
        self.sampled += steps


def touch_everything(totals: TotalsWriter) -> None:
    """Every series there can be: all groups of batches and more, all paths, sizes, reasons and hooks."""
    shares = [STEP_NS // len(LIVE_CATEGORIES)] * len(LIVE_CATEGORIES)
    for graph in range(len(GRAPH_MODES)):
        for requests in (*BATCH_BUCKETS, BATCH_BUCKETS[-1] + 1):
            for phase in range(len(PHASES)):
                totals.add_step(phase, STEP_NS)
                totals.add_sample(phase, graph, requests, STEP_NS, shares)
    for path in range(len(ALL_REDUCE_PATHS)):
        for nbytes in (*SIZE_BUCKETS, SIZE_BUCKETS[-1] + 1):
            totals.add_all_reduces(path, [78_000], [nbytes])
    for reason in range(len(LOST_REASONS)):
        totals.add_lost(reason)
    for hook in range(MAX_HOOKS):
        totals.add_hook_error(hook)


def scrape_cost(
    registry: CollectorRegistry, scrapes: int, between: Callable[[], None] = lambda: None
) -> dict[str, float]:
    """CPU milliseconds of one scrape (of the whole process: median and maximum), and its size."""
    costs = []
    text = b""
    for _ in range(scrapes):
        between()
        gc.collect()  # each scrape pays for its own garbage only
        before = time.process_time()
        text = generate_latest(registry)
        costs.append((time.process_time() - before) * 1e3)
    series = sum(not line.startswith(b"#") for line in text.splitlines())
    return {
        "series": series,
        "bytes": len(text),
        "cpu_ms_median": round(statistics.median(costs), 2),
        "cpu_ms_max": round(max(costs), 2),
    }


class Collected:
    """What a scrape found, to be rendered again."""

    def __init__(self, families: list[Metric]) -> None:
        self.families = families

    def collect(self) -> list[Metric]:
        return self.families


def append_steadily(folder: Path, phase: Any, answer: Any) -> None:
    """The worker: a sampled step every few milliseconds; answers how long each took, by what the others did."""
    ring = new_ring(folder, 0)
    step = Step(*SERVED[0])
    packed = step.packed(1)
    latencies: dict[int, list[int]] = {SLEEPING: [], RENDERING: [], SCRAPING: []}
    answer.send("ready")
    while (now := phase.value) != DONE:
        before = time.perf_counter_ns()
        step.append_to(ring, packed)
        ring.publish()
        taken = time.perf_counter_ns() - before
        if phase.value == now:
            latencies[now].append(taken)
        time.sleep(APPEND_PERIOD)
    answer.send(latencies)


def folder_without_first_rank(node: Node, folder: Path) -> Path:
    """A folder with the rings of the others: the first rank's is held by this process, and another is to write one."""
    others = folder / "others"
    others.mkdir()
    for ring in node.rings[1:]:
        ring.path.rename(others / ring.path.name)
    return others


def append_latency(folder: Path, rounds: int) -> dict[str, Any]:
    registry = CollectorRegistry()
    registry.register(RingCollector(lambda: folder))
    context = multiprocessing.get_context("spawn")
    phase = context.Value("i", SLEEPING)
    ours, theirs = context.Pipe()
    worker = context.Process(target=append_steadily, args=(folder, phase, theirs))
    worker.start()
    ours.recv()
    rendered = Collected(list(registry.collect()))
    scrapes = 0
    loads = (SLEEPING, RENDERING, SCRAPING)
    for n in range(rounds):
        for doing in (*loads[n % 3 :], *loads[: n % 3]):  # each takes its turn at coming first
            phase.value = doing
            end = time.monotonic() + PHASE_SECONDS
            while time.monotonic() < end:
                if doing == SLEEPING:
                    time.sleep(PHASE_SECONDS)
                elif doing == RENDERING:
                    generate_latest(rendered)
                else:
                    generate_latest(registry)
                    scrapes += 1
    phase.value = DONE
    latencies = ours.recv()
    worker.join()
    figures = {doing: quantiles(latencies[doing]) for doing in (SLEEPING, RENDERING, SCRAPING)}
    ratios = {
        f"{name}_{quantile}": round(figures[over][quantile] / figures[under][quantile], 3)
        for name, over, under in (
            ("scraping_over_rendering", SCRAPING, RENDERING),
            ("scraping_over_sleeping", SCRAPING, SLEEPING),
            ("rendering_over_sleeping", RENDERING, SLEEPING),
        )
        for quantile in ("p50", "p99")
    }
    return {
        "scrapes": scrapes,
        "append_us": {"sleeping": figures[SLEEPING], "rendering": figures[RENDERING], "scraping": figures[SCRAPING]},
        "ratios": ratios,
    }


def quantiles(latencies_ns: list[int]) -> dict[str, float]:
    cuts = statistics.quantiles(latencies_ns, n=100)
    return {"p50": round(cuts[49] / 1e3, 2), "p99": round(cuts[98] / 1e3, 2), "appends": len(latencies_ns)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=6, help="how often the three loads alternate, 3 s each time")
    parser.add_argument("--scrapes", type=int, default=30, help="scrapes whose CPU time is taken")
    parser.add_argument("--directory", type=Path, help="where to put the rings (default: /dev/shm where there is one)")
    arguments = parser.parse_args()
    memory = default_ring_directory().parent
    folder = Path(tempfile.mkdtemp(prefix="k25-scrape-", dir=arguments.directory or memory))
    try:
        node = Node(folder)
        slots = node.rings[0].layout.slots
        node.sample(slots)
        registry = CollectorRegistry()
        registry.register(RingCollector(lambda: folder))
        result: dict[str, Any] = {
            "ranks": NODE_RANKS,
            "ring_slots": slots,
            "new_samples_per_rank": BETWEEN_SCRAPES,
            "first_scrape_of_full_rings": scrape_cost(registry, 1),
            "scrape": scrape_cost(registry, arguments.scrapes, lambda: node.sample(BETWEEN_SCRAPES)),
            "scrape_without_new_samples": scrape_cost(registry, arguments.scrapes),
        }
        for bound in (IN_VLLM_SAMPLES, EXPORTER_SAMPLES):
            fresh = CollectorRegistry()
            fresh.register(RingCollector(lambda: folder, bound))
            result[f"scrape_at_the_bound_of_{bound}_samples"] = scrape_cost(
                fresh, 3, lambda bound=bound: node.sample(bound // NODE_RANKS + 1)
            )
        for ring in node.rings:
            touch_everything(ring.totals)
            ring.publish()
        result["scrape_of_every_series"] = scrape_cost(registry, arguments.scrapes)
        result["concurrent_writer"] = append_latency(folder_without_first_rank(node, folder), arguments.rounds)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print(json.dumps(result, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
