"""`vllm-k25 export --otlp` pushes beside the Prometheus endpoint, and says in one line what is wrong."""

from __future__ import annotations

import os
import signal
import subprocess
import time
import urllib.request

import pytest
import typer
from typer.testing import CliRunner

from tests.export_rings import EXPORT, STEP_NS, kill, make_ring
from tests.exposition import value_of
from tests.otlp_receivers import RECEIVERS, attributes, free_port
from tests.samples import pack, run_python, wait_for
from vllm_k25_instrument.commands.export import export
from vllm_k25_instrument.export.otel.errors import OtlpError
from vllm_k25_instrument.export.otel.start import open_pusher
from vllm_k25_instrument.model import Category, GraphMode, Phase, Range, StepSample

app = typer.Typer()
app.command()(export)


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch):
    for name in [name for name in os.environ if name.startswith("OTEL_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "0.3")


def run(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def a_ring(folder, steps: int = 3):
    writer = make_ring(folder)
    for step in range(steps):
        writer.totals.add_step(0, STEP_NS)
        ranges = (Range(Category.SAMPLING, 5, 10),)
        writer.append(pack(StepSample(step, Phase.DECODE, 1, 1, 1, GraphMode.NONE, step + 1, 100, ranges), ("",)))
    return writer


@pytest.mark.parametrize("protocol", RECEIVERS)
def test_the_exporter_serves_and_pushes_until_it_is_told_to_end(tmp_path, protocol):
    writer = a_ring(tmp_path / "server")
    with RECEIVERS[protocol]() as receiver:
        environment = {
            "OTEL_EXPORTER_OTLP_PROTOCOL": protocol,
            "OTEL_EXPORTER_OTLP_ENDPOINT": receiver.endpoint,
            "OTEL_BSP_SCHEDULE_DELAY": "50",
            "OTEL_METRIC_EXPORT_INTERVAL": "50",
        }
        process = subprocess.Popen(
            [*EXPORT, str(tmp_path), "--port", "0", "--otlp"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | environment,
        )
        try:
            url = process.stdout.readline().rpartition(" at ")[2].strip()
            assert process.stdout.readline() == (
                f"pushing metrics by {protocol} to {receiver.endpoint}, spans by {protocol} to {receiver.endpoint}\n"
            )
            wait_for(lambda: bool(receiver.metrics))
            time.sleep(0.3)
            late = StepSample(99, Phase.DECODE, 1, 1, 1, GraphMode.NONE, 1_000, 100)
            writer.append(pack(late, ("",)))
            wait_for(lambda: bool(receiver.spans))
            with urllib.request.urlopen(url, timeout=10) as answer:
                text = answer.read().decode()
            process.send_signal(signal.SIGTERM)
            begin = time.monotonic()
            _, errors = process.communicate(timeout=10)
            assert time.monotonic() - begin < 5
        finally:
            process.kill()
            process.wait()
    assert process.returncode == 0
    assert value_of(text, "vllm_k25_otlp_sent_total", signal="spans") == 1
    assert [attributes(span)["vllm_k25.step"] for span, _ in receiver.spans] == [99]
    assert "spans: 1 sent, 0 dropped" in errors


def test_told_twice_it_still_ends_in_order(tmp_path):
    a_ring(tmp_path / "server")
    process = subprocess.Popen(
        [*EXPORT, str(tmp_path), "--port", "0", "--otlp"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{free_port()}"},
    )
    try:
        for _ in range(2):
            process.stdout.readline()
        for _ in range(3):
            process.send_signal(signal.SIGTERM)
            time.sleep(0.05)
        _, errors = process.communicate(timeout=20)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 0
    assert "K25: OTLP: metrics: 0 sent, " in errors


def test_the_rings_of_a_dead_server_can_be_pushed_once(tmp_path, monkeypatch):
    kill(a_ring(tmp_path / "server"))
    with RECEIVERS["grpc"]() as receiver:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.endpoint)
        result = run(tmp_path, "--otlp-ranges", "--once")
        assert (result.exit_code, result.output) == (0, "")
        assert [span.name for span, _ in receiver.spans] == ["decode step", "sampling"] * 3
        assert len(receiver.metrics) == 1


def test_once_fails_where_not_all_was_taken(tmp_path, monkeypatch):
    a_ring(tmp_path / "server")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{free_port()}")
    result = run(tmp_path, "--otlp", "--once")
    assert result.exit_code == 1
    assert f"{tmp_path}: not everything was pushed: metrics: 0 sent, " in result.stderr
    assert "spans: 0 sent, 3 dropped" in result.stderr


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("OTEL_EXPORTER_OTLP_PROTOCOL", "http/json", "must be one of: grpc, http/protobuf"),
        ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "udp", "must be one of: grpc, http/protobuf"),
        ("OTEL_METRICS_EXPORTER", "prometheus", "must be one of: otlp, console, none"),
        ("OTEL_BSP_SCHEDULE_DELAY", "soon", "must be a whole number above 0"),
        ("OTEL_METRIC_EXPORT_INTERVAL", "0", "must be a whole number above 0"),
        ("OTEL_EXPORTER_OTLP_METRICS_TEMPORALITY_PREFERENCE", "delta", "must be cumulative"),
    ],
)
def test_a_wrong_variable_is_named(tmp_path, monkeypatch, name, value, says):
    monkeypatch.setenv(name, value)
    result = run(tmp_path, "--otlp")
    assert result.exit_code == 1
    assert result.stderr.startswith(f"{name}={value!r}: {says}")
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize("name", ["OTEL_EXPORTER_OTLP_TIMEOUT", "OTEL_EXPORTER_OTLP_COMPRESSION"])
def test_a_variable_that_opentelemetry_refuses_is_one_line(tmp_path, monkeypatch, name):
    monkeypatch.setenv(name, "nonsense")
    result = run(tmp_path, "--otlp")
    assert result.exit_code == 1
    assert result.stderr.startswith("OTEL_EXPORTER_OTLP_*: ")
    assert result.stderr.count("\n") == 1


def test_missing_packages_are_named_with_the_extra_that_brings_them(tmp_path):
    code = """
import sys
sys.modules["opentelemetry.sdk"] = None
from vllm_k25_instrument.commands.export import export
import typer
typer.run(export)
"""
    result = run_python(code, tmp_path, "--otlp")
    assert result.returncode == 1
    assert result.stderr.startswith("OTLP needs the OpenTelemetry packages (no module opentelemetry.sdk")
    assert result.stderr.endswith("pip install 'vllm-k25-instrument[otel]'\n")
    assert result.stderr.count("\n") == 1


def test_opentelemetry_is_imported_when_it_is_asked_for_and_not_before(tmp_path):
    code = """
import sys
from vllm_k25_instrument.export.otel.start import open_pusher
from vllm_k25_instrument.export.server import exposition_of
from vllm_k25_instrument.commands.export import export
assert not [name for name in sys.modules if name.partition(".")[0] in ("opentelemetry", "grpc")]
"""
    assert run_python(code).stderr == ""


def test_http_needs_no_grpc(tmp_path):
    code = """
import sys
from pathlib import Path
sys.modules["grpc"] = None
from vllm_k25_instrument.export.otel.start import open_pusher
open_pusher(Path(sys.argv[1]))
"""
    assert run_python(code, tmp_path, OTEL_EXPORTER_OTLP_PROTOCOL="http/protobuf").returncode == 0


def test_a_disabled_sdk_pushes_nothing(tmp_path, monkeypatch):
    a_ring(tmp_path / "server")
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    pusher = open_pusher(tmp_path, history=True)
    assert pusher.destination.startswith("nothing")
    assert not pusher.push_once()
    pusher.close()


def test_a_password_in_the_endpoint_is_not_shown(tmp_path, monkeypatch):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://user:secret@collector:4318")
    pusher = open_pusher(tmp_path)
    pusher.close()
    assert "metrics by http/protobuf to http://collector:4318" in pusher.destination


def test_an_error_of_our_own_is_not_taken_for_a_missing_package(tmp_path, monkeypatch):
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "zipkin")
    with pytest.raises(OtlpError, match="OTEL_TRACES_EXPORTER='zipkin'"):
        open_pusher(tmp_path)
