"""What the names of step annotations say, as each engine writes them."""

import pytest

from vllm_k25_instrument.analysis.step_names import StepKind, StepLabel, parse_step_name
from vllm_k25_instrument.markers import step_name
from vllm_k25_instrument.model import GraphMode, Phase

DECODE, PREFILL, MIXED = Phase.DECODE, Phase.PREFILL, Phase.MIXED


@pytest.mark.parametrize(
    ("name", "phase", "requests", "tokens"),
    [
        ("execute_new_0_cached_4", DECODE, 4, None),
        ("execute_new_1_cached_0", PREFILL, 1, None),
        ("execute_new_3_cached_1", MIXED, 4, None),
        ("execute_context_0(0)_generation_64(64)", DECODE, 64, 64),
        ("execute_context_2(512)_generation_0(0)", PREFILL, 2, 512),
        ("execute_context_1(100)_generation_7(7)", MIXED, 8, 107),
        (
            "execute_64_context_0(sq0sk0sqsq0sqsk0)_generation_64(sq64sk81920sqsq64sqsk81920)",
            DECODE,
            64,
            64,
        ),
        (
            "execute_519_context_2(sq512sk512sqsq131072sqsk131072)_generation_7(sq7sk700sqsq7sqsk700)",
            MIXED,
            9,
            519,
        ),
    ],
)
def test_vllm_old_new_and_detailed(name, phase, requests, tokens):
    assert parse_step_name(name) == StepLabel(StepKind.VLLM, phase=phase, requests=requests, tokens=tokens)


def test_a_vllm_step_with_nothing_scheduled_says_that_it_is_idle():
    assert parse_step_name("execute_new_0_cached_0").idle
    assert parse_step_name("execute_context_0(0)_generation_0(0)").idle
    assert not parse_step_name("execute_new_0_cached_1").idle


@pytest.mark.parametrize("number", [None, 0, 1234])
@pytest.mark.parametrize("graph", ["", *GraphMode])
@pytest.mark.parametrize("phase", list(Phase))
def test_our_own_steps_come_back_as_they_were_written(phase, number, graph):
    label = parse_step_name(step_name(phase, number, 64, graph))
    assert label == StepLabel(
        StepKind.K25, phase=phase, requests=64, number=number, graph_mode=GraphMode(graph) if graph else None
    )


@pytest.mark.parametrize(
    ("name", "phase", "requests", "tokens"),
    [
        ("step[DECODE bs=64]", DECODE, 64, 64),
        ("step[decode bs=64]", DECODE, 64, 64),
        ("step[DECODE bs=64 g_sq=64 g_sqsq=64 g_sqsk=100032 g_sk=100032]", DECODE, 64, 64),
        ("step[EXTEND bs=2 toks=2048]", PREFILL, 2, 2048),
        ("step[prefill bs=1 toks=1025 c_sqsq=1050625]", PREFILL, 1, 1025),
        ("step[mixed bs=5 ext=100 dec=4]", MIXED, 5, 104),
        ("step[MIXED bs=66 c=2 g=64 c_sq=2048]", MIXED, 66, None),
        ("step[TARGET_VERIFY bs=8]", DECODE, 8, None),
        ("step[VERIFY bs=8]", DECODE, 8, None),
        ("step[idle]", None, 0, None),
        ("step[SOMETHING_NEW bs=3]", None, 3, None),
        ("scheduler.run_batch", None, None, None),
    ],
)
def test_sglang_steps(name, phase, requests, tokens):
    assert parse_step_name(name) == StepLabel(StepKind.SGLANG, phase=phase, requests=requests, tokens=tokens)


def test_a_draft_models_forward_is_no_step_of_its_own():
    assert parse_step_name("step[DRAFT bs=8]") is None
    assert parse_step_name("step[DRAFT_EXTEND_V2 bs=1]") is None


def test_profiler_steps_have_a_number_and_nothing_else():
    assert parse_step_name("ProfilerStep#12") == StepLabel(StepKind.PROFILER_STEP, number=12)


@pytest.mark.parametrize(
    "name",
    [
        "",
        "aten::mm",
        "execute",
        "execute_new_x_cached_1",
        "my execute_new_0_cached_4",
        "all_reduce pynccl 14 KiB L17",
        "step",
        "ProfilerStep*",
        "execute_context_0(0)_generation_" + "9" * 5000,
        "step[" + "a=1 " * 5000,
    ],
)
def test_other_names_mark_no_step(name):
    assert parse_step_name(name) is None
