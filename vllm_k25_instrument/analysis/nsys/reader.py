"""An nsys export or report into captures: one for each process and device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Final

from vllm_k25_instrument.analysis.capture import NO_RANK, ActivityKind, Capture, CaptureError
from vllm_k25_instrument.analysis.nsys import notes
from vllm_k25_instrument.analysis.nsys.assemble import Origin, assemble
from vllm_k25_instrument.analysis.nsys.database import EXPORT_AGAIN, MAGIC, Database, open_database
from vllm_k25_instrument.analysis.nsys.process import join
from vllm_k25_instrument.analysis.nsys.read_tables import (
    GRAPH_TABLE,
    KERNEL_TABLE,
    NVTX_TABLE,
    RUNTIME_TABLES,
    read_tables,
)
from vllm_k25_instrument.analysis.nsys.report_file import REPORT_SUFFIXES, exported
from vllm_k25_instrument.analysis.nsys.strings import Names, Strings
from vllm_k25_instrument.analysis.nsys.workers import find_ranks
from vllm_k25_instrument.report.caveats import Caveat, CaveatCode

Progress = Callable[[int], None]

_OF_NSYS: Final = (KERNEL_TABLE, *RUNTIME_TABLES, GRAPH_TABLE, NVTX_TABLE, "META_DATA_EXPORT", "META_DATA_CAPTURE")


def read_nsys(path: Path, progress: Progress | None = None) -> list[Capture]:
    """Read an nsys SQLite export, or a ``.nsys-rep`` where nsys is installed: one capture per process and device.

    Captures are sorted by rank, then device, then process. They share one clock, one list of names, and the notes on
    the file as a whole (equal notes, to be counted once). `progress` is called with numbers of bytes, which add up to
    the size of the file. The file is only read, and not locked.

    Raises `CaptureError` where there is no capture in the file, or no names.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            head = file.read(len(MAGIC))
    except OSError as error:
        raise CaptureError(path, f"cannot be read ({error.strerror or error})") from error
    meter = _Meter(size, progress)
    with ExitStack() as stack:
        if head == MAGIC:
            source, share = path, size
        elif path.suffix not in REPORT_SUFFIXES:
            raise CaptureError(path, "neither an nsys SQLite export nor an nsys report", EXPORT_AGAIN)
        else:
            source, share = stack.enter_context(exported(path, meter.advance)), size - size // 2
        database = stack.enter_context(open_database(source, path, share, meter.advance))
        captures = sorted(_captures(path, database), key=_place)
    meter.finish()
    return captures


class _Meter:
    """Passes progress on, never more than there is in all."""

    def __init__(self, size: int, progress: Progress | None) -> None:
        self._left = size
        self._progress = progress

    def advance(self, count: int) -> None:
        count = max(0, min(count, self._left))
        self._left -= count
        if self._progress is not None and count:
            self._progress(count)

    def finish(self) -> None:
        self.advance(self._left)


def _place(capture: Capture) -> tuple[bool, int, int, int]:
    return capture.rank == NO_RANK, capture.rank, capture.device, capture.process


def _captures(path: Path, database: Database) -> list[Capture]:
    if not database.has_any(_OF_NSYS):
        raise CaptureError(path, "an SQLite database, but no nsys export", EXPORT_AGAIN)
    names = Names()
    tables = read_tables(database, Strings(database, names), names)
    ranks = find_ranks(tables.texts, tables.processes())
    origin = Origin(path, names.listed, tables, ranks)
    end_ns = tables.end_ns()
    found: list[Capture] = []
    for process in tables.processes():
        joined = join(*tables.of_process(process), end_ns)
        found.extend(assemble(origin, process, joined))
    if any((each.activities.kind == ActivityKind.KERNEL).any() for each in found):
        found = [replace(each, notes=tuple(filter(_matters_beside_kernels, each.notes))) for each in found]
    shared = [*notes.of_file(path, database.damaged, tables.skipped, names.undecodable), *_on_ranks(path, found)]
    complete = not database.damaged
    return [replace(each, complete=complete, notes=(*each.notes, *shared)) for each in found]


def _matters_beside_kernels(note: Caveat) -> bool:
    """That one device saw copies only is no news where another has the kernels."""
    return note.code is not CaveatCode.NO_GPU_EVENTS


def _on_ranks(path: Path, found: list[Capture]) -> Iterator[Caveat]:
    """Nobody asks one capture for its rank; of several it matters."""
    unknown = sum(each.rank == NO_RANK for each in found)
    if len(found) > 1 and unknown:
        yield notes.rank_unknown(path, unknown)
