"""From a step's marks to its sample in the ring: column by column, as this runs on the engine's thread."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from operator import sub
from typing import Any, Final

from vllm_k25_instrument.model import (
    ALL_REDUCE_PATHS,
    CATEGORY_CODE,
    GRAPH_MODES,
    HOOKED_CATEGORIES,
    NO_PARENT,
    PHASES,
    AllReducePath,
    Category,
    expose,
    pack_sample,
    pack_unchanging,
)
from vllm_k25_instrument.recorder.device import Device
from vllm_k25_instrument.recorder.step import END, INDEX, START, STATIC, OpenStep
from vllm_k25_instrument.ring import RingWriter

PHASE_CODE: Final = {phase: code for code, phase in enumerate(PHASES)}
_GRAPH_CODE: Final = {mode: code for code, mode in enumerate(GRAPH_MODES)}
_PATH_CODE: Final = {str(path): code for code, path in enumerate(ALL_REDUCE_PATHS)}
_ALL_REDUCE: Final = CATEGORY_CODE[Category.ALL_REDUCE]
_OTHER_PATH: Final = _PATH_CODE[AllReducePath.OTHER]

Column = tuple[Any, ...]


class _Shape:
    """What a step has in common with the last one of its phase where both made the same calls: all but its times.

    A server decodes the same batch for hundreds of steps, so this is made once and found again, which saves half of
    the work after a step.
    """

    __slots__ = (
        "_columns",
        "_nested",
        "all_reduces",
        "codes",
        "hook_calls",
        "nested",
        "one_stream",
        "packed",
        "streams",
    )

    def __init__(self, columns: Sequence[Column], ring: RingWriter) -> None:
        codes, hooks, _, parents, details, nbytes, layers, streams = columns[:STATIC]
        self._columns = codes, hooks, details, nbytes, layers, streams
        self.codes = codes
        self.streams = streams
        self.one_stream = not any(streams)
        self.hook_calls = tuple(Counter(hooks).items())
        parent_column = _parent_column(parents)
        self._nested = parent_column if any(parents) else None
        # Of each range inside another one: its index, and the category of the other.
        self.nested = [(n, codes[parent]) for n, parent in enumerate(parent_column) if parent != NO_PARENT]
        detail_index = {detail: ring.detail_index(detail) for detail in set(details)}
        detail_column = [detail_index[detail] for detail in details]
        self.packed = pack_unchanging((nbytes, layers, parent_column, detail_column, streams, codes))
        by_path: dict[int, list[int]] = {}
        for n, code in enumerate(codes):
            if code == _ALL_REDUCE:
                by_path.setdefault(_PATH_CODE.get(details[n], _OTHER_PATH), []).append(n)
        # Of each path: its code, the indices of its ranges, and their sizes.
        self.all_reduces = [(path, mine, [nbytes[n] for n in mine]) for path, mine in by_path.items()]

    def fits(self, columns: Sequence[Column]) -> bool:
        """Whether these are the columns of a step of this shape."""
        codes, hooks, _, parents, details, nbytes, layers, streams = columns[:STATIC]
        if (codes, hooks, details, nbytes, layers, streams) != self._columns:
            return False
        return not any(parents) if self._nested is None else _parent_column(parents) == self._nested


def _parent_column(parents: Column) -> list[int]:
    return [NO_PARENT if parent is None else parent[INDEX] for parent in parents]


class SampleWriter:
    """Writes the samples of one rank, and counts what is in them."""

    def __init__(self, ring: RingWriter) -> None:
        self._ring = ring
        self._shapes: list[_Shape | None] = [None] * len(PHASES)

    def write(self, step: OpenStep, duration_ns: int, gap_ns: int, device: Device[Any]) -> bool:
        """Write the sample of a finished step and count it; False, and nothing counted, where no slot can hold it."""
        phase, graph = PHASE_CODE[step.phase], _GRAPH_CODE[step.graph_mode]
        totals = self._ring.totals
        totals.add_overhead(step.overhead_ns)
        exposed = [0] * len(HOOKED_CATEGORIES)
        starts: list[int] = []
        durations: list[int] = []
        shape = None
        if step.ranges:
            columns = list(zip(*step.ranges, strict=True))
            shape = self._shapes[phase]
            if shape is None or not shape.fits(columns):
                shape = self._shapes[phase] = _Shape(columns, self._ring)
            starts = device.offsets_ns(step.start, columns[START])
            ends = device.offsets_ns(step.start, columns[END])
            durations = list(map(sub, ends, starts))
            _share_out(shape, starts, ends, durations, exposed)
        sample = pack_sample(
            step=step.number,
            phase_code=phase,
            requests=step.requests,
            tokens=step.tokens,
            padded_tokens=step.padded_tokens,
            graph_code=graph,
            start_unix_ns=step.start_unix_ns,
            duration_ns=duration_ns,
            host_ns=step.host_end_ns - step.host_start_ns,
            gap_ns=gap_ns,
            overhead_ns=step.overhead_ns,
            complete=step.complete,
            range_columns=(starts, durations),
            unchanging=b"" if shape is None else shape.packed,
        )
        if not self._ring.append(sample):
            return False
        totals.add_sample(phase, graph, step.requests, duration_ns, [*exposed, duration_ns - sum(exposed)])
        if shape is not None:
            for hook_index, count in shape.hook_calls:
                totals.add_hook_calls(hook_index, count)
            for path, mine, nbytes in shape.all_reduces:
                totals.add_all_reduces(path, [durations[n] for n in mine], nbytes)
        return True


def _share_out(
    shape: _Shape, starts: Sequence[int], ends: Sequence[int], durations: Sequence[int], exposed: list[int]
) -> None:
    """Add the ranges' exposed times to those of their categories."""
    shares = durations if shape.one_stream else expose(starts, ends, shape.streams)
    for code, share in zip(shape.codes, shares, strict=True):
        exposed[code] += share
    if shape.one_stream:
        for n, parent_code in shape.nested:
            exposed[parent_code] -= durations[n]
