"""`vllm-k25 analyze`: what it takes, what it writes, how it exits."""

import json
import re
import socket
import sys
import threading
import types

import pytest
from typer.testing import CliRunner

from tests.traces import Call, Dress, HostRange, Rank, Work, decode_rank, document, encode
from tests.unit.test_report_rings import open_rank
from vllm_k25_instrument.analysis import workers
from vllm_k25_instrument.analysis.analyze import Options, analyze
from vllm_k25_instrument.analysis.capture import Source
from vllm_k25_instrument.analysis.inputs import Input
from vllm_k25_instrument.analysis.workers import Job, run_here, run_job, run_on_cores
from vllm_k25_instrument.cli import app


def run(*arguments):
    return CliRunner().invoke(app, ["analyze", *(str(argument) for argument in arguments)])


def write_rank(folder, number, world=2, *, steps=3, name=None, rank=None):
    path = folder / (name or f"rank-{number}.pt.trace.json")
    made = rank or decode_rank(steps, rank=Rank(rank=number, world_size=world, pid=100 + number))
    path.write_bytes(encode(document([made])))
    return path


def waiting_rank(number, world, reduce_us):
    """A rank whose n-th step all-reduces for ``reduce_us[n]``."""
    calls, ranges = [], []
    for step, duration in enumerate(reduce_us):
        at = 1_000_000 + 200_000 * step
        ranges.append(HostRange("execute_context_0(0)_generation_4(4)", at, 20_000))
        work = (
            Work("void marlin_moe_wna16::Marlin<1l, 2l>(int4 const*)", at + 30_000, 100_000 - duration * 1000),
            Work("ncclDevKernel_AllReduce_Sum_bf16_RING_LL(x)", at + 130_000 - duration * 1000, duration * 1000),
        )
        calls.append(Call("cudaGraphLaunch", at + 5_000, 10_000, work))
    return Rank(tuple(calls), tuple(ranges), rank=number, world_size=world, pid=100 + number)


@pytest.fixture
def two(tmp_path):
    """Rank 1 is the slow one: it waits 20 us less in each all-reduce."""
    folder = tmp_path / "run"
    folder.mkdir()
    write_rank(folder, 0, rank=waiting_rank(0, 2, [30, 40, 50]))
    write_rank(folder, 1, rank=waiting_rank(1, 2, [10, 20, 30]))
    return folder


def test_a_directory_is_the_ranks_of_one_run(two):
    result = run(two)
    assert result.exit_code == 0, result.stderr
    assert "2 of 2 ranks found · 3 steps (vllm), 3 averaged" in result.stdout
    assert "Slowest rank 1" in result.stdout
    assert result.stderr == ""


def test_wait_and_transfer_are_told_across_the_ranks(two):
    cross = json.loads(run(two, "--json", "-").stdout)["cross_rank"]
    assert cross["all_reduce"] == {"calls_per_step": 1.0, "transfer_ns": 20_000, "wait_ns": {"0": 20_000, "1": 0}}
    assert cross["slowest_rank"] == 1
    assert cross["skew_ns"]["0"] == {"mean": 0, "max": 0}


def test_the_same_files_in_another_order_say_the_same(two):
    paths = sorted(two.iterdir())
    first, second = run(*paths, "--json", "-"), run(*reversed(paths), "--json", "-")
    assert json.loads(first.stdout) == json.loads(second.stdout)


def test_one_file_and_many_processes_give_the_same_figures(two):
    inputs = [Input(path, Source.TORCH_TRACE) for path in sorted(two.iterdir())]
    jobs = [Job(each) for each in inputs]
    read = []
    assert run_on_cores(jobs, read.append) == run_here(jobs, lambda count: None)
    assert sum(read) == sum(each.path.stat().st_size for each in inputs)


def test_where_a_thread_runs_the_workers_are_not_forked_from_this_process(two, monkeypatch):
    methods = []
    monkeypatch.setattr(
        workers,
        "ProcessPoolExecutor",
        lambda n, mp_context, **_: methods.append(mp_context.get_start_method()) or 1 / 0,
    )
    jobs = [Job(Input(path, Source.TORCH_TRACE)) for path in sorted(two.iterdir())]
    done = threading.Event()
    thread = threading.Thread(target=done.wait)
    for begin, end in ((lambda: None, lambda: None), (thread.start, done.set)):
        begin()
        with pytest.raises(ZeroDivisionError):
            run_on_cores(jobs, lambda count: None)
        end()
    thread.join()
    assert methods == ["fork", "forkserver"]


def test_a_process_that_dies_costs_its_file_and_not_the_others(two, monkeypatch):
    monkeypatch.setattr(workers, "_run_shared", _die_at_rank_1)
    jobs = [Job(Input(path, Source.TORCH_TRACE)) for path in sorted(two.iterdir())]
    done = run_on_cores(jobs, lambda count: None)
    assert [each.failure is not None for each in done][1]
    assert "was killed" in done[1].failure.reason


def _die_at_rank_1(place, job):
    import os

    if "rank-1" in job.input.path.name:
        os._exit(9)
    return run_job(job)


def test_files_that_cannot_be_read_are_named_and_the_others_analysed(two):
    (two / "rank-2.pt.trace.json").write_bytes(b'{"traceEvents": [' + b"[" * 100_000)
    result = run(two, "--json", "-")
    assert result.exit_code == 3
    found = json.loads(result.stdout)
    assert found["ranks"]["found"] == [0, 1]
    assert "rank-2.pt.trace.json" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda folder: folder / "nowhere.json", "nowhere.json"),
        (lambda folder: folder, "run"),
        (lambda folder: _written(folder / "notes.txt", b"hello\n" * 100), "notes.txt"),
        (lambda folder: _written(folder / "page.html", b"<html></html>"), "page.html"),
        (lambda folder: _written(folder / "empty.json", b""), "empty.json"),
        (lambda folder: _written(folder / "other.json", b'{"a": 1}'), "other.json"),
        (lambda folder: _written(folder / "binary.sqlite", bytes(range(256)) * 40), "binary.sqlite"),
        (lambda folder: _written(folder / "fake.sqlite", b"SQLite format 3\0" + bytes(4000)), "fake.sqlite"),
    ],
)
def test_anything_else_is_one_clear_line_and_exit_2(tmp_path, make, says):
    folder = tmp_path / "run"
    folder.mkdir()
    result = run(make(folder))
    assert result.exit_code == 2
    assert result.stdout == ""
    assert says in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1


def _written(path, data):
    path.write_bytes(data)
    return path


@pytest.mark.parametrize("nonsense", [10**40, -5, 70_000])
def test_a_rank_or_world_size_that_no_server_has_is_not_believed(tmp_path, nonsense):
    write_rank(tmp_path, 0, rank=decode_rank(2, rank=Rank(rank=0, world_size=nonsense)))
    found = json.loads(run(tmp_path, "--json", "-").stdout)
    assert found["ranks"] == {"found": [0], "expected": 1}
    write_rank(tmp_path, 0, rank=decode_rank(2, rank=Rank(rank=nonsense)))
    assert json.loads(run(tmp_path, "--json", "-").stdout)["ranks"]["found"] == [0]


def test_other_files_in_a_directory_are_left_out_and_said(two):
    (two / "server.log").write_text("hello\n" * 100)
    result = run(two, "--json", "-")
    assert result.exit_code == 0
    assert [warning["code"] for warning in json.loads(result.stdout)["warnings"]] == ["files_set_aside"]
    assert "server.log" in result.stderr


def test_rings_are_for_another_command(tmp_path):
    rank = open_rank(tmp_path, 0, 1)
    rank.write()
    result = run(rank.writer.path)
    assert result.exit_code == 2
    assert "vllm-k25 report" in result.stderr


def test_a_rank_that_is_there_twice_is_used_once_and_said(tmp_path):
    write_rank(tmp_path, 0, world=1, steps=2, name="a.json")
    write_rank(tmp_path, 0, world=1, steps=4, name="b.json")
    result = run(tmp_path, "--json", "-")
    found = json.loads(result.stdout)
    assert result.exit_code == 3
    assert [warning["code"] for warning in found["warnings"]] == ["rank_twice"]
    assert found["step_counts"]["0"]["found"] == 4
    assert "a.json (device 0) is not" in result.stderr


def test_ranks_that_are_expected_and_not_there_are_missing(two):
    result = run(two, "--expect-ranks", 8)
    assert result.exit_code == 3
    assert "2 of 8 ranks found, ranks 2-7 missing" in result.stderr
    assert "No figures across ranks: 2 of 8 ranks found." in result.stdout


def test_several_merged_ranks_of_one_file_are_told_apart(tmp_path):
    ranks = [decode_rank(2, rank=Rank(rank=n, world_size=2, pid=100 + n, device=n)) for n in range(2)]
    path = tmp_path / "merged.json"
    path.write_bytes(encode(document(ranks, prefixes=("Rank 0", "Rank 1"))))
    found = json.loads(run(path, "--json", "-").stdout)
    assert found["totals"]["kernels"] == 12
    assert len(found["per_rank"]) == 2


@pytest.mark.parametrize(
    "dress", [Dress(absolute=True), Dress(shuffle=3), Dress(container="array"), Dress(gzip_members=3)]
)
def test_how_a_trace_is_written_changes_nothing(tmp_path, dress):
    path = tmp_path / "trace"
    path.write_bytes(encode(document([decode_rank(4)], dress), dress))
    found = json.loads(run(path, "--json", "-").stdout)
    assert (found["totals"]["kernels"], found["totals"]["kernel_ns"]) == (12, 4 * 38_000)
    assert [group["step_ns"]["mean"] for group in found["groups"]] == [40_000]


def test_documents_go_to_files_and_the_table_to_standard_output(two, tmp_path):
    result = run(two, "--json", tmp_path / "a.json", "--html", tmp_path / "a.html", "--markdown", tmp_path / "a.md")
    assert result.exit_code == 0
    assert "decode · batch 4 · full graph" in result.stdout
    assert json.loads((tmp_path / "a.json").read_text())["schema"] == "vllm_k25.breakdown/1"
    assert (tmp_path / "a.html").read_text().startswith("<!doctype html>")
    text = (tmp_path / "a.md").read_text()
    assert text.startswith("# Step breakdown: ")
    for table in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
        assert len({row.count("|") for row in table.splitlines()}) == 1


def test_only_one_document_goes_to_standard_output_and_then_nothing_else_does(two):
    assert run(two, "--json", "-", "--html", "-").exit_code == 2
    assert run(two, "--markdown", "-").stdout.startswith("# Step breakdown")
    assert run(two, "--html", "-").stdout.startswith("<!doctype html>")


def test_a_document_that_cannot_be_written_is_named(two, tmp_path):
    result = run(two, "--html", tmp_path / "missing" / "page.html")
    assert result.exit_code == 2
    assert "page.html: cannot be written: No such file or directory" in result.stderr


def test_a_phase_is_shown_alone_and_one_that_is_not_there_is_named(two):
    found = json.loads(run(two, "--phase", "decode", "--json", "-").stdout)
    assert {group["phase"] for group in found["groups"]} == {"decode"}
    result = run(two, "--phase", "prefill")
    assert result.exit_code == 2
    assert "no step of phase prefill; there are decode" in result.stderr


@pytest.mark.parametrize("steps", ["x", "0", "3-2", "1-", "-3", "1-2-3", "9" * 30])
def test_a_range_of_steps_that_is_none_is_wrong_usage(two, steps):
    result = run(two, f"--steps={steps}")
    assert result.exit_code == 2
    assert "not a step or a range of steps such as 4 or 4-8" in result.stderr


def test_a_range_of_steps_is_of_each_rank(two):
    found = json.loads(run(two, "--steps", "2-3", "--json", "-").stdout)
    assert [(step["rank"], step["place"]) for step in found["steps"]] == [(0, 2), (0, 3), (1, 2), (1, 3)]
    assert found["totals"]["kernels"] == 8


def test_rules_of_the_user_come_first_and_wrong_ones_are_one_line(two, tmp_path):
    rules = tmp_path / "rules.toml"
    rules.write_text('[[rule]]\nid = "mine"\ncategory = "dense_gemm"\nname = "marlin"\n')
    found = json.loads(run(two, "--rules", rules, "--json", "-").stdout)
    assert "moe_experts" not in found["totals"]["by_category"]
    assert {kernel["rule"] for kernel in found["kernels"] if kernel["category"] == "dense_gemm"} == {"mine"}
    rules.write_text("[[rule]\n")
    result = run(two, "--rules", rules)
    assert result.exit_code == 2
    assert len(result.stderr.strip().splitlines()) == 1


def test_what_no_rule_names_is_listed_largest_first(tmp_path):
    calls = (
        Call(
            "cudaLaunchKernel",
            10,
            1,
            (Work("zzz_small", 1000, 10), Work("zzz_large", 2000, 500), Work("zzz_large", 3000, 500)),
        ),
    )
    rank = Rank(calls, (HostRange("execute_new_0_cached_1", 0, 100),))
    text = run(write_rank(tmp_path, 0, rank=rank)).stdout
    listed = text[text.index("Kernels of category other") :]
    assert listed.index("zzz_large") < listed.index("zzz_small")
    assert "No rule names these 2 (100.0 % of the kernels' time)" in listed


def test_hostile_names_stay_text_in_every_document(tmp_path):
    name = "<script>alert(1)</script>|`*x*` [red]boo[/red] \x1b[31m\u202e"
    rank = Rank(
        (Call("cudaLaunchKernel", 10, 1, (Work(name, 1000, 10),)),), (HostRange("execute_new_0_cached_1", 0, 99),)
    )
    path = write_rank(tmp_path, 0, world=1, rank=rank)
    page = run(path, "--html", "-").stdout
    assert "<script>" not in page
    assert "&lt;script&gt;" in page
    result = run(path)
    assert result.exit_code == 0
    assert "\x1b[31m" not in result.stdout
    rows = [row for row in run(path, "--markdown", "-").stdout.splitlines() if row.startswith("| `<script>")]
    assert len(rows) == 2
    assert all(row.count("|") in (6, 7) for row in rows)


def fake_ray(monkeypatch, *, fails=()):
    """Enough of Ray to run tasks here and now."""
    started = []
    ray = types.ModuleType("ray")
    ray.is_initialized = lambda: False
    ray.init = lambda **options: started.append(options["address"])

    class Remote:
        def __init__(self, function):
            self._function = function

        def remote(self, job):
            return (self._function, job.input.path.name, job)

    ray.remote = lambda **options: Remote
    ray.wait = lambda references, num_returns: (references[-1:], references[:-1])

    def get(reference):
        function, name, job = reference
        if name in fails:
            raise RuntimeError("node\nlost")
        return function(job)

    ray.get = get
    monkeypatch.setitem(sys.modules, "ray", ray)
    return started


def test_a_ray_cluster_does_the_same_work(two, monkeypatch):
    started = fake_ray(monkeypatch)
    with socket.create_server(("127.0.0.1", 0)) as head:
        address = f"127.0.0.1:{head.getsockname()[1]}"
        there = run(two, "--ray", address, "--json", "-")
    assert started == [address]
    assert json.loads(there.stdout) == json.loads(run(two, "--json", "-").stdout)


def test_a_task_that_ray_loses_is_its_files_failure(two, monkeypatch):
    fake_ray(monkeypatch, fails=("rank-1.pt.trace.json",))
    result = run(two, "--ray", "auto", "--json", "-")
    assert result.exit_code == 3
    assert "rank-1.pt.trace.json: its Ray task failed (node lost)" in result.stderr


def test_without_ray_the_remedy_is_named_and_ray_is_imported_only_then(two, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    assert run(two).exit_code == 0
    result = run(two, "--ray", "auto")
    assert result.exit_code == 2
    assert "Ray is not installed: pip install ray" in result.stderr


def test_a_cluster_that_cannot_be_reached_is_one_line(two, monkeypatch):
    fake_ray(monkeypatch)

    def init(**options):
        raise ConnectionError("no\nroute")

    sys.modules["ray"].init = init
    result = run(two, "--ray", "auto")
    assert result.exit_code == 2
    assert "--ray auto: no Ray cluster can be reached there: no route" in result.stderr
    with socket.create_server(("127.0.0.1", 0)) as closed:
        address = f"127.0.0.1:{closed.getsockname()[1]}"
    result = run(two, "--ray", address)
    assert result.exit_code == 2
    assert f"--ray {address}: no Ray cluster can be reached there: Connection refused" in result.stderr


def test_the_pipeline_can_be_called_from_python(two):
    report = analyze([two], Options(expect_ranks=2), run=run_here)
    assert report.breakdown.complete
    assert report.breakdown.gpu.cross_rank.slowest == 1
