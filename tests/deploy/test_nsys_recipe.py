"""nsys.sh starts the server under nsys as it has to be, stops it gently, and analyses the report.

With processes that stand for nsys, vLLM and vllm-k25: real ones, with real signals.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.deploy.deployments import DEPLOY

SCRIPT = DEPLOY / "nsys.sh"
HERE = Path(__file__).parent


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Recipe:
    """nsys.sh with its tools standing on PATH, in a folder of its own."""

    def __init__(self, folder):
        self.folder = folder
        self.out = folder / "out"
        self.log = folder / "log"
        self.port = free_port()
        self.bin = folder / "bin"
        self.bin.mkdir()
        shutil.copy(HERE / "fake_nsys.sh", self.bin / "nsys")
        self.install("vllm", f'[ "$1" = serve ] && shift && exec {sys.executable} {HERE / "fake_vllm.py"} "$@"')
        self.install("vllm-k25", 'echo "vllm-k25 $*" >>"$FAKE_LOG"; exit "${FAKE_ANALYZE:-0}"')
        self.variables = {"FAKE_LOG": str(self.log), "FAKE_OUT": str(self.out)}

    def install(self, name, text):
        file = self.bin / name
        file.write_text(f"#!/bin/sh\n{text}\n")
        file.chmod(0o755)

    @property
    def environment(self):
        ours = ("K25_", "VLLM_", "NSYS_", "CUDA_INJECTION", "NVTX_INJECTION")
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
        return inherited | {"PATH": f"{self.bin}:/usr/bin:/bin"} | self.variables

    def command(self, *options, model=("tiny",)):
        ours = ["--out", str(self.out), "--min-free-gib", "0", "--seconds", "0"]
        return [str(SCRIPT), *ours, *options, "--", *model, "--port", str(self.port)]

    def run(self, *options, model=("tiny",)):
        return subprocess.run(
            self.command(*options, model=model),
            env=self.environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
            cwd=self.folder,
        )

    def events(self):
        """What happened, in order, without the answers to the question whether it is ready."""
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        return [line for line in lines if not line.startswith("health")]

    def event(self, start):
        (found,) = [line for line in self.events() if line.startswith(start)]
        return found

    def server(self):
        """How the server was started."""
        return json.loads(self.event("vllm {")[len("vllm ") :])

    def await_event(self, start):
        deadline = time.monotonic() + 30
        while not any(line.startswith(start) for line in self.log.read_text().splitlines() if self.log.exists()):
            assert time.monotonic() < deadline, start
            time.sleep(0.05)


@pytest.fixture
def recipe(tmp_path):
    """The recipe; whatever it did, no server may be left behind."""
    recipe = Recipe(tmp_path)
    yield recipe
    file = recipe.out / "vllm.pid"
    if file.exists() and file.read_text().strip():
        pid = int(file.read_text())
        if left := Path(f"/proc/{pid}").exists():
            os.kill(pid, signal.SIGKILL)
        assert not left, "the server was left running"


def order(events, *starts):
    """Where in `events` the first line with each start is."""
    return [next(n for n, line in enumerate(events) if line.startswith(start)) for start in starts]


def test_the_recording_stops_while_the_server_lives_then_the_server_then_nsys_then_it_is_analysed(recipe):
    result = recipe.run()
    assert result.returncode == 0, result.stderr
    events = recipe.events()
    places = order(
        events, "profile", "vllm {", "stop", "vllm got SIGINT", "vllm ended", "nsys ended", "vllm-k25 analyze"
    )
    assert places == sorted(places)
    assert recipe.event("stop").endswith("the server lives")
    assert "vllm got SIGTERM" not in events
    assert "nsys got SIGINT" not in events


def test_nsys_gets_the_flags_that_work(recipe):
    recipe.run()
    words = recipe.event("profile").split()
    assert {
        "--cuda-graph-trace=node",
        "--trace-fork-before-exec=true",
        "--trace=cuda,nvtx",
        "--sample=none",
        "--kill=none",
        f"--output={recipe.out}/report",
    } <= set(words)
    assert recipe.event("stop").split()[1].strip(",") == next(
        w for w in words if w.startswith("--session-new=")
    ).replace("-new", "")


def test_the_recording_begins_with_the_server_so_that_it_contains_the_capture_of_the_graphs(recipe):
    recipe.run()
    flags = recipe.event("profile").split("vllm serve")[0]
    for late in ("--capture-range", "--delay", "--start-later", "--duration"):
        assert late not in flags


def test_the_server_is_started_with_the_plugin_on_and_workers_that_are_spawned(recipe):
    recipe.variables["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"
    recipe.run(model=("moonshotai/Kimi-K2.5", "--tensor-parallel-size", "8"))
    server = recipe.server()
    assert server["arguments"] == ["moonshotai/Kimi-K2.5", "--tensor-parallel-size", "8", "--port", str(recipe.port)]
    assert server["environment"] == {
        "K25_INSTRUMENT": "1",
        "K25_NVTX": "1",
        "K25_GRAPHS": "inplace",
        "K25_SAMPLE_EVERY": "1",
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        "VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS": "120",
    }


def test_no_word_that_it_is_given_is_taken_for_more_than_a_word(recipe):
    hostile = ["$(touch pwned)", "`touch pwned`", "; touch pwned #", "a b", "it's", '"x"', "*", "%s\\n", "line\nline"]
    out = recipe.folder / "out $(touch pwned) 'x'"
    recipe.out = out
    recipe.variables["FAKE_OUT"] = str(out)
    assert recipe.run(model=("tiny", "--served-model-name", *hostile)).returncode == 0
    assert recipe.server()["arguments"][2:-2] == hostile
    assert (out / "report.nsys-rep").exists()
    assert not list(recipe.folder.rglob("pwned"))


def test_every_variable_that_it_sets_is_one_that_is_read(recipe):
    from vllm_k25_instrument.settings import unknown_variables

    recipe.run()
    assert unknown_variables(recipe.server()["environment"]) == {}


def test_the_callers_own_settings_stand(recipe):
    recipe.variables |= {"K25_SAMPLE_EVERY": "4", "K25_GRAPHS": "twin"}
    recipe.run()
    environment = recipe.server()["environment"]
    assert (environment["K25_SAMPLE_EVERY"], environment["K25_GRAPHS"]) == ("4", "twin")


def test_the_server_is_started_with_sigint_as_it_is_by_default(recipe):
    """A shell ignores it for what it puts in the background; a server would inherit that."""
    recipe.run()
    assert "vllm was started with SIGINT ignored" not in recipe.events()


def test_the_server_takes_sigint_where_the_recipe_itself_is_in_the_background_of_a_script(recipe):
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        result = recipe.run()
    finally:
        signal.signal(signal.SIGINT, before)
    assert result.returncode == 0, result.stderr
    assert "vllm was started with SIGINT ignored" not in recipe.events()


def test_it_waits_until_the_server_answers(recipe):
    recipe.variables["FAKE_VLLM_NOT_READY"] = "2"
    recipe.run("--load", f"echo load >>{recipe.log}")
    lines = recipe.log.read_text().splitlines()
    assert order(lines, "health 503")[0] < order(lines, "health 200")[0] < order(lines, "load")[0]


def test_the_recording_lasts_as_long_as_the_load(recipe):
    recipe.run("--load", f"sleep 1; echo load is over >>{recipe.log}")
    places = order(recipe.events(), "load is over", "stop")
    assert places == sorted(places)


def test_a_load_that_fails_is_said_and_what_was_recorded_is_analysed(recipe):
    result = recipe.run("--load", "exit 7")
    assert result.returncode == 1
    assert "the load failed (exit status 7)" in result.stderr
    assert recipe.event("vllm-k25 analyze")


def test_the_analysis_gets_the_report_and_its_exit_code_is_the_scripts(recipe):
    recipe.variables["FAKE_ANALYZE"] = "3"
    assert recipe.run().returncode == 3
    out = recipe.out
    assert recipe.event("vllm-k25") == (
        f"vllm-k25 analyze {out}/report.nsys-rep --json {out}/breakdown.json --html {out}/breakdown.html"
    )


def test_the_analysis_takes_the_arguments_that_it_is_given(tmp_path):
    from typer.testing import CliRunner

    from vllm_k25_instrument.cli import app

    arguments = ["analyze", str(tmp_path / "report.nsys-rep"), "--json", "a.json", "--html", "a.html"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2
    assert "does not exist" in result.output


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_it_stops_everything_as_gently_and_analyses_what_there_is(recipe, number):
    with subprocess.Popen(
        recipe.command("--load", f"echo load $$ >>{recipe.log}; sleep 60"),
        env=recipe.environment,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        recipe.log.touch()
        recipe.await_event("load")
        process.send_signal(number)
        _, said = process.communicate(timeout=30)
    assert process.returncode == 130, said
    places = order(recipe.events(), "stop", "vllm got SIGINT", "vllm ended", "nsys ended", "vllm-k25 analyze")
    assert places == sorted(places)
    assert not Path(f"/proc/{recipe.event('load').split()[1]}").exists()


def test_a_server_that_fails_ends_it_with_the_servers_last_words(recipe):
    recipe.variables["FAKE_VLLM_FAILS"] = "1"
    result = recipe.run()
    assert result.returncode == 1
    assert "the server ended before it answered" in result.stderr
    assert "no such model" in result.stderr
    assert not any(line.startswith("vllm-k25") for line in recipe.events())


def test_a_server_that_does_not_answer_in_time_is_stopped(recipe):
    result = recipe.run("--ready-seconds", "0")
    assert result.returncode == 1
    assert "did not answer within 0 s" in result.stderr


def test_interrupted_before_the_server_is_there_it_leaves_nothing_running(recipe):
    with subprocess.Popen(recipe.command(), env=recipe.environment, stderr=subprocess.PIPE, text=True) as process:
        recipe.log.touch()
        recipe.await_event("profile")
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=30)
    assert process.returncode == 130, said
    assert "nsys ended" in recipe.events()


def test_a_server_that_ignores_sigint_is_ended_and_that_is_said(recipe):
    recipe.variables["FAKE_VLLM_HANGS"] = "1"
    result = recipe.run("--stop-seconds", "1")
    assert result.returncode == 1
    assert "did not end within 1 s of SIGINT" in result.stderr
    places = order(recipe.events(), "vllm got SIGINT", "vllm got SIGTERM", "vllm ended")
    assert places == sorted(places)


def test_where_nsys_stop_fails_the_report_of_the_end_is_analysed(recipe):
    recipe.variables["FAKE_STOP_FAILS"] = "1"
    result = recipe.run()
    assert result.returncode == 0, result.stderr
    assert "`nsys stop` failed" in result.stderr
    places = order(recipe.events(), "vllm ended", "report written at the end", "vllm-k25 analyze")
    assert places == sorted(places)


def test_no_report_is_a_failure(recipe):
    recipe.variables["FAKE_NO_REPORT"] = "1"
    result = recipe.run()
    assert result.returncode == 1
    assert "nsys wrote no report" in result.stderr


def test_without_nsys_it_refuses(recipe):
    (recipe.bin / "nsys").unlink()
    result = recipe.run()
    assert result.returncode == 2
    assert "nsys is not on PATH" in result.stderr
    assert recipe.events() == []


@pytest.mark.parametrize("version", ["2022.4.2.1-df9881f", "2023.0.9"])
def test_an_nsys_that_is_too_old_is_refused(recipe, version):
    recipe.variables["FAKE_NSYS_VERSION"] = version
    result = recipe.run()
    assert result.returncode == 2
    assert f"nsys is {'.'.join(version.split('.')[:2])}, and 2023.1 or newer is needed" in result.stderr
    assert recipe.events() == []


@pytest.mark.parametrize("version", ["2023.1.1.127", "2023.10.1", "2026.4.1.191-abcdef"])
def test_an_nsys_that_is_new_enough_is_taken(recipe, version):
    recipe.variables["FAKE_NSYS_VERSION"] = version
    assert recipe.run().returncode == 0


def test_an_nsys_without_a_flag_that_is_needed_is_refused(recipe):
    recipe.variables["FAKE_NSYS_OPTIONS"] = "--cuda-graph-trace --session-new"
    result = recipe.run()
    assert result.returncode == 2
    assert "this nsys has no option --trace-fork-before-exec" in result.stderr


@pytest.mark.parametrize("known", [True, False])
def test_event_records_are_not_traced_where_nsys_can_leave_them_out(recipe, known):
    options = "--cuda-graph-trace --trace-fork-before-exec --session-new"
    recipe.variables["FAKE_NSYS_OPTIONS"] = options + (" --cuda-event-trace" if known else "")
    recipe.run()
    assert ("--cuda-event-trace=false" in recipe.event("profile").split()) is known


@pytest.mark.parametrize("name", ["vllm", "vllm-k25"])
def test_a_program_that_is_missing_is_named(recipe, name):
    (recipe.bin / name).unlink()
    result = recipe.run()
    assert result.returncode == 2
    assert f"{name} is not on PATH" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--profiler-config", "{}"), "would take CUPTI from nsys"),
        (("--profiler-config.profiler=torch",), "would take CUPTI from nsys"),
        (("--distributed-executor-backend", "ray"), "Ray starts the workers, outside of nsys"),
        (("--uds", "/tmp/socket"), "--uds"),
    ],
)
def test_arguments_that_cannot_work_under_nsys_are_refused(recipe, arguments, said):
    result = recipe.run(model=("tiny", *arguments))
    assert result.returncode == 2
    assert said in result.stderr
    assert recipe.events() == []


@pytest.mark.parametrize(
    ("variable", "value", "said"),
    [
        ("CUDA_INJECTION64_PATH", "/x.so", "another profiler is attached"),
        ("NSYS_PROFILING_SESSION_ID", "1", "another profiler is attached"),
        ("VLLM_PLUGINS", "another", "VLLM_PLUGINS leaves the plugin out"),
    ],
)
def test_surroundings_that_cannot_work_are_refused(recipe, variable, value, said):
    recipe.variables[variable] = value
    result = recipe.run()
    assert result.returncode == 2
    assert said in result.stderr


@pytest.mark.parametrize("option", ["--capture-range=cudaProfilerApi", "--delay=60", "--cuda-graph-trace=graph"])
def test_options_that_would_lose_the_capture_of_the_graphs_are_refused(recipe, option):
    result = recipe.run("--nsys-option", option)
    assert result.returncode == 2
    assert "the recording has to contain the capture of the graphs" in result.stderr


def test_an_option_for_nsys_takes_the_place_of_the_scripts_own(recipe):
    recipe.run("--nsys-option", "--trace=cuda-sw,nvtx", "--nsys-option", "--stats=true")
    words = recipe.event("profile").split()
    assert [word for word in words if word.startswith("--trace=")] == ["--trace=cuda-sw,nvtx"]
    assert "--stats=true" in words


def test_a_port_in_use_is_refused_since_another_server_would_be_taken_for_this_one(recipe):
    with socket.create_server(("127.0.0.1", recipe.port)):
        result = recipe.run()
    assert result.returncode == 2
    assert f"something listens on 127.0.0.1:{recipe.port} already" in result.stderr


def test_an_earlier_report_is_not_overwritten(recipe):
    recipe.out.mkdir()
    (recipe.out / "report.nsys-rep").write_text("earlier")
    result = recipe.run()
    assert result.returncode == 2
    assert "is there already" in result.stderr
    assert (recipe.out / "report.nsys-rep").read_text() == "earlier"


def test_too_little_space_is_refused(recipe):
    result = recipe.run("--min-free-gib", "1000000")
    assert result.returncode == 2
    assert "--min-free-gib asks for 1000000" in result.stderr


def test_all_that_is_missing_is_said_at_once(recipe):
    for name in ("nsys", "vllm"):
        (recipe.bin / name).unlink()
    said = recipe.run().stderr
    assert "nsys is not on PATH" in said
    assert "vllm is not on PATH" in said


@pytest.mark.parametrize("arguments", [["--frobnicate"], ["tiny"], [], ["--seconds"], ["--seconds", "x", "--", "tiny"]])
def test_wrong_usage_is_one_line_and_exit_code_2(recipe, arguments):
    result = subprocess.run(
        [SCRIPT, *arguments], env=recipe.environment, capture_output=True, text=True, check=False, timeout=20
    )
    assert result.returncode == 2
    assert len(result.stderr.splitlines()) == 1


def test_a_dry_run_prints_the_commands_in_order_and_starts_nothing(recipe):
    result = recipe.run("--dry-run", "--load", "echo 'a load'")
    assert result.returncode == 0
    commands = [shlex.split(line) for line in result.stdout.splitlines()]
    first_words = [command[0] for command in commands]
    assert first_words == ["env", "bash", "nsys", "kill", "vllm-k25"]
    server = commands[0]
    assert server[server.index("vllm", server.index("--wait=primary")) :] == [
        *["vllm", "serve", "tiny", "--port", str(recipe.port)]
    ]
    assert "--cuda-graph-trace=node" in server
    assert "VLLM_WORKER_MULTIPROC_METHOD=spawn" in server
    assert commands[1] == ["bash", "-c", "echo 'a load'"]
    assert commands[2][:2] == ["nsys", "stop"]
    assert recipe.events() == []
    assert not recipe.out.exists()


def test_a_dry_run_without_the_tools_says_what_is_missing(recipe):
    (recipe.bin / "nsys").unlink()
    result = recipe.run("--dry-run")
    assert result.returncode == 0
    assert "missing: nsys is not on PATH" in result.stderr
    assert "nsys profile" in result.stdout


def test_help_is_the_usage(recipe):
    result = subprocess.run([SCRIPT, "--help"], capture_output=True, text=True, check=True)
    assert result.stdout.startswith("usage: nsys.sh")
