"""The Compose file is one, publishes on the loopback only, and lets the exporter read what the server writes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.deploy.deployments import DEPLOY, compose, default_of, environment, load, pinned_vllm

FOLDER = DEPLOY / "compose"
SERVERS = ("vllm-cpu", "vllm-gpu")


def services():
    return compose()["services"]


def mounts(service):
    """(source, target, read-only) of each volume of a service."""
    found = []
    for volume in service.get("volumes", []):
        source, target, *mode = volume.split(":")
        found.append((source, target, mode == ["ro"]))
    return found


@pytest.fixture
def check_schema(module):
    module("check_jsonschema", "check-jsonschema")
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec"]
    return lambda file: subprocess.run([*command, file], capture_output=True, text=True, check=False)


def test_the_file_follows_the_compose_specification(check_schema):
    result = check_schema(FOLDER / "compose.yml")
    assert result.returncode == 0, result.stdout


def test_the_specification_finds_a_word_that_is_none(tmp_path, check_schema):
    wrong = compose()
    wrong["services"]["exporter"]["comand"] = []
    file = tmp_path / "compose.yml"
    file.write_text(json.dumps(wrong))
    assert check_schema(file).returncode != 0


@pytest.mark.parametrize("profile", ["cpu", "gpu"])
def test_each_profile_has_a_server_and_all_that_shows_its_numbers(profile):
    chosen = {name for name, service in services().items() if profile in service["profiles"]}
    others = {"tiny-model"} if profile == "cpu" else set()
    assert chosen - others == {f"vllm-{profile}", "exporter", "prometheus", "grafana", "otel-collector"}


def test_every_port_is_published_on_the_loopback_only():
    published = [default_of(port) for service in services().values() for port in service.get("ports", [])]
    assert published
    assert all(port.startswith("127.0.0.1:") for port in published)


def test_the_exporter_and_the_collector_are_on_a_network_that_reaches_nothing_outside():
    assert compose()["networks"]["metrics"] == {"internal": True}
    for name in ("exporter", "otel-collector"):
        assert services()[name]["networks"] == ["metrics"]
        assert "ports" not in services()[name]


@pytest.mark.parametrize("name", SERVERS)
def test_the_exporter_reads_the_folder_that_the_server_writes_as_the_same_user(name):
    server, exporter = services()[name], services()["exporter"]
    assert environment(server)["K25_RING_DIR"] == environment(exporter)["K25_RING_DIR"]
    assert server["user"] == exporter["user"]
    assert ("rings", "/run/k25", False) in mounts(server)
    assert ("rings", "/run/k25", True) in mounts(exporter)


def test_the_rings_are_a_folder_in_a_tmpfs_that_belongs_to_the_servers_user():
    options = compose()["volumes"]["rings"]["driver_opts"]
    assert options["type"] == "tmpfs"
    assert {"mode=0700", "uid=2000", "gid=0"} <= set(options["o"].split(","))
    assert Path(environment(services()["exporter"])["K25_RING_DIR"]).parent == Path("/run/k25")


def test_the_tmpfs_holds_the_rings_of_a_living_and_a_dead_server_of_eight_ranks():
    from vllm_k25_instrument.ring import DEFAULT_BYTES

    (size,) = [o[5:-1] for o in compose()["volumes"]["rings"]["driver_opts"]["o"].split(",") if o.startswith("size=")]
    assert int(size) * 1024**2 > 2 * 8 * DEFAULT_BYTES


@pytest.mark.parametrize("name", SERVERS)
def test_the_server_has_the_plugin_on_and_leaves_the_metrics_to_the_exporter(name):
    variables = environment(services()[name])
    assert variables["K25_INSTRUMENT"] == "1"
    assert variables["K25_METRICS"] == "off"


def test_no_container_has_a_capability_but_the_cpu_server_the_one_for_binding_memory():
    for name, service in services().items():
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert service.get("cap_add", []) == (["SYS_NICE"] if name == "vllm-cpu" else []), name
        assert not service.get("privileged"), name


def test_every_image_has_a_version():
    for name, service in services().items():
        image = default_of(service["image"])
        tag = image.rpartition(":")[2]
        assert tag.strip("v")[0].isdigit(), f"{name}: {image}"


def test_every_image_is_named_without_the_host_of_a_registry():
    lines = (DEPLOY / "Dockerfile").read_text().splitlines()
    images = [line.partition("=")[2] for line in lines if line.startswith("ARG") and "_IMAGE=" in line]
    images += [default_of(service["image"]) for service in services().values()]
    for image in images:
        assert "." not in image.partition(":")[0], image


def test_the_images_of_vllm_are_of_the_version_that_the_tests_run_on():
    arguments = [services()[name]["build"]["args"]["VLLM_IMAGE"] for name in SERVERS]
    assert {default_of(argument).rpartition(":v")[2] for argument in arguments} == {pinned_vllm()}
    assert f"ARG VLLM_IMAGE=vllm/vllm-openai:v{pinned_vllm()}\n" in (DEPLOY / "Dockerfile").read_text()


def test_the_example_of_the_environment_shows_the_defaults():
    shown = dict(
        line.lstrip("#").split("=", 1) for line in (FOLDER / ".env.example").read_text().splitlines() if "=" in line
    )
    text = (FOLDER / "compose.yml").read_text()
    for name, value in shown.items():
        default = f"${{{name}:-{value}}}"
        assert default in text or f"${{{name}:?" in text, f"{name}={value}"


def test_every_file_that_is_mounted_is_there():
    for service in services().values():
        for source, _, _ in mounts(service):
            assert source in compose()["volumes"] or (FOLDER / source).exists(), source


def test_prometheus_has_the_jobs_of_the_example_with_the_containers_as_targets():
    ours = load(FOLDER / "prometheus.yml")
    example = load(DEPLOY / "prometheus" / "prometheus.yml")
    targets = [job.pop("static_configs")[0]["targets"] for job in ours["scrape_configs"]]
    for job in example["scrape_configs"]:
        job.pop("static_configs")
    assert ours == example
    assert targets == [["exporter:9425"], ["vllm:8000"]]
    for name in SERVERS:
        assert services()[name]["networks"]["metrics"]["aliases"] == ["vllm"]


def test_promtool_takes_the_configuration_of_prometheus(program, tmp_path):
    promtool = program("promtool", "Debian package: prometheus")
    for file in (FOLDER / "prometheus.yml", DEPLOY / "prometheus" / "rules.yml"):
        (tmp_path / file.name).write_text(file.read_text())
    result = subprocess.run(
        [promtool, "check", "config", tmp_path / "prometheus.yml"], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr


def test_grafana_gets_prometheus_and_the_folder_of_dashboards():
    (source,) = load(FOLDER / "grafana" / "datasources" / "prometheus.yml")["datasources"]
    assert source["url"] == "http://prometheus:9090"
    (provider,) = load(FOLDER / "grafana" / "providers" / "dashboards.yml")["providers"]
    where = {target: origin for origin, target, _ in mounts(services()["grafana"])}
    assert where[provider["options"]["path"]] == "../grafana/dashboards"


def test_the_exporter_pushes_to_the_collector_of_the_same_network(module, monkeypatch, tmp_path):
    module("opentelemetry.exporter.otlp.proto.grpc", "opentelemetry-exporter-otlp")
    from vllm_k25_instrument.export.otel.start import open_pusher

    exporter = services()["exporter"]
    variables = {name: value for name, value in environment(exporter).items() if name.startswith("OTEL_")}
    host, _, port = variables["OTEL_EXPORTER_OTLP_ENDPOINT"].removeprefix("http://").partition(":")
    collector = load(FOLDER / "otel-collector.yml")["receivers"]["otlp"]["protocols"]
    assert collector[variables["OTEL_EXPORTER_OTLP_PROTOCOL"]]["endpoint"] == f"0.0.0.0:{port}"
    assert set(services()[host]["networks"]) & set(exporter["networks"])
    assert exporter["command"] == ["--otlp"]
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    open_pusher(tmp_path)


def test_every_pipeline_of_the_collector_names_what_is_configured_and_limits_memory_first():
    config = load(FOLDER / "otel-collector.yml")
    for pipeline in config["service"]["pipelines"].values():
        assert pipeline["processors"][0] == "memory_limiter"
        for kind in ("receivers", "processors", "exporters"):
            assert set(pipeline[kind]) <= set(config[kind])


def test_the_tiny_model_is_made_where_the_server_looks_for_it(tmp_path):
    pytest.importorskip("safetensors.torch")
    (script,) = services()["tiny-model"]["command"]
    served = services()["vllm-cpu"]["command"][0]
    assert "vllm serve /models/tiny-kimi-k2.5" in served
    script = script.replace("/models/", f"{tmp_path}/")
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)
    assert json.loads((tmp_path / "tiny-kimi-k2.5" / "config.json").read_text())["architectures"] == [
        "KimiK25ForConditionalGeneration"
    ]


def test_the_cpu_server_finds_the_set_up_that_lets_it_serve_the_model():
    command = services()["vllm-cpu"]["command"][0].replace("$$", "$")
    prints = command.split("$(python3 -c '")[1].split("'")[0]
    result = subprocess.run([sys.executable, "-c", prints], capture_output=True, text=True, check=True)
    assert (Path(result.stdout.strip()) / "k25_demo_cpu_setup.py").exists()
