"""`vllm-k25 whatif`: what a change would make of the step time, from exposed time per category."""

from __future__ import annotations

from enum import IntEnum
from pathlib import Path
from typing import Annotated, Final

import typer
from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from vllm_k25_instrument.commands.documents import fail, read_side, show_or_write_json
from vllm_k25_instrument.commands.terminal import messages
from vllm_k25_instrument.instances import find_rings
from vllm_k25_instrument.limits.batches import Measured, read_measured
from vllm_k25_instrument.limits.errors import LimitsError
from vllm_k25_instrument.limits.floors import Sharding
from vllm_k25_instrument.limits.gpus import AUTO
from vllm_k25_instrument.limits.machine import Machine, make_machine
from vllm_k25_instrument.model import BATCH_LABELS, Category
from vllm_k25_instrument.palette import category_color
from vllm_k25_instrument.report.compare import Side
from vllm_k25_instrument.report.figures import microseconds
from vllm_k25_instrument.report.rings import read_rings
from vllm_k25_instrument.report.table import caveat_lines
from vllm_k25_instrument.ring import open_rings
from vllm_k25_instrument.settings import SettingsError, load_settings
from vllm_k25_instrument.whatif import Change, Evidence, Prediction, Speculation, WhatIf, WhatIfError, what_if

COMMAND: Final = "whatif"


class Exit(IntEnum):
    """Exit codes of `whatif`, as those of `report`."""

    COMPLETE = 0
    NOTHING_PREDICTED = 1
    USAGE = 2
    INCOMPLETE = 3


def whatif(
    source: Annotated[
        Path | None,
        typer.Argument(
            metavar="[RINGS|JSON]",
            help="Rings, as for `report`, or the JSON of a breakdown. Default: K25_RING_DIR.",
            show_default=False,
        ),
    ] = None,
    all_reduce: Annotated[
        str | None, typer.Option("--all-reduce", metavar="path=NAME|xF|floor", help="All-reduces change.")
    ] = None,
    moe: Annotated[str | None, typer.Option("--moe", metavar="xF|floor", help="Routed experts change.")] = None,
    mla: Annotated[str | None, typer.Option("--mla", metavar="xF|floor", help="MLA attention changes.")] = None,
    unattributed: Annotated[
        str | None, typer.Option("--unattributed", metavar="xF|floor", help="What no hook covers changes.")
    ] = None,
    spec_decode: Annotated[
        float | None,
        typer.Option("--spec-decode", metavar="ACCEPTED", min=0, help="Draft tokens accepted per step, in the mean."),
    ] = None,
    drafts: Annotated[
        int | None, typer.Option("--drafts", min=1, help="Draft tokens verified per request and step.")
    ] = None,
    draft_us: Annotated[float, typer.Option("--draft-us", min=0, help="The drafter's own time per step, µs.")] = 0.0,
    gpu: Annotated[str | None, typer.Option("--gpu", metavar="NAME|auto", help="For floors: the GPU.")] = None,
    config: Annotated[
        Path | None, typer.Option("--config", metavar="PATH", help="For floors: the model's config.json.")
    ] = None,
    context: Annotated[
        float | None, typer.Option("--context", metavar="TOKENS", min=0, help="For floors: tokens attended to.")
    ] = None,
    link: Annotated[str, typer.Option("--link", metavar="NAME", help="For floors: pcie5x16, nvlink, GB/s.")] = AUTO,
    tp: Annotated[int | None, typer.Option("--tp", min=1, help="Size of the group, where no ring tells.")] = None,
    kv_bits: Annotated[int | None, typer.Option("--kv-bits", min=4, help="Bits of the cache (8: fp8).")] = None,
    hop_us: Annotated[float | None, typer.Option("--hop-us", min=0, help="Latency of the link, µs a hop.")] = None,
    batch: Annotated[
        list[str] | None,
        typer.Option("--batch", metavar="LABEL", help=f"Only this batch: {', '.join(BATCH_LABELS)}. Repeatable."),
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write the prediction as JSON; - for standard output.")
    ] = None,
) -> None:
    """Predict the step time after a change: all-reduces through another path, a category at its floor, drafts.

    Exit codes: 0 predicted; 3 predicted, but ranks are missing or some groups had to be refused (see standard error);
    1 nothing could be predicted, for the reasons given; 2 wrong usage, or nothing at the path.
    """
    errors = messages()
    changes, speculation = _wishes(
        errors,
        {
            Category.ALL_REDUCE: all_reduce,
            Category.MOE_EXPERTS: moe,
            Category.MLA_ATTENTION: mla,
            Category.UNATTRIBUTED: unattributed,
        },
        spec_decode,
        drafts,
        draft_us,
    )
    side, measured, model = _source(errors, source)
    machine: Machine | None = None
    if gpu is not None:
        try:
            machine = make_machine(
                gpu=gpu,
                config=config,
                model=model,
                context=context,
                sharding=_sharding(measured, tp),
                link=link,
                kv_bits=kv_bits,
                hop_us=hop_us,
            )
        except LimitsError as error:
            fail(errors, COMMAND, Exit.USAGE, str(error))
    made = what_if(_only(errors, side, batch or []), changes, speculation, Evidence(measured, machine))
    _write(errors, made, json_file)


def _sharding(measured: Measured | None, tp: int | None) -> Sharding:
    if tp is not None:
        return Sharding.of(tp)
    if measured is None:
        raise LimitsError("a breakdown's JSON does not tell the size of the tensor-parallel group: give it with --tp")
    return measured.known_sharding()


def _wishes(
    errors: Console,
    texts: dict[Category, str | None],
    accepted: float | None,
    drafts: int | None,
    draft_us: float,
) -> tuple[list[Change], Speculation | None]:
    try:
        changes = [Change.parse(category, text) for category, text in texts.items() if text is not None]
        speculation = None if accepted is None else Speculation.of(accepted, drafts, draft_us)
    except WhatIfError as error:
        fail(errors, COMMAND, Exit.USAGE, str(error))
    if not changes and speculation is None:
        fail(
            errors,
            COMMAND,
            Exit.USAGE,
            "nothing changes: give --all-reduce, --moe, --mla, --unattributed or --spec-decode",
        )
    return changes, speculation


def _source(errors: Console, source: Path | None) -> tuple[Side, Measured | None, str]:
    """The breakdown, what the rings say beyond it (None of a JSON file), and the model's name where a ring has it."""
    side = None if source is None else read_side(errors, COMMAND, Exit.USAGE, source)
    if side is not None:
        return side, None, ""
    try:
        where = find_rings(load_settings().ring_dir if source is None else source)
    except SettingsError as error:
        fail(errors, COMMAND, Exit.USAGE, str(error))
    except OSError as error:
        fail(errors, COMMAND, Exit.USAGE, f"{error.filename or source}: {error.strerror}: name rings or a JSON file")
    readers, unreadable = open_rings(where)
    try:
        made = read_rings(readers, unreadable)
        measured = read_measured(readers)
    finally:
        for reader in readers:
            reader.close()
    for line in caveat_lines(made.caveats):
        errors.print(line)
    if not made.breakdown.groups:
        fail(errors, COMMAND, Exit.NOTHING_PREDICTED, f"{where}: the rings hold no sample")
    return Side.of(str(where), made.breakdown.to_json_dict()), measured, made.subject.model


def _only(errors: Console, side: Side, batches: list[str]) -> Side:
    wanted = {"+Inf" if label.lower().lstrip("+") == "inf" else label for label in batches}
    groups = {key: steps for key, steps in side.groups.items() if not wanted or key.batch in wanted}
    if not groups:
        there = ", ".join(sorted({key.batch for key in side.groups})) or "none"
        fail(errors, COMMAND, Exit.NOTHING_PREDICTED, f"{side.name}: no steps of this batch; there are {there}")
    return Side(side.name, side.source, side.complete, groups, side.totals)


def _write(errors: Console, made: WhatIf, json_file: Path | None) -> None:
    for key, reason in made.refused:
        errors.print(f"refused: {key.words}: {reason}", style="yellow", markup=False)
    if not made.predictions:
        fail(errors, COMMAND, Exit.NOTHING_PREDICTED, f"{made.name}: nothing could be predicted, see the reasons above")
    show_or_write_json(errors, COMMAND, Exit.USAGE, _renderable(made), made.to_json_dict(), json_file)
    if made.refused or not made.complete:
        raise typer.Exit(Exit.INCOMPLETE)


def _renderable(made: WhatIf) -> RenderableType:
    parts: list[RenderableType] = [Text(f"What if · {made.name}", style="bold")]
    for prediction in made.predictions:
        parts += [Text(), _headline(prediction), _table(prediction)]
    parts.append(Text())
    parts += [Text(assumption, style="dim") for assumption in made.assumptions]
    return Group(*parts)


def _headline(prediction: Prediction) -> Text:
    text = Text.assemble((prediction.title, "bold"))
    text.append(f"  step {microseconds(prediction.measured_ns)} -> {microseconds(prediction.predicted_ns)} µs")
    if prediction.tokens_per_request != 1:
        each = microseconds(prediction.predicted_token_ns)
        text.append(f", {prediction.tokens_per_request:g} tokens a step: {each} µs a token")
    if prediction.speedup is not None:
        text.append(f", {prediction.speedup:.2f} times as many tokens", style="bold")
        if prediction.requests is not None and prediction.predicted_token_ns:
            rate = prediction.requests * 1e9 / prediction.predicted_token_ns
            text.append(f" ({rate:,.0f} a second of {prediction.requests:,.1f} requests)")
    return text


def _table(prediction: Prediction) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 0, 0, 1), header_style="dim", show_edge=False)
    table.add_column("category", no_wrap=True, min_width=20)
    for head in ("measured µs", "predicted µs", "won µs"):
        table.add_column(head, justify="right", no_wrap=True)
    table.add_column("why")
    for row in prediction.rows:
        won = row.measured_ns - row.predicted_ns
        table.add_row(
            Text.assemble(("■ ", category_color(row.name)), row.name),
            microseconds(row.measured_ns),
            microseconds(row.predicted_ns),
            microseconds(won) if won else "",
            row.reason,
        )
    table.add_section()
    table.add_row(
        "step",
        microseconds(prediction.measured_ns),
        microseconds(prediction.predicted_ns),
        microseconds(prediction.measured_ns - prediction.predicted_ns),
        "",
    )
    return table
