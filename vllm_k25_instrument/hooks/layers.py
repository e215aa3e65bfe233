"""Which layers a model has, as far as hooks go: what may be expected to fire, and what has no hook at all."""

from __future__ import annotations

from collections import Counter
from typing import Any, Final

KINDS: Final = ("mla_attention", "attention", "moe", "moe_shared_experts")
"""Kinds of layers that hooks time."""

WITHOUT_HOOK: Final = (
    "projections and dense MLPs",
    "norms and rotary embedding",
    "the logits",
    "Mamba, linear attention and other state-space layers",
    "sparse attention's indexer",
    "vision and audio encoders",
    "LoRA",
)
"""What vLLM may run in a step, and no hook times."""

_MLA: Final = frozenset({"MLAAttention"})
_ATTENTION: Final = frozenset({"Attention"})
_MOE: Final = frozenset({"MoERunner", "FusedMoE"})


def layers_of(runner: Any) -> dict[str, int]:
    """Kind -> how many layers of the model (the drafter's are not looked at): `KINDS`, and the class names of others.

    Others are what vLLM keeps state for (`static_forward_context`): Mamba, linear attention, an indexer's cache. Layers
    without state of their own, such as projections, norms and dense MLPs, are not counted. Kinds are told by class
    name, so that nothing of vLLM is imported.
    """
    context = runner.vllm_config.compilation_config.static_forward_context
    stateful = {id(layer) for layer in context.values()}
    found: Counter[str] = Counter()
    inner: set[int] = set()
    for module in runner.get_model().modules():
        names = {cls.__name__ for cls in type(module).__mro__}
        if id(module) in inner:
            continue
        if names & _MLA:
            found["mla_attention"] += 1
        elif names & _ATTENTION:
            found["attention"] += 1
        elif names & _MOE:
            found["moe"] += 1
            found["moe_shared_experts"] += getattr(module, "_shared_experts", None) is not None
            inner.update(map(id, module.modules()))
        elif id(module) in stateful:
            found[type(module).__name__] += 1
    return {kind: count for kind, count in found.items() if count}
