"""A scrape says what the ranks have waited for each other since the last one, and reads a bounded number of samples."""

from __future__ import annotations

import shutil

import pytest
from prometheus_client import generate_latest

from tests.export_rings import kill, make_ring
from tests.exposition import assert_exposition_is_sound, our_samples, value_of
from tests.samples import pack
from vllm_k25_instrument.alignment import LEFT_OUT
from vllm_k25_instrument.export.collector import RingCollector
from vllm_k25_instrument.export.waits import AllReduceWaits
from vllm_k25_instrument.model import Category, GraphMode, Phase, Range, RankCoordinates, StepSample
from vllm_k25_instrument.ring import RingLayout, RingReader, ring_file_name

US = 1_000
EVERY = 16


def step_sample(step, durations_ns, *, complete=True):
    return StepSample(
        step=step,
        phase=Phase.DECODE,
        requests=1,
        tokens=1,
        padded_tokens=1,
        graph_mode=GraphMode.FULL,
        start_unix_ns=0,
        duration_ns=12_000_000,
        ranges=tuple(
            Range(category=category, start_ns=1000 * n, duration_ns=ns, detail=detail)
            for n, ns in enumerate(durations_ns)
            for category, detail, ns in ((Category.MLA_ATTENTION, "", 9), (Category.ALL_REDUCE, "pynccl", ns))
        ),
        complete=complete,
    )


class Server:
    """The rings of a server, each worker writing what it is told to."""

    def __init__(self, folder, ranks=2, slots=64, place=lambda rank, ranks: {"tp": rank, "tp_size": ranks}):
        self.folder = folder
        self.layout = RingLayout(slots=slots, slot_bytes=4096)
        self.places = {
            rank: RankCoordinates(global_rank=rank, local_rank=rank, **place(rank, ranks)) for rank in range(ranks)
        }
        self.writers = {rank: self.start(rank) for rank in range(ranks)}

    def start(self, rank, **identity):
        return make_ring(self.folder, rank, self.layout, coordinates=self.places[rank], **identity)

    def write(self, rank, number, durations_ns, **fields):
        """The sample of the `number`-th sampled step."""
        writer = self.writers[rank]
        sample = step_sample(EVERY * number, durations_ns, **fields)
        table = ("", "pynccl")
        assert writer.detail_index("pynccl") == 1
        assert writer.append(pack(sample, table))

    def decode(self, first, end, waits_ns=(30 * US, 0), transfer_ns=70 * US, calls=2):
        """Sampled steps `first` to before `end` on all ranks."""
        for number in range(first, end):
            for rank in self.writers:
                self.write(rank, number, [transfer_ns + waits_ns[rank % len(waits_ns)]] * calls)


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "server"


@pytest.fixture
def collector(folder):
    found = RingCollector(lambda: folder)
    yield found
    found.close()


def text_of(collector):
    text = generate_latest(collector).decode()
    assert_exposition_is_sound(text)
    return text


def waited(text, rank):
    """Seconds and calls."""
    name = "vllm_k25_all_reduce_wait_seconds"
    return value_of(text, name + "_sum", rank=str(rank)), value_of(text, name + "_count", rank=str(rank))


def transferred(text, path="pynccl"):
    name = "vllm_k25_all_reduce_transfer_seconds"
    return value_of(text, name + "_sum", path=path), value_of(text, name + "_count", path=path)


def of_rank(text, name):
    return {
        int(dict(labels)["rank"]): value
        for (series, labels), value in our_samples(text).items()
        if series == f"vllm_k25_{name}"
    }


def skipped(text):
    return {
        dict(labels)["reason"]: value
        for (series, labels), value in our_samples(text).items()
        if series == "vllm_k25_alignment_steps_skipped_total" and value
    }


def test_waiting_is_told_from_transfer_and_the_slowest_rank_is_named(folder, collector):
    Server(folder).decode(0, 10)
    text = text_of(collector)
    assert transferred(text) == (pytest.approx(20 * 70e-6), 20)
    assert waited(text, 0) == (pytest.approx(20 * 30e-6), 20)
    assert waited(text, 1) == (0, 20)
    assert of_rank(text, "slowest_rank_steps_total") == {0: 0, 1: 10}
    assert of_rank(text, "alignment_steps_total") == {0: 10, 1: 10}
    assert skipped(text) == {}


def test_a_scrape_adds_what_has_come_since_the_last_one(folder, collector):
    server = Server(folder)
    server.decode(0, 10)
    text_of(collector)
    assert waited(text_of(collector), 0)[1] == 20
    server.decode(10, 13, waits_ns=(0, 50 * US))
    text = text_of(collector)
    assert waited(text, 0) == (pytest.approx(20 * 30e-6), 26)
    assert waited(text, 1) == (pytest.approx(6 * 50e-6), 26)
    assert of_rank(text, "slowest_rank_steps_total") == {0: 3, 1: 10}


def test_sums_are_exact_to_the_nanosecond(folder, collector):
    server = Server(folder)
    server.write(0, 0, [123_456_789_012_345, 7])
    server.write(1, 0, [123_456_789_012_346, 5])
    text = text_of(collector)
    assert round(transferred(text)[0] * 1e9) == 123_456_789_012_350
    assert [round(waited(text, rank)[0] * 1e9) for rank in (0, 1)] == [2, 1]


def test_a_wait_on_a_bound_is_inside_its_bucket(folder, collector):
    server = Server(folder)
    server.write(0, 0, [10 * US, 10 * US + 1])
    server.write(1, 0, [0, 0])
    bucket = "vllm_k25_all_reduce_wait_seconds_bucket"
    text = text_of(collector)
    assert value_of(text, bucket, rank="0", le="1e-05") == 1
    assert value_of(text, bucket, rank="0", le="2.5e-05") == 2
    assert value_of(text, bucket, rank="1", le="2e-06") == 2


def test_reasons_and_ranks_begin_at_zero(folder, collector):
    Server(folder)
    text = text_of(collector)
    reasons = {dict(s[1])["reason"] for s in our_samples(text) if s[0] == "vllm_k25_alignment_steps_skipped_total"}
    assert reasons == set(LEFT_OUT)
    assert of_rank(text, "slowest_rank_steps_total") == {0: 0, 1: 0}


def test_a_rank_that_is_a_step_behind_at_the_scrape_is_waited_for(folder, collector):
    server = Server(folder)
    server.decode(0, 5)
    server.write(0, 5, [100, 100])
    assert of_rank(text_of(collector), "alignment_steps_total") == {0: 5, 1: 5}
    server.write(1, 5, [100, 100])
    text = text_of(collector)
    assert of_rank(text, "alignment_steps_total") == {0: 6, 1: 6}
    assert skipped(text) == {}


def test_steps_that_cannot_be_lined_up_are_counted_by_reason(folder, collector):
    server = Server(folder)
    server.write(0, 0, [1, 2])  # rank 1 has lost it
    server.write(0, 1, [1, 2])
    server.write(1, 1, [1])
    server.write(0, 2, [1], complete=False)
    server.write(1, 2, [1])
    server.decode(3, 20)
    text = text_of(collector)
    assert skipped(text) == {"missing_rank": 1, "counts_differ": 1, "incomplete": 1}
    assert of_rank(text, "alignment_steps_total") == {0: 17, 1: 17}


def test_a_group_without_all_its_ranks_is_counted_and_nothing_said(folder, collector):
    server = Server(folder, ranks=8)
    for rank in range(4, 8):  # on another node
        server.writers.pop(rank).path.unlink()
    server.decode(0, 5)
    text = text_of(collector)
    assert skipped(text) == {"missing_rank": 5}
    assert "vllm_k25_all_reduce_wait_seconds_count" not in text
    server.decode(5, 7)
    assert skipped(text_of(collector)) == {"missing_rank": 7}


def test_ranks_that_start_one_after_the_other_are_lined_up_once_all_are_there(folder, collector):
    server = Server(folder)
    (folder / ring_file_name(1)).rename(folder / "later")
    assert of_rank(text_of(collector), "alignment_steps_total") == {0: 0}
    (folder / "later").rename(folder / ring_file_name(1))
    server.decode(0, 3)
    assert of_rank(text_of(collector), "alignment_steps_total") == {0: 3, 1: 3}


def test_one_rank_alone_has_nobody_to_wait_for(folder, collector):
    server = Server(folder, ranks=1)
    server.decode(0, 5)
    assert "vllm_k25_alignment" not in {name[:18] for name, _ in our_samples(text_of(collector))}


@pytest.mark.parametrize("other", ["pp", "dp"])
def test_pipeline_stages_and_replicas_are_groups_of_their_own(folder, collector, other):
    server = Server(
        folder, ranks=4, place=lambda rank, _: {"tp": rank % 2, "tp_size": 2, other: rank // 2, f"{other}_size": 2}
    )
    server.decode(0, 3, waits_ns=(30 * US, 0, 500 * US, 400 * US))
    text = text_of(collector)
    # 400 of the second group's microseconds are transfer: they are on both of its ranks.
    assert [waited(text, rank)[0] for rank in range(4)] == [pytest.approx(6 * us * 1e-6) for us in (30, 0, 100, 0)]
    assert of_rank(text, "slowest_rank_steps_total") == {0: 0, 1: 3, 2: 0, 3: 3}
    assert transferred(text) == (pytest.approx(6 * (70 + 470) * 1e-6), 12)


# --- bounded work ----------------------------------------------------------------------------------------


def test_the_first_scrape_of_full_rings_takes_the_newest_and_counts_the_rest_as_backlog(folder):
    server = Server(folder, slots=64)
    server.decode(0, 100)
    collector = RingCollector(lambda: folder, samples_per_scrape=2 * 16)
    text = text_of(collector)
    assert of_rank(text, "alignment_steps_total") == {0: 16, 1: 16}
    # What the ring had forgotten before anybody looked was never this exporter's to read.
    assert skipped(text) == {"backlog": 48}


def test_steps_beyond_the_bound_between_two_scrapes_are_backlog(folder):
    server = Server(folder)
    collector = RingCollector(lambda: folder, samples_per_scrape=2 * 16)
    server.decode(0, 10)
    text_of(collector)
    server.decode(10, 40)
    text = text_of(collector)
    assert of_rank(text, "alignment_steps_total") == {0: 26, 1: 26}
    assert skipped(text) == {"backlog": 14}


def test_a_ring_that_went_round_between_two_scrapes_is_backlog(folder, collector):
    server = Server(folder, slots=64)
    server.decode(0, 10)
    text_of(collector)
    server.decode(10, 110)
    text = text_of(collector)
    assert of_rank(text, "alignment_steps_total") == {0: 74, 1: 74}
    assert skipped(text) == {"backlog": 36}


def test_after_a_backlog_no_rank_is_missing_where_the_ranks_were_at_different_steps(folder):
    server = Server(folder)
    collector = RingCollector(lambda: folder, samples_per_scrape=2 * 16)
    server.decode(0, 40)
    server.write(0, 40, [100, 100])
    text = text_of(collector)
    assert of_rank(text, "alignment_steps_total") == {0: 15, 1: 15}
    assert skipped(text) == {"backlog": 25}
    server.write(1, 40, [100, 100])
    server.decode(41, 50)
    text = text_of(collector)
    assert of_rank(text, "alignment_steps_total") == {0: 25, 1: 25}
    assert skipped(text) == {"backlog": 25}


@pytest.mark.parametrize("written", [0, 7, 16, 64, 1000])
def test_no_reading_copies_more_samples_than_it_may(folder, monkeypatch, written):
    server = Server(folder, ranks=4)
    server.decode(0, written)
    copied = []
    copy = RingReader._copy
    monkeypatch.setattr(RingReader, "_copy", lambda reader, n: copied.append(n) or copy(reader, n))
    waits = AllReduceWaits(samples_per_reading=64)
    readers = [RingReader(writer.path) for writer in server.writers.values()]
    waits.read(readers)
    assert len(copied) == min(written, 16) * 4
    waits.read(readers)
    assert len(copied) == min(written, 16) * 4  # nothing new, nothing read


# --- rings come and go -----------------------------------------------------------------------------------


def test_a_restarted_server_is_counted_anew(folder, collector):
    server = Server(folder)
    server.decode(0, 10)
    assert of_rank(text_of(collector), "alignment_steps_total") == {0: 10, 1: 10}
    for rank, writer in server.writers.items():
        kill(writer)
        server.writers[rank] = server.start(rank, pid=1234, started_unix_ns=5)
    server.decode(0, 3)
    assert of_rank(text_of(collector), "alignment_steps_total") == {0: 3, 1: 3}


def test_a_ring_that_cannot_be_read_for_a_while_is_not_counted_twice(folder, collector, caplog):
    server = Server(folder)
    server.decode(0, 10)
    text_of(collector)
    (folder / ring_file_name(1)).rename(folder / "gone")
    text = text_of(collector)
    assert of_rank(text, "alignment_steps_total") == {0: 10}  # a vanished ring takes its series along
    (folder / "gone").rename(folder / ring_file_name(1))
    assert of_rank(text_of(collector), "alignment_steps_total") == {0: 10, 1: 10}


def test_vanished_servers_take_everything_along(folder, collector):
    Server(folder).decode(0, 10)
    text_of(collector)
    shutil.rmtree(folder)
    assert our_samples(text_of(collector)) == {}


def test_the_samples_of_a_dead_server_are_still_shown(folder, collector):
    server = Server(folder)
    server.decode(0, 10)
    for writer in server.writers.values():
        kill(writer)
    assert waited(text_of(collector), 0)[1] == 20


def test_trouble_with_the_samples_is_logged_once_and_costs_nothing_else(folder, collector, monkeypatch, caplog):
    server = Server(folder)
    server.decode(0, 10)
    text_of(collector)

    def broken(*_):
        raise ValueError("not step samples")

    monkeypatch.setattr("vllm_k25_instrument.export.waits.all_reduces_of", broken)
    for n in range(3):
        server.decode(10 + n, 11 + n)
        text = text_of(collector)
        assert of_rank(text, "alignment_steps_total") == {0: 10, 1: 10}
        assert len(of_rank(text, "steps_sampled_total")) == 2
    assert [record.getMessage() for record in caplog.records] == [
        "K25: samples left out of the waiting between ranks: not step samples"
    ]


def test_a_damaged_sample_costs_its_own_step_and_no_other(folder, collector):
    server = Server(folder)
    server.decode(0, 10)
    with server.writers[1].path.open("r+b") as file:
        file.seek(server.layout.slots_offset + 3 * server.layout.slot_bytes + 40)
        file.write(b"\xff\xff")
    server.decode(10, 20)
    text = text_of(collector)
    assert of_rank(text, "alignment_steps_total") == {0: 19, 1: 19}
    assert skipped(text) == {"missing_rank": 1}
