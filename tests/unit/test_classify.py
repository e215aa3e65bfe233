"""Categories from kernel names: how many are right, what wins over a name, and that nothing breaks it."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernel_names import LabelledName, held_out_names, sample_names
from vllm_k25_instrument.analysis.capture import ActivityKind
from vllm_k25_instrument.analysis.classify import NO_RULE, Classifier
from vllm_k25_instrument.markers import range_name
from vllm_k25_instrument.model import HOOKED_CATEGORIES, Category

DECIDING = ("all_reduce", "collective", "moe_experts", "moe_routing", "attention", "kv_cache", "norm")
"""The categories that a conclusion rests on: wrong ones send an engineer the wrong way."""

CUBLAS = "nvjet_tst_64x8_64x16_4x1_v_bz_TNT"


@pytest.fixture(scope="module")
def classifier() -> Classifier:
    return Classifier.load()


def right_share(classifier: Classifier, names: list[LabelledName]) -> float:
    return sum(classifier.classify(n.name).category == n.category for n in names) / len(names)


# --- how many are right ------------------------------------------------------------------------------------


def test_the_published_sample_gets_its_categories(classifier):
    names = sample_names()
    assert right_share(classifier, names) >= 0.95
    assert right_share(classifier, [n for n in names if n.category in DECIDING]) >= 0.99


def test_names_collected_after_the_rules_get_their_categories(classifier):
    names = held_out_names()
    assert len(names) >= 700
    assert right_share(classifier, names) >= 0.99
    assert right_share(classifier, [n for n in names if n.category in DECIDING]) >= 0.99


def test_no_category_of_the_held_out_names_falls_below_ninety_five_percent(classifier):
    names = held_out_names()
    for category in {n.category for n in names}:
        assert right_share(classifier, [n for n in names if n.category == category]) >= 0.95, category


def test_names_cut_as_in_a_key_averages_table_keep_their_category_nearly_always(classifier):
    names = held_out_names()
    cut = [LabelledName(n.name[:52] + "...", n.category) for n in names if len(n.name) > 55]
    deciding = [n for n in cut if n.category in DECIDING]
    assert (
        right_share(classifier, deciding) >= 0.8
    )  # `void cutlass::device_kernel<cutlass::gemm::kernel::GemmUni...` says no more


def test_every_rule_on_names_has_a_name_that_hits_it(classifier):
    hit = Counter(classifier.classify(n.name).rule for n in held_out_names() + EXAMPLES)
    hit.update(verdict.rule for verdict in verdicts_in_context(classifier))
    missing = {rule.id for rule in classifier.rules} - set(hit)
    assert not missing


EXAMPLES = [
    LabelledName("triton_tem_fused_flex_attention_0", "attention"),
    LabelledName("triton_poi_fused_abs_clamp_div_0", "cast_quant"),
    LabelledName("triton_per_fused__softmax_argmax_1", "sampling"),
    LabelledName("triton_poi_fused_cos_sin_2", "rope"),
    LabelledName("void generic_entry<tensorrt_llm::AllReduceParams>(tensorrt_llm::AllReduceParams)", "all_reduce"),
    LabelledName("void ck_tile::kentry<1, ck_tile::TopkSoftmaxKernel<ck_tile::Pipeline> >()", "moe_routing"),
    LabelledName("void generic_entry<vllm::ReshapeAndCache<4> >(int)", "kv_cache"),
    LabelledName("void cutlass::device_kernel<unknown::Operation>(unknown::Params)", "dense_gemm"),
    LabelledName("void at::native::roll_cuda_kernel<float>(float const*, float*)", "memory"),
    LabelledName("void aiter::entry<aiter::RotaryOp>(int)", "rope"),
    LabelledName("void moe_silu_activation<float>(float*)", "activation"),
    LabelledName("void at::native::philox_kernel<float>(float*)", "sampling"),
]
"""Names for rules that no held-out name needs."""


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.name[:40])
def test_an_example_gets_its_category(classifier, example):
    assert classifier.classify(example.name).category == example.category


# --- the forms of a name -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "forms",
    [
        (
            "void vllm::cross_device_reduce_1stage<__nv_bfloat16, 4>(vllm::RankData*, vllm::RankSignals, int)",
            "_ZN4vllm26cross_device_reduce_1stageI13__nv_bfloat16Li4EEEvPNS_8RankDataENS_11RankSignalsEPNS_6SignalEPT_ii",
            "_ZN4vllm26cross_device_reduce_1stageI13__nv_bfloat16Li4EEEvPNS_8RankDataE.kd",
            "void vllm::cross_device_reduce_1stage<__nv_bfloat16,...",
            "cross_device_reduce_1stage",
        ),
        (
            "void at::native::(anonymous namespace)::cunn_SoftMaxForward<4, float, float>(float*, float const*)",
            "void at::native::<unnamed>::cunn_SoftMaxForward<(int)4, float, float, float>(T3 *, const T1 *, int)",
            "void at::native::(anonymous namespace)::cunn_SoftMax...",
            "cunn_SoftMaxForward",
        ),
        (
            "void ck_tile::kentry<2, ck_tile::MoeSortingMultiPhaseKernel_P23<ck_tile::MoeSortingProblemMp<int> > >()",
            "void ck_tile::kentry&lt;2, ck_tile::MoeSortingMultiPhaseKernel_P23&lt;ck_tile::MoeSortingProbl",
            "_ZN7ck_tile6kentryILi2ENS_30MoeSortingMultiPhaseKernel_P23INS_19MoeSortingProblemMpIiEEEEEEvNT_5KargsE",
        ),
        (
            "void deep_gemm::fp8_gemm_kernel<4096u, 7168u, (deep_gemm::GemmType)1>(__nv_bfloat16*)",
            "_ZN9deep_gemm15fp8_gemm_kernelILj4096ELj7168ELNS_8GemmTypeE1EEEvP13__nv_bfloat16",
        ),
    ],
)
def test_all_forms_of_a_name_get_one_category(classifier, forms):
    verdicts = {classifier.classify(form) for form in forms}
    assert len(verdicts) == 1
    assert verdicts.pop().category is not Category.OTHER


def test_a_grouped_and_a_normal_deep_gemm_differ_by_one_template_argument(classifier):
    name = "void deep_gemm::fp8_gemm_kernel<4096u, 7168u, (deep_gemm::GemmType){}>(__nv_bfloat16*)"
    assert classifier.classify(name.format(0)).category is Category.DENSE_GEMM
    assert classifier.classify(name.format(2)).category is Category.MOE_EXPERTS


def test_the_operators_in_an_inductor_name_are_not_what_it_does(classifier):
    assert classifier.classify("triton_poi_fused_constant_pad_nd_moe_forward_1").category is Category.MEMORY
    assert classifier.classify("triton_red_fused_add_all_reduce_mean_mul_pow_rsqrt_0").category is Category.NORM


# --- what it ran inside of ---------------------------------------------------------------------------------

IN_CONTEXT = [
    (CUBLAS, (), "dense_gemm"),
    (CUBLAS, ("aten::mm", "aten::linear"), "dense_gemm"),
    (CUBLAS, ("aten::mm", "moe_shared_experts DeepseekV2MLP L3"), "moe_shared_experts"),
    (CUBLAS, ("moe_experts MarlinExperts L3",), "moe_experts"),
    (CUBLAS, ("mla_attention decode L17",), "mla_attention"),
    (CUBLAS, ("aten::mm", "vllm::moe_forward_shared"), "moe_shared_experts"),
    (CUBLAS, ("aten::mm", "vllm::moe_forward"), "moe_experts"),
    (CUBLAS, ("aten::bmm", "vllm::unified_mla_attention_with_output"), "mla_attention"),
    (CUBLAS, ("{'Module': 'model.layers.3.mlp.gate', 'Inputs': [[64, 7168]]}",), "moe_routing"),
    (CUBLAS, ("{'Module': 'model.layers.3.mlp.shared_experts.down_proj'}",), "moe_shared_experts"),
    ("nccl_renamed_kernel_7", ("all_reduce pynccl 14 KiB L17", "decode step 12 bs=64 graph=full"), "all_reduce"),
    ("k_7f3a", ("nccl:all_reduce",), "all_reduce"),
    ("k_7f3a", ("_C_custom_ar::all_reduce", "vllm::all_reduce"), "all_reduce"),
    ("k_7f3a", ("vllm::all_gather",), "collective"),
    ("k_7f3a", ("_moe_C::topk_softmax", "vllm::moe_forward"), "moe_routing"),
    ("k_7f3a", ("_moe_C::moe_wna16_marlin_gemm",), "moe_experts"),
    ("k_7f3a", ("_C_cache_ops::concat_and_cache_mla",), "kv_cache"),
    ("k_7f3a", ("_C::fused_add_rms_norm",), "norm"),
    ("k_7f3a", ("_C::rotary_embedding",), "rope"),
    ("k_7f3a", ("_C::silu_and_mul",), "activation"),
    ("k_7f3a", ("_C::static_scaled_fp8_quant",), "cast_quant"),
    ("k_7f3a", ("gpu_model_runner: sample",), "sampling"),
    ("k_7f3a", ("gpu_model_runner: preprocess",), "input_preparation"),
    ("k_7f3a", ("_C::marlin_gemm",), "dense_gemm"),
    ("k_7f3a", ("vllm::moe_forward",), "moe_experts"),
    ("k_7f3a", ("{'Module': 'model.layers.3.mlp.shared_experts'}",), "moe_shared_experts"),
    ("k_7f3a", ("vllm::unified_attention_with_output",), "attention"),
    ("k_7f3a", ("vllm::unified_mla_attention_with_output",), "mla_attention"),
    ("k_7f3a", ("aten::sort",), "sampling"),
    ("k_7f3a", ("aten::fill_",), "memory"),
    ("k_7f3a", ("aten::add",), "elementwise"),
    ("direct_copy_kernel_cuda", ("aten::copy_", "aten::_to_copy", "aten::to"), "cast_quant"),
    ("direct_copy_kernel_cuda", ("aten::copy_", "aten::clone", "aten::contiguous"), "memory"),
    ("k_7f3a", ("execute_context_1(12)_generation_3(3)",), "other"),
]


def verdicts_in_context(classifier: Classifier):
    yield from (classifier.classify(name, context) for name, context, _ in IN_CONTEXT)
    yield classifier.classify("Memcpy DtoD", kind=ActivityKind.MEMCPY)


@pytest.mark.parametrize(("name", "context", "category"), IN_CONTEXT)
def test_what_a_kernel_ran_inside_of_says_more_than_its_name(classifier, name, context, category):
    assert classifier.classify(name, context).category == category


def test_the_innermost_of_our_ranges_wins(classifier):
    context = ("moe_routing FusedTopK L3", "moe_experts MarlinExperts L3")
    assert classifier.classify("k_7f3a", context).category is Category.MOE_ROUTING
    assert classifier.classify("k_7f3a", context[::-1]).category is Category.MOE_EXPERTS


@pytest.mark.parametrize("category", HOOKED_CATEGORIES)
def test_every_range_that_we_push_is_understood(classifier, category):
    named = range_name(category, "some_detail", 14_336, 17)
    for name in (CUBLAS, "ncclDevKernel_AllReduce_Sum_bf16_RING_LL", "k_7f3a"):
        assert classifier.classify(name, (named,)).category == category
    assert classifier.classify("Memcpy DtoD", (category.value,), ActivityKind.MEMCPY).category == category


def test_a_specific_name_keeps_its_category_in_a_broad_operator(classifier):
    inside = ("vllm::moe_forward_shared",)
    align = "void vllm::moe::moe_align_block_size_kernel<int>(int const*)"
    assert classifier.classify(align, inside).category is Category.MOE_ROUTING
    assert classifier.classify("ncclDevKernel_AllReduce_Sum_bf16_RING_LL", inside).category is Category.ALL_REDUCE


@pytest.mark.parametrize("kind", [ActivityKind.MEMCPY, ActivityKind.MEMSET])
def test_copies_and_fills_are_memory_whatever_they_are_called(classifier, kind):
    assert classifier.classify("flash_attn", kind=kind).category is Category.MEMORY
    assert classifier.classify("", kind=kind).category is Category.MEMORY


def test_an_opaque_graph_has_no_category(classifier):
    assert classifier.classify("cudaGraphLaunch", kind=ActivityKind.GRAPH) == (Category.OTHER, NO_RULE)


# --- MLA ---------------------------------------------------------------------------------------------------

FLASH = "void flash::flash_fwd_splitkv_kernel<Flash_fwd_kernel_traits<128> >(flash::Flash_fwd_params)"


def test_in_a_capture_with_an_mla_kernel_all_attention_is_mla(classifier):
    mla = classifier.for_names([FLASH, "void vllm::concat_and_cache_mla_kernel<float, float>(float const*)"])
    assert mla.classify(FLASH).category is Category.MLA_ATTENTION
    assert mla.classify("flash_fwd_splitkv_mla_kernel").category is Category.MLA_ATTENTION
    assert mla.classify(CUBLAS).category is Category.DENSE_GEMM
    assert mla.classify("fused_recurrent_kda_fwd_kernel").category is Category.ATTENTION


def test_in_a_capture_without_one_it_is_not(classifier):
    plain = classifier.for_names([FLASH, CUBLAS, "reshape_and_cache_kernel_flash"])
    assert plain.classify(FLASH).category is Category.ATTENTION


# --- robustness --------------------------------------------------------------------------------------------

FRAGMENTS = [
    "_ZN",
    "4vllm",
    "3moe",
    "E",
    "I",
    "Li4E",
    "LNS_",
    "S_",
    "99999",
    "<",
    ">",
    "(",
    ")",
    "::",
    "operator",
    "...",
    "void ",
]


@given(
    name=st.one_of(st.text(), st.lists(st.sampled_from(FRAGMENTS)).map("".join)),
    context=st.lists(st.text(), max_size=3),
    kind=st.sampled_from(ActivityKind),
)
@settings(max_examples=300, deadline=None)
def test_any_text_gets_a_category(name, context, kind):
    classifier = ANY
    verdict = classifier.classify(name, context, kind)
    assert verdict.category in Category
    assert classifier.classify(name, context, kind) is verdict
    explained = classifier.explain(name, context, kind)
    assert explained.verdict == verdict


ANY = Classifier.load()


@pytest.mark.parametrize(
    "unit", ["moe ", "_", "<", "((", "9", "_ZN", "a::", "triton_poi_fused_", "all_reduce", "1 ", "Aa"]
)
def test_a_name_of_a_million_characters_is_cut_before_it_costs_anything(classifier, unit):
    explanation = classifier.explain(unit * (1_000_000 // len(unit)))
    assert explanation.cut
    assert len(explanation.function) + len(explanation.inside) < 40_000


def test_verdicts_are_remembered_without_bound_on_step_names(classifier):
    fresh = Classifier.load()
    verdicts = {
        id(fresh.classify(CUBLAS, (f"execute_context_1({n})_generation_3(3)", "vllm::moe_forward")))
        for n in range(1000)
    }
    assert len(verdicts) == 1
