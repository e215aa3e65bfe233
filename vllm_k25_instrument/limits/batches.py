"""What the sampled steps really had to do: their batches, and their all-reduces by path and size.

A breakdown keeps only a label for the batch (64 stands for 17 to 64 requests), and a floor depends on the number. So
the samples are read once more, and steps of the same batch are counted together.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from vllm_k25_instrument.limits.errors import LimitsError
from vllm_k25_instrument.limits.floors import Load, Sharding
from vllm_k25_instrument.model import (
    ALL_REDUCE_PATHS,
    BATCH_BUCKETS,
    BATCH_LABELS,
    CATEGORY_CODE,
    GRAPH_MODES,
    PHASES,
    SIZE_BUCKETS,
    SIZE_LABELS,
    Category,
    unpack_columns,
)
from vllm_k25_instrument.report.digest import GroupKey
from vllm_k25_instrument.ring import RingError, RingReader
from vllm_k25_instrument.totals import Totals

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_ALL_REDUCE: Final = CATEGORY_CODE[Category.ALL_REDUCE]

_AT_ONCE: Final = 256
"""Samples that are unpacked together: some megabytes."""


@dataclass(slots=True)
class Calls:
    """A number of calls and the sum of their durations, ns."""

    count: int = 0
    sum_ns: int = 0

    def add(self, count: int, sum_ns: int) -> None:
        """Count more of them."""
        self.count += count
        self.sum_ns += sum_ns

    @property
    def mean_ns(self) -> float:
        """Mean duration, ns; 0 of no calls."""
        return self.sum_ns / self.count if self.count else 0.0


@dataclass(slots=True)
class Batches:
    """The batches of one group, steps of all ranks counted, and its all-reduces by (path, size label)."""

    steps: Counter[tuple[int, int]] = field(default_factory=Counter)
    all_reduces: dict[tuple[str, str], Calls] = field(default_factory=dict)

    def add_ranges(self, ranges: NDArray[np.void], details: Sequence[str]) -> None:
        """Count the all-reduces among `ranges`, a structured array as in ``model.unpack_columns``."""
        import numpy as np  # here and not above: every command waits for what this module imports

        reduces = ranges["category"] == _ALL_REDUCE
        size = np.searchsorted(SIZE_BUCKETS, ranges["bytes"][reduces])
        code = ranges["detail"][reduces].astype(np.int64) * len(SIZE_LABELS) + size
        kinds, kind = np.unique(code, return_inverse=True)
        sums = np.zeros(len(kinds), np.int64)
        np.add.at(sums, kind, ranges["duration_ns"][reduces].astype(np.int64))
        for both, count, sum_ns in zip(kinds.tolist(), np.bincount(kind).tolist(), sums.tolist(), strict=True):
            detail, place = divmod(both, len(SIZE_LABELS))
            if detail < len(details):
                self.all_reduces.setdefault((details[detail], SIZE_LABELS[place]), Calls()).add(count, sum_ns)

    def loads(self, context: float) -> dict[Load, float]:
        """The share of the steps that had each load; their sum is 1."""
        whole = self.steps.total()
        return {Load(requests, tokens, context): n / whole for (requests, tokens), n in self.steps.items()}

    def mean(self) -> tuple[float, float]:
        """Mean requests and mean tokens of a step."""
        whole = self.steps.total()
        return (
            sum(requests * n for (requests, _), n in self.steps.items()) / whole,
            sum(tokens * n for (_, tokens), n in self.steps.items()) / whole,
        )


@dataclass(slots=True)
class Measured:
    """What the rings of one server say of its steps. `sharding` is None where no ring could be read."""

    groups: dict[GroupKey, Batches] = field(default_factory=dict)
    sharding: Sharding | None = None
    pipeline_stages: int = 1
    sizes_of_path: dict[str, set[str]] = field(default_factory=dict)
    calls_of_path: dict[str, Calls] = field(default_factory=dict)

    def add(self, samples: Sequence[bytes], details: Sequence[str]) -> None:
        """Count packed samples of one rank, whose detail strings are `details`.

        Samples that cannot be unpacked are left out.
        """
        by_length: dict[int, list[bytes]] = {}
        for sample in samples:
            by_length.setdefault(len(sample), []).append(sample)
        for alike in by_length.values():
            try:
                columns = unpack_columns(alike)
            except ValueError:
                continue
            self._add_columns(columns, details)

    def _add_columns(self, columns: NDArray[np.void], details: Sequence[str]) -> None:
        import numpy as np

        known = (columns["phase"] < len(PHASES)) & (columns["graph_mode"] < len(GRAPH_MODES))
        columns = columns[known]
        batch = np.searchsorted(BATCH_BUCKETS, columns["requests"])
        keys = np.stack((columns["phase"], columns["graph_mode"], batch), axis=1)
        for phase, graph, label in {tuple(key) for key in keys.tolist()}:
            rows = columns[(keys == (phase, graph, label)).all(axis=1)]
            batches = self.groups.setdefault(
                GroupKey(PHASES[phase], BATCH_LABELS[label], GRAPH_MODES[graph]), Batches()
            )
            batches.steps.update(zip(rows["requests"].tolist(), rows["tokens"].tolist(), strict=True))
            batches.add_ranges(rows["ranges"], details)

    def add_totals(self, totals: Totals) -> None:
        """Count what a rank has counted since it started, for paths that no sample in the ring shows any more."""
        for code, path in enumerate(ALL_REDUCE_PATHS):
            histogram = totals.all_reduce(code)
            self.calls_of_path.setdefault(path, Calls()).add(histogram.count, histogram.sum_ns)
            sizes = {label for size, label in enumerate(SIZE_LABELS) if totals.all_reduce_bytes(code, size)}
            self.sizes_of_path.setdefault(path, set()).update(sizes)

    def path_ns(self, path: str, size: str) -> float | None:
        """Mean duration of an all-reduce of this size label by `path`; None where none was measured.

        From the samples of any group; else from the counters since start, where all of the path's calls were of
        this size (they do not tell its durations apart by size).
        """
        found = Calls()
        for batches in self.groups.values():
            calls = batches.all_reduces.get((path, size))
            if calls is not None:
                found.add(calls.count, calls.sum_ns)
        if not found.count and self.sizes_of_path.get(path) == {size}:
            found = self.calls_of_path[path]
        return found.mean_ns if found.count else None

    def known_sharding(self) -> Sharding:
        """How the work is divided. Raises LimitsError where the rings do not tell, or ranks have different layers."""
        if self.pipeline_stages > 1:
            raise LimitsError(
                f"no floors for {self.pipeline_stages} pipeline stages: which layers a rank has is not in its ring"
            )
        if self.sharding is None:
            raise LimitsError("no ring tells the size of the tensor-parallel group")
        return self.sharding

    @property
    def paths(self) -> tuple[str, ...]:
        """The all-reduce paths of which anything was measured, by name."""
        sampled = {path for batches in self.groups.values() for path, _ in batches.all_reduces}
        counted = {path for path, calls in self.calls_of_path.items() if calls.count}
        return tuple(sorted(sampled | counted))


def read_measured(readers: Iterable[RingReader]) -> Measured:
    """Read the samples and counters of these rings.

    A ring that cannot be read is left out: whoever breaks the rings down says so.
    """
    measured = Measured()
    for reader in readers:
        try:
            place = reader.identity.coordinates
            measured.sharding = measured.sharding or Sharding.of(place.tp_size, place.dp_size)
            measured.pipeline_stages = max(measured.pipeline_stages, place.pp_size)
            measured.add_totals(reader.totals())
            written = reader.written
            for first in range(max(written - reader.layout.slots, 0), written, _AT_ONCE):
                measured.add(*reader.packed(first, min(first + _AT_ONCE, written)))
        except RingError:
            continue
    return measured


def least_load(label: str, context: float) -> Load:
    """The smallest load that a batch label stands for: 64 -> 17 requests, so that its floor is a floor of all."""
    place = BATCH_LABELS.index(label) if label in BATCH_LABELS else 0
    requests = BATCH_BUCKETS[place - 1] + 1 if place else 1
    return Load(requests, requests, context)


def loads_of(groups: Mapping[GroupKey, Batches], key: GroupKey, context: float) -> tuple[dict[Load, float], bool]:
    """The loads of a group with their shares, and whether they are known or the least that its label allows."""
    batches = groups.get(key)
    if batches is not None and batches.steps:
        return batches.loads(context), True
    return {least_load(key.batch, context): 1.0}, False
