"""Why sums and step times differ, in sentences with the numbers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import Final

from vllm_k25_instrument.report.breakdown import Group
from vllm_k25_instrument.report.figures import calls
from vllm_k25_instrument.report.gpu import CategoryTotal, GpuTotals, RankFindings, StepRecord

WORTH_SAYING: Final = 0.01
"""Overlap of less than this share of the sum is called next to nothing."""


def time_text(ns: float) -> str:
    """``12.100 ms``, ``1.4 µs``, ``200 ns``."""
    if abs(ns) >= 1e8:
        return f"{ns / 1e6:,.1f} ms"
    if abs(ns) >= 1e6:
        return f"{ns / 1e6:,.3f} ms"
    return f"{ns / 1e3:,.1f} µs" if abs(ns) >= 1e3 else f"{ns:,.0f} ns"


def explain(ranks: Sequence[RankFindings], groups: Sequence[Group], *, table: bool = False) -> tuple[str, ...]:
    """What to make of the sums: a sentence for each group of steps of the first rank, then for its whole capture.

    `table`: the source is a key_averages table, which has no timeline.
    """
    if table:
        return tuple(_of_table(rank) for rank in ranks)
    first = next((rank for rank in ranks if rank.totals.has_work), None)
    if first is None:
        return ()
    return (*_of_groups(first, groups), *_of_capture(first, several=len(ranks) > 1))


def _of_table(rank: RankFindings) -> str:
    own = time_text(rank.totals.sum_ns)
    text = f"Rank {rank.rank}: the rows of kernels, copies and fills add up to {own}. "
    if rank.repeated_rows:
        both = time_text(rank.totals.sum_ns + rank.repeated_ns)
        text += (
            f"{rank.repeated_rows:,} rows of operators, annotations and NCCL calls claim another "
            f"{time_text(rank.repeated_ns)}, which is their kernels' time once more and is left out: whoever adds up "
            f"the whole column gets {both}. "
        )
    return (
        f"{text}A table has no timeline: kernels of several streams may have overlapped, so the sum may be more than "
        "the time that passed, and there are no steps."
    )


def _of_groups(rank: RankFindings, groups: Sequence[Group]) -> Iterator[str]:
    for group in groups:
        if group.rank == rank.rank:
            steps = [step for step in rank.steps if step.averaged and step.group == group.key]
            yield f"{group.key.words} (rank {rank.rank}): {'; '.join(_of_group(group, steps))}."


def _of_group(group: Group, steps: Sequence[StepRecord]) -> Iterator[str]:
    """Sum against span; what is hidden, and behind nothing; idle time; launches; the time between steps."""
    n = group.steps
    total = sum(time.sum_ns for time in group.categories.values()) / n
    busy = sum(time.exclusive_ns for time in group.categories.values()) / n
    span = group.step_sum_ns / n
    yield (
        f"the kernels, copies and fills of a step add up to {time_text(total)}, and the step takes {time_text(span)} "
        "on the GPU"
    )
    yield _overlap_clause(group, total - busy, total)
    if span > busy:
        yield (
            f"for {time_text(span - busy)} of it ({100 * (span - busy) / span:.1f} %) nothing runs: gaps between "
            "kernels, or waiting for the host"
        )
    launches = sum(step.launches for step in steps)
    if launches:
        cost = sum(step.launch_ns for step in steps)
        each = calls(round(launches / len(steps), 1))
        yield f"the host makes {each} launch{'' if each == '1' else 'es'} a step, {time_text(cost / launches)} each"
    yield from _between_steps(steps)


def _overlap_clause(group: Group, overlap: float, total: float) -> str:
    if overlap <= 0:
        return "nothing overlaps"
    if overlap < WORTH_SAYING * total:
        return f"next to nothing overlaps ({time_text(overlap)})"
    n = group.steps
    hidden = {name: (time.sum_ns - time.exclusive_ns, time.sum_ns) for name, time in group.categories.items()}
    most = sorted(hidden, key=lambda name: (-hidden[name][0], name))[:3]
    listed = ", ".join(
        f"{name} {time_text(hidden[name][0] / n)} of its {time_text(hidden[name][1] / n)}"
        for name in most
        if hidden[name][0] * 20 >= overlap * n
    )
    return (
        f"{time_text(overlap)} of the sum ran at the same time as something else (hidden: {listed}), so the sum is not "
        "a time that passes: hidden work costs nothing, and making it faster wins nothing"
    )


def _between_steps(steps: Sequence[StepRecord]) -> Iterator[str]:
    followed = [step for step in steps if step.period_ns is not None]
    if len(followed) < 2:
        return
    period = median(step.period_ns or 0 for step in followed)
    between = median((step.period_ns or 0) - step.span_ns for step in followed)
    text = f"steps begin every {time_text(period)} (median)"
    if between > 0:
        yield f"{text}, {time_text(between)} of it between a step's last work and the next step's first"
    else:
        yield f"{text}: a step begins before the one before it has ended"


def _of_capture(rank: RankFindings, *, several: bool) -> Iterator[str]:
    totals = rank.totals
    where = f"Rank {rank.rank}" if several else "The capture"
    text = f"{where} holds {totals.kernels:,} kernels of {time_text(totals.kernel_ns)}"
    if totals.memcpys + totals.memsets:
        text += f"; with {totals.memcpys:,} copies and {totals.memsets:,} fills {time_text(totals.sum_ns)}"
    if totals.graphs:
        text += f", {totals.graphs:,} opaque graphs of {time_text(totals.graph_ns)} included"
    yield f"{text}. {_busy_sentence(rank, totals)}"
    outside, inside = totals.kernels_outside_steps, totals.kernels_in_steps
    if not rank.step_counts.found or outside is None or inside is None:
        return
    if not outside:
        yield f"All {inside:,} kernels were launched inside a step."
        return
    spent = sum(total.sum_ns for total in rank.outside.values())
    yield (
        f"{inside:,} of the kernels were launched inside a step; {outside:,} were launched outside any and count in "
        f"none: {time_text(spent)} with copies and fills, mostly {_largest(rank.outside)}."
    )


def _busy_sentence(rank: RankFindings, totals: GpuTotals) -> str:
    busy, span, overlap = totals.busy_ns, totals.span_ns, totals.overlap_ns
    if busy is None or span is None or overlap is None:
        return ""
    share = f" ({100 * busy / span:.1f} %)" if span else ""
    streams = f"{rank.streams} stream{'s' if rank.streams != 1 else ''}"
    text = (
        f"From the first to the last {time_text(span)} pass, and the GPU is busy for {time_text(busy)} of them{share}, "
        f"on {streams}"
    )
    if not overlap:
        return f"{text}; no two kernels overlap."
    same = totals.same_stream_overlap_ns or 0
    return (
        f"{text}; {time_text(overlap)} of the sum overlap, {time_text(same)} of that between neighbours of one stream "
        f"(programmatic launches, or the clock's resolution) and {time_text(overlap - same)} between streams."
    )


def _largest(categories: Mapping[str, CategoryTotal]) -> str:
    largest = sorted(categories.items(), key=lambda item: (-item[1].sum_ns, item[0]))[:3]
    return ", ".join(f"{name} {time_text(total.sum_ns)}" for name, total in largest)
