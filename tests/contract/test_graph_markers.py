"""NVTX around vLLM's own graphs, over the simulated GPU: names at capture, a step around each replay."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

import vllm.compilation.breakable_cudagraph as breakable  # noqa: E402
import vllm.compilation.cuda_graph as cuda_graph  # noqa: E402
from vllm.config import CUDAGraphMode  # noqa: E402

from tests.annotating import StrictAnnotations  # noqa: E402
from tests.contract.test_twins import (  # noqa: E402
    ChainServer,
    FullServer,
    Instrumented,
    instrumented,
    piece_descriptor,
    v1_runner,
)
from tests.sim import SimulatedGpu  # noqa: E402
from vllm_k25_instrument.markers import Markers  # noqa: E402
from vllm_k25_instrument.recorder.annotations import ANNOTATION_KEY, GraphAnnotations  # noqa: E402
from vllm_k25_instrument.settings import GraphTiming  # noqa: E402

pytestmark = pytest.mark.contract


class Domain:
    """What an NVTX tool sees of our domain, with the replays in between."""

    def __init__(self, gpu: SimulatedGpu) -> None:
        self.open: list[str] = []
        self.log: list[str] = []
        self.at_replay: list[list[str]] = []
        self.refused: set[str] = set()
        called = gpu.called

        def listening(operation: str, capture: Any = None) -> None:
            if operation == "replay":
                self.at_replay.append(list(self.open))
            called(operation, capture)

        gpu.called = listening  # type: ignore[method-assign]

    def get_category_id(self, name: str) -> int:
        return len(name)

    def get_event_attributes(self, message: str, color: int, category: int, payload: int) -> str:
        return message

    def push_range(self, message: str) -> None:
        if message in self.refused:
            raise OSError(f"NVTX refuses {message}")
        self.log.append("  " * len(self.open) + message)
        self.open.append(message)

    def pop_range(self) -> None:
        assert self.open, "popped more than was pushed"
        self.open.pop()

    def take(self) -> list[str]:
        """What has been pushed since the last time, indented by depth; everything must have been popped."""
        assert self.open == []
        taken, self.log = self.log, []
        return taken


@contextmanager
def listened_to(gpu: SimulatedGpu, **options: Any) -> Iterator[tuple[Instrumented, Domain]]:
    with instrumented(gpu, **options) as made:
        domain = Domain(gpu)
        made.recorder.markers = Markers(domain)
        yield made, domain


def ranges_of_a_capture(size: int) -> list[str]:
    return [
        f"capture bs={size} full twin",
        f"  moe_shared_experts shared {size}",
        f"  moe_experts experts {size}",
        f"  all_reduce all_reduce {size}",
    ]


def test_each_twins_capture_is_a_range_with_its_hooked_calls_inside_and_vllms_own_captures_are_none(
    gpu: SimulatedGpu,
) -> None:
    with listened_to(gpu) as (made, domain):
        server = FullServer(made, (8, 4), random.Random(1))
        server.capture()
        assert domain.take() == ranges_of_a_capture(8) + ranges_of_a_capture(4)
        assert made.errors == []


def test_in_every_step_sampled_or_not_its_range_is_open_while_the_graph_replays(gpu: SimulatedGpu) -> None:
    with listened_to(gpu, sample_every=3) as (made, domain):
        server = FullServer(made, (8, 4), random.Random(1))
        server.capture()
        domain.take()
        for n in range(7):
            server.step(server.descs[n % 2], depth=1)
        server.settle()
        names = [f"decode step {n} bs=1" for n in range(7)]
        assert domain.at_replay == [[name] for name in names]
        assert domain.take() == names, "no hooked call is seen in a replay"
        assert [s.step for s in made.samples()] == [0, 3, 6]
        assert made.errors == []


def test_a_step_that_could_not_be_sampled_has_its_range_too(gpu: SimulatedGpu) -> None:
    with listened_to(gpu) as (made, domain):
        server = FullServer(made, (4,), random.Random(3))
        server.capture()
        domain.take()
        for _ in range(6):
            server.step(server.descs[0], depth=3)
        server.settle()
        assert sum(made.lost().values()) > 0
        assert domain.at_replay == [[f"decode step {n} bs=1"] for n in range(6)]
        domain.take()


def test_an_eager_step_has_its_hooked_calls_inside_its_range(gpu: SimulatedGpu) -> None:
    with listened_to(gpu) as (made, domain):
        server = FullServer(made, (8,), random.Random(1))
        server.step(None, depth=1)
        server.settle()
        assert domain.take() == ["decode step 0 bs=1", *ranges_of_a_capture(0)[1:]]


def test_graphs_timed_in_place_are_captured_inside_a_range_each(gpu: SimulatedGpu) -> None:
    with listened_to(gpu, timing=GraphTiming.INPLACE) as (made, domain):
        server = FullServer(made, (8, 4), random.Random(1))
        server.capture()
        expected = [line for size in (8, 4) for line in ("capture in place", *ranges_of_a_capture(size)[1:])]
        assert domain.take() == expected
        server.step(server.descs[0], depth=1)
        server.settle()
        assert domain.at_replay == [["decode step 0 bs=1"]]


@pytest.mark.parametrize("after", range(4))
def test_a_capture_that_breaks_off_leaves_no_range_open(gpu: SimulatedGpu, after: int) -> None:
    with listened_to(gpu) as (made, domain):
        server = FullServer(made, (8,), random.Random(1))
        # Warm-up and capture of vLLM's own, the twin's warm-up, and then a kernel of the twin's capture.
        gpu.fail("launch", after=12 + after)
        server.capture()
        assert domain.take()[0] == "capture bs=8 full twin"
        server.step(server.descs[0], depth=1)
        server.settle()
        assert domain.at_replay == [["decode step 0 bs=1"]]
        assert domain.take() == ["decode step 0 bs=1"]


def test_a_tool_that_refuses_the_capture_range_costs_the_events_and_no_step(gpu: SimulatedGpu) -> None:
    with listened_to(gpu) as (made, domain):
        domain.refused.add("capture bs=8 full twin")
        server = FullServer(made, (8,), random.Random(1))
        server.capture()
        assert not made.recorder.in_step
        for _ in range(2):
            server.step(server.descs[0], depth=1)
        server.settle()
        assert made.steps() == 2
        assert domain.take() == ["decode step 0 bs=1", "decode step 1 bs=1"]


@pytest.mark.parametrize("wrapper", [cuda_graph.CUDAGraphWrapper, breakable.BreakableCUDAGraphWrapper])
def test_each_piece_is_captured_inside_a_range_and_replayed_inside_its_step(
    gpu: SimulatedGpu, monkeypatch: pytest.MonkeyPatch, wrapper: Any
) -> None:
    with listened_to(gpu, sample_every=2) as (made, domain):
        server = ChainServer(made, monkeypatch, wrapper, random.Random(7))
        runner = v1_runner(server, monkeypatch)
        size = piece_descriptor(8)
        with torch.cuda.stream(torch.cuda.Stream()):
            runner._capture_cudagraphs([size], CUDAGraphMode.PIECEWISE, None)
        pieces = [
            line for factor in (2, 3, 5) for line in ("capture bs=8 piecewise twin", f"  moe_experts times {factor}")
        ]
        assert domain.take() == pieces
        for n in range(3):
            assert server.step(size, float(n)) == [30.0 * n] * 2
        assert [names[0] for names in domain.at_replay] == [
            f"decode step {n} bs=1" for n in range(3) for _piece in range(3)
        ]
        domain.take()
        assert made.errors == []


def test_pytorchs_annotations_give_the_kernels_of_vllms_twins_the_same_names(gpu: SimulatedGpu) -> None:
    strict = StrictAnnotations(gpu)
    with listened_to(gpu, annotations=GraphAnnotations(strict)) as (made, domain):
        server = FullServer(made, (8, 4), random.Random(1))
        server.capture()
        twins = made.graphs._twins[id(server.manager)][2]
        for desc, twin in twins.items():
            assert sorted(strict.names(twin, ANNOTATION_KEY).values()) == sorted(
                line.strip() for line in ranges_of_a_capture(desc.num_tokens)[1:]
            )
        own = [strict.names(graph, ANNOTATION_KEY) for graph in server.manager.graphs.values()]
        assert own == [{}, {}]
        assert strict.refused == []
        domain.take()
        assert made.errors == []
