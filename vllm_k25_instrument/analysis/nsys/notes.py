"""What is to be said of an export: one line each, with the file, the count and the remedy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from vllm_k25_instrument.analysis.nsys.database import EXPORT_AGAIN
from vllm_k25_instrument.report.caveats import Caveat, CaveatCode

NODE_LEVEL = "--cuda-graph-trace=node"
_BAD_SHARE = 0.01


def of_file(path: Path, damaged: Sequence[str], skipped: Mapping[str, int], undecodable: int) -> list[Caveat]:
    """What holds for the whole file. Every capture of it carries the same notes, to be counted once."""
    notes = []
    if damaged:
        more = f" and {len(damaged) - 1} more" if len(damaged) > 1 else ""
        text = f"{path}: the export is damaged ({damaged[0]}{more}); what could be read is not all: {EXPORT_AGAIN}"
        notes.append(Caveat(CaveatCode.TRUNCATED, text, len(damaged)))
    if skipped:
        where = ", ".join(f"{count} of {table}" for table, count in sorted(skipped.items()))
        text = f"{path}: rows without usable numbers or names were left out ({where}): {EXPORT_AGAIN}"
        notes.append(Caveat(CaveatCode.ROWS_SKIPPED, text, sum(skipped.values())))
    if undecodable:
        text = f"{path}: {undecodable} names are not UTF-8; their odd bytes are shown as \N{REPLACEMENT CHARACTER}"
        notes.append(Caveat(CaveatCode.INVALID_ENCODING, text, undecodable))
    return notes


def bad_timestamps(path: Path, bad: int, total: int) -> list[Caveat]:
    """Rows whose times cannot be true, and whether they are too many to trust the rest."""
    if not bad:
        return []
    text = (
        f"{path}: {bad} of {total} GPU records have impossible times (zero, backward or beyond a day) and were left out"
    )
    notes = [Caveat(CaveatCode.BAD_TIMESTAMPS, text, bad)]
    if bad > _BAD_SHARE * total:
        text = f"{path}: {bad / total:.1%} of the GPU records are unusable: capture again, shorter or with less traced"
        notes.append(Caveat(CaveatCode.UNRELIABLE, text, bad))
    return notes


def graph_level(path: Path, graphs: int, launches: int) -> Caveat:
    """Graph launches without their kernels."""
    what = f"{graphs} opaque CUDA graphs" if graphs else f"{launches} CUDA graph launches without kernels"
    text = (
        f"{path}: {what}: nsys traced graphs as a whole, so their kernels and categories are not known: "
        f"capture again with `nsys profile {NODE_LEVEL}`"
    )
    return Caveat(CaveatCode.GRAPH_LEVEL_TRACE, text, graphs or launches)


def no_kernels(path: Path, launches: int) -> Caveat:
    """Launches, or nothing at all, but no kernel."""
    if launches:
        text = (
            f"{path}: {launches} launches but 0 kernels: GPU tracing was not active (another CUPTI client, such as "
            "torch.profiler?): capture again with `--trace=cuda,nvtx` and no other profiler"
        )
        return Caveat(CaveatCode.LAUNCHES_WITHOUT_KERNELS, text, launches)
    return Caveat(
        CaveatCode.NO_GPU_EVENTS, f"no GPU kernel events in {path}: capture again with `nsys profile --trace=cuda,nvtx`"
    )


def no_launches(path: Path, table: str) -> Caveat:
    """No API calls: kernels cannot be given to steps."""
    text = f"{path}: table {table} is missing, so kernels cannot be given to steps: {EXPORT_AGAIN}, without a selection"
    return Caveat(CaveatCode.MISSING_TABLE, text, 1)


def no_nvtx(path: Path) -> Caveat:
    """No ranges: neither steps nor context."""
    text = f"{path}: no NVTX ranges, so no annotated steps: capture with `--trace=cuda,nvtx` and the plugin on"
    return Caveat(CaveatCode.NO_NVTX, text)


def open_ranges(path: Path, count: int) -> Caveat:
    """Ranges that were never closed."""
    text = (
        f"{path}: {count} NVTX ranges were never closed (lost pops, or the capture's end); they were closed at the "
        "capture's end, and no work was given to them"
    )
    return Caveat(CaveatCode.OPEN_RANGES, text, count)


def unnamed(path: Path, count: int) -> Caveat:
    """Kernels without a name."""
    text = f"{path}: {count} kernels have no name in StringIds; their time is kept as unnamed: {EXPORT_AGAIN}"
    return Caveat(CaveatCode.UNNAMED_KERNELS, text, count)


def unmapped_nodes(path: Path, count: int) -> Caveat:
    """Replayed work whose nodes were made before the capture began."""
    text = (
        f"{path}: the making of the graph nodes of {count} replayed kernels, copies and fills was not recorded, so "
        "ranges cannot name them: start nsys before vLLM captures its graphs"
    )
    return Caveat(CaveatCode.GRAPH_NODES_UNMAPPED, text, count)


def counted_twice(path: Path, count: int) -> Caveat:
    """Graph rows whose kernels are there too."""
    text = f"{path}: {count} rows of whole graphs were left out, since the kernels of these launches are there as well"
    return Caveat(CaveatCode.ROWS_SKIPPED, text, count)


def rank_unknown(path: Path, count: int) -> Caveat:
    """Several captures and no rank."""
    text = f"{path}: {count} processes or devices and nothing that names their ranks; they are ordered by device"
    return Caveat(CaveatCode.RANK_UNKNOWN, text, count)
