"""Synthetic Kineto traces whose truth is known to the nanosecond, in every dress that writers give them."""

from __future__ import annotations

import gzip
import itertools
import json
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from vllm_k25_instrument.analysis.capture import ActivityKind

_SAMPLES = Path(__file__).resolve().parents[2] / "shared" / "samples"


def sample(name: str) -> Path:
    """A real capture, read in place beside the checkout. Skips the test where there is none."""
    path = _SAMPLES / name
    if not path.exists():
        pytest.skip(f"no {path}")
    return path


BASE_NS = 1_767_225_600_000_000_000

CATEGORY = {
    ActivityKind.KERNEL: "kernel",
    ActivityKind.MEMCPY: "gpu_memcpy",
    ActivityKind.MEMSET: "gpu_memset",
}
OLD_CATEGORY = {ActivityKind.KERNEL: "Kernel", ActivityKind.MEMCPY: "Memcpy", ActivityKind.MEMSET: "Memset"}


@dataclass(frozen=True)
class Work:
    """A kernel, copy or fill. `start_ns` counts from the trace's base."""

    name: str
    start_ns: int
    duration_ns: int
    stream: int = 7
    kind: ActivityKind = ActivityKind.KERNEL
    bytes: int = 0
    mark: str | None = None


@dataclass(frozen=True)
class Call:
    """An API call and the work it put on the GPU: one kernel, or a graph's many."""

    name: str
    start_ns: int
    duration_ns: int
    work: tuple[Work, ...] = ()
    thread: int = 100


@dataclass(frozen=True)
class HostRange:
    """An annotation, or a CPU operator."""

    name: str
    start_ns: int
    duration_ns: int
    operator: bool = False
    thread: int = 100


@dataclass(frozen=True)
class Rank:
    """What one process did on one GPU. Correlation ids count from `first_correlation` in the order of the calls."""

    calls: tuple[Call, ...] = ()
    ranges: tuple[HostRange, ...] = ()
    orphans: tuple[Work, ...] = ()
    rank: int = 0
    world_size: int = 1
    pid: int = 100
    device: int = 0
    first_correlation: int = 50

    @property
    def work(self) -> list[tuple[Work, Call | None]]:
        """All work, sorted by start, with the call behind it."""
        pairs: list[tuple[Work, Call | None]] = [(work, call) for call in self.calls for work in call.work]
        return sorted(pairs + [(work, None) for work in self.orphans], key=lambda pair: pair[0].start_ns)

    @property
    def kernel_ns(self) -> int:
        """Sum of the durations of the kernels."""
        return sum(work.duration_ns for work, _ in self.work if work.kind is ActivityKind.KERNEL)


@dataclass(frozen=True)
class Dress:
    """How a trace is written. None of it changes what is true."""

    absolute: bool = False
    base_first: bool = True
    number: str = "fraction"  # or "short" (no trailing zeros), "text", "exponent"
    keys: tuple[str, ...] = ("ph", "cat", "name", "pid", "tid", "ts", "dur", "args")
    shuffle: int | None = None  # seed that shuffles the rows
    indent: int | None = None
    ascii: bool = True
    container: str = "object"  # or "array", "nested", "listed"
    flows: bool = True
    old_categories: bool = False
    pid_prefix: str = ""
    gzip_members: int = 0
    unit: str = "ms"


PLAIN = Dress()


_MARK = "@@"  # around a number that is written digit by digit: a double would lose some
_NUMBER = re.compile(f'"{_MARK}(.*?){_MARK}"')


def _us(ns: int, dress: Dress) -> str:
    sign, ns = ("-", -ns) if ns < 0 else ("", ns)
    text = f"{sign}{ns // 1000}.{ns % 1000:03d}"
    if dress.number == "text":
        return text
    if dress.number == "short":
        text = text.rstrip("0").rstrip(".")
    elif dress.number == "exponent":
        text = f"{sign}{ns}e-3"
    return f"{_MARK}{text}{_MARK}"


def rows(rank: Rank, dress: Dress = PLAIN) -> list[dict[str, object]]:
    """The events of one rank."""
    base = BASE_NS if dress.absolute else 0
    categories = OLD_CATEGORY if dress.old_categories else CATEGORY

    def pid(number: int) -> object:
        return f"{dress.pid_prefix} {number}" if dress.pid_prefix else number

    def row(cat: str, name: str, on: int, tid: int, start_ns: int, duration_ns: int, args: dict[str, object]) -> None:
        values = {
            "ph": "X",
            "cat": cat,
            "name": name,
            "pid": pid(on),
            "tid": tid,
            "ts": _us(base + start_ns, dress),
            "dur": _us(duration_ns, dress),
            "args": args,
        }
        out.append({key: values[key] for key in dress.keys})

    def gpu_row(work: Work, correlation: int | None) -> None:
        args: dict[str, object] = {"device": rank.device, "context": 1, "stream": work.stream}
        if correlation is not None:
            args["correlation"] = correlation
        if work.kind is not ActivityKind.KERNEL:
            args["bytes"] = work.bytes
        else:
            args |= {"grid": [1, 1, 1], "block": [128, 1, 1]}
        if work.mark is not None:
            args |= {"graph node id": 5, "str": work.mark}
        category = categories[work.kind]
        row(category, work.name, rank.device, work.stream, work.start_ns, work.duration_ns, args)
        if dress.flows and correlation is not None:
            flow = {"ph": "f", "id": correlation, "pid": pid(rank.device), "tid": work.stream, "bp": "e"}
            out.append({**flow, "ts": _us(base + work.start_ns, dress), "cat": "ac2g", "name": "ac2g"})

    out: list[dict[str, object]] = []
    for external, span in enumerate(rank.ranges, 1):
        category = ("Operator" if dress.old_categories else "cpu_op") if span.operator else "user_annotation"
        args: dict[str, object] = {"External id": external}
        row(category, span.name, rank.pid, span.thread, span.start_ns, span.duration_ns, args)
    for correlation, call in enumerate(rank.calls, rank.first_correlation):
        category = "Runtime" if dress.old_categories else "cuda_runtime"
        args = {"cbid": 211, "correlation": correlation}
        row(category, call.name, rank.pid, call.thread, call.start_ns, call.duration_ns, args)
        for work in call.work:
            gpu_row(work, correlation)
    for work in rank.orphans:
        gpu_row(work, None)
    name = {"ph": "M", "name": "process_name", "pid": pid(rank.pid), "tid": 0, "ts": _us(base, dress)}
    out.append({**name, "args": {"name": "python"}})
    if dress.shuffle is not None:
        random.Random(dress.shuffle).shuffle(out)
    return out


def document(ranks: Sequence[Rank], dress: Dress = PLAIN, prefixes: Sequence[str] = ()) -> object:
    """The JSON of a file: one rank, or several merged into one array of events, row by row."""
    each = [
        rows(rank, Dress(**{**dress.__dict__, "pid_prefix": prefix}))
        for rank, prefix in itertools.zip_longest(ranks, prefixes, fillvalue="")
        if isinstance(rank, Rank)
    ]
    events = [row for several in itertools.zip_longest(*each) for row in several if row is not None]
    return container(events, ranks[0], dress)


def container(events: list[dict[str, object]], rank: Rank, dress: Dress = PLAIN) -> object:
    """Events in what goes around them."""
    if dress.container == "array":
        return events
    base = {} if dress.absolute else {"baseTimeNanoseconds": BASE_NS}
    inner: dict[str, object] = {
        "schemaVersion": 1,
        "deviceProperties": [{"id": 0, "name": "GPU"}, {"id": 1, "name": "GPU"}],
        "distributedInfo": {"backend": "nccl", "rank": rank.rank, "world_size": rank.world_size},
        "displayTimeUnit": dress.unit,
        **(base if dress.base_first else {}),
        "traceEvents": events,
        **({} if dress.base_first else base),
        "traceName": "rank.json",
    }
    if dress.container == "nested":
        return {"version": [1, {"a": [[]]}], "profile": {"data": inner}, "after": None}
    if dress.container == "listed":
        return [inner]
    return inner


def encode(whole: object, dress: Dress = PLAIN) -> bytes:
    """The bytes of a file."""
    data = _NUMBER.sub(r"\1", json.dumps(whole, indent=dress.indent, ensure_ascii=dress.ascii)).encode()
    if not dress.gzip_members:
        return data
    size = len(data) // dress.gzip_members + 1
    return b"".join(gzip.compress(data[at : at + size]) for at in range(0, len(data), size))


def decode_rank(steps: int = 3, *, rank: Rank | None = None) -> Rank:
    """A rank that replays one graph of three kernels (10, 20 and 8 us) in each step: 38 us a step."""
    calls, ranges = [], []
    for step in range(steps):
        at = 1_000_000 + 100_000 * step
        ranges.append(HostRange("execute_context_0(0)_generation_4(4)", at, 20_000))
        work = (
            Work("ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)", at + 30_000, 10_000),
            Work("void marlin_moe_wna16::Marlin<1l, 2l>(int4 const*)", at + 41_000, 20_000),
            Work("_fwd_grouped_kernel_stage1", at + 62_000, 8_000),
        )
        calls.append(Call("cudaGraphLaunch", at + 5_000, 10_000, work))
    whose = rank or Rank()
    return Rank(
        tuple(calls),
        tuple(ranges),
        rank=whose.rank,
        world_size=whose.world_size,
        pid=whose.pid,
        device=whose.device,
        first_correlation=whose.first_correlation,
    )


# --- one rank of Kimi-K2.5, for benchmarks -------------------------------------------------------------------

_MARLIN = (
    "void marlin_moe_wna16::Marlin<1125899906909960l, 562949953487106l, 1125899906909960l, 562949953487106l, 256, 1, 8"
    ", 8, true, 4, 2, false>(int4 const*, int4 const*, int4*, int4*, int4 const*, int4 const*, unsigned short const*,"
    " int4 const*, int const*, int const*, int const*, int const*, float const*, int, bool, bool, int, int, int, int,"
    " int*, bool, bool, bool)"
)
_LAYER = (
    ("ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)", 78_000),
    ("triton_red_fused__to_copy_add_mean_mul_pow_rsqrt_0", 2_800),
    ("nvjet_tst_64x8_64x16_4x1_v_bz_TNT", 6_100),
    ("triton_poi_fused_cat_split_1", 2_100),
    ("void vllm::concat_and_cache_mla_kernel<__nv_bfloat16, __nv_bfloat16, (vllm::Fp8KVCacheDataType)0>", 2_000),
    ("_fwd_grouped_kernel_stage1", 9_400),
    ("_fwd_kernel_stage2", 3_000),
    ("nvjet_tst_128x8_64x12_2x1_v_bz_splitK_TNT", 5_500),
    ("void vllm::moe::grouped_topk_fused_small_expert_count_kernel<float, 384>", 4_400),
    ("void vllm::moe::moe_align_block_size_kernel<int>", 5_600),
    (_MARLIN, 21_000),
    ("void vllm::act_and_mul_kernel<c10::BFloat16, &(c10::BFloat16 vllm::silu_kernel<c10::BFloat16>)>", 2_900),
    (_MARLIN, 18_000),
    ("void vllm::moe::moe_sum_kernel<c10::BFloat16, 8>(c10::BFloat16*, c10::BFloat16 const*, int)", 2_700),
    ("ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)", 78_000),
)


def k25_rank(steps: int, kernels: int = 915, operators: int = 190, seed: int = 0) -> Iterator[bytes]:
    """The text of one rank's trace: each step one graph of `kernels`, CPU operators, flows; pieces of about a step."""
    rng = random.Random(seed)
    # A kernel of a graph has the same geometry in every replay. Times and gaps are what differs, and compresses badly.
    geometry = [
        (
            rng.randrange(16, 256),
            rng.randrange(0, 98_304, 128),
            rng.randrange(1, 2_048),
            rng.choice((64, 128, 256, 512)),
        )
        for _ in range(kernels)
    ]
    pid, at, correlation, external = 30460, 6_216_780_525_458_964, 1, 1

    def us(ns: int) -> str:
        return f"{ns // 1000}.{ns % 1000:03d}"

    yield (
        b'{\n  "schemaVersion": 1,\n  "deviceProperties": [{"id": 0, "name": "GPU", "numSms": 188}],\n'
        b'  "distributedInfo": {"backend": "nccl", "rank": 0, "world_size": 8},\n  "displayTimeUnit": "ms",\n'
        b'  "baseTimeNanoseconds": 1759300074000000000,\n  "traceEvents": [\n'
    )

    def row(cat: str, name: str, pid: int, tid: int, start: int, duration: int, args: str) -> str:
        return (
            f'  {{\n    "ph": "X", "cat": "{cat}", "name": "{name}", "pid": {pid}, "tid": {tid},\n'
            f'    "ts": {us(start)}, "dur": {us(duration)},\n    "args": {{\n      {args}\n    }}\n  }}'
        )

    def flow(end: str, pid: int, tid: int, start: int) -> str:
        bound = ', "bp": "e"' if end == "f" else ""
        return (
            f'  {{\n    "ph": "{end}", "id": {correlation}, "pid": {pid}, "tid": {tid}, "ts": {us(start)},\n'
            f'    "cat": "ac2g", "name": "ac2g"{bound}\n  }}'
        )

    for _ in range(steps):
        step = f'"External id": {external},"Record function id": 0, "Ev Idx": 0'
        lines = [row("user_annotation", "execute_context_0(0)_generation_64(64)", pid, pid, at, 1_300_123, step)]
        for op in range(operators):
            external += 1
            args = f'"External id": {external},"Record function id": 0, "Ev Idx": {op}'
            lines.append(row("cpu_op", "aten::as_strided", pid, pid, at + op * 6_000, 5_108, args))
        correlation += 1
        args = f'"External id": {external},"cbid": 311, "correlation": {correlation}'
        launch = at + 1_250_000
        lines.append(row("cuda_runtime", "cudaGraphLaunch", pid, pid, launch, 24_106, args))
        lines.append(flow("s", pid, pid, launch))
        gpu = at + 1_300_000
        for kernel in range(kernels):
            name, usual = _LAYER[kernel % len(_LAYER)]
            registers, shared, grid, block = geometry[kernel]
            duration = usual + rng.randrange(usual // 2)
            args = (
                f'"External id": {external},"queued": 0, "device": 0, "context": 1,\n      "stream": 7, '
                f'"correlation": {correlation},\n      "registers per thread": {registers},\n      '
                f'"shared memory": {shared},\n      "blocks per SM": {grid / 188:.6f},\n      '
                f'"warps per SM": {grid * block / 32 / 188:.6f},\n      "grid": [{grid}, 1, 1],\n      '
                f'"block": [{block}, 1, 1],\n      "est. achieved occupancy %": 11,\n      "graph id": 9, '
                f'"graph node id": {38_654_705_664 + kernel}'
            )
            lines.append(row("kernel", name, 0, 7, gpu, duration, args))
            lines.append(flow("f", 0, 7, gpu))
            gpu += duration + rng.randrange(200, 2_000)
        at = gpu + 200_000
        yield (",\n".join(lines) + ",\n").encode()
    yield (
        b'  {\n    "name": "Record Window End", "ph": "i", "s": "g", "pid": "", "tid": "", "ts": '
        + us(at).encode()
        + b'\n  }\n  ],\n  "traceName": "rank0.pt.trace.json"\n}\n'
    )
