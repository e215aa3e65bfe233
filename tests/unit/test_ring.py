"""The ring file: what was written is read, and what cannot be read is said."""

from __future__ import annotations

import json
import os
import random
import resource
import shutil
import stat
import struct
import subprocess
import threading
import time
import zlib
from dataclasses import replace

import pytest

from tests.export_rings import identity, kill, make_ring
from tests.samples import derived_sample, pack, run_python
from vllm_k25_instrument.model import MAX_RANGES, RANGE_BYTES, SAMPLE_BYTES
from vllm_k25_instrument.ring import (
    DEFAULT_BYTES,
    DEFAULT_SAMPLES,
    FORMAT,
    MAX_DETAILS,
    MIN_SLOTS,
    RingError,
    RingLayout,
    RingReader,
    RingWriter,
    open_rings,
    ring_file_name,
    ring_paths,
)
from vllm_k25_instrument.settings import Settings
from vllm_k25_instrument.totals import FINGERPRINT

METADATA = 256
METADATA_COPY = 64 * 1024
SLOT_HEAD = 16


@pytest.fixture
def ring(tmp_path):
    return make_ring(tmp_path)


def write(ring, steps):
    for step in steps:
        assert ring.append(pack(derived_sample(step)))


def read(ring):
    return [sample.step for sample in RingReader(ring.path).samples()]


def scribble(path, at, data):
    with path.open("r+b") as file:
        file.seek(at)
        file.write(data)


def slot_at(ring, n):
    return ring.layout.slots_offset + n * ring.layout.slot_bytes


# --- writing and reading ---------------------------------------------------------------------------------


def test_samples_come_back_whole_and_in_order(ring):
    write(ring, range(ring.layout.slots))
    assert list(RingReader(ring.path).samples()) == [derived_sample(step) for step in range(ring.layout.slots)]


def test_an_empty_ring_has_no_samples_and_no_complaints(ring):
    reader = RingReader(ring.path)
    assert list(reader.samples()) == []
    assert (reader.written, reader.overwritten, reader.corrupted) == (0, 0, 0)


@pytest.mark.parametrize("written", [15, 16, 17, 31, 32, 33, 1_000])
def test_when_the_ring_is_full_the_oldest_samples_go_and_are_counted(ring, written):
    write(ring, range(written))
    reader = RingReader(ring.path)
    kept = min(written, ring.layout.slots)
    assert [sample.step for sample in reader.samples()] == list(range(written - kept, written))
    assert (reader.written, reader.overwritten, reader.corrupted) == (written, written - kept, 0)


def test_a_reader_goes_on_where_it_was(ring):
    reader = RingReader(ring.path)
    write(ring, range(5))
    assert [s.step for s in reader.samples()] == [0, 1, 2, 3, 4]
    write(ring, range(5, 8))
    assert [s.step for s in reader.samples(since=5)] == [5, 6, 7]
    assert list(reader.samples(since=8)) == []
    assert list(reader.samples(since=100)) == []
    assert [s.step for s in reader.samples(since=-3)] == list(range(8))
    assert (reader.overwritten, reader.corrupted) == (0, 0)


def test_a_reader_that_was_too_slow_counts_what_it_missed(ring):
    reader = RingReader(ring.path)
    write(ring, range(100))
    assert [s.step for s in reader.samples(since=50)] == list(range(84, 100))
    assert reader.overwritten == 34


def test_samples_overwritten_while_they_are_read_are_counted_and_none_comes_twice(ring):
    write(ring, range(16))
    reader = RingReader(ring.path)
    samples = reader.samples()
    assert next(samples).step == 0
    write(ring, range(16, 24))
    assert [s.step for s in samples] == list(range(8, 16))
    assert (reader.overwritten, reader.corrupted) == (7, 0)


def test_a_sample_fits_to_the_last_byte_and_not_beyond(tmp_path):
    layout = RingLayout(slots=16, slot_bytes=SLOT_HEAD + SAMPLE_BYTES + 4 * RANGE_BYTES)
    ring = make_ring(tmp_path, layout=layout)
    assert layout.max_ranges == 4
    assert ring.append(pack(derived_sample(4)))
    assert not ring.append(pack(derived_sample(5)))
    assert ring.append(pack(derived_sample(3)))
    assert read(ring) == [4, 3]


def test_the_file_is_private_and_all_its_blocks_are_there(ring):
    status = ring.path.stat()
    assert stat.S_IMODE(status.st_mode) == 0o600
    assert status.st_size == ring.layout.file_bytes
    assert status.st_blocks * 512 >= status.st_size


def test_nothing_but_the_ring_is_left_in_the_folder(ring):
    assert os.listdir(ring.path.parent) == [ring.path.name]


# --- identity and details --------------------------------------------------------------------------------


def test_the_identity_is_read_as_it_stands_now(ring):
    reader = RingReader(ring.path)
    assert reader.identity == ring.identity
    for runner in ("V1", "V2", "V1"):
        ring.set_identity(replace(ring.identity, runner=runner, hooks={"step": runner}))
        assert reader.identity == ring.identity


def test_details_entered_after_the_reader_came_are_known_to_it(ring):
    reader = RingReader(ring.path)
    details = [""]
    for n in range(20):
        details.append(f"Backend{n}")
        assert ring.detail_index(details[-1]) == len(details) - 1
        sample = derived_sample(1)
        sample = replace(sample, ranges=(replace(sample.ranges[0], detail=details[-1]),))
        ring.append(pack(sample, details))
        assert list(reader.samples())[-1] == sample


def test_a_detail_keeps_its_index(ring):
    assert [ring.detail_index(name) for name in ("", "a", "b", "a", "")] == [0, 1, 2, 1, 0]


def test_a_full_table_of_details_leaves_new_ones_out(ring):
    for n in range(1, MAX_DETAILS):
        assert ring.detail_index(f"detail {n}") == n
    assert ring.detail_index("one too many") == 0
    assert ring.detail_index(f"detail {MAX_DETAILS - 1}") == MAX_DETAILS - 1
    assert RingReader(ring.path)._details[-1] == f"detail {MAX_DETAILS - 1}"


def test_details_too_long_for_the_metadata_are_left_out_and_do_no_harm(ring):
    known = [n for n in range(200) if ring.detail_index(f"{n:03}" + "x" * 1_000)]
    assert 50 < len(known) < 66
    assert ring.detail_index("short") == len(known) + 1
    ring.append(pack(derived_sample(3)))
    reader = RingReader(ring.path)
    assert [s.step for s in reader.samples()] == [3]
    assert reader._details[-1] == "short"


def test_an_identity_too_long_for_the_metadata_is_refused_and_the_old_one_stays(ring):
    before = ring.identity
    with pytest.raises(ValueError, match="do not fit"):
        ring.set_identity(replace(before, model="x" * METADATA_COPY))
    assert ring.identity == RingReader(ring.path).identity == before


def test_a_ring_whose_identity_is_too_long_is_not_made(tmp_path):
    with pytest.raises(ValueError, match="do not fit"):
        make_ring(tmp_path, model="x" * METADATA_COPY)
    assert os.listdir(tmp_path) == []


def test_names_in_any_script_come_back(tmp_path):
    ring = make_ring(tmp_path, model="模型/😀 \"'")
    assert RingReader(ring.path).identity.model == "模型/😀 \"'"


def test_what_a_terminal_would_obey_and_what_is_no_text_come_back_as_signs(tmp_path):
    ring = make_ring(tmp_path, model="a\nb\x1b[31m\x00\udc80\u202e")
    assert RingReader(ring.path).identity.model == "a b\ufffd[31m\ufffd\ufffd\ufffd"


def test_hooks_and_details_may_come_from_two_threads(ring):
    def enter_details():
        for n in range(300):
            ring.detail_index(f"detail {n}")

    thread = threading.Thread(target=enter_details)
    thread.start()
    for n in range(300):
        ring.set_identity(replace(ring.identity, runner=str(n)))
    thread.join()
    reader = RingReader(ring.path)
    assert reader.identity.runner == "299"
    assert reader._details == ["", *(f"detail {n}" for n in range(300))]


# --- files that are no readable ring ---------------------------------------------------------------------


def refused(path):
    with pytest.raises(RingError) as caught:
        RingReader(path)
    assert caught.value.path == path
    assert str(caught.value) == f"{path}: {caught.value.reason}"
    assert "\n" not in caught.value.reason
    return caught.value.reason


def test_a_ring_cut_off_anywhere_is_said_to_be_truncated(ring, tmp_path):
    write(ring, range(16))
    whole = ring.path.read_bytes()
    sizes = {0, 1, 8, 255, 256, 257, METADATA + 15, METADATA + 100, METADATA + 2 * METADATA_COPY}
    sizes |= {ring.layout.slots_offset + d for d in (-1, 0, 1)} | {slot_at(ring, 3) + d for d in (-1, 0, 20)}
    sizes |= {len(whole) - 1, *range(0, len(whole), len(whole) // 100)} - {len(whole)}
    cut = tmp_path / "cut.ring"
    for size in sorted(sizes):
        cut.write_bytes(whole[:size])
        assert refused(cut).startswith("truncated: ")


def test_a_file_longer_than_its_ring_is_read(ring):
    write(ring, range(3))
    with ring.path.open("ab") as file:
        file.write(b"more")
    assert read(ring) == [0, 1, 2]


PREAMBLE = "<8sIIIIIIQ"


def with_preamble(ring, **changes):
    names = ("magic", "form", "fingerprint", "metadata", "totals", "slots", "slot_bytes", "written")
    data = ring.path.read_bytes()[: struct.calcsize(PREAMBLE)]
    fields = dict(zip(names, struct.unpack(PREAMBLE, data), strict=True)) | changes
    scribble(ring.path, 0, struct.pack(PREAMBLE, *fields.values()))
    return ring.path


def test_a_file_that_is_something_else_is_said_to_be_no_ring(tmp_path):
    path = tmp_path / "x.ring"
    for content in (bytes(4096), b"#!/bin/sh\n" * 100, random.Random(1).randbytes(100_000)):
        path.write_bytes(content)
        assert "not a ring file" in refused(path)


@pytest.mark.parametrize(
    "change",
    [{"form": FORMAT + 1}, {"form": 0}, {"fingerprint": FINGERPRINT ^ 1}, {"metadata": 4096}, {"totals": 8}],
)
def test_a_ring_of_another_version_names_both_versions(ring, change):
    reason = refused(with_preamble(ring, **change))
    assert "another version of vllm-k25-instrument" in reason
    assert f"this one reads format {FORMAT}, vocabulary {FINGERPRINT:08x}" in reason


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"slots": 0}, "corrupted: 0 slots"),
        ({"slot_bytes": 0}, "corrupted: 16 slots of 0 bytes"),
        ({"slot_bytes": 4095}, "corrupted: 16 slots of 4095 bytes"),
        ({"slots": 0xFFFFFFFF}, "corrupted: 4294967295 slots"),
        ({"slot_bytes": 0xFFFFFFF8}, "corrupted: 16 slots of 4294967288 bytes"),
        ({"slots": 1_000_000}, "truncated"),
        ({"slots": 17}, "truncated"),
    ],
)
def test_impossible_sizes_are_damage(ring, change, reason):
    assert refused(with_preamble(ring, **change)).startswith(reason)


def test_a_damaged_number_of_samples_costs_samples_and_nothing_else(ring):
    write(ring, range(16))
    for written in (1 << 40, (1 << 64) - 1):
        reader = RingReader(with_preamble(ring, written=written))
        assert list(reader.samples()) == []
        assert reader.corrupted == ring.layout.slots
    assert [s.step for s in RingReader(with_preamble(ring, written=3)).samples()] == [0, 1, 2]


def metadata(document, sequence=2):
    return struct.pack("<QII", sequence, len(document), zlib.crc32(document)) + document


def documents():
    good = {"identity": {}, "details": []}
    yield from (b"", b"\xff\xfe", b"[]", b"null", b"3", b'"x"', b"{", b"[" * 60_000, b"{}")
    yield json.dumps(good).encode()


@pytest.mark.parametrize("document", list(documents()), ids=range(10))
def test_metadata_that_are_no_identity_are_damage(ring, document):
    scribble(ring.path, METADATA, metadata(document))
    assert refused(ring.path).startswith("corrupted: unreadable metadata")


@pytest.mark.parametrize(
    "change",
    [
        {"identity": None},
        {"identity": {"instance": "x", "pid": 1, "coordinates": {"global_rank": "zero"}}},
        {"identity": {"instance": "x", "pid": 1, "coordinates": {"tp": None}}},
        {"identity": {"instance": "x", "pid": 1, "coordinates": []}},
        {"identity": {"instance": "x", "pid": "1", "coordinates": {}}},
        {"identity": {"instance": 5, "pid": 1, "coordinates": {}}},
        {"identity": {"instance": "x", "pid": 1, "coordinates": {}, "hooks": ["step"]}},
        {"identity": {"instance": "x", "pid": 1, "coordinates": {}, "hooks": {"step": 1}}},
        {"identity": {"instance": "x", "pid": 1, "coordinates": {}, "unheard of": 1}},
        {"details": None},
        {"details": "text"},
        {"details": {"0": ""}},
        {"details": [1, 2]},
    ],
)
def test_metadata_with_a_field_of_another_type_are_damage(ring, change):
    good = {"identity": {"instance": "x", "pid": 1, "coordinates": {}}, "details": [""]}
    scribble(ring.path, METADATA, metadata(json.dumps(good).encode()))
    assert RingReader(ring.path).identity.instance == "x"
    scribble(ring.path, METADATA, metadata(json.dumps(good | change).encode()))
    assert refused(ring.path).startswith("corrupted: unreadable metadata")


def test_random_metadata_are_damage(ring):
    rng = random.Random(3)
    for _ in range(200):
        scribble(ring.path, METADATA, rng.randbytes(64))
        assert refused(ring.path) == "corrupted: its metadata do not match their checksum"


def test_one_damaged_copy_of_the_metadata_leaves_the_other(ring):
    first = ring.identity
    ring.set_identity(replace(first, runner="newer"))
    scribble(ring.path, METADATA + METADATA_COPY + 40, b"\xff" * 8)
    reader = RingReader(ring.path)
    assert reader.identity == first
    write(ring, range(3))
    assert [s.step for s in reader.samples()] == [0, 1, 2]


def test_flipped_bits_in_a_slot_cost_that_sample_and_are_counted(ring):
    write(ring, range(16))
    length = len(pack(derived_sample(5)))
    for bit in range(8 * (SLOT_HEAD + length)):
        at = slot_at(ring, 5) + bit // 8
        before = ring.path.read_bytes()[at]
        scribble(ring.path, at, bytes([before ^ 1 << bit % 8]))
        reader = RingReader(ring.path)
        steps = [s.step for s in reader.samples()]
        assert steps == [n for n in range(16) if n != 5]
        assert reader.corrupted + reader.overwritten == 1
        scribble(ring.path, at, bytes([before]))
    assert read(ring) == list(range(16))


def test_a_slot_with_a_good_checksum_and_no_sample_in_it_is_counted(ring):
    write(ring, range(3))
    ring.append(b"no sample")
    ring.append(pack(derived_sample(1), ["", *"abc"])[:-1])
    reader = RingReader(ring.path)
    assert [s.step for s in reader.samples()] == [0, 1, 2]
    assert reader.corrupted == 2


def test_a_file_scribbled_over_at_random_is_refused_or_read_and_nothing_else(ring, tmp_path):
    write(ring, range(16))
    whole = ring.path.read_bytes()
    rng = random.Random(4)
    path = tmp_path / "damaged.ring"
    for _ in range(60):
        damaged = bytearray(whole)
        for _ in range(rng.choice((1, 10, 1_000))):
            damaged[rng.randrange(rng.choice((64, 1_024, len(whole))))] = rng.randrange(256)
        path.write_bytes(damaged)
        try:
            reader = RingReader(path)
        except RingError:
            continue
        for sample in reader.samples():
            assert sample == derived_sample(sample.step)
        list(reader.totals().batch_rows())


# --- things that only have the name of a ring ------------------------------------------------------------


def make_directory(path):
    path.mkdir()


def make_dangling_link(path):
    path.symlink_to("nowhere")


def make_link_to_itself(path):
    path.symlink_to(path.name)


def make_pipe(path):
    os.mkfifo(path)


def make_empty_file(path):
    path.touch()


def make_device(path):
    path.symlink_to("/dev/zero")


STRANGE = [make_directory, make_dangling_link, make_link_to_itself, make_pipe, make_empty_file, make_device]


@pytest.mark.timeout(20)
@pytest.mark.parametrize("make", STRANGE)
def test_a_thing_that_only_has_the_name_of_a_ring_is_refused_at_once(tmp_path, make):
    path = tmp_path / "x.ring"
    make(path)
    assert refused(path)


@pytest.mark.timeout(20)
def test_the_good_rings_of_a_folder_are_read_whatever_lies_beside_them(tmp_path):
    for rank in (3, 0, 10):
        write(make_ring(tmp_path, rank), [rank])
    for make in STRANGE:
        make(tmp_path / f"{make.__name__}.ring")
    scribble(make_ring(tmp_path, 4).path, METADATA + 20, b"\xff" * 16)
    make_directory(tmp_path / "not-a-ring")
    readers, errors = open_rings(tmp_path)
    assert [reader.identity.coordinates.global_rank for reader in readers] == [0, 3, 10]
    assert [[s.step for s in reader.samples()] for reader in readers] == [[0], [3], [10]]
    assert {error.path.name for error in errors} == {f"{make.__name__}.ring" for make in STRANGE} | {ring_file_name(4)}


def test_a_folder_without_rings_and_one_that_is_not_there_have_none(tmp_path):
    assert open_rings(tmp_path) == ([], [])
    assert open_rings(tmp_path / "nowhere") == ([], [])


def test_one_ring_may_be_named_itself(ring, tmp_path):
    assert ring_paths(ring.path) == [ring.path]
    (reader,), errors = open_rings(ring.path)
    assert reader.path == ring.path
    assert errors == []


def test_a_ring_cut_off_while_it_is_open_is_said_to_be_truncated(ring):
    write(ring, range(16))
    code = f"""if True:
        import os
        from pathlib import Path
        from vllm_k25_instrument.ring import RingError, RingReader
        readers = [RingReader(Path({str(ring.path)!r})) for _ in range(4)]
        half = readers[3].samples()
        next(half)
        os.truncate({str(ring.path)!r}, 0)
        for look in (lambda: list(readers[0].samples()), readers[1].totals, lambda: readers[2].identity,
                     lambda: readers[0].written, lambda: list(half)):
            try:
                look()
            except RingError as error:
                print(error.reason)
    """
    # In a process of its own: reading beyond the end of a file would kill it.
    result = run_python(code)
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines() == [f"truncated: 0 of {ring.layout.file_bytes} bytes"] * 5


@pytest.mark.parametrize("size", [0, 40, 300, 200_000])
def test_a_ring_cut_off_under_its_writer_is_made_whole_again_and_keeps_its_counters(ring, size):
    write(ring, range(20))
    ring.totals.add_step(0, 12_000_000)
    assert ring.detail_index("pynccl") == 1
    os.truncate(ring.path, size)
    write(ring, range(20, 23))
    ring.totals.add_step(0, 12_000_000)
    reader = RingReader(ring.path)
    assert [sample.step for sample in reader.samples()][-3:] == [20, 21, 22]
    assert reader.written == 23
    assert reader.totals().steps(0) == 2
    assert reader.identity == ring.identity
    assert ring.path.stat().st_blocks * 512 >= ring.layout.file_bytes


def test_counters_that_somebody_scribbles_over_are_put_right_with_the_next_step(ring):
    ring.totals.add_step(0, 12_000_000)
    scribble(ring.path, METADATA + 2 * METADATA_COPY, b"\xff" * 8_000)
    ring.totals.add_step(0, 12_000_000)  # what is in the file is never added to
    totals = RingReader(ring.path).totals()
    assert (totals.steps(0), totals.step_duration(0).sum_ns) == (2, 24_000_000)


def test_a_ring_that_cannot_be_made_whole_is_an_os_error(ring):
    """The limit on the size of files stands for a file system that has no room any more."""
    write(ring, range(3))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    os.truncate(ring.path, 0)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            ring.append(pack(derived_sample(3)))
        with pytest.raises(OSError, match="File too large"):
            ring.publish()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    write(ring, [4])
    assert read(ring) == [4]


# --- the writer's life ------------------------------------------------------------------------------------


def test_a_ring_is_alive_until_its_writer_is_gone(ring):
    reader = RingReader(ring.path)
    assert reader.alive
    kill(ring)
    assert not reader.alive


def test_a_process_id_says_nothing_about_life(tmp_path):
    """The id in a dead ring may belong to another process by now; here it is even our own."""
    ring = make_ring(tmp_path, pid=os.getpid())
    kill(ring)
    assert not RingReader(ring.path).alive
    assert RingReader(make_ring(tmp_path, 1, pid=2**22 + 1).path).alive


def test_a_new_ring_takes_the_place_of_a_dead_one_and_readers_of_the_old_one_keep_it(ring):
    write(ring, range(3))
    reader = RingReader(ring.path)
    kill(ring)
    new = RingWriter(ring.path, identity(), ring.layout)
    write(new, range(50, 52))
    assert read(new) == [50, 51]
    assert [s.step for s in reader.samples()] == [0, 1, 2]


def test_the_ring_of_another_living_process_is_not_replaced(tmp_path):
    ring = make_ring(tmp_path, pid=os.getpid() + 1)
    write(ring, range(3))
    with pytest.raises(OSError, match="another living process"):
        make_ring(tmp_path)
    assert read(ring) == [0, 1, 2]
    kill(ring)
    assert read(make_ring(tmp_path)) == []


def test_what_a_killed_start_left_behind_is_overwritten(tmp_path):
    (tmp_path / f"rank-00000.{os.getpid()}.partial").write_bytes(b"left behind")
    make_ring(tmp_path)
    assert os.listdir(tmp_path) == ["rank-00000.ring"]


@pytest.mark.parametrize("where", ["nowhere/x.ring", "file/x.ring"])
def test_a_ring_that_cannot_be_made_is_an_os_error_and_leaves_nothing(tmp_path, where):
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match=r"No such file|Not a directory"):
        RingWriter(tmp_path / where, identity(), RingLayout(16, 4096))
    assert os.listdir(tmp_path) == ["file"]


def test_a_ring_in_the_place_of_a_folder_is_an_os_error_and_leaves_nothing(tmp_path):
    (tmp_path / ring_file_name(0)).mkdir()
    with pytest.raises(OSError, match="directory"):
        make_ring(tmp_path)
    assert os.listdir(tmp_path) == [ring_file_name(0)]


# --- sizes -----------------------------------------------------------------------------------------------


def test_the_default_ring_is_what_the_readme_says():
    layout = RingLayout.plan(DEFAULT_SAMPLES, DEFAULT_BYTES)
    assert (layout.slots, layout.slot_bytes, layout.max_ranges) == (4096, 16_384, 509)
    assert "509 ranges" in str(Settings.model_fields["ring_bytes"].description)


@pytest.mark.parametrize("samples", [1, 16, 17, 100, 4096, 5000, 1_000_000])
@pytest.mark.parametrize("total", [64 * 1024, 100_000, 1 << 20, 64 << 20, 16 << 30])
def test_a_planned_ring_stays_within_both_limits(samples, total):
    layout = RingLayout.plan(samples, total)
    assert MIN_SLOTS <= layout.slots <= max(samples, MIN_SLOTS)
    assert layout.slots * layout.slot_bytes <= max(total, MIN_SLOTS * 512) or layout.slots == MIN_SLOTS
    assert layout.slot_bytes % 64 == 0
    assert 512 <= layout.slot_bytes <= SLOT_HEAD + SAMPLE_BYTES + MAX_RANGES * RANGE_BYTES + 64
    assert layout.max_ranges >= 13
    assert layout.slots_offset % 4096 == 0


def test_no_slot_is_larger_than_the_largest_sample():
    assert RingLayout.plan(16, 16 << 30).max_ranges in (MAX_RANGES, MAX_RANGES + 1)


@pytest.mark.parametrize(("slots", "slot_bytes"), [(0, 4096), (-1, 4096), (16, 0), (16, 71), (16, 4095), (16, 4100)])
def test_a_layout_in_which_no_sample_fits_is_refused(slots, slot_bytes):
    with pytest.raises(ValueError, match="slots of"):
        RingLayout(slots, slot_bytes)


# --- a file system without room ----------------------------------------------------------------------------


@pytest.fixture
def tmpfs(tmp_path):
    """Mounts a tmpfs of a given size."""
    mounted = []

    def mount(size):
        path = tmp_path / f"tmpfs-{size}"
        path.mkdir()
        command = [shutil.which("mount") or "mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(path)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False)
        except OSError as error:
            pytest.skip(f"cannot mount a tmpfs: {error}")
        if done.returncode:
            pytest.skip(f"cannot mount a tmpfs: {done.stderr.strip()}")
        mounted.append(path)
        return path

    yield mount
    for path in mounted:
        subprocess.run(["umount", "--lazy", str(path)], check=True)


WRITE_A_RING = """if True:
    import sys
    from pathlib import Path
    from tests.export_rings import identity
    from tests.samples import derived_sample, pack
    from vllm_k25_instrument.ring import RingLayout, RingReader, RingWriter
    try:
        ring = RingWriter(Path(sys.argv[1], "rank-00000.ring"), identity(), RingLayout.plan(4096, 64 << 20))
    except OSError as error:
        sys.exit(f"OSError {error.strerror}")
    sample = pack(derived_sample(11))
    room = ring.layout.slot_bytes - 16 - len(sample)
    for _ in range(3 * ring.layout.slots):
        assert ring.append(sample + bytes(room))  # every byte of every slot
    for n in range(200):
        ring.detail_index(f"detail {n}")
    print(ring.layout.slots)
"""


@pytest.mark.parametrize("size", ["1m", "9m", "33m"])
def test_where_there_is_little_room_the_ring_has_fewer_slots_and_can_be_filled(tmpfs, size):
    result = run_python(WRITE_A_RING, tmpfs(size))
    assert result.returncode == 0, result.stderr
    assert int(result.stdout) == {"1m": 32, "9m": 512, "33m": 2048}[size]


@pytest.mark.parametrize("size", ["4k", "64k", "256k"])
def test_where_there_is_no_room_the_ring_is_an_os_error_and_leaves_nothing(tmpfs, size):
    folder = tmpfs(size)
    result = run_python(WRITE_A_RING, folder)
    assert (result.returncode, result.stderr) == (1, "OSError No space left on device\n")
    assert os.listdir(folder) == []


def test_a_file_system_that_fills_up_later_does_not_hurt_the_ring(tmpfs):
    folder = tmpfs("2m")
    ring = make_ring(folder)
    with (folder / "ballast").open("wb", buffering=0) as file, pytest.raises(OSError, match="No space left"):
        for _ in iter(lambda: file.write(bytes(65_536)), 0):
            pass
    write(ring, range(100))
    ring.set_identity(replace(ring.identity, runner="still writing"))
    assert read(ring) == list(range(84, 100))


# --- cost ------------------------------------------------------------------------------------------------


def test_a_reader_of_a_full_default_ring_reads_no_more_than_it_is_asked_for(tmp_path):
    ring = make_ring(tmp_path, layout=RingLayout.plan(DEFAULT_SAMPLES, DEFAULT_BYTES))
    write(ring, range(DEFAULT_SAMPLES))
    reader = RingReader(ring.path)
    begun = time.perf_counter()
    assert len(list(reader.samples(since=DEFAULT_SAMPLES - 10))) == 10
    assert time.perf_counter() - begun < 0.1
