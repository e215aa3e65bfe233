"""Reads the tables of an export, brings them into one form whatever the version."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from vllm_k25_instrument.analysis.capture import ActivityKind, Int64
from vllm_k25_instrument.analysis.nsys.database import Database, Rows
from vllm_k25_instrument.analysis.nsys.packing import constant
from vllm_k25_instrument.analysis.nsys.strings import NO_NAME, Names, Strings
from vllm_k25_instrument.analysis.nsys.tables import (
    THREAD_BITS,
    UNKNOWN,
    Calls,
    HostRanges,
    NodeEvents,
    Tables,
    Text,
    Work,
    process_of,
)

NVTX_TABLE: Final = "NVTX_EVENTS"
GRAPH_TABLE: Final = "CUPTI_ACTIVITY_KIND_GRAPH_TRACE"
KERNEL_TABLE: Final = "CUPTI_ACTIVITY_KIND_KERNEL"
RUNTIME_TABLES: Final = ("CUPTI_ACTIVITY_KIND_RUNTIME", "CUPTI_ACTIVITY_KIND_DRIVER")
NODE_TABLES: Final = ("CUDA_GRAPH_NODE_EVENTS", "CUDA_GRAPH_EVENTS")
"""The second is where node events were until 2022."""

_LONGEST_NS: Final = 24 * 3_600 * 10**9
_EARLIEST_NS: Final = -(1 << 61)
_LATEST_NS: Final = 1 << 61
_NEVER: Final = -(1 << 62)

_RANGE_TYPES: Final = (59, 60, 70, 71)
"""Push/pop and start/end ranges of NVTX and of its extension: NvtxPushPopRange and so on in ENUM_NSYS_EVENT_TYPE."""
_MARK_TYPE: Final = 34
_DOMAIN_TYPE: Final = 75

_API_SUFFIX = re.compile(r"(?:_ptsz|_ptds)?(?:_v\d+)?$")
_LAUNCH = re.compile(
    r"(?:cuda|cu|hip)(?:Launch(?:Cooperative)?Kernel|LaunchGrid|GraphLaunch|ModuleLaunch|Memcpy|Memset)"
)
_GRAPH_LAUNCH = re.compile(r"(?:cuda|cu|hip)GraphLaunch")
_KERNEL_LAUNCH = re.compile(r"(?:cuda|cu|hip)(?:Launch|GraphLaunch|ModuleLaunch)")

_COPY_KINDS: Final = {
    1: "HtoD", 2: "DtoH", 3: "HtoA", 4: "AtoH", 5: "AtoA", 6: "AtoD", 7: "DtoA", 8: "DtoD", 9: "HtoH", 10: "PtoP",
    11: "HtoD (unified)", 12: "DtoH (unified)", 13: "DtoD (unified)",
}  # fmt: skip
_MEMORY_KINDS: Final = {0: "Pageable", 1: "Pinned", 2: "Device", 3: "Array", 4: "Managed", 5: "Device Static"}


class TableReader:
    """Reads the tables of one export. `skipped` counts the rows, by table, that lack what they cannot do without."""

    def __init__(self, database: Database, strings: Strings, names: Names) -> None:
        self.skipped: dict[str, int] = {}
        self._database = database
        self._strings = strings
        self._names = names

    def kernels(self) -> Work:
        """Kernels. A name is the demangled one, else the short, else the mangled one, else a number."""
        rows = self._rows(KERNEL_TABLE, _WORK_NEEDED, {**_WORK_WANTED, **dict.fromkeys(_KERNEL_NAMES, NO_NAME)})
        name = np.full(len(rows), NO_NAME, np.int64)
        for column in _KERNEL_NAMES:
            nameless = name == NO_NAME
            if not nameless.any():
                break
            name[nameless] = self._strings.resolve(rows[column][nameless])
        unnamed = name == NO_NAME
        if unnamed.any():
            ids = np.stack([rows[column][unnamed] for column in _KERNEL_NAMES], axis=1)
            distinct, inverse = np.unique(ids, axis=0, return_inverse=True)
            codes = [self._names.code(f"<unnamed kernel {number}>") for number in range(1, len(distinct) + 1)]
            name[unnamed] = np.array(codes, np.int64)[inverse.reshape(-1)]
        return _work(rows, ActivityKind.KERNEL, name, unnamed=unnamed.astype(np.int64))

    def copies(self) -> Work:
        """Copies, named as torch.profiler names them: ``Memcpy HtoD (Pinned -> Device)``."""
        wanted = {**_WORK_WANTED, "bytes": 0, "copyKind": UNKNOWN, "srcKind": UNKNOWN, "dstKind": UNKNOWN}
        rows = self._rows("CUPTI_ACTIVITY_KIND_MEMCPY", _WORK_NEEDED, wanted)
        kinds = np.stack([rows[column] for column in ("copyKind", "srcKind", "dstKind")], axis=1)
        distinct, inverse = np.unique(kinds, axis=0, return_inverse=True)
        codes = np.array([self._names.code(_copy_name(*map(int, row))) for row in distinct], np.int64)
        return _work(rows, ActivityKind.MEMCPY, codes[inverse.reshape(-1)] if len(codes) else _empty())

    def fills(self) -> Work:
        """Fills."""
        rows = self._rows("CUPTI_ACTIVITY_KIND_MEMSET", _WORK_NEEDED, {**_WORK_WANTED, "bytes": 0})
        name = np.full(len(rows), self._names.code("Memset (Device)") if len(rows) else NO_NAME, np.int64)
        return _work(rows, ActivityKind.MEMSET, name)

    def graphs(self) -> Work:
        """Whole graph launches: what a graph-level trace has in place of their kernels."""
        rows = self._rows(GRAPH_TABLE, _WORK_NEEDED, {**_WORK_WANTED, "graphId": UNKNOWN})
        distinct, inverse = np.unique(rows["graphId"], return_inverse=True)
        titles = [f"CUDA graph {graph} (opaque)" if graph != UNKNOWN else "CUDA graph (opaque)" for graph in distinct]
        codes = np.array([self._names.code(title) for title in titles], np.int64)
        return _work(rows, ActivityKind.GRAPH, codes[inverse] if len(codes) else _empty())

    def calls(self) -> Calls:
        """API calls. Names lose the version that nsys adds: ``cudaGraphLaunch_v10000`` is ``cudaGraphLaunch``."""
        parts = [
            self._rows(table, ("start", "end"), {"globalTid": UNKNOWN, "correlationId": UNKNOWN, "nameId": NO_NAME})
            for table in RUNTIME_TABLES
        ]
        rows = {column: np.concatenate([part[column] for part in parts]) for column in parts[0].columns}
        codes = self._strings.resolve(rows["nameId"])
        distinct, inverse = np.unique(codes, return_inverse=True)
        functions = [_API_SUFFIX.sub("", self._names.listed[code]) if code != NO_NAME else "" for code in distinct]
        renamed = np.array([self._names.code(function or "<unnamed call>") for function in functions], np.int64)
        flags = {
            flag: np.array([pattern.match(function) is not None for function in functions], np.int64)
            for flag, pattern in (("is_launch", _LAUNCH), ("is_graph", _GRAPH_LAUNCH), ("is_kernel", _KERNEL_LAUNCH))
        }
        possible = _in_reach(rows["start"])
        self._skip(RUNTIME_TABLES[0], int((~possible).sum()))
        # A call that was not over, or that ends before it starts, is still the launch of its work.
        end = np.where(_possible(rows["start"], rows["end"]), rows["end"], rows["start"])
        calls = Calls(
            start_ns=rows["start"],
            end_ns=end,
            thread=rows["globalTid"],
            process=process_of(rows["globalTid"]),
            correlation=rows["correlationId"],
            name=renamed[inverse] if len(renamed) else _empty(),
            **{flag: values[inverse] if len(values) else _empty() for flag, values in flags.items()},
        )
        return calls.only(possible)

    def host_ranges(self) -> tuple[HostRanges, list[Text]]:
        """NVTX ranges, and the marks. A name stands in the row, or, registered, in the string table.

        The end of an open range means nothing yet.
        """
        wanted = {"end": _NEVER, "eventType": _RANGE_TYPES[0], "globalTid": UNKNOWN, "textId": NO_NAME, "domainId": 0}
        rows = self._rows(NVTX_TABLE, ("start",), wanted, text="text")
        written = np.array([self._names.code_of(text) for text in rows.texts], np.int64)
        name = written[rows.text] if len(written) else _empty()
        nameless = name == NO_NAME
        name[nameless] = self._strings.resolve(rows["textId"][nameless])
        kind, start, end, thread = rows["eventType"], rows["start"], rows["end"], rows["globalTid"]
        named = name != NO_NAME
        marks = self._marks(rows, name, named & ((kind == _MARK_TYPE) | (kind == _DOMAIN_TYPE)))
        is_range = np.isin(kind, _RANGE_TYPES)
        # Before the column could be NULL, 0 or -1 meant none.
        is_open = (end == _NEVER) | (((end == 0) | (end == -1)) & (start > end))
        possible = _in_reach(start) & ((_in_reach(end) & (end >= start)) | is_open)
        self._skip(NVTX_TABLE, int((is_range & ~(possible & named)).sum()))
        ranges = HostRanges(start, end, thread, process_of(thread), name, is_open.astype(np.int64))
        return ranges.only(is_range & possible & named), marks

    def node_events(self) -> NodeEvents:
        """Creations and clones of graph nodes."""
        wanted = {"globalTid": UNKNOWN, "originalGraphNodeId": UNKNOWN, "nameId": NO_NAME}
        parts = [
            self._rows(name, ("start", "graphNodeId"), wanted)
            for name in NODE_TABLES
            if (table := self._database.table(name)) is not None and "graphNodeId" in table
        ]
        rows = {
            column: np.concatenate([part[column] for part in parts]) if parts else _empty()
            for column in ("start", "graphNodeId", *wanted)
        }
        codes = self._strings.resolve(rows["nameId"])
        ends = [code for code in np.unique(codes) if code != NO_NAME and "destr" in self._names.listed[code].lower()]
        possible = _in_reach(rows["start"])
        self._skip(NODE_TABLES[0], int((~possible).sum()))
        kept = ~np.isin(codes, ends) & possible
        original = rows["originalGraphNodeId"]
        original = np.where((original <= 0) | (original == rows["graphNodeId"]), UNKNOWN, original)
        thread = rows["globalTid"]
        return NodeEvents(
            rows["start"][kept], thread[kept], process_of(thread)[kept], rows["graphNodeId"][kept], original[kept]
        )

    def traces_graphs_whole(self) -> bool:
        """Whether graphs were traced as a whole. Older versions put the process before the name (``PROCESS_0:``)."""
        table = self._database.table("META_DATA_CAPTURE")
        pairs = [] if table is None else self._database.pairs(table, "name", "value")
        return any(
            isinstance(name, bytes)
            and isinstance(value, bytes)
            and name.endswith(b"CUDA_GRAPH_TRACE_OPTIONS:MODE")
            and value.strip().lower().startswith(b"graph")
            for name, value in pairs
        )

    def process_names(self) -> list[Text]:
        """Names of processes and of threads."""
        found: list[Text] = []
        processes = self._database.table("PROCESSES")
        if processes is not None:
            for key, name in self._database.pairs(processes, "globalPid", "name"):
                if isinstance(key, int) and isinstance(name, bytes):
                    found.append(Text(key & ~THREAD_BITS, name.decode("utf-8", "replace")))
        threads = self._rows("ThreadNames", ("globalTid", "nameId"), {})
        owner = process_of(threads["globalTid"])
        for process, code in zip(owner.tolist(), self._strings.resolve(threads["nameId"]).tolist(), strict=True):
            if code != NO_NAME:
                found.append(Text(process, self._names.listed[code]))
        return found

    def gpu_of_device(self) -> dict[tuple[int, int], int]:
        """The GPU of each (process id, CUDA device): a process under CUDA_VISIBLE_DEVICES counts its own from 0."""
        rows = self._rows("TARGET_INFO_CUDA_DEVICE", ("gpuId", "cudaId", "pid"), {})
        keys = zip(rows["pid"].tolist(), rows["cudaId"].tolist(), strict=True)
        return dict(zip(keys, rows["gpuId"].tolist(), strict=True))

    def unix_start_ns(self) -> int | None:
        """Unix time of the export's zero."""
        rows = self._rows("TARGET_INFO_SESSION_START_TIME", ("utcEpochNs",), {})
        return int(rows["utcEpochNs"][0]) if len(rows) else None

    def _rows(self, name: str, needed: Sequence[str], wanted: Mapping[str, int], text: str = "") -> Rows:
        table = self._database.table(name)
        if table is None:
            return Rows(dict.fromkeys((*needed, *wanted), _empty()), (), _empty())
        rows = self._database.rows(table, needed, wanted, text)
        self._skip(name, rows.skipped)
        return rows

    def _skip(self, table: str, count: int) -> None:
        if count:
            self.skipped[table] = self.skipped.get(table, 0) + count

    def _marks(self, rows: Rows, name: Int64, chosen: NDArray[np.bool_]) -> list[Text]:
        """Marks with the name of their domain."""
        thread, kind, domain = (rows[column][chosen].tolist() for column in ("globalTid", "eventType", "domainId"))
        texts = [self._names.listed[code] for code in name[chosen].tolist()]
        owners = [each & ~THREAD_BITS for each in thread]
        found = list(zip(owners, domain, kind, texts, strict=True))
        domains = {(owner, number): text for owner, number, each, text in found if each == _DOMAIN_TYPE}
        return [
            Text(owner, text, domains.get((owner, number), ""))
            for owner, number, each, text in found
            if each == _MARK_TYPE
        ]


_WORK_NEEDED: Final = ("start", "end")
_WORK_WANTED: Final = {
    "globalPid": UNKNOWN,
    "deviceId": 0,
    "contextId": 0,
    "streamId": 0,
    "correlationId": UNKNOWN,
    "graphNodeId": UNKNOWN,
}
_KERNEL_NAMES: Final = ("demangledName", "shortName", "mangledName")


def read_tables(database: Database, strings: Strings, names: Names) -> Tables:
    """Read an export. Rows that do not name their process belong to the only one there is, where there is one."""
    reader = TableReader(database, strings, names)
    parts = [reader.kernels(), reader.copies(), reader.fills(), reader.graphs()]
    calls = reader.calls()
    ranges, marks = reader.host_ranges()
    tables = Tables(
        work=together(parts),
        calls=calls,
        ranges=ranges,
        nodes=reader.node_events(),
        texts=[*reader.process_names(), *marks],
        gpu_of_device=reader.gpu_of_device(),
        unix_start_ns=reader.unix_start_ns(),
        traces_graphs_whole=reader.traces_graphs_whole(),
        has_calls=database.has_any(RUNTIME_TABLES),
        skipped=reader.skipped,
    )
    return _with_only_process(tables)


def _with_only_process(tables: Tables) -> Tables:
    named = np.unique(np.concatenate([tables.work.process, tables.calls.process]))
    named = named[named != UNKNOWN]
    if len(named) != 1:
        return tables
    parts = {
        part: replace(rows, process=np.where(rows.process == UNKNOWN, named[0], rows.process))
        for part, rows in (
            ("work", tables.work),
            ("calls", tables.calls),
            ("ranges", tables.ranges),
            ("nodes", tables.nodes),
        )
    }
    return replace(tables, **parts)  # type: ignore[arg-type]


def together(parts: Sequence[Work]) -> Work:
    """Work of several tables in one."""
    parts = [part for part in parts if len(part)] or list(parts)
    if len(parts) == 1:
        return parts[0]
    return Work(*(np.concatenate([getattr(part, field) for part in parts]) for field in Work.__slots__))


def _work(rows: Rows, kind: ActivityKind, name: Int64, unnamed: Int64 | None = None) -> Work:
    count = len(rows)
    process, node = rows["globalPid"], rows["graphNodeId"]
    return Work(
        start_ns=rows["start"],
        end_ns=rows["end"],
        kind=constant(kind, count),
        process=np.where(process == UNKNOWN, UNKNOWN, process & ~np.int64(THREAD_BITS)),
        device=rows["deviceId"],
        context=rows["contextId"],
        stream=rows["streamId"],
        correlation=rows["correlationId"],
        # Before the column could be NULL, 0 meant none.
        node=np.where(node <= 0, UNKNOWN, node),
        name=name,
        bytes=rows.columns.get("bytes", constant(0, count)),
        bad_time=(~_possible(rows["start"], rows["end"])).astype(np.int64),
        unnamed=constant(0, count) if unnamed is None else unnamed,
    )


def _possible(start: Int64, end: Int64) -> NDArray[np.bool_]:
    """Whether times can be true. CUPTI writes 0 for start and end where it lost them, and at times end < start."""
    near = _in_reach(start) & _in_reach(end)
    duration = np.where(near, end, 0) - np.where(near, start, 0)
    possible: NDArray[np.bool_] = near & (duration >= 0) & (duration <= _LONGEST_NS) & ~((start == 0) & (end == 0))
    return possible


def _in_reach(time: Int64) -> NDArray[np.bool_]:
    """Whether a time is one that differences can be taken of."""
    reached: NDArray[np.bool_] = (time > _EARLIEST_NS) & (time < _LATEST_NS)
    return reached


def _copy_name(kind: int, source: int, target: int) -> str:
    name = f"Memcpy {_COPY_KINDS[kind]}" if kind in _COPY_KINDS else "Memcpy"
    if source in _MEMORY_KINDS and target in _MEMORY_KINDS:
        return f"{name} ({_MEMORY_KINDS[source]} -> {_MEMORY_KINDS[target]})"
    return name


def _empty() -> Int64:
    return np.zeros(0, np.int64)
