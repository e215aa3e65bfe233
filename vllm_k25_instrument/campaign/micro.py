"""The micro-benchmarks of `vllm-k25 bench`, each as a process of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from vllm_k25_instrument.campaign.child import last_line, python_command, run_child
from vllm_k25_instrument.campaign.errors import CampaignError, NotPossibleError

BENCHES: Final = ("moe", "all-reduce", "overhead")
RESULT: Final = "bench.json"
LOG: Final = "bench.log"
_BENCH_S: Final = 1800.0
_USAGE: Final = 2
_INCOMPLETE: Final = 3


def bench_command(name: str, options: Sequence[str], folder: Path) -> list[str]:
    """The command line of a micro-benchmark."""
    arguments = ["bench", name, *options, "--json", str(folder / RESULT)]
    return python_command("from vllm_k25_instrument.cli import app; app()", arguments)


def run_bench(name: str, options: Sequence[str], folder: Path, progress: Callable[[str], None]) -> str:
    """Run one to its end; returns what there is to know. Its JSON and its output stay in `folder`.

    Raises CampaignError where it failed, NotPossibleError where it cannot run here.
    """
    log = folder / LOG
    status = run_child(bench_command(name, options, folder), log, f"bench {name}", _BENCH_S, progress)
    made = (folder / RESULT).is_file()
    if status == 0 and made:
        return ""
    why = last_line(log).removeprefix(f"vllm-k25 bench {name}: ")
    if status == _INCOMPLETE and made:
        return f"not all of it could be measured: {why}"
    if status == _USAGE:
        raise NotPossibleError(f"bench {name} cannot run here: {why}")
    raise CampaignError(f"bench {name} failed (exit status {status}): {why}; its output: {LOG}")
