"""The questions that a campaign is run for, answered from its data. Where a source is missing, what would be needed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from vllm_k25_instrument.campaign.cpu_operators import cast_share
from vllm_k25_instrument.campaign.interval import apart
from vllm_k25_instrument.campaign.results import Column, ComponentEstimates, Results
from vllm_k25_instrument.campaign.trace_figures import Kernel, TraceFigures
from vllm_k25_instrument.model import Category, GraphMode
from vllm_k25_instrument.report.figures import calls, percent
from vllm_k25_instrument.report.sheets import short_kernel
from vllm_k25_instrument.report.words import time_text

UNKNOWN: Final = "unknown"

CASTS_MATTER: Final = 0.05
"""Casts of less than this share of the kernels' time are no overhead worth the name."""

SLOW_PATH: Final = 3.0
"""A path (or a kernel) whose calls take so many times as long as another's is named as slow."""

HIDDEN_LAUNCHES: Final = 0.1
"""Where nothing runs for less than this share of a step, its launches are hidden."""

MATTERS: Final = 0.01

NEEDS_TRACE: Final = (
    "a torch.profiler trace of the GPU's kernels (restart the server with --profiler-config, see docs/campaign.md) or "
    "an nsys export (--nsys-export FILE)"
)
NEEDS_LIVE: Final = "the plugin in the server (K25_INSTRUMENT=1)"


@dataclass(frozen=True, slots=True)
class Answer:
    """`verdict` is a word for programs, :data:`UNKNOWN` where `needs` says what is missing; `text` is for people."""

    question: str
    verdict: str
    text: tuple[str, ...]
    needs: str = ""

    def to_json_dict(self) -> dict[str, Any]:
        """One entry of the report's ``answers``."""
        return {
            "question": self.question,
            "verdict": self.verdict,
            "text": list(self.text),
            "needs": self.needs or None,
        }


def answers(results: Results) -> list[Answer]:
    """All of them, in the order in which they are asked."""
    return [_casts(results), _dominant(results), _launches(results), _paths(results), _sums(results)]


def _traces(results: Results) -> Iterator[tuple[str, TraceFigures]]:
    for column in results.columns:
        if column.trace is not None:
            yield f"concurrency {column.concurrency}", column.trace
    if results.nsys is not None:
        yield "the nsys export", results.nsys


# --- casts -----------------------------------------------------------------------------------------------


def _casts(results: Results) -> Answer:
    question = "Is there dtype-cast overhead?"
    said: list[str] = []
    worst = 0.0
    for where, trace in _traces(results):
        share = trace.share(Category.CAST_QUANT)
        worst = max(worst, share)
        component = trace.components.get(str(Category.CAST_QUANT))
        if component is None or not component.sum_ns:
            said.append(f"At {where}: none of the kernels is a cast or a quantization.")
            continue
        each = (
            f"{time_text(component.sum_ns)} a step in {calls(round(component.calls or 0.0, 1))} calls"
            if trace.steps
            else f"{time_text(component.sum_ns)} in the whole capture"
        )
        largest = next(iter(trace.kernels_of(Category.CAST_QUANT)), None)
        named = f", most of it {short_kernel(largest.name)}" if largest is not None else ""
        said.append(f"At {where}: casts and quantization take {percent(share)} % of the kernels' time, {each}{named}.")
    if not said:
        for column in results.columns:
            table = column.table
            if table is not None and table.sum_ns:
                worst = max(worst, table.cast_ns / table.sum_ns)
                said.append(
                    f"At concurrency {column.concurrency}, by the key_averages table: casts and quantization take "
                    f"{percent(table.cast_ns / table.sum_ns)} % of the kernels' time."
                )
    if not said:
        for column in results.columns:
            cpu = cast_share(dict(column.cpu))
            if cpu is not None:
                worst = max(worst, cpu)
                said.append(
                    f"At concurrency {column.concurrency}, by the profiler's CPU operators: aten::_to_copy takes "
                    f"{percent(cpu)} % of the workers' time, what it calls included (of the largest 50 operators)."
                )
    if not said:
        return Answer(question, UNKNOWN, ("Hooks do not see casts: kernels do.",), NEEDS_TRACE)
    if worst >= CASTS_MATTER:
        return Answer(question, "yes", ("Yes.", *said))
    return Answer(question, "no", (f"No: less than {percent(CASTS_MATTER)} %.", *said))


# --- what dominates --------------------------------------------------------------------------------------


def _dominant(results: Results) -> Answer:
    question = "What dominates at each concurrency, and how does it scale?"
    said: list[str] = []
    leaders: list[str] = []
    for column in results.columns:
        said += _dominant_live(column, leaders)
        if column.trace is not None:
            said.append(_dominant_trace(f"concurrency {column.concurrency}", column.trace, leaders))
    if results.nsys is not None:
        said.append(_dominant_trace("the nsys export", results.nsys, leaders))
    if not said:
        return Answer(question, UNKNOWN, ("No step was seen from inside.",), f"{NEEDS_LIVE}, or {NEEDS_TRACE}")
    said += _scaling(results.columns)
    return Answer(question, leaders[0] if len(set(leaders)) == 1 else "differs", tuple(said))


def _dominant_live(column: Column, leaders: list[str]) -> Iterator[str]:
    step = column.over("step_ns")
    components = column.components()
    if step is None or not components:
        return
    ordered = sorted(components.items(), key=lambda item: -item[1].exposed.mean)
    named = [item for item in ordered if item[0] != Category.UNATTRIBUTED] or ordered
    leaders.append(named[0][0])
    listed = ", ".join(_share_text(name, one, step.mean) for name, one in ordered[:4])
    text = f"Live, at concurrency {column.concurrency}, of a decode step of {time_text(step.mean)}: {listed}"
    rest = components.get(str(Category.UNATTRIBUTED))
    if rest is not None and ordered[0][0] == Category.UNATTRIBUTED:
        text += "; most is outside the hooked calls (projections, norms, Python between kernels), see a trace"
    yield f"{text}. {_leader(named)}"
    wait, reduce = column.over("wait_ns"), components.get(str(Category.ALL_REDUCE))
    if wait is not None and reduce is not None and reduce.sum is not None and reduce.sum.mean:
        yield (
            f"Of the {time_text(reduce.sum.mean)} of all-reduce, {time_text(wait.mean)} "
            f"({percent(wait.mean / reduce.sum.mean)} %) is waiting for the rank that comes last."
        )


def _leader(ordered: Sequence[tuple[str, ComponentEstimates]]) -> str:
    """Which of the hooked categories is the largest, and whether that is more than chance."""
    first = ordered[0]
    if len(ordered) > 1 and apart(first[1].exposed, ordered[1][1].exposed) is False:
        return (
            f"Of what is hooked, {first[0]} is the largest in the mean, but within the intervals it is not told apart "
            f"from {ordered[1][0]}: more --windows, or a quieter machine."
        )
    return f"Of what is hooked, {first[0]} dominates."


def _share_text(name: str, one: ComponentEstimates, step_ns: float) -> str:
    plus = "" if one.exposed.half is None else f" ± {time_text(one.exposed.half)}"
    share = percent(one.exposed.mean / step_ns) if step_ns else "-"
    return f"{name} {time_text(one.exposed.mean)}{plus} ({share} %)"


def _dominant_trace(where: str, trace: TraceFigures, leaders: list[str]) -> str:
    by_sum = sorted(trace.components, key=lambda name: -(trace.components[name].sum_ns or 0.0))
    by_exposed = sorted(trace.components, key=lambda name: -trace.components[name].exposed_ns)
    leaders.append(by_sum[0])
    of = f"a step's kernel sum of {time_text(trace.sum_ns)}" if trace.steps else "the capture's kernels"
    listed = ", ".join(
        f"{name} {time_text(trace.components[name].sum_ns or 0.0)} ({percent(trace.share(name))} %)"
        for name in by_sum[:4]
    )
    text = f"By the kernels at {where}, of {of}: {listed}. {by_sum[0]} dominates"
    exposed = trace.components[by_exposed[0]].exposed_ns
    if exposed:
        whole = f", {percent(exposed / trace.span_ns)} % of the step's span" if trace.span_ns and trace.steps else ""
        text += f"; by exposed time {by_exposed[0]} does ({time_text(exposed)}{whole})"
    return f"{text}.{_marlin(trace)}"


def _marlin(trace: TraceFigures) -> str:
    """Whether the expert GEMMs are what the step is about, which is what everybody suspects first."""
    experts = trace.kernels_of(Category.MOE_EXPERTS)
    if not experts:
        return ""
    share = trace.share(Category.MOE_EXPERTS)
    marlin = any("marlin" in kernel.name.lower() for kernel in experts)
    name = "Marlin expert GEMMs" if marlin else "expert GEMMs"
    largest = max(trace.components, key=lambda each: trace.components[each].sum_ns or 0.0)
    verdict = "dominate" if largest == Category.MOE_EXPERTS else "do not dominate"
    return f" The {name} {verdict}: {percent(share)} %."


def _scaling(columns: Sequence[Column]) -> Iterator[str]:
    measured = [(column, column.components()) for column in columns if column.live]
    if len(measured) < 2:
        return
    (first, before), (last, after) = measured[0], measured[-1]
    batches = first.over("batch"), last.over("batch")
    if batches[0] is None or batches[1] is None or not batches[0].mean:
        return
    grown = batches[1].mean / batches[0].mean
    largest = sorted(after, key=lambda name: -after[name].exposed.mean)[:4]
    parts = [
        f"{name} x {after[name].exposed.mean / before[name].exposed.mean:.2f}"
        for name in largest
        if name in before and before[name].exposed.mean > 0
    ]
    steps = first.over("step_ns"), last.over("step_ns")
    if steps[0] is None or steps[1] is None or not parts:
        return
    if apart(steps[0], steps[1]) is False:
        yield (
            f"How it scales cannot be told: from concurrency {first.concurrency} to {last.concurrency} the decode step "
            f"goes from {time_text(steps[0].mean)} to {time_text(steps[1].mean)}, which is within the intervals; more "
            "--windows, or a quieter machine."
        )
        return
    yield (
        f"From concurrency {first.concurrency} to {last.concurrency} the batch grows {grown:.1f}-fold and the decode "
        f"step {steps[1].mean / steps[0].mean:.2f}-fold: {', '.join(parts)}. A factor of 1 is a cost per step, one "
        f"of {grown:.1f} a cost per token."
    )


# --- launches --------------------------------------------------------------------------------------------


def _launches(results: Results) -> Answer:
    question = "How many kernel launches has a step, and do graphs hide them?"
    said: list[str] = []
    verdicts: list[str] = []
    for where, trace in _traces(results):
        if not trace.steps or trace.kernels_per_step is None or trace.launches_per_step is None:
            continue
        text = (
            f"At {where}: {calls(round(trace.kernels_per_step, 1))} kernels a step from "
            f"{calls(round(trace.launches_per_step, 1))} launches by the host"
        )
        if trace.launch_ns is not None:
            text += f", {time_text(trace.launch_ns)} each"
        idle = trace.idle_ns
        if idle is not None and trace.span_ns:
            share = idle / trace.span_ns
            graphs = trace.graph_mode != GraphMode.NONE
            hidden = share < HIDDEN_LAUNCHES
            verdicts.append("hidden" if hidden else "not hidden")
            how = "graphs replay them" if graphs else "no graph replays them"
            text += (
                f"; {how}, and within the step nothing runs for {time_text(idle)} ({percent(share)} %): "
                f"{'the launches are hidden' if hidden else 'launches are not hidden'}"
            )
        said.append(f"{text}.")
    modes = {
        column.concurrency: sorted({mode for window in column.live if window.live for mode in window.live.graph_modes})
        for column in results.columns
        if column.live
    }
    if modes:
        listed = "; ".join(f"concurrency {c}: {', '.join(found) or 'unknown'}" for c, found in modes.items())
        said.append(f"Graph modes of the decode steps, live ('none' is eager): {listed}.")
    if not verdicts:
        return Answer(question, UNKNOWN, tuple(said) or ("Nobody counted.",), NEEDS_TRACE)
    return Answer(question, verdicts[0] if len(set(verdicts)) == 1 else "differs", tuple(said))


# --- all-reduce paths ------------------------------------------------------------------------------------


def _paths(results: Results) -> Answer:
    question = "Which all-reduce path is taken?"
    said: list[str] = []
    taken: dict[str, float] = {}
    slow: list[str] = []
    for column in results.columns:
        paths = column.paths()
        if paths:
            said.append(f"Live, at concurrency {column.concurrency}: {_path_list(paths)}.")
            for path, one in paths.items():
                taken[path] = taken.get(path, 0.0) + (one.calls.mean if one.calls is not None else 0.0)
            named = _slow({path: one.ns_per_call.mean for path, one in paths.items() if one.ns_per_call is not None})
            if named:
                slow.append(f"at concurrency {column.concurrency} {named}")
    kernels_slow: list[str] = []
    for where, trace in _traces(results):
        kernels = trace.kernels_of(Category.ALL_REDUCE)
        if kernels:
            listed = ", ".join(_kernel_text(kernel) for kernel in kernels[:4])
            said.append(f"By the kernels at {where}: {listed}.")
            named = _slow({short_kernel(kernel.name): kernel.ns_per_call for kernel in kernels})
            if named:
                kernels_slow.append(f"at {where} {named}")
    for each in slow or kernels_slow:
        said.append(f"A slow path: {each}.")
    said += list(_bench_choices(results))
    if not said:
        if _one_rank(results):
            return Answer(question, "none", ("There is one rank only: it reduces nothing.",))
        return Answer(question, UNKNOWN, ("No all-reduce was seen.",), f"{NEEDS_LIVE}, or {NEEDS_TRACE}")
    verdict = max(taken, key=lambda path: taken[path]) if taken else "by kernels"
    return Answer(question, verdict, tuple(said))


def _path_list(paths: Mapping[str, ComponentEstimates]) -> str:
    ordered = sorted(paths.items(), key=lambda item: -(item[1].calls.mean if item[1].calls is not None else 0.0))
    return ", ".join(
        f"{path} {calls(round(one.calls.mean, 2)) if one.calls is not None else '?'} calls a step"
        + (f" of {time_text(one.ns_per_call.mean)}" if one.ns_per_call is not None else "")
        for path, one in ordered
    )


def _kernel_text(kernel: Kernel) -> str:
    return f"{short_kernel(kernel.name)} {kernel.count:,} calls of {time_text(kernel.ns_per_call)}"


def _slow(times: Mapping[str, float]) -> str:
    """The path whose calls take far longer than the quickest one's, in a clause."""
    if len(times) < 2:
        return ""
    quick, slow = min(times, key=lambda path: times[path]), max(times, key=lambda path: times[path])
    if times[slow] < SLOW_PATH * times[quick]:
        return ""
    return (
        f"{slow} takes {time_text(times[slow])} a call, {times[slow] / times[quick]:.1f} times the "
        f"{time_text(times[quick])} of {quick}"
    )


def _bench_choices(results: Results) -> Iterator[str]:
    document = results.micro.get("all-reduce")
    for choice in document.choices if document is not None else ():
        if choice.calls != 1 and not choice.in_graph:
            takes = f"vLLM takes {choice.vllm_takes}" if choice.vllm_takes else "what vLLM takes is not known"
            sure = "" if choice.decided else ", within their intervals no difference"
            yield (
                f"Alone, {choice.calls} in a row of {choice.bytes:,} bytes: {choice.winner} wins with "
                f"{time_text(choice.winner_ns)}{sure}; {takes}."
            )


def _one_rank(results: Results) -> bool:
    live = [window.live for column in results.columns for window in column.live if window.live is not None]
    return bool(live) and all(one.ranks_expected == 1 for one in live)


# --- sum and critical path -------------------------------------------------------------------------------


def _sums(results: Results) -> Answer:
    question = "How far is the sum from the critical path, and why?"
    said: list[str] = []
    verdicts: list[str] = []
    for column in results.columns:
        trace, tpot = column.trace, column.tpot
        if trace is not None and trace.steps:
            said.append(_sum_of_trace(f"concurrency {column.concurrency}", trace, None if tpot is None else tpot.mean))
            overlap = trace.overlap_ns or 0.0
            verdicts.append("overlap" if overlap > MATTERS * trace.sum_ns else "no overlap")
        table = column.table
        if table is not None and table.repeated_ns:
            whole = table.sum_ns + table.repeated_ns
            said.append(
                f"In the profiler's key_averages table at concurrency {column.concurrency} up to {table.repeated_rows} "
                "rows of operators, annotations and NCCL calls stand beside their own kernels and repeat "
                f"{time_text(table.repeated_ns)} of {time_text(table.sum_ns)} a rank: whoever adds up the whole column "
                f"gets {time_text(whole)}, {whole / table.sum_ns:.2f} times the kernels' time."
            )
        said += _sum_live(column)
    if results.nsys is not None and results.nsys.steps:
        said.append(_sum_of_trace("the nsys export", results.nsys, None))
        verdicts.append("overlap" if (results.nsys.overlap_ns or 0) > MATTERS * results.nsys.sum_ns else "no overlap")
    if not verdicts:
        needs = NEEDS_TRACE
        return Answer(question, UNKNOWN, tuple(said) or ("Only a timeline has both.",), needs)
    return Answer(question, verdicts[0] if len(set(verdicts)) == 1 else "differs", tuple(said))


def _sum_of_trace(where: str, trace: TraceFigures, tpot_ns: float | None) -> str:
    span, busy, overlap = trace.span_ns or 0.0, trace.busy_ns or 0.0, trace.overlap_ns or 0.0
    text = f"At {where} the kernels, copies and fills of a step add up to {time_text(trace.sum_ns)}"
    if tpot_ns:
        text += f"; the time per output token is {time_text(tpot_ns)}, {trace.sum_ns / tpot_ns:.2f} times less"
        text = text if trace.sum_ns >= tpot_ns else text.replace(f", {trace.sum_ns / tpot_ns:.2f} times less", "")
    text += f". On the GPU the step lasts {time_text(span)}, busy for {time_text(busy)}"
    if overlap <= MATTERS * trace.sum_ns:
        return f"{text}; next to nothing overlaps, so the sum is the critical path."
    hidden = {
        name: (one.sum_ns or 0.0) - one.exposed_ns
        for name, one in trace.components.items()
        if one.sum_ns is not None and one.sum_ns > one.exposed_ns
    }
    most = sorted(hidden, key=lambda name: -hidden[name])[:3]
    listed = ", ".join(f"{name} {time_text(hidden[name])}" for name in most)
    return (
        f"{text}: {time_text(overlap)} of the sum run at the same time as something else (hidden: {listed}), on other "
        "streams, and cost no time of their own."
    )


def _sum_live(column: Column) -> Iterator[str]:
    step, tpot, gap = column.over("step_ns"), column.tpot, column.part("gap_ns")
    others, rest = column.part("others_ns"), column.unexplained
    unsampled = column.part("unsampled_ns")
    if step is None or tpot is None or rest is None or not tpot.mean:
        return
    parts = [f"decode step {time_text(step.mean)}"]
    if gap is not None:
        parts.append(f"between steps (scheduling, sampling on the host, input preparation) {time_text(gap.mean)}")
    if others is not None:
        parts.append(f"other steps on balance {time_text(others.mean)}")
    if unsampled is not None:
        parts.append(f"what steps that were not sampled take more {time_text(unsampled.mean)}")
    unmeasured = "" if gap is not None else " (the gap between steps is in it: /metrics does not tell it)"
    yield (
        f"The time per output token at concurrency {column.concurrency}, {time_text(tpot.mean)}, is "
        f"{' + '.join(parts)} + unexplained {time_text(rest.mean)} ({percent(rest.mean / tpot.mean)} %){unmeasured}."
    )
