"""The result of a micro-benchmark: what every `bench` command makes and writes as JSON.

One form for all three kinds. What a row does not have is None, never left out, so that a reader may rely on the keys.
Durations are whole nanoseconds.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

import msgspec

SCHEMA: Final = "vllm_k25.bench/1"


class Kind(StrEnum):
    """The three micro-benchmarks."""

    MOE = "moe"
    ALL_REDUCE = "all_reduce"
    OVERHEAD = "overhead"


class DocumentError(ValueError):
    """Not the JSON of a micro-benchmark. The message says what is wrong with it."""


@dataclass(frozen=True, slots=True)
class BenchMachine:
    """What it ran on. `device` is vLLM's platform: ``cpu``, ``cuda``, ``rocm``."""

    device: str
    device_name: str
    vllm: str
    torch: str
    threads: int
    """Threads that one process computes with."""
    ranks: int = 1
    gpu: str | None = None
    """The row of ``gpus.toml`` that the floors are taken from."""
    link: str | None = None


@dataclass(frozen=True, slots=True)
class Remark:
    """What a reader of the figures must know. `code` is one of a few words, for programs."""

    code: str
    message: str


@dataclass(frozen=True, slots=True)
class Skew:
    """How far apart the ranks came to an all-reduce, ns: entries relative to the first, by one clock.

    `last_ns` is the median over repeats of how much later than the first the last rank entered; `by_rank_ns` the median
    of each rank's own delay. `wait_by_rank_ns` is the median of its duration minus the least of any rank.
    """

    last_ns: int
    by_rank_ns: tuple[int, ...]
    wait_by_rank_ns: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Row:
    """One thing measured: `calls` calls in a row take `median_ns`, and move and compute what is stated of them all.

    `low_ns` and `high_ns` are the 95 % interval of the median by order statistics. `bytes` are those that must move at
    least: a matrix's weights and its rows in and out; an all-reduce's message. `floor_ns` is None where `floor_reason`
    says why. For an all-reduce the time is the transfer, that of the quickest rank (see `alignment.py`).
    """

    name: str
    path: str
    """What did the work: a kernel, a communicator, or the piece of this package."""
    shape: str
    """The dimensions, such as ``384 x (7168 -> 2 x 256 -> 7168)``."""
    median_ns: int
    low_ns: int
    high_ns: int
    repeats: int
    calls: int = 1
    category: str | None = None
    """Which category of a step's breakdown this is part of."""
    tokens: int | None = None
    routing: str | None = None
    active_experts: int | None = None
    """Distinct experts that the routing picked."""
    calls_per_step: int | None = None
    """How often a decode step of the model does this."""
    bytes: int | None = None
    flops: int | None = None
    in_graph: bool = False
    l2_flushed: bool | None = None
    """Whether the caches were overwritten before every repeat; None where no memory traffic is measured."""
    achieved_bytes_per_s: float | None = None
    achieved_flop_per_s: float | None = None
    floor_ns: int | None = None
    floor_reason: str | None = None
    ratio_to_floor: float | None = None
    skew: Skew | None = None


@dataclass(frozen=True, slots=True)
class Choice:
    """Of one message size: the path that wins, beside the one that vLLM would take. Times as in the rows, ns.

    `decided` is False where the two best paths' intervals overlap: then the winner is the one with the lower median,
    and that is all.
    """

    tokens: int
    bytes: int
    calls: int
    in_graph: bool
    winner: str
    winner_ns: int
    decided: bool
    vllm_takes: str | None
    vllm_ns: int | None
    """Of the path that vLLM takes; None where it was not measured."""


@dataclass(frozen=True, slots=True)
class BenchDocument:
    """All that one run of a `bench` command found.

    `settings` are the options it ran with; `choices` are those of all-reduces; `summary` holds figures derived from the
    rows, such as the cost per step, in nanoseconds or ratios.
    """

    kind: Kind
    machine: BenchMachine
    rows: tuple[Row, ...]
    settings: dict[str, Any] = field(default_factory=dict)
    choices: tuple[Choice, ...] = ()
    summary: dict[str, float] = field(default_factory=dict)
    warnings: tuple[Remark, ...] = ()

    def to_json_dict(self) -> dict[str, Any]:
        """The document as plain dictionaries and lists."""
        built: dict[str, Any] = msgspec.to_builtins(self)
        return {"schema": SCHEMA, **built}


def read_document(path: Path) -> BenchDocument:
    """The document in a file. Raises OSError where it cannot be read, DocumentError where it is something else."""
    try:
        return parse_document(msgspec.json.decode(path.read_bytes()))
    except (msgspec.DecodeError, RecursionError) as error:
        raise DocumentError(f"not valid JSON: {error}") from None


def parse_document(document: object) -> BenchDocument:
    """The document that JSON was decoded to. Raises DocumentError, which names the field."""
    if not isinstance(document, dict):
        raise DocumentError("not a micro-benchmark: the outermost value is no object")
    if document.get("schema") != SCHEMA:
        raise DocumentError(f"`schema` is {document.get('schema')!r:.60}, not {SCHEMA}")
    body = {key: value for key, value in document.items() if key != "schema"}
    try:
        return msgspec.convert(body, BenchDocument)
    except msgspec.ValidationError as error:
        raise DocumentError(str(error)) from None
