"""What a report is about: the server, its ranks, and how many of its steps were sampled."""

from __future__ import annotations

from dataclasses import dataclass

from vllm_k25_instrument.model import Phase


@dataclass(frozen=True, slots=True)
class PhaseCount:
    """Steps of one phase since the server started: executed and sampled. Of several ranks, the largest counts."""

    phase: Phase
    steps: int
    sampled: int


@dataclass(frozen=True, slots=True)
class Subject:
    """One server instance as its rings tell it. Empty strings where a ring does not know."""

    instance: str = ""
    model: str = ""
    vllm_version: str = ""
    plugin_version: str = ""
    ranks_found: tuple[int, ...] = ()
    ranks_expected: int = 0
    sample_every: int = 1
    started_unix_ns: int = 0
    alive: bool = False
    phases: tuple[PhaseCount, ...] = ()

    @property
    def steps(self) -> int:
        """Executed steps of all phases."""
        return sum(count.steps for count in self.phases)

    @property
    def sampled(self) -> int:
        """Sampled steps of all phases."""
        return sum(count.sampled for count in self.phases)

    @property
    def sampling(self) -> str:
        """``every 16th step``."""
        return "every step" if self.sample_every == 1 else f"every {ordinal(self.sample_every)}"

    def count_text(self, count: PhaseCount) -> str:
        """``decode 12,345 steps, 771 sampled``."""
        return f"{count.phase} {count.steps:,} steps, {count.sampled:,} sampled"

    @property
    def counts_text(self) -> str:
        """Steps and samples of each phase since start: ``decode 12,345 steps, 771 sampled (every 16th)``."""
        if not self.phases:
            return f"no step yet ({self.sampling})"
        return " · ".join(self.count_text(count) for count in self.phases) + f" ({self.sampling})"


def ordinal(n: int) -> str:
    """``1st``, ``2nd``, ``3rd``, ``16th``."""
    suffix = "th" if n % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(n % 10, "th")
    return f"{n:,}{suffix}"
