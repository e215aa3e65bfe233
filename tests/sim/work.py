"""What a GPU does: kernels, copies, fills; and what a log says of each execution."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tests.sim.memory import Buffer

Duration = int | Callable[[], int]
"""Nanoseconds; a callable is asked anew for each execution, so that two replays of one node may differ."""


@dataclass(frozen=True, eq=False)
class Work:
    """One kernel, copy or fill. It reads when it starts and writes when it ends.

    What it writes is a digest of its name and of what it has read, so equal contents mean equal work in equal order.
    `run` is called at its end, for effects on memory that is not the simulator's.
    """

    name: str
    kind: str
    ns: Duration
    reads: Sequence[Buffer] = ()
    writes: Sequence[Buffer] = ()
    value: int | None = None
    run: Callable[[], object] | None = None

    def duration(self) -> int:
        ns = self.ns() if callable(self.ns) else self.ns
        assert ns >= 0, f"{self.name} takes {ns} ns"
        return ns

    def result(self, index: int, inputs: Sequence[int]) -> int:
        if self.value is not None:
            return self.value
        if self.kind == "memcpy":
            return inputs[0]
        digest = hashlib.blake2b(repr((self.name, index, tuple(inputs))).encode(), digest_size=6)
        return int.from_bytes(digest.digest(), "big")


@dataclass(frozen=True)
class Execution:
    """The truth about one execution on the device: when it ran (ns), where, and as part of which replay."""

    name: str
    kind: str
    start_ns: int
    end_ns: int
    stream: int
    graph: int | None = None
    replay: int | None = None
    node: int | None = None


@dataclass(frozen=True)
class Race:
    """Two executions that were not ordered touched the same buffer at the same time."""

    buffer: str
    name: str
    at_ns: int
