"""`vllm-k25 demo` without a server: what counts as a success, what is left out, and what a user is told otherwise."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from tests.export_rings import published_at_once
from vllm_k25_instrument.commands import demo as command
from vllm_k25_instrument.demo import graph_modes
from vllm_k25_instrument.demo.build import CUDA_SAMPLE_EVERY, Build, BuildError, Plan
from vllm_k25_instrument.demo.load import LoadResult, RequestResult
from vllm_k25_instrument.demo.run import RingMarks, missing_samples, problems, server_environment
from vllm_k25_instrument.demo.server import ServerError, VllmMissingError
from vllm_k25_instrument.instances import open_instance
from vllm_k25_instrument.model import (
    GRAPH_MODES,
    LOST_REASONS,
    PHASES,
    GraphMode,
    LostReason,
    Phase,
    RankCoordinates,
    RankIdentity,
    pack_sample,
)
from vllm_k25_instrument.report.ringset import LOST_REMEDY
from vllm_k25_instrument.ring import RingLayout, RingWriter, ring_file_name

WORKER_PIDS = (4001, 4002)


class Rings:
    """The rings that two workers write into, in a ring directory."""

    def __init__(self, directory: Path, ranks: int = 2) -> None:
        self.directory = directory
        folder = open_instance(directory, "this-one").path
        self.writers = []
        for rank in range(ranks):
            identity = RankIdentity(
                "this-one", WORKER_PIDS[rank], RankCoordinates(global_rank=rank, tp=rank, tp_size=ranks)
            )
            self.writers.append(
                published_at_once(
                    RingWriter(folder / ring_file_name(rank), identity, RingLayout(slots=64, slot_bytes=512))
                )
            )
        self.step = 0

    def lose(self, reason: LostReason, *counts: int) -> None:
        """So many samples lost by each rank."""
        for writer, count in zip(self.writers, counts, strict=True):
            for _ in range(count):
                writer.totals.add_lost(LOST_REASONS.index(reason))

    def add_steps(
        self,
        count: int,
        phase: Phase = Phase.DECODE,
        duration_ns: int = 5_000_000,
        graph_mode: GraphMode = GraphMode.NONE,
    ) -> None:
        for _ in range(count):
            self.step += 1
            for writer in self.writers:
                writer.append(
                    pack_sample(
                        step=self.step,
                        phase_code=PHASES.index(phase),
                        requests=1,
                        tokens=1,
                        padded_tokens=1,
                        graph_code=GRAPH_MODES.index(graph_mode),
                        start_unix_ns=1,
                        duration_ns=duration_ns,
                        overhead_ns=0,
                        complete=True,
                    )
                )


class Server:
    """Stands for a running server."""

    url = "http://127.0.0.1:1"
    pid = 4000
    worker_pids = WORKER_PIDS

    def __init__(self, out: Path) -> None:
        self.log = out / "server.log"
        self.environment = {"K25_RING_DIR": str(out / "rings")}
        self.stopped = 0
        self.fails: BaseException | None = None

    def wait_ready(self, timeout, on_progress) -> float:
        on_progress(0.1, "importing vLLM")
        if self.fails is not None:
            raise self.fails
        return 1.0

    def log_tail(self) -> str:
        return "the last line of the log"

    def stop(self) -> None:
        self.stopped += 1


def load_of(concurrency: int = 1, failed: int = 0) -> LoadResult:
    requests = [RequestResult(0, "p", token_ids=(1, 2), latency_s=0.1) for _ in range(2)]
    requests[:failed] = [RequestResult(0, "p", error="HTTP 500: no") for _ in range(failed)]
    return LoadResult(concurrency, 0, 1.0, tuple(requests))


@pytest.fixture
def demo(tmp_path, monkeypatch):
    """Runs the command with a stand-in for the server and for its load."""
    out = tmp_path / "out"
    out.mkdir()

    class Demo:
        server = Server(out)
        rings = Rings(out / "rings")
        loads = (load_of(1), load_of(4))
        plan = Plan(Build.CPU, 2, 1)
        steps_in_load = 3

        def run(self, *arguments: str):
            app = typer.Typer()
            app.command()(command.demo)
            return CliRunner().invoke(app, ["--out", str(out), *arguments])

    made = Demo()
    made.out = out

    def put_load(server, watcher):
        made.rings.add_steps(made.steps_in_load)
        for load in made.loads:
            watcher.loading("sending load")
            watcher.loaded(load)
        return made.loads

    monkeypatch.setattr(command, "require_vllm", lambda: None)
    monkeypatch.setattr(command, "plan_demo", lambda: made.plan)
    monkeypatch.setattr(command, "start_server", lambda *_: made.server)
    monkeypatch.setattr(command, "warm_up", lambda _: made.rings.add_steps(5, duration_ns=3_000_000_000))
    monkeypatch.setattr(command, "put_load", put_load)
    return made


def test_a_run_in_which_all_went_well_ends_with_both_ranks_and_stops_the_server(demo):
    result = demo.run()
    assert result.exit_code == 0, result.output
    assert "rank 0" in result.stdout
    assert "rank 1" in result.stdout
    assert "concurrency  4     2 requests, 0 failed" in result.stdout
    assert demo.server.stopped == 1


def test_the_breakdown_goes_to_files_without_the_steps_of_the_warm_up(demo):
    demo.run()
    document = json.loads((demo.out / "report.json").read_text())
    assert document["schema"] == "vllm_k25.breakdown/1"
    assert [(group["rank"], group["steps"]) for group in document["groups"]] == [(0, 3), (1, 3)]
    assert max(group["step_ns"]["p99"] for group in document["groups"]) == 5_000_000
    assert (demo.out / "report.html").read_text().lstrip().startswith("<!")


def test_json_on_standard_output_is_nothing_but_json(demo):
    result = demo.run("--json", "-")
    assert json.loads(result.stdout)["ranks"] == {"found": [0, 1], "expected": 2}
    assert "server up" in result.stderr


def test_keep_leaves_the_server_running_and_says_how_to_stop_and_watch_it(demo):
    result = demo.run("--keep")
    assert demo.server.stopped == 0
    assert "kill 4000" in result.stdout
    assert "vllm-k25 top" in result.stdout


def test_a_failed_request_fails_the_demo_and_names_the_log(demo):
    demo.loads = (load_of(1), load_of(8, failed=1))
    result = demo.run()
    assert result.exit_code == 1
    assert "1 of 2 requests failed at concurrency 8: HTTP 500: no" in result.stderr
    assert str(demo.server.log) in result.stdout


def test_a_rank_without_decode_samples_fails_the_demo(demo):
    demo.steps_in_load = 0
    result = demo.run()
    assert result.exit_code == 1
    assert "rank 0 has no sampled decode step; rank 1 has no sampled decode step" in result.stderr


def test_a_server_that_dies_is_stopped_and_its_last_words_are_shown(demo):
    demo.server.fails = ServerError("the server ended after 3 s (exit status 1)", demo.server.log, "no such model")
    result = demo.run()
    assert result.exit_code == 1
    assert "no such model" in result.stdout
    assert f"its log: {demo.server.log}" in result.stderr
    assert demo.server.stopped == 1


@pytest.mark.parametrize("keep", [[], ["--keep"]])
def test_an_interruption_stops_the_server_even_where_it_was_to_be_kept(demo, keep):
    demo.server.fails = KeyboardInterrupt()
    result = demo.run(*keep)
    assert result.exit_code == 130
    assert demo.server.stopped == 1
    assert "interrupted" in result.stderr


def test_a_request_to_terminate_stops_the_server_too(demo, monkeypatch):
    monkeypatch.setattr(command, "put_load", lambda *_: os.kill(os.getpid(), signal.SIGTERM))
    assert demo.run().exit_code == 130
    assert demo.server.stopped == 1
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_without_vllm_one_line_says_what_to_do(demo, monkeypatch):
    def missing() -> None:
        raise VllmMissingError("vLLM is not installed for this Python: run `python3 tools/setup_env.py`")

    monkeypatch.setattr(command, "require_vllm", missing)
    result = demo.run()
    assert result.exit_code == 2
    assert len(result.stderr.splitlines()) == 1
    assert "tools/setup_env.py" in result.stderr


def test_an_output_directory_that_cannot_be_made_is_one_clear_line(demo, tmp_path):
    (tmp_path / "file").write_text("")
    result = demo.run("--out", str(tmp_path / "file" / "below"))
    assert result.exit_code == 2
    assert len(result.stderr.splitlines()) == 1


def test_a_rank_without_a_ring_is_named(tmp_path):
    rings = Rings(tmp_path, ranks=1)
    marks = RingMarks(tmp_path, WORKER_PIDS)
    rings.add_steps(2)
    assert missing_samples(marks.read().breakdown, 2) == ["rank 1 left no ring: the plugin did not start in its worker"]


def test_a_server_without_any_ring_gives_an_empty_breakdown_and_a_line_per_rank(tmp_path):
    marks = RingMarks(tmp_path / "nothing-here", WORKER_PIDS)
    assert marks.instance is None
    assert len(problems([load_of()], marks.read().breakdown, 2)) == 2
    assert marks.lost() == {}


def test_rings_of_another_server_are_not_taken_for_this_ones(tmp_path):
    Rings(tmp_path).add_steps(2)
    assert RingMarks(tmp_path, [99_999]).instance is None


def test_the_steps_of_the_plan_are_sampled_unless_the_user_says_otherwise(tmp_path, monkeypatch):
    for name in list(os.environ):
        if name.startswith("K25_"):
            monkeypatch.delenv(name)
    assert server_environment(tmp_path, 1) == {
        "K25_INSTRUMENT": "1",
        "K25_SAMPLE_EVERY": "1",
        "K25_RING_DIR": str(tmp_path),
    }
    monkeypatch.setenv("K25_SAMPLE_EVERY", "16")
    monkeypatch.setenv("K25_INSTANCE", "of-another-server")
    assert server_environment(tmp_path, 1)["K25_SAMPLE_EVERY"] == "16"
    assert "K25_INSTANCE" not in server_environment(tmp_path, 1)


def test_looking_at_the_help_imports_neither_torch_nor_vllm():
    code = (
        "import sys; import vllm_k25_instrument.commands.demo\n"
        "print([m for m in ('torch', 'vllm', 'httpx', 'tokenizers') if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


# --- on a GPU --------------------------------------------------------------------------------------------------


def test_one_worker_is_all_that_a_single_gpu_is_asked_for(demo, tmp_path):
    demo.plan = Plan(Build.CUDA, 1, CUDA_SAMPLE_EVERY)
    demo.rings = Rings(demo.out / "rings-of-one", ranks=1)
    demo.server.environment = {"K25_RING_DIR": str(demo.out / "rings-of-one")}
    result = demo.run()
    assert result.exit_code == 0, result.output
    assert json.loads((demo.out / "report.json").read_text())["ranks"] == {"found": [0], "expected": 1}


def test_a_rank_that_is_missing_of_two_is_a_failure(demo):
    demo.rings = Rings(demo.out / "rings-of-one", ranks=1)
    demo.server.environment = {"K25_RING_DIR": str(demo.out / "rings-of-one")}
    result = demo.run()
    assert result.exit_code == 1
    assert "rank 1 left no ring" in result.stderr


def test_where_it_cannot_run_one_line_says_why(demo, monkeypatch):
    def refuse() -> None:
        raise BuildError("vLLM's CUDA build is installed and PyTorch sees no GPU")

    monkeypatch.setattr(command, "plan_demo", refuse)
    result = demo.run()
    assert result.exit_code == 2
    assert result.stderr.splitlines() == ["vllm-k25 demo: vLLM's CUDA build is installed and PyTorch sees no GPU"]


def test_it_says_which_graph_modes_were_timed_and_why_samples_are_missing_without_those_of_the_warm_up(
    demo, monkeypatch
):
    def warm_up(_server: object) -> None:
        demo.rings.add_steps(5, graph_mode=GraphMode.PIECEWISE)
        demo.rings.lose(LostReason.UNTIMED, 7, 7)

    def put_load(_server: object, _watcher: object):
        demo.rings.add_steps(45, graph_mode=GraphMode.FULL)
        demo.rings.add_steps(1)
        demo.rings.add_steps(3, Phase.PREFILL)
        demo.rings.lose(LostReason.UNTIMED, 12, 12)
        demo.rings.lose(LostReason.UNREAD, 0, 1)
        return demo.loads

    monkeypatch.setattr(command, "warm_up", warm_up)
    monkeypatch.setattr(command, "put_load", put_load)
    result = demo.run()
    assert result.exit_code == 0, result.output
    lines = [line for line in result.stdout.splitlines() if line.startswith(("graph modes", "not timed"))]
    assert lines == [
        "graph modes  decode: eager 1 step, full graph 45 steps · prefill: eager 3 steps",
        f"not timed    1 step unread ({LOST_REMEDY[LostReason.UNREAD]})",
        f"not timed    12 steps untimed ({LOST_REMEDY[LostReason.UNTIMED]})",
    ]


def test_without_a_sample_it_says_that_no_step_was_timed(demo):
    demo.steps_in_load = 0
    assert "graph modes  no step was timed" in demo.run().stdout


def test_every_reason_of_a_lost_sample_makes_a_line(tmp_path):
    lost = dict.fromkeys(LOST_REASONS, 1)
    lines = graph_modes.graph_mode_lines(RingMarks(tmp_path, ()).read().breakdown, lost)
    assert [line.split()[4] for line in lines[1:]] == [str(reason) for reason in LOST_REASONS]
