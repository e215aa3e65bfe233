"""`vllm-k25 demo`: a tiny Kimi-K2.5 on vLLM's CPU or CUDA build, and where its time goes."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from enum import IntEnum, StrEnum
from pathlib import Path
from types import FrameType
from typing import Annotated, Final, NoReturn

import typer
from rich.console import Console

from vllm_k25_instrument.commands.documents import fail
from vllm_k25_instrument.commands.terminal import STDOUT, MovingLine, Terminal, messages
from vllm_k25_instrument.demo.build import BuildError, plan_demo
from vllm_k25_instrument.demo.graph_modes import graph_mode_lines
from vllm_k25_instrument.demo.load import LoadResult
from vllm_k25_instrument.demo.run import (
    RingMarks,
    problems,
    put_load,
    start_server,
    warm_up,
)
from vllm_k25_instrument.demo.server import ServerError, VllmMissingError, VllmServer, require_vllm
from vllm_k25_instrument.demo.tiny_model import Arch
from vllm_k25_instrument.report.html import to_html
from vllm_k25_instrument.report.rings import Report
from vllm_k25_instrument.report.table import ReportTable, caveat_lines
from vllm_k25_instrument.ring import RingError

COMMAND: Final = "demo"


class Exit(IntEnum):
    """Exit codes of `demo`."""

    OK = 0
    FAILED = 1
    USAGE = 2
    INTERRUPTED = 130


class Architecture(StrEnum):
    """The two ways to serve the model."""

    K25 = "k25"
    TEXT = "text"


def demo(
    arch: Annotated[
        Architecture,
        typer.Option(help="k25: the whole model, with its vision tower; text: its language model alone."),
    ] = Architecture.K25,
    out: Annotated[
        Path, typer.Option("--out", metavar="DIR", help="Where the model, the rings, the log and the results go.")
    ] = Path("demo-out"),
    json_file: Annotated[
        Path | None,
        typer.Option(
            "--json",
            metavar="FILE",
            help="Write the breakdown as JSON; - for standard output. Default: report.json in --out.",
            show_default=False,
        ),
    ] = None,
    html: Annotated[
        Path | None,
        typer.Option(
            "--html",
            metavar="FILE",
            help="Write the breakdown as a page. Default: report.html in --out.",
            show_default=False,
        ),
    ] = None,
    port: Annotated[int, typer.Option(min=0, max=65_535, help="Port of the server on 127.0.0.1; 0 picks one.")] = 0,
    timeout: Annotated[
        float | None,
        typer.Option(
            min=1,
            metavar="SECONDS",
            help="How long the server may take to start. Default: 300, on a GPU 900.",
            show_default=False,
        ),
    ] = None,
    keep: Annotated[bool, typer.Option("--keep", help="Leave the server running at the end.")] = False,
) -> None:
    """Serve a tiny Kimi-K2.5 INT4 with instrumented workers, load it, and show where its decode steps' time goes.

    With vLLM's CPU build it needs two cores and no GPU, and takes a minute or two. With the CUDA build it runs on one
    or two GPUs, with vLLM's default CUDA graphs and twins of them. The K25_* variables of the environment apply.

    Exit codes: 0 every request was answered and every rank was measured; 1 something failed; 2 it cannot run here.
    """
    screen = Screen(Terminal(stderr=json_file == STDOUT))
    try:
        require_vllm()
        plan = plan_demo()
        out.mkdir(parents=True, exist_ok=True)
        server = start_server(out, _ARCH[arch], port, plan)
    except (VllmMissingError, BuildError, ValueError, OSError) as error:
        screen.fail(Exit.USAGE, str(error))
    with _stopped_in_the_end(server, screen) as control:
        loads, marks = _serve(server, screen, plan.ready_seconds if timeout is None else timeout)
        control.keep = keep
    report = marks.read()
    screen.show(report)
    for line in graph_mode_lines(report.breakdown, marks.lost()):
        screen.say(line)
    if marks.skipped:
        screen.say(f"The first {marks.skipped} sampled steps, of the warm-up, are left out.")
    _write(screen, report, json_file or out / "report.json", html or out / "report.html")
    if marks.instance is not None:
        rings = _shortest(marks.instance.path)
        screen.say(f"rings        {rings}  (again: vllm-k25 report {rings})")
        if keep:
            screen.say(f"live view    vllm-k25 top {rings}")
    if keep:
        screen.say(f"server       {server.url} runs on; stop it with: kill {server.pid}")
    found = problems(loads, report.breakdown, plan.workers)
    if found:
        screen.say(f"server log   {server.log}")
        screen.fail(Exit.FAILED, "; ".join(found))


_ARCH: Final[dict[Architecture, Arch]] = {Architecture.K25: "k25", Architecture.TEXT: "text"}


class Screen:
    """What the demo shows while it runs, on a terminal or in a log."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._line = MovingLine(console)
        self._stage = ""

    def progress(self) -> AbstractContextManager[None]:
        """While this is open, `stage` shows on one line that moves, or in a log on a line of its own."""
        return self._line.shown()

    def stage(self, text: str, elapsed_s: float | None = None) -> None:
        """Say what is going on; repeating it says nothing new."""
        if text == self._stage:
            return
        self._stage = text
        if self._line.showing:
            self._line.update(text)
        else:
            self.say(f"{'' if elapsed_s is None else f'{elapsed_s:4.0f} s  '}{text}")

    def starting_up(self, elapsed_s: float, stage: str) -> None:
        """The server is starting (a :data:`vllm_k25_instrument.demo.server.Progress`)."""
        self.stage(f"server: {stage}", elapsed_s)

    def loading(self, stage: str) -> None:
        """A stage of the load begins."""
        self.stage(stage)

    def loaded(self, load: LoadResult) -> None:
        """A stage of the load is over."""
        tpot = "-" if load.tpot_s is None else f"{load.tpot_s * 1000:.1f} ms"
        self.say(
            f"concurrency {load.concurrency:>2}   {len(load.requests):>3} requests, {load.failed} failed   "
            f"{load.tokens_per_second:7.1f} tokens/s   {tpot} per output token"
        )

    def show(self, report: Report) -> None:
        """The breakdown."""
        for line in caveat_lines(report.caveats):
            self._console.print(line)
        self._console.print(ReportTable(report))

    def say(self, text: str) -> None:
        """A line of plain text."""
        self._console.print(text, markup=False, soft_wrap=True)

    def fail(self, code: Exit, message: str) -> NoReturn:
        """The last line, on standard error, and the exit code."""
        fail(messages(), COMMAND, code, message)


def _serve(server: VllmServer, screen: Screen, timeout: float) -> tuple[tuple[LoadResult, ...], RingMarks]:
    """Wait for the server and load it; what the load did, and the rings since it began."""
    try:
        with screen.progress():
            seconds = server.wait_ready(timeout, screen.starting_up)
            screen.say(f"server up in {seconds:.0f} s: {server.url}, pid {server.pid}, log {_shortest(server.log)}")
            screen.loading("warming up")
            warm_up(server)
            marks = RingMarks(Path(server.environment["K25_RING_DIR"]), server.worker_pids)
            return put_load(server, screen), marks
    except ServerError as error:
        screen.say(error.log_tail)
        screen.fail(Exit.FAILED, f"{error.reason}; its log: {error.log}")
    except (OSError, RingError) as error:
        screen.say(server.log_tail())
        screen.fail(Exit.FAILED, f"{error}; the server's log: {server.log}")


def _shortest(path: Path) -> Path:
    """The path as seen from the current directory, where it is below that."""
    here = Path.cwd()
    return path.relative_to(here) if path.is_relative_to(here) else path


class _Control:
    """Whether the server outlives the demo."""

    keep = False


@contextmanager
def _stopped_in_the_end(server: VllmServer, screen: Screen) -> Iterator[_Control]:
    """Stop the server on the way out, also where that way is Ctrl-C, a TERM, or a closed terminal."""
    control = _Control()

    def interrupt(number: int, _frame: FrameType | None) -> NoReturn:
        raise KeyboardInterrupt(signal.Signals(number).name)

    handled = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.getsignal(number) for number in handled}
    for number in handled:
        # One that is ignored stays so: that is what nohup does.
        if before[number] is not signal.SIG_IGN:
            signal.signal(number, interrupt)
    interrupted = False
    try:
        yield control
    except KeyboardInterrupt:
        interrupted = True
    finally:
        if not control.keep:
            # A second Ctrl-C must not leave half of it running.
            for number in handled:
                signal.signal(number, signal.SIG_IGN)
            server.stop()
        for number, handler in before.items():
            signal.signal(number, handler)
    if interrupted:
        screen.fail(Exit.INTERRUPTED, "interrupted; the server has been stopped")


def _write(screen: Screen, report: Report, json_file: Path, html: Path) -> None:
    document = json.dumps(report.breakdown.to_json_dict(), indent=2) + "\n"
    try:
        if json_file == STDOUT:
            typer.echo(document, nl=False)
        else:
            json_file.write_text(document, encoding="utf-8")
            screen.say(f"JSON         {json_file}")
        html.write_text(to_html(report), encoding="utf-8")
        screen.say(f"page         {html}")
    except OSError as error:
        screen.fail(Exit.FAILED, f"{error.filename}: cannot be written: {error.strerror}")
