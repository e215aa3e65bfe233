"""Rings of a server are read together, and what is wrong with them is said.

Also home of the scene that the other report tests use: real ring files with steps like those of Kimi-K2.5.
"""

import random
import re
import shutil
from dataclasses import dataclass, field, replace

import pytest

from tests.export_rings import published_at_once
from vllm_k25_instrument.hooks.names import HOOK_INDEX, HOOK_NAMES
from vllm_k25_instrument.model import (
    CATEGORY_CODE,
    GRAPH_MODES,
    LOST_REASONS,
    PHASES,
    RANGE_COLUMNS,
    Category,
    GraphMode,
    LostReason,
    Phase,
    RankCoordinates,
    RankIdentity,
    category_exclusive_ns,
    pack_sample,
    unpack_sample,
)
from vllm_k25_instrument.report.caveats import CaveatCode
from vllm_k25_instrument.report.rings import read_rings
from vllm_k25_instrument.ring import RingLayout, RingReader, RingWriter, open_rings, ring_file_name

US = 1000
START_NS = 1_760_000_000_000_000_000


@dataclass
class Rank:
    """One rank that writes steps into a real ring."""

    writer: RingWriter
    rank: int
    random: random.Random
    step: int = 0
    now_ns: int = START_NS
    layers: int = 61
    every: int = 16
    slow_us: float = 0.0
    fires: frozenset = field(default_factory=lambda: frozenset(HOOK_NAMES))

    def ranges(self, requests):
        """(category, start, duration, detail, layer, parent, bytes) of a step, and its length."""
        out, at = [], 4 * US
        jitter = lambda us: max(int(us * US * self.random.uniform(0.94, 1.06)), 1)  # noqa: E731

        def add(category, us, detail="", layer=-1, parent=-1, start=None, nbytes=0):
            nonlocal at
            begin = at if start is None else start
            duration = jitter(us)
            out.append((category, begin, duration, detail, layer, parent, nbytes))
            if start is None:
                at += duration
            return len(out) - 1, begin + duration

        grow = 1 + requests / 160
        nbytes = 14336 * requests
        add(Category.INPUT_PREPARATION, 210)
        for layer in range(self.layers):
            add(Category.MLA_ATTENTION, 21 * grow, "FlashMLA", layer)
            add(Category.ALL_REDUCE, 62 * grow - self.slow_us / 122, "pynccl", layer, nbytes=nbytes)
            if layer:
                add(Category.MOE_ROUTING, 5.4, "", layer)
                moe, _ = add(Category.MOE_EXPERTS, 39 * grow + self.slow_us / 61, "MarlinExperts", layer)
                begin = out[moe][1]
                add(Category.MOE_SHARED_EXPERTS, 7.2, "", layer, parent=moe, start=begin + US)
            add(Category.ALL_REDUCE, 62 * grow - self.slow_us / 122, "pynccl", layer, nbytes=nbytes)
            at += jitter(9)
        add(Category.SAMPLING, 160)
        return out, at + 15 * US

    def write(
        self,
        requests=1,
        phase=Phase.DECODE,
        graph=GraphMode.FULL,
        complete=True,
        duration_ns=None,
        ranges=None,
        advance=True,
    ):
        """One sampled step, with the unsampled ones before it counted."""
        made, length = self.ranges(requests) if ranges is None else (ranges, duration_ns)
        length = length if duration_ns is None else duration_ns
        rows = [
            (begin, duration, nbytes, layer, parent, self.writer.detail_index(detail), 0, CATEGORY_CODE[category])
            for category, begin, duration, detail, layer, parent, nbytes in made
        ]
        packed = pack_sample(
            step=self.step,
            phase_code=PHASES.index(phase),
            requests=requests,
            tokens=requests,
            padded_tokens=requests,
            graph_code=GRAPH_MODES.index(graph),
            start_unix_ns=self.now_ns,
            duration_ns=length,
            overhead_ns=0,
            complete=complete,
            range_columns=list(zip(*rows, strict=True)) or [()] * RANGE_COLUMNS,
        )
        assert self.writer.append(packed)
        totals = self.writer.totals
        for _ in range(self.every):
            totals.add_step(PHASES.index(phase), length)
        sample = unpack_sample(packed, list(self.writer._details))
        own = category_exclusive_ns(sample)
        if min(own.values()) >= 0:
            totals.add_sample(PHASES.index(phase), GRAPH_MODES.index(graph), requests, length, list(own.values()))
        for name in self.fires:
            totals.add_hook_calls(HOOK_INDEX[name], 1)
        if advance:
            self.step += self.every
            self.now_ns += self.every * length
        return sample


def identity_of(rank, world, **changes):
    plain = RankIdentity(
        instance="20251009T080000-4711",
        pid=1,
        coordinates=RankCoordinates(global_rank=rank, local_rank=rank, tp=rank, tp_size=world),
        model="moonshotai/Kimi-K2.5",
        vllm_version="0.32.0",
        plugin_version="0.1.0",
        runner="GPUModelRunner",
        sample_every=16,
        started_unix_ns=START_NS,
        hooks=dict.fromkeys(HOOK_NAMES, "attached"),
    )
    return replace(plain, **changes)


def open_rank(folder, rank, world, *, slots=64, slow_us=0.0, layers=61, **identity):
    folder.mkdir(exist_ok=True, parents=True)
    layout = RingLayout(slots=slots, slot_bytes=16 * 1024)
    writer = published_at_once(RingWriter(folder / ring_file_name(rank), identity_of(rank, world, **identity), layout))
    return Rank(
        writer, rank, random.Random(rank), slow_us=slow_us, layers=layers, every=identity.get("sample_every", 16)
    )


def write_server(folder, world=2, *, batches=(1,), steps=5, found=None, slowest=None, **options):
    """The rings of a server, written and left open: its ranks."""
    ranks = [
        open_rank(folder, rank, world, slow_us=700.0 if rank == slowest else 0.0, **options)
        for rank in (range(world) if found is None else found)
    ]
    for rank in ranks:
        for requests in batches:
            for _ in range(steps):
                rank.write(requests)
    return ranks


def read(folder):
    readers, errors = open_rings(folder)
    return read_rings(readers, errors)


def codes(report):
    return [caveat.code for caveat in report.caveats]


def message(report, code):
    return next(caveat.message for caveat in report.caveats if caveat.code == code)


def test_rings_of_all_ranks_make_a_complete_breakdown_without_a_warning(tmp_path):
    write_server(tmp_path, world=2, batches=(1, 64), steps=4)
    report = read(tmp_path)
    assert codes(report) == []
    assert report.breakdown.complete
    assert [(g.key.batch, g.rank, g.steps) for g in report.breakdown.groups] == [
        ("1", 0, 4),
        ("1", 1, 4),
        ("64", 0, 4),
        ("64", 1, 4),
    ]


def test_a_k25_step_counts_122_all_reduces_and_60_expert_layers_per_step(tmp_path):
    write_server(tmp_path, world=2, steps=3)
    group = read(tmp_path).breakdown.groups[0]
    assert group.categories["all_reduce"].count == 3 * 122
    assert group.categories["moe_experts"].count == 3 * 60
    assert group.categories["mla_attention"].count == 3 * 61


def test_the_subject_tells_the_server_and_how_many_of_its_steps_were_sampled(tmp_path):
    ranks = write_server(tmp_path, world=2, steps=5)
    subject = read(tmp_path).subject
    assert len(ranks) == 2
    assert (subject.model, subject.vllm_version) == ("moonshotai/Kimi-K2.5", "0.32.0")
    assert subject.counts_text == "decode 80 steps, 5 sampled (every 16th)"
    assert subject.alive


def test_a_missing_rank_is_named_and_makes_the_breakdown_incomplete(tmp_path):
    write_server(tmp_path, world=8, found=(0, 1, 2, 3, 4, 6, 7), steps=1)
    report = read(tmp_path)
    assert not report.breakdown.complete
    assert message(report, CaveatCode.RANKS_MISSING).startswith("7 of 8 ranks found, rank 5 missing")


def test_an_unreadable_file_is_named_and_the_others_are_read(tmp_path):
    write_server(tmp_path, world=2, found=(0,), steps=2)
    (tmp_path / ring_file_name(1)).write_bytes(b"not a ring" * 1000)
    report = read(tmp_path)
    assert len(report.breakdown.groups) == 1
    assert ring_file_name(1) in message(report, CaveatCode.RING_UNREADABLE)
    assert "wrong magic" in message(report, CaveatCode.RING_UNREADABLE)
    assert not report.breakdown.complete


def test_a_sample_that_fails_its_checksum_is_left_out_and_counted(tmp_path):
    write_server(tmp_path, world=1, steps=3)
    path = tmp_path / ring_file_name(0)
    reader = RingReader(path)
    data = bytearray(path.read_bytes())
    data[reader.layout.slots_offset + reader.layout.slot_bytes + 100] ^= 0xFF
    damaged = tmp_path / "damaged"
    damaged.mkdir()
    (damaged / ring_file_name(0)).write_bytes(data)
    report = read(damaged)
    assert report.breakdown.groups[0].steps == 2
    assert "1 in " in message(report, CaveatCode.SAMPLES_CORRUPTED)
    assert not report.breakdown.complete


def test_samples_that_the_ring_has_overwritten_are_counted_without_making_it_incomplete(tmp_path):
    write_server(tmp_path, world=1, steps=40, slots=16, layers=2)
    report = read(tmp_path)
    assert report.breakdown.groups[0].steps == 16
    assert "rank 0: 24" in message(report, CaveatCode.SAMPLES_OVERWRITTEN)
    assert report.breakdown.complete


def test_steps_that_say_they_are_incomplete_make_the_breakdown_incomplete(tmp_path):
    (rank,) = write_server(tmp_path, world=1, steps=1)
    rank.write(complete=False)
    report = read(tmp_path)
    assert "rank 0: 1 incomplete" in message(report, CaveatCode.SAMPLES_INCOMPLETE)
    assert not report.breakdown.complete


def test_lost_samples_are_told_with_their_reason_and_its_remedy(tmp_path):
    (rank,) = write_server(tmp_path, world=1, steps=1)
    rank.writer.totals.add_lost(LOST_REASONS.index(LostReason.TOO_LARGE))
    text = message(read(tmp_path), CaveatCode.SAMPLES_LOST)
    assert "rank 0: 1 too_large (raise K25_RING_BYTES)" in text


@pytest.mark.parametrize("reason", LOST_REASONS)
def test_every_reason_of_a_lost_sample_can_be_told(tmp_path, reason):
    (rank,) = write_server(tmp_path, world=1, steps=1)
    rank.writer.totals.add_lost(LOST_REASONS.index(reason))
    assert f"1 {reason} (" in message(read(tmp_path), CaveatCode.SAMPLES_LOST)


def test_a_rank_whose_ring_holds_no_sample_while_others_do_is_named(tmp_path):
    write_server(tmp_path, world=2, found=(0,), steps=1)
    idle = open_rank(tmp_path, 1, 2)
    idle.writer.totals.add_step(0, 1000)
    report = read(tmp_path)
    assert "rank 1" in message(report, CaveatCode.RANK_WITHOUT_SAMPLES)
    assert not report.breakdown.complete


def test_a_living_server_without_a_single_step_is_said_loudly(tmp_path):
    ranks = write_server(tmp_path, world=2, steps=0)
    report = read(tmp_path)
    assert len(ranks) == 2
    text = message(report, CaveatCode.NO_STEPS)
    assert text.startswith("THE SERVER IS ALIVE BUT NO STEP HAS BEEN RECORDED on ranks 0-1")
    assert "step hook attached" in text
    assert not report.breakdown.complete


def test_a_dead_server_without_a_step_is_not_called_alive(tmp_path):
    write_server(tmp_path / "live", world=1, steps=0)
    dead = tmp_path / "dead"
    shutil.copytree(tmp_path / "live", dead)
    assert message(read(dead), CaveatCode.NO_STEPS).startswith("NO STEP HAS BEEN RECORDED")


def test_steps_without_a_sample_say_how_to_get_one(tmp_path):
    (rank,) = write_server(tmp_path, world=1, steps=0)
    rank.writer.totals.add_step(0, 12_000)
    assert "K25_SAMPLE_EVERY=1" in message(read(tmp_path), CaveatCode.NO_SAMPLES)


def test_an_attached_hook_that_never_fires_is_named(tmp_path):
    rank = open_rank(tmp_path, 0, 1)
    rank.fires = frozenset(HOOK_NAMES) - {"moe_experts"}
    rank.write()
    text = message(read(tmp_path), CaveatCode.HOOK_NEVER_FIRED)
    assert "rank 0: moe_experts)" in text


def test_a_hook_that_this_vllm_has_no_target_for_is_named(tmp_path):
    hooks = dict.fromkeys(HOOK_NAMES, "attached") | {"mla_decode": "missing", "moe_combine": "not_in_version"}
    for rank in range(2):
        open_rank(tmp_path, rank, 2, hooks=hooks).write()
    report = read(tmp_path)
    assert codes(report) == [CaveatCode.HOOK_MISSING]
    assert "hooks without a target in this vLLM (ranks 0-1: mla_decode)" in message(report, CaveatCode.HOOK_MISSING)
    assert report.breakdown.complete


def test_a_hook_that_is_not_attached_is_not_expected_to_fire(tmp_path):
    hooks = dict.fromkeys(HOOK_NAMES, "attached") | {"moe_experts": "off"}
    rank = open_rank(tmp_path, 0, 1, hooks=hooks)
    rank.fires = frozenset(HOOK_NAMES) - {"moe_experts"}
    rank.write()
    assert codes(read(tmp_path)) == []


@pytest.mark.parametrize("hook", ["mla_prefill", "moe_dispatch", "layer", "all_reduce", "graph_dispatch"])
def test_a_hook_that_has_no_reason_to_fire_is_not_suspected(tmp_path, hook):
    """One rank alone has no all-reduce, and decode steps have no prefill."""
    rank = open_rank(tmp_path, 0, 1)
    rank.fires = frozenset(HOOK_NAMES) - {hook}
    rank.write()
    assert codes(read(tmp_path)) == []


@pytest.mark.parametrize(
    ("layers", "expected"),
    [
        ({"attention": 32}, {"attention"}),
        ({"attention": 48, "moe": 48}, {"attention", "moe_experts", "moe_routing"}),
        ({"mla_attention": 1}, {"mla_decode"}),
        ({"mla_attention": 4, "moe": 3, "moe_shared_experts": 3}, {"mla_decode", "moe_experts", "moe_routing"}),
    ],
)
def test_hooks_of_layers_that_the_model_does_not_have_are_not_suspected(tmp_path, layers, expected):
    rank = open_rank(tmp_path, 0, 1)
    rank.writer.set_identity(replace(rank.writer.identity, layers=layers))
    rank.fires = frozenset({"input_preparation", "sampling"})
    rank.write()
    (silent,) = re.findall(r"\(rank 0: (.*?)\)", message(read(tmp_path), CaveatCode.HOOK_NEVER_FIRED))
    assert set(silent.split(", ")) == expected | ({"moe_shared_experts"} & layers.keys())


def test_where_tokens_are_drafted_verifying_them_need_not_look_like_decode(tmp_path):
    rank = open_rank(tmp_path, 0, 1)
    rank.writer.set_identity(replace(rank.writer.identity, layers={"mla_attention": 4}))
    rank.fires = frozenset(HOOK_NAMES) - {"mla_decode"}
    rank.write()
    rank.writer.totals.add_hook_calls(HOOK_INDEX["speculation"], 1)
    rank.writer.publish()
    assert codes(read(tmp_path)) == []


def test_two_ranks_that_never_see_an_all_reduce_are_suspected(tmp_path):
    for n in range(2):
        rank = open_rank(tmp_path, n, 2)
        rank.fires = frozenset(HOOK_NAMES) - {"all_reduce"}
        rank.write()
    assert "ranks 0-1: all_reduce" in message(read(tmp_path), CaveatCode.HOOK_NEVER_FIRED)


def test_errors_of_a_hook_are_counted_by_rank(tmp_path):
    (rank,) = write_server(tmp_path, world=1, steps=1)
    rank.writer.totals.add_hook_error(HOOK_INDEX["sampling"])
    assert "rank 0: sampling (1)" in message(read(tmp_path), CaveatCode.HOOK_ERRORS)


def test_a_second_ring_of_a_rank_is_set_aside_and_not_added_up(tmp_path):
    write_server(tmp_path, world=1, steps=3)
    shutil.copy(tmp_path / ring_file_name(0), tmp_path / "rank-00000-copy.ring")
    report = read(tmp_path)
    assert [group.steps for group in report.breakdown.groups] == [3]
    assert CaveatCode.RANK_TWICE in codes(report)
    assert not report.breakdown.complete


def test_of_rings_of_two_servers_in_one_folder_the_later_one_is_taken(tmp_path):
    write_server(tmp_path, world=2, found=(0,), steps=1, instance="old", started_unix_ns=1)
    write_server(tmp_path, world=2, found=(1,), steps=2, instance="new", started_unix_ns=2)
    report = read(tmp_path)
    assert report.subject.instance == "new"
    assert [(group.rank, group.steps) for group in report.breakdown.groups] == [(1, 2)]
    assert ring_file_name(0) in message(report, CaveatCode.INSTANCES_MIXED)


def test_the_slowest_rank_is_the_one_that_waits_least(tmp_path):
    write_server(tmp_path, world=8, steps=4, slowest=5)
    report = read(tmp_path)
    (verdict,) = report.slowest.values()
    assert verdict.rank == 5
    assert verdict.steps == 4
    assert 500 * US < verdict.excess_ns < 900 * US


def test_the_slowest_rank_is_not_marked_when_a_rank_is_missing(tmp_path):
    write_server(tmp_path, world=8, found=range(7), steps=4, slowest=5)
    (verdict,) = read(tmp_path).slowest.values()
    assert verdict.rank is None
    assert verdict.sentence == "slowest rank not marked: 7 of 8 ranks have samples here"


def test_only_steps_sampled_on_all_ranks_are_compared(tmp_path):
    first, second = write_server(tmp_path, world=2, steps=2)
    first.write()  # a step that the second has not sampled
    second.step += 160
    second.write()
    (verdict,) = read(tmp_path).slowest.values()
    assert verdict.steps == 2


def test_without_a_common_step_no_rank_is_called_the_slowest(tmp_path):
    first, second = write_server(tmp_path, world=2, steps=0)
    second.step = 8
    first.write()
    second.write()
    (verdict,) = read(tmp_path).slowest.values()
    assert verdict.reason == "no step was sampled on all ranks"


def test_pipeline_stages_are_not_compared(tmp_path):
    for n in range(2):
        coordinates = RankCoordinates(global_rank=n, pp=n, pp_size=2)
        open_rank(tmp_path, n, 2, coordinates=coordinates).write()
    (verdict,) = read(tmp_path).slowest.values()
    assert verdict.rank is None
    assert "different work" in verdict.reason


def test_reading_reports_how_far_it_is(tmp_path):
    write_server(tmp_path, world=2, steps=3)
    seen = []
    readers, errors = open_rings(tmp_path)
    read_rings(readers, errors, lambda done, total: seen.append((done, total)))
    assert seen[0] == (1, 6)
    assert seen[-1] == (6, 6)


def test_a_ring_that_is_truncated_while_it_is_read_is_named_and_what_was_read_of_it_counts(tmp_path):
    ranks = write_server(tmp_path, world=1, steps=8)
    readers, errors = open_rings(tmp_path)

    def truncate(read, _):
        if read == 5:
            with ranks[0].writer.path.open("r+b") as file:
                file.truncate(1000)

    report = read_rings(readers, errors, truncate)
    assert report.breakdown.groups[0].steps == 5
    assert "truncated" in message(report, CaveatCode.RING_UNREADABLE)
    assert codes(report).count(CaveatCode.RING_UNREADABLE) == 1
    assert not report.breakdown.complete
