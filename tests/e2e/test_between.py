"""What is inferred of the time between hooked ranges, against torch.profiler's trace of the same steps.

The profiler of a CPU server records every operator. Where an operator begins between two ranges, the gap's position
says what it should be; the operator's name says what it is.
"""

from __future__ import annotations

import bisect
import gzip
import itertools
import json
import time
from collections import Counter
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from tests.e2e.conftest import PROMPTS, Running
from vllm_k25_instrument.gaps import gaps_of
from vllm_k25_instrument.model import Category, GraphMode, Phase, Range, StepSample
from vllm_k25_instrument.positions import Position

pytestmark = pytest.mark.e2e

ALL_REDUCE, ATTENTION, EXPERTS = "_C::shm_allreduce", "_C::mla_decode_kvcache", "_C::fused_experts_cpu"
GEMM, BATCHED_GEMM, NORM = "_C::onednn_mm", "aten::bmm", "aten::rsqrt"

# One decode step of the tiny model, four layers of which the first is dense. Projections: q_a with kv_a, and q_b, of
# the first layer and of the others; o; gate_up and down; the router; lm_head. Norms: of a layer's input, of
# q_a and of kv_a before attention; behind it the second one of the layer; the final one.
GEMMS = {
    Position.INPUTS_AND_LAYERS: 2,
    Position.ALL_REDUCE_AND_ATTENTION: 6,
    Position.ATTENTION_AND_ALL_REDUCE: 4,
    Position.ALL_REDUCES: 2,
    Position.ALL_REDUCE_AND_MOE: 3,
    Position.LAYERS_AND_SAMPLING: 1,
}
NORMS = {
    Position.INPUTS_AND_LAYERS: 3,
    Position.ALL_REDUCE_AND_ATTENTION: 9,
    Position.ALL_REDUCES: 1,
    Position.ALL_REDUCE_AND_MOE: 3,
    Position.LAYERS_AND_SAMPLING: 1,
}
# MLA's own: the query into the latent space before attention (W_UK), the values out of it behind (W_UV).
BATCHED_GEMMS = {
    Position.INPUTS_AND_LAYERS: 1,
    Position.ALL_REDUCE_AND_ATTENTION: 3,
    Position.ATTENTION_AND_ALL_REDUCE: 4,
}


@dataclass(frozen=True)
class Operator:
    """One call of an operator; unix ns."""

    start_ns: int
    end_ns: int
    name: str


@pytest.fixture(scope="module")
def profiled(every_step: Running) -> tuple[list[Operator], list[StepSample]]:
    """The operators of rank 0 by start, and its samples of the decode steps that were profiled from begin to end."""
    assert every_step.traces is not None
    every_step.client.post("/start_profile")
    every_step.client.complete_all([*PROMPTS[:2]], concurrency=2, max_tokens=40)
    every_step.client.post("/stop_profile")
    events, base_ns = read_trace(every_step.traces)
    threads = Counter(event["tid"] for event in events)
    main = threads.most_common(1)[0][0]
    operators = sorted(
        (
            Operator(start := base_ns + round(event["ts"] * 1000), start + round(event["dur"] * 1000), event["name"])
            for event in events
            if event["tid"] == main
        ),
        key=lambda operator: operator.start_ns,
    )
    first, last = operators[0].start_ns, operators[-1].end_ns
    steps = [
        sample
        for sample in every_step.samples()[0]
        if sample.phase is Phase.DECODE
        and sample.start_unix_ns > first
        and sample.start_unix_ns + sample.duration_ns < last
    ]
    assert len(steps) >= 30
    return operators, steps


def read_trace(folder: Path) -> tuple[list[dict], int]:
    """Operators of rank 0, and what their times count from; the file may still be being written."""
    for _ in range(100):
        for path in folder.glob("*rank0.*.json.gz"):
            try:
                document = json.loads(gzip.decompress(path.read_bytes()))
            except (EOFError, OSError, ValueError):
                continue
            operators = [event for event in document["traceEvents"] if event.get("cat") == "cpu_op"]
            return operators, document["baseTimeNanoseconds"]
        time.sleep(0.2)
    raise AssertionError(f"no whole trace of rank 0 in {folder}")


def in_step(operators: list[Operator], sample: StepSample) -> list[Operator]:
    """The operators of a step, on its clock: moved by what the profiler's clock is ahead of it, up to 0.1 ms.

    Every all-reduce lies in its range. That bounds the difference of the clocks on both sides, to a few us: its middle.
    """
    begin = sample.start_unix_ns
    about = starting(operators, begin, begin + sample.duration_ns)
    reduced = [(o.start_ns - begin, o.end_ns - begin) for o in about if o.name == ALL_REDUCE]
    ranges = [(r.start_ns, r.start_ns + r.duration_ns) for r in sample.ranges if r.category is Category.ALL_REDUCE]
    pairs = list(zip(reduced, ranges, strict=True))
    least = max(operator_end - range_end for (_, operator_end), (_, range_end) in pairs)
    most = min(operator_start - range_start for (operator_start, _), (range_start, _) in pairs)
    assert max(abs(least), abs(most)) < 200_000  # the two clocks show the same time
    origin = begin + (least + most) // 2
    mine = starting(operators, origin, origin + sample.duration_ns)
    return [Operator(o.start_ns - origin, o.end_ns - origin, o.name) for o in mine]


def starting(operators: list[Operator], begin_ns: int, end_ns: int) -> list[Operator]:
    """Those that begin between the two, of operators by start."""
    low, high = (bisect.bisect_left(operators, t, key=lambda operator: operator.start_ns) for t in (begin_ns, end_ns))
    return operators[low:high]


def by_position(sample: StepSample, operators: list[Operator]) -> dict[Position | None, list[Operator]]:
    """Operators that begin in a gap, by the position of that gap (None: unnamed); those in ranges are left out."""
    outer = [r for r in sample.ranges if r.parent < 0]
    found: dict[Position | None, list[Operator]] = {}
    positions = positions_of(tuple(r.category for r in outer))
    for (before, after), position in zip(itertools.pairwise(outer), positions, strict=True):
        begin, end = before.start_ns + before.duration_ns, after.start_ns
        inside = [operator for operator in operators if begin <= operator.start_ns < end]
        found.setdefault(position, []).extend(inside)
    return found


@cache
def positions_of(categories: tuple[Category, ...]) -> list[Position | None]:
    """The position of each gap between ranges of these categories: what is said of a step that has only this one."""
    positions = []
    for place in range(1, len(categories)):
        ranges = tuple(Range(category, n + (n >= place), 1) for n, category in enumerate(categories))
        step = StepSample(0, Phase.DECODE, 1, 1, 1, GraphMode.NONE, 0, len(categories) + 1, ranges)
        positions.append(next(iter(gaps_of(step)), None))
    return positions


def test_in_a_gap_runs_what_its_position_says(profiled: tuple[list[Operator], list[StepSample]]) -> None:
    operators, steps = profiled
    expected = {GEMM: GEMMS, NORM: NORMS, BATCHED_GEMM: BATCHED_GEMMS}
    for name, wanted in expected.items():
        seen = Counter[tuple[tuple[Position | None, int], ...]]()
        for sample in steps:
            placed = by_position(sample, in_step(operators, sample))
            counts = {position: sum(o.name == name for o in those) for position, those in placed.items()}
            seen[tuple(sorted((p, n) for p, n in counts.items() if n))] += 1
        usual, steps_with_it = seen.most_common(1)[0]
        assert dict(usual) == wanted, name
        # The profiler's clock may be set anew within a step.
        assert steps_with_it >= 0.95 * len(steps), (name, seen)


def test_nothing_that_has_a_hook_begins_in_a_gap(profiled: tuple[list[Operator], list[StepSample]]) -> None:
    operators, steps = profiled
    of_step = {ALL_REDUCE: 9, ATTENTION: 4, EXPERTS: 3}
    whole = 0
    outside = Counter[str]()
    for sample in steps:
        mine = in_step(operators, sample)
        whole += Counter(o.name for o in mine if o.name in of_step) == of_step
        for those in by_position(sample, mine).values():
            outside.update(o.name for o in those if o.name in of_step)
    assert whole == len(steps)
    assert sum(outside.values()) <= 0.01 * len(steps) * sum(of_step.values()), outside


def test_the_operators_of_a_position_take_no_longer_than_it_has(
    profiled: tuple[list[Operator], list[StepSample]],
) -> None:
    operators, steps = profiled
    gaps_ns, operators_ns = Counter[Position | None](), Counter[Position | None]()
    for sample in steps:
        gaps_ns.update(gaps_of(sample))
        for position, those in by_position(sample, in_step(operators, sample)).items():
            # The time that operators cover: they nest. One that runs on into a range is not the gap's alone.
            covered = end = 0
            for operator in those:
                if operator.start_ns >= end:
                    end = operator.end_ns
                    covered += 0 if operator.name.startswith("vllm::") else end - operator.start_ns
            operators_ns[position] += covered
    for position in GEMMS:
        assert 0 < operators_ns[position] <= 1.05 * gaps_ns[position], position
