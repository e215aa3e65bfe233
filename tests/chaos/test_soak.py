"""Ten thousand steps: the workers' memory stays as it is without us, and every sample is there or counted."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from tests.chaos import processes
from tests.chaos.lab import Lab
from tests.chaos.traffic import Traffic
from tests.e2e.conftest import Launch, Running

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(3600)]

STEPS, CHECKPOINTS = 10_000, 5
GROWTH_MIB = 8
"""What a worker may have more at the end than after the first fifth, beyond what it has without us."""


def steps_of(running: Running) -> int:
    """Engine steps so far, by vLLM's own count."""
    text = running.client.get("/metrics")
    return sum(int(float(n)) for n in re.findall(r"^vllm:iteration_tokens_total_count{.*} (\S+)$", text, re.M))


def soak(running: Running, wait: Callable[[], None]) -> list[float]:
    """Resident memory of the largest worker (MiB) after each fifth of the steps."""
    began, memory = steps_of(running), []
    while len(memory) < CHECKPOINTS:
        wait()
        if steps_of(running) - began >= STEPS * (len(memory) + 1) // CHECKPOINTS:
            memory.append(max(map(processes.resident_mib, running.server.worker_pids)))
    return memory


def test_ten_thousand_steps(launch: Launch) -> None:
    with launch("soak_off") as off, Traffic(off.server, tokens=200) as plain:
        plain.wait_for(4)
        without = soak(off, lambda: plain.wait_for(1))
    assert plain.failed == 0
    settings = {"K25_INSTRUMENT": "1", "K25_SAMPLE_EVERY": "1", "K25_RING_SAMPLES": str(4 * STEPS)}
    with (
        launch("soak_on", **settings, K25_RING_BYTES=str(128 << 20)) as on,
        Lab(on) as lab,
        lab.scenario("soak") as (traffic, figures),
    ):
        memory = soak(on, lambda: traffic.wait_for(1))
    growth, plain_growth = memory[-1] - memory[0], without[-1] - without[0]
    figures.note = f"a worker's memory {growth:+.1f} MiB, {plain_growth:+.1f} MiB without the plugin"
    figures.check()
    assert growth <= max(plain_growth, 0) + GROWTH_MIB, (memory, without)
