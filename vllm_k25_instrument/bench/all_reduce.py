"""`bench all-reduce`: every path vLLM has here, by message size, single and in a row as in a step."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from vllm_k25_instrument.alignment import AllReduces, LeftOut, align
from vllm_k25_instrument.bench.document import BenchDocument, BenchMachine, Choice, Kind, Remark, Row, Skew
from vllm_k25_instrument.bench.errors import BenchError, CannotRunError
from vllm_k25_instrument.bench.intervals import Median, median_interval
from vllm_k25_instrument.bench.rank import Case, Plan, RankResult
from vllm_k25_instrument.bench.spawn import run_ranks
from vllm_k25_instrument.limits.floors import all_reduce_floor_ns
from vllm_k25_instrument.limits.gpus import Link
from vllm_k25_instrument.model import NS_PER_SECOND, Category

BYTES_PER_ELEMENT: Final = 2  # bfloat16
NO_FLOOR_ON_CPU: Final = "ranks on a CPU have no link with a data sheet"
NO_FLOOR: Final = "the link between these GPUs is not known: name a GPU of the table with --gpu"


@dataclass(frozen=True, slots=True)
class AllReducePlan:
    """What is to be measured. `tokens` rows of `hidden` bfloat16 numbers are a message."""

    model: str
    hidden: int
    ranks: int
    tokens: tuple[int, ...]
    burst: int
    repeats: int
    seconds: float
    timeout: float

    def settings(self) -> dict[str, Any]:
        """The options, for the document."""
        return {
            "model": self.model,
            "ranks": self.ranks,
            "tokens": list(self.tokens),
            "bytes_per_token": self.hidden * BYTES_PER_ELEMENT,
            "burst": self.burst,
            "repeats": self.repeats,
            "seconds": self.seconds,
            "timeout": self.timeout,
        }

    def of_ranks(self, cores: Sequence[int]) -> Plan:
        """The ranks' own plan; on a CPU each gets an equal share of `cores`, on a GPU none is bound to any."""
        each = len(cores) // self.ranks
        return Plan(
            ranks=self.ranks,
            hidden=self.hidden,
            tokens=self.tokens,
            bursts=tuple(dict.fromkeys((1, self.burst))),
            most=self.repeats,
            seconds=self.seconds,
            timeout=self.timeout,
            parent=os.getpid(),
            cores=tuple(tuple(cores[n * each : (n + 1) * each]) for n in range(self.ranks)) if cores else (),
        )


def cores_for(ranks: int) -> tuple[int, ...]:
    """The cores to share out among the ranks on a CPU. Raises CannotRunError where there are fewer cores than ranks."""
    cores = tuple(sorted(os.sched_getaffinity(0)))
    if len(cores) < ranks:
        raise CannotRunError(
            f"{ranks} ranks need {ranks} cores, since they spin while they wait: here are {len(cores)}"
        )
    return cores


def run_all_reduce(
    plan: AllReducePlan, machine: BenchMachine, link: Link | None, *, cores: Sequence[int], say: Callable[[str], None]
) -> BenchDocument:
    """Run the ranks and put their results together. Raises BenchError where a rank dies or hangs."""
    results = run_ranks(plan.of_ranks(cores), say)
    return combine(plan, machine, link, results)


def combine(
    plan: AllReducePlan, machine: BenchMachine, link: Link | None, results: Sequence[RankResult]
) -> BenchDocument:
    """The document of what the ranks measured. Raises BenchError where they did not measure the same."""
    kinds = [[(case.path, case.tokens, case.calls, case.in_graph) for case in result.cases] for result in results]
    if any(kind != kinds[0] for kind in kinds):
        raise BenchError("the ranks did not measure the same paths: nothing can be said of their waiting")
    found = [_row(cases, plan, machine, link) for cases in zip(*(result.cases for result in results), strict=True)]
    rows = tuple(row for row, _ in found)
    medians = dict(found)
    warnings = [Remark("path_left_out", note) for note in results[0].notes]
    if machine.device == "cpu":
        warnings.append(Remark("eager_only", "no CUDA graphs on a CPU: measured outside of one only"))
    else:
        warnings.append(
            Remark("not_run_on_gpu", "the CUDA side of this benchmark has not yet been run on a GPU by its authors")
        )
        warnings.append(Remark("host_entry", "entries are when the host launched the call, not when the GPU began it"))
    return BenchDocument(
        Kind.ALL_REDUCE,
        machine,
        rows,
        settings=plan.settings(),
        choices=choose(medians, results[0].taken),
        warnings=tuple(warnings),
    )


def _row(cases: Sequence[Case], plan: AllReducePlan, machine: BenchMachine, link: Link | None) -> tuple[Row, Median]:
    """One case over all ranks: the transfer of each repeat is the least duration of any rank."""
    first = cases[0]
    none = np.zeros(len(first.durations_ns), np.uint8)
    aligned = align(
        {rank: AllReduces(0, np.array(case.durations_ns, np.int64), none) for rank, case in enumerate(cases)}
    )
    if isinstance(aligned, LeftOut):
        raise BenchError(f"{first.path}, {first.tokens} tokens: the ranks' repeats cannot be lined up ({aligned})")
    times = median_interval(aligned.transfer_ns.tolist())
    entries = np.array([case.entries_ns for case in cases], np.int64)  # ranks x repeats x calls
    late = entries - entries.min(axis=0)
    message = first.tokens * plan.hidden * BYTES_PER_ELEMENT
    floor = None if link is None else first.calls * all_reduce_floor_ns(message, plan.ranks, link)
    row = Row(
        name="all_reduce",
        path=first.path,
        shape=f"{first.tokens} x {plan.hidden}",
        median_ns=times.ns,
        low_ns=times.low_ns,
        high_ns=times.high_ns,
        repeats=times.count,
        calls=first.calls,
        category=str(Category.ALL_REDUCE),
        tokens=first.tokens,
        bytes=first.calls * message,
        in_graph=first.in_graph,
        achieved_bytes_per_s=first.calls * message / (max(times.ns, 1) / NS_PER_SECOND),
        floor_ns=None if floor is None else round(floor),
        floor_reason=None if floor is not None else NO_FLOOR_ON_CPU if machine.device == "cpu" else NO_FLOOR,
        ratio_to_floor=None if not floor else times.ns / floor,
        skew=Skew(
            last_ns=round(float(np.median(late.max(axis=0)))),
            by_rank_ns=tuple(round(float(np.median(of_rank))) for of_rank in late),
            wait_by_rank_ns=tuple(round(float(np.median(of_rank))) for of_rank in aligned.wait_ns),
        ),
    )
    return row, times


def choose(medians: Mapping[Row, Median], taken: Mapping[int, str]) -> tuple[Choice, ...]:
    """Of each size, number in a row and graph: who wins, and what vLLM takes. `taken` is by number of tokens."""
    groups: dict[tuple[int, int, bool], list[Row]] = {}
    for row in medians:
        groups.setdefault((row.tokens or 0, row.calls, row.in_graph), []).append(row)
    return tuple(
        _choice(sorted(rows, key=lambda row: row.median_ns), medians, taken.get(tokens))
        for (tokens, _, _), rows in groups.items()
    )


def _choice(rows: Sequence[Row], medians: Mapping[Row, Median], taken: str | None) -> Choice:
    best = rows[0]
    return Choice(
        tokens=best.tokens or 0,
        bytes=(best.bytes or 0) // best.calls,
        calls=best.calls,
        in_graph=best.in_graph,
        winner=best.path,
        winner_ns=best.median_ns,
        decided=all(not medians[best].overlaps(medians[other]) for other in rows[1:]),
        vllm_takes=taken,
        vllm_ns=next((row.median_ns for row in rows if row.path == taken), None),
    )
