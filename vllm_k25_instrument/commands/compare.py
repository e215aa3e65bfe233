"""`vllm-k25 compare`: two breakdowns side by side, whatever they come from."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final

import typer
from rich.console import Console

from vllm_k25_instrument.commands.analyze import Exit, read_traces
from vllm_k25_instrument.commands.documents import fail, read_side, show_or_write_json
from vllm_k25_instrument.commands.terminal import messages
from vllm_k25_instrument.instances import find_rings
from vllm_k25_instrument.report.compare import Comparison, Side, compare_sides
from vllm_k25_instrument.report.compare_table import ComparisonTable
from vllm_k25_instrument.report.figures import microseconds
from vllm_k25_instrument.report.rings import Report, read_rings
from vllm_k25_instrument.report.table import caveat_lines
from vllm_k25_instrument.ring import open_rings

COMMAND: Final = "compare"


def compare(
    a: Annotated[Path, typer.Argument(metavar="A", help="A breakdown's JSON, traces (or a directory), or rings.")],
    b: Annotated[Path, typer.Argument(metavar="B", help="The same; of any other source, if you like.")],
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write the comparison as JSON; - for standard output.")
    ] = None,
    threshold: Annotated[
        float | None,
        typer.Option("--threshold", metavar="PCT", min=0, help="Exit with 1 if B's steps take PCT % longer than A's."),
    ] = None,
    agree: Annotated[
        float | None,
        typer.Option(
            "--agree",
            metavar="PCT",
            min=0,
            help="Exit with 1 if steps, or categories that both measure, differ by more than PCT % of the larger.",
        ),
    ] = None,
    rules: Annotated[
        Path | None, typer.Option("--rules", metavar="FILE", help="TOML rules that are tried before the built-in ones.")
    ] = None,
) -> None:
    """Set two breakdowns side by side: what each category's time changed by, and its share of the step's change.

    Exit codes: 0 compared; 1 a check failed (--threshold, --agree); 2 wrong usage, or something that cannot be read;
    3 a side is incomplete, or the two have nothing in common.
    """
    errors = messages()
    compared = compare_sides(_side(errors, a, rules), _side(errors, b, rules))
    show_or_write_json(errors, COMMAND, Exit.USAGE, ComparisonTable(compared), compared.to_json_dict(), json_file)
    if not compared.comparable:
        errors.print(f"{a} and {b} have nothing in common: no steps of one phase and batch, no sums", markup=False)
        raise typer.Exit(Exit.INCOMPLETE)
    if _checks_fail(errors, compared, threshold, agree):
        raise typer.Exit(Exit.CHECK_FAILED)
    if not compared.groups and compared.a.groups and compared.b.groups:
        errors.print(f"{a} and {b} have no steps of one phase and batch in common: only sums compared", markup=False)
        raise typer.Exit(Exit.INCOMPLETE)
    if not (compared.a.complete and compared.b.complete):
        raise typer.Exit(Exit.INCOMPLETE)


def _checks_fail(errors: Console, compared: Comparison, threshold: float | None, agree: float | None) -> bool:
    failed = False
    if threshold is not None:
        for group in compared.slower(threshold):
            failed = True
            errors.print(
                f"slower: {group.title}: {microseconds(group.step.a_ns)} -> {microseconds(group.step.b_ns)} µs a step, "
                f"{group.step.percent:+.1f} % (threshold {threshold:g} %)",
                style="bold red",
                markup=False,
            )
    if agree is not None:
        for title, row in compared.disagreeing(agree):
            failed = True
            errors.print(
                f"disagreement: {title}: {row.name} {microseconds(row.a_ns)} and {microseconds(row.b_ns)} µs, "
                f"{row.apart_percent:.1f} % apart (tolerance {agree:g} %)",
                style="bold red",
                markup=False,
            )
    return failed


def _side(errors: Console, path: Path, rules: Path | None) -> Side:
    """What is at `path`: a document, rings, or traces. Exits with 2 where it is none of them."""
    side = read_side(errors, COMMAND, Exit.USAGE, path, among_traces=True)
    if side is not None:
        return side
    made = _rings(path) or read_traces(errors, COMMAND, [path], rules=rules)
    for line in caveat_lines(made.caveats):
        errors.print(line)
    if not made.breakdown.groups and made.breakdown.gpu is None:
        fail(errors, COMMAND, Exit.USAGE, f"{path}: the rings hold no sample")
    return Side.of(str(path), made.breakdown.to_json_dict())


def _rings(path: Path) -> Report | None:
    """The report of the rings at `path`; None where there are none."""
    try:
        readers, unreadable = open_rings(find_rings(path))
    except OSError:
        return None
    try:
        return read_rings(readers, unreadable) if readers else None
    finally:
        for reader in readers:
            reader.close()
