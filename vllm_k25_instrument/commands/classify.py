"""`vllm-k25 classify`: which category a kernel name gets, by which rule, and why."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from enum import IntEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer
from rich.console import Console
from rich.text import Text

from vllm_k25_instrument.commands.documents import fail
from vllm_k25_instrument.commands.terminal import Terminal, messages
from vllm_k25_instrument.palette import CATEGORY_COLORS

if TYPE_CHECKING:
    from vllm_k25_instrument.analysis.classify import Explanation

COMMAND: Final = "classify"

STDIN: Final = "-"


class Exit(IntEnum):
    """Exit codes of `classify`."""

    ALL_KNOWN = 0
    UNKNOWN_NAMES = 1
    USAGE = 2


def classify(
    names: Annotated[
        list[str] | None, typer.Argument(help="Kernel names, in quotes; - for one per line on standard input.")
    ] = None,
    file: Annotated[
        Path | None, typer.Option("--file", "-f", metavar="FILE", help="A file of names, one per line; - for stdin.")
    ] = None,
    context: Annotated[
        list[str] | None,
        typer.Option(
            "--context", metavar="RANGE", help="A range or operator around the kernels, innermost first. Repeatable."
        ),
    ] = None,
    rules: Annotated[
        Path | None, typer.Option("--rules", metavar="FILE", help="Rules of your own (TOML), tried before ours.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object per name.")] = False,
) -> None:
    """Tell the category of kernel names, and the rule that says so.

    Names may be demangled, mangled (CUDA, ROCm), short, or cut off as in a profiler's table. A name alone says less
    than what the kernel ran inside of: one cuBLAS kernel plays six roles in a layer. Give the range with --context.

    Exit codes: 0 every name has a rule; 1 some have none (category `other`); 2 wrong usage, or a rules file that
    cannot be used.
    """
    # Here, since they bring numpy, which the other commands should not wait for.
    from vllm_k25_instrument.analysis.classify import Classifier
    from vllm_k25_instrument.analysis.rules import RulesError

    errors = messages()
    try:
        classifier = Classifier.load(rules)
    except RulesError as error:
        fail(errors, COMMAND, Exit.USAGE, str(error))
    if not names and file is None:
        fail(errors, COMMAND, Exit.USAGE, "name a kernel, or give --file FILE (- for standard input)")
    out = Terminal()
    unknown = 0
    for name in _names(errors, names or [], file):
        explanation = classifier.explain(name, context or ())
        unknown += not explanation.rule_hit
        if as_json:
            typer.echo(json.dumps(_to_json(explanation)))
        else:
            out.print(_to_text(explanation), soft_wrap=True)
    if unknown:
        raise typer.Exit(Exit.UNKNOWN_NAMES)


def _names(errors: Console, names: list[str], file: Path | None) -> Iterator[str]:
    for name in names:
        if name == STDIN:
            yield from _lines(errors, None)
        else:
            yield name
    if file is not None:
        yield from _lines(errors, None if str(file) == STDIN else file)


def _lines(errors: Console, file: Path | None) -> Iterator[str]:
    """Names of a file (None: standard input); empty lines are none. Bytes that are not UTF-8 are replaced."""
    try:
        data = sys.stdin.buffer.read() if file is None else file.read_bytes()
    except OSError as error:
        fail(errors, COMMAND, Exit.USAGE, f"{file}: cannot be read: {error.strerror}")
    for line in data.decode("utf-8", errors="replace").splitlines():
        if line.strip():
            yield line.strip()


def _to_json(explanation: Explanation) -> dict[str, Any]:
    return {
        "name": explanation.name,
        "category": explanation.verdict.category.value,
        "rule": explanation.verdict.rule,
        "comment": explanation.comment,
        "matched": explanation.matched,
        "function": explanation.function,
        "inside": explanation.inside,
        "cut": explanation.cut,
    }


def _to_text(explanation: Explanation) -> Text:
    category, rule = explanation.verdict
    text = Text(f"{category.value:<18} ", style=CATEGORY_COLORS.get(category, ""))
    text.append(explanation.name + (" (cut off)" if explanation.cut else ""), style="default")
    why = ", ".join(f"{where} has '{what.strip()}'" for where, what in explanation.matched.items())
    text.append(f"\n{'':<18} rule {rule}{': ' if why else ''}{why}", style="default")
    text.append(f"\n{'':<18} {explanation.comment}", style="dim")
    return text
