"""The micro-benchmarks of `vllm-k25 bench`, each as a process of its own."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from vllm_k25_instrument.campaign.errors import CampaignError, NotPossibleError
from vllm_k25_instrument.campaign.load import last_line

BENCHES: Final = ("moe", "all-reduce", "overhead")
RESULT: Final = "bench.json"
LOG: Final = "bench.log"
_BENCH_S: Final = 1800.0
_POLL_S: Final = 0.2
_USAGE: Final = 2
_INCOMPLETE: Final = 3


def bench_command(name: str, options: Sequence[str], folder: Path) -> list[str]:
    """The command line of a micro-benchmark."""
    call = "from vllm_k25_instrument.cli import app; app()"
    return [sys.executable, "-P", "-c", call, "bench", name, *options, "--json", str(folder / RESULT)]


def run_bench(name: str, options: Sequence[str], folder: Path, progress: Callable[[str], None]) -> str:
    """Run one to its end; returns what there is to know. Its JSON and its output stay in `folder`.

    Raises CampaignError where it failed, NotPossibleError where it cannot run here.
    """
    log = folder / LOG
    began = time.monotonic()
    with log.open("wb") as output:
        process = subprocess.Popen(  # noqa: S603 (our own interpreter and command)
            bench_command(name, options, folder), stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
        )
    try:
        while process.poll() is None:
            elapsed = time.monotonic() - began
            progress(f"bench {name}, {elapsed:.0f} s")
            if elapsed > _BENCH_S:
                raise CampaignError(f"bench {name} did not end within {_BENCH_S:.0f} s")
            time.sleep(_POLL_S)
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()
    made = (folder / RESULT).is_file()
    if process.returncode == 0 and made:
        return ""
    why = last_line(log).removeprefix(f"vllm-k25 bench {name}: ")
    if process.returncode == _INCOMPLETE and made:
        return f"not all of it could be measured: {why}"
    if process.returncode == _USAGE:
        raise NotPossibleError(f"bench {name} cannot run here: {why}")
    raise CampaignError(f"bench {name} failed (exit status {process.returncode}): {why}; its output: {LOG}")
