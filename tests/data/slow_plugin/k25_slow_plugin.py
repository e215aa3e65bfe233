"""A vLLM plugin of the tests that makes one rank come late to every all-reduce.

``SLOW_RANK`` is the rank in its group, ``SLOW_MS`` by how much it is late.
"""

from __future__ import annotations

import functools
import os
import time
from typing import Any


def register() -> None:
    """Entry point of ``vllm.general_plugins``."""
    from vllm.distributed.parallel_state import GroupCoordinator

    slow_rank, late_s = int(os.environ["SLOW_RANK"]), float(os.environ["SLOW_MS"]) / 1e3
    all_reduce = GroupCoordinator._all_reduce_out_place
    if hasattr(all_reduce, "__wrapped__"):  # vLLM loads plugins more than once
        return

    @functools.wraps(all_reduce)
    def late(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.rank_in_group == slow_rank:
            until = time.perf_counter() + late_s
            time.sleep(late_s * 0.8)
            while time.perf_counter() < until:  # a sleep alone is late by as much as the machine likes
                pass
        return all_reduce(self, *args, **kwargs)

    GroupCoordinator._all_reduce_out_place = late
