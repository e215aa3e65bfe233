"""`bench moe`: the routed experts and the dense projections of a decode step, at one rank's exact sizes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from vllm_k25_instrument.bench.document import BenchDocument, BenchMachine, Kind, Remark, Row
from vllm_k25_instrument.bench.intervals import Median, median_interval
from vllm_k25_instrument.bench.routing import Routing, choose_experts, distinct_experts
from vllm_k25_instrument.bench.sizes import ExpertLayer, Projection, expert_layer, projections
from vllm_k25_instrument.bench.timing import Call, Repeats, Timer
from vllm_k25_instrument.limits.floors import Part
from vllm_k25_instrument.limits.gpus import Gpu
from vllm_k25_instrument.limits.model_shape import ModelShape
from vllm_k25_instrument.model import NS_PER_SECOND, Category

NO_FLOOR_ON_CPU: Final = "no data sheet of this processor's memory and arithmetic: floors are of GPUs"
NO_FLOOR: Final = "this GPU is not in the table of data sheets: name one with --gpu"
INT4: Final = 4

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class MoePlan:
    """What is to be measured."""

    shape: ModelShape
    model: str
    tp: int
    tokens: tuple[int, ...]
    routings: tuple[Routing, ...]
    repeats: Repeats
    flush: bool = True
    experts: int | None = None
    counts: tuple[float, ...] = ()
    routed: bool = True
    dense: bool = True
    graphs: bool = True

    def settings(self) -> dict[str, Any]:
        """The options, for the document."""
        return {
            "model": self.model,
            "tensor_parallel_size": self.tp,
            "tokens": list(self.tokens),
            "routing": [str(routing) for routing in self.routings],
            "experts": self.experts,
            "l2_flushed": self.flush,
            "repeats": self.repeats.most,
            "seconds": self.repeats.seconds,
        }


@dataclass(slots=True)
class _Found:
    rows: list[Row] = field(default_factory=list)
    warnings: list[Remark] = field(default_factory=list)

    def warn(self, code: str, message: str) -> None:
        self.warnings.append(Remark(code, message))


INCOMPLETE: Final = frozenset({"experts_not_int4", "no_int4_kernel", "projection_quantized", "graph_failed"})
"""Codes of warnings that say: not all that was asked for has been measured."""


def run_moe(
    plan: MoePlan, machine: BenchMachine, timer: Timer, gpu: Gpu | None, *, int4_allowed: bool = True, say: Say
) -> BenchDocument:
    """Measure all of it; `say` hears what is under way. vLLM has been prepared. Raises BenchError, LimitsError."""
    found = _Found()
    rows = _Measure(plan, machine, timer, gpu, found, say)
    layer = expert_layer(plan.shape, plan.tp, experts=plan.experts) if plan.routed else None
    dense = projections(plan.shape, plan.tp) if plan.dense else ()
    if layer is not None:
        if layer.precision.bits != INT4:
            found.warn("experts_not_int4", f"the experts have {layer.precision.bits} bits: only INT4 is measured here")
        elif not int4_allowed:
            found.warn("no_int4_kernel", "this build of vLLM has no INT4 kernel for experts on this processor")
        else:
            rows.experts(layer)
    if dense:
        rows.dense(dense)
    _general_warnings(plan, machine, layer, found)
    return BenchDocument(
        Kind.MOE,
        machine,
        tuple(found.rows),
        settings=plan.settings(),
        summary=step_sums(found.rows),
        warnings=tuple(found.warnings),
    )


def step_sums(rows: Sequence[Row]) -> dict[str, float]:
    """Nanoseconds per step: of each tokens, routing and graph the sum over rows of median x calls per step.

    ``dense tokens=64`` are the projections, ``experts uniform tokens=64`` the routed experts; `` graph`` follows where
    they ran in one.
    """
    sums: dict[str, float] = {}
    for row in rows:
        if row.calls_per_step:
            kind = f"experts {row.routing}" if row.routing else "dense"
            key = f"{kind} tokens={row.tokens}{' graph' if row.in_graph else ''}"
            sums[key] = sums.get(key, 0.0) + row.median_ns * row.calls_per_step
    return sums


class _Measure:
    def __init__(
        self, plan: MoePlan, machine: BenchMachine, timer: Timer, gpu: Gpu | None, found: _Found, say: Say
    ) -> None:
        self._plan, self._timer, self._gpu, self._found, self._say = plan, timer, gpu, found, say
        self._device = machine.device

    def experts(self, layer: ExpertLayer) -> None:
        from vllm_k25_instrument.bench.kernels import Experts

        plan = self._plan
        routed = [
            (tokens, routing, choose_experts(routing, tokens, layer.experts, layer.active, plan.counts))
            for tokens in plan.tokens
            for routing in plan.routings
        ]
        self._say(f"making {layer.experts} experts, {layer.nbytes(layer.experts) / 1e9:,.2f} GB")
        experts = Experts(layer, self._device)
        for tokens, routing, chosen in routed:
            distinct = distinct_experts(chosen)
            self._say(f"routed experts, {tokens} tokens, {routing}")
            part = layer.part(tokens, distinct)
            row = _row("routed experts", experts.path, layer.shape, part, tokens)
            row = replace(row, routing=str(routing), active_experts=distinct, calls_per_step=layer.calls_per_step)
            self._time(row, experts.call(chosen), part)

    def dense(self, matrices: Sequence[Projection]) -> None:
        from vllm_k25_instrument.bench.kernels import Projections

        with Projections(self._device) as layers:
            for size in matrices:
                if size.precision.bits < self._plan.shape.activation_bits:
                    bits = size.precision.bits
                    self._found.warn("projection_quantized", f"{size.name} has {bits} bits: not measured here")
                    continue
                for tokens in self._plan.tokens:
                    self._say(f"{size.name}, {tokens} tokens")
                    path, call = layers.call(size, tokens)
                    row = _row(size.name, path, size.shape, size.part(tokens), tokens)
                    self._time(replace(row, calls_per_step=size.calls_per_step), call, size.part(tokens))

    def _time(self, row: Row, call: Call, part: Part) -> None:
        plan = self._plan
        for in_graph, what in self._ways(row, call):
            times = median_interval(self._timer.times(what, plan.repeats, flush=plan.flush))
            self._found.rows.append(self._finished(replace(row, in_graph=in_graph, l2_flushed=plan.flush), times, part))

    def _ways(self, row: Row, call: Call) -> Iterator[tuple[bool, Call]]:
        yield False, call
        if self._timer.has_graphs and self._plan.graphs:
            try:
                graphed = self._timer.graphed(call)
            except RuntimeError as error:
                self._found.warn("graph_failed", f"{row.name}, {row.tokens} tokens: cannot be captured: {error}")
                return
            yield True, graphed

    def _finished(self, row: Row, times: Median, part: Part) -> Row:
        seconds = max(times.ns, 1) / NS_PER_SECOND
        floor = None if self._gpu is None else part.floor(self._gpu)[0]
        return replace(
            row,
            median_ns=times.ns,
            low_ns=times.low_ns,
            high_ns=times.high_ns,
            repeats=times.count,
            achieved_bytes_per_s=part.nbytes / seconds,
            achieved_flop_per_s=part.flops / seconds,
            floor_ns=None if floor is None else round(floor),
            floor_reason=None if floor is not None else NO_FLOOR_ON_CPU if self._device == "cpu" else NO_FLOOR,
            ratio_to_floor=None if floor is None else times.ns / floor,
        )


def _row(name: str, path: str, shape: str, part: Part, tokens: int) -> Row:
    return Row(
        name=name,
        path=path,
        shape=shape,
        median_ns=0,
        low_ns=0,
        high_ns=0,
        repeats=0,
        category=str(Category(part.category)),
        tokens=tokens,
        bytes=round(part.nbytes),
        flops=round(part.flops),
    )


def _general_warnings(plan: MoePlan, machine: BenchMachine, layer: ExpertLayer | None, found: _Found) -> None:
    if layer is not None and layer.experts < plan.shape.experts:
        found.warn(
            "experts_shrunk",
            f"{layer.experts} of the model's {plan.shape.experts} experts: fewer distinct experts than in the model",
        )
    if machine.device == "cpu":
        found.warn("eager_only", "no CUDA graphs on a CPU: measured outside of one only")
        if layer is not None and found.rows:
            found.warn(
                "cpu_experts_let_through",
                "vLLM's CPU build refuses these INT4 experts (groups of 32, DeepSeek-V3 routing, or no AMX), though "
                "its kernel computes them: the refusal is lifted here, as in the demo. The kernel multiplies in int8",
            )
    else:
        found.warn("not_run_on_gpu", "the CUDA side of this benchmark has not yet been run on a GPU by its authors")
    if not plan.flush:
        found.warn("caches_warm", "caches were not flushed: small matrices are read from them, as in no real step")
