"""`vllm-k25 export`: the metrics of the rings on a port of their own."""

from __future__ import annotations

import logging
import os
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vllm_k25_instrument.instances import check_default_is_ours
from vllm_k25_instrument.plain_text import one_line
from vllm_k25_instrument.settings import SettingsError, load_settings

if TYPE_CHECKING:
    from vllm_k25_instrument.export.otel.push import Pusher


def export(
    rings: Annotated[
        Path | None,
        typer.Argument(
            help="Ring directory (its living server is followed, also through restarts), or one instance's folder. "
            "(Default: K25_RING_DIR.)",
            show_default=False,
            readable=False,  # asked below: typer's own answer names no remedy
        ),
    ] = None,
    host: Annotated[
        str | None, typer.Option(help="Address to listen on. (Default: K25_EXPORT_HOST, else 127.0.0.1.)")
    ] = None,
    port: Annotated[
        int | None,
        typer.Option(min=0, max=65_535, help="Port; 0 picks a free one. (Default: K25_EXPORT_PORT, else 9425.)"),
    ] = None,
    instance: Annotated[
        str | None, typer.Option(help="Stay with this instance (the name of a folder in the ring directory).")
    ] = None,
    once: Annotated[
        bool,
        typer.Option(
            "--once",
            help="Print the metrics once and exit; 1 if there are none. With --otlp: push all that the rings hold, of "
            "a dead server too, and exit; 1 if not all of it was taken.",
        ),
    ] = False,
    otlp: Annotated[
        bool,
        typer.Option(
            "--otlp",
            help="Also push metrics, and a span per sampled step and rank, to an OpenTelemetry collector (set up with "
            "the standard OTEL_* variables).",
        ),
    ] = False,
    otlp_ranges: Annotated[
        bool, typer.Option("--otlp-ranges", help="--otlp, with a child span for every range: hundreds per step.")
    ] = False,
) -> None:
    """Serve the metrics of the rings for Prometheus, and push them over OTLP if asked to.

    For servers whose own /metrics cannot carry them (several API servers, Rust front end).

    It only reads the rings: start and stop it whenever you like.
    """
    from vllm_k25_instrument.export.stopping import stop_signals, wait_for_stop

    _log_plainly()
    try:
        settings = load_settings()
    except SettingsError as error:
        raise _failure(str(error)) from None
    directory = _existing(rings) if rings is not None else settings.ring_dir
    try:
        check_default_is_ours(directory)
    except PermissionError as error:
        raise _failure(f"{directory}: {error.strerror}") from None
    path = _instance(directory, instance) if instance is not None else directory

    otlp = otlp or otlp_ranges
    if once and otlp:
        pusher = _pusher(path, ranges=otlp_ranges, history=True)
        complete = pusher.push_once()
        pusher.close()
        if not complete:
            raise _failure(f"{path}: not everything was pushed: {pusher.accounts}")
        return
    if once:
        from vllm_k25_instrument.export.server import exposition_of

        text = exposition_of(path)
        if text is None:
            raise _failure(f"{path}: no rings that can be read here (is the server running with K25_INSTRUMENT=1?)")
        typer.echo(text, nl=False)
        return

    host = settings.export_host if host is None else host
    port = settings.export_port if port is None else port
    with stop_signals():  # before anything starts a thread (numpy does, and gRPC): they inherit it
        from vllm_k25_instrument.export.server import ListenError, serving

        pushers = [_pusher(path, ranges=otlp_ranges)] if otlp else []
        try:
            with serving(path, host, port, pushers) as url, ExitStack() as running:
                typer.echo(f"serving the metrics of {path} at {url}")
                for pusher in pushers:
                    running.enter_context(pusher)
                    typer.echo(f"pushing {pusher.destination}")
                wait_for_stop()
        except ListenError as error:
            raise _failure(str(error)) from None


def _pusher(path: Path, *, ranges: bool, history: bool = False) -> Pusher:
    from vllm_k25_instrument.export.otel.errors import OtlpError
    from vllm_k25_instrument.export.otel.start import open_pusher

    try:
        return open_pusher(path, ranges=ranges, history=history)
    except OtlpError as error:
        raise _failure(str(error)) from None


def _existing(path: Path) -> Path:
    """The path as given. A directory that is yet to come can only be the default one: others are typing errors."""
    try:
        found = path.exists()
    except PermissionError:
        readable = False
    else:
        if not found:
            raise _failure(f"{path}: no such file or directory")
        readable = os.access(path, os.R_OK | (os.X_OK if path.is_dir() else 0))
    if not readable:
        raise _failure(f"{path}: permission denied; run the exporter as the user of the server")
    return path


def _instance(directory: Path, name: str) -> Path:
    path = directory / name
    if name == ".." or Path(name).name != name or not path.is_dir():
        from vllm_k25_instrument.instances import list_instances

        known = ", ".join(found.name for found in list_instances(directory)) or "none"
        raise _failure(f"{directory}: no instance {name!r} here (there are: {known})")
    return path


class _OneLine(logging.Formatter):
    """Messages quote rings, folders and collectors: a log must not take orders, or a second line, from them."""

    def format(self, record: logging.LogRecord) -> str:
        text = one_line(record.getMessage())
        return f"{text}\n{self.formatException(record.exc_info)}" if record.exc_info else text


def _log_plainly() -> None:
    handler = logging.StreamHandler()
    handler.setFormatter(_OneLine())
    logging.basicConfig(level=logging.INFO, handlers=[handler])


def _failure(message: str) -> typer.Exit:
    typer.echo(one_line(message), err=True)
    return typer.Exit(1)
