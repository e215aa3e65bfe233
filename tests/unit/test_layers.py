"""What a model is made of, as far as hooks go."""

from __future__ import annotations

from types import SimpleNamespace as Some
from typing import Any

from torch import nn

from vllm_k25_instrument.hooks.layers import layers_of


class Attention(nn.Module):
    """Called as vLLM calls its own, as all here."""


class ChunkedLocalAttention(Attention): ...


class MLAAttention(nn.Module): ...


class MambaMixer2(nn.Module): ...


class MoERunner(nn.Module):
    def __init__(self, shared: nn.Module | None = None) -> None:
        super().__init__()
        self._shared_experts = shared


class SharedExperts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.moe_inside = MoERunner()


def runner_of(*layers: nn.Module, stateful: tuple[Any, ...] = ()) -> Any:
    model = nn.ModuleList([nn.Sequential(layer, nn.Linear(1, 1)) for layer in layers])
    context = {f"layers.{n}": layer for n, layer in enumerate(stateful)}
    return Some(
        get_model=lambda: model,
        vllm_config=Some(compilation_config=Some(static_forward_context=context)),
    )


def test_layers_are_counted_by_kind_subclasses_included() -> None:
    found = layers_of(runner_of(MLAAttention(), Attention(), ChunkedLocalAttention(), MoERunner(), nn.Linear(1, 1)))
    assert found == {"mla_attention": 1, "attention": 2, "moe": 1}


def test_shared_experts_are_counted_where_there_are_some_and_what_is_inside_them_is_not() -> None:
    assert layers_of(runner_of(MoERunner(SharedExperts()), MoERunner())) == {"moe": 2, "moe_shared_experts": 1}


def test_a_layer_with_state_and_without_a_hook_goes_by_its_class() -> None:
    mamba, attention = MambaMixer2(), Attention()
    assert layers_of(runner_of(mamba, attention, stateful=(mamba, attention))) == {"MambaMixer2": 1, "attention": 1}


def test_the_drafters_layers_are_not_the_models() -> None:
    assert layers_of(runner_of(MLAAttention(), stateful=(Attention(),))) == {"mla_attention": 1}
