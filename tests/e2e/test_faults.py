"""Whatever happens to the instrument, no request fails."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.conftest import DATA, PROMPTS, Launch, Running
from tests.exposition import assert_exposition_is_sound
from vllm_k25_instrument.model import Phase

pytestmark = pytest.mark.e2e


def serve_a_stream(running: Running) -> None:
    """Twenty requests, four at a time; a failed one raises."""
    assert len(running.client.complete_all([*PROMPTS] * 5, concurrency=4)) == 20


def test_hooks_that_raise_on_every_call_and_a_plugin_loaded_twice(launch: Launch) -> None:
    with launch("sabotaged", plugin_path=DATA / "fault_plugin", K25_INSTRUMENT="1", K25_SAMPLE_EVERY="1") as running:
        serve_a_stream(running)
        assert len(running.rings) == 2
        for ring in running.rings:
            # Steps and what needs no detail are still recorded; each broken hook says so, once.
            assert ring.identity.hooks["all_reduce"] == "quiet"
            assert ring.identity.hooks["step"] == "attached"
            samples = list(ring.samples())
            assert len(samples) > 20
            assert samples[-1].phase is Phase.DECODE
        text = running.client.get("/metrics")
        assert_exposition_is_sound(text)
        assert 'vllm_k25_hook_errors_total{hook="all_reduce",rank="0"} 1.0' in text
        errors = [line for line in running.our_log() if "ERROR" in line and "base_device_communicator" in line]
        assert len([line for line in errors if "all_reduce" in line]) == 2  # one line per rank


@pytest.fixture
def full_tmpfs(tmp_path: Path) -> Iterator[Path]:
    """A tmpfs without a byte to spare."""
    folder = tmp_path / "shm"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(folder)], capture_output=True, check=False
    )
    if mounted.returncode != 0:
        pytest.skip(f"needs the right to mount a tmpfs: {mounted.stderr.decode().strip()}")
    try:
        with (folder / "filler").open("wb") as filler:
            os.posix_fallocate(filler.fileno(), 0, 64 * 1024)
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_full_shared_memory_file_system(launch: Launch, full_tmpfs: Path) -> None:
    with launch("full", tensor_parallel_size=1, K25_INSTRUMENT="1", K25_RING_DIR=str(full_tmpfs / "rings")) as running:
        serve_a_stream(running)
        assert any("ring" in line and ("No space left" in line or "ENOSPC" in line) for line in running.our_log())


def test_an_unwritable_ring_directory_and_a_wrong_setting(launch: Launch, tmp_path: Path) -> None:
    blocked = tmp_path / "a_file"
    blocked.write_text("")
    with launch(
        "unwritable", tensor_parallel_size=1, K25_INSTRUMENT="1", K25_RING_DIR=str(blocked / "rings")
    ) as running:
        serve_a_stream(running)
        lines = [line for line in running.our_log() if "K25_RING_DIR" in line]
        assert lines
        assert str(blocked / "rings") in lines[0]


def test_several_api_servers_leave_the_metrics_to_the_exporter(launch: Launch) -> None:
    with launch(
        "api_servers", tensor_parallel_size=1, extra_args=("--api-server-count", "2"), K25_INSTRUMENT="1"
    ) as running:
        serve_a_stream(running)
        assert "vllm_k25_steps_total" not in running.client.get("/metrics")
        assert any("vllm-k25 export" in line for line in running.our_log())
        assert len(running.rings) == 1
        assert sum(running.rings[0].totals().steps(phase) for phase in range(3)) > 20


def test_the_compiled_model_with_opaque_operators_as_on_cuda(launch: Launch) -> None:
    with launch("compiled", eager=False, K25_INSTRUMENT="1", K25_SAMPLE_EVERY="1", K25_DEMO_OPAQUE_OPS="1") as running:
        serve_a_stream(running)
        for ring in running.rings:
            decode = [s for s in ring.samples() if s.phase is Phase.DECODE]
            assert len(decode) > 20
            for sample in decode:
                counts = {
                    c: sum(r.category == c for r in sample.ranges)
                    for c in ("all_reduce", "moe_experts", "mla_attention")
                }
                assert counts == {"all_reduce": 9, "moe_experts": 3, "mla_attention": 4}
