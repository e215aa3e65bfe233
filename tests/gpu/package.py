"""This package's own recorder and twin graphs around graphs that are not vLLM's, as a step of a model runner uses them.

Importing it raises ImportError where a part of the package, or one of its dependencies, is not installed.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from tests.gpu.device import capturing
from vllm_k25_instrument.hooks.point import HookKind, HookPoint
from vllm_k25_instrument.hooks.wrappers import wrap
from vllm_k25_instrument.model import LOST_REASONS, Category, GraphMode, RankCoordinates, RankIdentity, StepSample
from vllm_k25_instrument.recorder.cuda import CudaDevice
from vllm_k25_instrument.recorder.graphs import TimedGraphs
from vllm_k25_instrument.recorder.recorder import Recorder
from vllm_k25_instrument.ring import RingLayout, RingReader, RingWriter
from vllm_k25_instrument.settings import GraphTiming


@dataclass(frozen=True)
class Size:
    """The key of a graph."""

    num_tokens: int


class Owner:
    """Looks its graphs up in a dictionary, as vLLM's classes do."""

    def __init__(self) -> None:
        self.graphs: dict[Size, Any] = {}


@dataclass
class Instrument:
    """A recorder with twin graphs, over a ring in a folder of its own."""

    folder: Path
    sample_every: int = 1
    errors: list[Exception] = field(default_factory=list)

    def __post_init__(self) -> None:
        identity = RankIdentity("measured", 1, RankCoordinates())
        self.ring = RingWriter(self.folder / "rank.ring", identity, RingLayout(256, 16_384))
        device = CudaDevice()
        self.recorder = Recorder(
            self.ring,
            device,
            sample_every=self.sample_every,
            on_error=lambda point, error: self.errors.append(error),
        )
        self.graphs = TimedGraphs(self.recorder, device, GraphTiming.TWIN)
        self.owner = Owner()

    def hooked(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function` as a hooked call of a model: a range of experts."""
        point = HookPoint("moe_experts", HookKind.RANGE, "m", "C.f", category=Category.MOE_EXPERTS)
        return wrap(function, point, self.recorder)

    def capture(self, sizes: list[Size], forward: Callable[[Size], None], keep_graph: bool = False) -> None:
        """The own graphs, then their twins."""

        def capture_one(size: Size) -> None:
            graph = torch.cuda.CUDAGraph(keep_graph)
            with capturing(graph):
                forward(size)
            self.owner.graphs[size] = graph

        for size in sizes:
            capture_one(size)
        self.graphs.capture_twins([(self.owner, "graphs")], sizes, capture_one, GraphMode.FULL)

    def twin(self, size: Size) -> Any:
        with self.graphs.replaying(self.owner, "graphs"):
            return self.owner.graphs[size]

    def step(self, size: Size) -> None:
        """One decode step that replays the graph of `size`: the twin where the step is sampled."""
        ids = [f"r{n}" for n in range(size.num_tokens)]
        cached = SimpleNamespace(
            req_ids=ids,
            num_output_tokens=[3] * len(ids),
            num_computed_tokens=[10] * len(ids),
            resumed_req_ids=set(),
            all_token_ids={},
        )
        scheduled = SimpleNamespace(
            num_scheduled_tokens=dict.fromkeys(ids, 1),
            scheduled_new_reqs=[],
            scheduled_cached_reqs=cached,
            finished_req_ids=set(),
            total_num_scheduled_tokens=len(ids),
        )
        self.recorder.begin_step(scheduled)
        self.recorder.dispatched(GraphMode.FULL, size.num_tokens, size)
        if self.graphs.replays_twins:
            with self.graphs.replaying(self.owner, "graphs"):
                self.owner.graphs[size].replay()
        else:
            self.owner.graphs[size].replay()
        self.recorder.end_step()

    def settle(self) -> None:
        torch.cuda.synchronize()
        self.recorder.drain()

    def samples(self) -> list[StepSample]:
        return list(RingReader(self.ring.path).samples())

    def lost(self) -> dict[str, int]:
        totals = RingReader(self.ring.path).totals()
        counts = {str(reason): totals.lost(code) for code, reason in enumerate(LOST_REASONS)}
        return {reason: count for reason, count in counts.items() if count}


@contextmanager
def instrument(sample_every: int = 1) -> Iterator[Instrument]:
    with tempfile.TemporaryDirectory() as folder:
        yield Instrument(Path(folder), sample_every)
