"""Two ranks of `bench all-reduce`, of which the second misbehaves: run in the place of the real module."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import msgspec

from vllm_k25_instrument.bench.rank import STAGE, RankResult, rank_file


def main(folder: Path, rank: int) -> None:
    behaviour = os.environ["K25_TEST_RANK"]
    Path(os.environ["K25_TEST_PIDS"], str(os.getpid())).touch()
    if rank == 0:
        (folder / STAGE).write_text("reducing")
    if behaviour == "fine" or (behaviour == "silent" and rank == 0):
        (folder / rank_file(rank)).write_bytes(msgspec.json.encode(RankResult([], {1: "x"}, [], threads=rank + 1)))
        return
    if rank == 0:
        time.sleep(600)  # as in a collective whose other side is gone
    time.sleep(0.5)
    if behaviour == "raises":
        raise ValueError("no such buffer")
    if behaviour == "dies":
        os.kill(os.getpid(), 9)
    if behaviour == "hangs":
        time.sleep(600)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
