"""The server launcher, with a small stand-in for `vllm serve`: starting, dying, stopping, and whom it leaves behind."""

import os
import sys
import textwrap
import time
from pathlib import Path

import pytest

from vllm_k25_instrument.demo import server as server_module
from vllm_k25_instrument.demo.server import (
    CPU_SETUP_PATH,
    ServerError,
    VllmMissingError,
    VllmServer,
    thread_binding,
)

HEALTHY = """
    import http.server, os, subprocess, sys

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.end_headers()
        def log_message(self, *args):
            pass

    children = [
        subprocess.Popen([f"VLLM::Worker_TP{n}", "-c", "import time; time.sleep(600)"], executable=sys.executable)
        for n in (1, 0)
    ]
    http.server.HTTPServer(("127.0.0.1", PORT), Handler).serve_forever()
"""
DEAF = """
    import signal, subprocess, sys, time
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
    subprocess.Popen([sys.executable, "-c", code])
    print("deaf", flush=True)
    time.sleep(600)
"""
ORPHANS = """
    import subprocess, sys
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
"""
BROKEN = """
    print("first line")
    print("ValueError: no such model", flush=True)
    raise SystemExit(3)
"""
SLOW = "import time; print('Starting to load model', flush=True); time.sleep(600)"


class StandIn(VllmServer):
    """Runs a script in place of vLLM."""

    script = ""

    @property
    def command(self) -> list[str]:
        return [sys.executable, "-c", textwrap.dedent(self.script).replace("PORT", str(self.port))]


@pytest.fixture
def stand_in(tmp_path, monkeypatch):
    monkeypatch.setattr(server_module, "require_vllm", lambda: None)
    servers = []

    def make(script: str, **arguments) -> StandIn:
        server = StandIn("model", log=tmp_path / "server.log", tensor_parallel_size=1, **arguments)
        server.script = script
        servers.append(server)
        return server

    yield make
    for server in servers:
        server.stop(grace=0.1)


def living(pids: list[int]) -> list[int]:
    def is_alive(pid: int) -> bool:
        try:
            return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
        except OSError:
            return False

    return [pid for pid in pids if is_alive(pid)]


def wait_for(condition, seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come to pass"
        time.sleep(0.02)


def test_a_server_that_answers_is_ready_and_its_workers_are_known_in_rank_order(stand_in):
    with stand_in(HEALTHY) as server:
        server.wait_ready(20)
        wait_for(lambda: len(server.worker_pids) == 2)
        names = [Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0] for pid in server.worker_pids]
        assert names == [b"VLLM::Worker_TP0", b"VLLM::Worker_TP1"]


def test_stopping_takes_the_workers_along_and_may_be_done_twice(stand_in):
    server = stand_in(HEALTHY).start()
    server.wait_ready(20)
    wait_for(lambda: len(server.worker_pids) == 2)
    everybody = [server.pid, *server.worker_pids]
    server.stop()
    assert living(everybody) == []
    server.stop()
    assert not server.running


def test_processes_that_ignore_the_request_to_end_are_killed(stand_in):
    server = stand_in(DEAF).start()
    wait_for(lambda: "deaf" in server.log_text() and len(server._members()) == 2)
    everybody = [pid for pid, _ in server._members()]
    server.stop(grace=0.2)
    assert living(everybody) == []


def test_children_that_outlive_the_server_are_stopped_with_it(stand_in):
    server = stand_in(ORPHANS).start()
    wait_for(lambda: not server.running)
    orphans = [pid for pid, _ in server._members()]
    assert len(orphans) == 1
    server.stop()
    assert living(orphans) == []


def test_an_early_death_is_reported_with_the_end_of_the_log(stand_in):
    server = stand_in(BROKEN).start()
    with pytest.raises(ServerError, match="exit status 3") as caught:
        server.wait_ready(20)
    assert caught.value.log_tail.splitlines()[-1] == "ValueError: no such model"
    assert str(server.log) in str(caught.value)


def test_a_server_that_takes_too_long_is_an_error_and_progress_says_where_it_was(stand_in):
    seen = []
    with stand_in(SLOW) as server, pytest.raises(ServerError, match="did not answer within 1 s"):
        server.wait_ready(1, lambda elapsed, stage: seen.append((elapsed, stage)))
    assert seen[-1][1] == "loading the weights"
    assert [elapsed for elapsed, _ in seen] == sorted(elapsed for elapsed, _ in seen)


def test_a_context_left_by_an_error_stops_the_server(stand_in):
    server = stand_in(SLOW)
    with pytest.raises(KeyboardInterrupt), server:
        raise KeyboardInterrupt
    assert not server.running


def test_the_server_is_out_of_reach_of_the_terminals_ctrl_c(stand_in):
    with stand_in(SLOW) as server:
        assert os.getpgid(server.pid) == server.pid != os.getpgid(0)


def test_the_environment_depends_on_what_is_given_and_not_on_the_callers_settings(stand_in, monkeypatch):
    monkeypatch.setenv("K25_INSTANCE", "of-another-server")
    monkeypatch.setenv("K25_SAMPLE_EVERY", "1000")
    monkeypatch.setenv("PYTHONPATH", "/elsewhere")
    environment = stand_in(SLOW, env={"K25_INSTRUMENT": "1"}).environment
    assert {name: value for name, value in environment.items() if name.startswith("K25_")} == {"K25_INSTRUMENT": "1"}
    assert environment["PYTHONPATH"] == f"{CPU_SETUP_PATH}{os.pathsep}/elsewhere"
    assert environment["HF_HUB_OFFLINE"] == environment["VLLM_NO_USAGE_STATS"] == "1"


def test_without_the_cpu_setup_its_folder_is_not_on_the_path(stand_in):
    assert str(CPU_SETUP_PATH) not in stand_in(SLOW, cpu_setup=False).environment.get("PYTHONPATH", "")


def test_the_command_line_names_port_model_and_workers(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    monkeypatch.setattr(server_module, "require_vllm", lambda: None)
    server = VllmServer("m", log=tmp_path / "log", port=1234, eager=False, extra_args=["--seed", "1"])
    command = server.command
    assert command[command.index("serve") + 1] == "m"
    assert command[command.index("--port") + 1] == "1234"
    assert command[command.index("--tensor-parallel-size") + 1] == "2"
    assert "--enforce-eager" not in command
    assert command[-2:] == ["--seed", "1"]


@pytest.mark.parametrize(
    ("workers", "cores", "binding"),
    [
        (2, [0, 1], "0|1"),
        (2, [3, 5, 8], "3|5"),
        (2, list(range(64)), "0,1,2,3|4,5,6,7"),
        (1, [7], "7"),
    ],
)
def test_each_worker_gets_cores_of_its_own_among_the_allowed_ones(workers, cores, binding):
    assert thread_binding(workers, cores) == binding


def test_one_core_is_too_few_for_two_workers():
    with pytest.raises(ValueError, match="2 workers need 2 cores, and this process may use 1"):
        thread_binding(2, [0])


def test_a_missing_vllm_is_one_line_with_the_remedy(tmp_path, monkeypatch):
    monkeypatch.setattr(server_module.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(VllmMissingError) as caught:
        VllmServer("m", log=tmp_path / "log")
    assert "\n" not in str(caught.value)
    assert "tools/setup_env.py" in str(caught.value)
