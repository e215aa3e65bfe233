"""Ranks as processes: started together, watched, and ended together."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import msgspec

from vllm_k25_instrument.bench.errors import BenchError
from vllm_k25_instrument.bench.group import remove_shared_memory
from vllm_k25_instrument.bench.rank import MEETING, PLAN, STAGE, Plan, RankResult, rank_file

POLL_S: Final = 0.05
KILL_S: Final = 5.0
LAST_LINES: Final = 4096

Rank = subprocess.Popen[bytes]


def run_ranks(
    plan: Plan, say: Callable[[str], None], *, module: str = "vllm_k25_instrument.bench.rank"
) -> list[RankResult]:
    """Run all ranks of `plan` to their end, and return what each of them found.

    Raises BenchError where one fails, or where nothing new has happened for the plan's timeout; none is left running.
    """
    with tempfile.TemporaryDirectory(prefix="vllm_k25_bench-") as name:
        folder = Path(name)
        (folder / PLAN).write_bytes(msgspec.json.encode(plan))
        ranks: list[Rank] = []
        try:
            for rank in range(plan.ranks):
                ranks.append(_start(folder, rank, module))
            _wait(folder, ranks, plan.timeout, say)
        finally:
            _end(ranks)
            remove_shared_memory(folder / MEETING)
        return [_result(folder, rank) for rank in range(plan.ranks)]


def _start(folder: Path, rank: int, module: str) -> Rank:
    environment = {**os.environ, "K25_INSTRUMENT": "0"}
    with _log(folder, rank).open("wb") as log:
        return subprocess.Popen(  # noqa: S603 (our own interpreter and module)
            [sys.executable, "-P", "-m", module, str(folder), str(rank)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=environment,
        )


def _wait(folder: Path, ranks: Sequence[Rank], timeout: float, say: Callable[[str], None]) -> None:
    stage, since = "starting", time.monotonic()
    while True:
        codes = [rank.poll() for rank in ranks]
        for number, code in enumerate(codes):
            if code:
                how = f"was ended by signal {-code}" if code < 0 else f"ended with {code}"
                raise BenchError(f"rank {number} {how} while {stage}: {_last_line(folder, number)}")
        if not any(code is None for code in codes):
            return
        new = _read(folder / STAGE) or stage
        if new != stage:
            stage, since = new, time.monotonic()
            say(stage)
        if time.monotonic() - since > timeout:
            alive = ", ".join(str(number) for number, code in enumerate(codes) if code is None)
            raise BenchError(
                f"rank {alive} still running after {timeout:g} s without progress while {stage}: ended; "
                "--timeout allows more"
            )
        time.sleep(POLL_S)


def _end(ranks: Sequence[Rank]) -> None:
    """End those that still run. They hold nothing that would have to be written."""
    for rank in ranks:
        if rank.poll() is None:
            rank.kill()
    for rank in ranks:
        rank.wait(KILL_S)


def _result(folder: Path, rank: int) -> RankResult:
    try:
        return msgspec.json.decode((folder / rank_file(rank)).read_bytes(), type=RankResult)
    except (OSError, msgspec.DecodeError) as error:
        raise BenchError(f"rank {rank} ended without a result: {_last_line(folder, rank)} ({error})") from None


def _log(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}.log"


def _last_line(folder: Path, rank: int) -> str:
    lines = [line.strip() for line in _read(_log(folder, rank))[-LAST_LINES:].splitlines() if line.strip()]
    errors = [line for line in lines if "Error" in line and not line.startswith("File ")]
    return (errors or lines or ["it said nothing"])[-1]


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
