"""How long it takes to read a large nsys export, against iterating over its rows with plain SELECTs.

    python benchmarks/nsys_reading.py [--kernels 1000000] [--keep FILE]

The export is one rank of Kimi-K2.5 under ``--cuda-graph-trace=node``: steps of 915 kernels, most of them replayed, with
NVTX ranges at capture and around each step, every graph node cloned a few times. Each reading is a process of its own,
so that peak memory is its own too.
"""

from __future__ import annotations

import argparse
import resource
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

KERNELS_PER_STEP = 915
EAGER_PER_STEP = 15
GRAPHS = 35
PROCESS = 1 << 48 | 4242 << 24
THREAD = PROCESS | 4242
COLUMNS = [
    "start", "end", "deviceId", "contextId", "greenContextId", "streamId", "correlationId", "globalPid",
    "demangledName", "shortName", "mangledName", "launchType", "cacheConfig", "registersPerThread",
    "gridX", "gridY", "gridZ", "blockX", "blockY", "blockZ", "staticSharedMemory", "dynamicSharedMemory",
    "localMemoryPerThread", "localMemoryTotal", "gridId", "sharedMemoryExecuted", "graphNodeId",
    "sharedMemoryLimitConfig",
]  # fmt: skip


def generate(path: Path, kernels: int) -> None:
    """Write the export."""
    connection = sqlite3.connect(path)
    connection.execute("PRAGMA journal_mode=OFF")
    connection.execute("PRAGMA synchronous=OFF")
    columns = ", ".join(f'"{column}" INTEGER' for column in COLUMNS)
    connection.execute(f"CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL ({columns})")
    connection.execute(
        'CREATE TABLE CUPTI_ACTIVITY_KIND_RUNTIME (start INTEGER, "end" INTEGER, eventClass INTEGER, '
        "globalTid INTEGER, correlationId INTEGER, nameId INTEGER, returnValue INTEGER, callchainId INTEGER)"
    )
    connection.execute(
        'CREATE TABLE NVTX_EVENTS (start INTEGER, "end" INTEGER, eventType INTEGER, rangeId INTEGER, category INTEGER, '
        "color INTEGER, text TEXT, globalTid INTEGER, textId INTEGER, domainId INTEGER)"
    )
    connection.execute(
        'CREATE TABLE CUDA_GRAPH_NODE_EVENTS (start INTEGER, "end" INTEGER, eventClass INTEGER, globalTid INTEGER, '
        "nameId INTEGER, graphNodeId INTEGER, originalGraphNodeId INTEGER)"
    )
    connection.execute("CREATE TABLE StringIds (id INTEGER PRIMARY KEY, value TEXT)")
    names = [
        f"void marlin_moe_wna16::Marlin<{n}l, 2l, 128, 1, 8, 4, true, 4, 2, false>(int4 const*)" for n in range(80)
    ]
    strings = [*names, "cudaLaunchKernel_v7000", "cudaGraphLaunch_v10000", "Graph Node Creation"]
    connection.executemany("INSERT INTO StringIds VALUES (?, ?)", enumerate(strings, 1))
    launch, graph_launch, creation = len(names) + 1, len(names) + 2, len(names) + 3
    replayed = KERNELS_PER_STEP - EAGER_PER_STEP
    connection.executemany(
        "INSERT INTO CUDA_GRAPH_NODE_EVENTS VALUES (?, ?, 0, ?, ?, ?, ?)",
        (
            (at, at, THREAD, creation, node, original)
            for graph in range(GRAPHS)
            for n in range(replayed)
            for at, node, original in _node(graph, n, replayed)
        ),
    )
    steps = kernels // KERNELS_PER_STEP
    connection.executemany(
        "INSERT INTO NVTX_EVENTS VALUES (?, ?, 59, NULL, NULL, NULL, ?, ?, NULL, 1)", _ranges(steps, replayed)
    )
    blanks = (0,) * (len(COLUMNS) - 11)
    node_at = COLUMNS.index("graphNodeId")

    def rows() -> Iterator[tuple[int | None, ...]]:
        for step in range(steps):
            start = _step_start(step)
            for n in range(KERNELS_PER_STEP):
                correlation = step * 100 + (n if n < EAGER_PER_STEP else EAGER_PER_STEP)
                node = None if n < EAGER_PER_STEP else _clone(step % GRAPHS, n - EAGER_PER_STEP, replayed)
                name = n % len(names) + 1
                begin = start + 200_000 + n * 12_000
                row = (begin, begin + 11_500, 0, 1, None, 7, correlation, PROCESS, name, name, None, *blanks)
                yield (*row[:node_at], node, *row[node_at + 1 :])

    connection.executemany(f"INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES ({','.join('?' * len(COLUMNS))})", rows())
    connection.executemany(
        "INSERT INTO CUPTI_ACTIVITY_KIND_RUNTIME VALUES (?, ?, 0, ?, ?, ?, 0, NULL)",
        (
            (at, at + 4_000, THREAD, step * 100 + n, launch if n < EAGER_PER_STEP else graph_launch)
            for step in range(steps)
            for n in range(EAGER_PER_STEP + 1)
            for at in (_step_start(step) + 1_000 + n * 5_000,)
        ),
    )
    connection.commit()
    connection.close()


def _step_start(step: int) -> int:
    return 10**11 + step * 12_000_000


def _clone(graph: int, n: int, replayed: int) -> int:
    return 1 << 32 | (GRAPHS + graph) * replayed + n


def _node(graph: int, n: int, replayed: int) -> Iterator[tuple[int, int, int | None]]:
    original = 1 << 32 | graph * replayed + n
    at = 10**9 + graph * 10**9 + n * 100_000
    yield at, original, None
    for again in range(3):
        yield at + 5 * 10**8 + again, _clone(graph, n, replayed), original


def _ranges(steps: int, replayed: int) -> Iterator[tuple[int, int, str, int]]:
    for graph in range(GRAPHS):
        at = 10**9 + graph * 10**9
        yield at - 10, at + 10**8, f"decode step {graph} bs={graph} graph=full", THREAD
        for n in range(0, replayed, 5):
            begin = at + n * 100_000 - 5
            yield begin, begin + 450_000, f"moe_experts marlin L{n // 15}", THREAD
    for step in range(steps):
        yield _step_start(step), _step_start(step) + 300_000, f"decode step {step} bs=64 graph=full", THREAD


def read(path: Path) -> str:
    """Our reader."""
    from vllm_k25_instrument.analysis.nsys import read_nsys

    (capture,) = read_nsys(path)
    annotated = int((capture.activities.annotation >= 0).sum())
    return f"{len(capture.activities):,} activities, {annotated:,} in ranges, {len(capture.launches):,} launches"


def iterate(path: Path) -> str:
    """Every row that the reader needs, through a Python loop that only sums durations: no join, no ranges."""
    connection = sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True)
    total = count = 0
    for start, end, *_ in connection.execute(
        'SELECT start, "end", deviceId, contextId, streamId, correlationId, globalPid, demangledName, graphNodeId '
        "FROM CUPTI_ACTIVITY_KIND_KERNEL"
    ):
        total += end - start
        count += 1
    for table in ("CUPTI_ACTIVITY_KIND_RUNTIME", "NVTX_EVENTS", "CUDA_GRAPH_NODE_EVENTS"):
        for _row in connection.execute(f"SELECT * FROM {table}"):
            count += 1
    return f"{count:,} rows, {total:,} ns"


WAYS = {"read_nsys": read, "plain SELECTs": iterate}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kernels", type=int, default=1_000_000)
    parser.add_argument("--keep", type=Path, help="keep the export here, or use the one that is there")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.way:
        begin = time.perf_counter()
        found = WAYS[arguments.way](arguments.keep.resolve())
        seconds = time.perf_counter() - begin
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        print(f"{arguments.way:14} {seconds:6.2f} s  peak {peak:6.0f} MiB  {found}", flush=True)
        return
    with tempfile.TemporaryDirectory() as folder:
        path = arguments.keep or Path(folder) / "export.sqlite"
        if not path.exists():
            generate(path, arguments.kernels)
        print(f"{path.stat().st_size / 2**20:,.0f} MiB", flush=True)
        for _ in range(arguments.rounds):
            for way in WAYS:
                subprocess.run([sys.executable, __file__, "--keep", str(path), "--way", way], check=True)


if __name__ == "__main__":
    main()
