"""Two campaigns side by side, before and after: what changed at each concurrency, and whether beyond chance."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import hypot
from typing import Any, Final

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from vllm_k25_instrument.campaign.interval import Estimate, apart
from vllm_k25_instrument.campaign.render import sheet_table
from vllm_k25_instrument.campaign.results import Column, Results
from vllm_k25_instrument.campaign.sheets import with_interval
from vllm_k25_instrument.report.breakdown import category_order
from vllm_k25_instrument.report.figures import ABSENT, microseconds
from vllm_k25_instrument.report.sheets import Line, Sheet

SCHEMA: Final = "vllm_k25.campaign_comparison/1"
TPOT: Final = "time per output token"
STEP: Final = "decode step"


@dataclass(frozen=True, slots=True)
class Change:
    """One figure on both sides, ns; None: that side does not have it."""

    name: str
    a: Estimate | None
    b: Estimate | None
    category: str = ""

    @property
    def difference_ns(self) -> float | None:
        """How much more B takes; a category that one side does not have counts there as nothing."""
        if self.a is None and self.b is None:
            return None
        return (0.0 if self.b is None else self.b.mean) - (0.0 if self.a is None else self.a.mean)

    @property
    def half(self) -> float | None:
        """Half of the difference's interval: that of two independent means. None where a side has one window."""
        halves = [one.half for one in (self.a, self.b) if one is not None]
        return hypot(*(half for half in halves if half is not None)) if halves and None not in halves else None

    @property
    def clear(self) -> bool | None:
        """Whether the difference is beyond chance; None where that cannot be told."""
        if self.a is not None and self.b is not None:
            return apart(self.a, self.b)
        half, difference = self.half, self.difference_ns
        return None if half is None or difference is None else abs(difference) > half

    @property
    def percent(self) -> float | None:
        """The difference in percent of A."""
        difference = self.difference_ns
        return None if difference is None or self.a is None or not self.a.mean else 100 * difference / self.a.mean

    def to_json_dict(self) -> dict[str, Any]:
        """Rounded to the nanosecond."""
        difference, half, percent = self.difference_ns, self.half, self.percent
        return {
            "a": None if self.a is None else self.a.to_json_dict(),
            "b": None if self.b is None else self.b.to_json_dict(),
            "difference_ns": None if difference is None else round(difference),
            "half_ns": None if half is None else round(half),
            "difference_percent": None if percent is None else round(percent, 3),
            "clear": self.clear,
        }


@dataclass(frozen=True, slots=True)
class CampaignComparison:
    """What two campaigns have in common, by concurrency."""

    a: Results
    b: Results
    changes: dict[int, list[Change]]

    @property
    def only(self) -> dict[str, list[int]]:
        """Concurrencies of one side only."""
        own = {side: {c.concurrency for c in r.columns if c.windows} for side, r in (("a", self.a), ("b", self.b))}
        return {"a": sorted(own["a"] - own["b"]), "b": sorted(own["b"] - own["a"])}

    def slower(self, percent: float) -> list[int]:
        """The concurrencies at which B's time per output token is more than `percent` % longer, and beyond chance."""
        return [
            concurrency
            for concurrency, changes in self.changes.items()
            for change in changes
            if change.name == TPOT
            and change.percent is not None
            and change.percent > percent
            and change.clear is not False
        ]

    def to_json_dict(self) -> dict[str, Any]:
        """The document of schema ``vllm_k25.campaign_comparison/1``."""
        return {
            "schema": SCHEMA,
            "a": {"complete": self.a.complete, "model": self.a.manifest.plan.model},
            "b": {"complete": self.b.complete, "model": self.b.manifest.plan.model},
            "concurrency": {
                str(concurrency): {change.name: change.to_json_dict() for change in changes}
                for concurrency, changes in self.changes.items()
            },
            "only": self.only,
        }

    def sheets(self) -> Iterator[Sheet]:
        """A table for each concurrency."""
        for concurrency, changes in self.changes.items():
            yield Sheet(
                f"Concurrency {concurrency}",
                "Means over the windows, µs, ± half of the 95 % interval; categories are exposed time per decode step.",
                ("", "A", "B", "B - A", "%", "beyond chance"),
                tuple(_line(change) for change in changes),
            )


def _line(change: Change) -> Line:
    difference, percent = change.difference_ns, change.percent
    half = "" if change.half is None else f" ± {microseconds(change.half)}"
    sign = "" if difference is None or difference < 0 else "+"
    return Line(
        change.name,
        (
            with_interval(change.a),
            with_interval(change.b),
            ABSENT if difference is None else f"{sign}{microseconds(difference)}{half}",
            ABSENT if percent is None else f"{percent:+.1f}",
            {True: "yes", False: "no", None: "not known"}[change.clear],
        ),
        category=change.category,
    )


def compare_campaigns(a: Results, b: Results) -> CampaignComparison:
    """Compare the concurrencies that both have windows of."""
    right = {column.concurrency: column for column in b.columns if column.windows}
    return CampaignComparison(
        a,
        b,
        {
            column.concurrency: list(_changes(column, right[column.concurrency]))
            for column in a.columns
            if column.windows and column.concurrency in right
        },
    )


def _changes(a: Column, b: Column) -> Iterator[Change]:
    yield Change(TPOT, a.tpot, b.tpot)
    yield Change("time to first token", a.ttft, b.ttft)
    if not (a.live and b.live):
        return
    yield Change(STEP, a.over("step_ns"), b.over("step_ns"))
    before, after = a.components(), b.components()
    for name in sorted(before.keys() | after.keys(), key=category_order):
        mine, theirs = before.get(name), after.get(name)
        yield Change(
            name, None if mine is None else mine.exposed, None if theirs is None else theirs.exposed, category=name
        )
    yield Change("between steps", a.part("gap_ns"), b.part("gap_ns"))
    yield Change("unexplained", a.unexplained, b.unexplained)


class ComparisonReport:
    """The comparison in a terminal."""

    def __init__(self, comparison: CampaignComparison) -> None:
        self._comparison = comparison

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        comparison = self._comparison
        yield Text(f"A: {comparison.a.manifest.plan.model}, {comparison.a.manifest.created}", style="bold")
        yield Text(f"B: {comparison.b.manifest.plan.model}, {comparison.b.manifest.created}", style="bold")
        for sheet in comparison.sheets():
            yield Text()
            yield Text(sheet.title, style="bold")
            yield Text(sheet.caption, style="dim")
            yield sheet_table(sheet)
        for side, concurrencies in comparison.only.items():
            if concurrencies:
                yield Text(f"Only in {side.upper()}: concurrency {', '.join(map(str, concurrencies))}")
