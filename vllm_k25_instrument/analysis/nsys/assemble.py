"""A joined process into captures: one per device that it worked on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from vllm_k25_instrument.analysis.capture import (
    NO_RANK,
    Activities,
    ActivityKind,
    Annotations,
    Capture,
    Int64,
    Launches,
    Source,
)
from vllm_k25_instrument.analysis.nsys import notes
from vllm_k25_instrument.analysis.nsys.process import NO_LAUNCH, Process
from vllm_k25_instrument.analysis.nsys.read_tables import RUNTIME_TABLES
from vllm_k25_instrument.analysis.nsys.tables import UNKNOWN, Tables, Work, pid_of
from vllm_k25_instrument.analysis.nsys.workers import Ranks, rank_of
from vllm_k25_instrument.report.caveats import Caveat

_MOST_STREAMS: Final = 1 << 30


@dataclass(frozen=True, slots=True)
class Origin:
    """What all captures of an export share."""

    path: Path
    names: Sequence[str]
    tables: Tables
    ranks: Ranks


def assemble(origin: Origin, process: int, joined: Process) -> Iterator[Capture]:
    """The captures of one process; one without work where it launched some but none was recorded.

    A rank belongs to the device that did most: a stray copy through another GPU does not make a second rank.
    """
    work = joined.work
    devices = np.unique(np.concatenate([work.device, joined.bad.device])).tolist() or [0]
    busy = [int((work.end_ns - work.start_ns)[work.device == device].sum()) for device in devices]
    main = devices[int(np.argmax(busy))]
    owner = _device_of_calls(joined, main)
    annotations = Annotations(
        start_ns=joined.ranges.start_ns,
        duration_ns=joined.ranges.end_ns - joined.ranges.start_ns,
        name=joined.ranges.name.astype(np.int32),
        thread=joined.ranges.thread,
        parent=joined.parent.astype(np.int32),
        is_open=joined.ranges.is_open.astype(np.bool_),
    )
    pid = pid_of(process)
    for device in devices:
        rows = np.flatnonzero(work.device == device)
        rows = rows[np.argsort(work.start_ns[rows], kind="stable")]
        launch = joined.launch[rows]
        mine = work.only(rows)
        calls = owner == device
        # A launch may have work on several devices, and is then a launch of each.
        calls[launch[launch != NO_LAUNCH]] = True
        number = np.cumsum(calls) - 1
        kept = joined.calls.only(calls)
        yield Capture(
            source=Source.NSYS,
            path=origin.path,
            names=origin.names,
            activities=Activities(
                start_ns=mine.start_ns,
                duration_ns=mine.end_ns - mine.start_ns,
                kind=mine.kind.astype(np.int8),
                name=mine.name.astype(np.int32),
                stream=_streams(mine),
                launch=_renumber(launch, number).astype(np.int32),
                annotation=joined.annotation[rows].astype(np.int32),
                bytes=mine.bytes,
            ),
            launches=Launches(
                start_ns=kept.start_ns,
                duration_ns=kept.end_ns - kept.start_ns,
                name=kept.name.astype(np.int32),
                thread=kept.thread,
                is_graph=kept.is_graph.astype(np.bool_),
            ),
            annotations=annotations,
            rank=rank_of(origin.ranks, process) if device == main else NO_RANK,
            world_size=origin.ranks.world_size,
            process=pid,
            device=_index_of_gpu(origin.tables, pid, device),
            clock_base_ns=origin.tables.unix_start_ns,
            notes=tuple(_notes(origin, joined, rows, device, calls)),
        )


def _notes(origin: Origin, joined: Process, rows: Int64, device: int, calls: NDArray[np.bool_]) -> Iterator[Caveat]:
    path, tables = origin.path, origin.tables
    kind = joined.work.kind[rows]
    kernels, graphs = int((kind == ActivityKind.KERNEL).sum()), int((kind == ActivityKind.GRAPH).sum())
    launches = int(joined.calls.is_kernel[calls].sum())
    graph_launches = int(joined.calls.is_graph[calls].sum())
    replayed = bool((joined.work.node[rows] != UNKNOWN).any())
    bad = int((joined.bad.device == device).sum())
    yield from notes.bad_timestamps(path, bad, len(rows) + bad)
    if graphs or (tables.traces_graphs_whole and graph_launches and not replayed):
        yield notes.graph_level(path, graphs, graph_launches)
    elif not kernels:
        yield notes.no_kernels(path, launches)
    if twice := int((joined.opaque_twice == device).sum()):
        yield notes.counted_twice(path, twice)
    if not tables.has_calls:
        yield notes.no_launches(path, RUNTIME_TABLES[0])
    if not len(joined.ranges):
        yield notes.no_nvtx(path)
    elif unmapped := int(joined.unmapped[rows].sum()):
        yield notes.unmapped_nodes(path, unmapped)
    if still_open := int(joined.ranges.is_open.sum()):
        yield notes.open_ranges(path, still_open)
    if unnamed := int(joined.work.unnamed[rows].sum()):
        yield notes.unnamed(path, unnamed)


def _device_of_calls(joined: Process, main: int) -> Int64:
    """The device of each call: its work's, else, where none is recorded, the one that its thread mostly works on."""
    owner = np.full(len(joined.calls), UNKNOWN, np.int64)
    has_launch = joined.launch != NO_LAUNCH
    owner[joined.launch[has_launch]] = joined.work.device[has_launch]
    is_idle = owner == UNKNOWN
    for thread in np.unique(joined.calls.thread[is_idle]).tolist():
        on_thread = joined.calls.thread == thread
        devices, counts = np.unique(owner[on_thread & ~is_idle], return_counts=True)
        owner[on_thread & is_idle] = devices[np.argmax(counts)] if len(devices) else main
    return owner


def _streams(work: Work) -> NDArray[np.int32]:
    """Ids of streams, unique in the capture: CUDA counts them per context. The main context's keep their numbers."""
    if not len(work):
        return np.zeros(0, np.int32)
    contexts, counts = np.unique(work.context, return_counts=True)
    fits = int(work.stream.min()) >= 0 and int(work.stream.max()) < _MOST_STREAMS
    if len(contexts) == 1 and fits:
        return work.stream.astype(np.int32)
    is_main = work.context == contexts[np.argmax(counts)]
    stream = np.zeros(len(work), np.int64)
    if fits:
        stream[is_main] = work.stream[is_main]
    others = ~is_main if fits else np.ones(len(work), np.bool_)
    pairs = np.stack([work.context[others], work.stream[others]], axis=1)
    _, number = np.unique(pairs, axis=0, return_inverse=True)
    stream[others] = number.reshape(-1) + int(stream.max()) + 1
    return stream.astype(np.int32)


def _renumber(index: Int64, number: Int64) -> Int64:
    if not len(number):
        return np.full(len(index), NO_LAUNCH, np.int64)
    return np.where(index == NO_LAUNCH, NO_LAUNCH, number[index])


def _index_of_gpu(tables: Tables, pid: int, device: int) -> int:
    return tables.gpu_of_device.get((pid, device), device)
