"""Layers with random weights whose work is done by vLLM's own methods, chosen and prepared as for a checkpoint."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

import torch

from vllm_k25_instrument.bench.errors import CannotRunError
from vllm_k25_instrument.bench.group import join_group, leave_group, remove_shared_memory
from vllm_k25_instrument.bench.sizes import ExpertLayer, Projection

if TYPE_CHECKING:
    from vllm_k25_instrument.bench.routing import Chosen

REPACKED_ON_CPU: Final = 8
"""Experts whose weights are really repacked on a CPU, where that takes half a second each; the others get copies. No
kernel's time depends on the values."""

GROUP_SECONDS: Final = 60.0

_INT32: Final = torch.iinfo(torch.int32)


class Experts:
    """One layer of INT4 experts, behind vLLM's compressed-tensors method (``CompressedTensorsWNA16MoEMethod``).

    On CUDA its Marlin kernels are asked for; on a CPU vLLM chooses.
    """

    def __init__(self, size: ExpertLayer, device: str) -> None:
        """Allocates about the layer's bytes. Raises CannotRunError where vLLM has no kernel for it here."""
        from compressed_tensors.quantization import QuantizationArgs  # type: ignore[import-untyped,unused-ignore]
        from vllm.config import VllmConfig, set_current_vllm_config
        from vllm.model_executor.layers.fused_moe.activation import MoEActivation
        from vllm.model_executor.layers.fused_moe.config import (
            FusedMoEConfig,
            FusedMoEParallelConfig,
            RoutingMethodType,
        )
        from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe import (
            compressed_tensors_moe_wna16 as wna16,
        )

        self._size = size
        self._device = device
        weights = QuantizationArgs(
            num_bits=size.precision.bits,
            group_size=size.precision.group or None,
            strategy="group" if size.precision.group else "channel",
            symmetric=True,
            type="int",
        )
        with set_current_vllm_config(VllmConfig()), torch.device(device):
            config = FusedMoEConfig(
                num_experts=size.experts,
                experts_per_token=size.active,
                hidden_dim=size.hidden,
                intermediate_size=size.intermediate,
                num_local_experts=size.experts,
                num_logical_experts=size.experts,
                activation=MoEActivation.SILU,
                device=device,
                routing_method=RoutingMethodType.DeepSeekV3,
                moe_parallel_config=FusedMoEParallelConfig.make_no_parallel(),
                in_dtype=torch.bfloat16,
                moe_backend="auto" if device == "cpu" else "marlin",
            )
            try:
                self._method: Any = wna16.CompressedTensorsWNA16MoEMethod(weights, None, config)
            except (NotImplementedError, ValueError) as error:
                raise CannotRunError(f"vLLM has no kernel here for experts of {size.shape}: {error}") from None
            self._layer = self._prepared(MoEActivation.SILU)

    @property
    def path(self) -> str:
        """The class that does the work, such as ``MarlinExperts``."""
        return str(self._method.experts_cls.__name__)

    def call(self, chosen: Chosen) -> Callable[[], object]:
        """The layer on as many tokens as `chosen` has rows, routed as it says, all experts weighted alike."""
        tokens, active = chosen.shape
        rows = torch.randn(tokens, self._size.hidden, dtype=torch.bfloat16, device=self._device)
        ids = torch.from_numpy(chosen).to(self._device)
        weights = torch.full((tokens, active), 1 / active, dtype=torch.float32, device=self._device)
        method, layer = self._method, self._layer
        return lambda: method.apply(layer, rows, weights, ids, None, None)

    def _prepared(self, activation: Any) -> Any:
        size, method = self._size, self._method
        repacked = min(size.experts, REPACKED_ON_CPU) if self._device == "cpu" else size.experts
        layer: Any = torch.nn.Module()
        method.create_weights(layer, repacked, size.hidden, size.intermediate, torch.bfloat16)
        for name in ("w13_weight_packed", "w2_weight_packed"):
            getattr(layer, name).data.random_(_INT32.min, _INT32.max)
        for name in ("w13_weight_scale", "w2_weight_scale"):
            getattr(layer, name).data.fill_(0.01)
        # What the method reads of a `RoutedExperts` layer.
        layer.intermediate_size_per_partition = size.intermediate
        layer.activation = activation
        layer.global_num_experts = size.experts
        layer.expert_map = None
        layer.apply_router_weight_on_input = False
        layer._expert_routing_tables = lambda: None
        method.process_weights_after_loading(layer)
        if repacked < size.experts:
            _repeat(layer, repacked, size.experts)
            layer.w13_weight, layer.w2_weight = layer.w13_weight_packed, layer.w2_weight_packed
            method._setup_kernel(layer)
        return layer


def _repeat(layer: torch.nn.Module, have: int, want: int) -> None:
    """Copies of the experts' parameters, so that there are `want` of them, each with memory of its own."""
    aliases = ("w13_weight", "w2_weight")
    for name, parameter in list(layer.named_parameters(remove_duplicate=False)):
        if name not in aliases and parameter.ndim and parameter.shape[0] == have:
            places = torch.arange(want, device=parameter.device) % have
            setattr(layer, name, torch.nn.Parameter(parameter.data[places], requires_grad=False))


class Projections:
    """Dense matrices, multiplied by vLLM's own linear methods. A one-rank group is open as long as this is.

    Already cut to what one rank has, so that no layer here knows of others.
    """

    def __init__(self, device: str) -> None:
        self._device = device
        self._folder = tempfile.TemporaryDirectory(prefix="vllm_k25_bench-")
        self._meeting = Path(self._folder.name) / "meeting"

    def __enter__(self) -> Self:
        join_group(0, 1, self._meeting, seconds=GROUP_SECONDS)
        return self

    def __exit__(self, *_: object) -> None:
        leave_group()
        remove_shared_memory(self._meeting)
        self._folder.cleanup()

    def call(self, size: Projection, tokens: int) -> tuple[str, Callable[[], object]]:
        """The projection on `tokens` rows as vLLM multiplies it: by what, and the call."""
        from vllm.config import VllmConfig, set_current_vllm_config
        from vllm.model_executor.layers.fused_moe.router.gate_linear import GateLinear
        from vllm.model_executor.layers.linear import ReplicatedLinear

        if size.heads > 1:
            # As in `MLAAttention`: the queries by head, times a matrix per head.
            rows = self._random(size.heads, tokens, size.inputs)
            matrices = self._random(size.heads, size.inputs, size.outputs)
            return "torch.bmm", lambda: torch.bmm(rows, matrices)
        x = self._random(tokens, size.inputs)
        kind = GateLinear if size.gate else ReplicatedLinear
        with set_current_vllm_config(VllmConfig()), torch.device(self._device):
            layer: Any = kind(size.inputs, size.outputs, bias=False, params_dtype=torch.bfloat16)
            layer.weight.data.normal_()
            layer.quant_method.process_weights_after_loading(layer)
        return kind.__name__, lambda: layer(x)

    def _random(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, dtype=torch.bfloat16, device=self._device)
