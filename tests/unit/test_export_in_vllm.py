"""The metrics enter vLLM's own /metrics once, or say where they are to be had; the server goes on in any case."""

from __future__ import annotations

import subprocess
import sys

import prometheus_client
import pytest
from prometheus_client import CollectorRegistry, generate_latest

from tests.export_rings import make_ring
from tests.exposition import assert_exposition_is_sound, value_of
from vllm_k25_instrument.export import in_vllm
from vllm_k25_instrument.export.in_vllm import Registration, register_in_vllm
from vllm_k25_instrument.settings import Settings


@pytest.fixture(autouse=True)
def registry(monkeypatch):
    """A process that has just started: an empty default registry, nothing logged yet."""
    fresh = CollectorRegistry()
    monkeypatch.setattr(prometheus_client, "REGISTRY", fresh)
    monkeypatch.delenv("PROMETHEUS_MULTIPROC_DIR", raising=False)
    monkeypatch.setattr(in_vllm, "_logged_multiprocess", False)
    return fresh


def test_the_metrics_enter_the_default_registry(registry, tmp_path):
    make_ring(tmp_path).totals.add_step(0, 1)
    assert register_in_vllm(Settings(), tmp_path) == Registration.REGISTERED
    text = generate_latest(registry).decode()
    assert_exposition_is_sound(text)
    assert value_of(text, "vllm_k25_steps_total", rank="0", phase="decode") == 1


def test_a_second_registration_changes_nothing(registry, tmp_path):
    make_ring(tmp_path)
    register_in_vllm(Settings(), tmp_path)
    before = generate_latest(registry)
    assert register_in_vllm(Settings(), tmp_path) == Registration.ALREADY
    assert generate_latest(registry) == before


def test_a_missing_folder_is_an_empty_scrape(registry, tmp_path):
    assert register_in_vllm(Settings(), tmp_path / "gone") == Registration.REGISTERED
    assert_exposition_is_sound(generate_latest(registry).decode())


def test_several_api_servers_are_told_once_what_to_run(registry, tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))
    settings = Settings(ring_dir="/dev/shm/my rings")
    for _ in range(3):
        assert register_in_vllm(settings, tmp_path) == Registration.ELSEWHERE
    assert generate_latest(registry) == b""
    (record,) = caplog.records
    assert record.getMessage().endswith("vllm-k25 export '/dev/shm/my rings' --host 127.0.0.1 --port 9425")


def test_metrics_can_be_turned_off(registry, tmp_path):
    assert register_in_vllm(Settings(metrics="off"), tmp_path) == Registration.OFF
    assert generate_latest(registry) == b""


def test_a_registry_that_fails_does_not_stop_the_server(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(prometheus_client, "REGISTRY", None)
    assert register_in_vllm(Settings(), tmp_path) == Registration.FAILED
    assert "the server goes on without them" in caplog.text


def test_the_workers_path_does_not_import_the_metrics_library():
    script = "import sys, vllm_k25_instrument.export.in_vllm; sys.exit('prometheus_client' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
