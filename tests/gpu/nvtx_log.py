"""Do NVTX tools see our ranges? A library that logs every call is built with gcc and injected into a process."""

from __future__ import annotations

import glob
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "tests" / "data" / "nvtx_log_injection.c"

OUR_RANGES = """
from vllm_k25_instrument import markers
from vllm_k25_instrument.model import Category, Phase
attached = markers.attach()
assert attached is not None, "the package sees no NVTX tool"
attached.push_step(Phase.DECODE, 7, 64, "full")
attached.push(Category.ALL_REDUCE, "pynccl", 14336, 17)
attached.pop()
attached.pop()
"""
OUR_NAMES = ("decode step 7 bs=64 graph=full", "all_reduce pynccl 14 KiB L17")

TORCH_RANGES = """
import torch
torch.cuda.nvtx.range_push("of torch")
torch.cuda.nvtx.range_pop()
"""
TORCH_NAMES = ("of torch",)


class NotAvailableError(Exception):
    """What is missing on this machine."""


def log_ranges(scratch: Path) -> tuple[tuple[str, ...], list[str], str]:
    """The names that should be logged, those that were, and whose ranges they are. Raises NotAvailableError."""
    library = _build(scratch)
    try:
        import nvtx  # noqa: F401

        code, names, whose = OUR_RANGES, OUR_NAMES, "of the package"
    except ImportError:
        code, names, whose = TORCH_RANGES, TORCH_NAMES, "of PyTorch (the nvtx package is not installed)"
    log = scratch / "nvtx"
    environment = {
        **os.environ,
        "NVTX_INJECTION64_PATH": str(library),
        "NVTX_LOG": str(log),
        "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH", "")))),
    }
    subprocess.run([sys.executable, "-c", code], env=environment, check=True, timeout=60)
    logged = []
    for file in glob.glob(f"{log}.*"):
        events = [json.loads(line) for line in Path(file).read_text().splitlines()]
        logged += [event["msg"] for event in events if event["ev"] == "push"]
    return names, logged, whose


def check() -> tuple[bool, dict[str, object], str]:
    with tempfile.TemporaryDirectory() as scratch:
        expected, logged, whose = log_ranges(Path(scratch))
    return set(expected) <= set(logged), {"ranges_logged": len(logged)}, whose


def _build(scratch: Path) -> Path:
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        raise NotAvailableError("no C compiler")
    places = [*(f"{folder}/nvidia/*/include" for folder in sys.path), "/usr/local/cuda*/include", "/usr/include"]
    headers = [found for place in places for found in glob.glob(f"{place}/nvtx3/nvToolsExt.h")]
    if not headers:
        raise NotAvailableError("no NVTX headers")
    library = scratch / "libnvtxlog.so"
    include = Path(headers[0]).parent.parent
    command = [compiler, "-shared", "-fPIC", "-O1", f"-I{include}", str(SOURCE), "-o", str(library), "-lpthread"]
    subprocess.run(command, check=True, capture_output=True)
    return library
