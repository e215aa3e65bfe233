"""`vllm-k25 report`: the breakdown of the rings of a server, running or dead."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from enum import IntEnum
from pathlib import Path
from typing import Annotated, Final

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from vllm_k25_instrument.commands.documents import Documents, fail, show
from vllm_k25_instrument.commands.limits import limits_of_rings
from vllm_k25_instrument.commands.terminal import messages
from vllm_k25_instrument.instances import find_rings
from vllm_k25_instrument.limits.errors import LimitsError
from vllm_k25_instrument.limits.gpus import AUTO
from vllm_k25_instrument.limits.report import LimitsTable, limits_markdown
from vllm_k25_instrument.model import BATCH_LABELS, Phase
from vllm_k25_instrument.report.caveats import Caveat
from vllm_k25_instrument.report.rings import Report, read_rings
from vllm_k25_instrument.report.table import ReportTable, caveat_lines
from vllm_k25_instrument.ring import open_rings
from vllm_k25_instrument.settings import SettingsError, load_settings

COMMAND: Final = "report"

PROGRESS_AFTER_S: Final = 1.0
"""A progress bar appears when reading takes longer than this."""


class Exit(IntEnum):
    """Exit codes of `report`."""

    COMPLETE = 0
    NOTHING_TO_REPORT = 1
    USAGE = 2
    INCOMPLETE = 3


def report(
    rings: Annotated[
        Path | None,
        typer.Argument(
            help="A ring file, the folder of a server instance, or a ring directory (then its running instance is "
            "taken, else the last one). Default: K25_RING_DIR.",
            show_default=False,
        ),
    ] = None,
    html: Annotated[Path | None, typer.Option("--html", metavar="FILE", help="Write a self-contained page.")] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write the breakdown as JSON; - for standard output.")
    ] = None,
    markdown: Annotated[
        Path | None, typer.Option("--markdown", metavar="FILE", help="Write Markdown; - for standard output.")
    ] = None,
    phase: Annotated[list[Phase] | None, typer.Option("--phase", help="Only this phase. Repeatable.")] = None,
    batch: Annotated[
        list[str] | None,
        typer.Option("--batch", metavar="LABEL", help=f"Only this batch: {', '.join(BATCH_LABELS)}. Repeatable."),
    ] = None,
    per_rank: Annotated[
        bool, typer.Option("--per-rank", help="A column for each rank, however many there are.")
    ] = False,
    gpu: Annotated[
        str | None,
        typer.Option(
            "--gpu", metavar="NAME|auto", help="Add physical limits to table, Markdown and JSON. Of this GPU."
        ),
    ] = None,
    config: Annotated[
        Path | None, typer.Option("--config", metavar="PATH", help="For the limits: the model's config.json.")
    ] = None,
    context: Annotated[
        float | None, typer.Option("--context", metavar="TOKENS", min=0, help="For the limits: tokens attended to.")
    ] = None,
    link: Annotated[str, typer.Option("--link", metavar="NAME", help="For the limits: pcie5x16, nvlink, GB/s.")] = AUTO,
    kv_bits: Annotated[
        int | None, typer.Option("--kv-bits", min=4, help="For the limits: bits of the cache (8: fp8).")
    ] = None,
    hop_us: Annotated[
        float | None, typer.Option("--hop-us", min=0, help="For the limits: latency of the link, µs a hop.")
    ] = None,
) -> None:
    """Break down where the time of the sampled steps went, by phase, batch size, graph mode and rank.

    Reads the rings of a server, running or dead; changes nothing.

    Exit codes: 0 a complete breakdown was made; 3 one was made, but ranks are missing or something could not be
    read (see the warnings on standard error); 1 there is nothing to report; 2 wrong usage, or no rings at the path.
    """
    errors = messages()
    batches = [_batch(label) for label in batch or []]
    try:
        documents = Documents(html=html, json_file=json_file, markdown=markdown)
    except ValueError as error:
        fail(errors, COMMAND, Exit.USAGE, str(error))
    where = _find(errors, rings)
    made = _read(errors, where)
    for line in caveat_lines(made.caveats):
        errors.print(line)
    if not made.breakdown.groups:
        fail(errors, COMMAND, Exit.NOTHING_TO_REPORT, f"{where}: {_why_nothing(made.caveats)}")
    shown = replace(made, breakdown=made.breakdown.only(phases=phase or (), batches=batches))
    if not shown.breakdown.groups:
        there = sorted({f"{g.key.phase} batch {g.key.batch}" for g in made.breakdown.groups})
        fail(
            errors,
            COMMAND,
            Exit.NOTHING_TO_REPORT,
            f"{where}: no sampled step matches the filter; there are {', '.join(there)}",
        )
    try:
        limits = limits_of_rings(
            shown, where, gpu=gpu, config=config, context=context, link=link, kv_bits=kv_bits, hop_us=hop_us
        )
    except LimitsError as error:
        fail(errors, COMMAND, Exit.USAGE, str(error))
    more = {} if limits is None else {"limits": limits.to_json_dict()}
    section = "" if limits is None else limits_markdown(limits)
    try:
        documents.write(shown, per_rank=per_rank, section=section, more=more)
    except OSError as error:
        fail(errors, COMMAND, Exit.USAGE, f"{error.filename}: cannot be written: {error.strerror}")
    if not documents.taken:
        show(ReportTable(shown, per_rank=per_rank))
        if limits is not None:
            show(LimitsTable(limits))
    if not made.breakdown.complete:
        raise typer.Exit(Exit.INCOMPLETE)


def _find(errors: Console, rings: Path | None) -> Path:
    try:
        path = load_settings().ring_dir if rings is None else rings
        return find_rings(path)
    except SettingsError as error:
        fail(errors, COMMAND, Exit.USAGE, str(error))
    except OSError as error:
        remedy = "start vLLM with K25_INSTRUMENT=1, or name a ring file, an instance's folder or a ring directory"
        fail(errors, COMMAND, Exit.USAGE, f"{error.filename or rings}: {error.strerror}: {remedy}")


def _read(errors: Console, where: Path) -> Report:
    readers, unreadable = open_rings(where)
    try:
        with _progress(errors) as progress:
            return read_rings(readers, unreadable, progress)
    finally:
        for reader in readers:
            reader.close()


@contextmanager
def _progress(console: Console) -> Iterator[Callable[[int, int], None]]:
    """A progress bar on standard error, which appears only if reading takes long."""
    bar = Progress(
        TextColumn("reading rings"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
    )
    task = bar.add_task("samples", total=None)
    start = time.monotonic()
    started = False

    def show(read: int, total: int) -> None:
        nonlocal started
        if read % 64:
            return
        if not started and time.monotonic() - start > PROGRESS_AFTER_S:
            bar.start()
            started = True
        bar.update(task, completed=read, total=total)

    try:
        yield show
    finally:
        if started:
            bar.stop()


def _batch(label: str) -> str:
    for known in BATCH_LABELS:
        if label.lower() in (known.lower(), known.lower().lstrip("+")):
            return known
    raise typer.BadParameter(f"{label!r} is not one of {', '.join(BATCH_LABELS)}", param_hint="--batch")


def _why_nothing(caveats: tuple[Caveat, ...]) -> str:
    return "nothing to report" + (
        ", see the warnings above" if caveats else ": the rings hold no sample yet; send the server a request"
    )
