"""Where a campaign's figures come from: rings, scrapes, traces that are still being written."""

from __future__ import annotations

import gzip
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from tests import campaigns
from tests.campaigns import Scene, write_campaign, write_window
from tests.export_rings import make_ring
from tests.kimi_k25 import kimi_k25_config
from tests.samples import pack
from vllm_k25_instrument.campaign import profile
from vllm_k25_instrument.campaign.cpu_operators import cast_share, read_cpu_tables
from vllm_k25_instrument.campaign.errors import CampaignError
from vllm_k25_instrument.campaign.interval import estimate, student_t
from vllm_k25_instrument.campaign.live import (
    METRICS,
    RING,
    MetricsSource,
    NoSource,
    RingSource,
    choose_source,
    decode_steps,
)
from vllm_k25_instrument.campaign.load import Latency, WindowLoad
from vllm_k25_instrument.campaign.manifest import Plan
from vllm_k25_instrument.campaign.results import Column, read_results
from vllm_k25_instrument.campaign.samples_file import read_samples
from vllm_k25_instrument.campaign.scrapes import metrics_figures
from vllm_k25_instrument.campaign.scrub import HOST, SECRET, scrub_command, scrub_text, scrub_url
from vllm_k25_instrument.campaign.server import Server
from vllm_k25_instrument.campaign.window import LiveFigures, Window, ring_figures
from vllm_k25_instrument.export.collector import RingCollector
from vllm_k25_instrument.model import (
    ALL_REDUCE_PATHS,
    GRAPH_MODES,
    LIVE_CATEGORIES,
    PHASES,
    AllReducePath,
    Category,
    GraphMode,
    Phase,
    Range,
    StepSample,
)
from vllm_k25_instrument.ring import RingWriter

DECODE, PREFILL = PHASES.index(Phase.DECODE), PHASES.index(Phase.PREFILL)
FULL = GRAPH_MODES.index(GraphMode.FULL)
PYNCCL = ALL_REDUCE_PATHS.index(AllReducePath.PYNCCL)
LOCAL = Server("http://127.0.0.1:1")


def a_load(begin: int, end: int, concurrency: int = 4) -> WindowLoad:
    latency = Latency(12e6, 12e6, 12e6)
    return WindowLoad("openai", concurrency, 1, 0, 1, begin, end, latency, latency)


def a_step(step: int, *, phase: Phase = Phase.DECODE, requests: int = 4, duration_ns: int = 10_000_000) -> StepSample:
    reduce = Range(Category.ALL_REDUCE, 1_000, 78_000, "pynccl", bytes=14_336)
    return StepSample(
        step=step,
        phase=phase,
        requests=requests,
        tokens=requests,
        padded_tokens=requests,
        graph_mode=GraphMode.FULL,
        start_unix_ns=1_000 * step,
        duration_ns=duration_ns,
        ranges=(reduce,),
        gap_ns=500_000,
    )


def write(ring: RingWriter, *steps: StepSample) -> None:
    """The steps as a worker writes them."""
    details = ["", "pynccl"]
    assert [ring.detail_index(detail) for detail in details] == [0, 1]
    for step in steps:
        assert ring.append(pack(step, details))
        ring.totals.add_step(PHASES.index(step.phase), step.duration_ns)


# --- rings -----------------------------------------------------------------------------------------------


def test_a_window_has_the_steps_that_began_in_it_and_no_others(tmp_path: Path) -> None:
    rings = [make_ring(tmp_path / "rings", rank) for rank in range(2)]
    for ring in rings:
        write(ring, a_step(1), a_step(2))
    source = RingSource(tmp_path / "rings")
    window = tmp_path / "window"
    window.mkdir()
    source.begin(window)
    for ring in rings:
        write(ring, *(a_step(step) for step in range(3, 9)))
    source.end(a_load(4_000, 7_000), window)
    for rank in read_samples(window):
        assert [sample.step for sample in rank.samples()] == [4, 5, 6, 7]
        assert [r.detail for sample in rank.samples() for r in sample.ranges] == ["pynccl"] * 4


def test_a_window_without_a_sample_says_how_to_get_some(tmp_path: Path) -> None:
    ring = make_ring(tmp_path / "rings")
    write(ring, a_step(1))
    source = RingSource(tmp_path / "rings")
    source.begin(tmp_path)
    with pytest.raises(CampaignError, match="K25_SAMPLE_EVERY=1"):
        source.end(a_load(0, 10**9), tmp_path)


def test_rings_are_taken_only_where_the_load_has_moved_them(tmp_path: Path) -> None:
    served, other = (make_ring(tmp_path / name, sample_every=1) for name in ("served", "other"))
    before = decode_steps(tmp_path)
    assert set(before) == {tmp_path / "served", tmp_path / "other"}
    write(served, *(a_step(step) for step in range(20)))
    source, why = choose_source(LOCAL, tmp_path, before, 10, None)
    assert isinstance(source, RingSource)
    assert source.instance == tmp_path / "served"
    assert "served" in why
    source, why = choose_source(LOCAL, tmp_path, decode_steps(tmp_path), 10, None)
    assert isinstance(source, NoSource)
    assert "another server's" in why
    write(other, *(a_step(step) for step in range(20)))
    source, why = choose_source(LOCAL, tmp_path, before, 10, "vllm_k25_steps_total 1")
    assert isinstance(source, MetricsSource)
    assert "--rings" in why


def test_only_decode_steps_at_the_full_batch_count_and_the_rest_has_a_row_of_its_own(tmp_path: Path) -> None:
    write_window(tmp_path, range(1), Scene(ranks=1))
    (rank,) = read_samples(tmp_path)
    full = [a_step(step, requests=10, duration_ns=10_000_000) for step in range(8)]
    partial = a_step(8, requests=4, duration_ns=6_000_000)
    prefill = a_step(9, phase=Phase.PREFILL, requests=2, duration_ns=40_000_000)
    first = replace(prefill, step=0, gap_ns=5_000_000_000)
    packed = tuple(pack(step, ["", "pynccl"]) for step in (first, *full[:4], prefill, *full[4:], partial))
    live = ring_figures([replace(rank, details=("", "pynccl"), packed=packed)], ranks_expected=1, decode_ns=9_000_000.0)
    assert live is not None
    assert (live.steps, live.largest_batch, live.batch) == (8, 10, 10)
    assert live.step_ns == 10_000_000
    assert live.gap_ns == 500_000
    # Eight steps of ten requests, one of four, and a prefill of two that keeps the other eight waiting; the first one,
    # after an idle while, keeps nobody.
    weighted = 8 * 10 * 10.5e6 + 4 * 6.5e6 + 8 * 40.5e6
    assert live.others_ns == pytest.approx(weighted / (8 * 10 + 4) - 10.5e6)
    assert live.unsampled_ns == pytest.approx(9e6 - (8 * 10e6 + 6e6) / 9)
    assert live.components[Category.ALL_REDUCE].calls == 1
    assert live.components[Category.UNATTRIBUTED].exposed_ns == 10_000_000 - 78_000


def test_the_parts_add_up_where_a_window_does_not_tell_one_of_them_or_has_no_live_breakdown() -> None:
    def window(number: int, tpot_ns: float, **live: float | None) -> Window:
        latency = Latency(mean_ns=tpot_ns, p50_ns=tpot_ns, p99_ns=tpot_ns)
        load = WindowLoad("openai", 1, 2, 0, 64, 0, 10**9, tpot=latency, ttft=None)
        figures = LiveFigures(RING, 1.0, 1, 10, components={}, **live) if live else None  # type: ignore[arg-type]
        return Window(1, number, load, figures)

    column = Column(
        1,
        [
            window(0, 10e6, step_ns=8e6, gap_ns=1e6, others_ns=0.5e6, unsampled_ns=None),
            window(1, 11e6, step_ns=9e6, gap_ns=1e6, others_ns=0.5e6, unsampled_ns=0.2e6),
            window(2, 90e6),
        ],
    )
    unsampled = column.part("unsampled_ns")
    assert column.tpot is not None
    assert column.unexplained is not None
    assert unsampled is not None
    assert (unsampled.mean, column.unexplained.mean, column.tpot.mean) == pytest.approx((0.1e6, 0.4e6, 10.5e6))
    parts = [column.part(figure) for figure in ("step_ns", "gap_ns", "others_ns", "unsampled_ns")]
    assert sum(part.mean for part in parts if part) + column.unexplained.mean == pytest.approx(column.tpot.mean)
    assert Column(1, [window(0, 10e6)]).part("gap_ns") is None


def test_a_concurrency_above_what_the_server_runs_is_seen_in_the_batches(tmp_path: Path) -> None:
    folder = write_campaign(tmp_path / "campaign", Scene(ranks=1, tables=False))
    manifest = folder / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"concurrency": [\n      1\n', '"concurrency": [\n      64\n'))
    (folder / "windows/c00001").rename(folder / "windows/c00064")
    results = read_results(folder)
    (column,) = results.columns
    assert column.not_reached == "the largest batch of any step was 1"
    assert any("concurrency 64 was not reached" in note for note in results.notes)


def test_floors_stand_beside_what_was_measured(tmp_path: Path) -> None:
    import json

    config = tmp_path / "config.json"
    config.write_text(json.dumps(kimi_k25_config()))
    plan = Plan("k25", (1,), windows=3, gpu="rtx-pro-6000", config=str(config), micro=False)
    results = read_results(write_campaign(tmp_path / "campaign", Scene(plan=plan, tables=False)))
    assert results.floors_missing == ""
    (column,) = results.columns
    reduce = column.floors[Category.ALL_REDUCE]
    assert reduce.floor is not None
    measured = column.components()[Category.ALL_REDUCE].exposed.mean
    assert reduce.times == pytest.approx(measured / reduce.floor.ns, rel=0.01)
    assert column.floors[Category.MOE_EXPERTS].floor is not None


# --- scrapes ---------------------------------------------------------------------------------------------


def scrape(folder: Path, target: Path) -> None:
    registry = CollectorRegistry()
    registry.register(RingCollector(lambda: folder))
    target.write_bytes(generate_latest(registry))


def count(ring: RingWriter, requests: int, duration_ns: int, own_ns: int) -> None:
    """A sampled decode step with one all-reduce."""
    shares = [0] * len(LIVE_CATEGORIES)
    shares[LIVE_CATEGORIES.index(Category.ALL_REDUCE)] = own_ns
    shares[LIVE_CATEGORIES.index(Category.UNATTRIBUTED)] = duration_ns - own_ns
    ring.totals.add_step(DECODE, duration_ns)
    ring.totals.add_sample(DECODE, FULL, requests, duration_ns, shares)
    ring.totals.add_all_reduces(PYNCCL, [own_ns], [14_336])


def test_two_scrapes_give_the_means_of_what_came_between_them(tmp_path: Path) -> None:
    rings = [make_ring(tmp_path / "rings", rank) for rank in range(2)]
    before, after = tmp_path / "before", tmp_path / "after"
    for ring in rings:
        for _ in range(5):
            count(ring, 64, 99_000_000, 1_000_000)
    scrape(tmp_path / "rings", before)
    for ring, own in zip(rings, (4_000_000, 2_000_000), strict=True):
        for _ in range(10):
            count(ring, 64, 12_000_000, own)
            ring.totals.add_step(DECODE, 11_000_000)  # executed, not sampled
        count(ring, 1, 5_000_000, 1_000_000)
    scrape(tmp_path / "rings", after)
    found = metrics_figures(before, after, 64)
    assert found is not None
    assert (found.steps, found.ranks) == (10, 2)
    assert found.step_ns == pytest.approx(12_000_000)
    assert found.category_ns[Category.ALL_REDUCE] == pytest.approx(3_000_000)
    assert sum(found.category_ns.values()) == pytest.approx(found.step_ns)
    calls, each = found.all_reduce_paths["pynccl"]
    assert calls == pytest.approx(1)
    assert each == pytest.approx((10 * 4e6 + 10 * 2e6 + 2 * 1e6) / 22)
    sampled = (10 * 12e6 + 5e6) / 11
    assert found.unsampled_ns == pytest.approx((10 * 12e6 + 10 * 11e6 + 5e6) / 21 - sampled)
    assert found.graph_modes == {"full": 20}


def test_of_a_batch_that_was_never_run_the_one_that_was_is_taken(tmp_path: Path) -> None:
    ring = make_ring(tmp_path / "rings")
    scrape(tmp_path / "rings", tmp_path / "before")
    count(ring, 8, 12_000_000, 1_000_000)
    scrape(tmp_path / "rings", tmp_path / "after")
    found = metrics_figures(tmp_path / "before", tmp_path / "after", 64)
    assert found is not None
    assert found.batch == 16


def test_no_step_between_the_scrapes_is_no_figure(tmp_path: Path) -> None:
    ring = make_ring(tmp_path / "rings")
    count(ring, 8, 12_000_000, 1_000_000)
    for name in ("before", "after"):
        scrape(tmp_path / "rings", tmp_path / name)
    assert metrics_figures(tmp_path / "before", tmp_path / "after", 8) is None
    assert metrics_figures(tmp_path / "absent", tmp_path / "absent", 8) is None
    assert {RING, METRICS} == {"ring", "metrics"}


# --- traces ----------------------------------------------------------------------------------------------


def test_a_trace_is_whole_when_its_gzip_and_its_json_end(tmp_path: Path) -> None:
    text = b'{"traceEvents": [' + b",".join([b'{"ph": "X"}'] * 50_000) + b"]}\n"
    path = tmp_path / "a.pt.trace.json.gz"
    packed = gzip.compress(text[:1000]) + gzip.compress(text[1000:])
    for end in (10, len(packed) // 2, len(packed) - 1):
        path.write_bytes(packed[:end])
        assert not profile.is_whole(path), end
    path.write_bytes(gzip.compress(text[:-10]))
    assert not profile.is_whole(path)
    path.write_bytes(packed)
    assert profile.is_whole(path)
    plain = tmp_path / "a.json"
    plain.write_bytes(text[:-5])
    assert not profile.is_whole(plain)
    plain.write_bytes(text)
    assert profile.is_whole(plain)


def test_traces_are_waited_for_while_they_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profile, "_POLL_S", 0.02)
    (tmp_path / "old.json").write_text("{}")
    table = tmp_path / "rank0.profiler_out.txt"
    table.write_text("old")
    directory = profile.TraceDirectory.look(tmp_path)
    text = b'{"traceEvents": []}'
    written = threading.Event()

    def write_slowly() -> None:
        with (tmp_path / "new.pt.trace.json").open("wb", buffering=0) as file:
            for at in range(0, len(text), 5):
                file.write(text[at : at + 5])
                time.sleep(0.1)
        table.write_text("new table")
        written.set()

    writer = threading.Thread(target=write_slowly)
    writer.start()
    said: list[str] = []
    found = profile.wait_until_complete(directory, said.append, settle_s=20)
    writer.join()
    assert tmp_path / "new.pt.trace.json" in found
    assert tmp_path / "old.json" not in found
    assert "waiting for traces to be complete" in said[0]
    assert written.is_set()
    assert directory.new() == [tmp_path / "new.pt.trace.json", table]


def test_a_trace_that_never_comes_names_the_option(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profile, "_POLL_S", 0.01)
    with pytest.raises(CampaignError, match="--trace-dir"):
        profile.wait_until_complete(profile.TraceDirectory.look(tmp_path), lambda text: None, settle_s=0.05)


@pytest.mark.parametrize(
    "arguments",
    [
        ["serve", "m", "--profiler-config", '{"profiler": "torch", "torch_profiler_dir": "/t"}'],
        ["serve", "m", '--profiler-config={"profiler": "torch", "torch_profiler_dir": "/t"}'],
        ["serve", "m", "--profiler-config.torch_profiler_dir", "/t"],
        ["serve", "m", "--profiler-config.torch_profiler_dir=/t"],
    ],
)
def test_where_traces_go_is_read_from_the_servers_command_line(arguments: list[str]) -> None:
    assert profile.directory_in(arguments) == "/t"
    assert profile.directory_in(arguments[:2]) == ""


def test_a_table_of_cpu_times_gives_operators_and_casts(tmp_path: Path) -> None:
    rule = "-" * 40
    rows = (
        ("_C::shm_allreduce", "60.00%", "600.000us", "60.00%", "600.000us", "66.667us", "9"),
        ("execute_context_0(0)_generation_4(4)", "20.00%", "200.000us", "98.00%", "980.000us", "490.000us", "2"),
        ("execute_context_1(33)_generation_1(1)", "5.00%", "50.000us", "5.00%", "50.000us", "50.000us", "1"),
        ("aten::_to_copy", "1.00%", "10.000us", "10.00%", "0.100ms", "10.000us", "10"),
    )
    lines = ["  ".join(f"{cell:>40}" if n == 0 else f"{cell:>12}" for n, cell in enumerate(row)) for row in rows]
    path = tmp_path / "dp0_pp0_tp1_dcp0_ep1_rank1.profiler_out.txt"
    path.write_text("\n".join([rule, "Name  Self CPU %", rule, *lines, rule, "Self CPU time total: 1.000ms"]))
    (rank,) = read_cpu_tables([path])["ranks"]
    assert (rank["rank"], rank["decode_steps"], rank["cast_ns"]) == (1, 2, 100_000)
    assert rank["operators"][0] == {"name": "_C::shm_allreduce", "self_ns": 600_000, "calls": 9}
    assert cast_share({"ranks": [rank]}) == pytest.approx(0.1)
    path.write_text(campaigns.table(Scene()))
    assert read_cpu_tables([path]) == {}


# --- what is passed on -----------------------------------------------------------------------------------


def test_commands_are_kept_without_hosts_and_secrets() -> None:
    command = ["run", "--url", "http://me:pw@gpu-17.lab:8000/v1", "--api-key", "abc", "--hf-token=xyz", "--model", "m"]
    clean = scrub_command(command, ("gpu-17.lab",))
    assert clean == [
        "run",
        "--url",
        f"http://{HOST}:8000/v1",
        "--api-key",
        SECRET,
        f"--hf-token={SECRET}",
        "--model",
        "m",
    ]
    assert scrub_url("http://127.0.0.1:8000") == "http://127.0.0.1:8000"
    assert scrub_text("no server at gpu-17.lab (refused)", ("gpu-17.lab",)) == f"no server at {HOST} (refused)"


def test_intervals_are_students() -> None:
    found = estimate([1.0, 2.0, 3.0])
    assert found.mean == 2
    assert found.half == pytest.approx(4.303 / 3**0.5)
    assert estimate([5.0]).half is None
    assert student_t(40) == pytest.approx(2.021, abs=1e-3)
    assert student_t(120) == pytest.approx(1.980, abs=1e-3)
