"""The key_averages table: each piece of GPU time counted once."""

from __future__ import annotations

import gzip
import itertools
from pathlib import Path

import pytest

from tests.traces import sample
from vllm_k25_instrument.analysis.capture import NO_RANK, ActivityKind, CaptureError, KernelTable
from vllm_k25_instrument.analysis.key_averages import names_work, read_key_averages, read_key_averages_of_workers
from vllm_k25_instrument.report.caveats import CaveatCode

CASE = Path(__file__).parents[1] / "data" / "cases" / "13-key-averages-double-count"


def codes(table: KernelTable) -> set[CaveatCode]:
    return {note.code for note in table.notes}


def text(name: str = "profiler_out_0.txt") -> str:
    return (CASE / name).read_text()


@pytest.mark.parametrize("name", ["profiler_out_0.txt", "with_log_prefix.txt"])
def test_kernels_and_copies_alone_add_up_to_the_footer(name: str) -> None:
    table = read_key_averages(CASE / name)
    assert int(table.sum_ns.sum()) == 10_000_000
    assert table.footer_ns == 10_000_000
    assert sorted(table.sum_ns.tolist()) == [500_000, 1_000_000, 1_000_000, 1_500_000, 2_000_000, 4_000_000]
    assert table.complete
    assert table.rank == 0
    assert CaveatCode.FOOTER_MISMATCH not in codes(table)


def test_rows_of_one_cut_name_with_other_averages_are_two_kernels() -> None:
    table = read_key_averages(CASE / "profiler_out_0.txt")
    marlin = [n for n, name in enumerate(table.names) if name.startswith("void marlin_moe_wna16")]
    assert [(int(table.sum_ns[n]), int(table.count[n])) for n in marlin] == [(2_000_000, 100), (1_000_000, 50)]
    assert CaveatCode.NAMES_CUT in codes(table)


def test_of_two_equal_rows_one_is_the_operator() -> None:
    table = read_key_averages(CASE / "profiler_out_0.txt")
    triton = [n for n, name in enumerate(table.names) if name == "triton_poi_fused_mul_silu_slice_0"]
    assert [int(table.sum_ns[n]) for n in triton] == [500_000]


def test_the_real_table_equals_the_trace_of_its_run() -> None:
    table = read_key_averages(sample("vllm-graph-decode-profiler_out_0.txt"))
    assert table.footer_ns == 191_450_000
    # Rows of milliseconds are rounded to the microsecond.
    assert abs(int(table.sum_ns.sum()) - 191_450_000) < 20_000
    assert int(table.count.sum()) == 7_440 + 210 + 167
    by_kind = {kind: int(table.count[table.kind == kind].sum()) for kind in ActivityKind}
    assert by_kind[ActivityKind.MEMCPY] == 210
    assert by_kind[ActivityKind.MEMSET] == 167
    assert codes(table) == {CaveatCode.NAMES_CUT}


@pytest.mark.parametrize(
    "name",
    [
        "void marlin_moe_wna16::Marlin<1125899906909960l, 562...",
        "void at::native::(anonymous namespace)::cunn_SoftMax...",
        "at::native::(anonymous namespace)::fill_index_and_se...",
        "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKern...",
        "ampere_bf16_s16816gemm_bf16_64x64_ldg8_f2f_stages_64...",
        "kernel_unified_attention_3d",
        "reduce_segments",
        "triton_red_fused__to_copy_add_addmm_mean_mul_pow_rsq...",
        "_ZN4vllm15rms_norm_kernelIN3c108BFloat16EEEvPT_",
        "Cijk_Ailk_Bljk_BBS_BH_MT16x16x128_MI16x16x16x1_SN",
        "unsigned int vllm::foo<3>(int*)",
        "vllm::act_and_mul(float*)",
        "Memcpy HtoD (Pinned -> Device)",
        "Memset (Device)",
        "nvjet_tst_64x8_64x16_4x1_v_bz_TNT",
    ],
)
def test_names_of_gpu_work(name: str) -> None:
    assert names_work(name)


@pytest.mark.parametrize(
    "name",
    [
        "aten::mm",
        "vllm::unified_attention_with_output",
        "_C::rms_norm",
        "_moe_C::moe_wna16_marlin_gemm",
        "c10d::allreduce_",
        "execute_new_0_cached_4",
        "execute_context_0(0)_generation_4(4)",
        "execute_context_1(sq512sk512sqsq262144sqsk262144)_g...",
        "ProfilerStep#3",
        "decode step 12 bs=64 graph=full",
        "gpu_model_runner: forward",
        "record_param_comms",
        "nccl:all_reduce",
        "nccl:_all_gather_base",
        "## Call CompiledFxGraph fvflfjd7k4ojll3fuxiwohb5qotp...",
        "cudaGraphLaunch",
        "cuLaunchKernelEx",
        "hipLaunchKernel",
        "Lazy Function Loading",
        "Runtime Triggered Module Loading",
        "Activity Buffer Request",
        "Torch-Compiled Region: 0/0",
        "Pregraph bytecode",
        "Optimizer.step#SGD.step",
    ],
)
def test_names_of_operators_calls_and_annotations(name: str) -> None:
    assert not names_work(name)


def test_tables_of_interleaved_workers_are_told_apart(tmp_path: Path) -> None:
    lines = [f"(Worker_TP{tp} pid={tp + 70}) INFO 01-01 00:00:0{tp} [gpu_worker.py:1] " for tp in range(2)]
    tables = [text().splitlines(), text().replace("4.000ms", "5.000ms").replace("10.000ms", "11.000ms").splitlines()]
    log = ["INFO something else", ""]
    for rows in itertools.zip_longest(*tables, fillvalue=""):
        log += [prefix + row for prefix, row in zip(lines, rows, strict=True)]
    path = tmp_path / "server.log"
    path.write_text("\n".join(log))
    first, second = read_key_averages_of_workers(path)
    assert (first.rank, int(first.sum_ns.sum()), first.footer_ns) == (0, 10_000_000, 10_000_000)
    assert (second.rank, int(second.sum_ns.sum()), second.footer_ns) == (1, 11_000_000, 11_000_000)
    with pytest.raises(CaptureError, match="2 workers"):
        read_key_averages(path)


def test_two_profiles_of_one_worker_add_up(tmp_path: Path) -> None:
    path = tmp_path / "profiler_out_3.txt"
    path.write_text(text() + "\n" + text())
    table = read_key_averages(path)
    assert (table.rank, int(table.sum_ns.sum()), table.footer_ns) == (3, 20_000_000, 20_000_000)
    assert CaveatCode.FOOTER_MISMATCH not in codes(table)


def test_rays_colours_and_gzip_do_no_harm(tmp_path: Path) -> None:
    path = tmp_path / "log.gz"
    coloured = "\n".join(f"\x1b[36m(RayWorkerWrapper pid=7)\x1b[0m {line}" for line in text().splitlines())
    path.write_bytes(gzip.compress(coloured.encode()))
    table = read_key_averages(path)
    assert int(table.sum_ns.sum()) == 10_000_000
    assert table.rank == NO_RANK


def test_a_sum_that_misses_the_footer_is_said(tmp_path: Path) -> None:
    path = tmp_path / "t.txt"
    path.write_text("\n".join(line for line in text().splitlines() if "rotary_kernel" not in line))
    table = read_key_averages(path)
    (note,) = [note for note in table.notes if note.code is CaveatCode.FOOTER_MISMATCH]
    assert "add up to 9.000 ms, the footer says 10.000 ms" in note.message
    assert note.count == 1_000_000


def test_a_table_that_is_cut_off_is_incomplete(tmp_path: Path) -> None:
    path = tmp_path / "t.txt"
    lines = text().splitlines()
    path.write_text("\n".join(lines[:9]))
    table = read_key_averages(path)
    assert not table.complete
    assert CaveatCode.TRUNCATED in codes(table)
    assert int(table.sum_ns.sum()) == 6_000_000


def test_bytes_that_are_no_text_are_replaced(tmp_path: Path) -> None:
    path = tmp_path / "t.txt"
    path.write_bytes(text().encode().replace(b"rotary_kernel", b"rotary\xffkernel"))
    table = read_key_averages(path)
    assert CaveatCode.INVALID_ENCODING in codes(table)


def test_a_table_of_cpu_times_has_no_gpu_events(tmp_path: Path) -> None:
    path = tmp_path / "t.txt"
    cells = "------------  " * 7
    row = "    aten::mm         0.21%     438.813us         0.27%     568.846us      33.462us            17  "
    head = "        Name    Self CPU %      Self CPU   CPU total %     CPU total  CPU time avg    # of Calls  "
    path.write_text(f"{cells}\n{head}\n{cells}\n{row}\n{cells}\nSelf CPU time total: 210.809ms\n")
    table = read_key_averages(path)
    assert len(table.names) == 0
    assert CaveatCode.NO_GPU_EVENTS in codes(table)


@pytest.mark.parametrize("data", [b"", b"nothing here", b"Self CPU %\n", b"\x00" * 100])
def test_what_is_no_table_is_refused(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "t.txt"
    path.write_bytes(data)
    with pytest.raises(CaptureError) as caught:
        read_key_averages(path)
    assert "\n" not in str(caught.value)
