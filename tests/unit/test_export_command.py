"""`vllm-k25 export` serves the rings on a port, says in one line what is wrong, and ends when it is told to."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import urllib.error
import urllib.request
from contextlib import contextmanager

import pytest
import typer
from prometheus_client import generate_latest
from typer.testing import CliRunner

from tests.export_rings import EXPORT, STEP_NS, kill, make_ring, touch_everything
from tests.exposition import assert_exposition_is_sound, assert_openmetrics_is_sound, our_samples, value_of
from vllm_k25_instrument.commands.export import export
from vllm_k25_instrument.export.collector import RingCollector

app = typer.Typer()
app.command()(export)


def run(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def scrape(url, accept="text/plain"):
    request = urllib.request.Request(url, headers={"Accept": accept})
    with urllib.request.urlopen(request, timeout=10) as answer:
        return answer.read().decode()


@contextmanager
def exporter(*arguments, **environment):
    """The exporter as a process of its own; yields the process and the URL that it prints."""
    process = subprocess.Popen(
        [*EXPORT, *(str(argument) for argument in arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | environment,
    )
    try:
        yield process, process.stdout.readline().rpartition(" at ")[2].strip()
    finally:
        process.kill()
        process.wait()


def test_once_prints_the_whole_exposition(tmp_path):
    writers = [make_ring(tmp_path / "server", rank) for rank in range(2)]
    for writer in writers:
        touch_everything(writer.totals)
    result = run(tmp_path, "--once")
    assert result.exit_code == 0
    assert_exposition_is_sound(result.stdout)
    # The same as in vLLM's own /metrics, to the byte.
    assert result.stdout == generate_latest(RingCollector(lambda: tmp_path / "server")).decode()


def test_once_fails_where_there_are_no_rings(tmp_path):
    result = run(tmp_path, "--once")
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.count("\n") == 1
    assert f"{tmp_path}: no rings that can be read here" in result.stderr


def test_a_missing_directory_is_named(tmp_path):
    result = run(tmp_path / "rnigs")
    assert result.exit_code == 1
    assert result.stderr == f"{tmp_path / 'rnigs'}: no such file or directory\n"


@pytest.mark.parametrize("mode", [0o000, 0o400])
def test_a_directory_of_another_user_is_named(tmp_path, monkeypatch, mode):
    monkeypatch.setattr(os, "access", lambda path, wanted: mode & wanted << 6 == wanted << 6)  # root may read anything
    result = run(tmp_path)
    assert result.exit_code == 1
    assert result.stderr == f"{tmp_path}: permission denied; run the exporter as the user of the server\n"


def test_a_wrong_setting_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("K25_EXPORT_PORT", "metrics")
    result = run(tmp_path)
    assert result.exit_code == 1
    assert result.stderr.startswith("K25_EXPORT_PORT='metrics': ")
    assert result.stderr.count("\n") == 1


def test_an_instance_can_be_pinned_by_its_name(tmp_path):
    make_ring(tmp_path / "first").totals.add_step(0, STEP_NS)
    make_ring(tmp_path / "second")
    result = run(tmp_path, "--once", "--instance", "first")
    assert value_of(result.stdout, "vllm_k25_steps_total", rank="0", phase="decode") == 1


@pytest.mark.parametrize("name", ["third", "..", "../rings", "first/rank-00000.ring"])
def test_an_unknown_instance_is_answered_with_those_there_are(tmp_path, name):
    make_ring(tmp_path / "first")
    result = run(tmp_path, "--once", "--instance", name)
    assert result.exit_code == 1
    assert result.stderr == f"{tmp_path}: no instance '{name}' here (there are: first)\n"


@pytest.mark.parametrize(
    ("host", "reason"),
    [("192.0.2.1", "Cannot assign requested address"), ("no-such-host.invalid", "")],
)
def test_an_address_of_another_machine_is_one_clear_line(tmp_path, host, reason):
    result = run(tmp_path, "--host", host, "--port", "0")
    assert result.exit_code == 1
    assert result.stderr.startswith(f"cannot listen on {host}, port 0: {reason}")
    assert "--host or K25_EXPORT_HOST" in result.stderr
    assert result.stderr.count("\n") == 1


def test_a_busy_port_is_one_clear_line(tmp_path):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        result = run(tmp_path, "--port", port)
    assert result.exit_code == 1
    assert result.stderr == (
        f"cannot listen on 127.0.0.1, port {port}: Address already in use; is an exporter running already? "
        "Choose another port with --port or K25_EXPORT_PORT (0 picks a free one)\n"
    )
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == set()


@pytest.mark.parametrize("stop", [signal.SIGTERM, signal.SIGINT])
def test_a_running_exporter_follows_a_restart_and_stops_when_told(tmp_path, stop):
    writer = make_ring(tmp_path / "first")
    writer.totals.add_step(0, STEP_NS)
    with exporter(tmp_path, K25_EXPORT_PORT="0") as (process, url):
        assert url.startswith("http://127.0.0.1:")
        text = scrape(url)
        assert_exposition_is_sound(text)
        assert_openmetrics_is_sound(scrape(url, accept="application/openmetrics-text; version=1.0.0"))
        assert value_of(text, "vllm_k25_steps_total", rank="0", phase="decode") == 1

        kill(writer)
        make_ring(tmp_path / "second", model="another")
        assert {dict(labels)["model"] for name, labels in our_samples(scrape(url)) if "build" in name} == {"another"}

        process.send_signal(stop)
        assert process.wait(10) == 0
        assert process.stderr.read() == f"K25: reading {tmp_path / 'first'}\nK25: reading {tmp_path / 'second'}\n"


def test_an_exporter_may_start_before_the_first_server(tmp_path):
    rings = tmp_path / "rings"
    with exporter("--port", "0", K25_RING_DIR=str(rings)) as (_, url):
        assert our_samples(scrape(url)) == {}
        make_ring(rings / "server")
        assert our_samples(scrape(url)) != {}


def test_only_reading_is_offered(tmp_path):
    with exporter(tmp_path, "--port", "0") as (_, url), pytest.raises(urllib.error.HTTPError, match="405"):
        urllib.request.urlopen(url, data=b"x", timeout=10)
