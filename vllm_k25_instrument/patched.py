"""What vLLM's source calls where it has been patched (`patches/`) instead of hooked.

`k25` is the decorator that the patches put on functions, and `k25_start` the call that they put into vLLM's
`load_general_plugins`. Without ``K25_INSTRUMENT=1`` both do nothing: a function stays the object that it was. Their
names and arguments are part of patched sources out there, and stay.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, TypeVar

from vllm_k25_instrument import plugin
from vllm_k25_instrument.log import logger

F = TypeVar("F", bound=Callable[..., Any])

WORKER: Final = "worker"
"""The mark of the constructor of vLLM's workers."""


def k25(hook: str) -> Callable[[F], F]:
    """Mark a function of vLLM as what the hook of that name is about. Never raises."""
    if not plugin.switched_on():
        return _as_it_is
    if hook == WORKER:
        return plugin.watched  # type: ignore[return-value]

    def mark(function: F) -> F:
        try:
            from vllm_k25_instrument.hooks import marks

            one = marks.Mark(hook, function)
            marks.add(one)
        except Exception:
            logger.exception("K25: %r is not marked; vLLM goes on without it", function)
            return function
        return one.marked  # type: ignore[return-value]

    return mark


def k25_start() -> None:
    """Start what this process's role asks for, as the plugin's entry point would. Idempotent; never raises."""
    plugin.start(hooks=False)


def _as_it_is(function: F) -> F:
    return function
