"""Captures made by hand: a few rows of GPU work, launches and annotations, in the columns that readers produce."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from vllm_k25_instrument.analysis.capture import Activities, ActivityKind, Annotations, Capture, Launches, Source
from vllm_k25_instrument.report.caveats import Caveat


@dataclass
class CaptureBuilder:
    """Write down what happened, in any order; `build` sorts it and fills the columns. Times are ns."""

    rank: int = 0
    world_size: int = 1
    clock_base_ns: int | None = 0
    complete: bool = True
    notes: tuple[Caveat, ...] = ()
    source: Source = Source.TORCH_TRACE
    path: Path = Path("trace.json")
    device: int = 0
    _names: dict[str, int] = field(default_factory=dict)
    _activities: list[tuple[Any, ...]] = field(default_factory=list)
    _launches: list[tuple[Any, ...]] = field(default_factory=list)
    _annotations: list[tuple[Any, ...]] = field(default_factory=list)

    def annotate(self, name: str, start: int, end: int, thread: int = 1, *, is_open: bool = False) -> int:
        self._annotations.append((start, end - start, self._name(name), thread, len(self._annotations), is_open))
        return len(self._annotations) - 1

    def launch(
        self, start: int, kernels: Iterable[Sequence[Any]] = (), *, thread: int = 1, graph: bool = False, cost: int = 1
    ) -> int:
        """A launch at `start`, and its kernels: (name, start, duration[, stream[, kind]])."""
        launch = len(self._launches)
        name = "cudaGraphLaunch" if graph else "cudaLaunchKernel"
        self._launches.append((start, cost, self._name(name), thread, graph, launch))
        for kernel in kernels:
            self.work(*kernel, launch=launch)
        return launch

    def work(
        self,
        name: str,
        start: int,
        duration: int,
        stream: int = 7,
        kind: ActivityKind = ActivityKind.KERNEL,
        *,
        launch: int = -1,
        annotation: int = -1,
    ) -> None:
        self._activities.append((start, duration, int(kind), self._name(name), stream, launch, annotation))

    def build(self) -> Capture:
        annotations = sorted(self._annotations, key=lambda row: (row[0], -row[1]))
        launches = sorted(self._launches, key=lambda row: row[0])
        activities = sorted(self._activities, key=lambda row: row[0])
        to_launch = {row[5]: place for place, row in enumerate(launches)} | {-1: -1}
        to_annotation = {row[4]: place for place, row in enumerate(annotations)} | {-1: -1}
        return Capture(
            source=self.source,
            path=self.path,
            names=list(self._names),
            activities=Activities(
                start_ns=_column(activities, 0, np.int64),
                duration_ns=_column(activities, 1, np.int64),
                kind=_column(activities, 2, np.int8),
                name=_column(activities, 3, np.int32),
                stream=_column(activities, 4, np.int32),
                launch=np.array([to_launch[row[5]] for row in activities], np.int32),
                annotation=np.array([to_annotation[row[6]] for row in activities], np.int32),
                bytes=np.zeros(len(activities), np.int64),
            ),
            launches=Launches(
                start_ns=_column(launches, 0, np.int64),
                duration_ns=_column(launches, 1, np.int64),
                name=_column(launches, 2, np.int32),
                thread=_column(launches, 3, np.int64),
                is_graph=_column(launches, 4, np.bool_),
            ),
            annotations=Annotations(
                start_ns=_column(annotations, 0, np.int64),
                duration_ns=_column(annotations, 1, np.int64),
                name=_column(annotations, 2, np.int32),
                thread=_column(annotations, 3, np.int64),
                parent=np.array(_parents(annotations), np.int32),
                is_open=_column(annotations, 5, np.bool_),
            ),
            rank=self.rank,
            world_size=self.world_size,
            device=self.device,
            clock_base_ns=self.clock_base_ns,
            complete=self.complete,
            notes=self.notes,
        )

    def _name(self, name: str) -> int:
        return self._names.setdefault(name, len(self._names))


def _column(rows: Sequence[Sequence[Any]], at: int, dtype: Any) -> Any:
    return np.array([row[at] for row in rows], dtype)


def _parents(rows: Sequence[Sequence[Any]]) -> list[int]:
    parents = []
    for index, (start, _, _, thread, *_) in enumerate(rows):
        around = [n for n in range(index) if rows[n][3] == thread and start < rows[n][0] + rows[n][1]]
        parents.append(around[-1] if around else -1)
    return parents
