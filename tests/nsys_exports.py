"""Synthetic nsys exports with known truth, in the schemas of several nsys versions.

A small simulation of host threads: ranges are pushed and popped, kernels launched, graphs captured, instantiated and
replayed. What it writes down of each piece of GPU work (`Truth`) is what a reader has to find again.
"""

from __future__ import annotations

import random
import sqlite3
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

KERNEL, MEMCPY, MEMSET, GRAPH = range(4)
PUSH_POP, START_END, MARK, DOMAIN_CREATE = 59, 60, 34, 75
FIRST_NS: Final = 1_000_000


@dataclass(frozen=True)
class Schema:
    """What differs between exports of nsys versions (or of exports that somebody filtered)."""

    name: str = "2026.2"
    node_table: str = "CUDA_GRAPH_NODE_EVENTS"
    suffix: str = ""
    mode_prefix: str = ""
    nulls: bool = True
    """False: the columns are NOT NULL, and a missing value is written as 0 (or -1 for the end of a range)."""
    green_contexts: bool = True
    registered_strings: bool = True
    thread_of_nodes: bool = True
    tables_left_out: frozenset[str] = frozenset()
    columns_left_out: frozenset[str] = frozenset()


SCHEMAS: Final = {
    schema.name: schema
    for schema in (
        Schema("2022.1", node_table="CUDA_GRAPH_EVENTS", mode_prefix="PROCESS_0:", nulls=False, green_contexts=False),
        Schema("2023.4", mode_prefix="PROCESS_0:", green_contexts=False),
        Schema("2024.6", green_contexts=False),
        Schema("2026.2"),
        Schema("suffixed", suffix="_V3"),
        Schema("no textId", registered_strings=False),
        Schema("nodes without threads", thread_of_nodes=False),
        Schema("few columns", columns_left_out=frozenset({"contextId", "shortName", "mangledName", "copyKind"})),
    )
}


@dataclass(frozen=True)
class Truth:
    """One piece of GPU work: where and when (ns) it ran, and the ranges that it belongs to, innermost first."""

    process: int
    device: int
    kind: int
    name: str
    start_ns: int
    duration_ns: int
    stream: int
    bytes: int
    launch_ns: int | None
    ranges: tuple[str, ...]


@dataclass
class Range:
    """A range, open until it is popped. `stack`: the ranges around it, innermost first, itself included."""

    start_ns: int
    name: str
    thread: int
    stack: tuple[str, ...]
    end_ns: int | None = None
    registered: bool = False


@dataclass(frozen=True)
class Node:
    """A captured graph node: what it runs, and the ranges open when it was made."""

    id: int
    kind: int
    name: str
    ranges: tuple[str, ...]
    bytes: int


@dataclass
class Export:
    """The rows of an export, and the truth of them."""

    strings: dict[str, int] = field(default_factory=dict)
    work: dict[int, list[dict[str, Any]]] = field(default_factory=lambda: {kind: [] for kind in range(4)})
    calls: list[dict[str, Any]] = field(default_factory=list)
    nvtx: list[dict[str, Any]] = field(default_factory=list)
    nodes: list[dict[str, Any]] = field(default_factory=list)
    processes: dict[int, str] = field(default_factory=dict)
    truth: list[Truth] = field(default_factory=list)
    mode: str = "Node"
    unix_start_ns: int | None = None

    def string(self, text: str) -> int:
        return self.strings.setdefault(text, len(self.strings) + 1)

    def write(self, path: Path, schema: Schema = SCHEMAS["2026.2"], order: random.Random | None = None) -> Path:
        """Write the export, its rows in random order where `order` is given."""
        path.unlink(missing_ok=True)
        connection = sqlite3.connect(path)
        tables = self._tables(schema)
        for name, (columns, rows) in tables.items():
            if name in schema.tables_left_out:
                continue
            kept = {column: kind for column, kind in columns.items() if column not in schema.columns_left_out}
            suffix = schema.suffix if name.startswith(("CUPTI", "NVTX", "CUDA")) else ""
            written = ", ".join(f'"{column}" {kind}' for column, kind in kept.items())
            connection.execute(f'CREATE TABLE "{name}{suffix}" ({written})')
            listed = list(rows)
            if order is not None:
                order.shuffle(listed)
            connection.executemany(
                f'INSERT INTO "{name}{suffix}" VALUES ({", ".join("?" * len(kept))})',
                [tuple(row.get(column) for column in kept) for row in listed],
            )
        connection.commit()
        connection.close()
        return path

    def _tables(self, schema: Schema) -> dict[str, tuple[dict[str, str], Iterable[Mapping[str, Any]]]]:
        green = {"greenContextId": "INTEGER"} if schema.green_contexts else {}
        base = {
            "start": "INTEGER NOT NULL", "end": "INTEGER NOT NULL", "deviceId": "INTEGER NOT NULL",
            "contextId": "INTEGER", **green, "streamId": "INTEGER", "correlationId": "INTEGER", "globalPid": "INTEGER",
        }  # fmt: skip
        node = {"graphNodeId": "INTEGER"}
        tables: dict[str, tuple[dict[str, str], Iterable[Mapping[str, Any]]]] = {}
        names = dict.fromkeys(("demangledName", "shortName", "mangledName"), "INTEGER")
        for kind, table, extra in (
            (KERNEL, "KERNEL", {**names, "gridX": "INTEGER", **node}),
            (MEMCPY, "MEMCPY", {"bytes": "INTEGER", "copyKind": "INTEGER", **node}),
            (MEMSET, "MEMSET", {"value": "INTEGER", "bytes": "INTEGER", **node}),
            (GRAPH, "GRAPH_TRACE", {"graphId": "INTEGER", "graphExecId": "INTEGER"}),
        ):
            if self.work[kind]:
                rows = [_filled(row, schema.nulls) for row in self.work[kind]]
                tables[f"CUPTI_ACTIVITY_KIND_{table}"] = ({**base, **extra}, rows)
        if self.calls:
            tables["CUPTI_ACTIVITY_KIND_RUNTIME"] = (
                {
                    "start": "INTEGER", "end": "INTEGER", "eventClass": "INTEGER", "globalTid": "INTEGER",
                    "correlationId": "INTEGER", "nameId": "INTEGER", "returnValue": "INTEGER",
                },
                self.calls,
            )  # fmt: skip
        if self.nvtx:
            text_id = {"textId": "INTEGER"} if schema.registered_strings else {}
            tables["NVTX_EVENTS"] = (
                {
                    "start": "INTEGER", "end": "INTEGER", "eventType": "INTEGER", "text": "TEXT",
                    "globalTid": "INTEGER", **text_id, "domainId": "INTEGER",
                },
                [self._nvtx_row(row, schema) for row in self.nvtx],
            )  # fmt: skip
        if self.nodes:
            thread = {"globalTid": "INTEGER"} if schema.thread_of_nodes else {}
            tables[schema.node_table] = (
                {
                    "start": "INTEGER", "end": "INTEGER", "eventClass": "INTEGER", **thread, "nameId": "INTEGER",
                    "graphNodeId": "INTEGER", "originalGraphNodeId": "INTEGER",
                },
                [_filled({**row, "nameId": self.string("Graph Node Creation")}, schema.nulls) for row in self.nodes],
            )  # fmt: skip
        tables["META_DATA_CAPTURE"] = (
            {"name": "TEXT", "value": "TEXT"},
            [{"name": f"{schema.mode_prefix}CUDA_GRAPH_TRACE_OPTIONS:MODE", "value": self.mode}],
        )
        if self.processes:
            tables["PROCESSES"] = (
                {"globalPid": "INTEGER", "pid": "INTEGER", "name": "TEXT"},
                [{"globalPid": key, "pid": key >> 24 & 0xFFFFFF, "name": name} for key, name in self.processes.items()],
            )
        if self.unix_start_ns is not None:
            tables["TARGET_INFO_SESSION_START_TIME"] = ({"utcEpochNs": "INTEGER"}, [{"utcEpochNs": self.unix_start_ns}])
        tables["StringIds"] = (
            {"id": "INTEGER NOT NULL PRIMARY KEY", "value": "TEXT NOT NULL"},
            [{"id": number, "value": text} for text, number in self.strings.items()],
        )
        return tables

    def _nvtx_row(self, row: Mapping[str, Any], schema: Schema) -> dict[str, Any]:
        row = dict(row)
        if row.pop("registered", False) and schema.registered_strings:
            row["textId"] = self.string(row.pop("text"))
        if row.get("end") is None and not schema.nulls:
            row["end"] = -1
        return row


def _filled(row: Mapping[str, Any], nulls: bool) -> Mapping[str, Any]:
    return row if nulls else {"graphNodeId": 0, "originalGraphNodeId": 0, "mangledName": 0, **_without_none(row)}


def _without_none(row: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in row.items() if value is not None}


def process_id(pid: int) -> int:
    """A serialized process id, as nsys writes it: hardware 0, VM 1."""
    return 1 << 48 | pid << 24


class Process:
    """A simulated process that launches work, on one clock with its siblings."""

    def __init__(self, export: Export, clock: Clock, pid: int, name: str = "python", device: int = 0) -> None:
        self.export = export
        self.clock = clock
        self.id = process_id(pid)
        self.pid = pid
        self.device = device
        self.correlation = 0
        self.node = 0
        export.processes[self.id] = name

    def thread(self, number: int = 0) -> Thread:
        """A thread of it; 0 is the main one."""
        return Thread(self, self.id | (self.pid + number))


class Clock:
    """Nanoseconds that never stand still, so that no two events coincide."""

    def __init__(self, rng: random.Random) -> None:
        self.now = FIRST_NS
        self.gpu = FIRST_NS
        self._rng = rng

    def tick(self) -> int:
        self.now += self._rng.randint(1, 5_000)
        return self.now

    def gpu_tick(self) -> int:
        """The next start of work: never before the host's time, often long after."""
        self.gpu = max(self.gpu, self.now) + self._rng.randint(1, 3_000)
        return self.gpu


class Thread:
    """A host thread: a stack of ranges, and launches."""

    def __init__(self, process: Process, thread: int) -> None:
        self.process = process
        self.id = thread
        self.open: list[Range] = []
        self._rng = process.clock._rng

    @property
    def ranges(self) -> tuple[str, ...]:
        return self.open[-1].stack if self.open else ()

    def push(self, name: str, registered: bool = False) -> None:
        self.open.append(Range(self.process.clock.tick(), name, self.id, (name, *self.ranges), registered=registered))

    def pop(self) -> None:
        self._write(self.open.pop(), self.process.clock.tick())

    def leak(self, name: str) -> None:
        """A range that is pushed and never popped: it is written without an end, and is nobody's context."""
        self._write(Range(self.process.clock.tick(), name, self.id, ()), None)

    def mark(self, text: str, kind: int = MARK, domain: int = 0) -> None:
        self.process.export.nvtx.append(
            {
                "start": self.process.clock.tick(),
                "eventType": kind,
                "text": text,
                "globalTid": self.id,
                "domainId": domain,
            }
        )

    def launch(self, name: str, kind: int = KERNEL, stream: int = 7, size: int = 0) -> None:
        """An eager launch."""
        api = {KERNEL: "cudaLaunchKernel_v7000", MEMCPY: "cudaMemcpyAsync_v3020", MEMSET: "cudaMemsetAsync_v3020"}[kind]
        at, correlation = self._call(api)
        self._work(kind, name, stream, size, at, correlation, None, self.ranges)

    def capture(self, kernels: Sequence[tuple[str, str]]) -> list[Node]:
        """Capture a graph: (kernel, range pushed around its capture; "" for none) each make one node."""
        graph = []
        for kernel, around in kernels:
            if around:
                self.push(around, registered=self._rng.random() < 0.5)
            self.process.node += 1
            node = Node(self.process.node, KERNEL, kernel, self.ranges, 0)
            self._node(node.id, None)
            graph.append(node)
            if around:
                self.pop()
        return graph

    def instantiate(
        self, graph: Sequence[Node], times: int = 1, thread: Thread | None = None
    ) -> list[tuple[int, Node]]:
        """Clone the nodes of a graph; (id of the clone, node). Noted `times` over, as vLLM's warm-ups make nsys do."""
        clones = []
        for node in graph:
            self.process.node += 1
            for _ in range(times):
                (thread or self)._node(self.process.node, node.id)
            clones.append((self.process.node, node))
        return clones

    def clone(self, clones: Sequence[tuple[int, Node]]) -> list[tuple[int, Node]]:
        """Clones of clones."""
        again = []
        for original, node in clones:
            self.process.node += 1
            self._node(self.process.node, original)
            again.append((self.process.node, node))
        return again

    def replay(self, clones: Sequence[tuple[int, Node]], stream: int = 7) -> None:
        """One graph launch, many kernels under its correlation."""
        at, correlation = self._call("cudaGraphLaunch_v10000")
        around = self.ranges
        for number, node in clones:
            self._work(node.kind, node.name, stream, node.bytes, at, correlation, number, node.ranges or around)

    def replay_opaque(self, graph: int, stream: int = 7) -> None:
        """One graph launch in a graph-level trace: one row for all of it."""
        at, correlation = self._call("cudaGraphLaunch_v10000")
        self._work(GRAPH, f"CUDA graph {graph} (opaque)", stream, 0, at, correlation, None, self.ranges, graph=graph)

    def other_call(self) -> None:
        """A call that launches nothing."""
        self._call("cudaEventRecord_v3020")

    def _call(self, api: str) -> tuple[int, int]:
        process = self.process
        process.correlation += self._rng.randint(1, 3)
        at = process.clock.tick()
        process.export.calls.append(
            {
                "start": at, "end": process.clock.tick(), "eventClass": 0, "globalTid": self.id, "returnValue": 0,
                "correlationId": process.correlation, "nameId": process.export.string(api),
            }
        )  # fmt: skip
        return at, process.correlation

    def _work(
        self, kind: int, name: str, stream: int, size: int, at: int, correlation: int, node: int | None,
        ranges: tuple[str, ...], graph: int = 0,
    ) -> None:  # fmt: skip
        process, export = self.process, self.process.export
        start = process.clock.gpu_tick()
        end = start + self._rng.randint(0, 9_000)
        process.clock.gpu = start if self._rng.random() < 0.2 else end
        row = {
            "start": start, "end": end, "deviceId": process.device, "contextId": 1, "streamId": stream,
            "correlationId": correlation, "globalPid": process.id, "graphNodeId": node, "bytes": size,
        }  # fmt: skip
        if kind == KERNEL:
            row |= {"demangledName": export.string(name), "shortName": export.string(name.split("<")[0])}
        elif kind == MEMCPY:
            row |= {"copyKind": 1}
        elif kind == GRAPH:
            row |= {"graphId": graph, "graphExecId": graph + 1}
        else:
            row |= {"value": 0}
        export.work[kind].append(row)
        export.truth.append(
            Truth(process.pid, process.device, kind, name, start, end - start, stream, size, at, ranges)
        )

    def _node(self, number: int, original: int | None) -> None:
        at = self.process.clock.tick()
        self.process.export.nodes.append(
            {
                "start": at, "end": at, "eventClass": 0, "globalTid": self.id, "graphNodeId": number,
                "originalGraphNodeId": original,
            }
        )  # fmt: skip

    def _write(self, each: Range, end: int | None) -> None:
        self.process.export.nvtx.append(
            {
                "start": each.start_ns, "end": end, "eventType": PUSH_POP, "text": each.name, "globalTid": self.id,
                "domainId": 0, "registered": each.registered,
            }
        )  # fmt: skip


def random_export(seed: int, processes: int = 2, operations: int = 60) -> Export:
    """An export of `processes` that each do `operations` at random: everything that a thread can do, interleaved."""
    rng = random.Random(seed)
    export = Export(unix_start_ns=rng.randrange(1 << 60))
    clock = Clock(rng)
    actors = []
    for number in range(processes):
        process = Process(export, clock, 1_000 + number, f"VLLM::Worker_TP{number}", device=rng.randint(0, 1))
        main = process.thread()
        main.push(f"capture of {number}")
        graph = main.capture([(f"void kernel_{n}<{number}>()", rng.choice(("", f"all_reduce L{n}"))) for n in range(5)])
        main.pop()
        graph += main.capture([("bare_kernel", "")])
        clones = main.instantiate(graph, times=rng.randint(1, 3))
        if rng.random() < 0.5:
            clones = main.clone(clones)
        actors.append((main, process.thread(1), clones))
    for _ in range(operations * processes):
        main, other, clones = rng.choice(actors)
        thread = main if rng.random() < 0.8 else other
        _act(rng, thread, clones if thread is main else [])
    for main, other, _ in actors:
        for thread in (main, other):
            while thread.open:
                thread.pop()
    return export


def _act(rng: random.Random, thread: Thread, clones: Sequence[tuple[int, Node]]) -> None:
    choice = rng.random()
    if choice < 0.2:
        thread.push(
            rng.choice(("decode step 5 bs=64 graph=full", "moe_experts marlin L17", "sampling")), rng.random() < 0.5
        )
    elif choice < 0.4 and thread.open:
        thread.pop()
    elif choice < 0.6:
        thread.launch(rng.choice(("void gemm<4>()", "softmax")), stream=rng.choice((7, 13)))
    elif choice < 0.7:
        thread.launch("Memcpy HtoD", MEMCPY, size=rng.randrange(1 << 30))
    elif choice < 0.75:
        thread.launch("Memset (Device)", MEMSET, size=rng.randrange(1 << 30))
    elif choice < 0.78:
        thread.leak("leaked")
    elif choice < 0.9 and clones:
        thread.replay(clones)
    else:
        thread.other_call()
