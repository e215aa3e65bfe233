"""What goes wrong inside the instrument, under the clock and on the disk of its rings; workers are forked."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean

import pytest

from tests.chaos.lab import Lab, filled, mounted
from tests.e2e.conftest import DATA, Launch
from vllm_k25_instrument.model import Category
from vllm_k25_instrument.recorder.step import OWN_COST_EVERY

pytestmark = pytest.mark.chaos

HOUR_NS = 3600 * 10**9
DISK_MIB = 112


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A small ext4 of its own, with less room than two rings want."""
    folder = tmp_path_factory.mktemp("disk")
    image = folder / "image"
    image.touch()
    os.truncate(image, DISK_MIB << 20)
    made = subprocess.run(["mkfs.ext4", "-q", str(image)], capture_output=True, check=False)
    if made.returncode:
        pytest.skip(f"needs mkfs.ext4: {made.stderr.decode().strip()}")
    with mounted(folder / "mount", "-o", "loop", str(image)) as mount:
        if mount is None:
            pytest.skip("needs the right to mount an image")
        yield mount


@pytest.fixture(scope="module")
def clock(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Holds the seconds by which the server's wall clock is wrong."""
    path = tmp_path_factory.mktemp("clock") / "seconds"
    path.write_text("0")
    return path


@pytest.fixture(scope="module")
def lab(launch: Launch, disk: Path, clock: Path) -> Iterator[Lab]:
    with (
        launch(
            "sabotaged",
            plugin_path=DATA / "chaos_plugin",
            K25_INSTRUMENT="1",
            K25_SAMPLE_EVERY="1",
            K25_RING_DIR=str(disk / "rings"),
            VLLM_WORKER_MULTIPROC_METHOD="fork",
            CHAOS_HOOKS="1",
            CHAOS_CLOCK=str(clock),
            CHAOS_RELOADS="600",
        ) as running,
        Lab(running) as made,
    ):
        yield made


def test_hooks_that_raise_recurse_and_sleep(lab: Lab) -> None:
    with lab.scenario("hooks") as (traffic, figures):
        traffic.wait_for(8)
    figures.check()
    for ring in lab.rings:
        assert ring.identity.hooks["all_reduce"] == "quiet"
        assert ring.identity.hooks["moe_experts"] == "quiet"
        assert ring.identity.hooks["mla_decode"] == "attached"  # slow is not broken
        samples = list(ring.samples())
        details = {r.detail for r in samples[-1].ranges if r.category is Category.MLA_ATTENTION}
        assert "slept" in details
        # Four layers slept for a millisecond; what we cost is shown, in the mean over steps that are timed in turn.
        assert fmean(sample.overhead_ns for sample in samples[-4 * OWN_COST_EVERY :]) >= 3_000_000


def test_a_plugin_that_is_loaded_again_and_again(lab: Lab) -> None:
    with lab.scenario("reload") as (traffic, figures):
        traffic.wait_for(8)
    figures.check()
    assert len(list(lab.running.ring_dir.glob("2*"))) == 1  # one instance
    for ring in lab.rings:
        last = list(ring.samples())[-1]
        assert sum(r.category is Category.SAMPLING for r in last.ranges) == 1  # and one wrapper


def _set(clock: Path, seconds: int) -> None:
    """At once: whoever looks at the clock must never find the file empty."""
    written = clock.with_suffix(".new")
    written.write_text(str(seconds))
    written.replace(clock)


def test_a_clock_that_is_set_back_and_forth(lab: Lab, clock: Path) -> None:
    with lab.scenario("clock") as (traffic, figures):
        began = time.monotonic_ns()
        first = [ring.written for ring in lab.rings]
        for hours in (5, -30, 2, 0):
            _set(clock, hours * 3600)
            traffic.wait_for(2)
        elapsed = time.monotonic_ns() - began
    figures.check()
    for ring, since in zip(lab.rings, first, strict=True):
        samples = list(ring.samples(since=since))
        starts = [sample.start_unix_ns for sample in samples]
        assert max(starts) - min(starts) > 34 * HOUR_NS  # it was really set
        assert sum(sample.duration_ns for sample in samples) < 2 * elapsed
        assert all(0 < sample.duration_ns < elapsed for sample in samples)
        assert all(abs(sample.gap_ns) < elapsed for sample in samples[1:])


def test_a_full_disk(lab: Lab, disk: Path) -> None:
    with lab.scenario("disk_full") as (traffic, figures), filled(disk):
        assert os.statvfs(disk).f_bavail == 0
        traffic.wait_for(8)
    assert figures.lost_counted == 0, figures
    figures.check()


def test_rings_that_cannot_be_written(lab: Lab) -> None:
    paths = [str(ring.path) for ring in lab.rings]
    with lab.scenario("read_only") as (traffic, figures):
        subprocess.run(["chattr", "+i", *paths], check=True)
        try:
            traffic.wait_for(8)
        finally:
            subprocess.run(["chattr", "-i", *paths], check=True)
    assert figures.lost_counted > 0, figures
    figures.check()
    errors = [line for line in lab.running.our_log() if "error in recorder" in line]
    assert len(errors) == len(paths)  # once per rank, not once per step


def test_the_stopped_server_leaves_nothing(lab: Lab) -> None:
    assert lab.stop_server() == []
