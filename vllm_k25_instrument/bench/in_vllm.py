"""vLLM in this process: imported without its chatter, and what it is that runs here."""

from __future__ import annotations

import importlib.util
import logging
import os
import platform
import sys
from pathlib import Path
from types import ModuleType
from typing import Final

from vllm_k25_instrument.bench.document import BenchMachine, Remark
from vllm_k25_instrument.bench.errors import CannotRunError
from vllm_k25_instrument.demo.build import Build, BuildError, visible_gpus, vllm_build, vllm_version
from vllm_k25_instrument.demo.server import CPU_SETUP_PATH, VllmMissingError, require_vllm
from vllm_k25_instrument.limits.errors import LimitsError
from vllm_k25_instrument.limits.gpus import AUTO, Gpu, find_gpu, installed_gpu

CPU: Final = "cpu"

_QUIET: Final = {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_LOGGING_STREAM": "ext://sys.stderr"}


def prepare_vllm() -> Build:
    """To be called before vLLM is imported: its log goes to standard error, errors only unless the environment says so.

    Raises CannotRunError where there is no vLLM, or no GPU for a build that needs one.
    """
    try:
        require_vllm()
    except VllmMissingError as error:
        raise CannotRunError(str(error)) from None
    build = vllm_build()
    if build is Build.OTHER:
        raise CannotRunError("this runs on vLLM's builds for CPUs and for CUDA, and the one installed is neither")
    for name, value in _QUIET.items():
        os.environ.setdefault(name, value)
    # Older releases configure their logger at import from these, newer ones only in `vllm serve`.
    logging.getLogger("vllm").setLevel(os.environ["VLLM_LOGGING_LEVEL"].upper())
    if build is Build.CUDA:
        import torch

        if not torch.cuda.is_available():
            raise CannotRunError(
                "vLLM's CUDA build is installed and PyTorch sees no GPU: check `nvidia-smi` and CUDA_VISIBLE_DEVICES"
            )
    return build


def set_threads(threads: int | None, ranks: int = 1) -> int:
    """How many threads a process computes with: as asked, or the cores that it may use divided by the ranks."""
    import torch

    found = threads or max(len(os.sched_getaffinity(0)) // ranks, 1)
    torch.set_num_threads(found)
    return found


def busy_remark() -> Remark | None:
    """A warning where more is running here than there are cores: then every figure is too high and scattered."""
    cores, load = os.cpu_count() or 1, os.getloadavg()[0]
    if load <= cores:
        return None
    return Remark("machine_busy", f"the machine was busy (load {load:.1f} on {cores} cores): figures are too high")


def describe_machine(
    build: Build, *, ranks: int = 1, threads: int | None = None, link: str | None = None
) -> BenchMachine:
    """What it runs on. Opens no device."""
    import torch

    gpu: Gpu | None = None
    if build is Build.CPU:
        name = cpu_name()
    else:
        try:
            name = installed_gpu()
        except LimitsError:
            name = "a GPU that neither NVML nor torch names"
        try:
            gpu = find_gpu(name)
        except LimitsError:  # not in the table: no floors
            gpu = None
    return BenchMachine(
        device=CPU if build is Build.CPU else "cuda",
        device_name=name,
        vllm=vllm_version(),
        torch=str(torch.__version__),
        threads=torch.get_num_threads() if threads is None else threads,
        ranks=ranks,
        gpu=None if gpu is None else gpu.key,
        link=link,
    )


def memory_folder() -> Path | None:
    """Where files live in memory, as a server's rings do; None where there is no such folder."""
    folder = Path("/dev/shm")  # noqa: S108 - the default of K25_RING_DIR is below it
    return folder if folder.is_dir() and os.access(folder, os.W_OK) else None


def gpus() -> int:
    """How many GPUs there are. Raises CannotRunError for fewer than two: one has nobody to reduce with."""
    try:
        found = visible_gpus()
    except BuildError as error:
        raise CannotRunError(str(error)) from None
    if found < 2:
        raise CannotRunError(f"an all-reduce needs two GPUs, and PyTorch sees {found}: check CUDA_VISIBLE_DEVICES")
    return found


def cpu_name(info: Path = Path("/proc/cpuinfo")) -> str:
    """What the processor calls itself."""
    try:
        for line in info.read_text(encoding="utf-8", errors="replace").splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                return value.strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def floor_gpu(name: str | None, machine: BenchMachine) -> Gpu | None:
    """The GPU whose data sheet the floors come from; None where none is known.

    `name` is an option's (``auto``: this machine's). Raises LimitsError for a name that is not in the table.
    """
    if name is not None and name.lower() != AUTO:
        return find_gpu(name)
    return find_gpu(machine.gpu) if machine.gpu else None


def foreign_floors(sheet: Gpu | None, machine: BenchMachine) -> Remark | None:
    """A warning where the floors are of another machine than the one that was measured."""
    if sheet is None or sheet.key == machine.gpu:
        return None
    return Remark("floors_of_another", f"floors are of {sheet.name}, which is not what ran here")


def allow_int4_experts() -> bool:
    """Let vLLM's CPU build use its INT4 experts for groups of 32 and on any processor, as the demo does.

    In this process only. False where the build has no such kernel for this processor.
    """
    import torch
    import vllm._custom_ops  # noqa: F401 - registers the operators

    if not hasattr(torch.ops._C, "fused_experts_cpu"):
        return False
    _cpu_setup().register()
    return True


def _cpu_setup() -> ModuleType:
    name = "k25_demo_cpu_setup"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, CPU_SETUP_PATH / f"{name}.py")
    if spec is None or spec.loader is None:
        raise CannotRunError(f"{CPU_SETUP_PATH}: {name}.py is missing: install the package again")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
