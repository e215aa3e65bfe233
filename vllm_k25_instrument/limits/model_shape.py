"""A model's dimensions, from its Hugging Face ``config.json``: all that the bytes of a step follow from.

Made for DeepSeek-V3-shaped models (``deepseek_v3``, ``kimi_k2``, ``kimi_k25`` around a ``text_config``). Models with
grouped-query attention, dense or with routed experts, are read as far as they have the same parts.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

from vllm_k25_instrument.limits.errors import LimitsError

CONFIG_NAME: Final = "config.json"

_LARGEST: Final = 1 << 40
_MOST_LAYERS: Final = 10_000

_DTYPE_BITS: Final = {"bfloat16": 16, "float16": 16, "half": 16, "float32": 32, "float": 32}


class Math(StrEnum):
    """What the tensor cores multiply in. W4A16 weights are widened to bfloat16 first."""

    BF16 = "bf16"
    FP8 = "fp8"


@dataclass(frozen=True, slots=True)
class Precision:
    """How the weights of one kind of layer are stored and multiplied.

    `group` weights share a scale of `scale_bits` bits; with a group of 0 there are no scales.
    """

    bits: int
    group: int = 0
    scale_bits: int = 0
    math: Math = Math.BF16

    @property
    def bits_per_weight(self) -> float:
        """Stored bits per weight, its part of the scale included: INT4 in groups of 32 with bf16 scales has 4.5."""
        return self.bits + (self.scale_bits / self.group if self.group else 0.0)

    def nbytes(self, weights: float) -> float:
        """Bytes of this many weights with their scales."""
        return weights * self.bits_per_weight / 8


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Dimensions of one language model; whatever it has not is 0.

    With MLA (`kv_lora_rank` > 0) the cache holds one latent vector and one rotary key per token and layer, whatever the
    number of heads. Without, `nope_head_dim` is the head's whole size and `rope_head_dim` is 0.
    """

    model_type: str
    layers: int
    dense_layers: int
    hidden: int
    vocabulary: int
    heads: int
    kv_heads: int
    q_lora_rank: int
    kv_lora_rank: int
    rope_head_dim: int
    nope_head_dim: int
    v_head_dim: int
    dense_intermediate: int
    experts: int
    active_experts: int
    shared_experts: int
    expert_intermediate: int
    attention: Precision
    dense: Precision
    expert: Precision
    shared: Precision
    head: Precision
    activation_bits: int
    kv_bits: int

    @property
    def moe_layers(self) -> int:
        """Layers with routed experts."""
        return self.layers - self.dense_layers

    @property
    def is_mla(self) -> bool:
        """Whether attention runs over a latent cache."""
        return self.kv_lora_rank > 0

    @property
    def kv_bytes_per_token(self) -> float:
        """Bytes of the whole model's cache per token, all layers and (without MLA) all heads."""
        width = self.kv_lora_rank + self.rope_head_dim if self.is_mla else 2 * self.kv_heads * self.nope_head_dim
        return self.layers * width * self.kv_bits / 8

    @property
    def expert_weights(self) -> int:
        """Weights of one routed expert of one layer: gate, up and down projection."""
        return 3 * self.hidden * self.expert_intermediate


def read_model_shape(path: Path, *, kv_bits: int | None = None) -> ModelShape:
    """The shape of the model whose ``config.json``, or whose folder, is at `path`.

    `kv_bits` is what vLLM's ``--kv-cache-dtype`` makes of the cache (8 for fp8); the default is the model's own dtype.
    Raises LimitsError where the file cannot be read, lacks a key (it is named), or is quantized in a way unknown here.
    """
    file = path / CONFIG_NAME if path.is_dir() else path
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise LimitsError(f"{file}: cannot be read: {error.strerror}: name the model's config.json") from None
    except (ValueError, RecursionError) as error:
        raise LimitsError(f"{file}: not valid JSON: {error}") from None
    if not isinstance(config, dict):
        raise LimitsError(f"{file}: not a model's config.json: the outermost value is no object")
    return model_shape(config, str(file), kv_bits=kv_bits)


def model_shape(config: Mapping[str, Any], source: str, *, kv_bits: int | None = None) -> ModelShape:
    """The shape of a parsed ``config.json``; `source` names it in errors. Raises LimitsError as `read_model_shape`."""
    inner = config.get("text_config")
    where = source if inner is None else f"{source}, text_config"
    if inner is not None and not isinstance(inner, Mapping):
        raise LimitsError(f"{where}: not an object")
    keys = _Keys(config if inner is None else inner, where)
    model_type = str(config.get("model_type", keys.text("model_type", "")))
    mla = keys.number("kv_lora_rank", default=0) > 0
    layers = keys.number("num_hidden_layers")
    if layers > _MOST_LAYERS:
        raise LimitsError(f"{where}: `num_hidden_layers` is {layers:,}: no model has that many")
    experts = keys.number("n_routed_experts", "num_experts", "num_local_experts", default=0)
    dense_layers = _dense_layers(keys, layers) if experts else layers
    hidden, heads = keys.number("hidden_size"), keys.number("num_attention_heads")
    head_dim = 0 if mla else keys.number("head_dim", default=hidden // heads)
    dtype_bits = _dtype_bits(keys, config)
    weights = _Weights.read(
        keys.values.get("quantization_config", config.get("quantization_config")), where, dtype_bits, dense_layers
    )
    shared_experts = keys.number("n_shared_experts", default=0) if experts else 0
    active_experts = keys.number("num_experts_per_tok") if experts else 0
    if active_experts > experts:
        raise LimitsError(f"{where}: `num_experts_per_tok` is {active_experts} of {experts} experts")
    return ModelShape(
        model_type=model_type,
        layers=layers,
        dense_layers=dense_layers,
        hidden=hidden,
        vocabulary=keys.number("vocab_size"),
        heads=heads,
        kv_heads=heads if mla else keys.number("num_key_value_heads", default=heads),
        q_lora_rank=keys.number("q_lora_rank", default=0) if mla else 0,
        kv_lora_rank=keys.number("kv_lora_rank") if mla else 0,
        rope_head_dim=keys.number("qk_rope_head_dim") if mla else 0,
        nope_head_dim=keys.number("qk_nope_head_dim") if mla else head_dim,
        v_head_dim=keys.number("v_head_dim") if mla else head_dim,
        dense_intermediate=keys.number("intermediate_size") if dense_layers else 0,
        experts=experts,
        active_experts=active_experts,
        shared_experts=shared_experts,
        expert_intermediate=keys.number("moe_intermediate_size", "intermediate_size") if experts else 0,
        attention=weights.of("self_attn.o_proj"),
        dense=weights.of("mlp.down_proj"),
        expert=weights.of("mlp.experts.0.down_proj"),
        shared=weights.of("mlp.shared_experts.down_proj"),
        head=weights.of("lm_head"),
        activation_bits=dtype_bits,
        kv_bits=kv_bits or dtype_bits,
    )


@dataclass(frozen=True, slots=True)
class _Keys:
    """The object that holds the dimensions, and what to call it in an error."""

    values: Mapping[str, Any]
    where: str

    def number(self, *names: str, default: int | None = None) -> int:
        """The first of `names` that is there: a whole number, positive where it must be there at all."""
        for name in names:
            value: object = self.values.get(name)
            if value is None:
                continue
            least = 1 if default is None else 0
            if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= _LARGEST:
                raise LimitsError(f"{self.where}: `{name}` is {value!r:.40}, not a positive whole number below 2^40")
            return value
        if default is None:
            raise LimitsError(f"{self.where}: no `{'` or `'.join(names)}`: floors follow from it")
        return default

    def text(self, name: str, default: str) -> str:
        value = self.values.get(name)
        return value if isinstance(value, str) else default


def _dense_layers(keys: _Keys, layers: int) -> int:
    """How many layers have no routed experts: the first `first_k_dense_replace`, then all but every n-th."""
    first = keys.number("first_k_dense_replace", default=0)
    every = keys.number("moe_layer_freq", "decoder_sparse_step", default=1) or 1
    return sum(layer < first or layer % every != 0 for layer in range(layers))


def _dtype_bits(keys: _Keys, outer: Mapping[str, Any]) -> int:
    name = keys.text("dtype", keys.text("torch_dtype", "")) or outer.get("dtype") or outer.get("torch_dtype")
    name = "bfloat16" if name is None else str(name).removeprefix("torch.")
    if name not in _DTYPE_BITS:
        raise LimitsError(f"{keys.where}: `dtype` is {name!r:.40}; known are {', '.join(_DTYPE_BITS)}")
    return _DTYPE_BITS[name]


@dataclass(frozen=True, slots=True)
class _Weights:
    """Which kinds of layers are quantized, and how."""

    plain: Precision
    quantized: Precision
    ignored: Sequence[str]
    layer: int

    @classmethod
    def read(cls, config: object, where: str, dtype_bits: int, dense_layers: int) -> _Weights:
        plain = Precision(dtype_bits)
        if config is None:
            return cls(plain, plain, (), dense_layers)
        if not isinstance(config, Mapping):
            raise LimitsError(f"{where}: `quantization_config` is not an object")
        keys = _Keys(config, f"{where}, quantization_config")
        method = keys.text("quant_method", "")
        ignored = config.get("ignore") or config.get("modules_to_not_convert") or ()
        names = [str(name) for name in ignored] if isinstance(ignored, list) else []
        if method == "compressed-tensors":
            return cls(plain, _compressed_tensors(keys), names, dense_layers)
        if method in ("gptq", "gptq_marlin", "awq", "awq_marlin"):
            bits = Precision(keys.number("bits"), keys.number("group_size"), 16)
            return cls(plain, bits, [*names, "lm_head"], dense_layers)
        if method == "fp8":
            block = config.get("weight_block_size")
            # DeepSeek-V3 keeps a float32 scale per 128 x 128 block; without blocks there is one per tensor.
            blocks = (
                isinstance(block, list) and len(block) == 2 and all(type(size) is int and size > 0 for size in block)
            )
            group = block[0] * block[1] if isinstance(block, list) and blocks else 0
            return cls(plain, Precision(8, group, 32 if group else 0, Math.FP8), [*names, "lm_head"], dense_layers)
        raise LimitsError(
            f"{keys.where}: `quant_method` is {method!r:.40}; known are compressed-tensors, gptq, awq, fp8: "
            "how many bytes its weights have is not known here"
        )

    def of(self, module: str) -> Precision:
        """How the weights of this module are stored (`mlp.down_proj` of a layer, or `lm_head`)."""
        layer = self.layer if "experts" in module else 0
        name = module if module == "lm_head" else f"model.layers.{layer}.{module}"
        names = (name, f"language_model.{name}")
        return (
            self.plain if any(_names(pattern, name) for pattern in self.ignored for name in names) else self.quantized
        )


def _names(pattern: str, module: str) -> bool:
    """Whether an entry of an `ignore` list names the module: a name, a prefix, or after `re:` a regular expression."""
    if pattern.startswith("re:"):
        try:
            return re.match(pattern[3:], module) is not None
        except re.error:
            return False
    return module == pattern or module.startswith(f"{pattern}.") or f".{pattern}." in f".{module}."


def _compressed_tensors(keys: _Keys) -> Precision:
    groups = keys.values.get("config_groups")
    first = next(iter(groups.values()), None) if isinstance(groups, Mapping) else None
    weights = first.get("weights") if isinstance(first, Mapping) else None
    if not isinstance(first, Mapping) or not isinstance(weights, Mapping):
        raise LimitsError(f"{keys.where}: no `config_groups` with `weights`: the bits of a weight follow from it")
    of_weights = _Keys(weights, f"{keys.where}, config_groups, weights")
    activations = first.get("input_activations")
    narrow = isinstance(activations, Mapping) and activations.get("num_bits") == 8
    group = of_weights.number("group_size", default=0) if weights.get("strategy") == "group" else 0
    return Precision(of_weights.number("num_bits"), group, 16 if group else 0, Math.FP8 if narrow else Math.BF16)
