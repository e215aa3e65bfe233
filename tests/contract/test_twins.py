"""Twin graphs over vLLM's own graph classes and the simulated GPU: what is reported is true, and nothing changes."""

from __future__ import annotations

import random
import tempfile
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

import vllm.compilation.breakable_cudagraph as breakable  # noqa: E402
import vllm.compilation.cuda_graph as cuda_graph  # noqa: E402
import vllm.forward_context  # noqa: E402
import vllm.v1.worker.gpu_model_runner as v1  # noqa: E402
from hypothesis import HealthCheck, given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from vllm.config import CUDAGraphMode  # noqa: E402

from tests.contract.test_sim_runs_vllm_graphs import CONFIG, bare_manager, full_descriptors  # noqa: E402
from tests.sim import SimulatedGpu  # noqa: E402
from tests.simulated import decode  # noqa: E402
from vllm_k25_instrument.hooks.graphs import GRAPH_POINTS  # noqa: E402
from vllm_k25_instrument.hooks.patcher import Patcher  # noqa: E402
from vllm_k25_instrument.hooks.point import HookKind, HookPoint, HookState  # noqa: E402
from vllm_k25_instrument.hooks.wrappers import wrap  # noqa: E402
from vllm_k25_instrument.model import (  # noqa: E402
    HOOKED_CATEGORIES,
    LOST_REASONS,
    Category,
    GraphMode,
    LostReason,
    RankCoordinates,
    RankIdentity,
    StepSample,
    category_exclusive_ns,
)
from vllm_k25_instrument.recorder.cuda import CudaDevice  # noqa: E402
from vllm_k25_instrument.recorder.graphs import TimedGraphs  # noqa: E402
from vllm_k25_instrument.recorder.recorder import Recorder  # noqa: E402
from vllm_k25_instrument.ring import RingLayout, RingReader, RingWriter  # noqa: E402
from vllm_k25_instrument.settings import GraphTiming  # noqa: E402

pytestmark = pytest.mark.contract

EXPERTS, ALL_REDUCE, SHARED = Category.MOE_EXPERTS, Category.ALL_REDUCE, Category.MOE_SHARED_EXPERTS


def range_point(category: Category) -> HookPoint:
    return HookPoint("moe_experts", HookKind.RANGE, "m", "C.f", category=category, detail=lambda args, kwargs: args[0])


class Instrumented:
    """A recorder with twins over the simulated GPU, and vLLM's graph classes hooked."""

    def __init__(self, gpu: SimulatedGpu, folder: Path, timing: GraphTiming, sample_every: int, **options: Any) -> None:
        self.gpu = gpu
        self.errors: list[Exception] = []
        self.ring = RingWriter(
            folder / "rank.ring", RankIdentity("t", 1, RankCoordinates()), RingLayout(slots=256, slot_bytes=4096)
        )
        self.device = CudaDevice()
        self.recorder = Recorder(
            self.ring,
            self.device,
            sample_every=sample_every,
            on_error=lambda point, error: self.errors.append(error),
        )
        self.captures: list[tuple[int, int]] = []
        self.graphs = TimedGraphs(
            self.recorder, self.device, timing, on_captured=lambda *cost: self.captures.append(cost), **options
        )
        self.patcher = Patcher(
            [p for p in GRAPH_POINTS if p.name != "graph_memory"],
            self.recorder,
            vllm_version="0.32.0",
            categories=frozenset(HOOKED_CATEGORIES),
        )
        self.patcher.install()

    def samples(self) -> list[StepSample]:
        return list(RingReader(self.ring.path).samples())

    def lost(self) -> dict[LostReason, int]:
        self.ring.publish()  # the last step may not be over
        totals = RingReader(self.ring.path).totals()
        counts = {reason: totals.lost(code) for code, reason in enumerate(LOST_REASONS)}
        return {reason: count for reason, count in counts.items() if count}

    def steps(self) -> int:
        totals = RingReader(self.ring.path).totals()
        return sum(totals.steps(phase) for phase in range(3))


@contextmanager
def instrumented(
    gpu: SimulatedGpu, timing: GraphTiming = GraphTiming.TWIN, sample_every: int = 1, **options: Any
) -> Iterator[Instrumented]:
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        # What the CUDA build calls to end the recording of a pool whose capture has failed.
        patch.setattr(torch._C, "_cuda_endAllocateToPool", lambda device, pool: gpu.memory.end_recording(pool))
        made = Instrumented(gpu, Path(folder), timing, sample_every, **options)
        try:
            yield made
        finally:
            made.patcher.uninstall()


def test_every_hook_of_the_graphs_is_attached_to_vllms_own_classes(gpu: SimulatedGpu) -> None:
    with instrumented(gpu) as made:
        assert set(made.patcher.states.values()) == {HookState.ATTACHED}


# --- full graphs -------------------------------------------------------------------------------------------


class FullServer:
    """A model of a few hooked kernels, one of them on a side stream, in vLLM's CudaGraphManager."""

    def __init__(self, made: Instrumented, sizes: tuple[int, ...], rng: random.Random) -> None:
        self.made = made
        self.gpu = made.gpu
        self.rng = rng
        self.input = self.gpu.allocate(512, "input")
        self.output = self.gpu.allocate(512, "output")
        self.side_output = self.gpu.allocate(512, "side")
        self.side = torch.cuda.Stream()
        self.descs = full_descriptors(sizes)
        self.manager = bare_manager(
            self.descs, compilation_config=SimpleNamespace(cudagraph_mode=CUDAGraphMode.FULL_AND_PIECEWISE)
        )
        self.in_flight: deque[Any] = deque()
        self.kernel = {c: wrap(self._kernel, range_point(c), made.recorder) for c in (EXPERTS, ALL_REDUCE, SHARED)}
        self.ran: list[Any] = []

    def _kernel(self, name: str, source: Any, target: Any) -> None:
        self.gpu.launch(name, lambda: self.rng.randrange(1, 5_000), reads=[source], writes=[target])

    def forward(self, size: int) -> None:
        """Shared experts on a side stream while the experts run, then an all-reduce."""
        main = torch.cuda.current_stream()
        self.side.wait_stream(main)
        with torch.cuda.stream(self.side):
            self.kernel[SHARED](f"shared {size}", self.input, self.side_output)
        self.kernel[EXPERTS](f"experts {size}", self.input, self.output)
        self.gpu.launch(f"unhooked {size}", 77, reads=[self.output], writes=[self.output])
        main.wait_stream(self.side)
        self.kernel[ALL_REDUCE](f"all_reduce {size}", self.output, self.output)

    def capture(self) -> None:
        self.manager.capture(lambda desc, warmup: lambda mode: self.forward(desc.num_tokens))

    def step(self, desc: Any | None, depth: int) -> None:
        """One step as a model runner makes it, with so many steps in flight at most; None runs eagerly."""
        while len(self.in_flight) >= depth:
            self.in_flight.popleft().synchronize()
        recorder = self.made.recorder
        recorder.begin_step(decode())
        self.gpu.fill(self.input, self.rng.randrange(1000))
        if desc is None:
            recorder.dispatched(GraphMode.NONE, 3, None)
            self.forward(0)
        else:
            recorder.dispatched(GraphMode.FULL, desc.num_tokens, desc)
            self.manager.run_fullgraph(desc)
        self.gpu.host(self.rng.randrange(3_000))
        done = torch.cuda.Event()
        done.record()
        self.in_flight.append(done)
        self.ran.append(desc)
        recorder.end_step()

    def settle(self) -> None:
        torch.cuda.synchronize()
        self.made.recorder.drain()


def test_a_sampled_step_replays_the_twin_and_the_others_vllms_own_graph(gpu: SimulatedGpu) -> None:
    with instrumented(gpu, sample_every=4) as made:
        server = FullServer(made, (8, 4), random.Random(1))
        server.capture()
        own = dict(server.manager.graphs)
        kinds = {desc: graph.kinds() for desc, graph in own.items()}
        assert all(type(graph) is torch.cuda.CUDAGraph for graph in own.values())
        assert all("event_record" not in k for k in kinds.values())
        twins = made.graphs._twins[id(server.manager)][2]
        assert list(twins) == list(own)
        assert all(graph.kinds()["event_record"] == 6 for graph in twins.values())

        for n in range(8):
            server.step(server.descs[n % 2], depth=1)
        server.settle()
        assert server.manager.graphs == own
        assert {desc: graph.kinds() for desc, graph in own.items()} == kinds
        assert [graph.replays for graph in own.values()] == [2, 4]
        assert [graph.replays for graph in twins.values()] == [2, 0]
        assert made.errors == []
        assert [s.step for s in made.samples()] == [0, 4]
        assert made.captures
        assert made.errors == []
        assert gpu.refusals == []


def test_vllms_own_graph_is_the_one_it_would_have_captured_without_us(gpu: SimulatedGpu) -> None:
    with instrumented(gpu, timing=GraphTiming.OFF) as made:
        plain = FullServer(made, (8,), random.Random(1))
        plain.capture()
        expected = plain.manager.graphs[plain.descs[0]].kinds()
    with instrumented(gpu) as made:
        server = FullServer(made, (8,), random.Random(1))
        server.capture()
        assert server.manager.graphs[server.descs[0]].kinds() == expected


def test_a_twin_not_yet_read_is_not_replayed_and_the_step_is_counted(gpu: SimulatedGpu) -> None:
    with instrumented(gpu) as made:
        server = FullServer(made, (4,), random.Random(3))
        server.capture()
        for _ in range(6):
            server.step(server.descs[0], depth=3)
        server.settle()
        lost = made.lost()
        assert lost.get(LostReason.UNREAD, 0) > 0
        assert len(made.samples()) + lost[LostReason.UNREAD] == 6
        assert made.steps() == 6


def test_memory_profiling_captures_no_twins_and_learns_what_they_cost(gpu: SimulatedGpu) -> None:
    gpu.graph_bytes = 3 << 20
    with instrumented(gpu) as made:
        server = FullServer(made, (8, 4), random.Random(1))
        server.manager._capture_mem_samples = []
        server.capture()
        assert made.graphs._twins == {}
        assert made.graphs.profiled_bytes_per_graph == 3 << 20


def test_a_capture_that_fails_half_way_leaves_vllm_its_graphs_and_the_rest_untimed(gpu: SimulatedGpu) -> None:
    with instrumented(gpu) as made:
        server = FullServer(made, (8, 4, 1), random.Random(1))
        # Per size: a warm-up and a capture of 4 kernels. The own capture takes 24 launches; fail in the second twin.
        gpu.fail("launch", after=24 + 8 + 4 + 2)
        server.capture()
        assert len(server.manager.graphs) == 3
        for desc in server.descs:
            server.step(desc, depth=1)
        server.settle()
        assert [s.padded_tokens for s in made.samples()] == [8]
        assert made.lost() == {LostReason.UNTIMED: 2}
        assert made.steps() == 3


def test_short_memory_or_another_ranks_no_ends_the_capture_of_twins_for_all(gpu: SimulatedGpu) -> None:
    answers = iter([True, True, False])
    with instrumented(gpu, agree=lambda ok: ok and next(answers)) as made:
        server = FullServer(made, (8, 4, 1), random.Random(1))
        server.capture()
        assert len(made.graphs._sets) == 1


def test_only_the_sizes_asked_for_get_twins(gpu: SimulatedGpu) -> None:
    with instrumented(gpu, sizes=frozenset({4})) as made:
        server = FullServer(made, (8, 4, 1), random.Random(1))
        server.capture()
        assert [desc.num_tokens for desc in made.graphs._twins[id(server.manager)][2]] == [4]


def test_graphs_that_vllm_drops_drop_their_twins_and_a_recapture_makes_new_ones(gpu: SimulatedGpu) -> None:
    with instrumented(gpu) as made:
        server = FullServer(made, (8,), random.Random(1))
        server.capture()
        server.manager.release_graphs()
        assert made.graphs._sets == {}
        server.capture()
        server.step(server.descs[0], depth=1)
        server.settle()
        assert len(made.samples()) == 1


def test_graphs_timed_in_place_report_only_what_was_not_recorded_again(gpu: SimulatedGpu) -> None:
    with instrumented(gpu, timing=GraphTiming.INPLACE, sample_every=2) as made:
        server = FullServer(made, (8,), random.Random(5))
        server.capture()
        assert server.manager.graphs[server.descs[0]].kinds()["event_record"] == 6
        for _ in range(8):
            server.step(server.descs[0], depth=2)
        server.settle()
        lost = made.lost()
        assert lost.get(LostReason.OVERWRITTEN, 0) > 0
        assert len(made.samples()) + lost[LostReason.OVERWRITTEN] == 4
        check_against_the_truth(made, server)


def check_against_the_truth(made: Instrumented, server: FullServer) -> None:
    """Every reported duration is the simulator's, and every number adds up."""
    gpu = made.gpu
    samples = made.samples()
    assert len({s.step for s in samples}) == len(samples)
    runs = {}
    for size in {0, *(desc.num_tokens for desc in server.descs)}:
        for kind in ("shared", "experts", "all_reduce"):
            runs[kind, size] = [e for e in gpu.runs(f"{kind} {size}") if e.end_ns > e.start_ns]
    for s in samples:
        assert sum(category_exclusive_ns(s).values()) == s.duration_ns
        assert category_exclusive_ns(s)[Category.UNATTRIBUTED] >= 0
        assert [r.category for r in s.ranges] == [SHARED, EXPERTS, ALL_REDUCE]
        assert [r.stream for r in s.ranges] == [1, 0, 0]
        (truth,) = _matching_steps(runs, s)
        start = truth["experts"].start_ns - s.ranges[1].start_ns
        for r in s.ranges:
            run = truth[r.detail.split()[0]]
            assert (r.start_ns, r.duration_ns) == (run.start_ns - start, run.end_ns - run.start_ns)


def _matching_steps(runs: dict[Any, list[Any]], s: StepSample) -> list[dict[str, Any]]:
    """The executed steps whose three kernels have the durations that the sample reports: with random times, one."""
    size = int(s.ranges[0].detail.split()[1])
    found = []
    for triple in zip(*(runs[kind, size] for kind in ("shared", "experts", "all_reduce")), strict=True):
        if [e.end_ns - e.start_ns for e in triple] == [r.duration_ns for r in s.ranges]:
            found.append(dict(zip(("shared", "experts", "all_reduce"), triple, strict=True)))
    return found


SCHEDULES = st.fixed_dictionaries(
    {
        "seed": st.integers(0, 2**32),
        "sizes": st.lists(st.integers(1, 64), min_size=1, max_size=4, unique=True),
        "sample_every": st.integers(1, 5),
        "depth": st.integers(1, 3),
        "pending_from": st.sampled_from(["launch", "node"]),
        "steps": st.lists(st.one_of(st.none(), st.integers(0, 3), st.just("recapture")), min_size=1, max_size=25),
        "timing": st.sampled_from([GraphTiming.TWIN, GraphTiming.TWIN, GraphTiming.INPLACE]),
        "fail_at": st.one_of(st.none(), st.integers(0, 40)),
    }
)


@settings(max_examples=3000, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(schedule=SCHEDULES)
def test_any_schedule_is_reported_as_it_ran_and_breaks_no_rule(gpu: SimulatedGpu, schedule: dict[str, Any]) -> None:
    gpu.executions.clear()
    gpu.refusals.clear()
    gpu.races.clear()
    gpu._faults.clear()
    gpu.events_pending_from = schedule["pending_from"]
    with instrumented(gpu, schedule["timing"], schedule["sample_every"]) as made:
        server = FullServer(made, tuple(sorted(schedule["sizes"], reverse=True)), random.Random(schedule["seed"]))
        own_launches = len(server.descs) * 8
        if schedule["fail_at"] is not None and schedule["timing"] is GraphTiming.TWIN:
            gpu.fail("launch", after=own_launches + schedule["fail_at"])
        server.capture()
        gpu._faults.clear()
        refusals_of_the_failed_capture = len(gpu.refusals)
        own = dict(server.manager.graphs)
        kinds = {desc: graph.kinds() for desc, graph in own.items()}
        gpu.executions.clear()  # of the warm-ups
        for step in schedule["steps"]:
            if step == "recapture":
                server.settle()
                server.manager.release_graphs()
                kept = list(gpu.executions)
                server.capture()
                gpu.executions[:] = kept
                own = dict(server.manager.graphs)
                kinds = {desc: graph.kinds() for desc, graph in own.items()}
            else:
                server.step(None if step is None else server.descs[step % len(server.descs)], schedule["depth"])
        server.settle()

        ran = len(server.ran)
        due = len(range(0, ran, schedule["sample_every"]))
        assert made.steps() == ran
        assert len(made.samples()) + sum(made.lost().values()) == due
        assert set(made.lost()) <= {LostReason.UNREAD, LostReason.UNTIMED, LostReason.OVERWRITTEN}
        check_against_the_truth(made, server)
        assert {desc: graph.kinds() for desc, graph in server.manager.graphs.items()} == kinds
        if schedule["timing"] is GraphTiming.TWIN:
            assert all("event_record" not in k for k in kinds.values())
        assert len(gpu.refusals) == refusals_of_the_failed_capture
        assert gpu.races == []
        assert made.errors == []


# --- pieces ------------------------------------------------------------------------------------------------


class ChainServer:
    """A model in three pieces behind vLLM's wrappers, hooked work in each and hooked eager attention in between."""

    def __init__(self, made: Instrumented, patch: pytest.MonkeyPatch, wrapper: Any, rng: random.Random) -> None:
        self.made = made
        self.gpu = made.gpu
        self.rng = rng
        self.context = SimpleNamespace(batch_descriptor=None, cudagraph_runtime_mode=CUDAGraphMode.NONE)
        for module in (cuda_graph, breakable, vllm.forward_context):
            patch.setattr(module, "get_forward_context", lambda: self.context)
            patch.setattr(module, "is_forward_context_available", lambda: True)
        self.experts = wrap(self._experts, range_point(EXPERTS), made.recorder)
        self.attention = wrap(self._attention, range_point(Category.MLA_ATTENTION), made.recorder)
        self.input = torch.ones(2)
        self.wrappers = [wrapper(self._piece(factor), CONFIG, CUDAGraphMode.PIECEWISE) for factor in (2.0, 3.0, 5.0)]

    def _experts(self, name: str, x: Any, out: Any, factor: float) -> None:
        self.gpu.launch(name, lambda: self.rng.randrange(1, 5_000), run=lambda: out.copy_(x * factor))

    def _attention(self, name: str) -> None:
        self.gpu.launch(name, lambda: self.rng.randrange(1, 5_000))

    def _piece(self, factor: float) -> Callable[[Any], Any]:
        def run(x: Any) -> Any:
            # A buffer of its own for every capture, as the graph's pool gives one.
            out = torch.empty(2)
            self.experts(f"times {factor:.0f}", x, out, factor)
            return out

        return run

    def forward(self, mode: Any, descriptor: Any) -> Any:
        self.context.cudagraph_runtime_mode, self.context.batch_descriptor = mode, descriptor
        x = self.input
        for wrapper in self.wrappers:
            x = wrapper(x)
            self.attention("attention")
        return x

    def step(self, descriptor: Any, value: float) -> list[float]:
        recorder = self.made.recorder
        recorder.begin_step(decode())
        self.input.fill_(value)
        recorder.dispatched(GraphMode.PIECEWISE, descriptor.num_tokens, descriptor)
        result = self.forward(CUDAGraphMode.PIECEWISE, descriptor)
        recorder.end_step()
        torch.cuda.synchronize()
        return list(result.tolist())


def piece_descriptor(size: int) -> Any:
    return vllm.forward_context.BatchDescriptor(num_tokens=size)


def v1_runner(server: ChainServer, patch: pytest.MonkeyPatch) -> Any:
    """vLLM's V1 model runner as far as its capture of graphs goes, with the chain for a model."""
    patch.setattr(v1, "is_global_first_rank", lambda: False)
    runner = object.__new__(v1.GPUModelRunner)
    runner.__dict__.update(
        compilation_config=SimpleNamespace(cudagraph_mode=CUDAGraphMode.PIECEWISE),
        parallel_config=SimpleNamespace(use_ubatching=False),
        lora_config=None,
        maybe_remove_all_loras=lambda config: None,
        _warmup_and_capture=lambda desc, cudagraph_runtime_mode, **options: (
            server.forward(CUDAGraphMode.NONE, desc),
            torch.cuda.synchronize(),
            server.forward(cudagraph_runtime_mode, desc),
        ),
    )
    return runner


@pytest.mark.parametrize("wrapper", [cuda_graph.CUDAGraphWrapper, breakable.BreakableCUDAGraphWrapper])
def test_a_chain_of_pieces_is_replayed_whole_from_one_set_with_right_outputs(
    gpu: SimulatedGpu, monkeypatch: pytest.MonkeyPatch, wrapper: Any
) -> None:
    with instrumented(gpu, sample_every=3) as made:
        server = ChainServer(made, monkeypatch, wrapper, random.Random(7))
        runner = v1_runner(server, monkeypatch)
        sizes = [piece_descriptor(8), piece_descriptor(4)]
        with torch.cuda.stream(torch.cuda.Stream()):
            runner._capture_cudagraphs(sizes, CUDAGraphMode.PIECEWISE, None)
        attribute = "entries" if wrapper is breakable.BreakableCUDAGraphWrapper else "concrete_cudagraph_entries"
        own = [getattr(w, attribute) for w in server.wrappers]
        assert [list(entries) for entries in own] == [sizes] * 3
        assert len(made.graphs._sets) == 2

        for n in range(9):
            assert server.step(sizes[n % 2], float(n)) == [30.0 * n] * 2
        server.made.recorder.drain()
        assert [getattr(w, attribute) for w in server.wrappers] == own
        samples = made.samples()
        assert [s.step for s in samples] == [0, 3, 6]
        for s in samples:
            assert [r.detail for r in s.ranges] == [
                "times 2",
                "attention",
                "times 3",
                "attention",
                "times 5",
                "attention",
            ]
            assert sum(category_exclusive_ns(s).values()) == s.duration_ns
            assert category_exclusive_ns(s)[Category.UNATTRIBUTED] == 0
        assert made.lost() == {}
        assert made.errors == []
        assert gpu.refusals == []


def test_a_drafter_replays_vllms_own_graphs_and_takes_no_twin_from_another_step(
    gpu: SimulatedGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    with instrumented(gpu) as made:
        server = ChainServer(made, monkeypatch, cuda_graph.CUDAGraphWrapper, random.Random(7))
        sizes = [piece_descriptor(8), piece_descriptor(4)]
        with torch.cuda.stream(torch.cuda.Stream()):
            v1_runner(server, monkeypatch)._capture_cudagraphs(sizes, CUDAGraphMode.PIECEWISE, None)

        def drafts(name: str, descriptor: Any) -> Any:
            return server.forward(CUDAGraphMode.PIECEWISE, descriptor)

        draft = wrap(drafts, range_point(Category.SPECULATION), made.recorder)
        for n in range(6):
            model, drafter = sizes[n % 2], sizes[(n + 1) % 2]
            made.recorder.begin_step(decode())
            made.recorder.dispatched(GraphMode.PIECEWISE, model.num_tokens, model)
            server.forward(CUDAGraphMode.PIECEWISE, model)
            draft("draft", drafter)
            made.recorder.end_step()
            # The step before is still to be read, and its twin is of the size that this one drafts with.
            if n % 2:
                torch.cuda.synchronize()
        server.made.recorder.drain()
        samples = made.samples()
        assert [s.step for s in samples] == list(range(6))
        for s in samples:
            assert [r.category for r in s.ranges].count(Category.SPECULATION) == 1
            assert len(s.ranges) == 6 + 1
            assert sum(category_exclusive_ns(s).values()) == s.duration_ns
            assert category_exclusive_ns(s)[Category.UNATTRIBUTED] == 0
        assert made.lost() == {}
        assert made.errors == []
        assert gpu.refusals == []


def test_a_chain_with_a_piece_missing_is_not_replayed_at_all(
    gpu: SimulatedGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    with instrumented(gpu) as made:
        server = ChainServer(made, monkeypatch, cuda_graph.CUDAGraphWrapper, random.Random(7))
        runner = v1_runner(server, monkeypatch)
        size = piece_descriptor(8)
        gpu.fail("launch", after=6 + 6 + 6 + 3)  # own warm-up and capture, the twin's warm-up, half of its capture
        with torch.cuda.stream(torch.cuda.Stream()):
            runner._capture_cudagraphs([size], CUDAGraphMode.PIECEWISE, None)
        refused = len(gpu.refusals)
        for n in range(3):
            assert server.step(size, float(n)) == [30.0 * n] * 2
        assert made.lost() == {LostReason.UNTIMED: 3}
        assert made.samples() == []
        assert len(gpu.refusals) == refused


def test_a_capture_that_nobody_told_us_to_instrument_gets_no_events(gpu: SimulatedGpu) -> None:
    with instrumented(gpu) as made:
        server = FullServer(made, (8,), random.Random(1))
        made.recorder.begin_step(decode())
        with torch.cuda.stream(torch.cuda.Stream()):
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                server.forward(8)
        made.recorder.end_step()
        server.settle()
        assert "event_record" not in graph.kinds()
        assert made.samples()[0].ranges == ()
        assert gpu.refusals == []
