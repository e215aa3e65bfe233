"""A vLLM plugin of the tests that sabotages the instrument while the server runs, as the environment asks.

``CHAOS_HOOKS=1``: the code of one hook raises, that of another recurses without end, that of a third sleeps.
``CHAOS_CLOCK``: a file whose number of seconds is added to the wall clock, read at each look at it.
``CHAOS_RELOADS``: so many seconds long the plugin is loaded again by four threads, and its module reloaded.
"""

from __future__ import annotations

import dataclasses
import importlib
import os
import threading
import time
from pathlib import Path
from typing import Any

SLEEP_S = 0.001
_registered = False


def register() -> None:
    """Entry point of ``vllm.general_plugins``."""
    global _registered
    if _registered:
        return
    _registered = True
    if os.environ.get("CHAOS_HOOKS"):
        _sabotage_hooks()
    if path := os.environ.get("CHAOS_CLOCK"):
        _move_the_clock(Path(path))
    if seconds := os.environ.get("CHAOS_RELOADS"):
        threading.Thread(target=_reload, args=(float(seconds),), daemon=True).start()


def _sabotage_hooks() -> None:
    from vllm_k25_instrument import worker

    def raises(args: Any, kwargs: Any) -> Any:
        raise RuntimeError("sabotaged by the test")

    def recurses(args: Any, kwargs: Any) -> Any:
        return recurses(args, kwargs)

    def sleeps(args: Any, kwargs: Any) -> str:
        time.sleep(SLEEP_S)
        return "slept"

    broken = {"all_reduce": ("nbytes", raises), "moe_experts": ("detail", recurses), "mla_decode": ("detail", sleeps)}
    worker.HOOK_TABLE = tuple(
        dataclasses.replace(point, **dict([broken[point.name]])) if point.name in broken else point
        for point in worker.HOOK_TABLE
    )


def _move_the_clock(path: Path) -> None:
    now, now_ns = time.time, time.time_ns
    time.time = lambda: now() + float(path.read_text())
    time.time_ns = lambda: now_ns() + int(float(path.read_text()) * 1e9)


def _reload(seconds: float) -> None:
    from vllm_k25_instrument import plugin

    until = time.monotonic() + seconds

    def load() -> None:
        while time.monotonic() < until:
            plugin.register()
            time.sleep(0.001)

    threads = [threading.Thread(target=load) for _ in range(4)]
    for thread in threads:
        thread.start()
    while time.monotonic() < until:
        importlib.reload(plugin)
        time.sleep(0.05)
    for thread in threads:
        thread.join()
