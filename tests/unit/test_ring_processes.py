"""Rings between processes: readers that race with the writer, and writers that are killed."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import replace

import pytest

from tests.export_rings import identity, make_ring
from tests.samples import ROOT, child, derived_sample, pack, run_python, wait_for
from vllm_k25_instrument.model import LIVE_CATEGORIES
from vllm_k25_instrument.ring import RingError, RingLayout, RingReader, RingWriter, open_rings, ring_file_name

SMALL = RingLayout(slots=16, slot_bytes=1024)


def write_for_ever(folder, layout=SMALL, changes_of_metadata=False):
    """As fast as it can: samples that follow from their number, and with them new details and identities."""
    ring = make_ring(folder, layout=layout, pid=0)
    packed = [pack(derived_sample(step)) for step in range(997)]
    step = 0
    while True:
        ring.append(packed[step % len(packed)])
        step += 1
        if changes_of_metadata:
            ring.detail_index(f"detail {step}")
            ring.set_identity(replace(ring.identity, pid=step, runner=str(step), hooks={"step": str(step) * 50}))


@pytest.mark.parametrize("slots", [1, 2, 16, 256])
def test_a_reader_never_sees_a_torn_sample_while_the_writer_writes_as_fast_as_it_can(tmp_path, slots):
    path = tmp_path / ring_file_name(0)
    with child(lambda: write_for_ever(tmp_path, RingLayout(slots, 1024))):
        wait_for(path.exists)
        reader = RingReader(path)
        following, seen = 0, 0
        until = time.monotonic() + 0.8
        while time.monotonic() < until:
            before = reader.overwritten + reader.corrupted
            seen_before, end = seen, reader.written
            for sample in reader.samples(since=following):
                assert sample == derived_sample(sample.step)
                seen += 1
            lost = reader.overwritten + reader.corrupted - before
            assert following + seen - seen_before + lost >= end, "a sample has been neither read nor counted"
            following += seen - seen_before + lost
        assert reader.corrupted == 0
        assert following == seen + reader.overwritten
        assert reader.written > 1_000
        assert seen > 0


def test_a_reader_always_finds_whole_metadata_while_the_writer_changes_them_as_fast_as_it_can(tmp_path):
    path = tmp_path / ring_file_name(0)
    with child(lambda: write_for_ever(tmp_path, changes_of_metadata=True)):
        wait_for(path.exists)
        reader = RingReader(path)
        last, different = 0, 0
        until = time.monotonic() + 1
        while time.monotonic() < until:
            now = reader.identity
            if now.pid:
                assert now.runner == str(now.pid)
                assert now.hooks == {"step": str(now.pid) * 50}
            assert now.pid >= last
            different += now.pid != last
            last = now.pid
            RingReader(path).close()
        assert different > 10


def test_a_reader_s_counters_agree_with_one_another_to_the_step_that_is_being_added(tmp_path):
    def count_for_ever():
        ring = make_ring(tmp_path, pid=0)
        split = [7] * len(LIVE_CATEGORIES)
        while True:
            ring.totals.add_step(0, 7)
            ring.totals.add_sample(0, 0, 1, sum(split), split)
            time.sleep(0.0001)

    path = tmp_path / ring_file_name(0)
    with child(count_for_ever):
        wait_for(path.exists)
        reader = RingReader(path)
        wait_for(lambda: reader.totals().steps(0) > 0)
        last, until = 0, time.monotonic() + 1
        while time.monotonic() < until:
            totals = reader.totals()
            steps = totals.steps(0)
            assert steps >= last
            assert abs(totals.step_duration(0).count - steps) <= 1
            assert abs(totals.step_duration(0).sum_ns - 7 * steps) <= 7
            assert abs(totals.sampled(0) - steps) <= 1
            for category in range(len(LIVE_CATEGORIES)):
                assert abs(totals.category(0, category).sum_ns - 7 * steps) <= 14
            last = steps
        assert last > 100


def test_readers_do_not_disturb_one_another_or_the_writer(tmp_path):
    path = tmp_path / ring_file_name(0)

    def read_for_ever():
        while True:
            reader = RingReader(path)
            list(reader.samples())
            assert reader.alive
            reader.close()

    with child(lambda: write_for_ever(tmp_path)):
        wait_for(path.exists)
        with child(read_for_ever), child(read_for_ever), child(read_for_ever):
            reader = RingReader(path)
            before = reader.written
            wait_for(lambda: reader.written > before + 10_000)
            assert reader.alive


# --- writers that are killed -------------------------------------------------------------------------------


@pytest.mark.parametrize("changes_of_metadata", [False, True], ids=["samples", "samples and metadata"])
def test_a_ring_is_readable_whenever_its_writer_was_killed(tmp_path, changes_of_metadata):
    rng = random.Random(5)
    unfinished = 0
    for n in range(60):
        folder = tmp_path / str(n)
        folder.mkdir()
        path = folder / ring_file_name(0)
        with child(lambda folder=folder: write_for_ever(folder, changes_of_metadata=changes_of_metadata)):
            wait_for(path.exists)
            reader = RingReader(path)
            assert reader.alive
            time.sleep(rng.random() * 0.02)
        assert not reader.alive
        reader = RingReader(path)
        samples = list(reader.samples())
        assert all(sample == derived_sample(sample.step) for sample in samples)
        # At most the slot that was being written is lost, and it is accounted for.
        lost = reader.corrupted + reader.overwritten - max(0, reader.written - SMALL.slots)
        assert lost in (0, 1)
        assert len(samples) + lost == min(reader.written, SMALL.slots)
        if reader.identity.pid:
            assert reader.identity.runner == str(reader.identity.pid)
        unfinished += lost
        reader.close()
    assert unfinished < 60


def test_no_half_made_ring_is_ever_seen_whenever_its_writer_was_killed(tmp_path):
    def make_rings():
        for n in range(100_000):
            (tmp_path / str(n)).mkdir()
            RingWriter(tmp_path / str(n) / ring_file_name(0), identity(), SMALL)
            os.unlink(tmp_path / str(n - 50) / ring_file_name(0)) if n >= 50 else None

    rng = random.Random(6)
    for _ in range(15):
        with child(make_rings):
            time.sleep(rng.random() * 0.03)
        for folder in tmp_path.iterdir():
            _, errors = open_rings(folder)
            assert errors == []
            for file in folder.iterdir():
                file.unlink()
            folder.rmdir()


def test_a_ring_appears_complete(tmp_path):
    """Look at it as soon as the name is there, again and again."""

    def make_rings():
        n = 0
        while True:
            RingWriter(tmp_path / ring_file_name(0), replace(identity(), runner=str(n)), SMALL)
            n += 1
            if n % 200 == 0:
                os.closerange(3, 4096)  # what the dropped writers hold open

    with child(make_rings):
        path = tmp_path / ring_file_name(0)
        wait_for(path.exists)
        until, looks = time.monotonic() + 0.8, 0
        while time.monotonic() < until:
            reader = RingReader(path)
            assert reader.identity.model == identity().model
            reader.close()
            looks += 1
        assert looks > 100


WRITE = """if True:
    import sys, time
    from pathlib import Path
    from tests.export_rings import make_ring
    from tests.samples import derived_sample, pack
    ring = make_ring(Path(sys.argv[1]), int(sys.argv[2]))
    for step in range(5):
        ring.append(pack(derived_sample(step)))
    print("written", flush=True)
    time.sleep(60)
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV, signal.SIGBUS])
def test_however_the_writer_dies_its_ring_is_no_longer_alive_and_its_samples_are_there(tmp_path, how):
    writer = subprocess.Popen([sys.executable, "-c", WRITE, tmp_path, "0"], cwd=ROOT, stdout=subprocess.PIPE)
    try:
        assert writer.stdout is not None
        assert writer.stdout.readline() == b"written\n"
        reader = RingReader(tmp_path / ring_file_name(0))
        assert reader.alive
        writer.send_signal(how)
        writer.wait(20)
        assert not reader.alive
        assert [sample.step for sample in reader.samples()] == list(range(5))
    finally:
        writer.kill()
        writer.wait()
        writer.stdout.close()


def test_two_processes_cannot_write_one_ring(tmp_path):
    writer = subprocess.Popen([sys.executable, "-c", WRITE, tmp_path, "3"], cwd=ROOT, stdout=subprocess.PIPE)
    try:
        assert writer.stdout is not None
        assert writer.stdout.readline() == b"written\n"
        with pytest.raises(OSError, match="another living process"):
            make_ring(tmp_path, 3)
    finally:
        writer.kill()
        writer.wait()
        writer.stdout.close()
    assert len(list(RingReader(tmp_path / ring_file_name(3)).samples())) == 5
    make_ring(tmp_path, 3)


def test_a_ring_that_vanishes_is_an_error_and_no_crash(tmp_path):
    def come_and_go():
        while True:
            ring = RingWriter(tmp_path / ring_file_name(0), identity(), SMALL)
            os.unlink(ring.path)
            os.close(ring._fd)

    with child(come_and_go):
        until = time.monotonic() + 0.4
        while time.monotonic() < until:
            try:
                reader = RingReader(tmp_path / ring_file_name(0))
            except RingError as error:
                assert error.reason == "No such file or directory"  # noqa: PT017
            else:
                assert list(reader.samples()) == []
                reader.close()


CUT_SHORT = """if True:
    import os, sys, time
    from pathlib import Path
    from vllm_k25_instrument.ring import RingError, RingReader
    path, reads, refusals, until = Path(sys.argv[1]), 0, 0, time.monotonic() + 1.5
    while time.monotonic() < until:
        try:
            reader = RingReader(path)
            for _ in range(3):
                reader.totals(), reader.identity, list(reader.samples())
            reads += 1
        except RingError:
            refusals += 1
    print(reads, refusals)
"""


def test_neither_end_dies_of_a_ring_that_is_cut_short_again_and_again(tmp_path):
    path = tmp_path / ring_file_name(0)

    def cut_for_ever():
        rng = random.Random(7)
        while True:
            os.truncate(path, rng.choice((0, 40, 300, 140_000, rng.randrange(path.stat().st_size + 1))))
            time.sleep(rng.random() * 0.001)

    with child(lambda: write_for_ever(tmp_path)) as writer:
        wait_for(path.exists)
        with child(cut_for_ever):
            result = run_python(CUT_SHORT, path)
        assert result.returncode == 0, result.stderr
        reads, refusals = map(int, result.stdout.split())
        assert reads + refusals > 100
        assert refusals > 0
        assert os.waitpid(writer, os.WNOHANG) == (0, 0)  # still running
        wait_for(lambda: samples_in(path))  # made whole again


def samples_in(path):
    try:
        return bool(list(RingReader(path).samples()))
    except RingError:
        return False
