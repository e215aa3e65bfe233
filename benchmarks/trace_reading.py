"""How fast torch.profiler traces are read, beside what else reads them, and in how much memory.

    python benchmarks/trace_reading.py [--steps 155] [--times 10] [--rounds 3] [--without-hta] [--directory DIR]

Generates the trace of one rank of Kimi-K2.5 (155 decode steps of 915 kernels, CPU operators and flows; it compresses
about as well as a real one), and one `--times` as long, and reads each with

* this package's reader, which ends with kernels joined to launches, launches to operators, everything sorted;
* HolisticTraceAnalysis 0.5 (``TraceAnalysis`` and its kernel breakdown), in a virtual environment of its own that is
  made in the temporary folder; left out, with the reason, where that cannot be made. Only the shorter trace: of the
  longer one it would need ten times the memory;
* ``json.load`` of the plain JSON, which ends with a tree of Python objects;
* ``gzip`` alone, which ends with nothing.

Each runs in a process of its own, in turns, so that ratios come from one run; the best of the rounds counts. Memory is
the peak resident set above what the process had after its imports. Last: eight ranks on the cores of this machine,
beside one of them in this process; the median of seven pairs.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import subprocess
import sys
import tempfile
import venv
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

AIMS: Final = {"hta": 20.0, "json.load": 3.0}
AIM_GUNZIP: Final = 5.0
AIM_RANKS: Final = 4.5
AIM_SMALL: Final = 3.0
AIM_LARGE_MIB: Final = 1_536.0

MEASURE: Final = """
import gc, json, resource, sys, time
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
path = sys.argv[1]
{imports}
before = peak()
start = time.perf_counter()
{work}
seconds = time.perf_counter() - start
print(json.dumps({{"seconds": seconds, "mib": peak() - before, "kernels": kernels, "ns": ns}}))
"""

OURS: Final = MEASURE.format(
    imports="from pathlib import Path\nfrom vllm_k25_instrument.analysis.torch_trace import read_torch_trace",
    work="""
(capture,) = read_torch_trace(Path(path))
kernel = capture.activities.kind == 0
kernels, ns = int(kernel.sum()), int(capture.activities.duration_ns[kernel].sum())
assert (capture.activities.launch >= 0).all()
""",
)
JSON_LOAD: Final = MEASURE.format(
    imports="",
    work="""
with open(path) as file:
    events = json.load(file)["traceEvents"]
kernels, ns = 0, 0
""",
)
GUNZIP: Final = MEASURE.format(
    imports="import gzip",
    work="""
with gzip.open(path) as file:
    while file.read(1 << 20):
        pass
kernels, ns = 0, 0
""",
)
HTA: Final = MEASURE.format(
    imports="import logging\nfrom hta.trace_analysis import TraceAnalysis\nlogging.disable(logging.CRITICAL)",
    work="""
analysis = TraceAnalysis(trace_files={0: path}, trace_dir="")
_, metrics = analysis.get_gpu_kernel_breakdown(visualize=False, num_kernels=100)
kernels, ns = 0, int(metrics["sum (us)"].sum() * 1000)
""",
)

RANKS: Final = """
import json, sys, time
from pathlib import Path
from vllm_k25_instrument.analysis.inputs import expand
from vllm_k25_instrument.analysis.workers import Job, run_here, run_on_cores
if __name__ == "__main__":
    jobs = [Job(one) for one in expand([Path(sys.argv[1])])]
    run_here(jobs[:1], lambda n: None)
    pairs = []
    for _ in range(7):
        start = time.perf_counter()
        run_here(jobs[:1], lambda n: None)
        one = time.perf_counter() - start
        start = time.perf_counter()
        done = run_on_cores(jobs, lambda n: None)
        assert all(d.failure is None for d in done), done
        pairs.append((one, time.perf_counter() - start))
    one, all_ranks = sorted(pairs, key=lambda pair: pair[1] / pair[0])[len(pairs) // 2]
    print(json.dumps({"one": one, "all": all_ranks, "ranks": len(jobs)}))
"""


@dataclass(frozen=True)
class Trace:
    """A generated trace, plain and gzip."""

    plain: Path
    packed: Path

    @property
    def mib(self) -> float:
        """MiB of JSON."""
        return self.plain.stat().st_size / 2**20


def generate(directory: Path, steps: int) -> Trace:
    """Write the trace of one rank."""
    from tests.traces import k25_rank

    trace = Trace(directory / f"{steps}-steps.json", directory / f"{steps}-steps.json.gz")
    with trace.plain.open("wb") as plain, gzip.open(trace.packed, "wb", compresslevel=6) as packed:
        for piece in k25_rank(steps):
            plain.write(piece)
            packed.write(piece)
    return trace


def measure(python: Path, code: str, path: Path) -> dict[str, Any]:
    """What one run of `code` in a fresh interpreter printed last."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([python, "-c", code, str(path)], capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr.strip().splitlines()[-1] if done.stderr.strip() else f"exit {done.returncode}")
    result: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return result


def hta_python(directory: Path) -> Path:
    """An interpreter that has HolisticTraceAnalysis. Raises RuntimeError where it cannot be installed."""
    folder = directory / "hta"
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    wanted = ["HolisticTraceAnalysis==0.5.*", "pandas<3"]
    done = subprocess.run([python, "-m", "pip", "install", "-q", *wanted], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError((done.stderr.strip().splitlines() or ["pip failed"])[-1])
    return python


def compare(trace: Trace, rounds: int, hta: Path | None, *, large: bool) -> None:
    """Read one trace in all ways, in turns, and print a table."""
    ways: dict[str, tuple[Path, str, Path]] = {
        "ours, gzip": (Path(sys.executable), OURS, trace.packed),
        "ours, plain": (Path(sys.executable), OURS, trace.plain),
        "json.load": (Path(sys.executable), JSON_LOAD, trace.plain),
        "gunzip": (Path(sys.executable), GUNZIP, trace.packed),
    }
    if hta is not None:
        ways["hta"] = (hta, HTA, trace.packed)
    best: dict[str, dict[str, Any]] = {}
    for _ in range(rounds):
        for name, (python, code, path) in list(ways.items()):
            try:
                found = measure(python, code, path)
            except RuntimeError as error:
                print(f"  {name}: left out: {error}")
                del ways[name]
                continue
            if name not in best or found["seconds"] < best[name]["seconds"]:
                best[name] = found
    ours = best["ours, gzip"]
    print(f"{trace.mib:,.0f} MiB of JSON, {ours['kernels']:,} kernels, {ours['ns'] / 1e6:,.3f} ms")
    for name, found in best.items():
        ratio = found["seconds"] / ours["seconds"]
        aim = (
            f" (aim: {AIMS[name]:g})"
            if name in AIMS
            else f" (aim: ours at most {AIM_GUNZIP:g} x)"
            if name == "gunzip"
            else ""
        )
        shown = f"{ratio:7.1f} x ours" if ratio >= 1 else f"ours {1 / ratio:5.2f} x"
        print(f"  {name:12} {found['seconds']:8.3f} s  {found['mib']:8,.0f} MiB  {shown}{aim}")
    peak = max(ours["mib"], best["ours, plain"]["mib"])
    if large:
        print(f"  peak memory {peak:,.0f} MiB (aim: {AIM_LARGE_MIB:,.0f} MiB for 1 GiB of JSON)")
    else:
        print(f"  peak memory {peak / trace.mib:.2f} x the JSON (aim: {AIM_SMALL:g})")


def ranks(directory: Path, trace: Trace, count: int = 8) -> None:
    """Analyse copies of a trace as the ranks of one run, on all cores."""
    folder = directory / "ranks"
    folder.mkdir()
    for rank in range(count):
        (folder / f"rank-{rank}.json.gz").symlink_to(trace.packed)
    for copy in sorted(folder.iterdir()):
        data = copy.read_bytes()
        copy.unlink()
        copy.write_bytes(data)
    script = directory / "ranks.py"
    script.write_text(RANKS)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, script, folder], capture_output=True, text=True, env=environment, check=False
    )
    if done.returncode:
        print(f"{count} ranks: left out: {(done.stderr.strip().splitlines() or ['?'])[-1]}")
        return
    found = json.loads(done.stdout.strip().splitlines()[-1])
    cores = len(os.sched_getaffinity(0))
    print(
        f"{found['ranks']} ranks analysed on {cores} cores: {found['all']:.2f} s, {found['all'] / found['one']:.2f} x "
        f"one rank ({found['one']:.2f} s; aim on 2 cores: {AIM_RANKS:g} x)"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=155)
    parser.add_argument("--times", type=int, default=10, help="length of the longer trace in shorter ones; 0: none")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--without-hta", action="store_true")
    parser.add_argument("--directory", type=Path, default=None)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.directory) as name:
        directory = Path(name)
        hta = None
        if not arguments.without_hta:
            try:
                hta = hta_python(directory)
            except (RuntimeError, OSError, subprocess.CalledProcessError) as error:
                print(f"HolisticTraceAnalysis is left out: {error}")
        trace = generate(directory, arguments.steps)
        compare(trace, arguments.rounds, hta, large=False)
        ranks(directory, trace)
        if arguments.times:
            trace.plain.unlink()
            trace.packed.unlink()
            compare(generate(directory, arguments.steps * arguments.times), 1, None, large=True)


if __name__ == "__main__":
    main()
