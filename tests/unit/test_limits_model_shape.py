"""A model's dimensions are read from its config.json, and what is missing is named."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.kimi_k25 import kimi_k25_config, llama_config
from vllm_k25_instrument.limits.errors import LimitsError
from vllm_k25_instrument.limits.model_shape import Math, ModelShape, Precision, model_shape, read_model_shape


def shape(config=None, **options):
    return model_shape(kimi_k25_config() if config is None else config, "config.json", **options)


def test_kimi_k25_is_read_from_its_text_config():
    k25 = shape()
    assert (k25.layers, k25.dense_layers, k25.moe_layers) == (61, 1, 60)
    assert (k25.hidden, k25.vocabulary, k25.heads) == (7168, 163_840, 64)
    assert (k25.q_lora_rank, k25.kv_lora_rank) == (1536, 512)
    assert (k25.rope_head_dim, k25.nope_head_dim, k25.v_head_dim) == (64, 128, 128)
    assert (k25.experts, k25.active_experts, k25.shared_experts, k25.expert_intermediate) == (384, 8, 1, 2048)
    assert k25.dense_intermediate == 18432
    assert k25.is_mla
    assert k25.model_type == "kimi_k25"


def test_only_the_routed_experts_of_kimi_k25_are_int4_with_a_bf16_scale_per_32_weights():
    k25 = shape()
    assert k25.expert == Precision(4, 32, 16)
    assert k25.expert.bits_per_weight == 4.5  # 4 + 16 / 32
    assert k25.expert.math is Math.BF16  # W4A16: widened before it is multiplied
    assert k25.attention == k25.dense == k25.shared == k25.head == Precision(16)


def test_an_int4_expert_of_kimi_k25_has_24_8_megabytes():
    k25 = shape()
    assert k25.expert_weights == 3 * 7168 * 2048 == 44_040_192
    assert k25.expert.nbytes(k25.expert_weights) == 44_040_192 * 4.5 / 8 == 24_772_608


def test_a_token_of_kimi_k25_takes_70272_bytes_of_cache_and_half_of_that_in_fp8():
    # 61 layers x (512 latent + 64 rotary) values, the same for all heads
    assert shape().kv_bytes_per_token == 61 * 576 * 2 == 70_272
    assert shape(kv_bits=8).kv_bytes_per_token == 35_136


def test_the_tiny_models_own_config_is_read_as_kimi_k25_is(tmp_path):
    from vllm_k25_instrument.demo.tiny_model import TinyShape, _config

    ids = dict.fromkeys(("[BOS]", "[EOS]", "[PAD]", "<|media_pad|>"), 0)
    for arch in ("k25", "text"):
        (tmp_path / "config.json").write_text(json.dumps(_config(arch, TinyShape(), ids)))
        tiny = read_model_shape(tmp_path)
        assert (tiny.layers, tiny.dense_layers, tiny.experts, tiny.active_experts) == (4, 1, 16, 2)
        assert tiny.expert == Precision(4, 32, 16)
        assert tiny.attention == Precision(16)


def test_deepseek_v3_in_fp8_multiplies_in_fp8_with_a_scale_per_128_by_128_block():
    v3 = shape(kimi_k25_config(quantization_config={"quant_method": "fp8", "weight_block_size": [128, 128]}))
    assert v3.expert == v3.attention == Precision(8, 16384, 32, Math.FP8)
    assert v3.head == Precision(16)


def test_a_dense_model_with_grouped_queries_has_neither_experts_nor_latent_cache():
    llama = shape(llama_config())
    assert (llama.layers, llama.dense_layers, llama.moe_layers, llama.experts) == (80, 80, 0, 0)
    assert not llama.is_mla
    # 80 layers x keys and values x 8 heads x 128 x 2 bytes
    assert llama.kv_bytes_per_token == 80 * 2 * 8 * 128 * 2 == 327_680


def test_every_other_layer_may_be_dense():
    assert shape(kimi_k25_config(num_hidden_layers=8, moe_layer_freq=2)).dense_layers == 5  # 0, and 1 3 5 7


@pytest.mark.parametrize(
    "key",
    [
        *("num_hidden_layers", "hidden_size", "vocab_size", "num_attention_heads", "qk_rope_head_dim"),
        *("v_head_dim", "num_experts_per_tok", "intermediate_size"),
    ],
)
def test_a_missing_key_is_named_with_the_file(key):
    with pytest.raises(LimitsError, match=f"config.json, text_config: no `{key}`"):
        shape(kimi_k25_config(**{key: None}))


@pytest.mark.parametrize("value", [0, -1, "7168", 1.5, True, [7168]])
def test_a_size_that_is_no_positive_whole_number_is_named(value):
    with pytest.raises(LimitsError, match=r"`hidden_size` is .*, not a positive whole number"):
        shape(kimi_k25_config(hidden_size=value))


def test_an_unknown_quantization_is_refused_rather_than_guessed():
    with pytest.raises(LimitsError, match="`quant_method` is 'bitnet'; known are"):
        shape(kimi_k25_config(quantization_config={"quant_method": "bitnet"}))


def test_an_unknown_dtype_is_refused():
    with pytest.raises(LimitsError, match="`dtype` is 'int3'"):
        shape(llama_config(torch_dtype="int3"))


@pytest.mark.parametrize("text", ["", "[]", "{", "nonsense", "[" * 100_000])
def test_a_file_that_is_no_config_is_named(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(LimitsError, match=r"config\.json: not"):
        read_model_shape(tmp_path)


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(LimitsError, match=r"nowhere.*cannot be read"):
        read_model_shape(tmp_path / "nowhere")


def test_more_active_experts_than_experts_is_refused():
    with pytest.raises(LimitsError, match="`num_experts_per_tok` is 9 of 8 experts"):
        shape(kimi_k25_config(n_routed_experts=8, num_experts_per_tok=9))


@pytest.mark.parametrize("layers", [10_001, 1 << 40, 1 << 80])
def test_a_number_of_layers_that_no_model_has_is_refused_at_once(layers):
    with pytest.raises(LimitsError, match="`num_hidden_layers`"):
        shape(kimi_k25_config(num_hidden_layers=layers))


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner, max_size=3),
    max_leaves=5,
)


def paths(value, at=()):
    """Where in a document a value can be put."""
    yield at
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from paths(inner, (*at, key))


@given(st.data())
def test_whatever_stands_in_a_config_a_shape_comes_out_or_an_error_of_ours(data):
    config = kimi_k25_config()
    if data.draw(st.booleans()):
        config["text_config"]["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    *parents, last = data.draw(st.sampled_from([path for path in paths(config) if path]))
    holder = config
    for key in parents:
        holder = holder[key]
    holder[last] = data.draw(anything)
    try:
        made = shape(config)
    except LimitsError as error:
        assert str(error).startswith("config.json")  # noqa: PT017
    else:
        assert isinstance(made, ModelShape)
        assert 0 <= made.active_experts <= made.experts
        assert made.expert.bits_per_weight > 0
