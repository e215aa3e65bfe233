"""How long the gaps between hooked ranges are, by position (see `positions.py` for what they are)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import numpy as np
from numpy.typing import NDArray

from vllm_k25_instrument.model import CATEGORY_CODE, HOOKED_CATEGORIES, NO_PARENT, Category, StepSample, unpack_columns
from vllm_k25_instrument.positions import POSITIONS, Position

# What a range is to its neighbours.
_EDGE, _INPUT, _REDUCE, _COLLECTIVE, _ATTENTION, _MOE, _SAMPLING = range(7)
_ROLES: Final = 7
_ROLE_OF: Final = {
    Category.ALL_REDUCE: _REDUCE,
    Category.COLLECTIVE: _COLLECTIVE,
    Category.MOE_EXPERTS: _MOE,
    Category.MOE_ROUTING: _MOE,
    Category.MOE_SHARED_EXPERTS: _MOE,
    Category.MLA_ATTENTION: _ATTENTION,
    Category.ATTENTION: _ATTENTION,
    Category.SAMPLING: _SAMPLING,
    Category.INPUT_PREPARATION: _INPUT,
    # Drafting runs after sampling, and before whatever the runner does last.
    Category.SPECULATION: _SAMPLING,
}
_ROLE_BY_CODE: Final = np.array([_ROLE_OF[category] for category in HOOKED_CATEGORIES], np.int8)

_BETWEEN: Final = {
    (_INPUT, _REDUCE): Position.INPUTS_AND_LAYERS,
    (_INPUT, _ATTENTION): Position.INPUTS_AND_LAYERS,
    (_INPUT, _MOE): Position.INPUTS_AND_LAYERS,
    (_REDUCE, _ATTENTION): Position.ALL_REDUCE_AND_ATTENTION,
    (_ATTENTION, _REDUCE): Position.ATTENTION_AND_ALL_REDUCE,
    (_REDUCE, _MOE): Position.ALL_REDUCE_AND_MOE,
    (_MOE, _MOE): Position.MOE_CALLS,
    (_MOE, _REDUCE): Position.MOE_AND_ALL_REDUCE,
    (_REDUCE, _REDUCE): Position.ALL_REDUCES,
    (_ATTENTION, _MOE): Position.ATTENTION_AND_MOE,
    (_MOE, _ATTENTION): Position.MOE_AND_ATTENTION,
    (_REDUCE, _SAMPLING): Position.LAYERS_AND_SAMPLING,
    (_MOE, _SAMPLING): Position.LAYERS_AND_SAMPLING,
    (_ATTENTION, _SAMPLING): Position.LAYERS_AND_SAMPLING,
}
_NO_POSITION: Final = len(POSITIONS)
_TABLE: Final = np.full((_ROLES, _ROLES), _NO_POSITION, np.intp)
for (_before, _after), _position in _BETWEEN.items():
    _TABLE[_before, _after] = POSITIONS.index(_position)

GapsNs = NDArray[np.int64]


def gaps_of(sample: StepSample) -> dict[Position, int]:
    """The named gaps of one step, ns; positions that it does not have are absent."""
    ranges = sample.ranges
    if not ranges:
        return {}
    gaps = _gaps(
        np.array([[r.start_ns for r in ranges]], np.int64),
        np.array([[r.duration_ns for r in ranges]], np.int64),
        np.array([[CATEGORY_CODE[r.category] for r in ranges]], np.intp),
        np.array([[r.stream for r in ranges]], np.uint8),
        np.array([[r.parent for r in ranges]], np.int16),
        np.array([sample.duration_ns], np.int64),
    )
    return {position: int(ns) for position, ns in zip(POSITIONS, gaps[0], strict=False) if ns}


def gaps_of_packed(samples: Iterable[bytes]) -> tuple[NDArray[np.intp], GapsNs]:
    """The gaps of packed samples: the code of each one's phase, shape (n,), and ns, shape (n, positions + 1).

    The columns follow ``POSITIONS``, the last one is what stays unnamed. The samples come in no particular order; those
    without ranges, or that are not complete, are left out. Raises ValueError where the bytes are not those of samples.
    """
    by_length: dict[int, list[bytes]] = {}
    for data in samples:
        by_length.setdefault(len(data), []).append(data)
    phases = [np.empty(0, np.intp)]
    gaps = [np.empty((0, len(POSITIONS) + 1), np.int64)]
    for alike in by_length.values():
        columns = unpack_columns(alike)
        columns = columns[columns["complete"]]
        ranges = columns["ranges"]
        if not len(columns) or not columns["count"][0]:
            continue
        phases.append(columns["phase"].astype(np.intp))
        gaps.append(
            _gaps(
                ranges["start_ns"].astype(np.int64),
                ranges["duration_ns"].astype(np.int64),
                ranges["category"].astype(np.intp),
                ranges["stream"],
                ranges["parent"],
                columns["duration_ns"].astype(np.int64),
            )
        )
    return np.concatenate(phases), np.concatenate(gaps)


def _gaps(
    starts: GapsNs,
    durations: GapsNs,
    categories: NDArray[np.intp],
    streams: NDArray[np.integer],
    parents: NDArray[np.integer],
    step_ns: GapsNs,
) -> GapsNs:
    """Gaps of n steps with k ranges each: arguments of shape (n, k), `step_ns` (n,); returns (n, positions + 1)."""
    n = len(starts)
    # A gap is a neighbour of outermost ranges of the main stream only.
    speaks = (streams == 0) & (parents == NO_PARENT)
    if (starts[:, 1:] < starts[:, :-1]).any():
        order = np.argsort(starts, axis=1, kind="stable")
        starts, durations = np.take_along_axis(starts, order, axis=1), np.take_along_axis(durations, order, axis=1)
        categories, speaks = np.take_along_axis(categories, order, axis=1), np.take_along_axis(speaks, order, axis=1)
    covered_to = np.maximum.accumulate(starts + durations, axis=1)
    # Before the first range and behind the last there is the step's edge on one side, and nothing is inferred.
    edges = starts[:, 0] + np.maximum(step_ns - covered_to[:, -1], 0)
    width = np.maximum(np.minimum(starts[:, 1:], step_ns[:, None]) - covered_to[:, :-1], 0)
    roles = _ROLE_BY_CODE[categories]
    gaps = np.zeros((n, len(POSITIONS) + 1), np.int64)
    if (roles == roles[0]).all() and (speaks == speaks[0]).all():
        position = _positions(roles[:1], speaks[:1])[0]
        for code in np.unique(position):
            gaps[:, code] = width[:, position == code].sum(axis=1)
    else:
        np.add.at(gaps, (np.arange(n)[:, None], _positions(roles, speaks)), width)
    gaps[:, _NO_POSITION] += edges
    return gaps


def _positions(roles: NDArray[np.int8], speaks: NDArray[np.bool_]) -> NDArray[np.intp]:
    """The position of the gap after each range but the last: shape (n, k - 1), from (n, k).

    `speaks` says of which ranges a gap is a neighbour: outermost ones of the main stream.
    """
    n, k = roles.shape
    at = np.broadcast_to(np.arange(k), (n, k))
    last = np.maximum.accumulate(np.where(speaks, at, -1), axis=1)[:, :-1]
    before = np.where(last >= 0, np.take_along_axis(roles, np.maximum(last, 0), axis=1), _EDGE)
    # A collective says nothing by itself: logits are gathered, experts' tokens exchanged. What follows it tells which.
    tells = speaks & (roles != _COLLECTIVE)
    after = _next(roles, tells, at)
    # So does what came before it: from attention into the experts there is more than their exchange.
    before_told = np.maximum.accumulate(np.where(tells, at, -1), axis=1)[:, :-1]
    told = np.where(before_told >= 0, np.take_along_axis(roles, np.maximum(before_told, 0), axis=1), _EDGE)
    before = np.where(before == _COLLECTIVE, np.where((after == _MOE) & (told != _ATTENTION), _MOE, told), before)
    position: NDArray[np.intp] = _TABLE[before, after]
    return position


def _next(roles: NDArray[np.int8], tells: NDArray[np.bool_], at: NDArray[np.intp]) -> NDArray[np.int8]:
    """The role of the next range that tells something, behind each range but the last."""
    k = roles.shape[1]
    following = np.minimum.accumulate(np.where(tells, at, k)[:, ::-1], axis=1)[:, ::-1][:, 1:]
    found = np.take_along_axis(roles, np.minimum(following, k - 1), axis=1)
    return np.where(following < k, found, _EDGE)
