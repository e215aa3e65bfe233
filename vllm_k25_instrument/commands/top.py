"""`vllm-k25 top`: the live view of a running server."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from enum import IntEnum
from pathlib import Path
from typing import Annotated, Final

import typer
from rich.console import Console
from rich.live import Live

from vllm_k25_instrument.commands.documents import fail
from vllm_k25_instrument.commands.terminal import FRAME_WIDTH, Terminal, messages
from vllm_k25_instrument.instances import check_default_is_ours
from vllm_k25_instrument.report.follow import Follower, ServerState, Snapshot
from vllm_k25_instrument.report.live import Frame
from vllm_k25_instrument.settings import SettingsError, load_settings

COMMAND: Final = "top"


class Exit(IntEnum):
    """Exit codes of `top`."""

    OK = 0
    NO_SERVER = 1
    USAGE = 2


def top(
    rings: Annotated[
        Path | None,
        typer.Argument(
            help="A ring file, the folder of a server instance, or a ring directory (then its running instance is "
            "followed, and the next one after it). Default: K25_RING_DIR.",
            show_default=False,
        ),
    ] = None,
    interval: Annotated[float, typer.Option("--interval", min=0.1, max=3600, help="Seconds between two frames.")] = 1.0,
    window: Annotated[
        float, typer.Option("--window", min=0.1, max=3600, help="Seconds before the newest step that a frame covers.")
    ] = 10.0,
    once: Annotated[bool, typer.Option("--once", help="Print one frame and exit.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON breakdown of the window per refresh, each on its own line.")
    ] = False,
    rank: Annotated[list[int] | None, typer.Option("--rank", help="Show only this rank. Repeatable.")] = None,
) -> None:
    """Watch where the time of a running server's steps goes: step time, categories and the slowest rank.

    Waits for a server that is not there yet, and ends when the server has ended. Ctrl-C ends it too.

    Exit codes: 0 the server has ended, or you have; 1 there is no readable ring; 2 wrong usage.
    """
    errors = messages()
    try:
        path = load_settings().ring_dir if rings is None else rings
        check_default_is_ours(path)
    except SettingsError as error:
        fail(errors, COMMAND, Exit.USAGE, str(error))
    except PermissionError as error:
        fail(errors, COMMAND, Exit.USAGE, f"{path}: {error.strerror}")
    follower = Follower(path, window)
    shown = frozenset(rank or ())

    def frame(snapshot: Snapshot) -> Frame:
        return Frame(snapshot, now_unix_ns=time.time_ns(), window_s=window, ranks=shown)

    try:
        if once:
            snapshot = follower.poll()
            if snapshot.state is ServerState.WAITING:
                fail(errors, COMMAND, Exit.NO_SERVER, f"{path}: no rings here: start vLLM with K25_INSTRUMENT=1")
            _refuse_unreadable(errors, snapshot)
            _refuse_unknown_ranks(errors, snapshot, shown)
            if as_json:
                _print_json(snapshot, shown)
            else:
                Terminal(pipe_width=FRAME_WIDTH).print(frame(snapshot))
        elif as_json:
            errors.print(f"following {path}; Ctrl-C ends", markup=False)
            _refuse_unreadable(errors, _follow(follower, interval, lambda snapshot: _print_json(snapshot, shown)))
        else:
            _refuse_unreadable(errors, _watch(follower, interval, frame))
    except KeyboardInterrupt:
        pass
    finally:
        follower.close()


def _watch(follower: Follower, interval_s: float, frame: Callable[[Snapshot], Frame]) -> Snapshot:
    console = Terminal(pipe_width=FRAME_WIDTH)
    if not console.is_terminal:  # a pipe gets frame after frame
        return _follow(follower, interval_s, lambda snapshot: console.print(frame(snapshot), ""))
    with Live(console=console, auto_refresh=False, vertical_overflow="crop") as live:
        return _follow(follower, interval_s, lambda snapshot: live.update(frame(snapshot), refresh=True))


def _follow(follower: Follower, interval_s: float, show: Callable[[Snapshot], None]) -> Snapshot:
    """Show a snapshot per interval until the server has ended; returns the last."""
    due = time.monotonic()
    while True:
        snapshot = follower.poll()
        show(snapshot)
        if snapshot.state is ServerState.ENDED:
            return snapshot
        due += interval_s
        time.sleep(max(due - time.monotonic(), 0.0))
        due = max(due, time.monotonic() - interval_s)  # a frame that took long is not made up for


def _print_json(snapshot: Snapshot, ranks: frozenset[int]) -> None:
    if snapshot.state is not ServerState.WAITING:
        document = snapshot.report.breakdown.only(ranks=ranks).to_json_dict()
        typer.echo(json.dumps(document, separators=(",", ":")))


def _refuse_unreadable(errors: Console, snapshot: Snapshot) -> None:
    """There were ring files, and none of them could be read: say which and why."""
    breakdown = snapshot.report.breakdown
    if not breakdown.ranks_found:
        reason = breakdown.caveats[0].message if breakdown.caveats else f"{snapshot.path}: no rings"
        fail(errors, COMMAND, Exit.NO_SERVER, f"{reason}: name a ring that this version has written")


def _refuse_unknown_ranks(errors: Console, snapshot: Snapshot, ranks: frozenset[int]) -> None:
    found = snapshot.report.breakdown.ranks_found
    if unknown := sorted(ranks - set(found)):
        fail(errors, COMMAND, Exit.USAGE, f"--rank {unknown[0]}: there are ranks {', '.join(map(str, found))}")
