"""Bytes and operations of what one of eight ranks multiplies for Kimi-K2.5, against arithmetic done by hand."""

from __future__ import annotations

import pytest

from tests.kimi_k25 import kimi_k25_config, llama_config
from vllm_k25_instrument.bench.sizes import expert_layer, projections
from vllm_k25_instrument.limits.errors import LimitsError
from vllm_k25_instrument.limits.floors import Load, Sharding, decode_floors
from vllm_k25_instrument.limits.gpus import find_gpu
from vllm_k25_instrument.limits.model_shape import model_shape

K25 = model_shape(kimi_k25_config(), "k25")
LLAMA = model_shape(llama_config(), "llama")

# hidden 7168; 384 experts of 2048, of which a rank has 2048 / 8 = 256; INT4 with a bf16 scale for 32 weights: 4.5 bits.
# One expert: gate, up and down projection, 3 x 7168 x 256 = 5,505,024 weights, x 4.5 / 8 = 3,096,576 bytes.
ONE_EXPERT_WEIGHTS = 5_505_024
ONE_EXPERT_BYTES = 3_096_576


def test_one_expert_of_one_of_eight_ranks():
    layer = expert_layer(K25, 8)
    assert (layer.experts, layer.active, layer.hidden, layer.intermediate) == (384, 8, 7168, 256)
    assert layer.weights_of_one == ONE_EXPERT_WEIGHTS
    assert layer.nbytes(1) == ONE_EXPERT_BYTES
    assert layer.calls_per_step == 60


def test_what_the_experts_of_a_token_read_and_do():
    layer = expert_layer(K25, 8)
    assert layer.nbytes(8) == 24_772_608  # 8 x 3,096,576
    assert layer.nbytes(384) == 1_189_085_184  # 384 x 3,096,576: the layer
    assert layer.flops(1) == 88_080_384  # 2 x 1 x 8 x 5,505,024
    assert layer.flops(256) == 22_548_578_304  # 256 times that


def test_fewer_experts_may_be_kept():
    layer = expert_layer(K25, 8, experts=4)
    assert (layer.experts, layer.active, layer.flops(1)) == (4, 4, 2 * 4 * ONE_EXPERT_WEIGHTS)
    assert expert_layer(K25, 8, experts=1000).experts == 384


BY_HAND = {
    # name: (heads, inputs, outputs, bytes in bf16, calls per step)
    # q_lora 1536 + kv_lora 512 + rope 64 = 2112 columns; 7168 x 2112 x 2 bytes
    "q_a + kv_a": (1, 7168, 2112, 30_277_632, 61),
    "q_a": (1, 7168, 1536, 22_020_096, 0),
    "kv_a": (1, 7168, 576, 8_257_536, 0),
    # 64 / 8 = 8 heads of nope 128 + rope 64: 1536 columns; 1536 x 1536 x 2
    "q_b": (1, 1536, 1536, 4_718_592, 61),
    # 8 heads of nope 128 + v 128: 2048 columns; 512 x 2048 x 2
    "kv_b": (1, 512, 2048, 2_097_152, 0),
    "kv_b absorbed: W_UK": (8, 128, 512, 1_048_576, 61),  # 8 x 128 x 512 x 2
    "kv_b absorbed: W_UV": (8, 512, 128, 1_048_576, 61),
    "o": (1, 1024, 7168, 14_680_064, 61),  # 8 heads x 128; 1024 x 7168 x 2
    "dense MLP gate_up": (1, 7168, 4608, 66_060_288, 1),  # 2 x 18432 / 8
    "dense MLP down": (1, 2304, 7168, 33_030_144, 1),
    "shared experts gate_up": (1, 7168, 512, 7_340_032, 60),  # 2 x 2048 / 8
    "shared experts down": (1, 256, 7168, 3_670_016, 60),
    "router gate": (1, 7168, 384, 5_505_024, 60),  # on every rank
    "lm_head": (1, 7168, 20_480, 293_601_280, 1),  # 163,840 / 8
}


def test_the_projections_are_those_counted_by_hand():
    found = {p.name: (p.heads, p.inputs, p.outputs, p.nbytes, p.calls_per_step) for p in projections(K25, 8)}
    assert found == BY_HAND


def test_a_projection_does_two_operations_per_row_and_weight():
    by_name = {p.name: p for p in projections(K25, 8)}
    assert by_name["lm_head"].flops(64) == 18_790_481_920  # 2 x 64 x 7168 x 20,480
    assert by_name["kv_b absorbed: W_UK"].flops(1) == 1_048_576  # 2 x 8 x 128 x 512


def test_all_calls_of_a_step_together_read_what_the_floors_count():
    floors = decode_floors(K25, Sharding.of(8), Load(1, 1, 4096), find_gpu("h200"))
    by_category: dict[str, int] = {}
    for p in projections(K25, 8):
        by_category[p.category] = by_category.get(p.category, 0) + p.nbytes * p.calls_per_step
    layer = expert_layer(K25, 8)
    assert by_category["unattributed"] == floors["unattributed"].nbytes
    assert by_category["moe_shared_experts"] == floors["moe_shared_experts"].nbytes
    assert layer.nbytes(8) * layer.calls_per_step == pytest.approx(floors["moe_experts"].nbytes)


def test_a_model_without_experts_or_latent_attention():
    assert expert_layer(LLAMA, 8) is None
    by_name = {p.name: (p.inputs, p.outputs) for p in projections(LLAMA, 8)}
    # 64 / 8 = 8 query heads and 8 / 8 = 1 key and value head of 128: (8 + 1 + 1) x 128
    assert by_name["qkv"] == (8192, 1280)
    assert by_name["o"] == (1024, 8192)
    assert "router gate" not in by_name


@pytest.mark.parametrize(("tp", "what"), [(7, "experts' intermediate"), (128, "whole groups of 32")])
def test_experts_that_cannot_be_cut_like_that_are_refused(tp, what):
    with pytest.raises(LimitsError, match=what):
        expert_layer(K25, tp)


def test_heads_that_cannot_be_cut_like_that_are_refused():
    with pytest.raises(LimitsError, match="attention heads"):
        projections(K25, 3)
