"""Tiny models of other families than Kimi-K2.5's: configurations to serve with vLLM's dummy weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

from vllm_k25_instrument.demo.tiny_model import write_tokenizer

LAYERS: Final = 3

_COMMON: Final[dict[str, Any]] = {
    "dtype": "bfloat16",
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": LAYERS,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 10_000.0,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "use_cache": True,
    "initializer_range": 0.02,
}
_GQA: Final = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
_MLA: Final = {
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 128,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
}
_ATTENTION_LINEARS: Final = (
    *("q_proj", "k_proj", "v_proj", "o_proj", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj"),
    "fused_qkv_a_proj",
)
_MLP_LINEARS: Final = ("gate_proj", "up_proj", "down_proj")
_FP8: Final = {
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "weight_block_size": [128, 128],
    # The experts only: vLLM's CPU build multiplies plain FP8 matrices on processors with AMX only.
    "ignored_layers": [
        "lm_head",
        *(f"model.layers.{n}.mlp.gate" for n in range(LAYERS)),
        *(f"model.layers.{n}.self_attn.{linear}" for n in range(LAYERS) for linear in _ATTENTION_LINEARS),
        *(
            f"model.layers.{n}.mlp.{part}{linear}"
            for n in range(LAYERS)
            for part in ("", "shared_experts.")
            for linear in _MLP_LINEARS
        ),
    ],
}

_LLAMA: Final = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "mlp_bias": False, **_GQA}
_QWEN3_MOE: Final = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts": 16,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 256,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    **_GQA,
}
_MIXTRAL: Final = {
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "sliding_window": None,
    **_GQA,
}
_DEEPSEEK_V3: Final = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "moe_intermediate_size": 256,
    "n_routed_experts": 16,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "norm_topk_prob": True,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "routed_scaling_factor": 2.5,
    "num_nextn_predict_layers": 1,
    **_MLA,
}

FAMILIES: Final[dict[str, dict[str, Any]]] = {
    "llama": _LLAMA,
    "qwen3_moe": _QWEN3_MOE,
    "qwen3_moe_fp8": {**_QWEN3_MOE, "quantization_config": _FP8},
    "mixtral": _MIXTRAL,
    "deepseek_v3": _DEEPSEEK_V3,
    "deepseek_v3_fp8": {**_DEEPSEEK_V3, "quantization_config": _FP8},
}
"""Dense with GQA, MoE with GQA, MoE with MLA; unquantized, and FP8 in blocks. DeepSeek-V3 can draft (MTP)."""

DUMMY_WEIGHTS: Final = ("--load-format", "dummy")


def write_family(out: Path, family: str) -> Path:
    """Write configuration and tokenizer of one of `FAMILIES` into `out`; returns it. There are no weights."""
    out.mkdir(parents=True, exist_ok=True)
    token_ids = write_tokenizer(out)
    special = {name: token_ids[f"[{name[:3].upper()}]"] for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    (out / "config.json").write_text(json.dumps({**_COMMON, **FAMILIES[family], **special}, indent=1))
    return out
