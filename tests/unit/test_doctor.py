"""What `vllm-k25 doctor` finds, and when it says that something cannot work."""

from __future__ import annotations

import json
import os
import socket
import stat
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import typer
from typer.testing import CliRunner

from tests.export_rings import kill, make_ring
from vllm_k25_instrument import doctor as module
from vllm_k25_instrument.commands.doctor import doctor
from vllm_k25_instrument.doctor import Verdict, examine
from vllm_k25_instrument.hooks.point import HookKind, HookPoint
from vllm_k25_instrument.hooks.resolve import installed_vllm

pytestmark = pytest.mark.skipif(installed_vllm() is None, reason="vLLM is not installed here")

app = typer.Typer()
app.command()(doctor)


@pytest.fixture(autouse=True)
def environment(monkeypatch, tmp_path):
    """The plugin on, a ring directory and a port of the test's own, nothing else set."""
    for name in list(os.environ):
        if name.startswith(("K25_", "VLLM_PLUGINS", "PROMETHEUS_MULTIPROC_DIR", "NVTX_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("K25_INSTRUMENT", "1")
    monkeypatch.setenv("K25_RING_DIR", str(tmp_path / "rings"))
    monkeypatch.setenv("K25_EXPORT_PORT", "0")


def run(*arguments):
    """Exit code and findings of the command, as JSON."""
    result = CliRunner().invoke(app, ["--json", *arguments])
    return result.exit_code, json.loads(result.stdout)


def found(check, verdict=None):
    return [f for f in examine() if f.check == check and verdict in (None, f.verdict)]


def only(check, verdict):
    (finding,) = found(check, verdict)
    return finding


def test_where_all_is_well_nothing_is_wrong_and_the_exit_code_is_0():
    code, findings = run()
    assert code == 0
    assert {f["verdict"] for f in findings} <= {"ok", "note"}
    assert {f["check"] for f in findings} >= {
        "settings",
        "version",
        "plugin",
        "hooks",
        "nvtx",
        "rings",
        "metrics",
        "export",
    }
    for finding in findings:
        assert set(finding) == {"check", "verdict", "message", "remedy"}
        assert finding["message"]


def test_the_table_shows_what_the_json_does():
    result = CliRunner().invoke(app, [], env={"COLUMNS": "200"})
    assert result.exit_code == 0
    for check in ("settings", "version", "plugin", "hooks", "rings", "export"):
        assert check in result.stdout


def test_looking_leaves_nothing_behind(tmp_path):
    examine()
    assert os.listdir(tmp_path) == []
    (tmp_path / "rings").mkdir(mode=0o700)
    examine()
    assert os.listdir(tmp_path / "rings") == []


# --- settings ----------------------------------------------------------------------------------------------


def test_off_is_worth_knowing_and_no_failure(monkeypatch):
    monkeypatch.delenv("K25_INSTRUMENT")
    code, findings = run()
    assert code == 0
    assert findings[0]["verdict"] == "note"
    assert "K25_INSTRUMENT is not 1" in findings[0]["message"]


def test_a_wrong_setting_is_a_failure_and_versions_and_hooks_are_still_looked_at(monkeypatch):
    monkeypatch.setenv("K25_SAMPLE_EVERY", "often")
    code, findings = run()
    assert code == 1
    assert findings[0] == {
        "check": "settings",
        "verdict": "failure",
        "message": "K25_SAMPLE_EVERY='often': must be a whole number from 1 to 1000000",
        "remedy": "correct or unset the variable",
    }
    assert {f["check"] for f in findings} == {"settings", "version", "hooks"}


@pytest.mark.parametrize("also_wrong", [False, True])
def test_an_unknown_variable_is_a_warning(monkeypatch, also_wrong):
    monkeypatch.setenv("K25_SAMPLE_EVRY", "4")
    if also_wrong:
        monkeypatch.setenv("K25_METRICS", "?")
    finding = only("settings", Verdict.WARNING)
    assert finding.message == "K25_SAMPLE_EVRY is not a setting and is ignored"
    assert finding.remedy == "did you mean K25_SAMPLE_EVERY?"
    assert run()[0] == (1 if also_wrong else 0)


# --- vLLM --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("allowed", ["", "another", "another,vllm_k25", " vllm_k25_instrument"])
def test_vllm_plugins_that_leaves_us_out_is_a_failure(monkeypatch, allowed):
    monkeypatch.setenv("VLLM_PLUGINS", allowed)
    assert f"VLLM_PLUGINS={allowed} keeps the plugin out" in only("plugin", Verdict.FAILURE).message
    assert run()[0] == 1


def test_vllm_plugins_that_leaves_us_out_is_well_where_the_source_is_patched(monkeypatch):
    monkeypatch.setenv("VLLM_PLUGINS", "")
    monkeypatch.setattr("vllm_k25_instrument.doctor.is_patched", lambda root: True)
    assert "vLLM's source is patched" in only("plugin", Verdict.OK).message


def test_vllm_plugins_that_names_us_is_well(monkeypatch):
    monkeypatch.setenv("VLLM_PLUGINS", "another,vllm_k25_instrument")
    assert only("plugin", Verdict.OK)


def test_a_package_without_its_entry_point_is_a_failure(monkeypatch):
    monkeypatch.setattr(module, "entry_points", lambda group: [])
    assert "no entry point in vllm.general_plugins" in only("plugin", Verdict.FAILURE).message
    assert run()[0] == 1


def test_an_environment_without_vllm_is_a_failure(monkeypatch):
    monkeypatch.setattr(module, "installed_vllm", lambda: None)
    assert f"no vLLM in {sys.prefix}" in only("version", Verdict.FAILURE).message
    assert run()[0] == 1


@pytest.mark.parametrize(
    ("version", "verdict"),
    [("0.32.0", "ok"), ("0.20.1", "note"), ("0.14.0", "warning"), ("1.5", "warning"), ("", "warning")],
)
def test_how_well_a_version_is_known_is_said(monkeypatch, version, verdict):
    monkeypatch.setattr(module, "_vllm_version", lambda: version)
    assert verdict in [f.verdict for f in found("version") if "vLLM" in f.message]


def point(target, name="moe_routing", kind=HookKind.LAYER, path="vllm.v1.worker.worker_base"):
    return HookPoint(name, kind, path, target)


def test_a_target_that_is_gone_is_a_warning_that_names_it(monkeypatch):
    gone = point("WorkerBase.no_such_method")
    monkeypatch.setattr(module, "HOOK_TABLE", (*module.HOOK_TABLE, gone))
    finding = only("hooks", Verdict.WARNING)
    assert "moe_routing: vllm.v1.worker.worker_base:WorkerBase.no_such_method is not in vLLM" in finding.message
    assert "unattributed" in finding.remedy
    total = sum(module.exists_in(p, module._vllm_version()) for p in module.HOOK_TABLE)
    assert f"{total - 1} of {total} hook points resolve" in only("hooks", Verdict.NOTE).message
    assert run()[0] == 0


@pytest.mark.parametrize("path", ["vllm.no_such_module", "vllm.v1.worker.worker_base"])
def test_without_any_model_runner_nothing_can_be_recorded(monkeypatch, path):
    monkeypatch.setattr(module, "HOOK_TABLE", (point("NoRunner.execute_model", "step", HookKind.STEP, path),))
    assert only("hooks", Verdict.FAILURE).message == "no model runner to hook: nothing can be recorded"
    assert run()[0] == 1


@pytest.fixture
def unknown_vllm(tmp_path):
    """A copy of the installed vLLM's sources that says it is a later release, and has renamed a method."""
    root = tmp_path / "vllm"
    for point in module.HOOK_TABLE:
        relative = Path(*point.module.split(".")[1:]).with_suffix(".py")
        source = installed_vllm() / relative
        if source.is_file():
            (root / relative).parent.mkdir(parents=True, exist_ok=True)
            (root / relative).write_text(source.read_text().replace("def forward_mqa(", "def forward_latent("))
    (root / "__init__.py").write_text("raise RuntimeError('it is not to be imported')\n")
    (root / "_version.py").write_text("__version__ = version = '9.9.0'\n")
    return root


def test_of_a_release_that_nobody_knows_it_names_the_hooks_that_resolve_and_those_that_do_not(unknown_vllm):
    code, findings = run("--vllm", str(unknown_vllm))
    assert code == 0
    version, *hooks = findings
    assert version["verdict"] == "warning"
    assert "vLLM 9.9.0 is not known" in version["message"]
    assert "used all the same" in version["remedy"]
    missing = [finding["message"] for finding in hooks if finding["verdict"] == "warning"]
    assert missing == ["mla_decode: vllm.v1.attention.backend:MLAAttentionImpl.forward_mqa is not in vLLM 9.9.0"]
    (summary,) = [finding["message"] for finding in hooks if finding["verdict"] == "note"]
    assert "nothing is missing of step, step_sampling, " in summary
    assert "mla_prefill" in summary
    assert "mla_decode" not in summary


def test_a_folder_without_a_vllm_is_a_failure(tmp_path):
    code, findings = run("--vllm", str(tmp_path))
    assert code == 1
    assert f"{tmp_path} is no vLLM package" in findings[0]["message"]


def test_a_target_of_another_version_is_counted_and_not_missed(monkeypatch):
    old = HookPoint("layer", HookKind.LAYER, "vllm.nowhere", "f", versions="<0.2")
    monkeypatch.setattr(module, "HOOK_TABLE", (*module.HOOK_TABLE, old))
    assert "are of other versions" in only("hooks", Verdict.OK).message


# --- rings -------------------------------------------------------------------------------------------------


def test_a_directory_that_can_be_used_is_said_to_have_room_for_so_many_ranks():
    assert "room for" in only("rings", Verdict.OK).message


def unusable(tmp_path):
    (tmp_path / "file").write_text("a file")
    (tmp_path / "link").symlink_to(tmp_path)
    (tmp_path / "dangling").symlink_to("nowhere")
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared").chmod(0o1777)
    return tmp_path


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("file", "File exists"),
        ("file/below", "Not a directory"),
        ("link", "symbolic link"),
        ("dangling", "File exists"),
        ("shared", "there for everybody"),
        ("/proc/k25", "No such file"),
        ("/sys/k25/rings", "not permitted"),
    ],
)
def test_a_directory_that_cannot_be_used_is_a_failure_with_the_reason(monkeypatch, tmp_path, path, reason):
    monkeypatch.setenv("K25_RING_DIR", str(unusable(tmp_path) / path))
    finding = only("rings", Verdict.FAILURE)
    assert reason in finding.message or (path.startswith("/sys") and "Read-only" in finding.message)
    assert "K25_RING_DIR" in finding.remedy
    assert run()[0] == 1


def test_a_shared_directory_is_left_as_it_is(monkeypatch, tmp_path):
    monkeypatch.setenv("K25_RING_DIR", str(unusable(tmp_path) / "shared"))
    examine()
    assert stat.S_IMODE((tmp_path / "shared").stat().st_mode) == 0o1777


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a directory away")
def test_a_directory_of_somebody_else_is_a_failure(tmp_path):
    (tmp_path / "rings").mkdir()
    os.chown(tmp_path / "rings", 65_534, 65_534)
    assert "belongs to user 65534" in only("rings", Verdict.FAILURE).message


@pytest.mark.skipif(os.getuid() == 0, reason="root may write anywhere")
def test_a_directory_without_permission_is_a_failure(tmp_path):
    (tmp_path / "rings").mkdir(mode=0o500)
    assert "Permission denied" in only("rings", Verdict.FAILURE).message


def test_a_file_system_that_forgets_locks_is_a_failure(monkeypatch):
    monkeypatch.setattr(module, "is_held", lambda path: False)
    assert "forgets locks" in only("rings", Verdict.FAILURE).message


def test_too_little_room_is_a_warning(monkeypatch):
    monkeypatch.setattr(module.shutil, "disk_usage", lambda path: SimpleNamespace(free=1_000))
    finding = only("rings", Verdict.WARNING)
    assert "1,000 bytes free" in finding.message
    assert "K25_RING_BYTES" in finding.remedy
    assert run()[0] == 0


def test_a_network_volume_is_a_warning(monkeypatch):
    monkeypatch.setattr(module, "_file_system", lambda path: "nfs4")
    assert "is on nfs4: network volumes stall writers" in only("rings", Verdict.WARNING).message


def test_running_and_ended_servers_are_named(tmp_path):
    running = make_ring(tmp_path / "rings" / "running")
    kill(make_ring(tmp_path / "rings" / "ended"))
    (tmp_path / "rings").chmod(0o700)
    finding = only("rings", Verdict.NOTE)
    assert "1 instrumented server running, 1 ended" in finding.message
    assert running.path.parent.name in finding.message


# --- ports and metrics ---------------------------------------------------------------------------------------


def test_what_no_hook_times_is_named_of_any_model_and_of_those_served_here(tmp_path):
    (general,) = found("coverage")
    assert (general.verdict, "dense MLPs" in general.message) == (Verdict.NOTE, True)
    ring = make_ring(tmp_path / "rings" / "20250101T000000-1", 0, layers={"attention": 8, "MambaMixer2": 24})
    _, served = found("coverage")
    assert served.verdict is Verdict.WARNING
    assert "no hook for 24 MambaMixer2 layers of a rank (timed: 8 attention)" in served.message
    ring.set_identity(replace(ring.identity, layers={"mla_attention": 61, "moe": 60}))
    _, served = found("coverage")
    assert (served.verdict, served.message) == (
        Verdict.OK,
        "20250101T000000-1: layers of a rank, all timed: 61 mla_attention, 60 moe",
    )


def test_a_busy_port_is_a_warning_that_names_the_remedy(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        monkeypatch.setenv("K25_EXPORT_PORT", str(port))
        finding = only("export", Verdict.WARNING)
        code, _ = run()
    assert f"127.0.0.1:{port}: Address already in use" in finding.message
    assert "K25_EXPORT_PORT" in finding.remedy
    assert code == 0
    assert only("export", Verdict.OK)


@pytest.mark.parametrize("host", ["192.0.2.1", "no-such-host.invalid", "::2"])
def test_an_address_that_is_not_this_machine_s_is_a_warning(monkeypatch, host):
    monkeypatch.setenv("K25_EXPORT_HOST", host)
    assert only("export", Verdict.WARNING)


def test_several_api_servers_mean_the_metrics_are_elsewhere(monkeypatch, tmp_path):
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))
    assert "vllm-k25 export" in only("metrics", Verdict.WARNING).remedy


def test_metrics_that_are_off_are_worth_knowing(monkeypatch):
    monkeypatch.setenv("K25_METRICS", "off")
    assert only("metrics", Verdict.NOTE)


def test_an_nvtx_tool_that_is_named_and_not_there_is_a_warning(monkeypatch):
    monkeypatch.setenv("NVTX_INJECTION64_PATH", "/nowhere/lib.so")
    assert "/nowhere/lib.so is set, but no tool is attached" in only("nvtx", Verdict.WARNING).message


def test_a_check_that_breaks_is_a_failure_of_its_own_and_the_others_go_on(monkeypatch):
    def broken():
        raise RuntimeError("unheard of")

    monkeypatch.setattr(module, "_plugin_entry", broken)
    assert only("doctor", Verdict.FAILURE).message == "a check broke: RuntimeError: unheard of"
    assert found("export")
