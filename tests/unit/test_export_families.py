"""A rank's counters come out as the metrics of the table, exact, and never more of them than promised."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from prometheus_client import generate_latest
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics
from prometheus_client.parser import text_string_to_metric_families

from tests.export_rings import STEP_NS, identity, split, touch_everything
from tests.exposition import (
    FAMILIES,
    assert_exposition_is_sound,
    assert_openmetrics_is_sound,
    duplicated_series,
    our_samples,
    value_of,
)
from vllm_k25_instrument.alignment import LEFT_OUT
from vllm_k25_instrument.export.cardinality import (
    MAX_NODE_SERIES,
    NODE_RANKS,
    worst_case,
    worst_case_per_rank,
    worst_case_per_server,
)
from vllm_k25_instrument.export.families import (
    empty_families,
    join_ranks,
    rank_families,
    unattributed_families,
    wait_families,
)
from vllm_k25_instrument.export.unattributed import POSITION_LABELS, UnattributedTotals
from vllm_k25_instrument.export.waits import TRANSFER_BOUNDS_NS, WAIT_BOUNDS_NS, WaitTotals
from vllm_k25_instrument.model import (
    ALL_REDUCE_PATHS,
    LIVE_CATEGORIES,
    LOST_REASONS,
    PHASES,
    AllReducePath,
    Category,
    Phase,
    RankIdentity,
)
from vllm_k25_instrument.totals import TOTALS_BYTES, TOTALS_COUNT, Histogram, Totals, TotalsWriter

DATA = Path(__file__).parents[1] / "data"

DECODE = 0
FULL = 2


class Rank:
    """A rank's counters, without a ring around them."""

    def __init__(self, who: RankIdentity | None = None) -> None:
        self.identity = who or identity()
        self.memory = memoryview(bytearray(TOTALS_BYTES)).cast("Q")
        self.totals = TotalsWriter(self.memory)

    def collect(self):
        return rank_families(self.identity, Totals(self.memory.tobytes()))


def full_waits(*ranks: int) -> WaitTotals:
    """Every path and reason, and each of the ranks."""
    touched_transfer = Histogram(TRANSFER_BOUNDS_NS, (1,) * (len(TRANSFER_BOUNDS_NS) + 1), 11)
    touched_wait = Histogram(WAIT_BOUNDS_NS, (1,) * (len(WAIT_BOUNDS_NS) + 1), 11)
    return WaitTotals(
        transfer=dict.fromkeys(range(len(ALL_REDUCE_PATHS)), touched_transfer),
        wait=dict.fromkeys(ranks, touched_wait),
        steps=dict.fromkeys(ranks, 2),
        slowest=dict.fromkeys(ranks, 1),
        left_out=dict.fromkeys(LEFT_OUT, 1),
    )


class Waits:
    """What a registry needs of the waiting between ranks."""

    def __init__(self, totals: WaitTotals) -> None:
        self.totals = totals

    def collect(self):
        return wait_families(self.totals)


class Unattributed:
    """What a registry needs of the time between the hooked ranges."""

    def __init__(self, totals: UnattributedTotals) -> None:
        self.totals = totals

    def collect(self):
        return unattributed_families(self.totals)


class Node:
    """What a registry needs of the ranks of one server."""

    def __init__(self, *ranks: Rank | Waits | Unattributed) -> None:
        self.ranks = ranks

    def collect(self):
        return join_ranks(rank.collect() for rank in self.ranks)


def text_of(*ranks: Rank | Waits) -> str:
    return generate_latest(Node(*ranks)).decode()


def full_rank(rank: int = 0) -> Rank:
    full = Rank(identity(rank, hooks=dict(identity().hooks, from_a_newer_version="attached")))
    touch_everything(full.totals)
    return full


def test_the_checker_flags_a_series_that_appears_twice():
    assert duplicated_series((DATA / "duplicated_series.txt").read_text()) == [
        ("k25_steps_total", frozenset({("rank", "0")}))
    ]


BLEMISHES = {
    "a label of ours that is not in the table": ('steps_total{phase="decode"', 'steps_total{layer="17",phase="decode"'),
    "a label value outside its closed set": ('path="pynccl"', 'path="ncclDevKernel_AllReduce_Sum_bf16_RING_LL"'),
    "another type": ("step_duration_seconds histogram", "step_duration_seconds gauge"),
    "another name": ("vllm_k25_hook_attached", "vllm_k25_hook_present"),
    "a family without help": ("Executed model steps; idle calls are not steps.", ""),
    "a bucket that shrinks": (r'(le="0.016",phase="decode",rank="0"}) 18.0', r"\1 17.0"),
    "a count that is not the last bucket": (r'(duration_seconds_count{phase="decode",rank="0"}) 18.0', r"\1 19.0"),
    "a negative value": (r'(overhead_seconds_total{rank="0"}) ', r"\1 -"),
}


@pytest.mark.parametrize(("sound", "unsound"), BLEMISHES.values(), ids=BLEMISHES.keys())
def test_the_checker_flags(sound, unsound):
    text, replaced = re.subn(sound, unsound, text_of(full_rank()))
    assert replaced
    with pytest.raises(AssertionError):
        assert_exposition_is_sound(text)


def test_a_full_node_is_sound_in_the_text_format():
    ranks = range(NODE_RANKS)
    assert_exposition_is_sound(text_of(*(full_rank(rank) for rank in ranks), Waits(full_waits(*ranks))))


def test_a_full_node_is_sound_in_the_openmetrics_format():
    assert_openmetrics_is_sound(generate_openmetrics(Node(full_rank(0), full_rank(1))).decode())


def test_an_untouched_rank_is_sound():
    assert_exposition_is_sound(text_of(Rank()))


def test_no_rank_at_all_is_sound():
    assert_exposition_is_sound(text_of())


def test_the_families_described_are_those_collected():
    described = [(family.name, family.type) for family in empty_families()]
    assert described == [(family.name, family.type) for family in full_rank().collect()]


def test_an_untouched_rank_shows_zeros_where_alert_rules_look_and_nothing_else():
    samples = our_samples(text_of(Rank()))
    assert {name for name, _ in samples} == {
        "vllm_k25_steps_total",
        "vllm_k25_steps_sampled_total",
        "vllm_k25_samples_lost_total",
        "vllm_k25_instrument_overhead_seconds_total",
        "vllm_k25_graph_twin_bytes",
        "vllm_k25_graph_twin_capture_seconds",
        "vllm_k25_hook_errors_total",
        "vllm_k25_hook_attached",
        "vllm_k25_build_info",
    }
    phases = {dict(labels)["phase"] for name, labels in samples if name == "vllm_k25_steps_total"}
    reasons = {dict(labels)["reason"] for name, labels in samples if name == "vllm_k25_samples_lost_total"}
    assert (phases, reasons) == (set(PHASES), set(LOST_REASONS))
    assert {value for (name, _), value in samples.items() if name.endswith("_total")} == {0}


def test_rank_is_the_global_rank():
    node_two = Rank(identity(13))
    node_two.totals.add_step(DECODE, 1)
    assert value_of(text_of(node_two), "vllm_k25_steps_total", rank="13", phase="decode") == 1


@pytest.mark.parametrize("duration_ns", [1, 123, 999_999_999, 12_345_678_901, 7 * 24 * 3600 * 10**9 + 1])
def test_sums_are_exact_to_the_nanosecond(duration_ns):
    rank = Rank()
    rank.totals.add_step(DECODE, duration_ns)
    seconds = value_of(text_of(rank), "vllm_k25_step_duration_seconds_sum", rank="0", phase="decode")
    assert round(seconds * 1e9) == duration_ns


def test_the_categories_of_a_batch_add_up_to_its_steps():
    rank = Rank()
    durations = (STEP_NS, STEP_NS + 1, 3)
    for duration in durations:
        rank.totals.add_sample(DECODE, FULL, 64, duration, split(duration))
    samples = our_samples(text_of(rank))
    group = {"rank": "0", "phase": "decode", "graph_mode": "full", "batch": "64"}
    step_sum = samples["vllm_k25_batch_step_seconds_sum", frozenset(group.items())]
    category_sums = [
        samples["vllm_k25_batch_category_seconds_sum", frozenset({**group, "category": category}.items())]
        for category in LIVE_CATEGORIES
    ]
    assert round(step_sum * 1e9) == sum(durations)
    assert sum(round(seconds * 1e9) for seconds in category_sums) == sum(durations)


def test_a_category_has_series_once_time_has_been_spent_on_it():
    """A model without experts has no series of experts, in any phase and any batch; of what there is, all of them."""
    rank = Rank(identity())
    spent = {Category.ALL_REDUCE: 5_000, Category.UNATTRIBUTED: 7_000}
    exclusive = [spent.get(category, 0) for category in LIVE_CATEGORIES]
    rank.totals.add_sample(PHASES.index(Phase.DECODE), 0, 1, 12_000, exclusive)
    rank.totals.add_sample(PHASES.index(Phase.PREFILL), 0, 1, 12_000, [0] * len(LIVE_CATEGORIES))

    def categories(phase: str) -> dict[str, set[str]]:
        found: dict[str, set[str]] = {}
        for family in text_string_to_metric_families(text_of(rank)):
            for sample in family.samples:
                if "category" in sample.labels and sample.labels["phase"] == phase:
                    found.setdefault(sample.name, set()).add(sample.labels["category"])
        return found

    names = {f"vllm_k25_step_category_seconds_{part}" for part in ("bucket", "count", "sum")}
    names |= {f"vllm_k25_batch_category_seconds_{part}" for part in ("count", "sum")}
    for phase in ("decode", "prefill"):
        assert categories(phase) == {name: {"all_reduce", "unattributed"} for name in names}
    exclusive[LIVE_CATEGORIES.index(Category.MOE_EXPERTS)] = 1
    rank.totals.add_sample(PHASES.index(Phase.DECODE), 0, 1, 12_001, exclusive)
    assert categories("decode") == {name: {"all_reduce", "unattributed", "moe_experts"} for name in names}


def test_a_duration_on_a_bound_is_inside_its_bucket():
    rank = Rank()
    rank.totals.add_step(DECODE, 500_000)
    rank.totals.add_step(DECODE, 500_001)
    text = text_of(rank)
    bucket = "vllm_k25_step_duration_seconds_bucket"
    assert value_of(text, bucket, rank="0", phase="decode", le="0.0005") == 1
    assert value_of(text, bucket, rank="0", phase="decode", le="0.001") == 2


def test_bucket_bounds_are_written_without_float_noise():
    bounds = {dict(labels).get("le", "0.0") for _, labels in our_samples(text_of(full_rank()))}
    assert {"5e-05", "0.00025", "0.0125", "1.0", "+Inf"} <= bounds
    assert [bound for bound in bounds if len(bound) > len("0.00025")] == []


def test_batches_beyond_the_last_row_come_as_other():
    samples = our_samples(text_of(full_rank()))
    other = {"rank": "0", "phase": "mixed", "graph_mode": "other", "batch": "other"}
    steps = {s: value for s, value in samples.items() if s[0] == "vllm_k25_batch_step_seconds_count"}
    assert steps["vllm_k25_batch_step_seconds_count", frozenset(other.items())] > 0
    sampled = sum(value for (name, _), value in samples.items() if name == "vllm_k25_steps_sampled_total")
    assert sum(steps.values()) == sampled


def test_bytes_are_counted_by_path_and_size():
    rank = Rank()
    rank.totals.add_all_reduces(list(AllReducePath).index(AllReducePath.PYNCCL), [78_000], [14_336])
    samples = our_samples(text_of(rank))
    assert [(labels, value) for (name, labels), value in samples.items() if "all_reduce_bytes" in name] == [
        (frozenset({("rank", "0"), ("path", "pynccl"), ("size", "16384")}), 14_336)
    ]


def test_a_hook_says_whether_it_is_attached():
    states = {"step": "attached", "mla_decode": "waiting", "mla_prefill": "quiet", "moe_experts": "missing"}
    rank = Rank(identity(hooks=states | {"sampling": "off", "gather": "not_in_version"}))
    shown = {
        dict(labels)["hook"]: value
        for (name, labels), value in our_samples(text_of(rank)).items()
        if name == "vllm_k25_hook_attached"
    }
    assert shown == {"step": 1, "mla_decode": 0, "mla_prefill": 0, "moe_experts": 0}


def test_hooks_of_another_version_share_one_label():
    rank = Rank(identity(hooks={"new_in_2027": "waiting", "also_new": "attached"}))
    rank.totals.add_hook_error(62)
    rank.totals.add_hook_error(63)
    text = text_of(rank)
    assert value_of(text, "vllm_k25_hook_attached", rank="0", hook="other") == 1
    assert value_of(text, "vllm_k25_hook_errors_total", rank="0", hook="other") == 2


def test_build_info_is_one_per_server():
    text = text_of(Rank(identity(0, model="a")), Rank(identity(1, model="b")))
    shown = [labels for name, labels in our_samples(text) if name == "vllm_k25_build_info"]
    assert [dict(labels)["model"] for labels in shown] == ["a"]


def test_a_model_name_cannot_break_the_exposition():
    name = 'a "model"\\ of\nmany lines'
    text = text_of(Rank(identity(model=name)))
    assert_exposition_is_sound(text)
    assert [dict(labels)["model"] for series, labels in our_samples(text) if "build" in series] == [name]


def test_counters_that_contradict_themselves_are_refused():
    rank = Rank()
    for requests in (1, 64):
        rank.totals.add_sample(DECODE, FULL, requests, STEP_NS, split(STEP_NS))
    # The labels of the two rows: before one step and its duration.
    first, second = (
        i for i in range(TOTALS_COUNT - 2) if rank.memory[i] and rank.memory[i + 1 : i + 3].tolist() == [1, STEP_NS]
    )
    rank.memory[second] = rank.memory[first]
    with pytest.raises(ValueError, match="corrupted: two rows of counters for decode, full, batch 1"):
        rank.collect()


# --- cardinality -----------------------------------------------------------------------------------------


def test_the_worst_case_of_a_node_is_below_its_limit():
    assert worst_case(NODE_RANKS) < MAX_NODE_SERIES


def test_a_full_rank_makes_as_many_series_as_the_worst_case_says_and_no_more():
    counted: dict[str, int] = {}
    gaps_ns = dict.fromkeys(range(len(PHASES)), dict.fromkeys(POSITION_LABELS, 1))
    unattributed = UnattributedTotals(steps=dict.fromkeys(range(len(PHASES)), 1), gaps_ns=gaps_ns)
    for family in Node(full_rank(), Waits(full_waits(0)), Unattributed(unattributed)).collect():
        suffix = {"counter": "_total", "info": "_info"}.get(family.type, "")
        counted[family.name + suffix] = len(family.samples)
    assert counted == worst_case_per_rank() | worst_case_per_server()


def test_every_family_of_the_table_is_in_the_worst_case():
    assert {*worst_case_per_rank(), *worst_case_per_server()} == set(FAMILIES)


def test_ten_thousand_different_inputs_leave_the_number_of_series_constant():
    rank = Rank()
    touch_everything(rank.totals)
    before = set(our_samples(text_of(rank)))
    for n in range(10_000):
        duration = 1_000 * n + 7
        rank.totals.add_step(n % 3, duration)
        rank.totals.add_sample(n % 3, n // 3 % 3, n, duration, split(duration))
        rank.totals.add_all_reduces(n % len(AllReducePath), [duration], [17 * n])
    assert set(our_samples(text_of(rank))) == before
