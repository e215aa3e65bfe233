"""Measures and checks, on a machine with one CUDA GPU, what the tests elsewhere can only simulate; writes one JSON.

    python tests/gpu/measure.py [OUT.json]      see README.md, and run.sh beside it

Needs PyTorch 2.8 or newer with CUDA. It needs neither vLLM nor the network, and ends within four minutes: what there is
no time left for is reported as such.
"""

from __future__ import annotations

import gc
import json
import platform
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from tests.gpu.catalogue import CHECKS, SCHEMA  # noqa: E402
from tests.gpu.device import CudaGpu, capturing  # noqa: E402
from tests.gpu.nvtx_log import NotAvailableError  # noqa: E402
from tests.gpu.nvtx_log import check as check_nvtx_log  # noqa: E402

SECONDS = 150.0
"""No check begins later than this."""

MINIMUM_TORCH = (2, 8)

MEASUREMENTS = ROOT / "docs" / "measurements"


@dataclass
class Outcome:
    """What a check found. `reason` says why it did not pass, or what it was made on."""

    passed: bool
    figures: dict[str, Any] = field(default_factory=dict)
    reason: str = ""


def timing_pair() -> tuple[Any, Any]:
    start, end = (torch.cuda.Event(enable_timing=True, external=True) for _ in range(2))
    return start, end


def elapsed_us(pair: tuple[Any, Any]) -> float:
    return float(pair[0].elapsed_time(pair[1])) * 1e3


def median_us(samples: Sequence[float]) -> float:
    return round(statistics.median(samples), 3)


def alone_us(gpu: Any, us: float) -> float:
    """How long `gpu.spin(us)` really takes now, timed eagerly."""
    measured = []
    for _ in range(5):
        pair = timing_pair()
        gpu.spin(500)
        pair[0].record()
        gpu.spin(us)
        pair[1].record()
        torch.cuda.synchronize()
        measured.append(elapsed_us(pair))
    return statistics.median(measured)


# --- timing ----------------------------------------------------------------------------------------------


def check_timing_in_graph(gpu: Any) -> Outcome:
    works: dict[str, Callable[[], None]] = {
        f"spin {us} us": (lambda us=us: gpu.spin(us))  # type: ignore[misc]
        for us in (5, 20, 100)
    }
    for n in (256, 1024, 4096):
        a, b, out = (gpu.matrix(n) for _ in range(3))
        works[f"matmul {n}"] = lambda a=a, b=b, out=out: gpu.multiply(a, b, out)  # type: ignore[misc]
    for work in works.values():
        work()
    eager = [timing_pair() for _ in works]
    in_graph = [timing_pair() for _ in works]

    def forward(pairs: list[tuple[Any, Any]]) -> None:
        for (start, end), work in zip(pairs, works.values(), strict=True):
            start.record()
            work()
            end.record()

    graph = torch.cuda.CUDAGraph()
    with capturing(graph):
        forward(in_graph)
    eager_us: list[list[float]] = []
    graph_us: list[list[float]] = []
    for _ in range(25):
        gpu.spin(2_000)  # the host must be ahead, or launches show up as kernel time
        forward(eager)
        gpu.spin(2_000)
        graph.replay()
        torch.cuda.synchronize()
        eager_us.append([elapsed_us(pair) for pair in eager])
        graph_us.append([elapsed_us(pair) for pair in in_graph])
    rows = []
    for index, name in enumerate(works):
        one, other = (median_us([sample[index] for sample in samples]) for samples in (eager_us, graph_us))
        rows.append({"kernel": name, "eager_us": one, "graph_us": other, "difference_us": round(other - one, 3)})
    fits = all(abs(row["difference_us"]) <= max(3.0, 0.05 * row["eager_us"]) for row in rows)
    return Outcome(
        fits, {"largest_difference_us": max((row["difference_us"] for row in rows), key=abs), "kernels": rows}
    )


def check_event_node_cost(gpu: Any) -> Outcome:
    kernels, x = 500, gpu.matrix(16)
    rows = []
    gpu.increment(x)
    for pairs_wanted in (0, 10, 100, 500):
        pairs = [timing_pair() for _ in range(pairs_wanted)]
        graph = torch.cuda.CUDAGraph()
        gc.collect()  # graphs of before must not give their memory back in between
        torch.cuda.synchronize()
        free = torch.cuda.mem_get_info()[0]
        with capturing(graph):
            for index in range(kernels):
                if index < pairs_wanted:
                    pairs[index][0].record()
                gpu.increment(x)
                if index < pairs_wanted:
                    pairs[index][1].record()
        graph.replay()
        torch.cuda.synchronize()
        nbytes = free - torch.cuda.mem_get_info()[0]
        device_us, host_us = [], []
        for _ in range(20):
            around = timing_pair()
            gpu.spin(500)
            around[0].record()
            began = time.perf_counter_ns()
            graph.replay()
            host_us.append((time.perf_counter_ns() - began) / 1e3)
            around[1].record()
            torch.cuda.synchronize()
            device_us.append(elapsed_us(around))
        rows.append(
            {
                "pairs": pairs_wanted,
                "replay_us": median_us(device_us),
                "launch_host_us": median_us(host_us),
                "graph_bytes": nbytes,
            }
        )
    first, last = rows[0], rows[-1]
    nodes = 2 * last["pairs"]
    return Outcome(
        True,
        {
            "ns_per_event_node": round((last["replay_us"] - first["replay_us"]) * 1e3 / nodes, 1),
            "replay_us_0_pairs": first["replay_us"],
            "replay_us_500_pairs": last["replay_us"],
            "bytes_per_event_node": round((last["graph_bytes"] - first["graph_bytes"]) / nodes),
            "graphs": rows,
        },
    )


def check_side_streams(gpu: Any) -> Outcome:
    main_pair, side_pair, both_pair = (timing_pair() for _ in range(3))
    side, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with capturing(graph):
        main = torch.cuda.current_stream()
        both_pair[0].record()
        side.wait_stream(main)
        main_pair[0].record()
        gpu.spin(300)
        main_pair[1].record()
        with torch.cuda.stream(side):
            side_pair[0].record()
            gpu.spin(200)
            side_pair[1].record()
        main.wait_stream(side)
        both_pair[1].record()
    for _ in range(5):
        graph.replay()
        torch.cuda.synchronize()
    main_us, side_us, both_us = (round(elapsed_us(pair), 3) for pair in (main_pair, side_pair, both_pair))
    alone = [alone_us(gpu, 300), alone_us(gpu, 200)]
    as_alone = all(abs(us - one) <= 0.1 * one for us, one in zip((main_us, side_us), alone, strict=True))
    passed = as_alone and both_us < main_us + side_us / 2
    return Outcome(passed, {"main_us": main_us, "side_us": side_us, "both_us": both_us})


def check_read_back_cost(gpu: Any) -> Outcome:
    count = 1000
    events = [torch.cuda.Event(enable_timing=True) for _ in range(count)]

    def each(action: Callable[[Any], Any]) -> int:
        began = time.perf_counter_ns()
        for event in events:
            action(event)
        return (time.perf_counter_ns() - began) // count

    each(lambda event: event.record())
    torch.cuda.synchronize()
    record = each(lambda event: event.record())
    torch.cuda.synchronize()
    query = each(lambda event: event.query())
    read = each(lambda event: events[0].elapsed_time(event))
    return Outcome(True, {"record_ns": record, "query_ns": query, "elapsed_time_ns": read})


# --- graphs ----------------------------------------------------------------------------------------------


def check_own_graph_unchanged(gpu: Any) -> Outcome:
    from tests.gpu.package import Size, instrument

    layers, size = 6, Size(4)
    a, b, out = (gpu.matrix(256) for _ in range(3))
    side = torch.cuda.Stream()

    def forward_with(call: Callable[[Any, Any, Any], None]) -> None:
        for _ in range(layers):
            main = torch.cuda.current_stream()
            side.wait_stream(main)
            with torch.cuda.stream(side):
                gpu.increment(b)
            main.wait_stream(side)
            call(a, b, out)

    forward_with(gpu.multiply)
    plain = torch.cuda.CUDAGraph(keep_graph=True)
    with capturing(plain):
        forward_with(gpu.multiply)
    without_us = gpu.nodes(plain)
    with instrument() as made:
        hooked = made.hooked(gpu.multiply)
        made.capture([size], lambda _: forward_with(hooked), keep_graph=True)
        own, twin = made.owner.graphs[size], made.twin(size)
        before, timed = gpu.nodes(own), gpu.nodes(twin)
        for _ in range(3):
            made.step(size)
            made.settle()
        after = gpu.nodes(own)
        problems = [
            *(["the own graph differs from the one captured without us"] if before != without_us else []),
            *(["the own graph has changed"] if after != before else []),
            *(["the twin's kernels differ"] if timed.without("event_record") != own_kernels(before) else []),
            *(["the twin's event nodes are not two per range"] if timed.count("event_record") != 2 * layers else []),
            *(f"error in the package: {error}" for error in made.errors),
        ]
    return Outcome(
        not problems, {"own_nodes": len(before.labels), "twin_nodes": len(timed.labels)}, "; ".join(problems)
    )


def own_kernels(nodes: Any) -> Any:
    return nodes.without("event_record")


class Graphs:
    """Own graphs and twins in dictionaries that are exchanged, as those of vLLM's classes are."""

    def __init__(self) -> None:
        self.own: dict[str, Any] = {}
        self.twins: dict[str, Any] = {}
        self.current = self.own
        self.pairs: list[tuple[Any, Any]] = []

    def capture(self, key: str, work: Callable[[], None]) -> None:
        self.own[key] = torch.cuda.CUDAGraph()
        with capturing(self.own[key]):
            work()
        self.twins[key] = torch.cuda.CUDAGraph()
        start, end = timing_pair()
        with capturing(self.twins[key]):
            start.record()
            work()
            end.record()
        self.pairs.append((start, end))

    def replay(self, key: str) -> None:
        self.current[key].replay()


def exchanged_outputs_agree(gpu: Any, inputs: Any, forward: Callable[[], Any], graphs: Graphs) -> Outcome:
    """`forward` on the same inputs with own graphs, twins and own graphs again, for several inputs."""
    differing, all_outputs = 0, []
    for _ in range(6):
        fresh = gpu.matrix(inputs.shape[0])
        outputs = []
        for dictionary in (graphs.own, graphs.twins, graphs.own):
            graphs.current = dictionary
            inputs.copy_(fresh)
            result = forward()
            torch.cuda.synchronize()
            outputs.append(result.clone())
        differing += not all(torch.equal(outputs[0], output) for output in outputs[1:])
        all_outputs.append(outputs[0])
    if any(torch.equal(one, other) for one, other in pairwise(all_outputs)):
        return Outcome(False, {}, "the outputs do not depend on the inputs")
    timed = all(elapsed_us(pair) > 0 for pair in graphs.pairs)
    return Outcome(differing == 0 and timed, {"rounds": len(all_outputs), "differing": differing})


def check_twin_swap_full(gpu: Any) -> Outcome:
    inputs, weights, hidden, out = (gpu.matrix(512) for _ in range(4))

    def work() -> None:
        gpu.multiply(inputs, weights, hidden)
        gpu.multiply(hidden, weights, out)

    work()
    graphs = Graphs()
    graphs.capture("bs4", work)

    def forward() -> Any:
        graphs.replay("bs4")
        return out

    return exchanged_outputs_agree(gpu, inputs, forward, graphs)


def check_twin_swap_piecewise(gpu: Any) -> Outcome:
    inputs, weights, first, between, second, out = (gpu.matrix(512) for _ in range(6))
    pieces = {
        "first": lambda: gpu.multiply(inputs, weights, first),
        "second": lambda: gpu.multiply(between, weights, second),
        "third": lambda: gpu.multiply(second, weights, out),
    }
    graphs = Graphs()
    for name, work in pieces.items():
        work()
        graphs.capture(name, work)

    def forward() -> Any:
        graphs.replay("first")
        gpu.multiply(first, first, between)  # eager, as attention is
        graphs.replay("second")
        graphs.replay("third")
        return out

    return exchanged_outputs_agree(gpu, inputs, forward, graphs)


def check_double_queued(gpu: Any) -> Outcome:
    start, end = timing_pair()
    graph = torch.cuda.CUDAGraph()
    with capturing(graph):
        start.record()
        gpu.spin(200)
        end.record()
    graph.replay()
    torch.cuda.synchronize()
    alone = elapsed_us((start, end))
    gpu.spin(20_000)
    graph.replay()
    graph.replay()
    pending_from = "node" if start.query() and end.query() else "launch"
    torch.cuda.synchronize()
    both = elapsed_us((start, end))
    return Outcome(
        abs(both - alone) <= max(3.0, 0.1 * alone),
        {"events_pending_from": pending_from, "alone_us": round(alone, 3), "queued_us": round(both, 3)},
    )


def check_package_steps(gpu: Any) -> Outcome:
    from tests.gpu.package import Size, instrument

    steps, sample_every, depth = 90, 2, 3
    times_us = {Size(1): 100.0, Size(2): 200.0, Size(4): 400.0}
    expected_us = {size.num_tokens: alone_us(gpu, us) for size, us in times_us.items()}
    problems: list[str] = []
    with instrument(sample_every) as made:
        hooked = made.hooked(gpu.spin)
        made.capture(list(times_us), lambda size: hooked(times_us[size]))
        in_flight: list[Any] = []
        sizes = list(times_us)
        for number in range(steps):
            if len(in_flight) >= depth:
                in_flight.pop(0).synchronize()
            made.step(sizes[number // 2 % len(sizes)])
            done = torch.cuda.Event()
            done.record()
            in_flight.append(done)
        made.settle()
        samples, lost = made.samples(), made.lost()
        for sample in samples:
            expected = expected_us[sample.requests]
            measured = [r.duration_ns / 1e3 for r in sample.ranges]
            if len(measured) != 1 or abs(measured[0] - expected) > 0.15 * expected:
                problems.append(f"step {sample.step}: {measured} us instead of {expected} us")
        due = len(range(0, steps, sample_every))
        if len(samples) + sum(lost.values()) != due:
            problems.append(f"{due} steps were due")
        problems += [f"error in the package: {error}" for error in made.errors]
    return Outcome(
        bool(samples) and not problems,
        {"due": due, "sampled": len(samples), "lost": sum(lost.values()), "lost_by_reason": lost},
        "; ".join(problems[:5]),
    )


# --- what runs in processes of its own -------------------------------------------------------------------


def check_nvtx(gpu: Any) -> Outcome:
    return Outcome(*check_nvtx_log())


def check_simulator_rules(gpu: Any) -> Outcome:
    run = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("rules.py"))], capture_output=True, text=True, timeout=60
    )
    if run.returncode:
        return Outcome(False, {}, f"the probes ended with {run.returncode}: {run.stderr.strip()[-500:]}")
    return outcome_of_probes(json.loads(run.stdout.splitlines()[-1]))


def outcome_of_probes(probes: dict[str, dict[str, Any]]) -> Outcome:
    wrong = [name for name, probe in probes.items() if not probe["agrees"]]
    reason = "; ".join(f"{name}: {probes[name]['observed'] or 'nothing refused'}" for name in wrong)
    return Outcome(not wrong, {"rules": len(probes), "disagreements": len(wrong), "probes": probes}, reason)


# --- all of it -------------------------------------------------------------------------------------------

FUNCTIONS: dict[str, Callable[[Any], Outcome]] = {
    "timing_in_graph": check_timing_in_graph,
    "own_graph_unchanged": check_own_graph_unchanged,
    "event_node_cost": check_event_node_cost,
    "twin_swap_full": check_twin_swap_full,
    "twin_swap_piecewise": check_twin_swap_piecewise,
    "double_queued": check_double_queued,
    "package_steps": check_package_steps,
    "side_streams": check_side_streams,
    "read_back_cost": check_read_back_cost,
    "nvtx_log": check_nvtx,
    "simulator_rules": check_simulator_rules,
}


def run_check(name: str, gpu: Any) -> dict[str, Any]:
    """One check's entry in the JSON; an exception becomes its reason."""
    began = time.monotonic()
    try:
        outcome = FUNCTIONS[name](gpu)
        status, figures, reason = "passed" if outcome.passed else "failed", outcome.figures, outcome.reason
    except (ImportError, NotAvailableError) as error:
        status, figures, reason = "not available", {}, str(error)
    except Exception as error:
        status, figures, reason = "failed", {}, f"{type(error).__name__}: {error}"
    return {"status": status, "reason": reason, "figures": figures, "seconds": round(time.monotonic() - began, 2)}


def measure(gpu: Any, names: Sequence[str] = tuple(check.name for check in CHECKS)) -> dict[str, Any]:
    """The JSON: see README.md."""
    began = time.monotonic()
    checks: dict[str, Any] = {}
    for name in names:
        if time.monotonic() - began > SECONDS:
            checks[name] = {"status": "not available", "reason": "no time left", "figures": {}, "seconds": 0.0}
            continue
        checks[name] = run_check(name, gpu)
        print(f"{checks[name]['status']:>13}  {name}  {checks[name]['reason']}", file=sys.stderr, flush=True)
    return {
        "schema": SCHEMA,
        "measured_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "environment": {
            **gpu.environment(),
            "torch": str(torch.__version__),
            "python": platform.python_version(),
            "system": f"{platform.system()} {platform.machine()}",
            "commit": _commit(),
        },
        "checks": checks,
    }


def _commit() -> str:
    """The revision that was measured, with a + where files differ from it; "" outside of a git checkout."""
    try:
        run = subprocess.run(
            ["git", "describe", "--always", "--dirty=+", "--abbrev=12"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return ""
    return run.stdout.strip()


def why_not() -> str:
    """Why nothing can be measured here; "" where it can."""
    version = tuple(int(part) for part in torch.__version__.split(".")[:2])
    if version < MINIMUM_TORCH:
        return f"needs PyTorch {MINIMUM_TORCH[0]}.{MINIMUM_TORCH[1]} or newer, this is {torch.__version__}"
    if torch.version.hip is not None:
        return "needs CUDA, this PyTorch is built for ROCm"
    return "" if torch.cuda.is_available() else "needs a CUDA GPU"


def default_name(result: dict[str, Any]) -> str:
    """``nvidia-h200-2026-01-31.json``"""
    gpu = re.sub(r"[^a-z0-9]+", "-", result["environment"]["gpu"].lower()).strip("-")
    return f"{gpu}-{result['measured_at'][:10]}.json"


def main(arguments: Sequence[str]) -> int:
    problem = why_not()
    if problem:
        print(problem, file=sys.stderr)
        return 2
    result = measure(CudaGpu())
    out = Path(arguments[0]) if arguments else MEASUREMENTS / default_name(result)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(f"wrote {out}; python tools/measured_on_gpu.py puts it into docs/measured-on-gpu.md", file=sys.stderr)
    return int(any(check["status"] == "failed" for check in result["checks"].values()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
