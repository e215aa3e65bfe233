"""What the files of a command line are: recognised by what is in them, whatever they are called."""

from __future__ import annotations

import os
import re
import sqlite3
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from vllm_k25_instrument.analysis.capture import CaptureError, Source
from vllm_k25_instrument.analysis.key_averages import MARK
from vllm_k25_instrument.analysis.kineto.blocks import GZIP_MAGIC, Blocks
from vllm_k25_instrument.ring import MAGIC as RING_MAGIC

_SQLITE_MAGIC: Final = b"SQLite format 3\0"
_UTF8_BOM: Final = b"\xef\xbb\xbf"
_SNIFFED: Final = 1 << 20
_SEARCHED: Final = 64 << 20  # how far a log is searched for a table, or a header for its events

_TRACE_KEYS: Final = re.compile(
    rb'"(?:traceEvents|schemaVersion|deviceProperties|distributedInfo|baseTimeNanoseconds|ph)"'
)
_NSYS_TABLES: Final = re.compile(
    r"CUPTI_ACTIVITY_KIND_|NVTX_EVENTS|TARGET_INFO_|META_DATA_CAPTURE|StringIds|ENUM_|ANALYSIS_|EXPORT_META_DATA"
)
_NSYS_REPORT_SUFFIXES: Final = frozenset({".nsys-rep", ".qdrep", ".qdstrm"})
_OTHER_COMPRESSION: Final = {
    b"PK\x03\x04": ("a zip archive", "unzip"),
    b"\x28\xb5\x2f\xfd": ("zstd-compressed", "unzstd"),
    b"\xfd7zXZ": ("xz-compressed", "unxz"),
    b"BZh": ("bzip2-compressed", "bunzip2"),
    b"ustar": ("a tar archive", "tar -x"),
}
_KNOWN: Final = "expected a torch.profiler trace, a key_averages table, an nsys export or a ring"


@dataclass(frozen=True, slots=True)
class Input:
    """A file and what it is. With `needs_export` it is an nsys report, to be turned into SQLite by ``nsys export``."""

    path: Path
    kind: Source
    needs_export: bool = False


def expand(paths: Iterable[Path], ignored: list[Path] | None = None) -> list[Input]:
    """The inputs that files and directories stand for: each file once, ranks in numerical order.

    Directories are searched to any depth; what is not an input there is left out, and appended to `ignored`. An nsys
    report is left out too where its export lies beside it.

    Raises:
        CaptureError: A file named outright is not an input, or a directory holds none.
    """
    found: dict[Path, Input] = {}
    for path in paths:
        if path.is_dir():
            inside = list(_inside(path, ignored))
            if not inside:
                raise CaptureError(path, "holds no captures", _KNOWN)
            for one in inside:
                found.setdefault(one.path.resolve(), one)
        else:
            found.setdefault(path.resolve(), recognise(path))
    return list(found.values())


def _inside(directory: Path, ignored: list[Path] | None) -> Iterator[Input]:
    files = [Path(folder, name) for folder, _, names in os.walk(directory) for name in names]
    inputs = []
    for file in sorted(files, key=_natural):
        try:
            inputs.append(recognise(file))
        except CaptureError:
            if ignored is not None:
                ignored.append(file)
    exported = {one.path.with_suffix("") for one in inputs if one.kind is Source.NSYS and not one.needs_export}
    for one in inputs:
        if not (one.needs_export and one.path.with_suffix("") in exported):
            yield one


def _natural(path: Path) -> list[tuple[int, str]]:
    """Sorts rank 2 before rank 10."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d{1,18})", str(path))]


def recognise(path: Path) -> Input:
    """What one file is.

    Raises CaptureError, in one line with the remedy, for anything that is not an input.
    """
    if not path.exists():
        raise CaptureError(path, "does not exist")
    if not path.is_file():
        raise CaptureError(path, "is not a file", _KNOWN)
    try:
        with path.open("rb") as file:
            head = file.read(512)
    except OSError as error:
        raise CaptureError(path, f"cannot be read ({error.strerror or error})") from error
    if not head:
        raise CaptureError(path, "is empty", "profile again and wait until the file is written")
    if head.startswith(_SQLITE_MAGIC):
        return _sqlite(path)
    if head.startswith(RING_MAGIC):
        return Input(path, Source.RING)
    for magic, (what, command) in _OTHER_COMPRESSION.items():
        if head.startswith(magic, 257 if magic == b"ustar" else 0):
            raise CaptureError(path, f"is {what}", f"run {command} on it first")
    if not head.startswith(GZIP_MAGIC) and b"\0" in head.rstrip(b"\0"):
        if path.suffix in _NSYS_REPORT_SUFFIXES:
            return Input(path, Source.NSYS, needs_export=True)
        raise CaptureError(path, "is a binary file of an unknown kind", _KNOWN)
    return _text(path)


def _text(path: Path) -> Input:
    """A trace or a table, plain or gzip."""
    seen = 0
    tail = b""
    is_json = False
    for block in Blocks(path):
        if not seen:
            start = block.removeprefix(_UTF8_BOM).lstrip()
            if start.startswith(_SQLITE_MAGIC):
                raise CaptureError(path, "is a compressed SQLite database", "gunzip it first")
            is_json = start.startswith((b"{", b"["))
        text = tail + block
        # A log may begin with a bracket too, but no JSON has a table in it.
        if is_json and _TRACE_KEYS.search(text):
            return Input(path, Source.TORCH_TRACE)
        if MARK.encode() in text:
            return Input(path, Source.KEY_AVERAGES)
        tail = block[-64:]
        seen += len(block)
        if seen > _SEARCHED:
            break
    if is_json:
        raise CaptureError(path, "is JSON, but no torch.profiler trace (no traceEvents)", _KNOWN)
    if path.suffix in _NSYS_REPORT_SUFFIXES:
        return Input(path, Source.NSYS, needs_export=True)
    raise CaptureError(path, "is not a capture that is known here", _KNOWN)


def _sqlite(path: Path) -> Input:
    try:
        database = sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro&immutable=1", uri=True)
        database.text_factory = lambda text: text.decode(errors="replace")
        try:
            tables = [str(name) for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        finally:
            database.close()
    except (sqlite3.Error, UnicodeDecodeError) as error:  # SQLite's own message may quote the damage
        raise CaptureError(
            path, f"is a damaged SQLite database ({error})", "export it again with nsys export"
        ) from error
    if not any(_NSYS_TABLES.match(table) for table in tables):
        raise CaptureError(path, "is a SQLite database, but no nsys export", "nsys export --type sqlite makes one")
    return Input(path, Source.NSYS)
