"""A scrape sees the rings that are there, whatever happens to them, and never fails."""

from __future__ import annotations

import logging
import os
import shutil

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from tests.export_rings import STEP_NS, identity, kill, make_ring, touch_everything
from tests.exposition import assert_exposition_is_sound, our_samples, value_of
from vllm_k25_instrument.export.collector import RingCollector
from vllm_k25_instrument.export.follow import InstanceFollower
from vllm_k25_instrument.model import RANGE_COLUMNS, pack_sample
from vllm_k25_instrument.ring import ring_file_name

DECODE = 0


def steps_of(collector, rank=0):
    return value_of(text_of(collector), "vllm_k25_steps_total", rank=str(rank), phase="decode")


def text_of(collector):
    return generate_latest(collector).decode()


def ranks_of(collector):
    return {dict(labels)["rank"] for name, labels in our_samples(text_of(collector)) if "overhead" in name}


@pytest.fixture
def server(tmp_path):
    return tmp_path / "server"


@pytest.fixture
def collector(server):
    found = RingCollector(lambda: server)
    yield found
    found.close()


def test_a_scrape_shows_every_rank(server, collector):
    writers = [make_ring(server, rank) for rank in range(8)]
    for writer in writers:
        touch_everything(writer.totals)
    text = text_of(collector)
    assert_exposition_is_sound(text)
    assert ranks_of(collector) == {str(rank) for rank in range(8)}


def test_a_scrape_shows_what_was_counted_since_the_last_one(server, collector):
    writer = make_ring(server)
    assert steps_of(collector) == 0
    writer.totals.add_step(DECODE, STEP_NS)
    assert steps_of(collector) == 1


def test_a_scrape_shows_hooks_that_were_attached_later(server, collector):
    writer = make_ring(server, hooks={"mla_decode": "waiting"})
    assert value_of(text_of(collector), "vllm_k25_hook_attached", rank="0", hook="mla_decode") == 0
    writer.set_identity(identity(hooks={"mla_decode": "attached"}))
    assert value_of(text_of(collector), "vllm_k25_hook_attached", rank="0", hook="mla_decode") == 1


def test_rings_stay_open_between_scrapes(server, collector, monkeypatch):
    make_ring(server)
    text_of(collector)
    monkeypatch.setattr("vllm_k25_instrument.export.collector.RingReader", None)
    assert ranks_of(collector) == {"0"}


def test_a_ring_that_comes_later_joins(server, collector):
    assert ranks_of(collector) == set()
    make_ring(server, 0)
    assert ranks_of(collector) == {"0"}
    make_ring(server, 1)
    assert ranks_of(collector) == {"0", "1"}


def test_a_replaced_ring_is_read_anew(server, collector):
    make_ring(server).totals.add_step(DECODE, STEP_NS)
    assert steps_of(collector) == 1
    make_ring(server)
    assert steps_of(collector) == 0


def test_a_vanished_ring_takes_its_series_along(server, collector):
    make_ring(server, 0)
    make_ring(server, 1)
    assert ranks_of(collector) == {"0", "1"}
    (server / ring_file_name(1)).unlink()
    assert ranks_of(collector) == {"0"}
    shutil.rmtree(server)
    assert ranks_of(collector) == set()


def test_the_ring_of_a_dead_writer_is_still_shown(server, collector):
    writer = make_ring(server)
    writer.totals.add_step(DECODE, STEP_NS)
    kill(writer)
    assert steps_of(collector) == 1


def scribble(path, at, data):
    with path.open("r+b") as file:
        file.seek(at)
        file.write(data)


BREAKAGES = {
    "foreign": lambda path: path.write_bytes(b"#!/bin/sh\n" * 100),
    "empty": lambda path: path.write_bytes(b""),
    "truncated": lambda path: os.truncate(path, 8192),
    "of another version": lambda path: scribble(path, 12, b"\xff\xff"),
    "torn": lambda path: scribble(path, 256, b"\x01"),
    "with unreadable metadata": lambda path: scribble(path, 256 + 16, b"\xff" * 64),
}


@pytest.mark.parametrize("break_it", BREAKAGES.values(), ids=BREAKAGES.keys())
def test_a_broken_ring_is_logged_once_and_the_others_are_shown(server, collector, caplog, break_it):
    make_ring(server, 0)
    make_ring(server, 1)
    break_it(server / ring_file_name(1))
    for _ in range(3):
        assert ranks_of(collector) == {"0"}
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert ring_file_name(1) in caplog.text


def test_a_ring_truncated_while_it_is_open_is_left_out(server, collector, caplog):
    make_ring(server, 0)
    make_ring(server, 1)
    assert ranks_of(collector) == {"0", "1"}
    os.truncate(server / ring_file_name(1), 4096)  # reading the mapping now would be a SIGBUS
    assert ranks_of(collector) == {"0"}
    assert "truncated: 4096 of" in caplog.text


def test_a_ring_that_is_whole_again_comes_back(server, collector, caplog):
    make_ring(server, 0)
    (server / ring_file_name(0)).write_bytes(b"?")
    assert ranks_of(collector) == set()
    make_ring(server, 0)
    assert ranks_of(collector) == {"0"}


def test_a_copy_of_a_ring_does_not_show_a_rank_twice(server, collector, caplog):
    make_ring(server, 0)
    shutil.copy(server / ring_file_name(0), server / "rank-00000-copy.ring")
    for _ in range(2):
        text = text_of(collector)
    assert_exposition_is_sound(text)
    assert caplog.text.count("a second ring of rank 0") == 1


def test_a_folder_that_cannot_be_found_is_an_empty_scrape(caplog):
    def locate():
        raise FileNotFoundError(2, "no rings here")

    assert our_samples(text_of(RingCollector(locate))) == {}
    assert caplog.records == []  # before the first server starts this is how things are


def test_a_folder_that_cannot_be_read_is_logged_once(caplog):
    def locate():
        raise PermissionError(13, "Permission denied", "/rings")

    collector = RingCollector(locate)
    for _ in range(3):
        assert our_samples(text_of(collector)) == {}
    assert [record.getMessage() for record in caplog.records] == [
        "K25: no rings can be found: [Errno 13] Permission denied: '/rings'"
    ]


def test_a_second_collector_in_one_registry_is_refused_by_name(server):
    registry = CollectorRegistry()
    registry.register(RingCollector(lambda: server))
    with pytest.raises(ValueError, match="vllm_k25_steps"):
        registry.register(RingCollector(lambda: server))


def test_ten_thousand_details_layers_and_batches_leave_the_number_of_series_constant(server, collector):
    writer = make_ring(server)
    touch_everything(writer.totals)
    before = set(our_samples(text_of(collector)))
    for n in range(10_000):
        detail = writer.detail_index(f"triton_poi_fused_add_mul_{n}")
        fields = [0, n, n, n % 1000, -1, detail, n % 256, n % 8]
        assert len(fields) == RANGE_COLUMNS
        assert writer.append(
            pack_sample(
                step=n,
                phase_code=n % 3,
                requests=n,
                tokens=n,
                padded_tokens=n,
                graph_code=n % 3,
                start_unix_ns=n,
                duration_ns=n,
                overhead_ns=0,
                complete=True,
                range_columns=[[value] for value in fields],
            )
        )
        writer.totals.add_all_reduces(n % 11, [n], [n])
    assert set(our_samples(text_of(collector))) == before


# --- which server ----------------------------------------------------------------------------------------


@pytest.fixture
def directory(tmp_path):
    return tmp_path / "rings"


def age(folder, seconds):
    """Make a server's folder look older, without waiting."""
    for path in (*folder.glob("*.ring"), folder):
        then = path.stat().st_mtime - seconds
        os.utime(path, (then, then))


def test_the_living_server_is_taken_before_a_newer_dead_one(directory):
    living = make_ring(directory / "living")
    age(directory / "living", 100)
    kill(make_ring(directory / "dead"))
    assert InstanceFollower(directory)() == living.path.parent


def test_the_last_server_is_shown_after_its_death(directory):
    writer = make_ring(directory / "first")
    follow = InstanceFollower(directory)
    assert follow() == directory / "first"
    kill(writer)
    assert follow() == directory / "first"


def test_a_restart_is_followed(directory, caplog):
    caplog.set_level(logging.INFO)
    writer = make_ring(directory / "first")
    writer.totals.add_step(DECODE, STEP_NS)
    collector = RingCollector(InstanceFollower(directory))
    assert steps_of(collector) == 1
    kill(writer)
    make_ring(directory / "second")
    assert steps_of(collector) == 0
    assert [record.getMessage() for record in caplog.records] == [
        f"K25: reading {directory / 'first'}",
        f"K25: reading {directory / 'second'}",
    ]


def test_a_second_server_beside_the_first_does_not_take_turns_with_it(directory):
    make_ring(directory / "first")
    follow = InstanceFollower(directory)
    assert follow() == directory / "first"
    make_ring(directory / "second")
    age(directory / "first", 100)
    assert follow() == directory / "first"


def test_a_server_given_by_its_folder_is_never_left(directory):
    writer = make_ring(directory / "first")
    follow = InstanceFollower(directory / "first")
    assert follow() == directory / "first"
    kill(writer)
    make_ring(directory / "second")
    assert follow() == directory / "first"


def test_one_ring_may_be_given(directory):
    make_ring(directory / "first", 0)
    writer = make_ring(directory / "first", 1)
    collector = RingCollector(InstanceFollower(writer.path))
    for _ in range(2):
        assert ranks_of(collector) == {"1"}
