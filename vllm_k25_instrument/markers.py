"""NVTX ranges around what the recorder times: domain ``vllm_k25``, registered strings, colours, payloads.

Without a tool attached there is no `Markers` at all, so that nothing is called; see `attach`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from vllm_k25_instrument.model import HOOKED_CATEGORIES, NO_LAYER, Category, Phase
from vllm_k25_instrument.palette import CATEGORY_COLORS, STEP_COLOR

DOMAIN: Final = "vllm_k25"

MAX_NAMES: Final = 8192
"""NVTX keeps a registered string for ever, and the library registers every name. So the number of names is bounded, of
ranges and of steps alike: beyond it ranges leave out their size and steps their number (both are in the payload)."""


STEPS_BETWEEN_MARKS: Final = 256
"""The rank is marked again every so many steps: a capture may begin at any time, and knows only what comes in it."""


def range_name(category: str, detail: str, nbytes: int, layer: int) -> str:
    """What a range is called in a timeline: ``all_reduce pynccl 14 KiB L17``."""
    parts = [category]
    if detail:
        parts.append(detail)
    if nbytes:
        parts.append(_size(nbytes))
    if layer != NO_LAYER:
        parts.append(f"L{layer}")
    return " ".join(parts)


def step_name(phase: Phase, step: int | None, requests: int, graph: str) -> str:
    """What a step is called: ``decode step 1234 bs=64 graph=full``. What is not known is left out."""
    number = "" if step is None else f" {step}"
    name = f"{phase} step{number} bs={requests}"
    return f"{name} graph={graph}" if graph else name


def _size(nbytes: int) -> str:
    """Bytes to three significant digits: prompts of every length must not make a name each."""
    value, unit = float(nbytes), "B"
    for larger in ("KiB", "MiB", "GiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{value:.3g} {unit}"


class Markers:
    """Pushes and pops NVTX ranges in our domain. One thread's pushes and pops nest, as NVTX wants it."""

    def __init__(self, domain: Any, rank: str = "") -> None:
        """`domain`: an ``nvtx.Domain`` that a tool listens to. `rank` says who we are: ``rank=3 world_size=8``."""
        self._domain = domain
        self._rank = rank
        self._categories: Mapping[str, int] = {
            category: domain.get_category_id(category) for category in ("step", *HOOKED_CATEGORIES)
        }
        self._attributes: dict[tuple[str, str, int, int], Any] = {}
        self._steps = 0

    def push_step(self, phase: Phase, step: int, requests: int, graph: str) -> None:
        """Open the range of a step; its payload is the step's number."""
        if self._rank and self._steps % STEPS_BETWEEN_MARKS == 0:
            self._mark_rank()
        self._steps += 1
        named = step if self._steps <= MAX_NAMES else None
        self._domain.push_range(
            self._domain.get_event_attributes(
                message=step_name(phase, named, requests, graph),
                color=_argb(STEP_COLOR),
                category=self._categories["step"],
                payload=step,
            )
        )

    def _mark_rank(self) -> None:
        self._domain.mark(
            self._domain.get_event_attributes(
                message=self._rank, color=_argb(STEP_COLOR), category=self._categories["step"]
            )
        )

    def push_capture(self, label: str) -> None:
        """Open the range of a graph's capture: ``capture bs=64 full twin``."""
        self._domain.push_range(
            self._domain.get_event_attributes(
                message=label, color=_argb(STEP_COLOR), category=self._categories["step"], payload=0
            )
        )

    def push(self, category: Category, detail: str, nbytes: int, layer: int) -> None:
        """Open a range; its payload is its size in bytes."""
        key = (category, detail, nbytes, layer)
        attributes = self._attributes.get(key)
        if attributes is None:
            attributes = self._make(category, detail, nbytes, layer)
        self._domain.push_range(attributes)

    def pop(self) -> None:
        """Close the range opened last."""
        self._domain.pop_range()

    def _make(self, category: Category, detail: str, nbytes: int, layer: int) -> Any:
        room = len(self._attributes) < MAX_NAMES
        attributes = self._domain.get_event_attributes(
            message=range_name(category, detail, nbytes if room else 0, layer),
            color=_argb(CATEGORY_COLORS[category]),
            category=self._categories[category],
            payload=nbytes,
        )
        if room:
            self._attributes[(category, detail, nbytes, layer)] = attributes
        return attributes


def _argb(color: str) -> int:
    """``#rrggbb`` as NVTX wants it, opaque."""
    return 0xFF000000 | int(color[1:], 16)


def attach(rank: str = "") -> Markers | None:
    """Markers where an NVTX tool (nsys, an injection library) listens in this process, else None.

    `rank`, of the form ``rank=3 world_size=8``, is what a reader of the capture will know this process by.
    """
    import nvtx

    domain = nvtx.get_domain(DOMAIN)
    # Without a tool the library hands out a stand-in whose methods do nothing.
    if not nvtx.enabled() or type(domain).__name__ == "DummyDomain":
        return None
    return Markers(domain, rank)
