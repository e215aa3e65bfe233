"""A rank that comes late to every all-reduce: the other one's waiting is what it was late, and the metrics name it."""

from __future__ import annotations

from pathlib import Path

import pytest
from prometheus_client import generate_latest

from tests.e2e.conftest import LATE_MS, PROMPTS, SLOW, Running
from tests.exposition import assert_exposition_is_sound, value_of
from vllm_k25_instrument.export.collector import RingCollector
from vllm_k25_instrument.instances import find_rings
from vllm_k25_instrument.model import NS_PER_SECOND, Category

pytestmark = pytest.mark.e2e

OTHER = 1 - SLOW
ALL_REDUCES = 9


def wait_of(text: str, rank: int) -> tuple[float, float]:
    """Seconds and calls."""
    name = "vllm_k25_all_reduce_wait_seconds"
    return value_of(text, name + "_sum", rank=str(rank)), value_of(text, name + "_count", rank=str(rank))


def increase(before: tuple[float, float], after: tuple[float, float]) -> tuple[float, float]:
    return after[0] - before[0], after[1] - before[1]


def late_ns(log: Path) -> list[int]:
    return [int(line) for line in log.read_text().split()]


def test_the_other_rank_waits_as_long_as_the_slow_one_is_late(slowed: Running, lateness: Path) -> None:
    calls_before = len(late_ns(lateness))
    before = slowed.client.get("/metrics")
    slowed.client.complete_all([*PROMPTS], concurrency=4, max_tokens=60)
    after = slowed.client.get("/metrics")
    assert_exposition_is_sound(after)

    waited, calls = increase(wait_of(before, OTHER), wait_of(after, OTHER))
    assert calls >= 60 * ALL_REDUCES
    injected = late_ns(lateness)[calls_before:]
    assert len(injected) == calls
    assert min(injected) >= LATE_MS * 1e6
    assert waited == pytest.approx(sum(injected) / NS_PER_SECOND, rel=0.1)
    waited_by_the_slow_one, its_calls = increase(wait_of(before, SLOW), wait_of(after, SLOW))
    assert its_calls == calls
    assert waited_by_the_slow_one < 0.02 * waited

    steps = value_of(after, "vllm_k25_alignment_steps_total", rank=str(SLOW))
    assert value_of(after, "vllm_k25_slowest_rank_steps_total", rank=str(SLOW)) >= 0.95 * steps
    assert value_of(after, "vllm_k25_slowest_rank_steps_total", rank=str(OTHER)) <= 0.05 * steps
    for reason in ("missing_rank", "counts_differ", "incomplete", "late"):
        assert value_of(after, "vllm_k25_alignment_steps_skipped_total", reason=reason) == 0


def test_transfer_and_waiting_are_what_the_rings_say_to_the_nanosecond(slowed: Running) -> None:
    text = generate_latest(RingCollector(lambda: _folder(slowed), samples_per_scrape=1 << 20)).decode()
    samples = slowed.samples()
    by_step = [dict.fromkeys(s.step for s in own) for own in samples.values()]
    common = by_step[0].keys() & by_step[1].keys()
    durations = {
        rank: sum(r.duration_ns for s in own if s.step in common for r in s.ranges if r.category is Category.ALL_REDUCE)
        for rank, own in samples.items()
    }
    transfer = value_of(text, "vllm_k25_all_reduce_transfer_seconds_sum", path="cpu_shm")
    for rank, duration in durations.items():
        waited, _ = wait_of(text, rank)
        assert round((transfer + waited) * NS_PER_SECOND) == pytest.approx(duration, abs=2)


def _folder(running: Running) -> Path:
    return find_rings(running.ring_dir)
