"""A vLLM plugin of the tests that makes one rank come late to every all-reduce.

``SLOW_RANK`` is the rank in its group, ``SLOW_MS`` by how much it is late, ``SLOW_LOG`` a file that gets by how much it
really was: a text line for each call, in ns.
"""

from __future__ import annotations

import functools
import os
from time import perf_counter_ns
from typing import Any


def register() -> None:
    """Entry point of ``vllm.general_plugins``."""
    from vllm.distributed.parallel_state import GroupCoordinator

    slow_rank, late_ns = int(os.environ["SLOW_RANK"]), int(float(os.environ["SLOW_MS"]) * 1e6)
    all_reduce = GroupCoordinator._all_reduce_out_place
    if hasattr(all_reduce, "__wrapped__"):  # vLLM loads plugins more than once
        return

    @functools.wraps(all_reduce)
    def late(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.rank_in_group == slow_rank:
            entered = perf_counter_ns()
            # Busy, and not asleep: who sleeps on a loaded machine is late by as much as the machine likes.
            while (was_late := perf_counter_ns() - entered) < late_ns:
                pass
            os.write(log, f"{was_late}\n".encode())
        return all_reduce(self, *args, **kwargs)

    log = os.open(os.environ["SLOW_LOG"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    GroupCoordinator._all_reduce_out_place = late
