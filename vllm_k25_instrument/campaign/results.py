"""All that a campaign's folder holds, read again: what every report is made of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from vllm_k25_instrument.bench.document import BenchDocument, DocumentError, read_document
from vllm_k25_instrument.campaign.errors import CampaignError
from vllm_k25_instrument.campaign.interval import Estimate, estimate_of
from vllm_k25_instrument.campaign.live import RING
from vllm_k25_instrument.campaign.manifest import Manifest, State, read_manifest
from vllm_k25_instrument.campaign.micro import BENCHES, RESULT
from vllm_k25_instrument.campaign.profile import BREAKDOWN, CPU, TABLES
from vllm_k25_instrument.campaign.run import micro_folder, nsys_folder, profile_folder, window_folder
from vllm_k25_instrument.campaign.trace_figures import (
    TableFigures,
    TraceFigures,
    read_table_figures,
    read_trace_figures,
)
from vllm_k25_instrument.campaign.trace_figures import read_document as read_json
from vllm_k25_instrument.campaign.window import Window, breakdown_of_windows, read_window
from vllm_k25_instrument.limits.batches import Measured
from vllm_k25_instrument.limits.errors import LimitsError
from vllm_k25_instrument.limits.floors import Sharding
from vllm_k25_instrument.limits.gpus import AUTO
from vllm_k25_instrument.limits.machine import make_machine
from vllm_k25_instrument.limits.report import LimitRow, find_limits

QUEUED: Final = 10.0
"""Requests that wait longer than so many output tokens take, and a tenth of their whole time, had to queue."""


@dataclass(frozen=True, slots=True)
class ComponentEstimates:
    """A component per step over the windows, ns; None where the source does not tell."""

    exposed: Estimate
    sum: Estimate | None
    calls: Estimate | None
    ns_per_call: Estimate | None


@dataclass(frozen=True, slots=True)
class Column:
    """One concurrency: its windows, and what else was measured at it."""

    concurrency: int
    windows: Sequence[Window]
    trace: TraceFigures | None = None
    table: TableFigures | None = None
    cpu: Mapping[str, Any] = field(default_factory=dict)
    floors: Mapping[str, LimitRow] = field(default_factory=dict)

    @property
    def live(self) -> list[Window]:
        """The windows with a live breakdown."""
        return [window for window in self.windows if window.live is not None]

    def over(self, figure: str) -> Estimate | None:
        """The estimate of a figure of :class:`LiveFigures` over the windows."""
        return estimate_of([getattr(window.live, figure) for window in self.live])

    def part(self, figure: str) -> Estimate | None:
        """The estimate of a part of the time per output token, over the same windows as :attr:`tpot`.

        So the parts add up: what a window does not tell is in its `unexplained`, and is 0 here. None where no window
        tells.
        """
        found = [getattr(window.live, figure) for window in self.live]
        return None if all(one is None for one in found) else estimate_of([one or 0.0 for one in found])

    @property
    def tpot(self) -> Estimate | None:
        """Time per output token, ns, as the client saw it: of the windows with a live breakdown where there are any."""
        return estimate_of([window.tpot_ns for window in self.live or self.windows])

    @property
    def ttft(self) -> Estimate | None:
        """Time to the first token, ns."""
        return estimate_of([None if w.load.ttft is None else w.load.ttft.mean_ns for w in self.windows])

    @property
    def tokens_per_second(self) -> Estimate | None:
        """Generated tokens per second."""
        return estimate_of([window.load.tokens_per_second for window in self.windows])

    @property
    def unexplained(self) -> Estimate | None:
        """What is left of the time per output token, ns."""
        return estimate_of([window.unexplained_ns for window in self.windows])

    @property
    def largest_batch(self) -> int:
        """The largest batch of any sampled decode step; 0 where that is not known."""
        return max((window.live.largest_batch for window in self.windows if window.live is not None), default=0)

    @property
    def not_reached(self) -> str:
        """Why the server did not run as many requests at a time, in a clause; empty where it did, or nothing says."""
        if self.largest_batch:
            if self.largest_batch < self.concurrency:
                return f"the largest batch of any step was {self.largest_batch}"
            return ""
        for window in self.windows:
            queued, tpot = window.queue_s, window.tpot_ns / 1e9
            if queued is not None and tpot and queued > QUEUED * tpot and queued > 0.1 * window.load.seconds:
                return f"requests waited {queued:.2f} s to be scheduled, in the mean"
        return ""

    def components(self) -> dict[str, ComponentEstimates]:
        """By category, over the windows. A window without a category spent no time on it."""
        return self._estimates("components")

    def paths(self) -> dict[str, ComponentEstimates]:
        """By all-reduce path."""
        return self._estimates("paths")

    def _estimates(self, which: str) -> dict[str, ComponentEstimates]:
        tables = [getattr(window.live, which) for window in self.live]
        names = dict.fromkeys(name for table in tables for name in table)
        made = {}
        for name in names:
            those = [table.get(name) for table in tables]
            exposed = estimate_of([0.0 if one is None else one.exposed_ns for one in those])
            if exposed is not None:
                made[name] = ComponentEstimates(
                    exposed,
                    estimate_of([None if one is None else one.sum_ns for one in those]),
                    estimate_of([None if one is None else one.calls for one in those]),
                    estimate_of([None if one is None else one.ns_per_call for one in those]),
                )
        return made


@dataclass(frozen=True, slots=True)
class Results:
    """A campaign as it stands. `problems` are things that are there and cannot be read."""

    folder: Path
    manifest: Manifest
    columns: Sequence[Column]
    micro: Mapping[str, BenchDocument] = field(default_factory=dict)
    nsys: TraceFigures | None = None
    problems: Sequence[str] = ()
    floors_missing: str = ""

    @property
    def measured(self) -> bool:
        """Whether there is anything to report at all."""
        return any(column.windows or column.trace for column in self.columns) or self.nsys is not None

    @property
    def missing(self) -> list[str]:
        """A line for each step that should have been done and was not."""
        lines = [f"stopped before the end: {self.manifest.stopped}"] if self.manifest.stopped else []
        for record in self.manifest.steps:
            if record.state is State.FAILED:
                lines.append(f"{record.name}: {record.error}")
            elif record.state is State.RUNNING:
                lines.append(f"{record.name}: cut off; --resume does it again")
            elif record.state is State.PENDING:
                lines.append(f"{record.name}: not begun; --resume goes on with it")
        return [*lines, *self.problems]

    @property
    def not_possible(self) -> list[str]:
        """A line for each different thing that this server or machine does not have."""
        reasons: dict[str, list[str]] = {}
        for record in self.manifest.steps:
            if record.state is State.NOT_POSSIBLE:
                reasons.setdefault(record.error, []).append(record.name)
        return [f"{', '.join(names)}: {reason}" for reason, names in reasons.items()]

    @property
    def notes(self) -> list[str]:
        """What there is to know of steps that are done, each thing once."""
        notes = [
            f"{record.name}: {record.note}"
            for record in self.manifest.steps
            if record.state is State.DONE and ("do not stand still" in record.note or "no live" in record.note)
        ]
        warnings: dict[str, list[str]] = {}
        for column in self.columns:
            for window in column.windows:
                for warning in window.warnings:
                    warnings.setdefault(warning, []).append(f"{column.concurrency}")
                if window.load.failed:
                    text = f"{window.load.failed} of {window.load.requests} requests failed"
                    warnings.setdefault(text, []).append(f"{column.concurrency}")
        notes += [f"concurrency {', '.join(dict.fromkeys(where))}: {warning}" for warning, where in warnings.items()]
        notes += [
            f"concurrency {column.concurrency} was not reached: {column.not_reached}; --max-num-seqs of the server is "
            "lower, so its figures are those of the smaller batch"
            for column in self.columns
            if column.not_reached
        ]
        return notes

    @property
    def complete(self) -> bool:
        """Whether every step that this server and machine allow is done, and all of it can be read."""
        return not self.missing


def read_results(folder: Path) -> Results:
    """Read a campaign. Raises CampaignError where there is none in `folder`; what is damaged in it is a problem."""
    manifest = read_manifest(folder)
    problems: list[str] = []
    floors_missing = ""
    columns = []
    for concurrency in manifest.plan.concurrency:
        windows = []
        for number in range(1, manifest.plan.windows + 1):
            where = window_folder(folder, concurrency, number)
            if where.is_dir():
                try:
                    windows.append(read_window(where, concurrency, number))
                except (CampaignError, ValueError) as error:
                    problems.append(str(error))
        profiled = profile_folder(folder, concurrency)
        column = Column(concurrency, windows)
        try:
            column = Column(
                concurrency,
                windows,
                read_trace_figures(profiled / BREAKDOWN),
                read_table_figures(profiled / TABLES),
                read_json(profiled / CPU) or {},
            )
        except CampaignError as error:
            problems.append(str(error))
        floors, why = _floors(folder, manifest, column)
        floors_missing = floors_missing or why
        columns.append(Column(concurrency, windows, column.trace, column.table, column.cpu, floors))
    return Results(
        folder=folder,
        manifest=manifest,
        columns=columns,
        micro=_micro(folder, problems),
        nsys=_nsys(folder, problems),
        problems=tuple(problems),
        floors_missing=floors_missing,
    )


def _micro(folder: Path, problems: list[str]) -> dict[str, BenchDocument]:
    found = {}
    for bench in BENCHES:
        path = micro_folder(folder, bench) / RESULT
        try:
            found[bench] = read_document(path)
        except FileNotFoundError:
            continue
        except (OSError, DocumentError) as error:
            problems.append(f"{path}: {error}")
    return found


def _nsys(folder: Path, problems: list[str]) -> TraceFigures | None:
    try:
        return read_trace_figures(nsys_folder(folder) / BREAKDOWN)
    except CampaignError as error:
        problems.append(str(error))
        return None


def _floors(folder: Path, manifest: Manifest, column: Column) -> tuple[dict[str, LimitRow], str]:
    """The physical floor of each category, from the window's own batches; and why there is none."""
    plan = manifest.plan
    of_rings = [w for w in column.windows if w.live is not None and w.live.source == RING]
    if not plan.gpu:
        return {}, "the GPU is not named: --gpu NAME --config PATH add how far each component is above its floor"
    if not of_rings:
        return {}, "floors need the batches of the rings' samples"
    folders = [window_folder(folder, column.concurrency, window.number) for window in of_rings]
    try:
        breakdown, ranks = breakdown_of_windows(folders)
        measured = Measured()
        for rank in ranks:
            place = rank.identity.coordinates
            measured.sharding = measured.sharding or Sharding.of(place.tp_size, place.dp_size)
            measured.pipeline_stages = max(measured.pipeline_stages, place.pp_size)
            measured.add(rank.packed, rank.details)
        machine = make_machine(
            gpu=plan.gpu,
            config=Path(plan.config) if plan.config else None,
            model=str(manifest.server.get("root", "")),
            context=plan.context if plan.context is not None else plan.input_tokens + plan.output_tokens / 2,
            sharding=measured.known_sharding(),
            link=plan.link or AUTO,
        )
        limits = find_limits(breakdown, measured, machine)
    except (LimitsError, CampaignError) as error:
        return {}, str(error)
    steps = {group.key: 0 for group in limits.groups}
    for own in breakdown.groups:
        if own.key in steps:
            steps[own.key] += own.steps
    most = max(limits.groups, key=lambda group: steps[group.key], default=None)
    if most is None:
        return {}, "no decode step to compute a floor of"
    return {**{row.name: row for row in most.rows}, "step": most.step}, ""
