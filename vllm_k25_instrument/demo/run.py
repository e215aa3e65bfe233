"""The demo: serve the tiny model with instrumented workers, put load on it, break its time down."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Final, Protocol

from vllm_k25_instrument.demo.build import Build, Plan, plan_demo
from vllm_k25_instrument.demo.graph_modes import Lost, lost_of, most_lost
from vllm_k25_instrument.demo.load import LoadResult, run_load
from vllm_k25_instrument.demo.server import VllmServer, require_vllm, served_model
from vllm_k25_instrument.demo.tiny_model import Arch, write_tiny_k25
from vllm_k25_instrument.instances import INSTANCE_VARIABLE, Instance, list_instances
from vllm_k25_instrument.model import LostReason, Phase, StepSample
from vllm_k25_instrument.report.breakdown import Breakdown
from vllm_k25_instrument.report.rings import Report, read_rings
from vllm_k25_instrument.ring import RingReader, open_rings

CONCURRENCIES: Final = (1, 4, 8)
REQUESTS_PER_CLIENT: Final = 4
TOKENS: Final = 64
WARM_UP_TOKENS: Final = 8


class Watcher(Protocol):
    """Whoever watches the load."""

    def loading(self, stage: str) -> None:
        """A stage begins."""

    def loaded(self, load: LoadResult) -> None:
        """A stage of the load is over."""


def problems(loads: Iterable[LoadResult], breakdown: Breakdown, workers: int) -> list[str]:
    """Why a run with so many workers cannot be taken for a success: one line each, none where it can."""
    failed = [
        f"{load.failed} of {len(load.requests)} requests failed at concurrency {load.concurrency}: "
        + "; ".join(load.errors[:3])
        for load in loads
        if load.failed
    ]
    return failed + missing_samples(breakdown, workers)


def missing_samples(breakdown: Breakdown, workers: int) -> list[str]:
    """A line for each rank of `workers` without a ring, or without a sampled decode step."""
    decoded = {group.rank for group in breakdown.groups if group.key.phase is Phase.DECODE}
    problems = []
    for rank in range(workers):
        if rank not in breakdown.ranks_found:
            problems.append(f"rank {rank} left no ring: the plugin did not start in its worker")
        elif rank not in decoded:
            problems.append(f"rank {rank} has no sampled decode step")
    return problems


def server_environment(ring_dir: Path, sample_every: int) -> dict[str, str]:
    """The ``K25_*`` variables of the demo's server; the caller's own come first.

    ``K25_GRAPHS`` is not among them: where there are graphs, the default makes twins of them.
    """
    own = {"K25_SAMPLE_EVERY": str(sample_every), "K25_RING_DIR": str(ring_dir)}
    callers = {name: value for name, value in os.environ.items() if name.startswith("K25_")}
    callers.pop(INSTANCE_VARIABLE, None)
    return {**own, **callers, "K25_INSTRUMENT": "1"}


def start_server(out: Path, arch: Arch, port: int = 0, plan: Plan | None = None) -> VllmServer:
    """The demo's server, started; model, rings and log are below `out`. The caller stops it.

    `plan`: None makes one for the vLLM that is installed. On the CPU build the model runs eagerly, since there are no
    graphs to wait for; on the CUDA build with vLLM's default graphs. Raises VllmMissingError, BuildError where it
    cannot run here, ValueError where there are too few cores, OSError where `out` cannot be written.
    """
    require_vllm()
    plan = plan or plan_demo()
    out = out.absolute()
    model = out / f"model-{arch}"
    server = VllmServer(
        model,
        log=out / "server.log",
        env=server_environment(out / "rings", plan.sample_every),
        tensor_parallel_size=plan.workers,
        port=port,
        build=plan.build,
        eager=plan.build is Build.CPU,
        extra_args=("--served-model-name", f"tiny-kimi-k2.5-{arch}"),
    )
    write_tiny_k25(model, arch)
    return server.start()


def warm_up(server: VllmServer) -> None:
    """A short round of requests: a server's first prefill takes seconds. Raises OSError where the server is gone."""
    clients = max(CONCURRENCIES)
    asyncio.run(
        run_load(server.url, served_model(server.url), concurrency=clients, requests=clients, max_tokens=WARM_UP_TOKENS)
    )


def put_load(server: VllmServer, watcher: Watcher) -> tuple[LoadResult, ...]:
    """Load the server at each of ``CONCURRENCIES``. Raises OSError where the server is gone."""
    model = served_model(server.url)
    loads = []
    for concurrency in CONCURRENCIES:
        watcher.loading(f"sending load at concurrency {concurrency}")
        requests = concurrency * REQUESTS_PER_CLIENT
        load = asyncio.run(run_load(server.url, model, concurrency=concurrency, requests=requests, max_tokens=TOKENS))
        loads.append(load)
        watcher.loaded(load)
    return tuple(loads)


class RingMarks:
    """How far the rings of a server had been written at some moment: what came before is left out of the breakdown."""

    def __init__(self, ring_dir: Path, worker_pids: Collection[int]) -> None:
        """Of the instance below `ring_dir` that one of these workers writes into, if there is one."""
        self.instance: Instance | None = None
        self._written: dict[Path, int] = {}
        self._lost: dict[object, Lost] = {}
        for instance in list_instances(ring_dir):
            readers, _ = open_rings(instance.path)
            if any(reader.identity.pid in worker_pids for reader in readers):
                self.instance = instance
                self._written = {reader.path: reader.written for reader in readers}
                self._lost = {reader.path: lost_of(reader) for reader in readers}
            for reader in readers:
                reader.close()
            if self.instance is not None:
                return

    @property
    def skipped(self) -> int:
        """Sampled steps of a rank before the marks; of several ranks the largest."""
        return max(self._written.values(), default=0)

    def lost(self) -> dict[LostReason, int]:
        """Samples lost since the marks, by reason; of several ranks the largest number."""
        if self.instance is None:
            return {}
        readers, _ = open_rings(self.instance.path)
        try:
            return most_lost(readers, self._lost)
        finally:
            for reader in readers:
                reader.close()

    def read(self) -> Report:
        """The breakdown of what has come since; without an instance it is empty."""
        if self.instance is None:
            return read_rings([])
        readers, errors = open_rings(self.instance.path)
        later = [_LaterSamples(reader.path, self._written.get(reader.path, 0)) for reader in readers]
        try:
            return read_rings(later, errors)
        finally:
            for reader in (*readers, *later):
                reader.close()


class _LaterSamples(RingReader):
    """A ring without its first samples."""

    def __init__(self, path: Path, first: int) -> None:
        super().__init__(path)
        self._first = first

    def samples(self, since: int = 0) -> Iterator[StepSample]:
        return super().samples(max(since, self._first))
