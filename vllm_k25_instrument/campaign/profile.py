"""A window under the server's torch profiler, and the analysis of the traces that it leaves."""

from __future__ import annotations

import json
import os
import re
import shutil
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from vllm_k25_instrument.campaign.cpu_operators import read_cpu_tables
from vllm_k25_instrument.campaign.errors import CampaignError, NotPossibleError
from vllm_k25_instrument.campaign.files import write_json
from vllm_k25_instrument.campaign.live import parents_of
from vllm_k25_instrument.campaign.server import Server

BREAKDOWN: Final = "breakdown.json"
TABLES: Final = "tables.json"
CPU: Final = "cpu-operators.json"
TRACES: Final = "traces"

REMEDY: Final = (
    "restart the server with --profiler-config "
    '\'{"profiler": "torch", "torch_profiler_dir": "/some/dir", "torch_profiler_with_stack": false}\''
)
_FRONT_END: Final = "async_llm"
_STOP_S: Final = 3600.0
_SETTLE_S: Final = 600.0
_POLL_S: Final = 1.0
_CHUNK: Final = 1 << 20

Progress = Callable[[str], None]


def configured_directory(pid: int) -> Path | None:
    """Where the server above process `pid` writes its traces, by its command line; None where that does not say."""
    for parent in parents_of(pid):
        try:
            arguments = Path(f"/proc/{parent}/cmdline").read_bytes().decode(errors="replace").split("\0")
        except OSError:
            continue
        found = directory_in(arguments)
        if found:
            return Path(found)
    return None


def directory_in(arguments: list[str]) -> str:
    """The directory of traces that the arguments of `vllm serve` name, empty where they name none."""
    for n, argument in enumerate(arguments):
        name, equals, value = argument.partition("=")
        value = value if equals else arguments[n + 1] if n + 1 < len(arguments) else ""
        name = name.replace("_", "-")
        if name == "--profiler-config":
            try:
                return str(json.loads(value).get("torch_profiler_dir", ""))
            except (ValueError, AttributeError):
                continue
        if name == "--profiler-config.torch-profiler-dir":
            return value
    return ""


def start(server: Server) -> None:
    """Start the profiler. Raises NotPossibleError where the server has none, CampaignError where it refuses."""
    status, text = server.ask("/start_profile", post={}, timeout=_STOP_S)
    if status in (404, 405):
        raise NotPossibleError(f"the server has no profiler configured (/start_profile answers {status}): {REMEDY}")
    if status != 200:
        raise CampaignError(f"/start_profile answers {status}: {text[:200]}")


def stop(server: Server, progress: Progress) -> None:
    """Stop the profiler, which writes the traces: minutes for large ones, so that progress is shown all the while."""
    outcome: list[BaseException | tuple[int, str]] = []

    def ask() -> None:
        try:
            outcome.append(server.ask("/stop_profile", post={}, timeout=_STOP_S))
        except BaseException as error:
            outcome.append(error)

    asking = threading.Thread(target=ask, daemon=True)
    began = time.monotonic()
    asking.start()
    while asking.is_alive():
        asking.join(_POLL_S)
        progress(f"the profiler is writing its traces, {time.monotonic() - began:.0f} s (minutes for large ones)")
    (answer,) = outcome
    if isinstance(answer, BaseException):
        raise answer
    if answer[0] != 200:
        raise CampaignError(f"/stop_profile answers {answer[0]}: {answer[1][:200]}")


@dataclass(frozen=True, slots=True)
class TraceDirectory:
    """A directory of traces, and what was in it before: files with their sizes and times."""

    path: Path
    before: frozenset[tuple[Path, int, int]]

    @classmethod
    def look(cls, path: Path) -> TraceDirectory:
        """As it is now; a directory that is not there yet is empty."""
        return cls(path, frozenset(_files(path)))

    def new(self) -> list[Path]:
        """The files that have come since, sorted; also those written anew, as vLLM does with its tables."""
        return sorted({path for path, _, _ in set(_files(self.path)) - self.before})


def _files(path: Path) -> Iterator[tuple[Path, int, int]]:
    for file in path.rglob("*") if path.is_dir() else ():
        with suppress(OSError):
            status = file.stat()
            if file.is_file():
                yield file, status.st_size, status.st_mtime_ns


def wait_until_complete(directory: TraceDirectory, progress: Progress, settle_s: float = _SETTLE_S) -> list[Path]:
    """The new files, once their sizes have stood still for a look and each trace is whole.

    Raises CampaignError where none comes, or one does not become whole in `settle_s` seconds.
    """
    began = time.monotonic()
    sizes: dict[Path, int] = {}
    whole: dict[Path, int] = {}
    while True:
        files = directory.new()
        now = {path: path.stat().st_size for path in files if path.exists()}
        traces = [path for path in now if is_trace(path)]
        if traces and now == sizes:
            for path in traces:
                if whole.get(path) != now[path] and is_whole(path):
                    whole[path] = now[path]
            if all(path in whole for path in traces):
                return files
        sizes = now
        elapsed = time.monotonic() - began
        if elapsed > settle_s:
            broken = [path.name for path in traces if path not in whole]
            if not traces:
                raise CampaignError(
                    f"no trace appeared in {directory.path} within {settle_s:.0f} s: is that the server's "
                    "torch_profiler_dir? name it with --trace-dir"
                )
            raise CampaignError(f"not whole after {settle_s:.0f} s: {', '.join(broken[:3])} in {directory.path}")
        done = len([path for path in traces if path in whole])
        progress(f"waiting for traces to be complete: {done} of {len(traces)}, {sum(now.values()) / 1e6:,.0f} MB")
        time.sleep(_POLL_S)


def is_trace(path: Path) -> bool:
    """Whether a file is a trace by its name."""
    return path.name.endswith((".json", ".json.gz"))


def is_whole(path: Path) -> bool:
    """Whether a trace ends: its gzip stream, if it is one, and its JSON, by the last bracket."""
    try:
        with path.open("rb") as file:
            if path.suffix != ".gz":
                file.seek(max(0, path.stat().st_size - 4096))
                return file.read().rstrip().endswith((b"}", b"]"))
            return _gzip_ends_in_bracket(iter(lambda: file.read(_CHUNK), b""))
    except OSError:
        return False


def _gzip_ends_in_bracket(blocks: Iterable[bytes]) -> bool:
    unpacker = zlib.decompressobj(wbits=31)
    tail = b""
    ended = False
    for block in blocks:
        while block:
            if ended:
                unpacker, ended = zlib.decompressobj(wbits=31), False
            try:
                text = unpacker.decompress(block)
            except zlib.error:
                return False
            tail = (tail + text)[-4096:]
            ended, block = unpacker.eof, unpacker.unused_data
    return ended and tail.rstrip().endswith((b"}", b"]"))


def keep(files: Iterable[Path], folder: Path) -> list[Path]:
    """The files in `folder`, linked where that can be done, else copied; without the host's name in theirs."""
    kept = []
    folder.mkdir(parents=True, exist_ok=True)
    for path in files:
        name = re.sub(rf"^.*(?={_FRONT_END})", "", path.name) if _FRONT_END in path.name else path.name
        target = folder / name
        # A link would follow a table that the next profile writes over.
        if is_trace(path):
            with suppress(OSError):
                os.link(path, target)
        if not target.exists():
            shutil.copyfile(path, target)
        kept.append(target)
    return kept


def analyse(paths: list[Path], folder: Path) -> str:
    """Analyse traces and tables; leaves ``breakdown.json``, ``tables.json`` and ``cpu-operators.json`` in `folder`.

    Returns what there is to know in a line. Raises CampaignError where nothing could be analysed.
    """
    traces = [path for path in paths if is_trace(path) and _FRONT_END not in path.name]
    tables = [path for path in paths if path.suffix == ".txt" and _FRONT_END not in path.name]
    said = []
    if traces:
        said.append(analyse_captures(traces, folder / BREAKDOWN))
    if tables:
        said.append(_analyse_tables(tables, folder))
    if not said:
        raise CampaignError("the profiler left neither traces nor tables of workers")
    return "; ".join(filter(None, said))


def analyse_captures(paths: list[Path], target: Path) -> str:
    """The breakdown of captures into `target`, as JSON of `vllm-k25 analyze`. Raises CampaignError."""
    from vllm_k25_instrument.analysis.analyze import analyze
    from vllm_k25_instrument.analysis.capture import CaptureError

    try:
        report = analyze(paths)
    except CaptureError as error:
        raise CampaignError(str(error)) from error
    write_json(target, report.breakdown.to_json_dict())
    findings = report.breakdown.gpu
    if findings is None or not findings.has_work:
        return "no GPU kernels in the traces"
    return f"{len(findings.ranks)} ranks, {findings.totals.kernels:,} kernels"


def _analyse_tables(paths: list[Path], folder: Path) -> str:
    """Tables of GPU times: kernels, and the rows that repeat them. Tables of CPU times: operators."""
    cpu = read_cpu_tables(paths)
    if cpu:
        write_json(folder / CPU, cpu)
        return f"CPU operators of {len(cpu['ranks'])} ranks"
    from vllm_k25_instrument.analysis.analyze import analyze
    from vllm_k25_instrument.analysis.capture import CaptureError

    try:
        breakdown = analyze(paths).breakdown
    except CaptureError:
        return ""
    if breakdown.gpu is None:
        return ""
    document: dict[str, Any] = breakdown.to_json_dict()
    document["repeated"] = [
        {"rank": rank.rank, "rows": rank.repeated_rows, "ns": rank.repeated_ns, "sum_ns": rank.totals.sum_ns}
        for rank in breakdown.gpu.ranks
    ]
    write_json(folder / TABLES, document)
    return f"tables of {len(breakdown.gpu.ranks)} ranks"
