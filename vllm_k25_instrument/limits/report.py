"""The limits beside what was measured: a renderable, Markdown, and a dictionary for JSON. Data in, no I/O."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from rich import box
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from vllm_k25_instrument.limits.batches import Measured, loads_of
from vllm_k25_instrument.limits.floors import Bound, Floor, mean_floors
from vllm_k25_instrument.limits.machine import Machine
from vllm_k25_instrument.model import Category, Phase
from vllm_k25_instrument.palette import category_color
from vllm_k25_instrument.report.breakdown import Breakdown, category_order
from vllm_k25_instrument.report.digest import GroupKey
from vllm_k25_instrument.report.figures import ABSENT, microseconds

SCHEMA: Final = "vllm_k25.limits/1"

_HEAD: Final = ("category", "measured µs/step", "floor µs/step", "times floor", "bound", "MB/step", "GFLOP/step")


@dataclass(frozen=True, slots=True)
class LimitRow:
    """A category: exposed time per step, mean of the ranks, ns, and its floor, None where nothing must move."""

    name: str
    measured_ns: float
    floor: Floor | None

    @property
    def times(self) -> float | None:
        """Measured time over the floor; None without one, or without a measured time."""
        return self.measured_ns / self.floor.ns if self.floor and self.floor.ns and self.measured_ns else None

    def to_json_dict(self) -> dict[str, Any]:
        """One category as in the schema of limits; without a floor only what was measured."""
        row: dict[str, Any] = {"measured_ns": round(self.measured_ns)}
        if self.floor is not None:
            row |= {
                "floor_ns": round(self.floor.ns),
                "times_floor": None if self.times is None else round(self.times, 3),
                "bound": str(self.floor.bound),
                "bytes": round(self.floor.nbytes),
                "flops": round(self.floor.flops),
                "parts": list(self.floor.parts),
            }
        return row


@dataclass(frozen=True, slots=True)
class GroupLimits:
    """One phase x batch x graph mode. `known`: the batches are those of the samples, not the least of the label."""

    key: GroupKey
    requests: float
    tokens: float
    known: bool
    rows: tuple[LimitRow, ...]
    step_ns: float

    @property
    def title(self) -> str:
        """``decode · batch 64 · full graph``."""
        return self.key.title

    @property
    def subtitle(self) -> str:
        """Which batches the floors are of."""
        words = "mean" if self.known else "at least"
        return f"{words} {self.requests:,.1f} requests, {self.tokens:,.1f} tokens a step"

    @property
    def step(self) -> LimitRow:
        """The step: the floors added up, as if nothing ran at the same time as anything else."""
        floors = [row.floor for row in self.rows if row.floor is not None]
        whole = Floor(
            ns=sum(floor.ns for floor in floors),
            nbytes=sum(floor.nbytes for floor in floors if floor.bound is not Bound.LINK),
            flops=sum(floor.flops for floor in floors),
            bound=max(floors, key=lambda floor: floor.ns).bound if floors else Bound.MEMORY,
            parts=(),
        )
        return LimitRow("step", self.step_ns, whole)

    def to_json_dict(self) -> dict[str, Any]:
        """The group as in the schema of limits."""
        return {
            "phase": str(self.key.phase),
            "batch": self.key.batch,
            "graph_mode": str(self.key.graph_mode),
            "requests": self.requests,
            "tokens": self.tokens,
            "batches_known": self.known,
            "categories": {row.name: row.to_json_dict() for row in self.rows},
            "step": self.step.to_json_dict(),
        }


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of a breakdown's decode groups. Other phases have none: what they attend to is not recorded."""

    machine: Machine
    groups: tuple[GroupLimits, ...]
    left_out: tuple[str, ...] = ()

    @property
    def notes(self) -> tuple[str, ...]:
        """Which groups have no floors, and which categories are below theirs, which cannot be."""
        notes = []
        if self.left_out:
            groups = ", ".join(self.left_out)
            notes.append(f"Without floors: {groups}; what their tokens attend to is not recorded.")
        below = dict.fromkeys(
            row.name for group in self.groups for row in group.rows if row.times is not None and row.times < 1
        )
        if below:
            notes.append(
                f"Measured below the floor: {', '.join(below)}. Then model, GPU, link or context are not what ran, or "
                "it ran beside something else, or (moe_experts) tokens were routed to fewer experts."
            )
        return tuple(notes)

    def to_json_dict(self) -> dict[str, Any]:
        """The value of ``limits`` in a breakdown's JSON, of schema ``vllm_k25.limits/1``."""
        return {
            "schema": SCHEMA,
            **self.machine.to_json_dict(),
            "notes": list(self.notes),
            "groups": [group.to_json_dict() for group in self.groups],
        }


def find_limits(breakdown: Breakdown, measured: Measured, machine: Machine) -> Limits:
    """The floor of each category of each decode group of `breakdown`, whose batches `measured` knows."""
    keys = dict.fromkeys(group.key for group in breakdown.groups)
    decode = [key for key in keys if key.phase == Phase.DECODE]
    others = dict.fromkeys(f"{key.phase} batch {key.batch}" for key in keys if key.phase != Phase.DECODE)
    groups = tuple(_group_limits(breakdown, measured, machine, key) for key in decode)
    return Limits(machine, groups, tuple(others))


def _group_limits(breakdown: Breakdown, measured: Measured, machine: Machine, key: GroupKey) -> GroupLimits:
    ranks = [group for group in breakdown.groups if group.key == key]
    loads, known = loads_of(measured.groups, key, machine.context)
    floors = mean_floors(loads, machine.shape, machine.sharding, machine.gpu, machine.link)
    times: dict[str, float] = {}
    for group in ranks:
        for name, time in group.categories.items():
            times[name] = times.get(name, 0.0) + time.exclusive_ns / group.steps / len(ranks)
        rest = group.unattributed_ns / group.steps / len(ranks)
        times[Category.UNATTRIBUTED] = times.get(Category.UNATTRIBUTED, 0.0) + rest
    return GroupLimits(
        key=key,
        requests=sum(load.requests * share for load, share in loads.items()),
        tokens=sum(load.tokens * share for load, share in loads.items()),
        known=known,
        rows=_rows(times, floors),
        step_ns=sum(group.step_sum_ns / group.steps for group in ranks) / len(ranks),
    )


def _rows(times: Mapping[str, float], floors: Mapping[str, Floor]) -> tuple[LimitRow, ...]:
    """Measured categories with their floors. The floor of a category nobody measured is part of what is left over."""
    own = {str(name): floor for name, floor in floors.items()}
    rest = str(Category.UNATTRIBUTED)
    for name in [name for name in own if name not in times and name != rest]:
        floor = own.pop(name)
        if floor.bound is Bound.LINK:  # not measured at all: nothing to set beside
            continue
        so_far = own.get(rest)
        own[rest] = floor if so_far is None else _together(so_far, floor)
    return tuple(LimitRow(name, times[name], own.get(name)) for name in sorted(times, key=category_order))


def _together(a: Floor, b: Floor) -> Floor:
    return Floor(
        a.ns + b.ns, a.nbytes + b.nbytes, a.flops + b.flops, max(a, b, key=lambda f: f.ns).bound, a.parts + b.parts
    )


def _cells(row: LimitRow) -> tuple[str, ...]:
    if row.floor is None:
        return microseconds(row.measured_ns), ABSENT, ABSENT, ABSENT, ABSENT, ABSENT
    return (
        microseconds(row.measured_ns),
        microseconds(row.floor.ns),
        ABSENT if row.times is None else f"{row.times:,.2f}",
        str(row.floor.bound),
        f"{row.floor.nbytes / 1e6:,.1f}",
        f"{row.floor.flops / 1e9:,.1f}" if row.floor.flops else ABSENT,
    )


class LimitsTable:
    """The limits in a terminal: a table per decode group, then what they take for granted."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Text()
        yield Text("Physical limits", style="bold")
        for group in self._limits.groups:
            yield Text()
            yield Text.assemble((group.title, "bold"), (f"  {group.subtitle}", "dim"))
            table = Table(
                box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 0, 0, 1), header_style="dim", show_edge=False
            )
            table.add_column(_HEAD[0], no_wrap=True, min_width=20)
            for head in _HEAD[1:]:
                table.add_column(head, justify="right")
            for row in group.rows:
                table.add_row(Text.assemble(("■ ", category_color(row.name)), row.name), *_cells(row))
            table.add_section()
            table.add_row("step", *_cells(group.step))
            yield table
        yield Text()
        for assumption in self._limits.machine.assumptions:
            yield Text(assumption, style="dim")
        for note in self._limits.notes:
            yield Text(note)


def limits_markdown(limits: Limits) -> str:
    """The limits as a section of a Markdown document."""
    return "\n".join(_markdown(limits)) + "\n"


def _markdown(limits: Limits) -> Iterator[str]:
    yield ""
    yield "## Physical limits"
    for group in limits.groups:
        yield ""
        yield f"### {group.title}"
        yield ""
        yield f"{group.subtitle}."
        yield ""
        yield f"| {' | '.join(_HEAD)} |"
        yield f"|---|{'---:|' * (len(_HEAD) - 1)}"
        for row in (*group.rows, group.step):
            name = f"`{row.name}`" if row.name != "step" else row.name
            yield f"| {' | '.join((name, *_cells(row)))} |"
    yield ""
    for note in (*limits.machine.assumptions, *limits.notes):
        yield f"- {note}"
