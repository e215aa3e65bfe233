"""What a scenario came to, and the table that the README shows."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from tests.chaos.scenarios import SCENARIOS

FIGURES_VARIABLE: Final = "K25_CHAOS_FIGURES"
"""Names the file that gets a line of JSON per scenario."""


@dataclass
class Figures:
    """Counts of one scenario, all ranks together."""

    scenario: str
    requests: int = 0
    failed: int = 0
    failed_without_us: int = 0
    """Requests that failed of the same injection with the plugin off; 0 where the injection does not touch vLLM."""
    steps: int = 0
    samples: int = 0
    lost_counted: int = 0
    lost_uncounted: int = 0
    leaks: list[str] = field(default_factory=list)
    note: str = ""

    @property
    def failed_because_of_us(self) -> int:
        return max(self.failed - self.failed_without_us, 0)

    def check(self) -> None:
        """Keep the figures where they are asked for, then assert what holds in every scenario."""
        if path := os.environ.get(FIGURES_VARIABLE):
            with Path(path).open("a") as file:
                file.write(json.dumps(asdict(self)) + "\n")
        assert self.requests > 0, self
        assert self.failed_because_of_us == 0, self
        assert self.lost_uncounted == 0, self
        assert self.leaks == [], self


def read(lines: Iterable[str]) -> dict[str, Figures]:
    """Figures by scenario; of one that ran twice, the last."""
    return {figures.scenario: figures for figures in (Figures(**json.loads(line)) for line in lines if line.strip())}


def table(figures: dict[str, Figures]) -> str:
    """The table as Markdown; a scenario without figures says so."""
    lines = [
        "| what happened | requests | failed because of us | samples | lost, counted | lost, not counted | leaks |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, title in SCENARIOS.items():
        f = figures.get(name)
        if f is None:
            lines.append(f"| {title} | not yet run | | | | | |")
            continue
        failed = str(f.failed_because_of_us) + (
            f" ({f.failed} failed; without the plugin {f.failed_without_us})" if f.failed or f.failed_without_us else ""
        )
        cells: list[Any] = [title + (f" ({f.note})" if f.note else ""), f"{f.requests:,}", failed, f"{f.samples:,}"]
        cells += [f"{f.lost_counted:,}", f"{f.lost_uncounted:,}", len(f.leaks)]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)
