"""The folders of server instances: private, told apart, and removed only when nobody lives in them."""

from __future__ import annotations

import os
import re
import shutil
import stat
import subprocess
import sys
import textwrap
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.export_rings import kill, make_ring
from tests.samples import ROOT, child, run_python, wait_for
from vllm_k25_instrument import instances
from vllm_k25_instrument.instances import (
    create_instance,
    default_ring_directory,
    ensure_private_directory,
    find_rings,
    instance_of_engine,
    join_instance,
    launched_together,
    list_instances,
    open_instance,
    remove_dead_instances,
)
from vllm_k25_instrument.liveness import hold, is_held
from vllm_k25_instrument.ring import ring_paths

NOBODY = 65_534


@pytest.fixture
def directory(tmp_path):
    return tmp_path / "rings"


def mode_of(path):
    return stat.S_IMODE(path.stat().st_mode)


def make_dead(directory, name, age_s=0.0, rank=0):
    """What a server that has ended leaves."""
    ensure_private_directory(directory)
    folder = directory / name
    ring = make_ring(folder, rank)
    kill(ring)
    (folder / "instance.lock").touch()
    age(folder, age_s)
    return folder


def age(folder, seconds):
    for path in (*folder.iterdir(), folder):
        os.utime(path, (time.time() - seconds,) * 2)


def dead_name(n):
    return f"20250101T0000{n:02}-{100 + n}"


def names(directory):
    return {path.name for path in directory.iterdir()}


# --- private folders ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("umask", [0, 0o022, 0o077])
def test_the_directory_and_the_folders_in_it_are_private_whatever_the_umask(directory, umask):
    before = os.umask(umask)
    try:
        instance, fd = create_instance(directory, 1)
    finally:
        os.umask(before)
    os.close(fd)
    assert mode_of(directory) == mode_of(instance.path) == 0o700
    assert mode_of(instance.path / "instance.lock") == 0o600


@pytest.mark.parametrize("mode", [0o755, 0o777, 0o770, 0o701])
def test_a_directory_of_ours_that_is_open_to_others_is_closed_to_them(directory, mode):
    make_dead(directory, dead_name(1))
    directory.chmod(mode)
    ensure_private_directory(directory)
    assert mode_of(directory) == 0o700


def test_an_empty_directory_that_is_open_to_others_is_closed_to_them(directory):
    directory.mkdir(mode=0o755)
    ensure_private_directory(directory)
    assert mode_of(directory) == 0o700


@pytest.mark.parametrize("mode", [0o755, 0o777])
def test_a_directory_that_others_need_is_refused_and_left_as_it_is(directory, mode):
    directory.mkdir()
    (directory / "somebody's work").touch()
    directory.chmod(mode)
    with pytest.raises(PermissionError, match="somebody's work: give the rings a folder of their own"):
        create_instance(directory, 0)
    assert mode_of(directory) == mode
    assert names(directory) == {"somebody's work"}


def test_a_shared_directory_such_as_tmp_is_refused_even_when_it_is_empty(directory):
    directory.mkdir()
    directory.chmod(0o1777)
    with pytest.raises(PermissionError, match="1777 and is there for everybody"):
        ensure_private_directory(directory)
    assert mode_of(directory) == 0o1777


def test_a_private_directory_with_other_things_in_it_is_used(directory):
    directory.mkdir(mode=0o700)
    (directory / "notes.txt").touch()
    _, fd = create_instance(directory, 0)
    os.close(fd)
    assert "notes.txt" in names(directory)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a directory away")
def test_a_directory_of_somebody_else_is_refused(directory):
    directory.mkdir(mode=0o700)
    os.chown(directory, NOBODY, NOBODY)
    with pytest.raises(PermissionError, match=f"belongs to user {NOBODY}, not to 0"):
        ensure_private_directory(directory)
    with pytest.raises(PermissionError):
        create_instance(directory, 1)
    assert names(directory) == set()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a directory away")
def test_an_instance_s_folder_of_somebody_else_is_refused(directory):
    ensure_private_directory(directory)
    (directory / "x").mkdir()
    os.chown(directory / "x", NOBODY, NOBODY)
    with pytest.raises(PermissionError, match="belongs to user"):
        open_instance(directory, "x")


@pytest.mark.parametrize("target", ["there", "nowhere"])
def test_a_symbolic_link_is_refused(tmp_path, directory, target):
    (tmp_path / "there").mkdir(mode=0o755)
    directory.symlink_to(tmp_path / target)
    with pytest.raises(OSError, match=r"symbolic link|File exists"):
        ensure_private_directory(directory)
    assert mode_of(tmp_path / "there") == 0o755


def test_a_file_in_the_place_of_the_directory_is_refused(directory):
    directory.touch()
    with pytest.raises(FileExistsError):
        ensure_private_directory(directory)


@pytest.mark.parametrize("name", ["..", "a/b", "../x", "/tmp/x", ".", ""])
def test_a_name_that_leads_out_of_the_directory_is_refused(directory, name):
    with pytest.raises(OSError, match="must be the name of a folder"):
        open_instance(directory, name)


def test_the_default_directory_is_ours_and_local():
    assert default_ring_directory().name == f"vllm_k25-{os.getuid()}"


# --- creation ----------------------------------------------------------------------------------------------


def test_a_new_instance_lives_until_its_descriptor_is_closed(directory):
    instance, fd = create_instance(directory, 1)
    assert re.fullmatch(rf"\d{{8}}T\d{{6}}-{os.getpid()}", instance.name)
    assert instance.alive
    os.close(fd)
    assert not instance.alive


def test_instances_of_one_process_in_one_second_are_told_apart(directory):
    """Containers that share a directory may share process ids too."""
    made = [create_instance(directory, 100) for _ in range(5)]
    assert len({instance.name for instance, _ in made}) == 5
    assert all(instance.alive for instance, _ in made)
    assert all(instance.name.endswith(f"-{os.getpid()}") for instance, _ in made)
    for _, fd in made:
        os.close(fd)


CREATE = """if True:
    import sys, time
    from pathlib import Path
    from vllm_k25_instrument.instances import create_instance
    while time.time() < float(sys.argv[2]):
        pass
    instance, fd = create_instance(Path(sys.argv[1]), 0)
    print(instance.name, flush=True)
    sys.stdin.read()
    print(instance.alive, instance.path.is_dir())
"""


def test_servers_that_start_at_the_same_moment_do_not_remove_one_another(directory):
    for n in range(20):
        make_dead(directory, dead_name(n))
    together = time.time() + 1.5
    servers = [
        subprocess.Popen(
            [sys.executable, "-c", CREATE, directory, str(together)],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(6)
    ]
    made = [server.stdout.readline().strip() for server in servers]
    assert names(directory) == set(made)
    assert len(set(made)) == len(servers)
    for server in servers:
        assert server.communicate()[0] == "True True\n"
        assert server.returncode == 0


def test_creating_while_others_clear_up_never_loses_an_instance(directory):
    def clear_up():
        while True:
            remove_dead_instances(directory, 0)

    ensure_private_directory(directory)
    with child(clear_up), child(clear_up):
        made = [create_instance(directory, 0) for _ in range(200)]
        assert all(instance.path.is_dir() and instance.alive for instance, _ in made)
    for _, fd in made:
        os.close(fd)


def test_a_start_that_fails_leaves_nothing(directory, monkeypatch):
    def no_locks(fd):
        raise OSError(37, "No locks available")

    monkeypatch.setattr(instances, "hold", no_locks)
    with pytest.raises(OSError, match="No locks"):
        create_instance(directory, 1)
    assert names(directory) == set()


# --- life and death ----------------------------------------------------------------------------------------


def test_an_instance_whose_process_was_killed_is_dead(directory):
    server = subprocess.Popen(
        [sys.executable, "-c", CREATE, directory, "0"], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    server.stdout.readline()
    (instance,) = list_instances(directory)
    assert instance.alive
    server.kill()
    server.communicate()
    assert not instance.alive
    assert remove_dead_instances(directory, 0) == [instance.name]


def test_a_worker_that_outlives_the_front_end_keeps_the_instance_alive(directory):
    folder = make_dead(directory, dead_name(1))
    ring = make_ring(folder, 1)
    (instance,) = list_instances(directory)
    assert instance.alive
    assert remove_dead_instances(directory, 0) == []
    kill(ring)
    assert not instance.alive


def test_dead_instances_are_removed_but_for_the_most_recent(directory):
    for n in range(5):
        make_dead(directory, dead_name(n), age_s=100 - n)
    assert sorted(remove_dead_instances(directory, 2)) == [dead_name(n) for n in range(3)]
    assert names(directory) == {dead_name(3), dead_name(4)}
    _, fd = create_instance(directory, 1)
    os.close(fd)
    assert dead_name(4) in names(directory)
    assert dead_name(3) not in names(directory)


def test_the_living_are_not_removed_however_old_and_do_not_count_among_those_kept(directory):
    living = [create_instance(directory, 100) for _ in range(3)]
    for instance, _ in living:
        age(instance.path, 10**6)
    make_dead(directory, dead_name(1), age_s=2 * 10**6)
    make_dead(directory, dead_name(2), age_s=3 * 10**6)
    assert remove_dead_instances(directory, 1) == [dead_name(2)]
    assert remove_dead_instances(directory, 0) == [dead_name(1)]
    assert names(directory) == {instance.name for instance, _ in living}
    for _, fd in living:
        os.close(fd)


def test_dead_instances_without_rings_are_removed_first_and_take_no_recorders_place(directory):
    recorder = make_dead(directory, dead_name(1), age_s=100)
    empty = open_instance(directory, dead_name(2)).path
    (empty / "instance.lock").touch()
    assert remove_dead_instances(directory, 1) == [dead_name(2)]
    assert recorder.exists()


def test_rings_put_aside_under_another_name_are_not_removed(directory):
    make_dead(directory, "the-slow-night-of-may")
    make_dead(directory, dead_name(1))
    assert remove_dead_instances(directory, 0) == [dead_name(1)]
    assert names(directory) == {"the-slow-night-of-may"}


def test_a_link_to_a_folder_elsewhere_is_no_instance(tmp_path, directory):
    elsewhere = make_dead(tmp_path / "elsewhere", dead_name(1))
    ensure_private_directory(directory)
    (directory / dead_name(2)).symlink_to(elsewhere)
    assert list_instances(directory) == []
    assert remove_dead_instances(directory, 0) == []
    assert ring_paths(elsewhere)


def test_empty_folders_of_starts_that_were_killed_go_after_a_while(directory):
    ensure_private_directory(directory)
    for name, seconds in ((dead_name(1), 7_200), (dead_name(2), 60), ("notes", 7_200)):
        (directory / name).mkdir()
        age(directory / name, seconds)
    assert remove_dead_instances(directory, 5) == [dead_name(1)]
    assert names(directory) == {dead_name(2), "notes"}


def test_what_cannot_be_removed_is_not_said_to_be(directory, monkeypatch):
    make_dead(directory, dead_name(1))
    monkeypatch.setattr(shutil, "rmtree", lambda path, ignore_errors: None)
    assert remove_dead_instances(directory, 0) == []


def test_an_instance_that_cannot_be_asked_counts_as_alive(directory, monkeypatch):
    make_dead(directory, dead_name(1))

    def refuse(path):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(instances, "is_held", refuse)
    assert list_instances(directory)[0].alive
    assert remove_dead_instances(directory, 0) == []


@pytest.mark.timeout(20)
def test_strange_things_in_the_folders_hide_nothing(directory):
    good = make_dead(directory, dead_name(1))
    strange = make_dead(directory, dead_name(2))
    (strange / "a.ring").symlink_to("nowhere")
    (strange / "b.ring").symlink_to("b.ring")
    (strange / "c.ring").mkdir()
    os.mkfifo(strange / "d.ring")
    (directory / "a file").touch()
    (directory / "a link").symlink_to("nowhere")
    (directory / "empty").mkdir()
    assert {instance.name for instance in list_instances(directory)} == {good.name, strange.name}
    assert not any(instance.alive for instance in list_instances(directory))
    assert set(remove_dead_instances(directory, 0)) == {good.name, strange.name}


def test_listing_survives_folders_that_vanish_meanwhile(directory):
    def come_and_go():
        while True:
            for n in range(5):
                make_dead(directory, dead_name(n))
            os.closerange(3, 4096)
            for n in range(5):
                shutil.rmtree(directory / dead_name(n))

    make_dead(directory, dead_name(30))
    with child(come_and_go):
        until = time.monotonic() + 0.5
        while time.monotonic() < until:
            assert dead_name(30) in {instance.name for instance in list_instances(directory)}
            assert find_rings(directory).parent == directory


def test_a_directory_that_is_not_there_has_no_instances(directory):
    assert list_instances(directory) == []
    assert remove_dead_instances(directory, 0) == []


# --- which rings are meant ---------------------------------------------------------------------------------


def test_a_ring_and_an_instance_s_folder_mean_themselves(directory):
    folder = make_dead(directory, dead_name(1))
    assert find_rings(folder) == folder
    assert find_rings(ring_paths(folder)[0]) == ring_paths(folder)[0]


def test_of_several_instances_the_newest_living_one_is_meant(directory):
    make_dead(directory, dead_name(9))
    for n in (1, 2):
        make_ring(directory / dead_name(n))
        age(directory / dead_name(n), 1_000 - n)
    assert find_rings(directory).name == dead_name(2)


def test_without_a_living_one_the_newest_dead_one_is_meant(directory):
    for n in (1, 2, 3):
        make_dead(directory, dead_name(n), age_s=abs(2 - n))
    assert find_rings(directory).name == dead_name(2)


def test_a_living_instance_without_rings_is_passed_over(directory):
    make_dead(directory, dead_name(1))
    _, fd = create_instance(directory, 5)
    assert find_rings(directory).name == dead_name(1)
    os.close(fd)


@pytest.mark.parametrize("make", [lambda path: None, lambda path: path.mkdir()])
def test_where_there_are_no_rings_that_is_said(directory, make):
    make(directory)
    with pytest.raises(FileNotFoundError, match=r"no rings here|no such file"):
        find_rings(directory)


# --- processes that did not start each other, engines of one process --------------------------------------


def test_the_first_of_those_that_join_owns_the_instance(directory):
    first, fd = join_instance(directory, dead_name(1), keep=1)
    second, none = join_instance(directory, dead_name(1), keep=1)
    assert fd is not None
    assert none is None
    assert first == second
    assert first.alive
    os.close(fd)
    assert not first.alive


def test_processes_with_one_parent_that_is_torchrun_are_together(directory, monkeypatch):
    code = """
        import time
        from vllm_k25_instrument.instances import launched_together
        print(launched_together())
    """
    torchrun = {"TORCHELASTIC_RUN_ID": "none", "LOCAL_RANK": "0"}
    first, again, restarted = (
        run_python(textwrap.dedent(code), **torchrun | more).stdout.strip()
        for more in ({}, {"LOCAL_RANK": "1"}, {"TORCHELASTIC_RESTART_COUNT": "2"})
    )
    assert first == again
    assert re.fullmatch(rf"\d{{8}}T\d{{6}}-{os.getpid()}", first)
    assert restarted == f"{first}-2"
    assert launched_together() == ""


def test_each_engine_of_a_process_has_an_instance_of_its_own_and_its_workers_share_it(directory):
    name = dead_name(1)
    asked = ["one", "one", "two", "three", "two", "one"]
    found = [instance_of_engine(directory, name, engine) for engine in asked]
    assert found == [name, name, f"{name}-2", f"{name}-3", f"{name}-2", name]
    assert sorted(path.name for path in (directory / name).iterdir()) == ["engine"]


def test_workers_that_ask_at_the_same_moment_agree(directory):
    with ThreadPoolExecutor(8) as pool:
        for n in range(20):
            names = list(pool.map(lambda engine, n=n: instance_of_engine(directory, dead_name(n), engine), "abababab"))
            assert len(set(names)) == 2
            assert len(set(names[::2])) == len(set(names[1::2])) == 1


# --- locks -------------------------------------------------------------------------------------------------


def test_a_file_is_held_by_one_holder_at_a_time_and_asking_takes_nothing(tmp_path):
    path = tmp_path / "lock"
    first = os.open(path, os.O_RDWR | os.O_CREAT)
    second = os.open(path, os.O_RDWR)
    assert not is_held(path)
    hold(first)
    for _ in range(3):
        assert is_held(path)
    with pytest.raises(OSError, match=r"temporarily unavailable|Permission denied"):
        hold(second)
    os.close(first)
    assert not is_held(path)
    hold(second)
    assert is_held(path)
    os.close(second)


def test_closing_another_descriptor_of_the_file_does_not_let_go_of_it(tmp_path):
    """POSIX record locks would be lost here: any reader in the writer's own process would declare it dead."""
    path = tmp_path / "lock"
    fd = os.open(path, os.O_RDWR | os.O_CREAT)
    hold(fd)
    path.read_bytes()
    assert is_held(path)
    os.close(fd)


def test_a_lock_held_in_another_process_is_seen_and_gone_with_it(tmp_path):
    path = tmp_path / "lock"

    def hold_it():
        hold(os.open(path, os.O_RDWR | os.O_CREAT))
        (tmp_path / "held").touch()
        time.sleep(60)

    with child(hold_it):
        wait_for((tmp_path / "held").exists)
        assert is_held(path)
    assert not is_held(path)


def test_a_program_started_by_the_holder_does_not_inherit_the_lock(directory):
    code = f"""if True:
        import os, subprocess, sys
        from pathlib import Path
        from vllm_k25_instrument.instances import create_instance
        instance, fd = create_instance(Path({str(directory)!r}), 1)
        subprocess.Popen(["sleep", "30"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, close_fds=False)
    """
    assert run_python(code).returncode == 0
    assert not list_instances(directory)[0].alive


def test_what_is_no_file_is_not_held(tmp_path):
    (tmp_path / "file").touch()
    assert not is_held(tmp_path)
    assert not is_held(tmp_path / "nowhere")
    assert not is_held(tmp_path / "file" / "below")
    assert not is_held(Path("/dev/null"))
