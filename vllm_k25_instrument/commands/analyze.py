"""`vllm-k25 analyze`: torch.profiler traces, nsys exports and key_averages tables into the breakdown."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import IntEnum
from pathlib import Path
from time import monotonic
from typing import Annotated, Final

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from vllm_k25_instrument.commands.documents import Documents, fail, show
from vllm_k25_instrument.commands.terminal import messages
from vllm_k25_instrument.model import Phase
from vllm_k25_instrument.report.rings import Report
from vllm_k25_instrument.report.table import ReportTable, caveat_lines

COMMAND: Final = "analyze"
REFRESH_S: Final = 0.1

_STEPS: Final = re.compile(r"(\d{1,9})(?:-(\d{1,9}))?")


class Exit(IntEnum):
    """Exit codes of `analyze` and `compare`."""

    COMPLETE = 0
    CHECK_FAILED = 1
    USAGE = 2
    INCOMPLETE = 3


def analyze(
    paths: Annotated[
        list[Path],
        typer.Argument(
            metavar="PATHS",
            help="torch.profiler traces (.json, .json.gz), nsys exports (.sqlite, .nsys-rep), key_averages tables "
            "(profiler_out_*.txt), or a directory of the ranks of one run. What a file is, its content says.",
            show_default=False,
        ),
    ],
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write the breakdown as JSON; - for standard output.")
    ] = None,
    html: Annotated[Path | None, typer.Option("--html", metavar="FILE", help="Write a self-contained page.")] = None,
    markdown: Annotated[
        Path | None, typer.Option("--markdown", metavar="FILE", help="Write Markdown; - for standard output.")
    ] = None,
    rules: Annotated[
        Path | None, typer.Option("--rules", metavar="FILE", help="TOML rules that are tried before the built-in ones.")
    ] = None,
    per_rank: Annotated[
        bool, typer.Option("--per-rank", help="A column for each rank, however many there are.")
    ] = False,
    phase: Annotated[list[Phase] | None, typer.Option("--phase", help="Only this phase. Repeatable.")] = None,
    steps: Annotated[
        str,
        typer.Option("--steps", metavar="A-B", help="Only steps A to B (or step A), counted from 1 in each capture."),
    ] = "",
    ray: Annotated[
        str,
        typer.Option("--ray", metavar="ADDRESS", help="Read the files on an existing Ray cluster, a task per file."),
    ] = "",
    expect_ranks: Annotated[
        int,
        typer.Option(
            "--expect-ranks",
            metavar="N",
            min=0,
            max=65536,
            help="How many ranks there should be. Default: as the files say.",
        ),
    ] = 0,
) -> None:
    """Break down where the time of the steps went in traces of one run: exact, by category, phase, batch and rank.

    Exit codes: 0 complete; 2 wrong usage, or nothing that can be read; 3 incomplete, or figures that the capture
    cannot support are left out (what can be said is printed, and marked).
    """
    errors = messages()
    try:
        documents = Documents(html=html, json_file=json_file, markdown=markdown)
    except ValueError as error:
        fail(errors, COMMAND, Exit.USAGE, str(error))
    report = read_traces(errors, COMMAND, paths, rules=rules, steps=steps, ray=ray, expect_ranks=expect_ranks)
    for line in caveat_lines(report.caveats):
        errors.print(line)
    if phase:
        report = _only(errors, report, phase)
    try:
        documents.write(report, per_rank=per_rank)
    except OSError as error:
        fail(errors, COMMAND, Exit.USAGE, f"{error.filename}: cannot be written: {error.strerror}")
    if not documents.taken:
        show(ReportTable(report, per_rank=per_rank))
    if not report.breakdown.complete:
        raise typer.Exit(Exit.INCOMPLETE)


def read_traces(
    errors: Console,
    command: str,
    paths: Sequence[Path],
    *,
    rules: Path | None = None,
    steps: str = "",
    ray: str = "",
    expect_ranks: int = 0,
) -> Report:
    """Analyse `paths` with a progress bar; exits with code 2 and one line where that cannot be done."""
    # Imported here, so that the other commands start without numpy.
    from vllm_k25_instrument.analysis.analyze import Options, analyze
    from vllm_k25_instrument.analysis.capture import CaptureError
    from vllm_k25_instrument.analysis.classify import Classifier
    from vllm_k25_instrument.analysis.findings import StepRange
    from vllm_k25_instrument.analysis.inputs import expand
    from vllm_k25_instrument.analysis.ray_workers import RayError, RayMapper
    from vllm_k25_instrument.analysis.rules import RulesError
    from vllm_k25_instrument.analysis.workers import Mapper, run_on_cores

    only = None
    if steps:
        match = _STEPS.fullmatch(steps)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
        if not 0 < first <= last:
            fail(errors, command, Exit.USAGE, f"--steps {steps}: not a step or a range of steps such as 4 or 4-8")
        only = StepRange(first, last)
    try:
        Classifier.load(rules)
        ignored: list[Path] = []
        inputs = expand(paths, ignored)
        run: Mapper = RayMapper(ray) if ray else run_on_cores
        size = sum(each.path.stat().st_size for each in inputs)
        with _progress(errors, size) as advance:
            options = Options(rules, only, expect_ranks)
            return analyze(paths, options, run=run, advance=advance, inputs=inputs, ignored=ignored)
    except (CaptureError, RulesError, RayError) as error:
        fail(errors, command, Exit.USAGE, str(error))
    except OSError as error:
        fail(errors, command, Exit.USAGE, f"{error.filename}: cannot be read: {error.strerror}")


def _only(errors: Console, report: Report, phases: Sequence[Phase]) -> Report:
    from dataclasses import replace

    shown = replace(report, breakdown=report.breakdown.only(phases=phases))
    if not shown.breakdown.groups and report.breakdown.groups:
        there = sorted({str(group.key.phase) for group in report.breakdown.groups})
        wanted = ", ".join(str(phase) for phase in phases)
        fail(errors, COMMAND, Exit.USAGE, f"no step of phase {wanted}; there are {', '.join(there)}")
    return shown


@contextmanager
def _progress(console: Console, size: int) -> Iterator[Callable[[int], None]]:
    """A bar of bytes read, on a terminal only. Without a thread of its own, so that the workers can be forked."""
    bar = Progress(
        TextColumn("reading"),
        BarColumn(),
        DownloadColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
        auto_refresh=False,
    )
    with bar:
        task = bar.add_task("bytes", total=size)
        shown = 0.0

        def advance(count: int) -> None:
            nonlocal shown
            bar.advance(task, count)
            now = monotonic()
            if now - shown >= REFRESH_S:
                shown = now
                bar.refresh()

        yield advance
