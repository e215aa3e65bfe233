"""`vllm-k25 bench`: micro-benchmarks at the model's exact sizes, through vLLM's own kernels and communicators."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from enum import IntEnum
from pathlib import Path
from typing import Annotated, Final

import typer
from rich.console import Console

from vllm_k25_instrument.bench.document import BenchDocument, Remark
from vllm_k25_instrument.bench.errors import BenchError, CannotRunError
from vllm_k25_instrument.bench.intervals import FEWEST
from vllm_k25_instrument.bench.routing import EXTREMES, Routing, read_counts
from vllm_k25_instrument.bench.table import BenchTable
from vllm_k25_instrument.commands.documents import fail, show_or_write_json
from vllm_k25_instrument.commands.terminal import MovingLine, messages
from vllm_k25_instrument.demo.build import Build
from vllm_k25_instrument.limits.errors import LimitsError
from vllm_k25_instrument.limits.gpus import AUTO
from vllm_k25_instrument.limits.kimi_k25 import kimi_k25_config
from vllm_k25_instrument.limits.model_shape import ModelShape, model_shape, read_model_shape

KIMI: Final = "Kimi-K2.5"
DEFAULT_RANKS: Final = 2
WORST: Final = "worst"
MAX_TOKENS: Final = 65_536


bench = typer.Typer(
    name="bench",
    help="Micro-benchmarks at the model's exact sizes, through vLLM's own kernels and communicators.",
    no_args_is_help=True,
)


class Exit(IntEnum):
    """Exit codes of `bench`."""

    OK = 0
    FAILED = 1
    USAGE = 2
    INCOMPLETE = 3


Config = Annotated[
    Path | None,
    typer.Option(
        "--config", metavar="PATH", help=f"The model's config.json, or its folder. Default: {KIMI}.", show_default=False
    ),
]
JsonFile = Annotated[
    Path | None, typer.Option("--json", metavar="FILE", help="Write the result as JSON; - for standard output.")
]
Repeats = Annotated[int, typer.Option("--repeats", min=FEWEST, max=100_000, help="Repeats of each row, at most.")]
Seconds = Annotated[
    float,
    typer.Option(
        "--seconds", min=0.01, max=3600, help=f"Seconds after which a row is over, if it has {FEWEST} repeats by then."
    ),
]
Threads = Annotated[
    int | None,
    typer.Option(
        "--threads", min=1, max=1024, help="Threads of a process on a CPU. Default: its cores.", show_default=False
    ),
]
GpuName = Annotated[
    str,
    typer.Option("--gpu", metavar="NAME", help="Whose data sheet the floors come from; auto: the GPU of this machine."),
]


@bench.command("moe")
def moe(
    tokens: Annotated[str, typer.Option("--tokens", metavar="N,N", help="Tokens of a step (its batch).")] = "1,64,256",
    routing: Annotated[
        str,
        typer.Option(
            "--routing",
            metavar="R,R",
            help="uniform; same (all tokens to the same experts: fewest weights); spread (as many distinct experts as "
            "there are: most weights); worst (both of these extremes); measured (needs --expert-counts).",
        ),
    ] = "uniform,worst",
    tensor_parallel_size: Annotated[
        int, typer.Option("--tensor-parallel-size", "-tp", min=1, max=1024, help="Ranks that the model is cut over.")
    ] = 8,
    config: Config = None,
    expert_counts: Annotated[
        Path | None,
        typer.Option(
            "--expert-counts",
            metavar="FILE",
            help="How often each expert was picked, for --routing measured: a JSON list with a number per expert, or "
            'an object {"expert_counts": [...]}.',
        ),
    ] = None,
    experts: Annotated[
        int | None, typer.Option("--experts", min=1, help="Keep only so many of the experts, where memory is short.")
    ] = None,
    only: Annotated[
        str, typer.Option("--only", metavar="experts|dense", help="Only the routed experts, or only the projections.")
    ] = "",
    flush: Annotated[
        bool,
        typer.Option(
            "--flush/--no-flush",
            help="Overwrite the caches before every repeat: in a step other layers' weights have done that.",
        ),
    ] = True,
    repeats: Repeats = 50,
    seconds: Seconds = 2.0,
    threads: Threads = None,
    gpu: GpuName = AUTO,
    json_file: JsonFile = None,
) -> None:
    """Time the routed experts and the dense projections of one rank, as a decode step multiplies them.

    Exit codes: 0 all measured; 1 it failed; 2 wrong usage, or it cannot run here; 3 some of it could not be measured.
    """
    errors = messages()
    command = "bench moe"
    with failing(errors, command):
        from vllm_k25_instrument.bench import in_vllm
        from vllm_k25_instrument.bench import moe as room

        shape, model = read_shape(config)
        routings = parse_routings(routing)
        if only not in ("", "experts", "dense"):
            raise typer.BadParameter(f"--only {only}: experts or dense")
        if (expert_counts is None) == (Routing.MEASURED in routings):
            raise typer.BadParameter("--routing measured and --expert-counts need each other")
        counts = () if expert_counts is None else read_counts(expert_counts)
        build = in_vllm.prepare_vllm()
        from vllm_k25_instrument.bench import timing

        plan = room.MoePlan(
            shape=shape,
            model=model,
            tp=tensor_parallel_size,
            tokens=parse_numbers("--tokens", tokens),
            routings=routings,
            repeats=timing.Repeats(repeats, seconds),
            flush=flush,
            experts=experts,
            counts=counts,
            routed=only != "dense",
            dense=only != "experts",
        )
        in_vllm.set_threads(threads)
        machine = in_vllm.describe_machine(build)
        busy = in_vllm.busy_remark()
        sheet = in_vllm.floor_gpu(gpu, machine)
        allowed = machine.device != in_vllm.CPU or in_vllm.allow_int4_experts()
        with progress(errors) as say:
            document = room.run_moe(
                plan, machine, timing.make_timer(machine.device), sheet, int4_allowed=allowed, say=say
            )
    document = with_remarks(document, busy, in_vllm.foreign_floors(sheet, machine))
    finish(errors, command, document, json_file, room.INCOMPLETE)


@bench.command("all-reduce")
def all_reduce(
    ranks: Annotated[
        int | None,
        typer.Option("--ranks", min=2, max=64, help="Ranks. Default: 2 on a CPU, else all GPUs.", show_default=False),
    ] = None,
    tokens: Annotated[str, typer.Option("--tokens", metavar="N,N", help="Tokens of a step (its batch).")] = "1,64,256",
    burst: Annotated[
        int | None,
        typer.Option(
            "--burst", min=1, max=10_000, help="All-reduces in a row. Default: 2 per layer of the model, as in a step."
        ),
    ] = None,
    config: Config = None,
    repeats: Repeats = 200,
    seconds: Seconds = 2.0,
    timeout: Annotated[
        float, typer.Option("--timeout", min=1, help="Seconds without progress after which the ranks are given up.")
    ] = 120.0,
    gpu: GpuName = AUTO,
    link: Annotated[
        str, typer.Option("--link", metavar="NAME", help="What joins the GPUs, for the floors: as in `report --link`.")
    ] = AUTO,
    json_file: JsonFile = None,
) -> None:
    """Time an all-reduce through every path that vLLM has on this machine, single and in a row as in a step.

    A time is the transfer: of each repeat the duration of the rank that waited least. Exit codes: 0 all measured; 1 a
    rank died or hung; 2 wrong usage, or it cannot run here.
    """
    errors = messages()
    command = "bench all-reduce"
    with failing(errors, command):
        shape, model = read_shape(config)
        sizes = parse_numbers("--tokens", tokens)
        from vllm_k25_instrument.bench import all_reduce as room
        from vllm_k25_instrument.bench import in_vllm

        build = in_vllm.prepare_vllm()
        on_cpu = build is Build.CPU
        found = ranks or (DEFAULT_RANKS if on_cpu else in_vllm.gpus())
        cores = room.cores_for(found) if on_cpu else ()
        machine = in_vllm.describe_machine(build, ranks=found, threads=len(cores) // found if cores else None)
        sheet = in_vllm.floor_gpu(gpu, machine)
        joined = None if sheet is None else sheet.link(link, found)
        if joined is not None:
            machine = replace(machine, link=joined.name)
        plan = room.AllReducePlan(
            model=model,
            hidden=shape.hidden,
            ranks=found,
            tokens=sizes,
            burst=burst or 2 * shape.layers,
            repeats=repeats,
            seconds=seconds,
            timeout=timeout,
        )
        busy = in_vllm.busy_remark()
        with progress(errors) as say:
            document = room.run_all_reduce(plan, machine, joined, cores=cores, say=say)
    document = with_remarks(document, busy, in_vllm.foreign_floors(sheet, machine))
    finish(errors, command, document, json_file, frozenset())


@bench.command("overhead")
def overhead(
    repeats: Annotated[int, typer.Option("--repeats", min=FEWEST, max=100_000, help="Repeats of each row.")] = 50,
    json_file: JsonFile = None,
) -> None:
    """Time what this package itself costs here: hooked calls, samples, rings, a scrape, and on CUDA timing events.

    Exit codes: 0 all measured; 1 it failed; 2 wrong usage, or it cannot run here.
    """
    errors = messages()
    command = "bench overhead"
    with failing(errors, command):
        from vllm_k25_instrument.bench import in_vllm

        build = in_vllm.prepare_vllm()
        from vllm_k25_instrument.bench import overhead as room

        busy = in_vllm.busy_remark()
        with progress(errors) as say:
            document = room.run_overhead(
                room.OverheadPlan(repeats), in_vllm.describe_machine(build), say=say, in_memory=in_vllm.memory_folder()
            )
    finish(errors, command, with_remarks(document, busy), json_file, frozenset())


def with_remarks(document: BenchDocument, *remarks: Remark | None) -> BenchDocument:
    """The document with further warnings, of those that there are."""
    return replace(document, warnings=(*document.warnings, *(remark for remark in remarks if remark is not None)))


def finish(
    errors: Console, command: str, document: BenchDocument, json_file: Path | None, incomplete: frozenset[str]
) -> None:
    """Show and write it.

    Exits with 3 where a warning's code is one of `incomplete`; with 2 where because of such nothing was measured.
    """
    if not document.rows:
        reasons = "; ".join(warning.message for warning in document.warnings if warning.code in incomplete)
        fail(errors, command, Exit.USAGE, f"nothing could be measured: {reasons or 'the model has no such layers'}")
    show_or_write_json(errors, command, Exit.USAGE, BenchTable(document), document.to_json_dict(), json_file)
    if any(warning.code in incomplete for warning in document.warnings):
        raise typer.Exit(Exit.INCOMPLETE)


@contextmanager
def failing(errors: Console, command: str) -> Iterator[None]:
    """What goes wrong inside becomes one line and an exit code. SIGTERM ends it as Ctrl-C does, ranks and all."""
    before = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        yield
    except (LimitsError, CannotRunError, typer.BadParameter) as error:
        fail(errors, command, Exit.USAGE, str(error))
    except BenchError as error:
        fail(errors, command, Exit.FAILED, str(error))
    except (MemoryError, RuntimeError) as error:
        if not _is_out_of_memory(error):
            raise
        fail(errors, command, Exit.FAILED, f"out of memory ({error}): fewer --experts or --tokens need less")
    finally:
        signal.signal(signal.SIGTERM, before)


def _is_out_of_memory(error: BaseException) -> bool:
    return isinstance(error, MemoryError) or "out of memory" in str(error) or "can't allocate memory" in str(error)


@contextmanager
def progress(console: Console) -> Iterator[Callable[[str], None]]:
    """On a terminal a line that moves; elsewhere nothing."""
    line = MovingLine(console)
    with line.shown():
        yield line.update


def read_shape(config: Path | None) -> tuple[ModelShape, str]:
    """The model's dimensions, and what to call it. Raises LimitsError."""
    if config is None:
        return model_shape(kimi_k25_config(), KIMI), KIMI
    shape = read_model_shape(config)
    return shape, shape.model_type or config.name


def parse_numbers(option: str, text: str, *, most: int = MAX_TOKENS) -> tuple[int, ...]:
    """``1,64,256``, each once and in order of size. Raises BadParameter."""
    found = set()
    for word in text.split(","):
        number = int(word) if word.strip().isdecimal() and len(word) < 10 else 0
        if not 1 <= number <= most:
            raise typer.BadParameter(f"{option} {text}: {word.strip() or 'nothing'} is no number from 1 to {most:,}")
        found.add(number)
    return tuple(sorted(found))


def parse_routings(text: str) -> tuple[Routing, ...]:
    """``uniform,worst``; worst stands for both extremes. Raises BadParameter."""
    found: dict[Routing, None] = {}
    for word in (word.strip() for word in text.split(",")):
        if word == WORST:
            found |= dict.fromkeys(EXTREMES)
        elif word in list(Routing):
            found[Routing(word)] = None
        else:
            known = ", ".join((*Routing, WORST))
            raise typer.BadParameter(f"--routing {text}: {word or 'nothing'} is none of {known}")
    return tuple(found)
