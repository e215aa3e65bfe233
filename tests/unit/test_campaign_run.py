"""The campaign as a new user meets it: what is not there, goes away or fills up is one line, and nothing is lost."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

pytest.importorskip("httpx")

from tests.completions import Completions
from tests.samples import wait_for
from vllm_k25_instrument.campaign.manifest import State, read_manifest
from vllm_k25_instrument.cli import app
from vllm_k25_instrument.demo.server import free_port

runner = CliRunner()
CASES = Path(__file__).parents[1] / "data" / "cases"
COMMAND = (sys.executable, "-c", "from vllm_k25_instrument.cli import app; app()", "campaign", "run")
SHORT = (
    *("--client", "openai", "--no-micro", "--requests-per-client", "1"),
    *("--input-tokens", "4", "--output-tokens", "8"),
)


@pytest.fixture(autouse=True)
def _no_rings_of_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("K25_RING_DIR", str(tmp_path / "rings"))


def run(out: Path, *options: str) -> Result:
    return runner.invoke(app, ["campaign", "run", "--out", str(out), *options])


def start(server: Completions, out: Path, *more: str, concurrency: str = "1,2") -> Result:
    return run(out, "--url", server.url, "--model", server.model, "--concurrency", concurrency, *SHORT, *more)


def states(out: Path) -> dict[str, str]:
    return {record.name: str(record.state) for record in read_manifest(out).steps}


def document(out: Path) -> dict[str, Any]:
    return json.loads((out / "report.json").read_text())


def test_a_server_without_the_plugin_gives_client_figures_with_intervals(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with Completions() as server:
        outcome = start(server, out)
    assert outcome.exit_code == 0, outcome.output
    found = document(out)
    assert found["complete"]
    for column in found["concurrency"]:
        assert column["tpot_ns"]["windows"] == 3
        assert column["tpot_ns"]["mean"] > 1e6  # the stand-in sleeps 2 ms a token
        assert column["tpot_ns"]["low"] < column["tpot_ns"]["mean"]
        assert column["components"] == {}
    assert "K25_INSTRUMENT=1" in outcome.stderr
    for answer in found["answers"]:
        assert answer["verdict"] == "unknown"
        assert answer["needs"]


def test_what_is_not_to_be_had_is_said_with_the_remedy_and_is_no_failure(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with Completions() as server:
        outcome = start(server, out, concurrency="1")
    assert states(out)["profile at concurrency 1"] == State.NOT_POSSIBLE
    assert states(out)["nsys"] == State.NOT_POSSIBLE
    text = " ".join(outcome.output.split())
    assert "the server has no profiler configured (/start_profile answers 404)" in text
    assert "--profiler-config" in text
    assert "deploy/nsys.sh" in text
    assert outcome.exit_code == 0


def test_an_nsys_export_is_added_to_a_campaign_that_is_done_and_the_server_gone(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with Completions() as server:
        assert start(server, out, "--windows", "1", concurrency="1").exit_code == 0
    outcome = run(out, "--resume", "--nsys-export", str(CASES / "20-graph-level-tracing/absent.sqlite"))
    assert outcome.exit_code == 3
    assert "missing: nsys: " in outcome.stderr
    assert "does not exist" in outcome.stderr
    outcome = run(out, "--resume", "--nsys-export", str(CASES / "23-nvtx-text-or-textid/mixed.sqlite"))
    assert outcome.exit_code == 0, outcome.output
    found = document(out)
    assert found["nsys"]["source"] == "nsys"
    assert found["nsys"]["steps"] == 1
    assert 2 <= found["nsys"]["batch"] <= 4
    assert {name: one["share_of_sum"] for name, one in found["nsys"]["categories"].items()} == {
        "moe_experts": 0.5,
        "attention": 0.5,
    }
    assert "Kernels of a decode step, nsys" in outcome.stdout


def test_no_server(tmp_path: Path) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    outcome = run(tmp_path / "out", "--url", url, "--model", "m", *SHORT)
    assert outcome.exit_code == 2
    assert f"no server at {url} (Connection refused): start `vllm serve`" in outcome.stderr
    assert len(outcome.stderr.splitlines()) == 1
    assert not (tmp_path / "out").exists()


def test_a_model_that_is_not_served(tmp_path: Path) -> None:
    with Completions("kimi") as server:
        outcome = run(tmp_path / "out", "--url", server.url, "--model", "kimmi", *SHORT)
    assert outcome.exit_code == 2
    assert "--model kimmi: the server has no such model; it serves kimi" in outcome.stderr
    assert not (tmp_path / "out").exists()


def test_a_server_that_asks_for_a_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out"
    with Completions(key="let-me-in") as server:
        monkeypatch.delenv("OPENAI_API_KEY", raising=False)
        outcome = start(server, out, "--windows", "1", concurrency="1")
        assert outcome.exit_code == 2
        assert "set OPENAI_API_KEY" in outcome.stderr
        monkeypatch.setenv("OPENAI_API_KEY", "let-me-in")
        assert start(server, out, "--windows", "1", concurrency="1").exit_code == 0
    assert not [path for path in out.rglob("*") if path.is_file() and b"let-me-in" in path.read_bytes()]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--url", "http://127.0.0.1:1"), "--url and --model are needed"),
        (("--url", "ftp://there", "--model", "m"), "not a URL such as"),
        (("--url", "http://127.0.0.1:1", "--model", "m", "--concurrency", "1,x"), "--concurrency 1,x: numbers"),
        (("--resume",), "no campaign here"),
    ],
)
def test_wrong_usage_is_one_line(tmp_path: Path, options: tuple[str, ...], said: str) -> None:
    outcome = run(tmp_path / "out", *options)
    assert outcome.exit_code == 2
    assert said in outcome.stderr
    assert len(outcome.stderr.splitlines()) == 1


def test_more_tokens_than_the_server_takes(tmp_path: Path) -> None:
    with Completions() as server:
        outcome = run(tmp_path / "out", "--url", server.url, "--model", "standin", "--output-tokens", "1024")
    assert outcome.exit_code == 2
    assert "more than the server's 1024" in outcome.stderr


def test_a_campaign_is_not_written_over(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with Completions() as server:
        assert start(server, out, "--windows", "1", concurrency="1").exit_code == 0
        outcome = start(server, out)
    assert outcome.exit_code == 2
    assert "--resume goes on with it" in outcome.stderr


def test_a_server_that_dies_costs_the_windows_after_it_and_resume_makes_up_for_them(tmp_path: Path) -> None:
    out = tmp_path / "out"
    port = free_port()
    # Three rounds or more of warm-up and a window at 1, then it dies somewhere in what follows.
    with Completions(port=port, dies_after=14) as server:
        outcome = start(server, out, "--windows", "4")
    assert outcome.exit_code == 3, outcome.output
    before = states(out)
    assert before["window 1 at concurrency 1"] == State.DONE
    failed = [name for name, state in before.items() if state == State.FAILED]
    assert "window 4 at concurrency 2" in failed
    report = " ".join((out / "report.md").read_text().split())
    assert "window 4 at concurrency 2: not measured: the server was gone" in report
    assert not document(out)["complete"]
    kept = (out / "windows/c00001/w1/client.json").read_bytes()
    with Completions(port=port):
        outcome = run(out, "--resume")
    assert outcome.exit_code == 0, outcome.output
    assert State.FAILED not in states(out).values()
    assert (out / "windows/c00001/w1/client.json").read_bytes() == kept
    assert len(read_manifest(out).command_lines) == 2
    assert not list(out.rglob("*.partial"))


def test_nothing_measured_is_an_exit_code_of_its_own(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with Completions(dies_after=1) as server:
        outcome = start(server, out)
    assert outcome.exit_code == 1
    assert "nothing could be measured: " in outcome.stderr


def test_killed_in_the_middle_and_gone_on_with(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with Completions() as server:
        arguments = ["--out", str(out), "--url", server.url, "--model", server.model, "--concurrency", "1", *SHORT]
        process = subprocess.Popen(
            [*COMMAND, *arguments, "--windows", "40"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        wait_for(lambda: (out / "windows/c00001/w3").is_dir(), 60)
        process.send_signal(signal.SIGKILL)
        process.wait()
        before = states(out)
        assert State.RUNNING in before.values() or State.PENDING in before.values()
        done = {path.name: path.stat().st_mtime_ns for path in (out / "windows/c00001").glob("w*[0-9]")}
        outcome = run(out, "--resume")
    assert outcome.exit_code == 0, outcome.output
    assert document(out)["concurrency"][0]["tpot_ns"]["windows"] == 40
    for name, modified in done.items():
        if before[f"window {name[1:]} at concurrency 1"] == State.DONE:
            assert (out / "windows/c00001" / name).stat().st_mtime_ns == modified
    assert not list(out.rglob("*.partial"))


def test_a_terminated_campaign_says_how_to_go_on(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with Completions() as server:
        arguments = ["--out", str(out), "--url", server.url, "--model", server.model, "--concurrency", "1", *SHORT]
        process = subprocess.Popen([*COMMAND, *arguments, "--windows", "100"], stderr=subprocess.PIPE, text=True)
        wait_for(lambda: (out / "windows/c00001/w1").is_dir(), 60)
        process.terminate()
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "interrupted; go on with --resume" in errors
    assert (out / "report.md").is_file()


def test_more_concurrency_than_the_server_runs_is_said(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with Completions(max_running=2) as server:
        outcome = start(server, out, "--windows", "1", "--requests-per-client", "2", concurrency="1,16")
    assert outcome.exit_code == 0, outcome.output
    reached = {column["concurrency"]: column["reached"] for column in document(out)["concurrency"]}
    assert reached == {1: True, 16: False}
    (note,) = [note for note in document(out)["notes"] if "16 was not reached" in note]
    assert "--max-num-seqs" in note


def _in_a_small_file_system(folder: Path, kilobytes: int, command: list[str]) -> subprocess.CompletedProcess[str]:
    """Run `command` where `folder` is a file system of this size. Skips where this user may not mount one."""
    mount = f"mount -t tmpfs -o size={kilobytes}k tmpfs {folder}"
    unshare = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c"]
    if shutil.which("unshare") is None or subprocess.run([*unshare, mount], capture_output=True).returncode:
        pytest.skip("no mount namespaces here")
    return subprocess.run(
        [*unshare, f'{mount} && "$@"; code=$?; cp -r {folder}/. {folder}.kept; exit $code', "sh", *command],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"PYTHONDONTWRITEBYTECODE": "1"},
    )


def test_a_full_disk_keeps_what_was_measured_and_the_manifest_that_says_so(tmp_path: Path) -> None:
    small = tmp_path / "small"
    small.mkdir()
    with Completions() as server:
        arguments = ["--out", str(small / "out"), "--url", server.url, "--model", server.model, "--concurrency", "1"]
        # 256 KiB are set aside for the manifest; what is left holds some of the 60 windows, not all.
        ran = _in_a_small_file_system(small, 420, [*COMMAND, *arguments, *SHORT, "--windows", "60"])
    assert ran.returncode == 3, ran.stderr
    assert "no space left in" in ran.stderr
    assert "--resume" in ran.stderr
    kept = Path(f"{small}.kept") / "out"
    found = states(kept)
    assert found["window 1 at concurrency 1"] == State.DONE
    assert found["window 60 at concurrency 1"] == State.PENDING
    outcome = runner.invoke(app, ["campaign", "report", str(kept)])
    assert outcome.exit_code == 3
    assert "no space left" in outcome.output


def test_a_damaged_window_is_named_and_the_others_are_reported(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with Completions() as server:
        assert start(server, out, concurrency="1").exit_code == 0
    (out / "windows/c00001/w2/client.json").write_text("{")
    outcome = runner.invoke(app, ["campaign", "report", str(out), "--json", "-"])
    assert outcome.exit_code == 3
    found = json.loads(outcome.stdout)
    assert found["concurrency"][0]["tpot_ns"]["windows"] == 2
    assert "w2/client.json: damaged" in " ".join(found["missing"])


def test_the_manifest_names_no_host_and_no_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "sk-not-to-be-seen")
    monkeypatch.setenv("VLLM_HOST_IP", "10.1.2.3")
    monkeypatch.setenv("NCCL_ALGO", "Ring")
    monkeypatch.setenv("OPENAI_API_KEY", "sk-neither-is-this")
    out = tmp_path / "out"
    with Completions() as server:
        assert start(server, out, "--windows", "1", concurrency="1").exit_code == 0
    text = (out / "manifest.json").read_text()
    assert "not-to-be-seen" not in text
    assert "neither-is-this" not in text
    assert "10.1.2.3" not in text
    assert read_manifest(out).environment["variables"]["NCCL_ALGO"] == "Ring"


def test_compare_says_what_changed_and_whether_beyond_chance(tmp_path: Path) -> None:
    before, after = tmp_path / "before", tmp_path / "after"
    with Completions() as server:
        assert start(server, before, "--windows", "4", concurrency="1").exit_code == 0
    shutil.copytree(before, after)
    for folder, factor in ((before, 1), (after, 2)):
        for number, path in enumerate(sorted(folder.rglob("client.json"))):
            load = json.loads(path.read_text())
            load["tpot"]["mean_ns"] = factor * (10_000_000 + number * 10_000)
            path.write_text(json.dumps(load))
    outcome = runner.invoke(app, ["campaign", "compare", str(before), str(after), "--json", "-", "--threshold", "5"])
    assert outcome.exit_code == 1
    change = json.loads(outcome.stdout)["concurrency"]["1"]["time per output token"]
    assert change["difference_percent"] == pytest.approx(100, abs=0.01)
    assert change["clear"] is True
    assert "more than 5 % slower at concurrency 1" in outcome.stderr
    same = runner.invoke(app, ["campaign", "compare", str(before), str(before), "--threshold", "5"])
    assert same.exit_code == 0
    assert "time per output token" in same.stdout


def test_a_stop_that_takes_long_is_shown_all_the_while() -> None:
    from vllm_k25_instrument.campaign import profile

    class Slow:
        def ask(self, path: str, **_: object) -> tuple[int, str]:
            time.sleep(1.2)
            return 200, ""

    said: list[str] = []
    profile.stop(Slow(), said.append)  # type: ignore[arg-type]
    assert "the profiler is writing its traces" in said[0]
