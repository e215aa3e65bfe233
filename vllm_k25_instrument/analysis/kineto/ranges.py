"""Named host ranges: which encloses which, and which was open at a launch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from vllm_k25_instrument.analysis.capture import Int32, Int64

NONE: Final = -1


@dataclass(frozen=True, slots=True)
class Ranges:
    """Host ranges of one process, sorted by start, outer before inner. `parent` indexes them."""

    start: Int64
    duration: Int64
    name: Int32
    thread: Int64
    external: Int64
    operator: NDArray[np.bool_]
    parent: Int32

    def __len__(self) -> int:
        return len(self.start)

    @classmethod
    def of(
        cls,
        start: Int64,
        duration: Int64,
        name: Int32,
        thread: Int64,
        external: Int64,
        operator: NDArray[np.bool_],
    ) -> Ranges:
        """The ranges with their parents, from unsorted columns."""
        order = np.lexsort((-duration, start))
        start, duration, name = start[order], duration[order], name[order]
        thread, external, operator = thread[order], external[order], operator[order]
        return cls(start, duration, name, thread, external, operator, _parents(start, duration, thread))

    def open_at(self, when: Int64, thread: Int64) -> Int32:
        """The innermost range open on a thread at a time, one per row; -1 where none is."""
        result = np.full(len(when), NONE, np.int32)
        end = self.start + self.duration
        for one in np.unique(thread):
            rows = np.flatnonzero(thread == one)
            mine = np.flatnonzero(self.thread == one)
            if not len(mine):
                continue
            at = np.searchsorted(self.start[mine], when[rows], "right") - 1
            candidate = np.where(at >= 0, mine[np.maximum(at, 0)], NONE)
            # The last range that began may be over: then one that encloses it, if any, is the one.
            while (over := (candidate >= 0) & (end[np.maximum(candidate, 0)] <= when[rows])).any():
                candidate[over] = self.parent[candidate[over]]
            result[rows] = candidate
        return result

    def with_external(self, external: Int64) -> Int32:
        """The operator that has an external id, one per row; -1 where none does."""
        mine = np.flatnonzero(self.operator & (self.external >= 0))
        if not len(mine):
            return np.full(len(external), NONE, np.int32)
        mine = mine[np.argsort(self.external[mine], kind="stable")]
        ids = self.external[mine]
        at = np.searchsorted(ids, external)
        found = (at < len(ids)) & (ids[np.minimum(at, len(ids) - 1)] == external) & (external >= 0)
        return np.where(found, mine[np.minimum(at, len(ids) - 1)], NONE).astype(np.int32)

    def with_ancestors(self, wanted: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """The wanted ranges and all that enclose them."""
        kept = wanted.copy()
        layer = np.unique(self.parent[wanted])
        while len(layer := layer[(layer >= 0)]) and not kept[layer].all():
            layer = layer[~kept[layer]]
            kept[layer] = True
            layer = np.unique(self.parent[layer])
        return kept


def _parents(start: Int64, duration: Int64, thread: Int64) -> Int32:
    """The range that each range began in: the last one before it, on its thread, that ended after it began.

    All at once. A candidate that is over when a range begins hands it on to its own candidate: what lies between those
    two was over when the first began, so it cannot be the one. That halves what is left of a chain of siblings each
    time.
    """
    by_thread = np.argsort(thread, kind="stable")
    began, on = start[by_thread], thread[by_thread]
    ended = began + duration[by_thread]
    candidate = np.arange(-1, len(on) - 1)
    candidate[1:][on[1:] != on[:-1]] = NONE
    candidate[:1] = NONE
    left = np.flatnonzero(candidate >= 0)
    while len(left := left[ended[candidate[left]] <= began[left]]):
        candidate[left] = candidate[candidate[left]]
        left = left[candidate[left] >= 0]
    parents = np.full(len(on), NONE, np.int32)
    inside = candidate >= 0
    parents[by_thread[inside]] = by_thread[candidate[inside]]
    return parents
