"""`vllm-k25 top` follows a server through its life: not there yet, running, ended, replaced by the next."""

import io
import json
import os
import signal
import subprocess
import sys
import textwrap
import time

import pytest
import typer
from rich.console import Console
from typer.testing import CliRunner

from tests.unit.test_report_rings import START_NS, open_rank, write_server
from vllm_k25_instrument.commands.top import top
from vllm_k25_instrument.instances import create_instance
from vllm_k25_instrument.model import GraphMode, Phase
from vllm_k25_instrument.report.follow import Follower, ServerState
from vllm_k25_instrument.report.live import Frame
from vllm_k25_instrument.ring import ring_file_name

app = typer.Typer()
app.command()(top)


def run(*arguments, env=None):
    return CliRunner().invoke(app, [str(argument) for argument in arguments], env=env)


def frame_text(snapshot, *, now_unix_ns=START_NS, ranks=(), width=120, color=None):
    console = Console(file=io.StringIO(), width=width, force_terminal=color is not None, color_system=color)
    console.print(Frame(snapshot, now_unix_ns=now_unix_ns, window_s=10, ranks=ranks))
    return console.file.getvalue()


def server_process(folder, steps=3):
    """A process of its own that writes the rings of a server of one rank and then waits to be killed."""
    program = f"""
        import sys, time
        from pathlib import Path
        from tests.unit.test_report_rings import open_rank
        rank = open_rank(Path({str(folder)!r}), 0, 1, instance={folder.name!r})
        for _ in range({steps}):
            rank.write()
        print("ready", flush=True)
        time.sleep(120)
    """
    process = subprocess.Popen([sys.executable, "-c", textwrap.dedent(program)], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "ready\n"
    return process


@pytest.fixture
def start_server():
    started = []

    def start(folder, steps=3):
        started.append(server_process(folder, steps))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()
        process.stdout.close()


def kill(process):
    process.send_signal(signal.SIGKILL)
    process.wait()


def test_a_follower_reads_only_what_is_new(tmp_path):
    (rank,) = write_server(tmp_path, world=1, steps=5)
    follower = Follower(tmp_path, window_s=100)
    assert follower.poll().report.breakdown.groups[0].steps == 5
    for _ in range(3):
        rank.write()
    snapshot = follower.poll()
    assert snapshot.report.breakdown.groups[0].steps == 8
    assert snapshot.sampled == 8
    assert snapshot.last.step == 7 * 16


def test_only_the_last_seconds_are_kept(tmp_path):
    (rank,) = write_server(tmp_path, world=1, steps=0, slots=256, layers=1)
    for _ in range(200):
        rank.write(ranges=[], duration_ns=6_250_000)  # 16 steps of it are 0.1 s
    follower = Follower(tmp_path, window_s=2)
    assert follower.poll().report.breakdown.groups[0].steps == 21
    for _ in range(30):
        rank.write(ranges=[], duration_ns=6_250_000)
    assert follower.poll().report.breakdown.groups[0].steps == 21


def test_a_ring_that_went_round_while_nobody_looked_counts_what_was_missed(tmp_path):
    (rank,) = write_server(tmp_path, world=1, steps=4, slots=16, layers=1)
    follower = Follower(tmp_path, window_s=1000)
    follower.poll()
    for _ in range(40):
        rank.write()
    snapshot = follower.poll()
    assert snapshot.report.breakdown.groups[0].steps == 4 + 16
    assert [caveat.code for caveat in snapshot.report.caveats] == ["samples_overwritten"]
    rank.write()
    assert follower.poll().report.breakdown.groups[0].steps == 4 + 16 + 1


def test_steps_per_second_counts_all_executed_steps(tmp_path):
    (rank,) = write_server(tmp_path, world=1, steps=0)
    for _ in range(5):
        rank.write(ranges=[], duration_ns=10_000_000)
    assert Follower(tmp_path, window_s=10).poll().steps_per_second == pytest.approx(100)


def test_a_single_sample_gives_no_rate(tmp_path):
    write_server(tmp_path, world=1, steps=1)
    snapshot = Follower(tmp_path, window_s=10).poll()
    assert snapshot.steps_per_second is None
    assert "steps/s -" in frame_text(snapshot)


def test_a_server_that_is_not_there_yet_is_waited_for(tmp_path):
    follower = Follower(tmp_path / "rings", window_s=10)
    snapshot = follower.poll()
    assert snapshot.state is ServerState.WAITING
    assert "waiting for a server" in frame_text(snapshot).replace("\n", " ")
    assert "K25_INSTRUMENT=1" in frame_text(snapshot, width=300)
    ranks = write_server(tmp_path / "rings" / "one", world=1, steps=2)
    assert follower.poll().state is ServerState.RUNNING
    assert len(ranks) == 1


def test_ranks_that_appear_later_are_taken_in(tmp_path):
    first = open_rank(tmp_path, 0, 2)
    first.write()
    follower = Follower(tmp_path, window_s=10)
    assert follower.poll().report.breakdown.ranks_found == (0,)
    second = open_rank(tmp_path, 1, 2)
    second.write()
    snapshot = follower.poll()
    assert snapshot.report.breakdown.ranks_found == (0, 1)
    assert snapshot.report.breakdown.complete


def test_a_killed_server_is_shown_in_its_last_state(tmp_path, start_server):
    process = start_server(tmp_path / "one", steps=4)
    follower = Follower(tmp_path, window_s=100)
    assert follower.poll().state is ServerState.RUNNING
    kill(process)
    snapshot = follower.poll()
    assert snapshot.state is ServerState.ENDED
    assert snapshot.report.breakdown.groups[0].steps == 4
    assert "the server has ended; this is its last state" in frame_text(snapshot)


def test_the_next_server_is_followed_when_the_first_has_ended(tmp_path, start_server):
    first = start_server(tmp_path / "one", steps=4)
    follower = Follower(tmp_path, window_s=100)
    assert follower.poll().report.subject.instance == "one"
    start_server(tmp_path / "two", steps=2)
    assert follower.poll().report.subject.instance == "one", "a living server is not left for a newer one"
    kill(first)
    snapshot = follower.poll()
    assert snapshot.state is ServerState.RUNNING
    assert snapshot.report.subject.instance == "two"
    assert snapshot.report.breakdown.groups[0].steps == 2


def test_a_server_that_is_starting_is_waited_for_rather_than_showing_a_dead_one(tmp_path, start_server):
    kill(start_server(tmp_path / "dead"))
    _, fd = create_instance(tmp_path, keep=1)
    try:
        assert Follower(tmp_path, window_s=10).poll().state is ServerState.WAITING
    finally:
        os.close(fd)
    assert Follower(tmp_path, window_s=10).poll().state is ServerState.ENDED


def test_a_server_that_ends_while_the_next_one_starts_is_not_the_end(tmp_path, start_server):
    process = start_server(tmp_path / "one")
    follower = Follower(tmp_path, window_s=10)
    follower.poll()
    kill(process)
    _, fd = create_instance(tmp_path, keep=1)
    try:
        snapshot = follower.poll()
    finally:
        os.close(fd)
    assert snapshot.state is ServerState.RESTARTING
    assert "waiting for the next one" in frame_text(snapshot)


def test_an_unreadable_ring_is_named_and_taken_in_once_it_is_whole(tmp_path):
    write_server(tmp_path, world=2, found=(0,), steps=1)
    path = tmp_path / ring_file_name(1)
    path.write_bytes(b"")
    follower = Follower(tmp_path, window_s=10)
    snapshot = follower.poll()
    assert "ring_unreadable" in [caveat.code for caveat in snapshot.report.caveats]
    assert ring_file_name(1) in frame_text(snapshot, width=400)
    path.unlink()
    second = open_rank(tmp_path, 1, 2)
    second.write()
    assert follower.poll().report.breakdown.complete


def test_the_frame_marks_the_slowest_rank(tmp_path):
    write_server(tmp_path, world=4, steps=4, slowest=2)
    text = frame_text(Follower(tmp_path, window_s=100).poll())
    assert "slowest ▶ 2" in text
    assert "Slowest rank 2: +" in text


def test_the_slowest_rank_is_not_marked_when_a_rank_is_missing(tmp_path):
    write_server(tmp_path, world=4, found=(0, 1, 2), steps=4, slowest=2)
    text = frame_text(Follower(tmp_path, window_s=100).poll())
    assert "▶" not in text
    assert "Slowest rank not marked: 3 of 4 ranks have samples here" in text
    assert "[ranks_missing]" in text


def test_the_frame_shows_the_group_that_takes_most_time_and_lists_the_others(tmp_path):
    (rank,) = write_server(tmp_path, world=1, steps=10)
    rank.write(4, Phase.MIXED, GraphMode.PIECEWISE)
    text = frame_text(Follower(tmp_path, window_s=100).poll())
    assert "decode · batch 1 · full graph  1 request" in text
    assert "also in this window" in text
    assert "mixed · batch 4 · piecewise graph" in text


def test_bars_are_told_apart_by_letters_where_there_are_no_colours_and_by_colour_where_there_are(tmp_path):
    write_server(tmp_path, world=1, steps=2)
    snapshot = Follower(tmp_path, window_s=100).poll()
    assert "RRRRREE" in frame_text(snapshot)
    assert "RRRRREE" in frame_text(snapshot, color="standard").replace("\x1b[0m", "").replace("\x1b[36m", "")
    colored = frame_text(snapshot, color="truecolor")
    assert "█████" in colored
    assert "RRRRR" not in colored


def test_an_idle_server_is_said_to_be_idle(tmp_path):
    ranks = write_server(tmp_path, world=1, steps=2)
    snapshot = Follower(tmp_path, window_s=100).poll()
    later = snapshot.last.start_unix_ns + 34 * 10**9
    assert len(ranks) == 1
    assert "idle for 34 s" in frame_text(snapshot, now_unix_ns=later)
    assert "idle" not in frame_text(snapshot, now_unix_ns=later - 33 * 10**9)


def test_a_server_without_a_step_is_said_loudly(tmp_path):
    ranks = write_server(tmp_path, world=1, steps=0)
    text = frame_text(Follower(tmp_path, window_s=100).poll(), width=300)
    assert len(ranks) == 1
    assert "no step sampled yet" in text
    assert "THE SERVER IS ALIVE BUT NO STEP HAS BEEN RECORDED" in text


def test_once_prints_one_frame_and_exits_with_0(tmp_path):
    ranks = write_server(tmp_path / "one", world=2, steps=3)
    result = run(tmp_path, "--once")
    assert len(ranks) == 2
    assert result.exit_code == 0, result.output
    assert result.stdout.count("last step") == 1
    assert "(running)" in result.stdout


def test_once_uses_the_configured_ring_directory(tmp_path):
    ranks = write_server(tmp_path / "one", world=1, steps=1)
    assert len(ranks) == 1
    assert "1 of 1 ranks" in run("--once", env={"K25_RING_DIR": str(tmp_path)}).stdout


def test_once_shows_one_rank_when_asked(tmp_path):
    write_server(tmp_path, world=2, steps=2)
    document = json.loads(run(tmp_path, "--once", "--json", "--rank", 1).stdout)
    assert [group["rank"] for group in document["groups"]] == [1]
    assert document["ranks"] == {"found": [0, 1], "expected": 2}
    assert document["complete"] is True


def test_a_rank_that_is_not_there_is_wrong_usage(tmp_path):
    write_server(tmp_path, world=2, steps=1)
    result = run(tmp_path, "--once", "--rank", 9)
    assert result.exit_code == 2
    assert "--rank 9: there are ranks 0, 1" in result.stderr


def test_once_without_a_server_names_the_place_and_the_remedy(tmp_path):
    result = run(tmp_path / "nowhere", "--once")
    assert result.exit_code == 1
    assert "nowhere: no rings here: start vLLM with K25_INSTRUMENT=1" in result.stderr
    assert result.stdout == ""


def test_a_file_that_is_no_ring_is_named(tmp_path):
    (tmp_path / "notes.txt").write_text("hello" * 100)
    result = run(tmp_path / "notes.txt", "--once")
    assert result.exit_code == 1
    assert "notes.txt: not a ring file" in result.stderr


def test_watching_a_server_that_ends_says_so_and_exits_with_0(tmp_path, start_server):
    kill(start_server(tmp_path / "one", steps=3))
    result = run(tmp_path, "--interval", 0.1)
    assert result.exit_code == 0
    assert "the server has ended" in result.stdout


def test_json_is_one_document_per_refresh_until_the_server_ends(tmp_path, start_server):
    process = start_server(tmp_path / "one", steps=3)
    command = [sys.executable, "-c", "import typer; from vllm_k25_instrument.commands.top import top; typer.run(top)"]
    arguments = [str(tmp_path), "--json", "--interval", "0.1"]
    with subprocess.Popen(
        [*command, *arguments], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as watcher:
        first = json.loads(watcher.stdout.readline())
        json.loads(watcher.stdout.readline())
        kill(process)
        rest = watcher.stdout.read().splitlines()
        assert watcher.wait(timeout=20) == 0
    assert first["schema"] == "vllm_k25.breakdown/1"
    assert first["groups"][0]["steps"] == 3
    assert all(json.loads(line)["source"] == "ring" for line in rest)


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_ctrl_c_ends_it_cleanly(tmp_path, options):
    ranks = write_server(tmp_path, world=1, steps=3)
    command = [sys.executable, "-c", "import typer; from vllm_k25_instrument.commands.top import top; typer.run(top)"]
    arguments = [str(tmp_path), "--interval", "30", *options]
    with subprocess.Popen([*command, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as watcher:
        # Following is announced, or a frame is there, once it sits in its loop.
        (watcher.stderr if options else watcher.stdout).readline()
        time.sleep(0.5)
        watcher.send_signal(signal.SIGINT)
        _, errors = watcher.communicate(timeout=20)
    assert len(ranks) == 1
    assert watcher.returncode == 0
    assert "Traceback" not in errors


def test_a_ring_that_is_truncated_under_a_follower_is_named(tmp_path):
    (rank,) = write_server(tmp_path, world=1, steps=3)
    follower = Follower(tmp_path, window_s=100)
    follower.poll()
    with rank.writer.path.open("r+b") as file:
        file.truncate(1000)
    codes = [caveat.code for caveat in follower.poll().report.caveats]
    assert codes.count("ring_unreadable") == 1
