"""What floors are computed for: a model on GPUs joined by a link, and what is taken for granted."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_k25_instrument.limits.errors import LimitsError
from vllm_k25_instrument.limits.floors import (
    Sharding,
    all_reduce_floor_ns,
    all_reduces_per_step,
    ring_ns,
    weight_bytes,
)
from vllm_k25_instrument.limits.gpus import AUTO, Gpu, Link, find_gpu
from vllm_k25_instrument.limits.model_shape import CONFIG_NAME, ModelShape, read_model_shape
from vllm_k25_instrument.report.figures import microseconds


@dataclass(frozen=True, slots=True)
class Machine:
    """What the floors are computed for: model, GPU, link and how the work is divided."""

    shape: ModelShape
    gpu: Gpu
    link: Link
    sharding: Sharding
    context: float

    @property
    def assumptions(self) -> tuple[str, ...]:
        """What the floors take for granted, in sentences."""
        shape, ranks = self.shape, self.sharding.tp
        bandwidth, token = self.gpu.memory_bytes_per_second / 1e9, shape.kv_bytes_per_token
        lines = [
            f"One of {ranks} ranks on {self.gpu.name}: {bandwidth:,.0f} GB/s and its data sheet's peak rates.",
            "Counted are weights and the cache, read once a step; not activations, norms, routing, sampling.",
            f"Requests attend to {self.context:,.0f} tokens each (--context), of {token:,.0f} bytes.",
        ]
        if shape.experts:
            active = f"{shape.experts} (1 - (1 - {shape.active_experts}/{shape.experts})^tokens)"
            lines.append(
                f"Distinct experts of a layer: {active}, as if routing were uniform; real routing is skewed and picks "
                "fewer, so that large batches may come out below 1."
            )
        if ranks > 1:
            message = shape.hidden * shape.activation_bits / 8
            best, ring = all_reduce_floor_ns(message, ranks, self.link), ring_ns(message, ranks, self.link)
            lines.append(
                f"{all_reduces_per_step(shape)} all-reduces over {self.link.name} "
                f"({self.link.bytes_per_second / 1e9:,.1f} GB/s each way, {self.link.hop_ns / 1e3:g} µs a hop). Of one "
                f"token's {message:,.0f} bytes: {microseconds(best)} µs straight to all others, {microseconds(ring)} "
                "µs around a ring."
            )
        return tuple(lines)

    def to_json_dict(self) -> dict[str, Any]:
        """The machine as in the schema of limits."""
        return {
            "gpu": self.gpu.to_json_dict(),
            "link": self.link.to_json_dict(),
            "tensor_parallel": self.sharding.tp,
            "expert_ranks": self.sharding.experts,
            "context": self.context,
            "kv_bytes_per_token": self.shape.kv_bytes_per_token,
            "model_type": self.shape.model_type,
            "assumptions": list(self.assumptions),
        }


def make_machine(
    *,
    gpu: str,
    config: Path | None,
    model: str,
    context: float | None,
    sharding: Sharding,
    link: str = AUTO,
    kv_bits: int | None = None,
    hop_us: float | None = None,
) -> Machine:
    """The machine that the options of a command describe.

    Without `config` the model's own name is tried: a server's ring has it, and it may be a folder. Raises LimitsError
    where something is missing or unknown; the message says which option tells it.
    """
    if config is None and model and (Path(model) / CONFIG_NAME).is_file():
        config = Path(model)
    if config is None:
        raise LimitsError(f"--gpu needs --config, the model's {CONFIG_NAME}: the bytes of a step follow from it")
    if context is None:
        raise LimitsError("--gpu needs --context, the mean number of tokens that a request attends to")
    shape = read_model_shape(config, kv_bits=kv_bits)
    found = find_gpu(gpu)
    weights = weight_bytes(shape, sharding)
    if weights > found.memory_bytes:
        raise LimitsError(
            f"{found.name} holds {found.memory_bytes / 1e9:,.0f} GB and a rank of {sharding.experts} would need "
            f"{weights / 1e9:,.1f} GB of weights: this model was not served like that"
        )
    return Machine(shape, found, found.link(link, sharding.tp, hop_us=hop_us), sharding, context)
