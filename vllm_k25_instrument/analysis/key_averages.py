"""``key_averages().table()`` of torch.profiler, as vLLM writes it to ``profiler_out_N.txt`` or into its log.

The table repeats the same GPU time in several rows: an annotation, an operator, its NCCL wrapper and the kernel. Only
kernels (and copies and fills) are counted, which is what the table's own footer adds up.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import numpy as np

from vllm_k25_instrument.analysis.capture import NO_RANK, ActivityKind, CaptureError, KernelTable
from vllm_k25_instrument.analysis.kineto.blocks import Blocks
from vllm_k25_instrument.analysis.kineto.owners import coordinates, global_ranks
from vllm_k25_instrument.analysis.kineto.rows import ns_of_us
from vllm_k25_instrument.report.caveats import Caveat, CaveatCode

MARK: Final = "Self CPU %"
"""What every such table has in its header."""

_MAX_LINE: Final = 1 << 20
_ANSI: Final = re.compile(r"\x1b\[[0-9;]*m")
# Tried once for each stretch of dashes, and given up without a second thought: a line may hold a million of them.
_SEPARATOR: Final = re.compile(r"(?<!-)(?<!-  )-{4,}+(?:  -{4,}+)++\s*$")
_COLUMN: Final = re.compile(
    r"Name|Overload Name|Self CPU %|Self CPU Mem|Self CPU|CPU total %|CPU total|CPU time avg|CPU Mem|"
    r"Self \w+ %|Self \w+ Mem|Self \w+|\w+ total|\w+ time avg|\w+ Mem|# of Calls|Node ID|Input Shapes|"
    r"Source Location|Total \w*FLOPs"
)
_FOOTER: Final = re.compile(r"Self (?!CPU )\w+ time total: (\S+)")
_TIME: Final = re.compile(r"(\d+(?:\.\d+)?)(us|ms|s)")
_UNIT: Final = {"us": 1, "ms": 1_000, "s": 1_000_000}
_FILE_RANK: Final = re.compile(r"profiler_out_(\d{1,6})")

_COPY: Final = re.compile(r"Mem(cpy|set)\b")
_RETURN_TYPE: Final = re.compile(r"(?:(?:void|bool|float|double|char|int|long|unsigned|signed|short|auto|std::\S+) )+")
_NO_KERNEL: Final = re.compile(
    r"execute_(?:new|context|model)|ProfilerStep|##|nccl:|gloo:|mscclpp:|record_param_comms|(?:cuda|cu|hip|hsa)[A-Z]\w*$|"
    r"step\[|Lazy Function Loading|Activity Buffer|Torch-Compiled|TorchDynamo|autograd::"
)
_OPERATOR: Final = re.compile(r"\w+::[\w.]+(?:\.\.\.)?")
_IDENTIFIER: Final = re.compile(r"[A-Za-z_$][\w$]*(?:\.kd)?(?:\.\.\.)?")


@dataclass(slots=True)
class _Row:
    name: str
    self_ns: int
    total_ns: int
    average: str
    count: int
    half_unit_ns: int
    on_cpu: bool

    @property
    def is_work(self) -> bool:
        return not self.on_cpu and self.self_ns > 0 and self.self_ns == self.total_ns and names_work(self.name)


@dataclass(slots=True)
class _Table:
    """A table as it stands in the text: from its header to its footer."""

    source: str
    columns: tuple[str, ...]
    spans: tuple[tuple[int, int], ...]
    rows: list[_Row] = field(default_factory=list)
    footer_ns: int | None = None
    footer_half_unit_ns: int = 0
    closed: bool = False
    unread: int = 0


def names_work(name: str) -> bool:
    """Whether a row's name is that of GPU work, and not of an operator, an API call or an annotation."""
    if _COPY.match(name):
        return True
    if _NO_KERNEL.match(name) or _OPERATOR.fullmatch(name):
        return False
    bare = _RETURN_TYPE.sub("", name, count=1) if _RETURN_TYPE.match(name) else name
    bare = bare.replace("(anonymous namespace)", "anonymous")
    head = re.split(r"[<(]", bare, maxsplit=1)[0]
    if head != bare:
        return bool(head) and not re.search(r"[\s=:#]$|[^\w:~$.]", head.replace("operator", ""))
    return bool(_IDENTIFIER.fullmatch(bare)) or ("::" in bare and bare.endswith("...") and " " not in bare)


def read_key_averages(path: Path, progress: Callable[[int], None] | None = None) -> KernelTable:
    """The one table in a file; where a worker printed several (several profiles), their sum.

    Args:
        path: The file, plain or gzip: the table alone, or a log with any prefix before each of its lines.
        progress: Called with the number of bytes of the file read since the last call.

    Raises:
        CaptureError: There is no such table, or the tables of several workers stand in one file.
    """
    tables = read_key_averages_of_workers(path, progress)
    if len(tables) > 1:
        raise CaptureError(path, f"holds the tables of {len(tables)} workers", "split it into one file per worker")
    return tables[0]


def read_key_averages_of_workers(path: Path, progress: Callable[[int], None] | None = None) -> list[KernelTable]:
    """The tables in a file, one per worker whose log lines they stand in.

    Raises CaptureError where there is none.
    """
    blocks = Blocks(path, progress)
    lines = _Lines(blocks)
    tables = list(_tables(lines))
    if not tables:
        raise CaptureError(path, "holds no key_averages table", "a table with the column 'Self CPU %' is needed")
    by_source: dict[str, list[_Table]] = {}
    for table in tables:
        by_source.setdefault(table.source, []).append(table)
    ranks = global_ranks([coordinates(source) for source in by_source])
    if len(by_source) == 1 and ranks[0] is None:
        match = _FILE_RANK.search(path.name)
        ranks = [int(match[1])] if match is not None else global_ranks([coordinates(path.name)])
    return [
        _kernel_table(path, found, NO_RANK if rank is None else rank, blocks.damage, lines.bad_offset)
        for found, rank in zip(by_source.values(), ranks, strict=True)
    ]


class _Lines:
    """The lines of a file, decoded; `bad_offset`: of the first byte that was not UTF-8, -1 for none."""

    def __init__(self, blocks: Blocks) -> None:
        self._blocks = blocks
        self.bad_offset = -1

    def __iter__(self) -> Iterator[str]:
        rest = b""
        offset = 0
        for block in self._blocks:
            *whole, rest = (rest + block).split(b"\n")
            for line in whole:
                yield self._text(line, offset)
                offset += len(line) + 1
            if len(rest) > _MAX_LINE:  # no table has such a line
                offset += len(rest)
                rest = b""
        if rest:
            yield self._text(rest, offset)

    def _text(self, line: bytes, offset: int) -> str:
        try:
            text = line.decode()
        except UnicodeDecodeError as error:
            if self.bad_offset < 0:
                self.bad_offset = offset + error.start
            text = line.decode(errors="replace")
        return _ANSI.sub("", text.rstrip("\r"))


def _shape(prefix: str) -> str:
    """A log prefix without what differs from line to line: its digits, except those of the worker."""
    return re.sub(r"\d+", "0", re.sub(r"^\(.*?\)", "", prefix))


def _source(prefix: str) -> str:
    match = re.match(r"\((.*?)\)", prefix)
    return match[1] if match is not None else ""


def _tables(lines: Iterable[str]) -> Iterator[_Table]:
    """The tables in a text, also where the lines of several workers are interleaved."""
    separators: dict[tuple[str, str], int] = {}  # (worker, shape of its log prefix) -> where the dashes begin
    columns: dict[tuple[str, str], tuple[str, ...]] = {}
    open_tables: dict[tuple[str, str], _Table] = {}
    for line in lines:
        separator = _SEPARATOR.search(line)
        if separator is not None:
            prefix = line[: separator.start()]
            key = (_source(prefix), _shape(prefix))
            table = open_tables.get(key)
            if table is not None and (table.rows or table.unread):
                table.closed = True
            elif key in columns:
                spans = tuple(m.span() for m in re.finditer("-+", separator[0]))
                open_tables[key] = _Table(key[0], columns.pop(key), spans)
            else:
                separators[key] = separator.start()
            continue
        for key, width in list(separators.items()):
            if MARK in line and (_source(line), _shape(line[:width])) == key:
                columns[key] = tuple(_COLUMN.findall(line[width:]))
                del separators[key]
        for key, table in list(open_tables.items()):
            footer = _FOOTER.search(line)
            if footer is not None and table.closed and _source(line) == key[0]:
                with suppress(ValueError):  # a footer that is cut says nothing
                    table.footer_ns, table.footer_half_unit_ns = _time(footer[1])
                yield open_tables.pop(key)
                break
            if not table.closed and _add(table, line, key):
                break
    yield from open_tables.values()


def _add(table: _Table, line: str, key: tuple[str, str]) -> bool:
    """Whether the line is a row of the table (taken, or counted as unreadable)."""
    width = _prefix_width(line, key)
    if width < 0:
        return False
    body = line[width:]
    if not body.strip():
        return False
    cells = dict(zip(table.columns, (body[a:b].strip() for a, b in table.spans), strict=False))
    device = _device(table.columns)
    try:
        own, half_unit = _time(cells[f"Self {device}"]) if device else (0, 0)
        total, _ = _time(cells[f"{device} total"]) if device else (0, 0)
        on_cpu = _time(cells["CPU total"])[0] > 0 or _time(cells["Self CPU"])[0] > 0
        count = int(cells["# of Calls"])
    except (KeyError, ValueError):
        table.unread += 1
        return True
    average = cells.get(f"{device} time avg", "")
    table.rows.append(_Row(cells["Name"], own, total, average, count, half_unit, on_cpu))
    return True


def _prefix_width(line: str, key: tuple[str, str]) -> int:
    """Length of a line's log prefix, where it is one of this worker and shape; -1 where it is another."""
    source, shape = key
    if not source and not shape:
        return 0
    if _source(line) != source:
        return -1
    pattern = re.escape(shape).replace("0", r"\d+")
    match = re.compile(pattern).match(line, len(source) + 2 if source else 0)
    return match.end() if match is not None else -1


def _device(columns: Sequence[str]) -> str:
    """CUDA, HIP, XPU, ...; "" for a table of CPU times only."""
    for column in columns:
        if column.startswith("Self ") and not column.startswith("Self CPU") and not column.endswith(("%", "Mem")):
            return column.removeprefix("Self ")
    return ""


def _time(text: str) -> tuple[int, int]:
    """(ns, half of the last digit in ns) of a time as the table prints it. Raises ValueError."""
    match = _TIME.fullmatch(text)
    ns = ns_of_us(match[1]) if match is not None else None
    if match is None or ns is None:
        raise ValueError(text)
    unit = _UNIT[match[2]]
    return ns * unit, unit // 2


def _kernel_table(path: Path, tables: list[_Table], rank: int, damage: str, bad_offset: int) -> KernelTable:
    notes = []
    work: list[_Row] = []
    for table in tables:
        seen: Counter[tuple[str, int, str, int]] = Counter()
        for row in table.rows:
            if row.is_work:
                # Inductor's operators are called like their kernels. Of two equal rows one is the operator; rows of one
                # (cut) name that differ are different kernels.
                identity = (row.name, row.self_ns, row.average, row.count)
                seen[identity] += 1
                if seen[identity] % 2:
                    work.append(row)
    claiming = [row for table in tables for row in table.rows if row.self_ns > 0]
    names = [row.name for row in work]
    total = sum(row.self_ns for row in work)
    footers = [table.footer_ns for table in tables]
    footer = sum(f for f in footers if f is not None) if None not in footers else None
    complete = not damage and all(table.closed for table in tables) and footer is not None
    unread = sum(table.unread for table in tables)
    has_device = any(_device(table.columns) for table in tables)
    if not all(table.closed for table in tables) or damage:
        notes.append(
            Caveat(
                CaveatCode.TRUNCATED,
                f"{path}: the table is cut off{f' ({damage})' if damage else ''}: {len(work)} rows of GPU work "
                "recovered, profile again",
                len(work),
            )
        )
    if bad_offset >= 0:
        notes.append(
            Caveat(CaveatCode.INVALID_ENCODING, f"{path}: not UTF-8 at byte {bad_offset}: characters replaced", 1)
        )
    if unread:
        notes.append(
            Caveat(CaveatCode.ROWS_SKIPPED, f"{path}: {unread} lines inside the table are no rows of it", unread)
        )
    cut = sum(name.endswith("...") for name in names)
    if cut:
        notes.append(
            Caveat(
                CaveatCode.NAMES_CUT,
                f"{path}: {cut} of {len(names)} kernel names are cut: analyse the trace for reliable categories",
                cut,
            )
        )
    if not work:
        reason = "its times are all the CPU's" if not has_device else "it lists no kernels"
        notes.append(
            Caveat(
                CaveatCode.NO_GPU_EVENTS, f"no GPU kernel events in {path} ({reason}): profile with CUDA activities on"
            )
        )
    tolerance = sum(row.half_unit_ns for row in work) + sum(table.footer_half_unit_ns for table in tables) + len(tables)
    if footer is not None and work and abs(total - footer) > tolerance:
        missed = footer - total
        why = (
            "rows are missing (the table prints 100 unless row_limit=-1)"
            if missed > 0
            else "a row that looks like a kernel is none"
        )
        notes.append(
            Caveat(
                CaveatCode.FOOTER_MISMATCH,
                f"{path}: kernels, copies and fills add up to {total / 1e6:.3f} ms, the footer says "
                f"{footer / 1e6:.3f} ms: {why}; analyse the trace instead",
                abs(missed),
            )
        )
    return KernelTable(
        path=path,
        names=names,
        kind=np.array([_kind(name) for name in names], np.int8),
        sum_ns=np.array([row.self_ns for row in work], np.int64),
        count=np.array([row.count for row in work], np.int64),
        footer_ns=footer,
        repeated_ns=sum(row.self_ns for row in claiming) - total,
        repeated_rows=len(claiming) - len(work),
        rank=rank,
        complete=complete,
        notes=tuple(notes),
    )


def _kind(name: str) -> ActivityKind:
    match = _COPY.match(name)
    if match is None:
        return ActivityKind.KERNEL
    return ActivityKind.MEMCPY if match[1] == "cpy" else ActivityKind.MEMSET
