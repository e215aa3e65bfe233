"""A real Prometheus scrapes a running exporter without a complaint, and ends up with the rings' own numbers."""

from __future__ import annotations

import subprocess
import threading
import urllib.parse
from pathlib import Path

import pytest
from prometheus_client import generate_latest

from tests.e2e.prometheus import eventually, get, program, running_prometheus
from tests.export_rings import EXPORT, STEP_NS, make_ring, split, touch_everything
from tests.exposition import assert_exposition_is_sound, our_samples
from vllm_k25_instrument.export.collector import RingCollector

RANKS = 2
WRITER_PERIOD = 0.005
SCRAPE_SECONDS = 1
DECODE, FULL = 0, 2


class SteadyServer:
    """The rings of a server that decodes at a steady pace."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.writers = [make_ring(folder, rank) for rank in range(RANKS)]
        for writer in self.writers:
            touch_everything(writer.totals)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._decode, daemon=True)
        self._thread.start()

    def _decode(self) -> None:
        while not self._stop.wait(WRITER_PERIOD):
            for writer in self.writers:
                writer.totals.add_step(DECODE, STEP_NS)
                writer.totals.add_sample(DECODE, FULL, 64, STEP_NS, split(STEP_NS))
                writer.totals.add_all_reduces(1, [78_000], [14_336])

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()

    def exposition(self) -> str:
        return generate_latest(RingCollector(lambda: self.folder)).decode()


@pytest.fixture
def server(tmp_path):
    running = SteadyServer(tmp_path / "rings" / "server")
    yield running
    running.stop()


@pytest.fixture
def exporter(server):
    process = subprocess.Popen([*EXPORT, str(server.folder.parent), "--port", "0"], stdout=subprocess.PIPE, text=True)
    yield process.stdout.readline().rpartition(" at ")[2].strip()
    process.terminate()
    assert process.wait(10) == 0


@pytest.fixture
def prometheus(tmp_path, exporter):
    config = {
        "global": {"scrape_interval": f"{SCRAPE_SECONDS}s", "scrape_timeout": f"{SCRAPE_SECONDS}s"},
        "scrape_configs": [
            {
                "job_name": "k25",
                "static_configs": [{"targets": [urllib.parse.urlsplit(exporter).netloc]}],
            }
        ],
    }
    with running_prometheus(config, tmp_path) as found:
        yield found


def test_prometheus_ends_up_with_the_numbers_of_the_rings(server, prometheus):
    eventually(lambda: (prometheus.target() or {}).get("health") == "up", "the target is up")
    eventually(lambda: prometheus.query('count_over_time(up{job="k25"}[1m]) >= 5'), "five scrapes")

    # While the server decodes, rates are those of its pace (the pace that the writer really kept, within the window).
    ((_, rate),) = prometheus.query('rate(vllm_k25_steps_total{rank="0",phase="decode"}[4s])')
    ((_, step_seconds),) = prometheus.query(
        'rate(vllm_k25_step_duration_seconds_sum{rank="0",phase="decode"}[4s])'
        ' / rate(vllm_k25_step_duration_seconds_count{rank="0",phase="decode"}[4s])'
    )
    assert 0.1 / WRITER_PERIOD < rate <= 1.1 / WRITER_PERIOD
    assert step_seconds == pytest.approx(STEP_NS / 1e9)

    server.stop()
    expected = our_samples(server.exposition())
    steps = expected["vllm_k25_steps_total", frozenset({("rank", "0"), ("phase", "decode")})]
    query = f'vllm_k25_steps_total{{rank="0",phase="decode"}} == {steps}'
    eventually(lambda: prometheus.query(query), "a scrape after the last step")
    stored = {
        (labels.pop("__name__"), frozenset(labels.items())): value
        for labels, value in prometheus.query('{__name__=~"vllm_k25_.*"}')
    }
    assert stored == expected

    target = prometheus.target()
    assert (target["health"], target["lastError"]) == ("up", "")
    assert prometheus.query('min_over_time(up{job="k25"}[1m])') == [({}, 1)]
    for trouble in ("sample_duplicate_timestamp", "sample_out_of_order", "sample_out_of_bounds"):
        assert f"\nprometheus_target_scrapes_{trouble}_total 0\n" in get(f"{prometheus.url}/metrics")


def test_promtool_has_no_complaint(server):
    promtool = program("promtool")
    server.stop()
    text = server.exposition()
    assert_exposition_is_sound(text)
    check = subprocess.run([promtool, "check", "metrics"], input=text, capture_output=True, text=True, check=False)
    assert (check.returncode, check.stdout + check.stderr) == (0, "")
