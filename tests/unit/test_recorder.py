"""A step's ranges become a sample whose numbers add up to the nanosecond."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.simulated import TestClock, decode, idle, prefill
from vllm_k25_instrument.hooks.point import HookKind, HookPoint
from vllm_k25_instrument.hooks.wrappers import wrap
from vllm_k25_instrument.model import (
    HOOKED_CATEGORIES,
    LOST_REASONS,
    AllReducePath,
    Category,
    GraphMode,
    LostReason,
    Phase,
    RankCoordinates,
    RankIdentity,
    StepSample,
    category_exclusive_ns,
    exclusive_ns,
)
from vllm_k25_instrument.recorder.recorder import Recorder
from vllm_k25_instrument.recorder.step import OWN_COST_EVERY
from vllm_k25_instrument.ring import RingLayout, RingReader, RingWriter


def range_point(category: Category, **fields: Any) -> HookPoint:
    return HookPoint("all_gather", HookKind.RANGE, "m", "C.f", category=category, **fields)


def path_point(path: AllReducePath) -> HookPoint:
    return HookPoint("all_reduce_path", HookKind.PATH, "m", "C.g", path=lambda args, kwargs: path, none_is_refusal=True)


POINTS = {category: range_point(category) for category in HOOKED_CATEGORIES}


class Bench:
    """A recorder over a real ring and a clock that the test turns."""

    def __init__(self, folder: Path, *, sample_every: int = 1, slots: int = 64, slot_bytes: int = 16_384) -> None:
        self.clock = TestClock()
        self.errors: list[tuple[HookPoint | None, Exception]] = []
        identity = RankIdentity("test", 1, RankCoordinates())
        self.ring = RingWriter(folder / "rank.ring", identity, RingLayout(slots, slot_bytes))
        self.recorder = Recorder(
            self.ring,
            self.clock,
            sample_every=sample_every,
            on_error=lambda point, error: self.errors.append((point, error)),
        )

    def call(self, point: HookPoint, ns: int = 0, inner: Callable[[], Any] = lambda: True, *args: Any) -> Any:
        """Call a function of vLLM's that is hooked by `point`, takes `ns` of its own and calls `inner`."""

        def function(*_: Any) -> Any:
            self.clock.advance(ns)
            return inner()

        return wrap(function, point, self.recorder)(self, *args)

    def samples(self) -> list[StepSample]:
        return list(RingReader(self.ring.path).samples())

    def ring_written(self) -> int:
        return RingReader(self.ring.path).written

    def only_sample(self) -> StepSample:
        (sample,) = self.samples()
        return sample

    def lost(self, reason: LostReason) -> int:
        self.ring.publish()  # in the middle of a step, too
        return RingReader(self.ring.path).totals().lost(LOST_REASONS.index(reason))


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def test_exclusive_times_and_unattributed_add_up_to_the_step(bench: Bench) -> None:
    bench.recorder.begin_step(decode())
    bench.clock.advance(5)
    bench.call(
        POINTS[Category.MOE_EXPERTS],
        100,
        lambda: (bench.call(POINTS[Category.COLLECTIVE], 30), bench.clock.advance(7)),
    )
    bench.clock.advance(11)
    bench.call(POINTS[Category.ALL_REDUCE], 50)
    bench.recorder.end_step()

    sample = bench.only_sample()
    assert sample.duration_ns == 5 + 100 + 30 + 7 + 11 + 50
    assert [(r.category, r.start_ns, r.duration_ns, r.parent) for r in sample.ranges] == [
        (Category.MOE_EXPERTS, 5, 137, -1),
        (Category.COLLECTIVE, 105, 30, 0),
        (Category.ALL_REDUCE, 153, 50, -1),
    ]
    assert exclusive_ns(sample) == [107, 30, 50]
    totals = category_exclusive_ns(sample)
    assert totals[Category.UNATTRIBUTED] == 5 + 11
    assert sum(totals.values()) == sample.duration_ns


def test_where_the_worker_waits_between_steps_the_sample_is_made_then(bench: Bench) -> None:
    wait = wrap(lambda: "message", HookPoint("idle", HookKind.IDLE, "m", "Queue.dequeue"), bench.recorder)
    written = []
    for _ in range(3):
        bench.recorder.begin_step(decode())
        assert wait() == "message"  # a message between the ranks of a step is no such moment
        bench.call(POINTS[Category.MOE_EXPERTS], 100)
        bench.recorder.end_step()
        written.append(bench.ring_written())
        wait()
        written.append(bench.ring_written())
    # Nobody knows at the end of the first step that there will be a wait.
    assert written == [1, 1, 1, 2, 2, 3]


def test_where_the_worker_stops_waiting_between_steps_samples_are_made_at_their_end(bench: Bench) -> None:
    wait = wrap(lambda: None, HookPoint("idle", HookKind.IDLE, "m", "Queue.dequeue"), bench.recorder)
    written = []
    for step in range(4):
        bench.recorder.begin_step(decode())
        bench.recorder.end_step()
        if step == 0:
            wait()
        written.append(bench.ring_written())
    assert written == [1, 1, 3, 4]


def test_another_thread_that_waits_makes_no_sample(bench: Bench) -> None:
    wait = wrap(lambda: None, HookPoint("idle", HookKind.IDLE, "m", "Queue.dequeue"), bench.recorder)
    bench.recorder.begin_step(decode())
    bench.recorder.end_step()
    wait()
    bench.recorder.begin_step(decode())
    bench.recorder.end_step()
    other = threading.Thread(target=wait)
    other.start()
    other.join()
    assert bench.ring_written() == 1
    wait()
    assert bench.ring_written() == 2


def test_all_that_a_draft_model_does_is_one_range_of_speculation(bench: Bench) -> None:
    speculation, all_reduce = POINTS[Category.SPECULATION], POINTS[Category.ALL_REDUCE]
    attention = POINTS[Category.MLA_ATTENTION]
    bench.recorder.begin_step(decode())
    bench.call(attention, 10)
    bench.call(speculation, 5, lambda: bench.call(attention, 20, lambda: bench.call(all_reduce, 3)))
    bench.call(all_reduce, 7)
    bench.recorder.end_step()
    (sample,) = bench.samples()
    assert [(r.category, r.duration_ns) for r in sample.ranges] == [
        (Category.MLA_ATTENTION, 10),
        (Category.SPECULATION, 28),
        (Category.ALL_REDUCE, 7),
    ]


@pytest.mark.parametrize("seed", range(20))
def test_conservation_holds_for_any_nesting(tmp_path: Path, seed: int) -> None:
    bench = Bench(tmp_path)
    rng = random.Random(seed)

    def body(depth: int) -> None:
        for _ in range(rng.randrange(4)):
            bench.clock.advance(rng.randrange(1000))
            if depth < 5:
                bench.call(POINTS[rng.choice(HOOKED_CATEGORIES)], rng.randrange(1000), lambda: body(depth + 1))

    bench.recorder.begin_step(decode())
    for _ in range(5):
        body(0)
    bench.recorder.end_step()

    sample = bench.only_sample()
    assert all(own >= 0 for own in exclusive_ns(sample))
    assert sum(category_exclusive_ns(sample).values()) == sample.duration_ns
    (row,) = RingReader(bench.ring.path).totals().batch_rows()
    assert row.step_ns == sample.duration_ns
    assert row.category_ns == {str(c): ns for c, ns in category_exclusive_ns(sample).items()}


def test_a_range_inside_one_of_its_own_category_is_its_implementation(bench: Bench) -> None:
    bench.recorder.begin_step(decode())
    bench.call(POINTS[Category.MLA_ATTENTION], 10, lambda: bench.call(POINTS[Category.MLA_ATTENTION], 20))
    bench.recorder.end_step()
    (only,) = bench.only_sample().ranges
    assert only.duration_ns == 30


def test_an_all_reduce_carries_the_path_that_did_the_work(bench: Bench) -> None:
    refusing = lambda: bench.call(path_point(AllReducePath.CUSTOM), 1, lambda: None)  # noqa: E731
    working = lambda: bench.call(path_point(AllReducePath.PYNCCL), 9)  # noqa: E731
    point = range_point(Category.ALL_REDUCE, nbytes=lambda args, kwargs: 14_336)
    bench.recorder.begin_step(decode())
    bench.call(point, 0, lambda: (refusing(), working()))
    bench.recorder.end_step()

    (only,) = bench.only_sample().ranges
    assert (only.detail, only.bytes, only.duration_ns) == ("pynccl", 14_336, 10)
    totals = RingReader(bench.ring.path).totals()
    assert totals.all_reduce(1).count == 1
    assert totals.all_reduce_bytes(1, 1) == 14_336


def test_the_outermost_path_names_the_all_reduce(bench: Bench) -> None:
    bench.recorder.begin_step(decode())
    nested = lambda: bench.call(path_point(AllReducePath.PYNCCL), 5)  # noqa: E731
    bench.call(
        range_point(Category.ALL_REDUCE), 0, lambda: bench.call(path_point(AllReducePath.QUICK_REDUCE), 1, nested)
    )
    bench.recorder.end_step()
    assert bench.only_sample().ranges[0].detail == "quick_reduce"


def test_a_path_outside_any_all_reduce_is_nobodys(bench: Bench) -> None:
    bench.recorder.begin_step(decode())
    bench.call(path_point(AllReducePath.PYNCCL), 5)
    bench.recorder.end_step()
    assert bench.only_sample().ranges == ()


def test_ranges_inherit_the_layer_that_named_itself_last(bench: Bench) -> None:
    layer = HookPoint("layer", HookKind.LAYER, "m", "C.l", layer=lambda args, kwargs: args[1])
    inheriting = range_point(Category.ALL_REDUCE, inherits_layer=True)
    bench.recorder.begin_step(decode())
    bench.call(inheriting, 1)
    bench.call(layer, 0, lambda: bench.call(inheriting, 1), 17)
    bench.call(inheriting, 1)
    bench.call(POINTS[Category.SAMPLING], 1)
    bench.recorder.end_step()
    assert [r.layer for r in bench.only_sample().ranges] == [-1, 17, 17, -1]


def test_a_step_that_is_not_sampled_is_counted_with_its_duration(tmp_path: Path) -> None:
    bench = Bench(tmp_path, sample_every=4)
    for _ in range(10):
        bench.recorder.begin_step(decode())
        bench.call(POINTS[Category.SAMPLING], 3_000_000)
        bench.recorder.end_step()

    assert [s.step for s in bench.samples()] == [0, 4, 8]
    totals = RingReader(bench.ring.path).totals()
    assert totals.steps(0) == 10
    assert totals.step_duration(0).sum_ns == 30_000_000
    assert totals.sampled(0) == 3


def test_which_steps_are_sampled_depends_on_the_step_number_alone(tmp_path: Path) -> None:
    """Ranks that see different idle calls and different times still sample the same steps."""
    numbers = []
    for rank in range(2):
        folder = tmp_path / str(rank)
        folder.mkdir()
        bench = Bench(folder, sample_every=3)
        for n in range(12):
            if rank and n % 2:
                assert not bench.recorder.begin_step(idle())
            bench.recorder.begin_step(decode() if n % 5 else prefill())
            bench.clock.advance(rank * 1000 + n)
            bench.recorder.end_step()
        numbers.append([(s.step, s.phase) for s in bench.samples()])
    assert numbers[0] == numbers[1]
    assert [n for n, _ in numbers[0]] == [0, 3, 6, 9]


def test_an_idle_call_is_no_step(bench: Bench) -> None:
    assert not bench.recorder.begin_step(idle())
    assert not bench.recorder.in_step
    bench.recorder.end_step()
    assert bench.samples() == []


def test_a_step_keeps_what_the_scheduler_and_the_dispatcher_said(bench: Bench) -> None:
    bench.recorder.begin_step(decode(requests=60))
    bench.recorder.dispatched(GraphMode.NONE, 64, None)
    bench.recorder.end_step()
    bench.recorder.begin_step(prefill(tokens=500))
    bench.recorder.end_step()
    first, second = bench.samples()
    assert (first.phase, first.requests, first.tokens, first.padded_tokens, first.graph_mode) == (
        Phase.DECODE,
        60,
        60,
        64,
        GraphMode.NONE,
    )
    assert (second.phase, second.requests, second.tokens, second.graph_mode) == (Phase.PREFILL, 1, 500, GraphMode.NONE)


def test_a_raising_call_closes_its_range_and_raises_on(bench: Bench) -> None:
    def broken() -> None:
        raise ZeroDivisionError

    bench.recorder.begin_step(decode())
    with pytest.raises(ZeroDivisionError):
        bench.call(POINTS[Category.MOE_EXPERTS], 5, broken)
    bench.call(POINTS[Category.SAMPLING], 7)
    bench.recorder.end_step()
    assert [(r.category, r.duration_ns, r.parent) for r in bench.only_sample().ranges] == [
        (Category.MOE_EXPERTS, 5, -1),
        (Category.SAMPLING, 7, -1),
    ]


def step_points() -> tuple[HookPoint, HookPoint]:
    return (
        HookPoint("step", HookKind.STEP, "m", "R.execute_model"),
        HookPoint("step_sampling", HookKind.STEP_SAMPLING, "m", "R.sample_tokens"),
    )


def test_a_step_spans_execute_model_and_sample_tokens(bench: Bench) -> None:
    step, sampling = step_points()
    bench.call(step, 100, lambda: None, decode())
    bench.clock.advance(5)
    bench.call(sampling, 20, lambda: "output")
    assert bench.only_sample().duration_ns == 125


def test_a_step_that_execute_model_finishes_ends_there(bench: Bench) -> None:
    step, sampling = step_points()
    bench.call(step, 100, lambda: "output", decode())
    bench.call(sampling, 20, lambda: "nothing to sample")
    assert bench.only_sample().duration_ns == 100


def test_a_step_that_raises_is_lost_and_counted(bench: Bench) -> None:
    step, _ = step_points()

    def broken() -> None:
        raise RuntimeError

    with pytest.raises(RuntimeError):
        bench.call(step, 100, broken, decode())
    assert bench.samples() == []
    assert bench.lost(LostReason.ABORTED) == 1
    bench.call(step, 1, lambda: "output", decode())
    assert bench.only_sample().step == 1


def test_a_runner_that_calls_its_parents_method_makes_one_step(bench: Bench) -> None:
    step, _ = step_points()
    scheduled = decode()
    bench.call(step, 1, lambda: bench.call(step, 10, lambda: "output", scheduled), scheduled)
    assert bench.only_sample().duration_ns == 11


def test_a_dummy_run_is_no_step(bench: Bench) -> None:
    step, _ = step_points()
    assert wrap(lambda *args, **kwargs: "output", step, bench.recorder)(None, decode(), dummy_run=True) == "output"
    assert bench.samples() == []


def test_a_step_too_large_for_its_slot_is_refused_whole(tmp_path: Path) -> None:
    bench = Bench(tmp_path, slot_bytes=512)
    bench.recorder.begin_step(decode())
    for _ in range(20):
        bench.call(POINTS[Category.SAMPLING], 1)
    bench.recorder.end_step()
    assert bench.samples() == []
    assert bench.lost(LostReason.TOO_LARGE) == 1
    assert RingReader(bench.ring.path).totals().sampled(0) == 0


def test_an_error_in_a_hooks_own_code_costs_its_range_only(bench: Bench) -> None:
    def broken(args: Any, kwargs: Any) -> str:
        raise AttributeError("gone in this version")

    point = range_point(Category.MOE_EXPERTS, detail=broken)
    bench.recorder.begin_step(decode())
    assert bench.call(point, 5, lambda: "result") == "result"
    bench.recorder.end_step()
    assert [p for p, _ in bench.errors] == [point]
    assert category_exclusive_ns(bench.only_sample())[Category.UNATTRIBUTED] == 5


def test_ranges_of_another_thread_mark_the_sample_as_incomplete(bench: Bench) -> None:
    bench.recorder.begin_step(decode())
    other = threading.Thread(target=lambda: bench.call(POINTS[Category.MOE_EXPERTS], 5))
    other.start()
    other.join()
    bench.recorder.end_step()
    sample = bench.only_sample()
    assert sample.ranges == ()
    assert not sample.complete


def test_a_sample_is_made_once_the_device_has_passed_its_last_mark(bench: Bench) -> None:
    bench.clock.behind = bench.clock.now
    for _ in range(2):
        bench.recorder.begin_step(decode())
        bench.call(POINTS[Category.SAMPLING], 10)
        bench.recorder.end_step()
    assert bench.samples() == []
    bench.clock.behind = bench.clock.now - 10
    bench.recorder.drain()
    assert [s.step for s in bench.samples()] == [0]
    bench.clock.behind = None
    bench.recorder.drain()
    assert [s.step for s in bench.samples()] == [0, 1]


def test_exclusive_time_is_kept_per_stream(bench: Bench) -> None:
    def on_side_stream() -> None:
        bench.clock.current_stream = 1
        bench.call(POINTS[Category.MOE_SHARED_EXPERTS], 40)
        bench.clock.current_stream = 0

    bench.recorder.begin_step(decode())
    bench.call(POINTS[Category.MOE_EXPERTS], 100, on_side_stream)
    bench.recorder.end_step()
    sample = bench.only_sample()
    assert [r.stream for r in sample.ranges] == [0, 1]
    assert exclusive_ns(sample) == [140, 40]


def test_the_instruments_own_cost_is_recorded(bench: Bench) -> None:
    bench.recorder.begin_step(decode())
    for _ in range(10):
        bench.call(POINTS[Category.SAMPLING], 1)
    bench.recorder.end_step()
    sample = bench.only_sample()
    assert sample.overhead_ns > 0
    assert RingReader(bench.ring.path).totals().overhead_ns > sample.overhead_ns


@pytest.mark.parametrize("sample_every", [1, 7])
def test_what_one_slow_hook_costs_is_seen_wherever_its_ranges_are(tmp_path: Path, sample_every: int) -> None:
    bench = Bench(tmp_path, sample_every=sample_every)
    slept = 0

    def slow(args: Any, kwargs: Any) -> str:
        nonlocal slept
        began = time.perf_counter_ns()
        time.sleep(0.002)
        slept += time.perf_counter_ns() - began
        return "slow"

    sleeping = range_point(Category.MLA_ATTENTION, detail=slow)
    for step in range(OWN_COST_EVERY * sample_every):
        bench.recorder.begin_step(decode())
        for _ in range(3 if step % sample_every == 0 else 0):
            bench.call(POINTS[Category.ALL_REDUCE], 1)
            bench.call(sleeping, 1)
        bench.recorder.end_step()
    overhead = sum(sample.overhead_ns for sample in bench.samples())
    assert len(bench.samples()) == OWN_COST_EVERY
    # Each of the 21 slow calls was timed, at one in seven, and counts seven times.
    assert overhead == pytest.approx(slept, rel=0.5)


@pytest.mark.parametrize("fails", ["start", "end"])
def test_a_mark_that_cannot_be_taken_costs_the_sample_and_not_the_call(bench: Bench, fails: str) -> None:
    marks = iter([fails == "start", True])

    def mark() -> int:
        if next(marks):
            raise RuntimeError("no event to be had")
        return bench.clock.now

    bench.recorder.begin_step(decode())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bench.clock, "mark", mark)
        assert bench.call(POINTS[Category.MOE_EXPERTS], 5, lambda: "result") == "result"
    bench.recorder.end_step()
    bench.recorder.begin_step(decode())
    bench.call(POINTS[Category.MOE_EXPERTS], 7)
    bench.recorder.end_step()
    assert bench.lost(LostReason.ERROR) == 1
    assert [s.step for s in bench.samples()] == [1]
    assert bench.only_sample().ranges[0].duration_ns == 7
    assert [str(error) for _, error in bench.errors] == ["no event to be had"]


def test_the_exception_of_a_call_is_not_replaced_by_that_of_a_mark(bench: Bench) -> None:
    def broken() -> None:
        bench.clock.mark = lambda: 1 / 0  # type: ignore[method-assign, assignment, return-value]
        raise KeyError("the call's own")

    bench.recorder.begin_step(decode())
    with pytest.raises(KeyError, match="the call's own"):
        bench.call(POINTS[Category.MOE_EXPERTS], 5, broken)
    assert bench.lost(LostReason.ERROR) == 1
