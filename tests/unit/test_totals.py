"""The cumulative counters: each has its own cell, and what is read is what was added."""

from __future__ import annotations

import importlib
import itertools
import subprocess
import sys
import threading
from collections import Counter

import pytest

from tests.samples import ROOT
from vllm_k25_instrument.hooks.names import HOOK_NAMES
from vllm_k25_instrument.model import (
    ALL_REDUCE_PATHS,
    BATCH_BUCKETS,
    BATCH_LABELS,
    GRAPH_MODES,
    LIVE_CATEGORIES,
    LOST_REASONS,
    PHASES,
    SIZE_BUCKETS,
    SIZE_LABELS,
)
from vllm_k25_instrument.totals import (
    ALL_REDUCE_BOUNDS_NS,
    BATCH_ROWS,
    CATEGORY_BOUNDS_NS,
    FINGERPRINT,
    MAX_HOOKS,
    OTHER_LABEL,
    STEP_BOUNDS_NS,
    TOTALS_BYTES,
    TOTALS_COUNT,
    Totals,
    TotalsWriter,
)

CATEGORIES = len(LIVE_CATEGORIES)


class Table:
    """A table of counters in memory."""

    def __init__(self):
        self.data = bytearray(TOTALS_BYTES)
        self.write = TotalsWriter(memoryview(self.data).cast("Q"))

    @property
    def read(self):
        return Totals(bytes(self.data))

    def cells(self):
        return list(memoryview(bytes(self.data)).cast("Q"))


@pytest.fixture
def table():
    return Table()


def everything_read(totals):
    """Every figure that a snapshot offers, by name."""
    figures = {
        "overhead": totals.overhead_ns,
        "twin bytes": totals.twin_bytes,
        "twin capture": totals.twin_capture_ns,
    }
    for p in range(len(PHASES)):
        figures["steps", p] = totals.steps(p)
        figures["sampled", p] = totals.sampled(p)
        figures["step_duration", p] = totals.step_duration(p)
        figures["step_host", p] = totals.step_host(p)
        for c in range(CATEGORIES):
            figures["category", p, c] = totals.category(p, c)
    for path in range(len(ALL_REDUCE_PATHS)):
        figures["all_reduce", path] = totals.all_reduce(path)
        for size in range(len(SIZE_LABELS)):
            figures["bytes", path, size] = totals.all_reduce_bytes(path, size)
    for reason in range(len(LOST_REASONS)):
        figures["lost", reason] = totals.lost(reason)
    for hook in range(MAX_HOOKS):
        figures["calls", hook] = totals.hook_calls(hook)
        figures["errors", hook] = totals.hook_errors(hook)
    figures["rows"] = tuple((row.phase, row.graph_mode, row.batch, row.steps) for row in totals.batch_rows())
    return figures


ADDITIONS = [
    *(
        (
            f"step of phase {p}",
            lambda w, p=p: w.add_step(p, 3, 4),
            {("steps", p), ("step_duration", p), ("step_host", p)},
        )
        for p in range(len(PHASES))
    ),
    *(
        (f"path {path}", lambda w, path=path: w.add_all_reduces(path, [5], [0]), {("all_reduce", path)})
        for path in range(len(ALL_REDUCE_PATHS))
    ),
    *(
        (
            f"path {path} size {size}",
            lambda w, path=path, n=nbytes: w.add_all_reduces(path, [5], [n]),
            {("all_reduce", path), ("bytes", path, size)},
        )
        for path in range(len(ALL_REDUCE_PATHS))
        for size, nbytes in enumerate((*SIZE_BUCKETS, SIZE_BUCKETS[-1] + 1))
    ),
    *((f"lost {r}", lambda w, r=r: w.add_lost(r), {("lost", r)}) for r in range(len(LOST_REASONS))),
    *((f"call {h}", lambda w, h=h: w.add_hook_calls(h, 2), {("calls", h)}) for h in range(MAX_HOOKS)),
    *((f"error {h}", lambda w, h=h: w.add_hook_error(h), {("errors", h)}) for h in range(MAX_HOOKS)),
    ("overhead", lambda w: w.add_overhead(9), {"overhead"}),
    ("twins", lambda w: w.add_twins(5, 6), {"twin bytes", "twin capture"}),
    *(
        (
            f"sample of phase {p}, category {c}",
            lambda w, p=p, c=c: w.add_sample(p, 0, 1, 7, [7 if n == c else 0 for n in range(CATEGORIES)]),
            {("sampled", p), "rows", *(("category", p, n) for n in range(CATEGORIES))},
        )
        for p in range(len(PHASES))
        for c in range(CATEGORIES)
    ),
]


def test_each_addition_changes_the_figures_it_names_and_no_other(table):
    before = everything_read(table.read)
    for name, add, changed in ADDITIONS:
        add(table.write)
        after = everything_read(table.read)
        assert {key for key in after if after[key] != before[key]} == changed, name
        before = after


def test_every_counter_has_a_cell_of_its_own(table):
    """Read a table whose every cell holds its own number: no two figures may show the same one."""
    cells = memoryview(table.data).cast("Q")
    for n in range(TOTALS_COUNT):
        cells[n] = n
    totals = table.read
    shown = Counter([totals.overhead_ns, totals.twin_bytes, totals.twin_capture_ns])
    for p in range(len(PHASES)):
        shown.update([totals.steps(p), totals.sampled(p)])
        shown.update([*totals.step_duration(p).counts, totals.step_duration(p).sum_ns])
        shown.update([*totals.step_host(p).counts, totals.step_host(p).sum_ns])
        for c in range(CATEGORIES):
            shown.update([*totals.category(p, c).counts, totals.category(p, c).sum_ns])
    for path in range(len(ALL_REDUCE_PATHS)):
        shown.update([*totals.all_reduce(path).counts, totals.all_reduce(path).sum_ns])
        shown.update(totals.all_reduce_bytes(path, size) for size in range(len(SIZE_LABELS)))
    shown.update(totals.lost(reason) for reason in range(len(LOST_REASONS)))
    shown.update(totals.hook_calls(hook) for hook in range(MAX_HOOKS))
    shown.update(totals.hook_errors(hook) for hook in range(MAX_HOOKS))
    assert max(shown.values()) == 1
    in_rows = (BATCH_ROWS + len(PHASES)) * (3 + CATEGORIES)
    assert len(shown) == TOTALS_COUNT - in_rows


def test_what_is_added_is_what_is_read(table):
    split = [10 * (n + 1) for n in range(CATEGORIES)]
    for phase, graph, requests in itertools.product(range(3), range(2), (1, 300)):
        table.write.add_step(phase, sum(split))
        table.write.add_sample(phase, graph, requests, sum(split), split)
    totals = table.read
    for phase in range(3):
        assert totals.steps(phase) == totals.sampled(phase) == 4
        assert totals.step_duration(phase).sum_ns == 4 * sum(split)
        assert [totals.category(phase, c).sum_ns for c in range(CATEGORIES)] == [4 * ns for ns in split]
    rows = list(totals.batch_rows())
    assert len(rows) == 12
    for row in rows:
        assert row.steps == 1
        assert row.step_ns == sum(split) == sum(row.category_ns.values())
        assert list(row.category_ns.values()) == split


# --- rows ------------------------------------------------------------------------------------------------

GROUPS = list(itertools.product(range(len(PHASES)), range(len(GRAPH_MODES)), (*BATCH_BUCKETS, BATCH_BUCKETS[-1] + 1)))


def test_a_row_is_named_after_its_group(table):
    for phase, graph, requests in GROUPS[:BATCH_ROWS]:
        table.write.add_sample(phase, graph, requests, 0, [0] * CATEGORIES)
    labels = [BATCH_LABELS[n % len(BATCH_LABELS)] for n in range(BATCH_ROWS)]
    assert [(row.phase, row.graph_mode, row.batch) for row in table.read.batch_rows()] == [
        (PHASES[phase], GRAPH_MODES[graph], label)
        for (phase, graph, _), label in zip(GROUPS[:BATCH_ROWS], labels, strict=True)
    ]


def test_groups_beyond_the_last_row_share_one_per_phase_called_other(table):
    split = [1] * CATEGORIES
    for phase, graph, requests in GROUPS * 2:
        table.write.add_sample(phase, graph, requests, CATEGORIES, split)
    rows = list(table.read.batch_rows())
    own = [row for row in rows if row.batch != OTHER_LABEL]
    others = [row for row in rows if row.batch == OTHER_LABEL]
    assert len(own) == BATCH_ROWS
    assert {row.steps for row in own} == {2}
    assert {row.graph_mode for row in others} == {OTHER_LABEL}
    assert sum(row.steps for row in rows) == 2 * len(GROUPS)
    for phase in PHASES:
        assert sum(row.steps for row in rows if row.phase == phase) == 2 * len(GROUPS) // len(PHASES)


@pytest.mark.parametrize("label", [0, len(PHASES) * len(GRAPH_MODES) * len(BATCH_LABELS) + 1, (1 << 64) - 1])
def test_a_row_whose_label_was_not_there_yet_when_it_was_copied_is_left_out(table, label):
    table.write.add_sample(0, 0, 1, 5, [5] + [0] * (CATEGORIES - 1))
    table.write.add_sample(1, 0, 1, 5, [5] + [0] * (CATEGORIES - 1))
    cells = memoryview(table.data).cast("Q")
    cells[table.write._batch_row(0, 0, 0)] = label
    assert [row.phase for row in table.read.batch_rows()] == [PHASES[1]]


# --- buckets ---------------------------------------------------------------------------------------------


def bucket_of(histogram):
    (index,) = (n for n, count in enumerate(histogram.counts) if count)
    return index


@pytest.mark.parametrize("bounds", [STEP_BOUNDS_NS, CATEGORY_BOUNDS_NS, ALL_REDUCE_BOUNDS_NS])
def test_bounds_rise(bounds):
    assert list(bounds) == sorted(set(bounds))
    assert all(type(bound) is int for bound in bounds)


@pytest.mark.parametrize(("index", "bound"), list(enumerate(STEP_BOUNDS_NS)))
def test_a_step_as_long_as_a_bound_is_in_its_bucket_and_a_nanosecond_more_is_not(index, bound):
    for ns, bucket in ((bound - 1, index), (bound, index), (bound + 1, index + 1)):
        table = Table()
        table.write.add_step(0, ns)
        assert bucket_of(table.read.step_duration(0)) == bucket


@pytest.mark.parametrize(("index", "bound"), list(enumerate(CATEGORY_BOUNDS_NS)))
def test_a_category_as_long_as_a_bound_is_in_its_bucket_and_a_nanosecond_more_is_not(index, bound):
    for ns, bucket in ((bound - 1, index), (bound, index), (bound + 1, index + 1)):
        table = Table()
        table.write.add_sample(2, 0, 1, ns, [0] * (CATEGORIES - 1) + [ns])
        assert bucket_of(table.read.category(2, CATEGORIES - 1)) == bucket


@pytest.mark.parametrize(("index", "bound"), list(enumerate(ALL_REDUCE_BOUNDS_NS)))
def test_an_all_reduce_as_long_as_a_bound_is_in_its_bucket_and_a_nanosecond_more_is_not(index, bound):
    for ns, bucket in ((bound - 1, index), (bound, index), (bound + 1, index + 1)):
        table = Table()
        table.write.add_all_reduces(1, [ns], [0])
        assert bucket_of(table.read.all_reduce(1)) == bucket


def test_a_step_s_all_reduces_count_like_one_at_a_time():
    durations = [ns + d for ns in (0, *ALL_REDUCE_BOUNDS_NS) for d in (1, 0, -1) if ns + d >= 0]
    sizes = [n + d for n in (1, *SIZE_BUCKETS) for d in (1, 0, -1)]
    calls = [(ns, nbytes) for ns, nbytes in zip(durations, sizes, strict=False)] * 2
    at_once, singly = Table(), Table()
    at_once.write.add_all_reduces(3, [ns for ns, _ in calls], [nbytes for _, nbytes in calls])
    for ns, nbytes in calls:
        singly.write.add_all_reduces(3, [ns], [nbytes])
    assert at_once.data == singly.data
    assert at_once.read.all_reduce(3).count == len(calls)


def test_no_all_reduce_adds_nothing(table):
    table.write.add_all_reduces(0, [], [])
    assert not any(table.data)


# --- the table itself --------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [0, TOTALS_BYTES - 8, TOTALS_BYTES + 8])
def test_a_table_of_another_size_is_refused(size):
    with pytest.raises(ValueError, match="counters"):
        Totals(bytes(size))
    with pytest.raises(ValueError, match="counters"):
        TotalsWriter(memoryview(bytearray(size)).cast("Q"))


def test_counters_of_another_width_are_refused():
    with pytest.raises(ValueError, match="format Q"):
        TotalsWriter(memoryview(bytearray(TOTALS_COUNT * 4)).cast("I"))


def test_there_is_room_for_every_hook():
    assert len(HOOK_NAMES) <= MAX_HOOKS


CHANGES = {
    "a phase": "model.PHASES = (*model.PHASES, 'new')",
    "the order of phases": "model.PHASES = model.PHASES[::-1]",
    "a graph mode": "model.GRAPH_MODES = (*model.GRAPH_MODES, 'new')",
    "a category": "model.LIVE_CATEGORIES = (*model.LIVE_CATEGORIES, 'new')",
    "the order of categories": "model.LIVE_CATEGORIES = model.LIVE_CATEGORIES[::-1]",
    "an all-reduce path": "model.ALL_REDUCE_PATHS = (*model.ALL_REDUCE_PATHS, 'new')",
    "a renamed path": "model.ALL_REDUCE_PATHS = ('renamed', *model.ALL_REDUCE_PATHS[1:])",
    "a reason": "model.LOST_REASONS = (*model.LOST_REASONS, 'new')",
    "a batch bucket": "model.BATCH_BUCKETS = (2, *model.BATCH_BUCKETS[1:])",
    "a size bucket": "model.SIZE_BUCKETS = (2, *model.SIZE_BUCKETS[1:])",
}


def test_the_fingerprint_changes_with_every_closed_set_and_is_the_same_in_every_process():
    code = "\n".join(
        [
            "import importlib, sys",
            "import vllm_k25_instrument.model as model, vllm_k25_instrument.totals as totals",
            "print(totals.FINGERPRINT)",
            "original = dict(vars(model))",
            f"for change in {list(CHANGES.values())!r}:",
            "    exec(change); importlib.reload(totals); print(totals.FINGERPRINT)",
            "    vars(model).update(original)",
        ]
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    same, *others = map(int, result.stdout.split())
    assert same == FINGERPRINT == importlib.import_module("vllm_k25_instrument.totals").FINGERPRINT
    assert len(others) == len(CHANGES)
    assert FINGERPRINT not in others
    assert len(set(others)) == len(others)


def test_a_snapshot_taken_while_a_thread_writes_only_ever_grows(table):
    stop = threading.Event()

    def write():
        while not stop.is_set():
            table.write.add_step(0, 7)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        last = 0
        for _ in range(300):
            totals = table.read
            assert totals.steps(0) >= last
            assert totals.step_duration(0).sum_ns % 7 == 0
            last = totals.steps(0)
    finally:
        stop.set()
        writer.join()
    assert table.read.step_duration(0).sum_ns == 7 * table.read.steps(0)
