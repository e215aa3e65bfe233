"""A capture under way: the nodes so far, and where each stream that takes part in it stands."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tests.sim.memory import PoolId
from tests.sim.work import Work

if TYPE_CHECKING:
    from tests.sim.events import EventState
    from tests.sim.gpu import StreamState


@dataclass(frozen=True, eq=False)
class Node:
    """A node of a graph; `after` holds the indices of the nodes that it waits for."""

    index: int
    kind: str
    after: frozenset[int]
    stream: int
    work: Work | None = None
    event: EventState | None = None


class Capture:
    """One capture sequence, from cudaStreamBeginCapture to cudaStreamEndCapture."""

    def __init__(self, mode: str, thread: int, origin: StreamState, pool: PoolId) -> None:
        self.mode = mode
        self.thread = thread
        self.origin = origin
        self.pool = pool
        self.nodes: list[Node] = []
        self.fronts: dict[StreamState, frozenset[int]] = {}
        self.invalid = False
        self.active = True
        self.join(origin, frozenset())

    def join(self, stream: StreamState, after: frozenset[int]) -> None:
        """`stream` takes part from now on, behind the nodes `after`."""
        stream.capture = self
        self.fronts[stream] = self.fronts.get(stream, frozenset()) | after

    def add(self, stream: StreamState, kind: str, *, work: Work | None = None, event: EventState | None = None) -> None:
        index = len(self.nodes)
        self.nodes.append(Node(index, kind, self.fronts[stream], stream.id, work, event))
        self.fronts[stream] = frozenset((index,))

    def end(self) -> None:
        """All streams leave it."""
        self.active = False
        for stream in self.fronts:
            stream.capture = None

    def unjoined(self) -> set[int]:
        """Nodes at the front of a forked stream that the origin does not wait for."""
        reached: set[int] = set()
        pending = list(self.fronts[self.origin])
        while pending:
            index = pending.pop()
            if index not in reached:
                reached.add(index)
                pending.extend(self.nodes[index].after)
        return {index for front in self.fronts.values() for index in front} - reached
