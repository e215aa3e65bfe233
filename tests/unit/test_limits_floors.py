"""Floors: Kimi-K2.5's by hand, and the laws that hold for every model.

Kimi-K2.5 on 8 ranks, INT4 experts in groups of 32, everything else bf16. One rank, per layer:

    one expert               3 x 7168 x 2048 / 8         =  5,505,024 weights x 4.5 / 8 = 3,096,576 bytes
    shared expert            the same weights in bf16                                   = 11,010,048 bytes
    router gate              384 x 7168, on every rank   =  2,752,512 weights           =  5,505,024 bytes
    down-projections         7168 x (1536 + 512 + 64)    = 15,138,816, on every rank
    query up-projection      1536 x 64 x 192 / 8         =  2,359,296
    absorbed key and value   512 x 64 x (128 + 128) / 8  =  1,048,576
    output projection        64 x 128 x 7168 / 8         =  7,340,032
                                                     sum = 25,886,720 weights           = 51,773,440 bytes

and once:

    dense MLP of layer 0     3 x 7168 x 18432 / 8        = 49,545,216 weights           = 99,090,432 bytes
    logits                   163,840 x 7168 / 8          = 146,800,640 weights          = 293,601,280 bytes

So what no hook covers is 61 x 51,773,440 + 60 x 5,505,024 + 99,090,432 + 293,601,280 = 3,881,172,992 bytes.
"""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.kimi_k25 import kimi_k25_config, llama_config
from vllm_k25_instrument.limits.errors import LimitsError
from vllm_k25_instrument.limits.floors import (
    Bound,
    Load,
    Sharding,
    all_reduce_floor_ns,
    all_reduces_per_step,
    decode_floors,
    decode_parts,
    expected_active_experts,
    mean_floors,
    ring_ns,
    weight_bytes,
)
from vllm_k25_instrument.limits.gpus import Link, find_gpu, known_gpus
from vllm_k25_instrument.limits.model_shape import Math, model_shape

K25 = model_shape(kimi_k25_config(), "k25")
LLAMA = model_shape(llama_config(), "llama")
RTX = find_gpu("rtx-pro-6000")  # 1792 GB/s, 503.8 TFLOP/s
PCIE = RTX.link("auto", 8)  # 63.015 GB/s each way, 1 us a hop
TP8 = Sharding.of(8)


def floors(batch, context=4096, *, shape=K25, gpu=RTX, link=PCIE, sharding=TP8):
    return decode_floors(shape, sharding, Load(batch, batch, context), gpu, link)


def test_one_token_reads_eight_experts_in_each_of_60_layers_in_829_us():
    experts = floors(1)["moe_experts"]
    assert experts.nbytes == pytest.approx(60 * 8 * 3_096_576) == pytest.approx(1_486_356_480)
    assert experts.ns == pytest.approx(1_486_356_480 / 1792e9 * 1e9)
    assert experts.ns / 1e3 == pytest.approx(829.4, abs=0.1)
    assert experts.bound is Bound.MEMORY


def test_64_tokens_read_284_of_384_experts_and_256_read_nearly_all():
    # (47/48)^64 = exp(-64 x 0.0210534) = 0.25991; (47/48)^256 = 0.25991^4 = 0.0045628
    assert expected_active_experts(384, 8, 64) == pytest.approx(384 * (1 - 0.25991), abs=0.01)
    assert expected_active_experts(384, 8, 256) == pytest.approx(384 * (1 - 0.0045628), abs=0.01)
    assert floors(64)["moe_experts"].ns / 1e6 == pytest.approx(60 * 284.194 * 3_096_576 / 1792e9 * 1e3, rel=1e-5)
    assert floors(64)["moe_experts"].ns / 1e6 == pytest.approx(29.465, abs=0.001)
    assert floors(256)["moe_experts"].ns / 1e6 == pytest.approx(39.631, abs=0.001)


def test_256_tokens_do_1_35_trillion_operations_in_the_experts_which_take_less_than_reading_them():
    experts = floors(256)["moe_experts"]
    assert experts.flops == 60 * 256 * 8 * 2 * 5_505_024
    assert experts.flops / 503.8e12 * 1e9 < experts.ns


def test_the_shared_expert_is_read_once_a_layer_whatever_the_batch():
    for batch in (1, 64, 256):
        shared = floors(batch)["moe_shared_experts"]
        assert shared.nbytes == 60 * 11_010_048 == 660_602_880
        assert shared.ns / 1e3 == pytest.approx(368.6, abs=0.1)


def test_what_no_hook_covers_has_a_floor_of_2166_us():
    rest = floors(1)["unattributed"]
    by_hand = 61 * 51_773_440 + 60 * 5_505_024 + 99_090_432 + 293_601_280
    assert by_hand == 3_881_172_992
    assert rest.nbytes == by_hand
    assert rest.ns / 1e3 == pytest.approx(2165.8, abs=0.1)
    assert set(rest.parts) == {"router gate", "projections around attention", "dense MLP", "logits"}


def test_every_rank_reads_the_whole_latent_cache():
    # 4096 tokens x 70,272 bytes a request; more ranks make it no less
    attention = floors(64)["mla_attention"]
    assert attention.nbytes == 64 * 4096 * 70_272 == 18_421_383_168
    assert attention.ns / 1e6 == pytest.approx(10.280, abs=0.001)
    assert floors(64, sharding=Sharding.of(4))["mla_attention"].nbytes == attention.nbytes


def test_attention_multiplies_each_query_head_with_the_latent_twice_and_the_rotary_part_once():
    # 61 layers x 64 tokens x 4096 positions x 8 heads x 2 x (512 + 64 + 512)
    assert floors(64)["mla_attention"].flops == 61 * 64 * 4096 * 8 * 2 * 1088


def test_drafts_read_the_cache_once_per_request_but_multiply_per_token():
    plain = decode_floors(K25, TP8, Load(8, 8, 4096), RTX)["mla_attention"]
    drafts = decode_floors(K25, TP8, Load(8, 32, 4096), RTX)["mla_attention"]
    assert drafts.nbytes == plain.nbytes
    assert drafts.flops == 4 * plain.flops


def test_a_step_has_123_all_reduces_of_which_one_takes_2_4_us_at_one_token():
    # in two shots: 2 x 7/8 x 14,336 bytes / 63.015 GB/s = 0.398 us, and two hops
    assert all_reduces_per_step(K25) == 2 * 61 + 1 == 123
    assert all_reduce_floor_ns(14_336, 8, PCIE) == pytest.approx(398.13 + 2000, abs=0.01)
    reduces = floors(1)["all_reduce"]
    assert reduces.ns / 1e3 == pytest.approx(123 * 2.39813, abs=0.1)
    assert reduces.nbytes == 123 * 14_336
    assert reduces.bound is Bound.LINK


def test_a_ring_of_eight_needs_fourteen_hops_for_the_same_bytes():
    assert ring_ns(14_336, 8, PCIE) == pytest.approx(398.13 + 14_000, abs=0.01)


def test_a_small_message_is_faster_in_one_shot():
    # 1,024 bytes: 7 x 1,024 / 63.015 GB/s = 0.114 us and one hop, instead of 0.028 us and two
    assert all_reduce_floor_ns(1024, 8, PCIE) == pytest.approx(113.75 + 1000, abs=0.01)


def test_a_switch_that_adds_up_moves_nine_eighths_instead_of_fourteen_eighths():
    switch = find_gpu("h100-sxm").link("nvlink", 8)
    assert all_reduce_floor_ns(1e9, 8, switch) == pytest.approx(9 / 8 * 1e9 / 450e9 * 1e9 + 2 * 600)
    plain = find_gpu("a100-sxm").link("nvlink", 8)
    assert all_reduce_floor_ns(1e9, 8, plain) == pytest.approx(14 / 8 * 1e9 / 300e9 * 1e9 + 2 * 600)


def test_the_logits_of_256_tokens_take_1_2_ms_over_pcie():
    # 256 x 163,840 x 2 bytes x 7/8 = 73,400,320 bytes
    gathered = floors(256)["collective"]
    assert gathered.nbytes == 73_400_320
    assert gathered.ns / 1e3 == pytest.approx(73_400_320 / 63.015e9 * 1e6 + 1, abs=0.1)


def test_the_weights_of_a_rank_are_75_9_gigabytes():
    # 60 x 384 experts + shared experts + what no hook covers
    assert weight_bytes(K25, TP8) == pytest.approx(60 * 384 * 3_096_576 + 660_602_880 + 3_881_172_992)
    assert weight_bytes(K25, TP8) / 1e9 == pytest.approx(75.887, abs=0.001)


def test_one_rank_alone_has_no_collectives():
    alone = floors(1, sharding=Sharding.of(1))
    assert "all_reduce" not in alone
    assert "collective" not in alone
    assert all_reduce_floor_ns(14_336, 1, PCIE) == ring_ns(14_336, 1, PCIE) == 0


def test_a_dense_model_with_grouped_queries_reads_its_share_of_keys_and_values():
    llama = floors(16, 1000, shape=LLAMA)
    # one of the 8 key-value heads is on each of 8 ranks: 80 layers x 2 x 1 x 128 x 2 bytes a token
    assert llama["attention"].nbytes == 16 * 1000 * 40_960
    assert "moe_experts" not in llama
    # per layer and rank: q and o 2 x 8192 x 8192 / 8, k and v 2 x 8192 x 128, MLP 3 x 8192 x 28672 / 8
    layer = 2 * 8192 * 8192 // 8 + 2 * 8192 * 128 + 3 * 8192 * 28672 // 8
    assert llama["unattributed"].nbytes == 2 * (80 * layer + 128_256 * 8192 // 8)


def test_more_ranks_than_key_value_heads_each_keep_one():
    assert floors(16, 1000, shape=LLAMA, sharding=Sharding.of(16))["attention"].nbytes == 16 * 1000 * 40_960


def test_experts_dealt_out_over_data_parallel_ranks_are_fewer_on_each():
    assert Sharding.of(8, dp=2) == Sharding(tp=8, experts=16)
    both = floors(64, sharding=Sharding.of(8, dp=2))
    assert both["moe_experts"].nbytes == pytest.approx(floors(64)["moe_experts"].nbytes / 2)
    assert both["moe_shared_experts"].nbytes == floors(64)["moe_shared_experts"].nbytes


@pytest.mark.parametrize("tp", [0, -1])
def test_a_group_of_nobody_is_refused(tp):
    with pytest.raises(LimitsError, match="does no work"):
        Sharding.of(tp)


def test_the_mean_over_steps_is_of_their_floors_not_of_their_batches():
    shares = {Load(1, 1, 1000): 0.5, Load(255, 255, 1000): 0.5}
    mean = mean_floors(shares, K25, TP8, RTX, PCIE)["moe_experts"].ns
    each = [floors(batch, 1000)["moe_experts"].ns for batch in (1, 255)]
    assert mean == pytest.approx(sum(each) / 2)
    assert mean < floors(128, 1000)["moe_experts"].ns  # concave


batches = st.integers(1, 1000)
contexts = st.integers(0, 200_000)
ranks = st.sampled_from([1, 2, 4, 8, 16])
gpus = st.sampled_from(sorted(known_gpus()))
shapes = st.sampled_from([K25, LLAMA])


@given(shapes, batches, contexts, ranks, gpus)
def test_a_floor_is_the_larger_of_bytes_over_bandwidth_and_operations_over_peak(shape, batch, context, tp, key):
    gpu = known_gpus()[key]
    for part in decode_parts(shape, Sharding.of(tp), Load(batch, batch, context), None):
        ns, bound = part.floor(gpu)
        memory = part.nbytes / gpu.memory_bytes_per_second * 1e9
        compute = part.flops / gpu.peak(Math.BF16) * 1e9
        assert ns == max(memory, compute)
        assert bound is (Bound.MEMORY if memory >= compute else Bound.COMPUTE)


@given(shapes, batches, contexts, ranks, st.integers(1, 50))
def test_more_requests_or_more_context_never_lower_a_floor(shape, batch, context, tp, more):
    sharding = Sharding.of(tp)
    before = floors(batch, context, shape=shape, sharding=sharding)
    for after in (
        floors(batch + more, context, shape=shape, sharding=sharding),
        floors(batch, context + more, shape=shape, sharding=sharding),
    ):
        assert all(after[name].ns >= floor.ns * (1 - 1e-12) for name, floor in before.items())


@given(batches, st.integers(1, 512), st.data())
def test_distinct_experts_are_at_least_those_of_one_token_and_at_most_all(tokens, experts, data):
    active = data.draw(st.integers(1, experts))
    distinct = expected_active_experts(experts, active, tokens)
    assert active * (1 - 1e-9) <= distinct <= min(experts, active * tokens) * (1 + 1e-9)


@given(batches)
def test_twice_the_tokens_need_less_than_twice_the_experts(tokens):
    assert expected_active_experts(384, 8, 2 * tokens) < 2 * expected_active_experts(384, 8, tokens)


@given(st.integers(1, 1 << 30), st.integers(2, 64), st.floats(1e9, 1e12), st.floats(0, 1e5))
def test_no_all_reduce_floor_is_above_a_ring_and_none_is_below_its_bytes(nbytes, n, bandwidth, hop_ns):
    link = Link("any", bandwidth, hop_ns)
    floor = all_reduce_floor_ns(nbytes, n, link)
    assert floor <= ring_ns(nbytes, n, link) * (1 + 1e-9)
    assert floor >= 2 * (n - 1) / n * nbytes / bandwidth * 1e9 * (1 - 1e-9)
    assert floor >= hop_ns


@given(batches, contexts)
def test_a_rank_of_eight_reads_at_least_an_eighth_of_what_one_alone_would(batch, context):
    alone, one_of_eight = (
        sum(part.nbytes for part in decode_parts(K25, Sharding.of(tp), Load(batch, batch, context), None))
        for tp in (1, 8)
    )
    assert alone / 8 <= one_of_eight <= alone
