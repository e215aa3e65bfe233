"""What the commands that make a report share: where its documents go, and how they fail."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, NoReturn

import typer
from rich.console import Console, RenderableType

from vllm_k25_instrument.report.html import to_html
from vllm_k25_instrument.report.markdown import to_markdown
from vllm_k25_instrument.report.rings import Report

STDOUT: Final = Path("-")
PIPE_WIDTH: Final = 200
"""Columns of a table that goes to a file or a pipe, which has no width of its own."""


MAX_DOCUMENT: Final = 256 * 1024 * 1024
"""Bytes of a breakdown's JSON: ten thousand steps of eight ranks have a tenth of it."""


class Documents:
    """The files that a command was asked for. At most one of them is standard output."""

    def __init__(
        self, *, html: Path | None = None, json_file: Path | None = None, markdown: Path | None = None
    ) -> None:
        """Raises ValueError where two of them want standard output."""
        self._html = html
        self._json = json_file
        self._markdown = markdown
        if [html, json_file, markdown].count(STDOUT) > 1:
            raise ValueError("two documents want standard output: give one of them a file")

    @property
    def taken(self) -> bool:
        """Whether standard output is one of the documents, and nothing else may go there."""
        return STDOUT in (self._html, self._json, self._markdown)

    def write(self, report: Report, *, per_rank: bool) -> None:
        """Write them all. Raises OSError."""
        makers: tuple[tuple[Path | None, Callable[[], str]], ...] = (
            (self._html, lambda: to_html(report, per_rank=per_rank)),
            (self._markdown, lambda: to_markdown(report, per_rank=per_rank)),
            (self._json, lambda: json.dumps(report.breakdown.to_json_dict(), indent=2) + "\n"),
        )
        for path, text in makers:
            if path == STDOUT:
                typer.echo(text(), nl=False)
            elif path is not None:
                path.write_text(text(), encoding="utf-8", errors="backslashreplace")


def show(renderable: RenderableType) -> None:
    """Print to standard output, wide where that is no terminal."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=PIPE_WIDTH)
    console.print(renderable)


def show_or_write_json(
    errors: Console, command: str, code: int, shown: RenderableType, document: dict[str, Any], path: Path | None
) -> None:
    """Show a result, and write its JSON where `path` says; to standard output goes the JSON alone.

    Exits with `code` where it cannot be written.
    """
    text = json.dumps(document, indent=2) + "\n"
    if path == STDOUT:
        typer.echo(text, nl=False)
        return
    if path is not None:
        try:
            path.write_text(text, encoding="utf-8")
        except OSError as error:
            fail(errors, command, code, f"{path}: cannot be written: {error.strerror}")
    show(shown)


def fail(console: Console, command: str, code: int, message: str) -> NoReturn:
    """One line on standard error, and out."""
    line = " ".join(message.split())
    console.print(f"vllm-k25 {command}: {line}", style="bold red", markup=False)
    raise typer.Exit(code)
