"""What ends a server: the same requests are lost with the plugin and without, and no more is left behind."""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.chaos.figures import Figures
from tests.chaos.lab import leftovers
from tests.chaos.traffic import CLIENTS, Traffic
from tests.e2e.conftest import Launch, Running
from vllm_k25_instrument.instances import find_rings
from vllm_k25_instrument.model import LOST_REASONS
from vllm_k25_instrument.ring import open_rings

pytestmark = pytest.mark.chaos

GRACE_SECONDS = 30
PATIENCE = 20.0
"""vLLM, told to end, may leave its clients without an answer and their connections open."""


def kill_a_worker(running: Running) -> None:
    os.kill(running.server.worker_pids[1], signal.SIGKILL)


def signal_the_server(number: signal.Signals) -> Callable[[Running], None]:
    return lambda running: os.kill(running.server.pid, number)


ENDINGS: dict[str, Callable[[Running], None]] = {
    "worker_killed": kill_a_worker,
    "api_server_killed": signal_the_server(signal.SIGKILL),
    "sigterm": signal_the_server(signal.SIGTERM),
    "sigint": signal_the_server(signal.SIGINT),
    "sighup": signal_the_server(signal.SIGHUP),
}


class Ended:
    """One server, with traffic on it, brought to its end."""

    def __init__(self, running: Running, inject: Callable[[Running], None]) -> None:
        self.traffic = Traffic(running.server, tokens=200, patience=PATIENCE)
        with self.traffic:
            self.traffic.wait_for(CLIENTS)
            time.sleep(0.3)  # all of them in the middle of a stream
            self.left = leftovers(running, lambda: self._end(running, inject))

    def _end(self, running: Running, inject: Callable[[Running], None]) -> None:
        inject(running)
        self.traffic.wait_for_the_end()
        deadline = time.monotonic() + GRACE_SECONDS
        while running.server.running and time.monotonic() < deadline:
            time.sleep(0.1)
        assert running.server._process is not None
        self.exit_status = running.server._process.returncode


@pytest.mark.parametrize("ending", ENDINGS)
def test_an_end_is_the_same_with_and_without_us(ending: str, launch: Launch) -> None:
    inject = ENDINGS[ending]
    with launch(f"{ending}_off") as running:
        without = Ended(running, inject)
    with launch(f"{ending}_on", K25_INSTRUMENT="1", K25_SAMPLE_EVERY="1") as running:
        ours = Ended(running, inject)
    figures = Figures(
        ending,
        requests=len(ours.traffic.results),
        failed=ours.traffic.failed,
        failed_without_us=without.traffic.failed,
        leaks=sorted((Counter(map(_kind, ours.left)) - Counter(map(_kind, without.left))).elements()),
    )
    assert ours.exit_status == without.exit_status
    count_samples(figures, running.ring_dir)
    figures.check()


def _kind(what: str) -> str:
    """A leftover without what is random in its name: a process, /dev/shm/psm_, /dev/shm/sem."""
    return what[: len("/dev/shm/psm_")] if what.startswith("/") else "process"


def count_samples(figures: Figures, ring_dir: Path) -> None:
    """Of a dead server: the ring holds all sampled steps but those counted, and the one that was being written."""
    readers, errors = open_rings(find_rings(ring_dir))
    assert errors == []
    assert len(readers) == 2
    for reader in readers:
        assert not reader.alive
        samples = list(reader.samples())
        assert samples, (reader.written, reader.corrupted)
        steps = [sample.step for sample in samples]
        totals = reader.totals()
        counted = sum(totals.lost(reason) for reason in range(len(LOST_REASONS))) + reader.overwritten
        counted += reader.corrupted
        figures.samples += len(samples)
        figures.lost_counted += counted
        figures.lost_uncounted += abs(max(steps) + 1 - len(steps) - counted)
