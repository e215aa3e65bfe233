"""A vLLM plugin of the tests that sabotages the instrument: every hook's own code raises, and it is loaded twice."""

from __future__ import annotations

import importlib
from typing import Any


def register() -> None:
    """Entry point of ``vllm.general_plugins``."""
    import dataclasses

    from vllm_k25_instrument import plugin, worker

    def broken(args: Any, kwargs: Any) -> Any:
        raise RuntimeError("sabotaged by the test")

    worker.HOOK_TABLE = tuple(
        dataclasses.replace(
            point,
            **{name: broken for name in ("detail", "layer", "path") if getattr(point, name) is not None},
        )
        for point in worker.HOOK_TABLE
    )
    importlib.reload(plugin)
    plugin.register()
    plugin.register()
