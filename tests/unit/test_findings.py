"""A capture reduced to its findings: everything adds up, per step and in all, and nothing is made up."""

import random
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.captures import CaptureBuilder
from vllm_k25_instrument.analysis.capture import ActivityKind
from vllm_k25_instrument.analysis.classify import Classifier
from vllm_k25_instrument.analysis.findings import StepRange, reduce_capture
from vllm_k25_instrument.model import Category, GraphMode, Phase
from vllm_k25_instrument.report.caveats import CaveatCode
from vllm_k25_instrument.report.gpu import GpuTotals

DECODE = "execute_context_0(0)_generation_4(4)"
ALL_REDUCE = "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
MARLIN = "void marlin_moe_wna16::Marlin<1l, 2l, 128, 1, 8, 4, true, 4, 2, false>(int4 const*)"
GEMM = "ampere_bf16_s16816gemm_bf16_64x64_sliced1x2_ldg8_f2f_stages_64x5_tn"
NAMES = (ALL_REDUCE, MARLIN, GEMM, "some_kernel_that_no_rule_names")


@cache
def loaded():
    return Classifier.load()


@pytest.fixture
def classifier():
    return loaded()


def random_capture(seed):
    """Steps of graph and eager launches on three streams, with work of neighbouring steps mixed in time."""
    rng = random.Random(seed)
    made = CaptureBuilder(clock_base_ns=1_767_225_600_000_000_000)
    for step in range(rng.randrange(1, 6)):
        at = step * 1000
        made.annotate(DECODE, at, at + 300)
        for _ in range(rng.randrange(1, 4)):
            kinds = [ActivityKind.KERNEL] * 5 + [ActivityKind.MEMCPY, ActivityKind.MEMSET]
            work = [
                (
                    rng.choice(NAMES),
                    at + rng.randrange(200, 2500),
                    rng.randrange(0, 200),
                    rng.randrange(3),
                    rng.choice(kinds),
                )
                for _ in range(rng.randrange(1, 12))
            ]
            made.launch(at + rng.randrange(0, 400), work, graph=rng.random() < 0.5)
    return made.build()


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 10**9))
def test_everything_adds_up_to_the_nanosecond_per_step_and_in_all(seed):
    capture = random_capture(seed)
    findings = reduce_capture(capture, loaded()).findings
    totals = findings.totals
    starts, durations = capture.activities.start_ns, capture.activities.duration_ns
    assert totals.sum_ns == durations.sum()
    assert totals.span_ns == (starts + durations).max() - starts.min()
    exposed = sum(total.exposed_ns for total in totals.by_category.values())
    assert exposed + totals.idle_ns == totals.span_ns
    assert totals.idle_ns >= 0
    assert sum(total.sum_ns for total in totals.by_category.values()) == totals.sum_ns
    assert sum(total.count for total in totals.by_category.values()) == len(capture.activities)
    for step in findings.steps:
        assert sum(total.sum_ns for total in step.categories.values()) == step.sum_ns
        digest = step.digest()
        assert digest.unattributed_ns == step.span_ns - step.busy_ns >= 0
    in_steps = sum(step.sum_ns for step in findings.steps)
    outside = sum(total.sum_ns for total in findings.outside.values())
    assert in_steps + outside == totals.sum_ns
    assert sum(step.kernels for step in findings.steps) == totals.kernels_in_steps
    assert sum(kernel.sum_ns for kernel in findings.kernels) == totals.kernel_ns


def test_two_streams_that_overlap_are_told_by_sum_busy_and_hidden_time(classifier):
    made = CaptureBuilder()
    made.annotate(DECODE, 0, 10)
    made.launch(1, [(ALL_REDUCE, 1000, 20_000, 20), (MARLIN, 6000, 10_000, 7)])
    findings = reduce_capture(made.build(), classifier).findings
    (step,) = findings.steps
    assert (step.sum_ns, step.busy_ns, step.span_ns) == (30_000, 20_000, 20_000)
    assert step.categories["all_reduce"].exposed_ns == 10_000
    assert step.categories["moe_experts"].exposed_ns == 10_000
    assert step.all_reduce_ns == (20_000,)
    assert findings.totals.same_stream_overlap_ns == 0
    assert findings.streams == 2


def test_neighbours_of_one_stream_that_overlap_are_told_apart_from_streams(classifier):
    made = CaptureBuilder()
    made.work("a", 0, 100, 7)
    made.work("b", 90, 100, 7)
    made.work("c", 0, 50, 8)
    totals = reduce_capture(made.build(), classifier).findings.totals
    assert (totals.overlap_ns, totals.same_stream_overlap_ns) == (60, 10)


def test_steps_of_one_capture_may_overlap_in_time_and_do_not_hide_each_other(classifier):
    made = CaptureBuilder()
    for n in range(2):
        made.annotate(DECODE, 100 * n, 100 * n + 50)
        made.launch(100 * n, [(MARLIN, 1000 + 50 * n, 100, n)])
    findings = reduce_capture(made.build(), classifier).findings
    assert [step.busy_ns for step in findings.steps] == [100, 100]
    assert findings.totals.busy_ns == 150


def test_context_wins_over_a_name_that_cannot_say(classifier):
    made = CaptureBuilder()
    attention = made.annotate("mla_attention decode L17", 0, 100)
    made.work(GEMM, 0, 10, annotation=attention)
    made.work(GEMM, 20, 10)
    totals = reduce_capture(made.build(), classifier).findings.totals
    assert {name: total.count for name, total in totals.by_category.items()} == {"mla_attention": 1, "dense_gemm": 1}


def test_opaque_graphs_count_as_busy_and_leave_no_categories(classifier):
    made = CaptureBuilder()
    made.annotate(DECODE, 0, 10)
    made.launch(1, [("graph", 1000, 8000, 7, ActivityKind.GRAPH)], graph=True)
    made.work(GEMM, 500, 100)
    findings = reduce_capture(made.build(), classifier).findings
    assert (findings.totals.graphs, findings.totals.graph_ns, findings.totals.busy_ns) == (1, 8000, 8100)
    assert findings.totals.by_category is None
    assert findings.totals.to_json_dict()["by_category"] == {}
    assert findings.steps[0].categories == {}


@pytest.mark.parametrize(
    ("launches", "mode"),
    [
        ([(False, 5), (False, 1)], GraphMode.NONE),
        ([(True, 5), (False, 3)], GraphMode.FULL),
        ([(True, 2), (False, 2), (True, 2), (False, 2), (True, 2)], GraphMode.PIECEWISE),
        ([(True, 50), (True, 2)], GraphMode.FULL),
    ],
)
def test_the_graph_mode_is_read_off_the_launches(classifier, launches, mode):
    made = CaptureBuilder()
    made.annotate(DECODE, 0, 1000)
    for n, (graph, kernels) in enumerate(launches):
        made.launch(n, [("k", 100 * n + k, 1) for k in range(kernels)], graph=graph)
    assert reduce_capture(made.build(), classifier).findings.steps[0].graph_mode is mode


def test_what_the_marker_says_of_the_graph_wins_over_the_launches(classifier):
    made = CaptureBuilder()
    made.annotate("decode step 1234 bs=64 graph=piecewise", 0, 1000)
    made.launch(1, [("k", 10, 1)], graph=True)
    (step,) = reduce_capture(made.build(), classifier).findings.steps
    assert (step.graph_mode, step.number, step.phase, step.group.batch) == (
        GraphMode.PIECEWISE,
        1234,
        Phase.DECODE,
        "64",
    )


def test_a_step_whose_marker_says_nothing_is_of_unknown_phase_and_batch(classifier):
    made = CaptureBuilder()
    for n in range(2):
        made.annotate(f"ProfilerStep#{n}", 100 * n, 100 * n + 100)
        made.launch(100 * n, [("k", 100 * n, 10)])
    (step, _) = reduce_capture(made.build(), classifier).findings.steps
    assert tuple(step.group) == ("unknown", "unknown", "none")


def test_only_the_steps_asked_for_are_there(classifier):
    made = CaptureBuilder()
    for n in range(5):
        made.annotate(DECODE, 100 * n, 100 * n + 50)
        made.launch(100 * n, [(MARLIN, 100 * n, 10 + n)], cost=3)
        made.launch(100 * n + 70, [(GEMM, 100 * n + 70, 10)])
    findings = reduce_capture(made.build(), classifier, StepRange(2, 3)).findings
    assert [step.place for step in findings.steps] == [2, 3]
    assert (findings.totals.kernels, findings.totals.kernels_in_steps, findings.totals.launches) == (2, 2, 2)
    assert findings.totals.kernel_ns == 11 + 12
    assert findings.totals.launch_ns == 6
    assert reduce_capture(made.build(), classifier, StepRange(9, 9)).findings.steps == ()


def test_the_time_from_step_to_step_is_from_first_work_to_first_work(classifier):
    made = CaptureBuilder()
    for n in range(3):
        made.annotate(DECODE, 100 * n, 100 * n + 50)
        made.launch(100 * n, [("k", 1000 + 120 * n, 100)])
    steps = reduce_capture(made.build(), classifier).findings.steps
    assert [step.period_ns for step in steps] == [120, 120, None]


def test_an_empty_step_is_counted_and_not_averaged(classifier):
    made = CaptureBuilder()
    made.annotate(DECODE, 0, 50)
    made.launch(10, [("k", 10, 10)])
    made.annotate("execute_new_0_cached_0", 100, 120)
    reduced = reduce_capture(made.build(), classifier)
    counts = reduced.findings.step_counts
    assert (counts.found, counts.averaged, counts.without_work) == (2, 1, 1)
    assert reduced.notes == ()


def test_cut_off_steps_are_counted_and_not_averaged(classifier):
    made = CaptureBuilder(complete=False)
    for n in range(3):
        made.annotate(DECODE, 100 * n, 100 * n + 50)
        made.launch(100 * n, [("k", 100 * n, 10)])
    reduced = reduce_capture(made.build(), classifier)
    assert [step.averaged for step in reduced.findings.steps] == [True, True, False]
    assert [note.code for note in reduced.notes] == [CaveatCode.STEPS_CUT_OFF]


def test_an_empty_capture_has_no_figures_rather_than_zeros(classifier):
    findings = reduce_capture(CaptureBuilder().build(), classifier).findings
    assert not findings.totals.has_work
    assert findings.steps == ()
    assert findings.timeline is None


def test_the_timeline_is_of_the_median_decode_step_and_covers_its_work(classifier):
    made = CaptureBuilder()
    for n, length in enumerate((500, 100, 300)):
        made.annotate(DECODE, 1000 * n, 1000 * n + 50)
        kernels = [(MARLIN, 1000 * n, length, 7), (ALL_REDUCE, 1000 * n + 10, length - 10, 20)]
        made.launch(1000 * n, kernels)
    timeline = reduce_capture(made.build(), classifier).findings.timeline
    assert (timeline.place, timeline.span_ns) == (3, 300)
    assert [
        (lane, [(bar.start_ns, bar.duration_ns, bar.category) for bar in bars]) for lane, bars in timeline.lanes
    ] == [
        ("stream 7", [(0, 300, "moe_experts")]),
        ("stream 20", [(10, 290, "all_reduce")]),
    ]


def test_totals_of_ranks_add_up_and_what_one_cannot_tell_the_sum_cannot():
    one = GpuTotals(kernels=2, kernel_ns=10, span_ns=10, busy_ns=8, kernels_in_steps=1)
    assert (one + one).idle_ns == 4
    assert (one + GpuTotals(kernels=1)).span_ns is None
    assert (one + GpuTotals(by_category=None)).by_category is None


def test_every_kernel_has_a_category_of_the_closed_set(classifier):
    made = CaptureBuilder()
    for n in range(50):
        made.work(f"weird kernel {n} \udc80 <<>> (", n, 1)
    findings = reduce_capture(made.build(), classifier).findings
    assert {kernel.category for kernel in findings.kernels} <= {str(category) for category in Category}
    assert np.isclose(sum(kernel.count for kernel in findings.kernels), 50)
