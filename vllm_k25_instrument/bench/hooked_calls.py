"""A trivial function behind a hook, and steps to call it in: what the cost of a hooked call is measured on."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from time import perf_counter_ns
from types import SimpleNamespace
from typing import Any, Final, Self

import torch

from vllm_k25_instrument.hooks.arguments import message_bytes
from vllm_k25_instrument.hooks.point import HookKind, HookPoint
from vllm_k25_instrument.hooks.wrappers import wrap
from vllm_k25_instrument.model import AllReducePath, Category, RankCoordinates, RankIdentity
from vllm_k25_instrument.recorder.device import Device, HostClock
from vllm_k25_instrument.recorder.recorder import Recorder
from vllm_k25_instrument.ring import DEFAULT_BYTES, DEFAULT_SAMPLES, RingLayout, RingWriter

CALLS_PER_STEP: Final = 375
"""Ranges per sampled step: about what a decode step of Kimi-K2.5 has (122 all-reduces, 61 MLA, 60 each of experts,
routing and shared experts, and a few more). All of them are all-reduces here, the costliest kind."""

NEVER: Final = 1_000_000
"""Steps between two that are sampled, where none is to be."""


class Communicator:
    """Its method does nothing."""

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor."""
        return tensor


SCHEDULED: Final = SimpleNamespace(
    num_scheduled_tokens={"r": 1},
    total_num_scheduled_tokens=1,
    scheduled_new_reqs=[],
    scheduled_cached_reqs=SimpleNamespace(
        req_ids=["r"], num_output_tokens=[5], num_computed_tokens=[10], resumed_req_ids=()
    ),
    finished_req_ids=(),
)
"""A decode step of one request, as the scheduler describes it."""

OWNER: Final = Communicator()
TENSOR: Final = torch.zeros(7168, dtype=torch.bfloat16)

AllReduce = Callable[[Communicator, torch.Tensor], Any]


def timed(call: AllReduce, calls: int) -> float:
    """Nanoseconds per call."""
    owner, tensor = OWNER, TENSOR
    began = perf_counter_ns()
    for _ in range(calls):
        call(owner, tensor)
    return (perf_counter_ns() - began) / calls


def make_recorder(
    folder: Path, sample_every: int, kind: type[Recorder] = Recorder, device: Device[Any] | None = None
) -> Recorder:
    """A recorder over a ring of the default size in `folder`, on the host's clock unless another is given."""
    ring = RingWriter(
        folder / f"{sample_every}.ring",
        RankIdentity("bench", os.getpid(), RankCoordinates()),
        RingLayout.plan(DEFAULT_SAMPLES, DEFAULT_BYTES),
    )

    def fail(point: HookPoint | None, error: Exception) -> None:
        raise error

    return kind(ring, HostClock() if device is None else device, sample_every=sample_every, on_error=fail)


def all_reduce_point() -> HookPoint:
    """The hook point of an all-reduce whose path is known beforehand."""
    return HookPoint(
        "all_reduce",
        HookKind.RANGE,
        "m",
        "Communicator.all_reduce",
        category=Category.ALL_REDUCE,
        detail=lambda args, kwargs: AllReducePath.PYNCCL,
        nbytes=message_bytes,
        inherits_layer=True,
    )


class HookedCalls:
    """The function bare, hooked in steps that are not sampled, and hooked in sampled ones; ns per call."""

    def __init__(
        self, bare: AllReduce, not_sampled: AllReduce, sampled: AllReduce, idle: Recorder, busy: Recorder
    ) -> None:
        self._bare, self._not_sampled, self._sampled = bare, not_sampled, sampled
        self._idle, self._busy = idle, busy

    @classmethod
    def make(cls, folder: Path) -> Self:
        """Two recorders with rings in `folder`: one that samples no step, one that samples each."""
        point, bare = all_reduce_point(), Communicator.all_reduce
        idle, busy = make_recorder(folder, NEVER), make_recorder(folder, 1)
        made = cls(bare, wrap(bare, point, idle), wrap(bare, point, busy), idle, busy)
        idle.begin_step(SCHEDULED)  # step 0, which every recorder samples
        idle.end_step()
        return made

    def bare(self, calls: int) -> float:
        """Without a hook."""
        return timed(self._bare, calls)

    def not_sampled(self, calls: int) -> float:
        """Hooked, in one step that is not sampled."""
        self._idle.begin_step(SCHEDULED)
        try:
            return timed(self._not_sampled, calls)
        finally:
            self._idle.end_step()

    def sampled(self, calls: int) -> float:
        """Hooked, in sampled steps of :data:`CALLS_PER_STEP`, their samples made and written."""
        total = 0.0
        steps = calls // CALLS_PER_STEP
        for _ in range(steps):
            in_step, at_its_end = self.sampled_step()
            total += in_step + at_its_end
        return total / (steps * CALLS_PER_STEP)

    def sampled_step(self) -> tuple[float, float]:
        """One sampled step: ns of its beginning and calls, and ns of its end, when its sample is made and written."""
        began = perf_counter_ns()
        self._busy.begin_step(SCHEDULED)
        timed(self._sampled, CALLS_PER_STEP)
        called = perf_counter_ns()
        self._busy.end_step()
        return called - began, perf_counter_ns() - called
