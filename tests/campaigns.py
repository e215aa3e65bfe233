"""Campaigns whose truth is known, written as a real one leaves them: rings' samples, a client's result, traces, tables.

The scene is the measured Kimi-K2.5 on eight GPUs over PCIe: a decode step of 21.7 ms by the sum of its kernels and 12.1
ms per output token; 127 all-reduces a step, which take 11.17 ms of it (51.5 %). Those figures fix how many went which
way: 155 steps x 127 calls are 155 x 11.17 ms when 187 of them take the custom path's 1,125 us and the others NCCL's 78.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from tests.samples import pack
from tests.traces import Call, Dress, HostRange, Rank, Work, document, encode
from vllm_k25_instrument.campaign.load import CLIENT_FILE, Latency, WindowLoad
from vllm_k25_instrument.campaign.manifest import Manifest, Phase, Plan, State
from vllm_k25_instrument.campaign.profile import TRACES, analyse
from vllm_k25_instrument.campaign.run import profile_folder, window_folder
from vllm_k25_instrument.campaign.samples_file import write_samples
from vllm_k25_instrument.model import Category, GraphMode, Range, RankCoordinates, RankIdentity, StepSample
from vllm_k25_instrument.model import Phase as StepPhase

RANKS = 8
STEPS = 155
ALL_REDUCES = 127
NCCL_NS = 78_000
CUSTOM_NS = 1_125_000
CUSTOM_CALLS = 187
TPOT_NS = 12_100_000
KERNEL_SUM_NS = 21_700_000
MESSAGE = 14_336
WINDOW_STEPS = (52, 52, 51)
BASE_UNIX_NS = 1_767_225_600_000_000_000

NCCL = "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
CUSTOM = "void vllm::cross_device_reduce_1stage<__nv_bfloat16, 8>(vllm::RankData*, vllm::RankSignals, vllm::Signal*)"
MARLIN = "void marlin_moe_wna16::Marlin<1125899906909960l, 562949953487106l>(int4 const*, int4 const*)"
CAST = (
    "void at::native::unrolled_elementwise_kernel<at::native::direct_copy_kernel_cuda(at::TensorIteratorBase&)"
    "::{lambda()#3}::operator()() const::{lambda(float)#1}, 4, TrivialOffsetCalculator<1, unsigned int>, "
    "at::native::memory::LoadWithCast<1>, at::native::memory::StoreWithCast<1> >(int)"
)

COMPUTE = (
    (MARLIN, 20, 162_000),
    ("nvjet_tst_64x8_64x16_4x1_v_bz_TNT", 20, 126_000),
    ("_fwd_grouped_kernel_stage1", 10, 168_000),
    ("void vllm::moe::grouped_topk_fused_small_expert_count_kernel<float, 384>", 10, 120_000),
    ("triton_red_fused__to_copy_add_mean_mul_pow_rsqrt_0", 10, 90_000),
    ("void vllm::act_and_mul_kernel<c10::BFloat16, &(c10::BFloat16 vllm::silu_kernel<c10::BFloat16>)>", 10, 60_000),
    ("void vllm::concat_and_cache_mla_kernel<__nv_bfloat16, __nv_bfloat16, (vllm::Fp8KVCacheDataType)0>", 10, 39_000),
)
"""Name, calls a step, ns a call: 10.53 ms, which with 11.17 of all-reduce make 21.7."""

CASTS = (
    (CAST, 122, 31_040),
    (MARLIN, 20, 40_000),
    ("nvjet_tst_64x8_64x16_4x1_v_bz_TNT", 20, 45_000),
)
"""The other kernel path: dtype casts are 69 % of 5.488 ms, and there is no all-reduce."""


def customs(step: int) -> int:
    """How many of a step's all-reduces take the custom path: one, and in 32 of the 155 steps two; 187 in all."""
    return 2 if step % 5 == 0 or step == 1 else 1


def all_reduces(step: int) -> list[tuple[str, int]]:
    """Path and duration of each all-reduce of a step."""
    custom = customs(step)
    return [("custom", CUSTOM_NS)] * custom + [("pynccl", NCCL_NS)] * (ALL_REDUCES - custom)


@dataclass
class Scene:
    """What is varied: the kernels beside the all-reduces, and whether there are all-reduces at all."""

    compute: tuple[tuple[str, int, int], ...] = COMPUTE
    reduces: bool = True
    ranks: int = RANKS
    streams: int = 3
    tables: bool = True
    plan: Plan = field(
        default_factory=lambda: Plan("moonshotai/Kimi-K2.5", (1,), windows=len(WINDOW_STEPS), micro=False)
    )


def write_campaign(folder: Path, scene: Scene | None = None) -> Path:
    """A finished campaign in `folder`; its traces and tables have been through the analysers."""
    scene = scene or Scene()
    folder.mkdir(parents=True, exist_ok=True)
    manifest = Manifest(scene.plan, url="http://127.0.0.1:8000", created="2026-01-01T00:00:00Z")
    first = 0
    for number, steps in enumerate(WINDOW_STEPS, 1):
        where = window_folder(folder, 1, number)
        where.mkdir(parents=True)
        write_window(where, range(first, first + steps), scene)
        manifest.step(f"window {number} at concurrency 1", Phase.MACRO).state = State.DONE
        first += steps
    where = profile_folder(folder, 1)
    traces = write_captures(where / TRACES, scene)
    analyse(traces, where)
    manifest.step("profile at concurrency 1", Phase.MACRO).state = State.DONE
    manifest.save(folder)
    return folder


# --- the live side ---------------------------------------------------------------------------------------


def write_window(where: Path, steps: range, scene: Scene, tpot_ns: int = TPOT_NS) -> None:
    """One window of a client that sends one request at a time."""
    begin = BASE_UNIX_NS + steps.start * tpot_ns
    load = WindowLoad(
        client="vllm-bench",
        concurrency=1,
        requests=1,
        failed=0,
        tokens=len(steps) + 1,
        begin_unix_ns=begin,
        end_unix_ns=begin + (len(steps) + 1) * tpot_ns,
        tpot=Latency(tpot_ns, tpot_ns, tpot_ns),
        ttft=Latency(2 * tpot_ns, 2 * tpot_ns, 2 * tpot_ns),
    )
    (where / CLIENT_FILE).write_bytes(msgspec.json.encode(load))
    live = {"source": "ring", "instance": "test", "sample_every": 1, "ranks_expected": scene.ranks, "warnings": []}
    (where / "live.json").write_text(json.dumps(live))
    details = ("", "pynccl", "custom", "MarlinExperts")
    for rank in range(scene.ranks):
        identity = RankIdentity(
            "test", 1, RankCoordinates(rank, rank, rank, tp_size=scene.ranks), "moonshotai/Kimi-K2.5", "0.32.0"
        )
        packed = [pack(_sample(step, rank, scene, tpot_ns), details) for step in steps]
        write_samples(where, identity, details, packed)


def _sample(step: int, rank: int, scene: Scene, tpot_ns: int) -> StepSample:
    """All-reduces one after the other on the main stream, experts beside them on another."""
    late = 400 * rank - 1_400  # ranks differ by up to 2.8 us a call, 0 in the mean
    ranges = []
    at = 100_000
    for path, mean in all_reduces(step) if scene.reduces else ():
        duration = mean + late
        ranges.append(Range(Category.ALL_REDUCE, at, duration, path, bytes=MESSAGE))
        at += duration + 5_000
    experts = sum(calls * ns for name, calls, ns in scene.compute if name == MARLIN)
    ranges.append(Range(Category.MOE_EXPERTS, 200_000, experts, "MarlinExperts", stream=1))
    return StepSample(
        step=step,
        phase=StepPhase.DECODE,
        requests=1,
        tokens=1,
        padded_tokens=1,
        graph_mode=GraphMode.FULL,
        start_unix_ns=BASE_UNIX_NS + step * tpot_ns,
        duration_ns=tpot_ns - 150_000,
        ranges=tuple(ranges),
        host_ns=2_000_000,
        gap_ns=100_000,
    )


# --- what the profiler leaves ----------------------------------------------------------------------------


def write_captures(where: Path, scene: Scene) -> list[Path]:
    """A trace and a table for each rank; but for the rank's number they are alike."""
    where.mkdir(parents=True, exist_ok=True)
    one = encode(document([trace_rank(scene)], Dress(flows=False)))
    mark = b'"rank": 0'
    assert one.count(mark) == 1
    paths = []
    for rank in range(scene.ranks):
        name = f"dp0_pp0_tp{rank}_dcp0_ep{rank}_rank{rank}"
        paths.append(where / f"{name}.1795972173437681372.pt.trace.json")
        paths[-1].write_bytes(one.replace(mark, f'"rank": {rank}'.encode()))
        if scene.tables:
            paths.append(where / f"{name}.profiler_out.txt")
            paths[-1].write_text(table(scene))
    return paths


def trace_rank(scene: Scene) -> Rank:
    """One graph launch a step: all-reduces on stream 7, everything else on further streams at the same time."""
    calls, ranges = [], []
    for step in range(STEPS):
        start = 10_000_000 + step * TPOT_NS
        ranges.append(HostRange("execute_context_0(0)_generation_1(1)", start, 400_000))
        work = []
        at = start + 100_000
        for path, duration in all_reduces(step) if scene.reduces else ():
            work.append(Work(CUSTOM if path == "custom" else NCCL, at, duration, stream=7))
            at += duration + 1_000
        ends = [start + 300_000] * scene.streams
        for name, count, duration in scene.compute:
            for _ in range(count):
                stream = ends.index(min(ends))
                work.append(Work(name, ends[stream], duration, stream=20 + stream))
                ends[stream] += duration + 1_000
        calls.append(Call("cudaGraphLaunch", start + 20_000, 25_000, tuple(work)))
    return Rank(tuple(calls), tuple(ranges), world_size=scene.ranks)


def table(scene: Scene) -> str:
    """``key_averages().table()`` of the same: each kernel's row, and the operators that repeat its time."""
    rows: list[tuple[str, int, int]] = []
    if scene.reduces:
        nccl = STEPS * ALL_REDUCES - CUSTOM_CALLS
        rows += [
            ("nccl:all_reduce", nccl * NCCL_NS, nccl),
            (NCCL, nccl * NCCL_NS, nccl),
            ("_C_custom_ar::all_reduce", CUSTOM_CALLS * CUSTOM_NS, CUSTOM_CALLS),
            (CUSTOM, CUSTOM_CALLS * CUSTOM_NS, CUSTOM_CALLS),
        ]
    rows += [(name, STEPS * count * ns, STEPS * count) for name, count, ns in scene.compute]
    experts = next(row for row in rows if row[0] == MARLIN)
    rows.append(("_moe_C::moe_wna16_marlin_gemm", experts[1], experts[2]))
    kernels = sum(ns for name, ns, _ in rows if not name.startswith(("nccl:", "_C_custom_ar::", "_moe_C::")))
    rule = "  ".join(["-" * 55, *["-" * 12] * 10])
    names = ("Self CPU %", "Self CPU", "CPU total %", "CPU total", "CPU time avg")
    head = (*names, "Self CUDA", "Self CUDA %", "CUDA total", "CUDA time avg", "# of Calls")
    lines = [rule, "  ".join([f"{'Name':>55}", *(f"{name:>12}" for name in head)]), rule]
    for name, ns, count in rows:
        short = name if len(name) <= 55 else name[:52] + "..."
        cells = ("0.00%", "0.000us", "0.00%", "0.000us", "0.000us")
        gpu = (f"{ns / 1e6:.3f}ms", f"{100 * ns / kernels:.2f}%", f"{ns / 1e6:.3f}ms", f"{ns / count / 1e3:.3f}us")
        lines.append("  ".join([f"{short:>55}", *(f"{cell:>12}" for cell in (*cells, *gpu, str(count)))]))
    return "\n".join(
        [*lines, rule, "Self CPU time total: 20.000ms", f"Self CUDA time total: {kernels / 1e6:.3f}ms", ""]
    )
