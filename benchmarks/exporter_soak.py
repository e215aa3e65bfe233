"""Does the exporter's memory stay what it is? A million steps of an 8-rank node, under scrapes.

One process writes the steps as fast as it can, through the recorder and the rings that a worker has (8 ranks, every
16th step sampled, the ranges of Kimi-K2.5's decode steps), while a real `vllm-k25 export` is scraped once a second.
Prints the exporter's resident memory as it goes, the CPU time of a scrape, and what became of the samples.

Memory is bounded where the exporter ends with at most 5 % more than it had after the first tenth of the steps. Exits
with 1 where it is not, or where a step or a sample is missing from the metrics.

Usage: python benchmarks/exporter_soak.py [--steps N] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

RANKS: Final = 8
LAYERS: Final = 61
SAMPLE_EVERY: Final = 16
SCRAPE_PERIOD: Final = 1.0
ROWS: Final = 10
GROWTH_ALLOWED: Final = 1.05
BATCHES: Final = (1, 4, 16, 64, 256)


def write_steps(folder: Path, steps: int, channel: Connection) -> None:
    """The workers of a node, one after the other in one process; `steps` counts those of all ranks together."""
    from vllm_k25_instrument.recorder.device import HostClock
    from vllm_k25_instrument.recorder.recorder import Recorder

    def fail(_: Any, error: Exception) -> None:
        raise error

    recorders = [
        Recorder(ring(folder, rank), HostClock(), sample_every=SAMPLE_EVERY, on_error=fail) for rank in range(RANKS)
    ]
    models = [decode_step_of(recorder) for recorder in recorders]
    schedules = [schedule(requests) for requests in BATCHES]
    channel.send("ready")
    channel.recv()
    for number in range(steps // RANKS):
        scheduled = schedules[number // 1000 % len(schedules)]
        for recorder, run_model in zip(recorders, models, strict=True):
            recorder.begin_step(scheduled)
            if recorder.recording:  # an unsampled step's hooked calls do nothing
                run_model()
            recorder.end_step()
    channel.send("written")
    channel.recv()  # alive until the last scrape


def ring(folder: Path, rank: int) -> Any:
    from vllm_k25_instrument.hooks.names import HOOK_NAMES
    from vllm_k25_instrument.model import RankCoordinates, RankIdentity
    from vllm_k25_instrument.ring import DEFAULT_BYTES, DEFAULT_SAMPLES, RingLayout, RingWriter, ring_file_name

    identity = RankIdentity(
        instance="soak",
        pid=os.getpid(),
        coordinates=RankCoordinates(global_rank=rank, local_rank=rank, tp=rank, tp_size=RANKS),
        model="moonshotai/Kimi-K2.5",
        hooks=dict.fromkeys(HOOK_NAMES, "attached"),
        sample_every=SAMPLE_EVERY,
    )
    return RingWriter(folder / ring_file_name(rank), identity, RingLayout.plan(DEFAULT_SAMPLES, DEFAULT_BYTES))


def decode_step_of(recorder: Any) -> Callable[[], None]:
    """The hooked calls of one decode step; the model behind them is empty."""
    from vllm_k25_instrument.hooks.point import HookKind, HookPoint
    from vllm_k25_instrument.hooks.wrappers import wrap
    from vllm_k25_instrument.model import AllReducePath, Category

    def nothing() -> bool:
        return True

    def hooked(function: Callable[[], Any], kind: HookKind, name: str, **fields: Any) -> Callable[[], Any]:
        return wrap(function, HookPoint(name, kind, "model", f"Model.{name}", **fields), recorder)

    path = hooked(nothing, HookKind.PATH, "all_reduce_path", path=lambda args, kwargs: AllReducePath.PYNCCL)
    all_reduce = hooked(
        path, HookKind.RANGE, "all_reduce", category=Category.ALL_REDUCE, nbytes=lambda args, kwargs: 14_336
    )
    attention = hooked(nothing, HookKind.RANGE, "mla_decode", category=Category.MLA_ATTENTION)
    routing = hooked(nothing, HookKind.RANGE, "moe_routing", category=Category.MOE_ROUTING)
    experts = hooked(nothing, HookKind.RANGE, "moe_experts", category=Category.MOE_EXPERTS)
    sampling = hooked(nothing, HookKind.RANGE, "sampling", category=Category.SAMPLING)

    def decode_step() -> None:
        for _ in range(LAYERS):
            attention()
            all_reduce()
            routing()
            experts()
            all_reduce()
        sampling()

    return decode_step


def schedule(requests: int) -> SimpleNamespace:
    """What vLLM's scheduler says of a decode step with so many requests."""
    names = [str(n) for n in range(requests)]
    return SimpleNamespace(
        total_num_scheduled_tokens=requests,
        num_scheduled_tokens=dict.fromkeys(names, 1),
        scheduled_new_reqs=[],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=names, num_output_tokens=[1] * requests, num_computed_tokens=[9] * requests, resumed_req_ids=set()
        ),
        finished_req_ids=set(),
    )


class Exporter:
    """A running `vllm-k25 export`."""

    def __init__(self, folder: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "vllm_k25_instrument.cli", "export", str(folder), "--port", "0"],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None
        self._url = self._process.stdout.readline().rpartition(" at ")[2].strip()
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        self.cpu_ms: list[float] = []

    def scrape(self) -> str:
        before = self._cpu_s()
        with self._opener.open(self._url, timeout=60) as answer:
            text = str(answer.read().decode())
        self.cpu_ms.append((self._cpu_s() - before) * 1e3)
        return text

    def rss_mib(self) -> float:
        fields = Path(f"/proc/{self._process.pid}/statm").read_text().split()
        return int(fields[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20

    def descriptors(self) -> int:
        return len(os.listdir(f"/proc/{self._process.pid}/fd"))

    def _cpu_s(self) -> float:
        fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def stop(self) -> int:
        self._process.send_signal(signal.SIGTERM)
        return self._process.wait(30)


def total(text: str, name: str) -> int:
    """Sum of a counter over all its series."""
    return round(sum(float(value) for value in re.findall(rf"^{name}(?:{{.*}})? (\S+)$", text, re.M)))


def soak(folder: Path, steps: int) -> dict[str, Any]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    writer = context.Process(target=write_steps, args=(folder, steps, theirs))
    writer.start()
    ours.recv()
    exporter = Exporter(folder)
    rows: list[dict[str, float]] = []
    began = time.monotonic()
    ours.send("go")
    done = False
    while not done:
        done = ours.poll(SCRAPE_PERIOD)
        text = exporter.scrape()
        seen = total(text, "vllm_k25_steps_total")
        if seen >= steps * (len(rows) + 1) // ROWS or done:
            rows.append(
                {
                    "steps": seen,
                    "seconds": round(time.monotonic() - began, 1),
                    "rss_mib": round(exporter.rss_mib(), 1),
                    "descriptors": exporter.descriptors(),
                }
            )
            print(
                "{steps:>9} steps  {seconds:6.1f} s  {rss_mib:7.1f} MiB  {descriptors} descriptors".format(**rows[-1])
            )
    status = exporter.stop()
    ours.send("end")
    writer.join()
    aligned, skipped = (total(text, f"vllm_k25_alignment_steps{kind}_total") for kind in ("", "_skipped"))
    return {
        "ranks": RANKS,
        "steps": total(text, "vllm_k25_steps_total"),
        "steps_written": steps // RANKS * RANKS,
        "samples": total(text, "vllm_k25_steps_sampled_total"),
        "samples_written": -(-(steps // RANKS) // SAMPLE_EVERY) * RANKS,
        "samples_lost": total(text, "vllm_k25_samples_lost_total"),
        "steps_lined_up": aligned // RANKS,
        "steps_not_lined_up": skipped,
        "scrapes": len(exporter.cpu_ms),
        "scrape_cpu_ms_median": round(statistics.median(exporter.cpu_ms), 1),
        "scrape_cpu_ms_max": round(max(exporter.cpu_ms), 1),
        "exporter_exit_status": status,
        "memory": rows,
    }


def problems(result: dict[str, Any]) -> list[str]:
    """What should not be, in words."""
    first, last = result["memory"][0]["rss_mib"], result["memory"][-1]["rss_mib"]
    expected = result["samples_written"] // RANKS
    checks = {
        f"memory grew from {first} to {last} MiB": last > first * GROWTH_ALLOWED,
        "descriptors leak": result["memory"][-1]["descriptors"] > result["memory"][0]["descriptors"],
        "steps are missing": result["steps"] != result["steps_written"],
        "samples are missing": result["samples"] + result["samples_lost"] != result["samples_written"],
        "sampled steps are neither lined up nor counted as left out": result["steps_lined_up"]
        + result["steps_not_lined_up"]
        != expected,
        "the exporter did not end in order": result["exporter_exit_status"] != 0,
    }
    return [what for what, wrong in checks.items() if wrong]


def main() -> int:
    from vllm_k25_instrument.instances import default_ring_directory

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1_000_000, help="of all ranks together")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="k25-soak-", dir=default_ring_directory().parent) as folder:
        result = soak(Path(folder), options.steps)
    found = problems(result)
    first, last = (result["memory"][at]["rss_mib"] for at in (0, -1))
    print(json.dumps({key: value for key, value in result.items() if key != "memory"}, indent=2))
    print(f"memory: {first} MiB after the first tenth, {last} MiB at the end ({last / first - 1:+.1%})")
    print("; ".join(found) if found else "memory is bounded, and nothing is missing")
    if options.json:
        options.json.write_text(json.dumps(result | {"problems": found}, indent=1))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
