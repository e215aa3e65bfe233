"""The ``config.json`` of Kimi-K2.5 and of models of other shapes, as far as their dimensions go."""

from __future__ import annotations

import copy
from typing import Any

from vllm_k25_instrument.limits.kimi_k25 import kimi_k25_config

__all__ = ["kimi_k25_config", "llama_config"]

_LLAMA_70B = {
    "model_type": "llama",
    "torch_dtype": "bfloat16",
    "num_hidden_layers": 80,
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "vocab_size": 128_256,
}


def llama_config(**changes: Any) -> dict[str, Any]:
    """A dense model with grouped-query attention, the size of Llama 3 70B."""
    return {**copy.deepcopy(_LLAMA_70B), **changes}
