"""`vllm-k25 doctor`."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

_STYLES = {"ok": "green", "note": "cyan", "warning": "yellow", "failure": "bold red"}


def doctor(
    vllm: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Look at the hooks in this vLLM package only, without importing it: before an upgrade.",
            show_default=False,
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
) -> None:
    """Check versions, hook points, NVTX, ring directory and ports.

    Exit code 1 when something that was asked for cannot work, else 0.
    """
    from rich.table import Table
    from rich.text import Text

    from vllm_k25_instrument.commands.terminal import Terminal
    from vllm_k25_instrument.doctor import Verdict, examine, examine_tree

    findings = examine() if vllm is None else examine_tree(vllm)
    if as_json:
        typer.echo(json.dumps([asdict(finding) for finding in findings], indent=2))
    else:
        table = Table(box=None, padding=(0, 2, 0, 0))
        for heading in ("check", "verdict", "finding"):
            table.add_column(heading, overflow="fold")
        for finding in findings:
            remedy = f"\n→ {finding.remedy}" if finding.remedy else ""
            # Text, not markup: a path may hold brackets.
            table.add_row(
                finding.check, Text(finding.verdict, _STYLES[finding.verdict]), Text(f"{finding.message}{remedy}")
            )
        Terminal().print(table)
    if any(finding.verdict is Verdict.FAILURE for finding in findings):
        raise typer.Exit(1)
