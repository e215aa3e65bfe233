"""What the commands that make a report share: where its documents go, and how they fail."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, NoReturn

import typer
from rich.console import Console, RenderableType

from vllm_k25_instrument.commands.terminal import STDOUT, Terminal
from vllm_k25_instrument.plain_text import one_line
from vllm_k25_instrument.report.compare import DocumentError, Side
from vllm_k25_instrument.report.html import to_html
from vllm_k25_instrument.report.markdown import to_markdown
from vllm_k25_instrument.report.rings import Report

MAX_DOCUMENT: Final = 64 * 1024 * 1024
"""Bytes of a breakdown's JSON that is read: ten thousand steps of eight ranks have half of it, and parsed JSON can take
twenty times as much memory as its text."""

_HEAD: Final = 4096


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

    def write(
        self, report: Report, *, per_rank: bool, section: str = "", more: Mapping[str, Any] | None = None
    ) -> None:
        """Write them all; `section` goes to the end of the Markdown, `more` into the JSON. Raises OSError."""
        makers: tuple[tuple[Path | None, Callable[[], str]], ...] = (
            (self._html, lambda: to_html(report, per_rank=per_rank)),
            (self._markdown, lambda: to_markdown(report, per_rank=per_rank) + section),
            (self._json, lambda: json.dumps({**report.breakdown.to_json_dict(), **(more or {})}, indent=2) + "\n"),
        )
        for path, text in makers:
            if path == STDOUT:
                typer.echo(text(), nl=False)
            elif path is not None:
                path.write_text(text(), encoding="utf-8", errors="backslashreplace")


def show(renderable: RenderableType) -> None:
    """Print to standard output, wide where that is no terminal."""
    Terminal().print(renderable)


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


def read_side(errors: Console, command: str, code: int, path: Path, *, among_traces: bool = False) -> Side | None:
    """The breakdown whose JSON is at `path`; None where something else is there, such as rings.

    With `among_traces` JSON that does not name a schema of ours is something else too. Exits with `code` where the JSON
    is damaged or no breakdown.
    """
    again = "write it again with `vllm-k25 report --json` or `vllm-k25 analyze --json`"
    try:
        if not path.is_file():
            return None
        with path.open("rb") as file:
            head = file.read(_HEAD)
            if not head.lstrip().startswith(b"{") or (among_traces and b'"vllm_k25.' not in head):
                return None
            data = head + file.read(MAX_DOCUMENT + 1 - len(head))
        if len(data) > MAX_DOCUMENT:
            fail(errors, command, code, f"{path}: more than {MAX_DOCUMENT >> 20} MiB of JSON: no breakdown")
        return Side.of(str(path), json.loads(data))
    except OSError as error:
        fail(errors, command, code, f"{path}: cannot be read: {error.strerror}")
    except DocumentError as error:
        fail(errors, command, code, f"{path}: {error}: {again}")
    except (ValueError, RecursionError) as error:
        fail(errors, command, code, f"{path}: not valid JSON ({error}): {again}")


def fail(console: Console, command: str, code: int, message: str) -> NoReturn:
    """One line on standard error, and out."""
    console.print(f"vllm-k25 {command}: {one_line(message)}", style="bold red", markup=False, soft_wrap=True)
    raise typer.Exit(code)
