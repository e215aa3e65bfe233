"""Hook points of speculative decoding: the drafting of tokens after a step has sampled its own.

The range is all of it, the draft model's forward passes included; nothing inside is a range of its own. Verifying the
drafts is the step's own work, in its usual categories.
"""

from __future__ import annotations

from typing import Final

from vllm_k25_instrument.hooks.arguments import class_name
from vllm_k25_instrument.hooks.point import Args, HookKind, HookPoint, Kwargs
from vllm_k25_instrument.model import Category


def _drafter(args: Args, kwargs: Kwargs) -> str:
    """The class that drafts (``EagleProposer``): the runner's, which is ``self``."""
    return type(getattr(args[0], "drafter", None)).__name__


SPECULATION_POINTS: Final = (
    HookPoint(
        "speculation",
        HookKind.RANGE,
        "vllm.v1.worker.gpu_model_runner",
        "GPUModelRunner.propose_draft_token_ids",
        category=Category.SPECULATION,
        subclasses=True,
        detail=_drafter,
    ),
    HookPoint(
        "speculation",
        HookKind.RANGE,
        "vllm.v1.worker.gpu.spec_decode.speculator",
        "BaseSpeculator.propose",
        versions=">=0.23",
        category=Category.SPECULATION,
        subclasses=True,
        detail=class_name,
    ),
)
