"""One rank of `bench all-reduce`, a process of its own: ``python -m vllm_k25_instrument.bench.rank FOLDER RANK``.

Reads ``plan.json`` in the folder and leaves ``rank-N.json`` there; the first rank writes what is under way to
``stage``. It dies with the process that started it.
"""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from time import monotonic_ns
from typing import Any, Final

import msgspec

from vllm_k25_instrument.bench.intervals import FEWEST
from vllm_k25_instrument.model import NS_PER_SECOND

PLAN: Final = "plan.json"
STAGE: Final = "stage"
MEETING: Final = "meeting"

_WARM_UP: Final = 3
_PR_SET_PDEATHSIG: Final = 1
_NS_PER_MS: Final = 1_000_000


class Plan(msgspec.Struct, frozen=True):
    """What every rank does. `cores` are the processor's for each rank, empty where they are left alone."""

    ranks: int
    hidden: int
    tokens: tuple[int, ...]
    bursts: tuple[int, ...]
    most: int
    seconds: float
    timeout: float
    parent: int
    cores: tuple[tuple[int, ...], ...] = ()


class Case(msgspec.Struct, frozen=True):
    """What a rank measured of one path, size and number in a row.

    `entries_ns` holds for each repeat when the rank entered each call it could see enter, on the machine's monotonic
    clock; `durations_ns` the time of all calls of a repeat.
    """

    path: str
    tokens: int
    calls: int
    in_graph: bool
    entries_ns: list[list[int]]
    durations_ns: list[int]


class RankResult(msgspec.Struct, frozen=True):
    """All that a rank has to say. `taken` is vLLM's own choice by number of tokens; `notes` are of paths left out."""

    cases: list[Case]
    taken: dict[int, str]
    notes: list[str]
    threads: int
    device_name: str = ""


def rank_file(rank: int) -> str:
    """The name of a rank's result."""
    return f"rank-{rank}.json"


def main(folder: Path, rank: int) -> None:
    """Measure, and leave the result in the folder."""
    plan = msgspec.json.decode((folder / PLAN).read_bytes(), type=Plan)
    _die_with(plan.parent)
    if plan.cores:
        os.sched_setaffinity(0, plan.cores[rank])
    from vllm_k25_instrument.bench.group import join_group, leave_group
    from vllm_k25_instrument.bench.in_vllm import prepare_vllm, set_threads

    prepare_vllm()
    threads = set_threads(None)
    say = _saying(folder / STAGE) if rank == 0 else (lambda text: None)
    say("joining the ranks")
    group = join_group(rank, plan.ranks, folder / MEETING, seconds=plan.timeout)
    result = _Measure(plan, group, say).all(threads)
    written = folder / f"{rank_file(rank)}.part"
    written.write_bytes(msgspec.json.encode(result))
    written.rename(folder / rank_file(rank))
    leave_group()


def _die_with(parent: int) -> None:
    """Have the kernel end this process when its parent ends, however that ends."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it had ended before we asked
        sys.exit(1)


def _saying(file: Path) -> Callable[[str], None]:
    def say(text: str) -> None:
        part = file.with_suffix(".part")
        part.write_text(text, encoding="utf-8")
        part.rename(file)

    return say


@dataclass(slots=True)
class _Timed:
    entries: list[list[int]]
    durations: list[int]


class _Measure:
    def __init__(self, plan: Plan, group: Any, say: Callable[[str], None]) -> None:
        self._plan, self._group, self._say = plan, group, say
        self._cuda = group.device.type == "cuda"
        self._cases: list[Case] = []
        self._taken: dict[int, str] = {}
        self._notes: list[str] = []

    def all(self, threads: int) -> RankResult:
        import torch

        from vllm_k25_instrument.bench.paths import find_paths, taken_path

        paths = find_paths(self._group)
        for tokens in self._plan.tokens:
            tensor = torch.zeros(tokens, self._plan.hidden, dtype=torch.bfloat16, device=self._group.device)
            self._taken[tokens] = str(taken_path(self._group, tensor))
            for path in paths:
                if not self._agreed(bool(path.takes(tensor))):
                    self._notes.append(f"{path.name} does not take {tokens} tokens")
                    continue
                self._check(path.name, path.reduce, tensor)
                for calls in self._plan.bursts:
                    self._say(f"{path.name}, {tokens} tokens, {calls} in a row")
                    self._case(str(path.name), path.reduce, tensor, calls)
        name = str(torch.cuda.get_device_name()) if self._cuda else ""
        return RankResult(self._cases, self._taken, self._notes, threads, name)

    def _case(self, name: str, reduce: Callable[[Any], Any], tensor: Any, calls: int) -> None:
        ways: list[tuple[bool, Callable[[], None] | None]] = [(False, None)]
        if self._cuda:
            ways.append((True, self._captured(reduce, tensor, calls)))
        for in_graph, replay in ways:
            once = self._cuda_once if self._cuda else self._host_once
            measured = self._repeated(lambda: once(reduce, tensor, calls, replay))  # noqa: B023 - called at once
            self._cases.append(Case(name, len(tensor), calls, in_graph, measured.entries, measured.durations))

    def _repeated(self, once: Callable[[], tuple[list[int], int]]) -> _Timed:
        began = monotonic_ns()
        for _ in range(_WARM_UP):
            once()
        each = (monotonic_ns() - began) / _WARM_UP
        count = self._from_first(round(self._plan.seconds * NS_PER_SECOND / max(each, 1.0)))
        timed = _Timed([], [])
        gc.collect()
        gc.disable()
        try:
            for _ in range(min(max(count, FEWEST), self._plan.most)):
                entries, duration = once()
                timed.entries.append(entries)
                timed.durations.append(duration)
        finally:
            gc.enable()
        return timed

    def _host_once(
        self, reduce: Callable[[Any], Any], tensor: Any, calls: int, replay: Callable[[], None] | None
    ) -> tuple[list[int], int]:
        entries = []
        self._barrier()
        for _ in range(calls):
            entries.append(monotonic_ns())
            reduce(tensor)
        return entries, monotonic_ns() - entries[0]

    def _cuda_once(
        self, reduce: Callable[[Any], Any], tensor: Any, calls: int, replay: Callable[[], None] | None
    ) -> tuple[list[int], int]:
        """By events on the current stream; of entries only the first is seen, when the host launches it."""
        import torch

        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        self._barrier()
        entered = monotonic_ns()
        start.record()
        if replay is not None:
            replay()
        else:
            for _ in range(calls):
                reduce(tensor)
        end.record()
        end.synchronize()
        return [entered], round(start.elapsed_time(end) * _NS_PER_MS)

    def _captured(self, reduce: Callable[[Any], Any], tensor: Any, calls: int) -> Callable[[], None]:
        """As vLLM captures: in its own ``graph_capture``, which lets the communicators register their buffers."""
        import torch
        from vllm.distributed.parallel_state import graph_capture

        reduce(tensor.clone())
        with graph_capture(device=self._group.device) as context:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=context.stream):
                for _ in range(calls):
                    reduce(tensor)
        replay: Callable[[], None] = graph.replay
        return replay

    def _check(self, name: str, reduce: Callable[[Any], Any], tensor: Any) -> None:
        """The path adds up: ones become the number of ranks. Raises RuntimeError where not."""
        ones = tensor.new_ones(tensor.shape)
        found = reduce(ones)
        if not bool((found == self._plan.ranks).all()):
            raise RuntimeError(f"{name} did not add up {self._plan.ranks} ranks' ones: it gave {found.flatten()[0]}")

    def _barrier(self) -> None:
        import torch

        torch.distributed.barrier(group=self._group.cpu_group)

    def _agreed(self, yes: bool) -> bool:
        """Whether all ranks say so."""
        import torch

        vote = torch.tensor([int(yes)])
        torch.distributed.all_reduce(vote, op=torch.distributed.ReduceOp.MIN, group=self._group.cpu_group)
        return bool(vote.item())

    def _from_first(self, number: int) -> int:
        """The first rank's number, on all ranks."""
        import torch

        told = torch.tensor([number])
        torch.distributed.broadcast(told, self._group.ranks[0], group=self._group.cpu_group)
        return int(told.item())


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
