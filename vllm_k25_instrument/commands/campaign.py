"""`vllm-k25 campaign`: the three-phase measuring campaign, its report, and two of them compared."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from enum import IntEnum, StrEnum
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Final, NoReturn

import typer
from rich.console import Console

from vllm_k25_instrument.commands.documents import fail, show, show_or_write_json
from vllm_k25_instrument.commands.terminal import STDOUT, MovingLine, messages
from vllm_k25_instrument.limits.gpus import AUTO

if TYPE_CHECKING:
    from vllm_k25_instrument.campaign.manifest import Manifest, Plan
    from vllm_k25_instrument.campaign.results import Results
    from vllm_k25_instrument.campaign.server import ModelFacts, Server

MAX_CONCURRENCY: Final = 65_536
REPORT_FILES: Final = ("report.json", "report.md", "report.html")

campaign = typer.Typer(
    name="campaign",
    help="The measuring campaign: load, profiles and micro-benchmarks in one resumable command, and its table.",
    no_args_is_help=True,
)


class Exit(IntEnum):
    """Exit codes of `campaign`."""

    COMPLETE = 0
    NOTHING = 1
    USAGE = 2
    INCOMPLETE = 3


class ClientName(StrEnum):
    """Who puts the load."""

    AUTO = "auto"
    VLLM_BENCH = "vllm-bench"
    OPENAI = "openai"


Folder = Annotated[Path, typer.Argument(metavar="DIR", help="The folder of a campaign.", show_default=False)]
JsonFile = Annotated[
    Path | None, typer.Option("--json", metavar="FILE", help="Write the result as JSON; - for standard output.")
]


@campaign.command("run")
def run(
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Where everything goes.", show_default=False)],
    url: Annotated[
        str, typer.Option("--url", metavar="URL", help="The running server, such as http://127.0.0.1:8000.")
    ] = "",
    model: Annotated[str, typer.Option("--model", metavar="M", help="The model's name, as the server calls it.")] = "",
    concurrency: Annotated[
        str, typer.Option("--concurrency", metavar="N,N", help="Requests at a time, one column of the table each.")
    ] = "1,64,256",
    windows: Annotated[
        int, typer.Option("--windows", min=1, max=100, help="Repetitions of each: intervals need two, three tell more.")
    ] = 3,
    requests_per_client: Annotated[
        int, typer.Option("--requests-per-client", min=1, max=10_000, help="Requests of a window, for each at a time.")
    ] = 4,
    input_tokens: Annotated[int, typer.Option("--input-tokens", min=1, help="Tokens of a prompt.")] = 32,
    output_tokens: Annotated[int, typer.Option("--output-tokens", min=2, help="Tokens of an answer.")] = 128,
    client: Annotated[
        ClientName, typer.Option("--client", help="auto: vLLM's own benchmark where it is installed, with a tokenizer.")
    ] = ClientName.AUTO,
    tokenizer: Annotated[
        str, typer.Option("--tokenizer", metavar="NAME|DIR", help="For vLLM's benchmark. Default: the model's own.")
    ] = "",
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="For vLLM's benchmark: the tokenizer brings code.")
    ] = False,
    rings: Annotated[
        Path | None,
        typer.Option(
            "--rings", metavar="DIR", help="Where the server's rings are. Default: K25_RING_DIR.", show_default=False
        ),
    ] = None,
    trace_dir: Annotated[
        Path | None,
        typer.Option(
            "--trace-dir", metavar="DIR", help="The server's torch_profiler_dir. Default: as its command line says."
        ),
    ] = None,
    nsys_export: Annotated[
        Path | None,
        typer.Option("--nsys-export", metavar="FILE", help="An nsys export of this server, to be analysed."),
    ] = None,
    micro: Annotated[bool, typer.Option("--micro/--no-micro", help="Run the micro-benchmarks as well.")] = True,
    gpu: Annotated[str, typer.Option("--gpu", metavar="NAME|auto", help="Add physical floors. Of this GPU.")] = "",
    config: Annotated[
        Path | None,
        typer.Option("--config", metavar="PATH", help="The model's config.json. Default: the server's own."),
    ] = None,
    context: Annotated[
        float | None,
        typer.Option(
            "--context",
            metavar="TOKENS",
            min=0,
            help="For the floors: tokens attended to. Default: as the load has it.",
        ),
    ] = None,
    link: Annotated[str, typer.Option("--link", metavar="NAME", help="For the floors: pcie5x16, nvlink, GB/s.")] = AUTO,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with the campaign in DIR, with its own options; --url may differ.")
    ] = False,
) -> None:
    """Measure a running server at several concurrencies: live breakdown, profiles, micro-benchmarks; one table.

    Every step is kept in DIR with its raw output; `--resume` goes on after an interruption or a failure. The result is
    printed, and is in DIR as report.json, report.md and report.html.

    Exit codes: 0 complete: all that this server and machine have to say; 3 some step failed (the report says which);
    1 nothing could be measured; 2 wrong usage, no server, or a model that it does not serve; 130 interrupted.
    """
    errors = messages()
    from vllm_k25_instrument.campaign.errors import CampaignError
    from vllm_k25_instrument.campaign.live import own_ring_directory
    from vllm_k25_instrument.campaign.manifest import MANIFEST, Manifest, Plan, now, read_manifest
    from vllm_k25_instrument.campaign.run import Campaign, DiskFullError, Where
    from vllm_k25_instrument.campaign.scrub import HOST, scrub_command, scrub_url
    from vllm_k25_instrument.campaign.server import Server

    try:
        if resume:
            manifest = read_manifest(out)
            _no_other_plan(manifest.plan, model)
            url = url or manifest.url
            if HOST in url:
                _usage(errors, "--resume needs --url: names of hosts are not kept")
        else:
            if not url or not model:
                _usage(errors, "--url and --model are needed (or --resume, to go on with the campaign in --out)")
            if (out / MANIFEST).exists():
                _usage(errors, f"{out} holds a campaign: --resume goes on with it, or name another --out")
            plan = Plan(
                model=model,
                concurrency=_numbers(errors, concurrency),
                windows=windows,
                requests_per_client=requests_per_client,
                input_tokens=input_tokens,
                output_tokens=output_tokens,
                client=str(client),
                tokenizer=tokenizer,
                trust_remote_code=trust_remote_code,
                gpu=gpu,
                config="" if config is None else str(config),
                context=context,
                link=link,
                micro=micro,
            )
            manifest = Manifest(plan, created=now())
        server = Server(url)
        facts, absent = _model(server, manifest)
        _check_length(errors, manifest.plan, facts.max_length)
        where = Where(out, own_ring_directory() if rings is None else rings, trace_dir, nsys_export)
        out.mkdir(parents=True, exist_ok=True)
    except CampaignError as error:
        _usage(errors, str(error))
    except OSError as error:
        _usage(errors, f"--out {out}: cannot be made: {error.strerror}")
    manifest.url = scrub_url(server.url)
    manifest.command_lines.append(scrub_command(["vllm-k25", *sys.argv[1:]], (server.host,)))
    manifest.server["root"] = facts.root
    screen = Screen(errors)
    failure = ""
    interrupted = False
    try:
        with _ends_on_signals(), screen.shown():
            Campaign(where, manifest, server, screen, facts, absent).run()
    except KeyboardInterrupt:
        interrupted = True
    except DiskFullError as error:
        failure = str(error)
    except OSError as error:
        failure = f"{error.filename or out}: {error.strerror}"
    code = _finish(errors, out, manifest, failure)
    if interrupted:
        errors.print("vllm-k25 campaign run: interrupted; go on with --resume", style="bold red", markup=False)
        code = 130
    raise typer.Exit(code)


def _finish(errors: Console, out: Path, manifest: Manifest, failure: str) -> int:
    """Write and show the report; returns the exit code."""
    from vllm_k25_instrument.campaign.errors import CampaignError
    from vllm_k25_instrument.campaign.results import read_results

    try:
        results = read_results(out)
    except CampaignError as error:
        _say(errors, failure or str(error))
        return Exit.NOTHING
    if not results.measured:
        first = next((record.error for record in manifest.steps if record.error), "no step was done")
        _say(errors, f"nothing could be measured: {failure or first}")
        return Exit.NOTHING
    written = True
    try:
        write_reports(results)
    except OSError as error:
        written = False
        failure = failure or f"{out}: the reports cannot be written: {error.strerror}"
    _show(results)
    if failure:
        _say(errors, failure)
    for line in results.missing:
        _say(errors, f"missing: {line}")
    return Exit.COMPLETE if results.complete and not failure and written else Exit.INCOMPLETE


@campaign.command("report")
def report(
    folder: Folder,
    json_file: JsonFile = None,
    markdown: Annotated[
        Path | None, typer.Option("--markdown", metavar="FILE", help="Write Markdown; - for standard output.")
    ] = None,
    html: Annotated[Path | None, typer.Option("--html", metavar="FILE", help="Write a self-contained page.")] = None,
) -> None:
    """Make the report of a campaign again from what is in its folder, finished or not.

    Exit codes: 0 complete; 3 incomplete (the report says what is missing); 1 nothing was measured; 2 no campaign there.
    """
    from vllm_k25_instrument.campaign.document import report_document
    from vllm_k25_instrument.campaign.render import to_html, to_markdown

    errors = messages()
    if [json_file, markdown, html].count(STDOUT) > 1:
        fail(errors, "campaign report", Exit.USAGE, "two documents want standard output: give one of them a file")
    results = _read(errors, "campaign report", folder)
    if not results.measured:
        for line in results.missing:
            errors.print(f"missing: {line}", markup=False)
        fail(errors, "campaign report", Exit.NOTHING, f"{folder}: nothing was measured")
    texts: tuple[tuple[Path | None, Callable[[], str]], ...] = (
        (json_file, lambda: json.dumps(report_document(results), indent=2) + "\n"),
        (markdown, lambda: to_markdown(results)),
        (html, lambda: to_html(results)),
    )
    for path, text in texts:
        if path == STDOUT:
            typer.echo(text(), nl=False)
        elif path is not None:
            try:
                path.write_text(text(), encoding="utf-8", errors="backslashreplace")
            except OSError as error:
                fail(errors, "campaign report", Exit.USAGE, f"{path}: cannot be written: {error.strerror}")
    if STDOUT not in (json_file, markdown, html):
        _show(results)
    if not results.complete:
        raise typer.Exit(Exit.INCOMPLETE)


@campaign.command("compare")
def compare(
    a: Annotated[Path, typer.Argument(metavar="DIR1", help="The campaign before.")],
    b: Annotated[Path, typer.Argument(metavar="DIR2", help="The campaign after.")],
    json_file: JsonFile = None,
    threshold: Annotated[
        float | None,
        typer.Option(
            "--threshold", metavar="PCT", min=0, help="Exit with 1 if B's time per token is PCT % longer beyond chance."
        ),
    ] = None,
) -> None:
    """Set two campaigns side by side: what changed at each concurrency, and whether beyond chance.

    Exit codes: 0 compared; 1 a check failed (--threshold); 2 no campaign there; 3 one of them is incomplete, or they
    have no concurrency in common.
    """
    from vllm_k25_instrument.campaign.compare import ComparisonReport, compare_campaigns

    errors = messages()
    command = "campaign compare"
    compared = compare_campaigns(_read(errors, command, a), _read(errors, command, b))
    shown = ComparisonReport(compared)
    show_or_write_json(errors, command, Exit.USAGE, shown, compared.to_json_dict(), json_file)
    if not compared.changes:
        fail(errors, command, Exit.INCOMPLETE, f"{a} and {b} have no concurrency in common")
    if threshold is not None:
        slower = compared.slower(threshold)
        if slower:
            listed = ", ".join(map(str, slower))
            fail(errors, command, Exit.NOTHING, f"more than {threshold:g} % slower at concurrency {listed}")
    if not (compared.a.complete and compared.b.complete):
        raise typer.Exit(Exit.INCOMPLETE)


def write_reports(results: Results) -> None:
    """``report.json``, ``report.md`` and ``report.html`` in the campaign's folder. Raises OSError."""
    from vllm_k25_instrument.campaign.document import report_document
    from vllm_k25_instrument.campaign.files import write_json, write_text
    from vllm_k25_instrument.campaign.render import to_html, to_markdown

    json_name, markdown_name, html_name = REPORT_FILES
    write_json(results.folder / json_name, report_document(results))
    write_text(results.folder / markdown_name, to_markdown(results))
    write_text(results.folder / html_name, to_html(results))


def _show(results: Results) -> None:
    from vllm_k25_instrument.campaign.render import CampaignReport

    show(CampaignReport(results))


def _read(errors: Console, command: str, folder: Path) -> Results:
    from vllm_k25_instrument.campaign.errors import CampaignError
    from vllm_k25_instrument.campaign.results import read_results

    try:
        return read_results(folder)
    except CampaignError as error:
        fail(errors, command, Exit.USAGE, str(error))


def _usage(errors: Console, message: str) -> NoReturn:
    fail(errors, "campaign run", Exit.USAGE, message)


def _say(errors: Console, message: str) -> None:
    errors.print(f"vllm-k25 campaign run: {message}", style="bold red", markup=False)


def _numbers(errors: Console, text: str) -> tuple[int, ...]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and 0 < int(part) <= MAX_CONCURRENCY for part in parts):
        _usage(errors, f"--concurrency {text}: numbers from 1 to {MAX_CONCURRENCY:,}, separated by commas")
    return tuple(sorted({int(part) for part in parts}))


def _model(server: Server, manifest: Manifest) -> tuple[ModelFacts, bool]:
    """What the server says of the model, and whether it is absent: once phase 1 is done it need not run any more."""
    from vllm_k25_instrument.campaign.errors import ServerGoneError
    from vllm_k25_instrument.campaign.manifest import Phase
    from vllm_k25_instrument.campaign.server import ModelFacts

    try:
        return server.model(manifest.plan.model), False
    except ServerGoneError:
        if not manifest.steps or manifest.left(Phase.MACRO):
            raise
        known = manifest.server
        root, version = str(known.get("root", "")), str(known.get("vllm", ""))
        return ModelFacts(manifest.plan.model, root, known.get("max_model_len"), version), True


def _no_other_plan(plan: Plan, model: str) -> None:
    from vllm_k25_instrument.campaign.errors import CampaignError

    if model and model != plan.model:
        raise CampaignError(f"--model {model}: this campaign is about {plan.model}; name another --out")


def _check_length(errors: Console, plan: Plan, longest: int | None) -> None:
    whole = plan.input_tokens + plan.output_tokens
    if longest is not None and whole > longest:
        _usage(
            errors,
            f"{plan.input_tokens} tokens in and {plan.output_tokens} out are more than the server's {longest}: lower "
            "--input-tokens or --output-tokens",
        )


@contextmanager
def _ends_on_signals() -> Iterator[None]:
    """TERM and a closed terminal end it as Ctrl-C does: with the manifest written."""

    def interrupt(number: int, _frame: FrameType | None) -> NoReturn:
        raise KeyboardInterrupt(signal.Signals(number).name)

    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    for number, handler in before.items():
        if handler is not signal.SIG_IGN:
            signal.signal(number, interrupt)
    try:
        yield
    finally:
        for number, handler in before.items():
            with suppress(ValueError, TypeError):
                signal.signal(number, handler)


class Screen:
    """What a campaign shows on standard error while it runs: a line that moves on a terminal, and lines that stay."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._line = MovingLine(console)

    def shown(self) -> AbstractContextManager[None]:
        """While this is open, progress shows."""
        return self._line.shown()

    def progress(self, text: str) -> None:
        """What is going on; shown on a terminal only."""
        self._line.update(text)

    def say(self, text: str) -> None:
        """A line of plain text."""
        self._console.print(text, markup=False)
