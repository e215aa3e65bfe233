"""Peak figures of GPUs and of the links between them: data sheets as a table, and who is in this machine."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from typing import Any, Final

from vllm_k25_instrument.limits.errors import LimitsError
from vllm_k25_instrument.limits.model_shape import Math

AUTO: Final = "auto"
FABRIC_HOP_US: Final = 0.6
"""One hop over NVLink: what NCCL's own cost model takes for a ring step of its low-latency protocol (`hwLat` of
`src/graph/tuning.cc`, NVLINK, Ring, LL; 1.0 us there for PCI, which is the `hop_us` of the PCIe links). Infinity
Fabric is given the same."""


@dataclass(frozen=True, slots=True)
class Link:
    """How the ranks of a tensor-parallel group reach each other.

    `bytes_per_second` is what one GPU sends, and at the same time receives, to and from all others together. `hop_ns`
    is the least time from one GPU's store to the other's having seen it. `reduces`: the switch adds up by itself.
    """

    name: str
    bytes_per_second: float
    hop_ns: float
    reduces: bool = False
    source: str = ""

    def to_json_dict(self) -> dict[str, Any]:
        """The link as in the schema of limits."""
        return {
            "name": self.name,
            "bytes_per_second_per_direction": self.bytes_per_second,
            "hop_ns": self.hop_ns,
            "source": self.source,
        }


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU's data sheet: bytes per second, bytes, and dense floating-point operations per second."""

    key: str
    name: str
    memory_bytes_per_second: float
    memory_bytes: float
    flops_per_second: Mapping[Math, float]
    pcie: Link
    fabric: Link | None
    fabric_joins: int
    match: str
    source: str

    def peak(self, math: Math) -> float:
        """Dense operations per second; a GPU without FP8 widens to bfloat16."""
        return self.flops_per_second.get(math) or self.flops_per_second[Math.BF16]

    def link(self, name: str, ranks: int, *, hop_us: float | None = None) -> Link:
        """The link called `name` for a group of `ranks`.

        ``auto`` is the fabric where it joins that many, else PCIe; ``nvlink``, ``xgmi``; a PCIe link of the table; or a
        number, GB/s per direction. `hop_us` replaces the latency. Raises LimitsError where there is no such link.
        """
        found = self._link(name.lower(), ranks)
        if hop_us is None:
            return found
        return Link(found.name, found.bytes_per_second, hop_us * 1e3, found.reduces, found.source)

    def _link(self, name: str, ranks: int) -> Link:
        fabric = self.fabric
        if name == AUTO:
            return fabric if fabric is not None and ranks <= self.fabric_joins else self.pcie
        if fabric is not None and name == fabric.name:
            if ranks > self.fabric_joins:
                raise LimitsError(
                    f"--link {name}: {self.name} joins {self.fabric_joins} GPUs by it, the group has {ranks}: "
                    f"name what the others are reached by, such as {self.pcie.name}"
                )
            return fabric
        if name in known_links():
            return known_links()[name]
        try:
            gigabytes = float(name)
        except ValueError:
            gigabytes = 0.0
        if gigabytes > 0:
            return Link(f"{gigabytes:g} GB/s", gigabytes * 1e9, self.pcie.hop_ns, source="given")
        there = [AUTO, *([] if fabric is None else [fabric.name]), *known_links(), "a number (GB/s per direction)"]
        raise LimitsError(f"--link {name}: {self.name} has no such link; known are {', '.join(there)}")

    def to_json_dict(self) -> dict[str, Any]:
        """The GPU as in the schema of limits."""
        return {
            "name": self.name,
            "memory_bytes_per_second": self.memory_bytes_per_second,
            "memory_bytes": self.memory_bytes,
            "flops_per_second": {str(math): peak for math, peak in self.flops_per_second.items()},
            "source": self.source,
        }


@lru_cache(maxsize=1)
def _table() -> dict[str, Any]:
    return tomllib.loads((files(__package__) / "gpus.toml").read_text(encoding="utf-8"))


@lru_cache(maxsize=1)
def known_links() -> dict[str, Link]:
    """The PCIe links by name."""
    return {
        name: Link(name, row["gb_s"] * 1e9, row["hop_us"] * 1e3, source=row["source"])
        for name, row in _table()["links"].items()
    }


@lru_cache(maxsize=1)
def known_gpus() -> dict[str, Gpu]:
    """The GPUs of the table by their short names."""
    return {key: _gpu(key, row) for key, row in _table()["gpus"].items()}


def _gpu(key: str, row: Mapping[str, Any]) -> Gpu:
    peaks = {Math.BF16: row["bf16_tflops"] * 1e12}
    if "fp8_tflops" in row:
        peaks[Math.FP8] = row["fp8_tflops"] * 1e12
    fabric = None
    if "fabric" in row:
        fabric = Link(
            row["fabric"],
            row["fabric_gb_s"] * 1e9,
            FABRIC_HOP_US * 1e3,
            reduces=row.get("fabric_reduces", False),
            source=row["source"],
        )
    return Gpu(
        key=key,
        name=row["name"],
        memory_bytes_per_second=row["memory_gb_s"] * 1e9,
        memory_bytes=row["memory_gb"] * 1e9,
        flops_per_second=peaks,
        pcie=known_links()[row["pcie"]],
        fabric=fabric,
        fabric_joins=row.get("fabric_joins", 0),
        match=row["match"],
        source=row["source"],
    )


def find_gpu(name: str, *, installed: Callable[[], str] | None = None) -> Gpu:
    """The GPU of this name: a short name of the table, the driver's name, or ``auto`` for the one in this machine.

    `installed` says what the driver calls it (by default NVML, else torch). Raises LimitsError where nobody knows.
    """
    if name.lower() == AUTO:
        found = (installed or installed_gpu)()
        gpu = _by_driver_name(found)
        if gpu is None:
            raise LimitsError(f"--gpu auto: this machine has a {found}, which is not in the table; {_known()}")
        return gpu
    gpu = known_gpus().get(re.sub(r"[\s_]+", "-", name.strip().lower())) or _by_driver_name(name)
    if gpu is None:
        raise LimitsError(f"--gpu {name}: not in the table; {_known()}")
    return gpu


def installed_gpu() -> str:
    """What the driver calls the first GPU, by NVML or else by torch. Raises LimitsError without either."""
    for ask in (_from_nvml, _from_torch):
        name = ask()
        if name:
            return name
    raise LimitsError(f"--gpu auto: neither NVML (nvidia-ml-py) nor torch reports a GPU here; {_known()}")


def _from_nvml() -> str:
    try:
        import pynvml  # type: ignore[import-not-found,import-untyped,unused-ignore]

        pynvml.nvmlInit()
        try:
            name = pynvml.nvmlDeviceGetName(pynvml.nvmlDeviceGetHandleByIndex(0))
        finally:
            pynvml.nvmlShutdown()
    except Exception:  # no library, no driver, no GPU: all the same to us
        return ""
    return name.decode(errors="replace") if isinstance(name, bytes) else str(name)


def _from_torch() -> str:
    try:
        import torch

        return str(torch.cuda.get_device_name(0)) if torch.cuda.is_available() else ""
    except Exception:
        return ""


def _by_driver_name(name: str) -> Gpu | None:
    return next((gpu for gpu in known_gpus().values() if re.search(gpu.match, name, re.IGNORECASE)), None)


def _known() -> str:
    return f"name one of {', '.join(known_gpus())}"
