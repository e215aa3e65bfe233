"""GPU work belongs to the step in whose annotation it was launched, wherever on the clock it ran."""

import numpy as np
import pytest

from tests.captures import CaptureBuilder
from vllm_k25_instrument.analysis.step_names import StepKind
from vllm_k25_instrument.analysis.steps import find_steps, innermost
from vllm_k25_instrument.model import Phase
from vllm_k25_instrument.report.caveats import CaveatCode

DECODE = "execute_context_0(0)_generation_4(4)"


def codes(steps):
    return [note.code for note in steps.notes]


def test_one_graph_launch_takes_all_its_kernels_into_its_step_however_late_they_run():
    made = CaptureBuilder()
    for step in range(3):
        made.annotate(DECODE, 1000 * step, 1000 * step + 100)
        # The kernels run while the next step is being annotated.
        kernels = [("k", 1000 * step + 1200 + 100 * n, 90) for n in range(5)]
        made.launch(1000 * step + 50, kernels, graph=True)
    steps = find_steps(made.build())
    assert steps.of_activity.tolist() == [0] * 5 + [1] * 5 + [2] * 5
    assert (steps.kind, len(steps), codes(steps)) == (StepKind.VLLM, 3, [])
    assert not steps.cut_off.any()


def test_what_another_thread_launches_meanwhile_is_outside():
    made = CaptureBuilder()
    made.annotate(DECODE, 0, 100, thread=1)
    made.launch(10, [("mine", 200, 10)], thread=1)
    made.launch(20, [("other", 210, 10)], thread=2)
    made.launch(150, [("later", 220, 10)], thread=1)
    made.work("before the capture", 0, 10)
    assert find_steps(made.build()).of_activity.tolist() == [-1, 0, -1, -1]


def test_an_annotation_is_half_open():
    made = CaptureBuilder()
    made.annotate(DECODE, 0, 100)
    made.annotate(DECODE, 100, 200)
    for at in (0, 99, 100, 199, 200):
        made.launch(at, [("k", 1000 + at, 1)])
    assert find_steps(made.build()).of_activity.tolist() == [0, 0, 1, 1, -1]


def test_phase_and_batch_come_from_the_annotation():
    made = CaptureBuilder()
    for n, name in enumerate(["execute_new_1_cached_0", "execute_new_3_cached_1", "execute_new_0_cached_4"]):
        made.annotate(name, 100 * n, 100 * n + 50)
        made.launch(100 * n, [("k", 100 * n, 10)])
    steps = find_steps(made.build())
    assert [(label.phase, label.requests) for label in steps.labels] == [
        (Phase.PREFILL, 1),
        (Phase.MIXED, 4),
        (Phase.DECODE, 4),
    ]


def test_of_two_kinds_of_marker_the_one_that_covers_more_work_is_taken():
    made = CaptureBuilder()
    for n in range(4):
        made.annotate(f"ProfilerStep#{n}", 100 * n, 100 * n + 100)
        made.annotate(DECODE, 100 * n + 10, 100 * n + 50)
        made.launch(100 * n + 20, [("model", 1000 + n, 1)])
    assert find_steps(made.build()).kind is StepKind.VLLM
    made.launch(60, [("sampler", 2000, 1)])
    assert find_steps(made.build()).kind is StepKind.PROFILER_STEP


def test_a_copy_of_the_annotation_on_a_gpu_row_is_no_step():
    made = CaptureBuilder()
    made.annotate(DECODE, 0, 100, thread=1)
    made.annotate(DECODE, 300, 400, thread=-7)
    made.launch(10, [("k", 300, 100)])
    assert len(find_steps(made.build())) == 1


def test_a_step_range_that_was_never_closed_holds_the_others_and_is_left_out():
    made = CaptureBuilder()
    made.annotate("decode step 7 bs=1", 0, 1000, is_open=True)
    made.launch(10, [("k", 2000, 1)])
    for n in (8, 9):
        made.annotate(f"decode step {n} bs=1", 100 * n - 700, 100 * n - 620)
        made.launch(100 * n - 690, [("k", 2000 + n, 1)])
    steps = find_steps(made.build())
    assert steps.of_activity.tolist() == [0, 1, 2]
    assert steps.cut_off.tolist() == [True, False, False]
    assert codes(steps) == [CaveatCode.STEPS_CUT_OFF]


def test_a_last_step_still_open_at_the_end_is_left_out_but_one_that_ends_last_is_not():
    for left_open in (False, True):
        made = CaptureBuilder()
        for n in range(3):
            made.annotate(DECODE, 100 * n, 100 * n + 50, is_open=left_open and n == 2)
            made.launch(100 * n, [("k", 100 * n, 10)])
        assert find_steps(made.build()).cut_off.tolist() == [False, False, left_open]


def test_edge_steps_whose_launches_have_no_kernels_are_cut_off_and_counted():
    made = CaptureBuilder()
    for n in range(5):
        made.annotate(DECODE, 100 * n, 100 * n + 50)
        made.launch(100 * n, [("k", 100 * n, 10)])
        made.launch(100 * n + 10, [("k", 100 * n + 10, 10)] if 0 < n < 4 else [])
        made.launch(100 * n + 20)  # a copy of no bytes: it never has work, in no step
    steps = find_steps(made.build())
    assert steps.cut_off.tolist() == [True, False, False, False, True]
    (note,) = steps.notes
    assert (note.code, note.count) == (CaveatCode.STEPS_CUT_OFF, 2)
    assert "2 of 5 steps are cut off" in note.message


def test_in_a_truncated_file_the_last_step_with_work_is_cut_off_and_all_that_lack_some():
    made = CaptureBuilder(complete=False)
    for n in range(4):
        made.annotate(DECODE, 100 * n, 100 * n + 50)
        made.launch(100 * n, [("k", 100 * n, 10)] if n < 3 else [])
        made.launch(100 * n + 10, [("k", 100 * n + 10, 10)] if n != 1 else [])
    steps = find_steps(made.build())
    assert steps.cut_off.tolist() == [False, True, False, True]


def test_an_annotated_step_without_work_is_found_and_not_cut_off():
    made = CaptureBuilder()
    made.annotate(DECODE, 0, 50)
    made.launch(10, [("k", 10, 10)])
    made.annotate("execute_new_0_cached_0", 100, 120)
    steps = find_steps(made.build())
    assert len(steps) == 2
    assert not steps.cut_off.any()


def graph_capture(pattern, repeats, *, extra=()):
    """`pattern`: the kernels of each graph of a step. A pause of the host after each step."""
    made = CaptureBuilder()
    at = 0
    for _ in range(repeats):
        for kernels in pattern:
            made.launch(at, [(name, at + 5 + n, 1) for n, name in enumerate(kernels)], graph=True)
            at += 10
        for name in extra:
            made.launch(at, [(name, at, 1)])
            at += 10
        at += 1000
    return made


def test_without_annotations_graph_launches_that_repeat_make_steps():
    steps = find_steps(graph_capture([["a", "b", "c"]], 5, extra=["sample"]).build())
    assert steps.kind is StepKind.GRAPH_LAUNCHES
    assert np.bincount(steps.of_activity).tolist() == [4] * 5
    assert steps.cut_off.tolist() == [False] * 4 + [True]
    assert codes(steps) == [CaveatCode.STEPS_INFERRED, CaveatCode.STEPS_CUT_OFF]
    assert all(label.phase is None and label.requests is None for label in steps.labels)


def test_piecewise_graphs_make_one_step_of_a_whole_pattern():
    steps = find_steps(graph_capture([["first"], ["layer"], ["layer"], ["last"]], 6).build())
    assert np.bincount(steps.of_activity).tolist() == [4] * 6


def test_a_capture_that_begins_inside_a_pattern_begins_its_first_step_after_the_pause():
    made = graph_capture([["first"], ["layer"], ["layer"], ["last"]], 6)
    made._launches = made._launches[2:]
    made._activities = [(*row[:5], row[5] - 2, row[6]) for row in made._activities if row[5] >= 2]
    made._launches = [(*row[:5], row[5] - 2) for row in made._launches]
    steps = find_steps(made.build())
    assert steps.of_activity.tolist() == [-1, -1, *np.repeat(range(5), 4).tolist()]


@pytest.mark.parametrize("kernels", [[["a"], ["b"], ["c"]], [["a"]] * 2])
def test_graph_launches_that_do_not_repeat_often_enough_make_no_step(kernels):
    steps = find_steps(graph_capture(kernels, 1).build())
    assert (len(steps), steps.kind, codes(steps)) == (0, None, [CaveatCode.NO_STEPS])


def test_eager_kernels_alone_make_no_step_and_never_one_step():
    made = CaptureBuilder()
    for n in range(10):
        made.work("k", 100 * n, 10)
    steps = find_steps(made.build())
    assert (len(steps), codes(steps)) == (0, [CaveatCode.NO_STEPS])
    assert (steps.of_activity == -1).all()
    assert "no steps found" in steps.notes[0].message


def test_annotations_that_launch_nothing_are_no_steps():
    made = CaptureBuilder()
    made.annotate(DECODE, 0, 100, thread=5)
    made.launch(10, [("k", 10, 10)], thread=6)
    steps = find_steps(made.build())
    assert len(steps) == 0
    assert "1 steps are annotated, but no GPU work was launched inside them" in steps.notes[0].message


def test_an_empty_capture_has_no_steps():
    assert len(find_steps(CaptureBuilder().build())) == 0


def test_the_innermost_range_is_found_at_any_depth():
    start = np.array([0, 10, 20, 50, 90], np.int64)
    end = np.array([100, 40, 30, 60, 95], np.int64)
    instants = np.array([0, 10, 25, 30, 39, 40, 55, 60, 94, 95, 100], np.int64)
    assert innermost(start, end, instants).tolist() == [0, 1, 2, 1, 1, 0, 3, 0, 4, 0, -1]
