"""Rings with known contents for the tests of what is exported."""

from __future__ import annotations

import fcntl
import os
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final

from vllm_k25_instrument.hooks.names import HOOK_NAMES
from vllm_k25_instrument.model import (
    ALL_REDUCE_PATHS,
    BATCH_BUCKETS,
    GRAPH_MODES,
    LIVE_CATEGORIES,
    LOST_REASONS,
    PHASES,
    SIZE_BUCKETS,
    RankCoordinates,
    RankIdentity,
)
from vllm_k25_instrument.ring import RingLayout, RingWriter, ring_file_name
from vllm_k25_instrument.totals import MAX_HOOKS, TotalsWriter

SMALL: Final = RingLayout(slots=16, slot_bytes=4096)
BATCHES: Final = (*BATCH_BUCKETS, BATCH_BUCKETS[-1] + 1)
SIZES: Final = (*SIZE_BUCKETS, SIZE_BUCKETS[-1] + 1)
STEP_NS: Final = 12_345_678

EXPORT: Final = (
    sys.executable,
    "-c",
    "import typer; from vllm_k25_instrument.commands.export import export; typer.run(export)",
)
"""`vllm-k25 export` as a process of its own."""


def identity(rank: int = 0, **fields: object) -> RankIdentity:
    known: dict[str, object] = {
        "instance": "test",
        "pid": os.getpid(),
        "coordinates": RankCoordinates(global_rank=rank, local_rank=rank, tp=rank, tp_size=8),
        "model": "moonshotai/Kimi-K2.5",
        "vllm_version": "0.32.0",
        "plugin_version": "0.1.0",
        "hooks": dict.fromkeys(HOOK_NAMES, "attached"),
    }
    return RankIdentity(**(known | fields))  # type: ignore[arg-type]


def make_ring(folder: Path, rank: int = 0, layout: RingLayout = SMALL, **fields: object) -> RingWriter:
    """A ring whose counters are in the file as soon as they are counted (a worker publishes them once a step)."""
    folder.mkdir(parents=True, exist_ok=True)
    return published_at_once(RingWriter(folder / ring_file_name(rank), identity(rank, **fields), layout))


def published_at_once(ring: RingWriter) -> RingWriter:
    """`ring`, publishing after each call that counts something."""

    def publishing(count: Callable[..., None]) -> Callable[..., None]:
        def counted(*args: object) -> None:
            count(*args)
            ring.publish()

        return counted

    for name in dir(ring.totals):
        if name.startswith("add_"):
            setattr(ring.totals, name, publishing(getattr(ring.totals, name)))
    return ring


def kill(writer: RingWriter) -> None:
    """What the kernel does when the writer's process dies: the ring stays, and nobody holds it any more."""
    unlock = struct.pack("hhqqi4x", fcntl.F_UNLCK, os.SEEK_SET, 0, 0, 0)
    fcntl.fcntl(writer._fd, fcntl.F_OFD_SETLK, unlock)


def split(duration_ns: int) -> list[int]:
    """Exclusive times of the live categories that add up to a step's duration."""
    share = duration_ns // 10
    return [share] * (len(LIVE_CATEGORIES) - 1) + [duration_ns - share * (len(LIVE_CATEGORIES) - 1)]


def touch_everything(totals: TotalsWriter) -> None:
    """Make every counter of a rank non-zero: all groups (more than there are rows for), paths, sizes, hooks."""
    for graph in range(len(GRAPH_MODES)):
        for requests in BATCHES:
            for phase in range(len(PHASES)):
                totals.add_step(phase, STEP_NS)
                totals.add_sample(phase, graph, requests, STEP_NS, split(STEP_NS))
    for path in range(len(ALL_REDUCE_PATHS)):
        for nbytes in SIZES:
            totals.add_all_reduces(path, [78_123], [nbytes])
    for reason in range(len(LOST_REASONS)):
        totals.add_lost(reason)
    for hook in range(MAX_HOOKS):
        totals.add_hook_calls(hook, 1)
        totals.add_hook_error(hook)
    totals.add_overhead(1_234)
