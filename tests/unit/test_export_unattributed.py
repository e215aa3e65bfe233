"""The exporter's count of what is between the hooked ranges."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from tests.export_rings import make_ring
from tests.exposition import assert_exposition_is_sound, our_samples
from tests.samples import pack
from vllm_k25_instrument.export.collector import RingCollector
from vllm_k25_instrument.export.unattributed import POSITION_LABELS, UnattributedByPosition
from vllm_k25_instrument.model import PHASES, Category, GraphMode, Phase, Range, StepSample
from vllm_k25_instrument.ring import RingReader

DETAILS = ("",)
DECODE = PHASES.index(Phase.DECODE)


def step(number: int, gap_ns: int = 30, phase: Phase = Phase.DECODE, *, complete: bool = True) -> bytes:
    """All-reduce, a gap, attention; 10 ns before and 7 behind them."""
    ranges = (
        Range(Category.ALL_REDUCE, 10, 100),
        Range(Category.MLA_ATTENTION, 110 + gap_ns, 50),
    )
    duration = 10 + 100 + gap_ns + 50 + 7
    sample = StepSample(number, phase, 1, 1, 1, GraphMode.NONE, 10**18, duration, ranges, complete=complete)
    return pack(sample, DETAILS)


def read(counted, *rings):
    counted.read([RingReader(ring.path) for ring in rings])
    totals = counted.totals()
    return {} if totals is None else {PHASES[p]: (n, {k: v for k, v in totals.gaps_ns[p].items() if v})
                                      for p, n in totals.steps.items() if n}  # fmt: skip


def test_gaps_are_added_up_by_phase_over_all_ranks(tmp_path):
    rings = [make_ring(tmp_path, rank) for rank in range(2)]
    for rank, ring in enumerate(rings):
        ring.append(step(0, gap_ns=30 + rank))
        ring.append(step(1, phase=Phase.PREFILL))
    assert read(UnattributedByPosition(), *rings) == {
        "decode": (2, {"between_all_reduce_and_attention": 61, "unnamed": 34}),
        "prefill": (2, {"between_all_reduce_and_attention": 60, "unnamed": 34}),
    }


def test_each_sample_is_counted_once_and_of_many_new_ones_the_newest(tmp_path):
    ring = make_ring(tmp_path)
    counted = UnattributedByPosition(samples_per_reading=3)
    ring.append(step(0))
    assert read(counted, ring)["decode"][0] == 1
    assert read(counted, ring)["decode"][0] == 1
    for number in range(1, 11):
        ring.append(step(number, gap_ns=1000 if number > 7 else 1))
    steps, gaps = read(counted, ring)["decode"]
    assert (steps, gaps["between_all_reduce_and_attention"]) == (4, 30 + 3000)


def test_samples_that_are_not_complete_are_left_out(tmp_path):
    ring = make_ring(tmp_path)
    ring.append(step(0, complete=False))
    ring.append(step(1))
    assert read(UnattributedByPosition(), ring)["decode"][0] == 1


@pytest.mark.parametrize("state", ["missing", "off", "quiet"])
def test_of_a_worker_that_lacks_a_hook_nothing_is_inferred(tmp_path, state):
    ring = make_ring(tmp_path, hooks={"moe_experts": state})
    ring.append(step(0))
    assert read(UnattributedByPosition(), ring) == {}


def test_another_server_is_counted_from_zero(tmp_path):
    counted = UnattributedByPosition()
    first, second = make_ring(tmp_path / "a", instance="a"), make_ring(tmp_path / "b", instance="b")
    first.append(step(0))
    second.append(step(0, gap_ns=500))
    read(counted, first)
    assert read(counted, second)["decode"] == (1, {"between_all_reduce_and_attention": 500, "unnamed": 17})
    assert read(counted) == {}


def test_the_metrics_carry_every_position_of_every_phase(tmp_path):
    make_ring(tmp_path).append(step(0))
    registry = CollectorRegistry()
    registry.register(RingCollector(lambda: tmp_path))
    text = generate_latest(registry).decode()
    assert_exposition_is_sound(text)
    shown = {
        (dict(labels)["phase"], dict(labels)["position"]): value
        for (name, labels), value in our_samples(text).items()
        if name == "vllm_k25_unattributed_seconds_total"
    }
    assert shown.keys() == {(str(phase), str(position)) for phase in PHASES for position in POSITION_LABELS}
    assert {key: value for key, value in shown.items() if value} == {
        ("decode", "between_all_reduce_and_attention"): 30e-9,
        ("decode", "unnamed"): 17e-9,
    }
