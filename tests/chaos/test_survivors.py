"""What happens beside a server that streams, and to its rings: no request fails, no sample is lost unnoticed."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.chaos.lab import Exporter, Lab, filled, mounted
from tests.e2e.conftest import Launch
from tests.exposition import assert_exposition_is_sound, our_samples

RING_MIB = 64
TIMES = 25
# Without Python stacks: writing those takes minutes, in which vLLM answers nobody.
PROFILER = {"profiler": "torch", "torch_profiler_with_stack": False, "torch_profiler_dump_cuda_time_total": False}


@pytest.fixture(scope="module")
def shm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A tmpfs that two rings almost fill; an ordinary folder where this user may not mount one."""
    folder = tmp_path_factory.mktemp("shm")
    with mounted(folder, "-t", "tmpfs", "-o", f"size={2 * RING_MIB + 16}m", "tmpfs") as mount:
        yield mount or folder


@pytest.fixture(scope="module")
def lab(launch: Launch, nvtx_logger: Path, shm: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """Every step sampled, workers spawned, an NVTX tool attached, vLLM's profiler ready, both readers at work."""
    folder = tmp_path_factory.mktemp("survivor")
    with (
        launch(
            "survivor",
            extra_args=("--profiler-config", json.dumps({**PROFILER, "torch_profiler_dir": f"{folder}/traces"})),
            K25_INSTRUMENT="1",
            K25_SAMPLE_EVERY="1",
            K25_RING_DIR=str(shm / "rings"),
            VLLM_WORKER_MULTIPROC_METHOD="spawn",
            NVTX_INJECTION64_PATH=str(nvtx_logger),
            NVTX_LOG=str(folder / "nvtx"),
        ) as running,
        Lab(running) as made,
    ):
        running.client.complete_all(["warm"] * 4, concurrency=4)
        yield made


@pytest.mark.chaos
def test_an_exporter_that_comes_and_goes(lab: Lab) -> None:
    with lab.scenario("exporter") as (traffic, figures):
        for number in (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            status = lab.exporter.end(number)
            assert status == (0 if number in (signal.SIGTERM, signal.SIGINT) else -number)
            traffic.wait_for(2)
            lab.exporter = Exporter(lab.running.ring_dir)
            assert_exposition_is_sound(lab.scrape("exporter"))
    figures.check()
    # What it has not seen it knows all the same: the counters are in the rings.
    mine, vllms = (our_samples(lab.scrape(who)) for who in ("exporter", "vllm"))
    steps = [series for series in vllms if series[0] == "vllm_k25_steps_total"]
    assert steps
    assert [mine[series] for series in steps] == [vllms[series] for series in steps]


def test_a_full_tmpfs(lab: Lab, shm: Path) -> None:
    if not os.path.ismount(shm):
        pytest.skip("needs the right to mount a tmpfs")
    with lab.scenario("tmpfs_full") as (traffic, figures), filled(shm):
        assert os.statvfs(shm).f_bavail == 0
        traffic.wait_for(8)
    assert figures.lost_counted == 0, figures  # the rings' blocks were allocated at the start
    figures.check()


@pytest.mark.chaos
def test_rings_cut_short(lab: Lab) -> None:
    rng = random.Random(1)
    with lab.scenario("truncated") as (_, figures):
        for _ in range(TIMES):
            for ring in lab.rings:
                os.truncate(ring.path, rng.choice((0, 40, 300, 150_000, rng.randrange(ring.layout.file_bytes))))
            time.sleep(0.1)
    figures.check()
    assert all(ring.path.stat().st_size == ring.layout.file_bytes for ring in lab.rings)
    assert any("cut short" in line for line in lab.running.our_log())


@pytest.mark.chaos
def test_rings_overwritten(lab: Lab) -> None:
    rng = random.Random(2)
    with lab.scenario("corrupted") as (_, figures):
        for _ in range(TIMES):
            for ring in lab.rings:
                totals = 256 + 2 * 65_536  # the identity before them stays as it is: nothing would be left to read
                with ring.path.open("r+b") as file:
                    for at in (totals, rng.randrange(totals, ring.layout.file_bytes - 50_000)):
                        file.seek(at)
                        file.write(rng.randbytes(50_000) if rng.random() < 0.5 else b"\xff" * 50_000)
            time.sleep(0.1)
    figures.check()


@pytest.mark.chaos
def test_other_profilers(lab: Lab) -> None:
    with lab.scenario("profilers") as (traffic, figures):
        lab.post("/start_profile")
        traffic.wait_for(4)
        lab.post("/stop_profile")
    figures.check()
    assert figures.lost_counted == 0, figures


def test_deleted_rings(lab: Lab) -> None:
    with lab.scenario("deleted") as (traffic, figures):
        for ring in lab.rings:
            ring.path.unlink()
        traffic.wait_for(4)
    figures.check()  # whoever had them open still reads them
    assert not [series for series in our_samples(lab.scrape("exporter")) if series[0] == "vllm_k25_steps_total"]


def test_the_stopped_server_leaves_nothing(lab: Lab) -> None:
    assert lab.stop_server() == []
