"""What one rank multiplies in a decode step: every matrix with its dimensions, bytes and operations.

Bytes are those of the weights, with their scales: what must come from memory at least, as in `limits/floors.py`.
A multiplication and an addition are two operations.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from vllm_k25_instrument.limits.errors import LimitsError
from vllm_k25_instrument.limits.floors import Part
from vllm_k25_instrument.limits.model_shape import ModelShape, Precision
from vllm_k25_instrument.model import Category

VOCABULARY_STEP = 64
"""vLLM pads the vocabulary to a multiple of this (`vocab_parallel_embedding.DEFAULT_VOCAB_PADDING_SIZE`)."""


@dataclass(frozen=True, slots=True)
class Projection:
    """Rows of `inputs` numbers times a matrix to `outputs`, or one such matrix for each of `heads`.

    `calls_per_step` is how often a decode step does it; 0 where it does so only in another form.
    """

    name: str
    category: Category
    inputs: int
    outputs: int
    precision: Precision
    calls_per_step: int
    heads: int = 1
    gate: bool = False
    """The router's gate, which vLLM multiplies by kernels of its own."""

    @property
    def weights(self) -> int:
        """Their number: heads x inputs x outputs."""
        return self.heads * self.inputs * self.outputs

    @property
    def nbytes(self) -> int:
        """Bytes of the weights: weights x bits / 8."""
        return round(self.precision.nbytes(self.weights))

    def flops(self, tokens: int) -> int:
        """2 x tokens x weights."""
        return 2 * tokens * self.weights

    @property
    def shape(self) -> str:
        """``7168 -> 2112``, or ``8 x (128 -> 512)``."""
        one = f"{self.inputs} -> {self.outputs}"
        return one if self.heads == 1 else f"{self.heads} x ({one})"

    def part(self, tokens: int) -> Part:
        """What its floor follows from."""
        return Part(self.name, self.category, self.nbytes, self.flops(tokens), self.precision.math)


@dataclass(frozen=True, slots=True)
class ExpertLayer:
    """The routed experts of one layer on one rank: gate and up projection in one, then the down projection."""

    experts: int
    active: int
    hidden: int
    intermediate: int
    precision: Precision
    calls_per_step: int

    @property
    def weights_of_one(self) -> int:
        """3 x hidden x intermediate: gate, up and down."""
        return 3 * self.hidden * self.intermediate

    def nbytes(self, distinct: int) -> int:
        """Bytes of the weights of `distinct` experts, scales included: only what the routing picked is read."""
        return round(self.precision.nbytes(distinct * self.weights_of_one))

    def flops(self, tokens: int) -> int:
        """2 x tokens x active experts x weights of one."""
        return 2 * tokens * self.active * self.weights_of_one

    @property
    def shape(self) -> str:
        """``384 x (7168 -> 2 x 256 -> 7168), 8 active``."""
        return f"{self.experts} x ({self.hidden} -> 2 x {self.intermediate} -> {self.hidden}), {self.active} active"

    def part(self, tokens: int, distinct: int) -> Part:
        """What its floor follows from."""
        return Part(
            "routed experts", Category.MOE_EXPERTS, self.nbytes(distinct), self.flops(tokens), self.precision.math
        )


def expert_layer(shape: ModelShape, tp: int, *, experts: int | None = None) -> ExpertLayer | None:
    """The experts of a layer, each cut over `tp` ranks; None where the model has none.

    `experts` keeps fewer of them than the model has. Raises LimitsError where they cannot be cut like that.
    """
    if not shape.experts:
        return None
    kept = shape.experts if experts is None else min(experts, shape.experts)
    return ExpertLayer(
        experts=kept,
        active=min(shape.active_experts, kept),
        hidden=shape.hidden,
        intermediate=_cut(shape.expert_intermediate, tp, "the experts' intermediate size", shape.expert.group),
        precision=shape.expert,
        calls_per_step=shape.moe_layers,
    )


def projections(shape: ModelShape, tp: int) -> tuple[Projection, ...]:
    """The dense matrices of one of `tp` ranks. Raises LimitsError where one of them cannot be cut like that."""
    return tuple(_projections(shape, tp))


def _projections(shape: ModelShape, tp: int) -> Iterator[Projection]:
    yield from _mla(shape, tp) if shape.is_mla else _grouped_query(shape, tp)
    plain = Precision(shape.activation_bits)
    if shape.dense_layers:
        width = _cut(shape.dense_intermediate, tp, "the dense MLP's intermediate size")
        yield _dense("dense MLP gate_up", shape.hidden, 2 * width, shape.dense, shape.dense_layers)
        yield _dense("dense MLP down", width, shape.hidden, shape.dense, shape.dense_layers)
    if shape.shared_experts:
        width = _cut(shape.shared_experts * shape.expert_intermediate, tp, "the shared experts' intermediate size")
        for name, inputs, outputs in (("gate_up", shape.hidden, 2 * width), ("down", width, shape.hidden)):
            yield Projection(
                f"shared experts {name}", Category.MOE_SHARED_EXPERTS, inputs, outputs, shape.shared, shape.moe_layers
            )
    if shape.experts:
        yield Projection(
            "router gate", Category.UNATTRIBUTED, shape.hidden, shape.experts, plain, shape.moe_layers, gate=True
        )
    padded = -(-shape.vocabulary // VOCABULARY_STEP) * VOCABULARY_STEP
    yield _dense("lm_head", shape.hidden, _cut(padded, tp, "the vocabulary"), shape.head, 1)


def _mla(shape: ModelShape, tp: int) -> Iterator[Projection]:
    """Multi-head latent attention. The down-projections are on every rank, the rest is cut by heads.

    vLLM multiplies q_a and kv_a as one matrix, and in decode kv_b in its absorbed form: W_UK on the queries and W_UV on
    the result, a matrix per head (`mla_attention.py`; DeepSeek-V2, arXiv 2405.04434, section 2.1).
    """
    heads = _cut(shape.heads, tp, "the attention heads")
    query = shape.nope_head_dim + shape.rope_head_dim
    kv_a = shape.kv_lora_rank + shape.rope_head_dim
    bits, layers = shape.attention, shape.layers
    if shape.q_lora_rank:
        yield _dense("q_a + kv_a", shape.hidden, shape.q_lora_rank + kv_a, bits, layers)
        yield _dense("q_a", shape.hidden, shape.q_lora_rank, bits, 0)
        yield _dense("kv_a", shape.hidden, kv_a, bits, 0)
        yield _dense("q_b", shape.q_lora_rank, heads * query, bits, layers)
    else:
        yield _dense("q", shape.hidden, heads * query, bits, layers)
        yield _dense("kv_a", shape.hidden, kv_a, bits, layers)
    yield _dense("kv_b", shape.kv_lora_rank, heads * (shape.nope_head_dim + shape.v_head_dim), bits, 0)
    plain = Precision(shape.activation_bits)  # vLLM absorbs them dequantized
    for name, inputs, outputs in (
        ("kv_b absorbed: W_UK", shape.nope_head_dim, shape.kv_lora_rank),
        ("kv_b absorbed: W_UV", shape.kv_lora_rank, shape.v_head_dim),
    ):
        yield Projection(name, Category.UNATTRIBUTED, inputs, outputs, plain, layers, heads=heads)
    yield _dense("o", heads * shape.v_head_dim, shape.hidden, bits, layers)


def _grouped_query(shape: ModelShape, tp: int) -> Iterator[Projection]:
    heads = _cut(shape.heads, tp, "the attention heads")
    kv_heads = max(shape.kv_heads // tp, 1)
    width = heads * shape.nope_head_dim + kv_heads * (shape.nope_head_dim + shape.v_head_dim)
    yield _dense("qkv", shape.hidden, width, shape.attention, shape.layers)
    yield _dense("o", heads * shape.v_head_dim, shape.hidden, shape.attention, shape.layers)


def _dense(name: str, inputs: int, outputs: int, precision: Precision, calls: int) -> Projection:
    return Projection(name, Category.UNATTRIBUTED, inputs, outputs, precision, calls)


def _cut(size: int, tp: int, what: str, step: int = 0) -> int:
    each, rest = divmod(size, tp)
    if rest or (step and each % step):
        whole = f", into whole groups of {step}" if step else ""
        raise LimitsError(f"{what} ({size:,}) cannot be cut over {tp} ranks{whole}: choose --tensor-parallel-size")
    return each
