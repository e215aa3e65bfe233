"""How fast a decode step could be at best: bytes over bandwidth and operations over peak, part by part.

The roofline of Williams, Waterman and Patterson (2009, doi 10.1145/1498765.1498785): a part that must move B bytes of
device memory and do F operations takes at least max(B / bandwidth, F / peak). Only what must be read at least once per
step counts: weights, and the cache of the tokens attended to. Activations stay in the GPU's second-level cache, and
what is computed from them in place (norms, rotary embedding, routing, sampling) has no floor here. All figures are of
one rank; parts that one layer does after the other are added up.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from vllm_k25_instrument.limits.errors import LimitsError
from vllm_k25_instrument.limits.gpus import Gpu, Link
from vllm_k25_instrument.limits.model_shape import Math, ModelShape, Precision
from vllm_k25_instrument.model import NS_PER_SECOND, Category


class Bound(StrEnum):
    """What a floor comes from."""

    MEMORY = "memory"
    COMPUTE = "compute"
    LINK = "link"


@dataclass(frozen=True, slots=True)
class Sharding:
    """Over how many ranks the work is divided: `tp` of a tensor-parallel group, `experts` of the routed experts.

    Experts may be cut (tensor parallelism) or dealt out whole (expert parallelism): under uniform routing a rank reads
    as many bytes either way, in the mean. With data parallelism in front, `experts` is tp x dp.
    """

    tp: int
    experts: int

    @classmethod
    def of(cls, tp: int, dp: int = 1) -> Sharding:
        """Raises LimitsError where a size is not positive."""
        if tp < 1 or dp < 1:
            raise LimitsError(f"a group of {tp} x {dp} ranks does no work")
        return cls(tp, tp * dp)


@dataclass(frozen=True, slots=True)
class Load:
    """What one decode step has to do: `requests`, `tokens` in all (more than requests when drafts are verified), and
    `context`, the mean number of tokens that a request attends to.
    """

    requests: float
    tokens: float
    context: float


@dataclass(frozen=True, slots=True)
class Part:
    """A part of the step on one rank. `nbytes` move from device memory, or for a collective over the link."""

    name: str
    category: Category
    nbytes: float
    flops: float = 0.0
    math: Math = Math.BF16
    link_ns: float | None = None

    def floor(self, gpu: Gpu) -> tuple[float, Bound]:
        """The least time in ns, and what it comes from."""
        if self.link_ns is not None:
            return self.link_ns, Bound.LINK
        memory = self.nbytes / gpu.memory_bytes_per_second * NS_PER_SECOND
        compute = self.flops / gpu.peak(self.math) * NS_PER_SECOND
        return (memory, Bound.MEMORY) if memory >= compute else (compute, Bound.COMPUTE)


@dataclass(frozen=True, slots=True)
class Floor:
    """The least time of a category in one step of one rank. `bound` is that of its largest part."""

    ns: float
    nbytes: float
    flops: float
    bound: Bound
    parts: tuple[str, ...]


def expected_active_experts(experts: int, active: int, tokens: float) -> float:
    """How many of a layer's `experts` at least one of `tokens` is routed to, in the mean.

    E (1 - (1 - k/E)^t): a token picks k of E, so it leaves a given expert out with probability 1 - k/E, and tokens
    pick independently (linearity of expectation; balls into bins). Uniform routing is assumed. Real routing is skewed
    and picks fewer distinct experts, so that a measured time may come below this floor where batches are large.
    """
    if not experts:
        return 0.0
    left_out: float = (1.0 - active / experts) ** tokens
    return experts * (1.0 - left_out)


def all_reduce_floor_ns(nbytes: float, ranks: int, link: Link) -> float:
    """The least time, ns, of an all-reduce of `nbytes` over `ranks`.

    The faster of: in two shots, reduce-scatter then all-gather, each straight to every other rank: 2 (n-1)/n x bytes
    through the link of each rank, and two hops; in one shot, every rank sending all it has to all others: (n-1) x
    bytes and one hop; and where the switch adds up by itself, (n+1)/n x bytes and two hops. 2 (n-1)/n is the factor
    between algorithm and bus bandwidth of nccl-tests (`doc/PERFORMANCE.md`; Patarasuk and Yuan 2009,
    doi 10.1016/j.jpdc.2008.09.002: no algorithm without help of the network moves less). A ring moves the same bytes,
    with 2 (n-1) hops: see `ring_ns`.
    """
    if ranks < 2:
        return 0.0
    per_byte = NS_PER_SECOND / link.bytes_per_second
    ways = [
        2 * (ranks - 1) / ranks * nbytes * per_byte + 2 * link.hop_ns,
        (ranks - 1) * nbytes * per_byte + link.hop_ns,
    ]
    if link.reduces:
        ways.append((ranks + 1) / ranks * nbytes * per_byte + 2 * link.hop_ns)
    return min(ways)


def ring_ns(nbytes: float, ranks: int, link: Link) -> float:
    """The least time, ns, of a ring all-reduce: 2 (n-1)/n x bytes through the link, and 2 (n-1) hops in a row."""
    if ranks < 2:
        return 0.0
    return 2 * (ranks - 1) / ranks * nbytes * NS_PER_SECOND / link.bytes_per_second + 2 * (ranks - 1) * link.hop_ns


def all_reduces_per_step(shape: ModelShape) -> int:
    """Two per layer (after attention and after the MLP) and one after the vocabulary-parallel embedding."""
    return 2 * shape.layers + 1


def decode_parts(shape: ModelShape, sharding: Sharding, load: Load, link: Link | None) -> tuple[Part, ...]:
    """All that one rank must move and multiply in one decode step; without a link no collectives.

    Categories are those of the live hooks: a projection around attention, the dense MLP, the router's gate and the
    logits are outside every hook and part of `unattributed`.
    """
    parts = [*_moe(shape, sharding, load), *_attention(shape, sharding, load), *_dense(shape, sharding, load)]
    if link is not None and sharding.tp > 1:
        parts += _collectives(shape, sharding.tp, load, link)
    return tuple(parts)


def category_floors(parts: Iterable[Part], gpu: Gpu) -> dict[str, Floor]:
    """The floor of each category: the sum over its parts, which run one after the other."""
    by_category: dict[str, list[Part]] = {}
    for part in parts:
        by_category.setdefault(str(part.category), []).append(part)
    return {name: _floor_of(those, gpu) for name, those in by_category.items()}


def decode_floors(
    shape: ModelShape, sharding: Sharding, load: Load, gpu: Gpu, link: Link | None = None
) -> dict[str, Floor]:
    """The floor of each category of one decode step on one rank."""
    return category_floors(decode_parts(shape, sharding, load, link), gpu)


def mean_floors(
    shares: Mapping[Load, float], shape: ModelShape, sharding: Sharding, gpu: Gpu, link: Link | None = None
) -> dict[str, Floor]:
    """The mean floor of each category over steps of several loads, each with its share of the steps (their sum is 1).

    Floors are not linear in the batch, so the mean of the floors is not the floor of the mean. The bound is that of
    the load which contributes most.
    """
    by_category: dict[str, list[tuple[float, Floor]]] = {}
    for load, share in shares.items():
        for name, floor in decode_floors(shape, sharding, load, gpu, link).items():
            by_category.setdefault(name, []).append((share, floor))
    return {name: _mean(weighted) for name, weighted in by_category.items()}


def _mean(weighted: list[tuple[float, Floor]]) -> Floor:
    _, heaviest = max(weighted, key=lambda entry: entry[0] * entry[1].ns)
    return Floor(
        ns=sum(share * floor.ns for share, floor in weighted),
        nbytes=sum(share * floor.nbytes for share, floor in weighted),
        flops=sum(share * floor.flops for share, floor in weighted),
        bound=heaviest.bound,
        parts=heaviest.parts,
    )


def weight_bytes(shape: ModelShape, sharding: Sharding) -> float:
    """Bytes of one rank's weights, the vision tower, norms and embeddings left out: what a huge batch reads."""
    everything = Load(requests=0, tokens=1e9, context=0)  # so many that no expert is left out
    return sum(part.nbytes for part in decode_parts(shape, sharding, everything, None))


def _floor_of(parts: list[Part], gpu: Gpu) -> Floor:
    floors = [(part.floor(gpu), part) for part in parts]
    (_, bound), _ = max(floors, key=lambda entry: entry[0][0])
    return Floor(
        ns=sum(ns for (ns, _), _ in floors),
        nbytes=sum(part.nbytes for part in parts),
        flops=sum(part.flops for part in parts),
        bound=bound,
        parts=tuple(part.name for part in parts),
    )


def _matmul(
    name: str, category: Category, weights: float, precision: Precision, tokens: float, layers: int = 1
) -> Part:
    """`tokens` rows times a matrix of `weights`, once in each of `layers`: 2 operations per row and weight."""
    return Part(name, category, layers * precision.nbytes(weights), layers * 2 * tokens * weights, precision.math)


def _moe(shape: ModelShape, sharding: Sharding, load: Load) -> Iterable[Part]:
    if not shape.experts:
        return
    own = shape.expert_weights / sharding.experts
    distinct = expected_active_experts(shape.experts, shape.active_experts, load.tokens)
    yield Part(
        "routed experts",
        Category.MOE_EXPERTS,
        shape.moe_layers * distinct * shape.expert.nbytes(own),
        # Of a rank's own tokens; with data parallelism in front it does others' too, which only raises the floor.
        shape.moe_layers * 2 * load.tokens * shape.active_experts * own,
        shape.expert.math,
    )
    shared = shape.shared_experts * shape.expert_weights / sharding.tp
    if shared:
        yield _matmul(
            "shared experts", Category.MOE_SHARED_EXPERTS, shared, shape.shared, load.tokens, shape.moe_layers
        )
    # The gate is on every rank, unquantized; vLLM multiplies it before the hooked choice of experts.
    gate = Precision(shape.activation_bits)
    yield _matmul(
        "router gate", Category.UNATTRIBUTED, shape.experts * shape.hidden, gate, load.tokens, shape.moe_layers
    )


def _attention(shape: ModelShape, sharding: Sharding, load: Load) -> Iterable[Part]:
    heads = shape.heads / sharding.tp
    cache_bits = shape.layers * shape.kv_bits / 8
    if shape.is_mla:
        # Multi-query over the latent: scores over latent and rotary part, values are the latent itself. Every rank
        # has all of the cache. (DeepSeek-V2, arXiv 2405.04434, section 2.1, with the projections absorbed.)
        latent, rotary = shape.kv_lora_rank, shape.rope_head_dim
        yield Part(
            "latent cache",
            Category.MLA_ATTENTION,
            load.requests * load.context * (latent + rotary) * cache_bits,
            shape.layers * load.tokens * load.context * heads * 2 * (2 * latent + rotary),
        )
    else:
        kv_heads = max(shape.kv_heads / sharding.tp, 1.0)
        yield Part(
            "key and value cache",
            Category.ATTENTION,
            load.requests * load.context * 2 * kv_heads * shape.nope_head_dim * cache_bits,
            shape.layers * load.tokens * load.context * heads * 2 * (shape.nope_head_dim + shape.v_head_dim),
        )
    weights = _projection_weights(shape, sharding.tp)
    yield _matmul(
        "projections around attention", Category.UNATTRIBUTED, weights, shape.attention, load.tokens, shape.layers
    )


def _projection_weights(shape: ModelShape, tp: int) -> float:
    """Weights of one layer's projections on one rank. MLA's down-projections are on every rank, the rest is cut."""
    head = shape.nope_head_dim + shape.rope_head_dim
    output = shape.heads * shape.v_head_dim * shape.hidden / tp
    if not shape.is_mla:
        kv_heads = max(shape.kv_heads / tp, 1.0)
        return output + shape.hidden * (shape.heads / tp * head + kv_heads * (head + shape.v_head_dim))
    down = shape.hidden * (shape.q_lora_rank + shape.kv_lora_rank + shape.rope_head_dim)
    up = (shape.q_lora_rank or shape.hidden) * shape.heads * head
    absorbed = shape.kv_lora_rank * shape.heads * (shape.nope_head_dim + shape.v_head_dim)
    return down + (up + absorbed) / tp + output


def _dense(shape: ModelShape, sharding: Sharding, load: Load) -> Iterable[Part]:
    if shape.dense_layers:
        mlp = 3 * shape.hidden * shape.dense_intermediate / sharding.tp
        yield _matmul("dense MLP", Category.UNATTRIBUTED, mlp, shape.dense, load.tokens, shape.dense_layers)
    head = shape.vocabulary * shape.hidden / sharding.tp
    yield _matmul("logits", Category.UNATTRIBUTED, head, shape.head, load.tokens)


def _collectives(shape: ModelShape, tp: int, load: Load, link: Link) -> Iterable[Part]:
    calls = all_reduces_per_step(shape)
    message = load.tokens * shape.hidden * shape.activation_bits / 8
    yield Part(
        f"{calls} all-reduces",
        Category.ALL_REDUCE,
        calls * message,
        link_ns=calls * all_reduce_floor_ns(message, tp, link),
    )
    # The logits are gathered from all ranks: each receives what the n - 1 others have.
    logits = load.tokens * shape.vocabulary * shape.activation_bits / 8 * (tp - 1) / tp
    yield Part(
        "gathered logits",
        Category.COLLECTIVE,
        logits,
        link_ns=logits / link.bytes_per_second * NS_PER_SECOND + link.hop_ns,
    )
