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
    RANGE_COLUMNS,
    AllReducePath,
    Category,
    expose,
    pack_sample,
)
from vllm_k25_instrument.recorder.device import Device
from vllm_k25_instrument.recorder.step import CODE, DETAIL, INDEX, OpenRange, OpenStep
from vllm_k25_instrument.ring import RingWriter
from vllm_k25_instrument.totals import TotalsWriter

PHASE_CODE: Final = {phase: code for code, phase in enumerate(PHASES)}
_GRAPH_CODE: Final = {mode: code for code, mode in enumerate(GRAPH_MODES)}
_PATH_CODE: Final = {str(path): code for code, path in enumerate(ALL_REDUCE_PATHS)}
_ALL_REDUCE: Final = CATEGORY_CODE[Category.ALL_REDUCE]
_OTHER_PATH: Final = _PATH_CODE[AllReducePath.OTHER]


def write_sample(step: OpenStep, duration_ns: int, gap_ns: int, device: Device[Any], ring: RingWriter) -> bool:
    """Write the sample of a finished step and count it; False, and nothing counted, where it does not fit a slot."""
    phase, graph = PHASE_CODE[step.phase], _GRAPH_CODE[step.graph_mode]
    columns, exposed, hooks = _resolve(step, device, ring)
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
        range_columns=columns,
    )
    totals = ring.totals
    totals.add_overhead(step.overhead_ns)
    if not ring.append(sample):
        return False
    totals.add_sample(phase, graph, step.requests, duration_ns, [*exposed, duration_ns - sum(exposed)])
    for hook_index, count in Counter(hooks).items():
        totals.add_hook_calls(hook_index, count)
    _count_all_reduces(step.ranges, columns, totals)
    return True


def _resolve(
    step: OpenStep, device: Device[Any], ring: RingWriter
) -> tuple[list[Sequence[int]], list[int], Sequence[int]]:
    """The ranges as columns for `pack_sample`, the exposed time per hooked category, and the ranges' hooks."""
    ranges = step.ranges
    exposed = [0] * len(HOOKED_CATEGORIES)
    if not ranges:
        return [()] * RANGE_COLUMNS, exposed, ()
    columns = zip(*ranges, strict=True)
    codes, hooks, _, parents, details, nbytes, layers, streams, _, start_marks, end_marks, _ = columns
    starts = device.offsets_ns(step.start, start_marks)
    ends = device.offsets_ns(step.start, end_marks)
    durations = list(map(sub, ends, starts))
    one_stream = not any(streams)
    shares = durations if one_stream else expose(starts, ends, streams)
    for code, share in zip(codes, shares, strict=True):
        exposed[code] += share
    parent_indices = [NO_PARENT] * len(ranges)
    if any(parents):
        for index, parent in enumerate(parents):
            if parent is not None:
                parent_indices[index] = parent[INDEX]
                if one_stream:
                    exposed[parent[CODE]] -= durations[index]
    detail_indices = {detail: ring.detail_index(detail) for detail in set(details)}
    detail_column = [detail_indices[detail] for detail in details]
    return [starts, durations, nbytes, layers, parent_indices, detail_column, streams, codes], exposed, hooks


def _count_all_reduces(ranges: list[OpenRange], columns: Sequence[Sequence[int]], totals: TotalsWriter) -> None:
    """Add a sample's all-reduces to the totals, path by path (most steps know one)."""
    _, durations, nbytes, _, _, details, _, codes = columns
    mine = [index for index, code in enumerate(codes) if code == _ALL_REDUCE]
    of_path: dict[int, list[int]] = {}
    if len({details[index] for index in mine}) == 1:
        of_path[details[mine[0]]] = mine
    else:
        for index in mine:
            of_path.setdefault(details[index], []).append(index)
    for indices in of_path.values():
        totals.add_all_reduces(
            _PATH_CODE.get(ranges[indices[0]][DETAIL], _OTHER_PATH),
            [durations[index] for index in indices],
            [nbytes[index] for index in indices],
        )
