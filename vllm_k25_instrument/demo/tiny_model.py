"""A tiny checkpoint with random weights and the architecture of Kimi-K2.5 INT4.

All that matters to the instruments is there: MLA with its real head sizes, a dense first layer, routed experts in
compressed-tensors INT4 (group 32) with DeepSeek-V3 routing, one shared expert, and for ``k25`` the vision tower
around the language model. Only the counts and widths are small: about 21 MB at the default sizes.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

if TYPE_CHECKING:
    import torch

Arch: TypeAlias = Literal["text", "k25"]
"""``text``: DeepseekV3ForCausalLM. ``k25``: KimiK25ForConditionalGeneration around the same language model."""

_MARKER: Final = "tiny_k25.json"
_FORMAT: Final = 1
"""Part of the cache key: raise it when the written files change for the same arguments."""

_VOCABULARY: Final = 512
_MAX_LENGTH: Final = 4096
_Q_LORA, _KV_LORA, _ROPE, _NOPE, _V_HEAD = 128, 512, 64, 128, 128
_VIT_WIDTH, _VIT_LAYERS, _VIT_MLP, _VIT_HEADS, _VIT_PATCH = 64, 1, 128, 2, 14
_SPECIAL_TOKENS: Final = (
    "[BOS]",
    "[EOS]",
    "[PAD]",
    "<|im_end|>",
    "<|im_user|>",
    "<|im_assistant|>",
    "<|im_system|>",
    "<|im_middle|>",
    "<|media_begin|>",
    "<|media_content|>",
    "<|media_pad|>",
    "<|media_end|>",
)
_CHAT_TEMPLATE: Final = (
    "{% for m in messages %}<|im_{{ m['role'] if m['role'] in ['user','assistant','system'] else 'user' }}|>"
    "{{ m['role'] }}<|im_middle|>{% if m['content'] is string %}{{ m['content'] }}{% else %}"
    "{% for c in m['content'] %}{% if c['type'] == 'text' %}{{ c['text'] }}{% else %}"
    "<|media_begin|>image<|media_content|><|media_pad|><|media_end|>{% endif %}{% endfor %}{% endif %}"
    "<|im_end|>{% endfor %}{% if add_generation_prompt %}<|im_assistant|>assistant<|im_middle|>{% endif %}"
)


@dataclass(frozen=True, slots=True)
class TinyShape:
    """Sizes of the model. `group_size` is in input features per INT4 scale."""

    layers: int = 4
    hidden: int = 256
    heads: int = 8
    experts: int = 16
    active_experts: int = 2
    expert_intermediate: int = 256
    dense_intermediate: int = 512
    group_size: int = 32

    def __post_init__(self) -> None:
        """Raises ValueError where the sizes cannot make a model with routed experts in INT4."""
        if self.layers < 2:
            raise ValueError(f"layers={self.layers}: at least 2, as the first one has no experts")
        for name, features in (("hidden", self.hidden), ("expert_intermediate", self.expert_intermediate)):
            if features % self.group_size or self.group_size % 8:
                raise ValueError(f"{name}={features}: a multiple of group_size={self.group_size}, itself one of 8")


def write_tiny_k25(
    out: Path,
    arch: Arch = "k25",
    *,
    layers: int = 4,
    seed: int = 0,
    shape: TinyShape | None = None,
) -> Path:
    """Write the checkpoint into the directory `out`; returns `out`.

    Equal arguments give equal bytes. Where `out` already holds the checkpoint of these arguments nothing is done.
    `shape` replaces `layers`. Raises ValueError on an unknown `arch` or impossible sizes, ImportError without torch,
    safetensors and tokenizers (vLLM brings all three), OSError where `out` cannot be written.
    """
    if arch not in ("text", "k25"):
        raise ValueError(f"arch={arch!r}: allowed are 'text' and 'k25'")
    shape = shape or TinyShape(layers=layers)
    key = _cache_key(arch, shape, seed)
    marker = out / _MARKER
    if marker.is_file() and json.loads(marker.read_text()).get("key") == key:
        return out

    from safetensors.torch import save_file

    out.mkdir(parents=True, exist_ok=True)
    marker.unlink(missing_ok=True)
    token_ids = write_tokenizer(out)
    _write_json(out / "config.json", _config(arch, shape, token_ids))
    _write_json(
        out / "generation_config.json",
        {
            "bos_token_id": token_ids["[BOS]"],
            "eos_token_id": [token_ids["[EOS]"], token_ids["<|im_end|>"]],
            "max_length": _MAX_LENGTH,
        },
    )
    if arch == "k25":
        _write_json(out / "preprocessor_config.json", _preprocessor_config())
    weights = _Weights(shape, seed).draw(arch)
    save_file(weights, str(out / "model.safetensors"), metadata={"format": "pt"})
    _write_json(
        out / "model.safetensors.index.json",
        {
            "metadata": {"total_size": sum(t.numel() * t.element_size() for t in weights.values())},
            "weight_map": dict.fromkeys(weights, "model.safetensors"),
        },
    )
    # Last, so that an interrupted run is not taken for a checkpoint.
    _write_json(marker, {"key": key, "arch": arch, "seed": seed, **asdict(shape)})
    return out


def _cache_key(arch: Arch, shape: TinyShape, seed: int) -> str:
    text = json.dumps([_FORMAT, arch, seed, asdict(shape)], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=1))


def write_tokenizer(out: Path) -> dict[str, int]:
    """A byte-level tokenizer without merges, with Kimi's special tokens; returns the ids of those."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        [],
        trainers.BpeTrainer(
            vocab_size=256 + len(_SPECIAL_TOKENS),
            special_tokens=list(_SPECIAL_TOKENS),
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        ),
    )
    tokenizer.save(str(out / "tokenizer.json"))
    _write_json(
        out / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": "[BOS]",
            "eos_token": "[EOS]",
            "pad_token": "[PAD]",
            "model_max_length": _MAX_LENGTH,
            "clean_up_tokenization_spaces": False,
            "chat_template": _CHAT_TEMPLATE,
        },
    )
    vocabulary: dict[str, int] = tokenizer.get_vocab()
    return {token: vocabulary[token] for token in _SPECIAL_TOKENS}


def _quantization_config(group_size: int) -> dict[str, Any]:
    return {
        "config_groups": {
            "group_0": {
                "input_activations": None,
                "output_activations": None,
                "targets": ["Linear"],
                "weights": {
                    "actorder": None,
                    "block_structure": None,
                    "dynamic": False,
                    "group_size": group_size,
                    "num_bits": 4,
                    "observer": "minmax",
                    "observer_kwargs": {},
                    "strategy": "group",
                    "symmetric": True,
                    "type": "int",
                },
            }
        },
        "format": "pack-quantized",
        "ignore": [
            "lm_head",
            "re:.*self_attn.*",
            "re:.*shared_experts.*",
            "re:.*mlp\\.(gate|up|gate_up|down)_proj.*",
        ],
        "kv_cache_scheme": None,
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
    }


def _text_config(shape: TinyShape, token_ids: dict[str, int]) -> dict[str, Any]:
    return {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "dtype": "bfloat16",
        "vocab_size": _VOCABULARY,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.dense_intermediate,
        "moe_intermediate_size": shape.expert_intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.heads,
        "n_routed_experts": shape.experts,
        "n_shared_experts": 1,
        "num_experts_per_tok": shape.active_experts,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "norm_topk_prob": True,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "routed_scaling_factor": 2.827,
        "kv_lora_rank": _KV_LORA,
        "q_lora_rank": _Q_LORA,
        "qk_rope_head_dim": _ROPE,
        "qk_nope_head_dim": _NOPE,
        "v_head_dim": _V_HEAD,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 50000.0,
        "max_position_embeddings": _MAX_LENGTH,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "num_nextn_predict_layers": 0,
        "use_cache": True,
        "initializer_range": 0.02,
        "bos_token_id": token_ids["[BOS]"],
        "eos_token_id": token_ids["[EOS]"],
        "pad_token_id": token_ids["[PAD]"],
        "rope_scaling": {
            "type": "yarn",
            "rope_type": "yarn",
            "factor": 64.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 64,
        },
        "quantization_config": _quantization_config(shape.group_size),
    }


def _config(arch: Arch, shape: TinyShape, token_ids: dict[str, int]) -> dict[str, Any]:
    text = _text_config(shape, token_ids)
    if arch == "text":
        return text
    return {
        "architectures": ["KimiK25ForConditionalGeneration"],
        "model_type": "kimi_k25",
        "dtype": "bfloat16",
        "bos_token_id": token_ids["[BOS]"],
        "eos_token_id": token_ids["[EOS]"],
        "pad_token_id": token_ids["[PAD]"],
        "image_token_id": token_ids["<|media_pad|>"],
        "media_placeholder_token_id": token_ids["<|media_pad|>"],
        "ignore_index": -100,
        "tie_word_embeddings": False,
        "use_unified_vision_chunk": True,
        "video_placeholder": "<|kimi_k25_video_placeholder|>",
        "text_config": {**text, "model_type": "kimi_k2"},
        "vision_config": {
            "patch_size": _VIT_PATCH,
            "init_pos_emb_height": 8,
            "init_pos_emb_width": 8,
            "init_pos_emb_time": 4,
            "pos_emb_height": 8,
            "pos_emb_width": 8,
            "pos_emb_time": 4,
            "pos_emb_type": "divided_fixed",
            "num_attention_heads": _VIT_HEADS,
            "num_hidden_layers": _VIT_LAYERS,
            "hidden_size": _VIT_WIDTH,
            "intermediate_size": _VIT_MLP,
            "vt_num_attention_heads": _VIT_HEADS,
            "vt_num_hidden_layers": _VIT_LAYERS,
            "vt_hidden_size": _VIT_WIDTH,
            "vt_intermediate_size": _VIT_MLP,
            "merge_kernel_size": [2, 2],
            "merge_type": "sd2_tpool",
            "video_attn_type": "spatial_temporal",
            "mm_projector_type": "patchmerger",
            "mm_hidden_size": _VIT_WIDTH,
            "text_hidden_size": shape.hidden,
            "projector_hidden_act": "gelu",
            "projector_ln_eps": 1e-5,
        },
    }


def _preprocessor_config() -> dict[str, Any]:
    return {
        "image_processor_type": "KimiK25VisionProcessor",
        "media_proc_cfg": {
            "in_patch_limit": 256,
            "patch_size": _VIT_PATCH,
            "image_mean": [0.5] * 3,
            "image_std": [0.5] * 3,
            "merge_kernel_size": 2,
            "fixed_output_tokens": None,
            "patch_limit_on_one_side": 512,
            "in_patch_limit_each_frame": 256,
            "in_patch_limit_video": None,
            "sample_fps": 2.0,
            "max_num_frames_each_video": None,
            "temporal_merge_kernel_size": 4,
            "timestamp_mode": "hh:mm:ss.fff",
            "config_type": "media_proc.processors.moonvit.MoonViTMediaProcessorConfig",
        },
    }


def pack_int4(quantized: torch.Tensor) -> torch.Tensor:
    """Pack signed INT4 values as compressed-tensors does: [out, in] in -8..7 -> [out, in / 8] int32.

    A nibble is the value + 8; the first input feature lies in the lowest bits.
    """
    import torch

    nibbles = quantized.to(torch.int64) + 8
    packed = torch.zeros(nibbles.shape[0], nibbles.shape[1] // 8, dtype=torch.int64)
    for position in range(8):
        packed |= nibbles[:, position::8] << (4 * position)
    return torch.where(packed >= 2**31, packed - 2**32, packed).to(torch.int32).contiguous()


class _Weights:
    """Draws the tensors of a checkpoint, in a fixed order, from one seeded generator."""

    def __init__(self, shape: TinyShape, seed: int) -> None:
        import torch

        self._torch = torch
        self._shape = shape
        self._generator = torch.Generator().manual_seed(seed)
        self._tensors: dict[str, torch.Tensor] = {}

    def draw(self, arch: Arch) -> dict[str, torch.Tensor]:
        self._language_model("language_model." if arch == "k25" else "")
        if arch == "k25":
            self._vision_tower()
        return self._tensors

    def _randn(self, *size: int) -> torch.Tensor:
        return self._torch.randn(*size, generator=self._generator)

    def _normal(self, name: str, *size: int, std: float | None = None) -> None:
        scale = std if std is not None else size[-1] ** -0.5
        self._tensors[name] = (self._randn(*size) * scale).to(self._torch.bfloat16)

    def _norm(self, name: str, size: int, *, bias: bool = False) -> None:
        self._tensors[f"{name}.weight"] = self._torch.ones(size, dtype=self._torch.bfloat16)
        if bias:
            self._zeros(f"{name}.bias", size)

    def _zeros(self, name: str, size: int) -> None:
        self._tensors[name] = self._torch.zeros(size, dtype=self._torch.bfloat16)

    def _linear(self, name: str, out_features: int, in_features: int) -> None:
        self._normal(f"{name}.weight", out_features, in_features)
        self._zeros(f"{name}.bias", out_features)

    def _int4_linear(self, name: str, out_features: int, in_features: int) -> None:
        torch, group = self._torch, self._shape.group_size
        weight = self._randn(out_features, in_features) * in_features**-0.5
        groups = weight.view(out_features, in_features // group, group)
        scale = (groups.abs().amax(-1) / 7.5).to(torch.bfloat16)
        quantized = torch.clamp(torch.round(groups / scale.float().unsqueeze(-1)), -8, 7)
        self._tensors[f"{name}.weight_packed"] = pack_int4(quantized.view(out_features, in_features))
        self._tensors[f"{name}.weight_scale"] = scale.contiguous()
        self._tensors[f"{name}.weight_shape"] = torch.tensor([out_features, in_features], dtype=torch.int32)

    def _language_model(self, prefix: str) -> None:
        hidden = self._shape.hidden
        self._normal(f"{prefix}model.embed_tokens.weight", _VOCABULARY, hidden, std=1.0)
        self._normal(f"{prefix}lm_head.weight", _VOCABULARY, hidden)
        self._norm(f"{prefix}model.norm", hidden)
        for index in range(self._shape.layers):
            layer = f"{prefix}model.layers.{index}"
            self._norm(f"{layer}.input_layernorm", hidden)
            self._norm(f"{layer}.post_attention_layernorm", hidden)
            self._attention(f"{layer}.self_attn")
            if index == 0:
                self._mlp(f"{layer}.mlp", self._shape.dense_intermediate)
            else:
                self._moe(f"{layer}.mlp")

    def _attention(self, name: str) -> None:
        hidden, heads = self._shape.hidden, self._shape.heads
        self._normal(f"{name}.q_a_proj.weight", _Q_LORA, hidden)
        self._norm(f"{name}.q_a_layernorm", _Q_LORA)
        self._normal(f"{name}.q_b_proj.weight", heads * (_NOPE + _ROPE), _Q_LORA)
        self._normal(f"{name}.kv_a_proj_with_mqa.weight", _KV_LORA + _ROPE, hidden)
        self._norm(f"{name}.kv_a_layernorm", _KV_LORA)
        self._normal(f"{name}.kv_b_proj.weight", heads * (_NOPE + _V_HEAD), _KV_LORA)
        self._normal(f"{name}.o_proj.weight", hidden, heads * _V_HEAD)

    def _mlp(self, name: str, intermediate: int) -> None:
        hidden = self._shape.hidden
        self._normal(f"{name}.gate_proj.weight", intermediate, hidden)
        self._normal(f"{name}.up_proj.weight", intermediate, hidden)
        self._normal(f"{name}.down_proj.weight", hidden, intermediate)

    def _moe(self, name: str) -> None:
        hidden, intermediate, experts = self._shape.hidden, self._shape.expert_intermediate, self._shape.experts
        self._normal(f"{name}.gate.weight", experts, hidden)
        self._tensors[f"{name}.gate.e_score_correction_bias"] = self._randn(experts) * 0.01
        self._mlp(f"{name}.shared_experts", intermediate)
        for expert in range(experts):
            self._int4_linear(f"{name}.experts.{expert}.gate_proj", intermediate, hidden)
            self._int4_linear(f"{name}.experts.{expert}.up_proj", intermediate, hidden)
            self._int4_linear(f"{name}.experts.{expert}.down_proj", hidden, intermediate)

    def _vision_tower(self) -> None:
        width = _VIT_WIDTH
        tower = "vision_tower"
        self._normal(f"{tower}.patch_embed.proj.weight", width, 3, _VIT_PATCH, _VIT_PATCH, std=0.02)
        self._zeros(f"{tower}.patch_embed.proj.bias", width)
        self._normal(f"{tower}.patch_embed.pos_emb.weight", 8, 8, width)
        for index in range(_VIT_LAYERS):
            block = f"{tower}.encoder.blocks.{index}"
            self._norm(f"{block}.norm0", width, bias=True)
            self._norm(f"{block}.norm1", width, bias=True)
            self._linear(f"{block}.wqkv", 3 * width, width)
            self._linear(f"{block}.wo", width, width)
            self._linear(f"{block}.mlp.fc0", _VIT_MLP, width)
            self._linear(f"{block}.mlp.fc1", width, _VIT_MLP)
        self._norm(f"{tower}.encoder.final_layernorm", width, bias=True)
        self._norm("mm_projector.pre_norm", width, bias=True)
        self._linear("mm_projector.proj.0", 4 * width, 4 * width)
        self._linear("mm_projector.proj.2", self._shape.hidden, 4 * width)
