"""Kimi-K2.5's ``config.json`` as far as its dimensions go: the model that everything here is made for."""

from __future__ import annotations

import copy
from typing import Any, Final

_QUANTIZATION: Final = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "input_activations": None,
            "weights": {"num_bits": 4, "group_size": 32, "strategy": "group", "symmetric": True, "type": "int"},
        }
    },
    "ignore": [
        "lm_head",
        "re:.*self_attn.*",
        "re:.*shared_experts.*",
        "re:.*mlp\\.(gate|up|gate_up|down)_proj.*",
    ],
}

_KIMI_K2: Final = {
    "model_type": "kimi_k2",
    "num_hidden_layers": 61,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "vocab_size": 163_840,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "n_routed_experts": 384,
    "num_experts_per_tok": 8,
    "n_shared_experts": 1,
    "quantization_config": _QUANTIZATION,
}


def kimi_k25_config(**changes: Any) -> dict[str, Any]:
    """Kimi-K2.5 INT4, `changes` made in its text_config (None takes a key away)."""
    text = {**copy.deepcopy(_KIMI_K2), **changes}
    return {
        "model_type": "kimi_k25",
        "dtype": "bfloat16",
        "text_config": {name: value for name, value in text.items() if value is not None},
    }
