"""Intervals of medians, routings, and the document of a micro-benchmark."""

from __future__ import annotations

import json
import math
import random

import numpy as np
import pytest

from vllm_k25_instrument.bench.document import (
    BenchDocument,
    BenchMachine,
    Choice,
    DocumentError,
    Kind,
    Remark,
    Row,
    Skew,
    parse_document,
    read_document,
)
from vllm_k25_instrument.bench.errors import CannotRunError
from vllm_k25_instrument.bench.intervals import Median, median_interval, sign_rank
from vllm_k25_instrument.bench.routing import Routing, choose_experts, distinct_experts, read_counts

# --- intervals --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("count", "k"), [(5, 0), (6, 1), (8, 1), (9, 2), (20, 6), (100, 40)])
def test_ranks_of_the_sign_test_are_those_of_the_tables(count, k):
    assert sign_rank(count) == k


def test_the_interval_of_ten_values_is_the_second_to_the_ninth():
    assert median_interval([9, 1, 8, 2, 7, 3, 6, 4, 5, 10]) == Median(6, 2, 9, 10)  # the median 5.5, rounded to even


def test_the_interval_holds_the_median_as_often_as_it_says():
    draw = random.Random(1)
    held = 0
    for _ in range(2000):
        found = median_interval([1000 * draw.expovariate(1.0) for _ in range(25)])
        held += found.low_ns <= 1000 * math.log(2) <= found.high_ns
    assert held / 2000 > 0.94


def test_too_few_values_have_no_interval():
    with pytest.raises(ValueError, match="6 are needed"):
        median_interval([1.0] * 5)


def test_intervals_that_touch_overlap():
    assert Median(5, 4, 6, 9).overlaps(Median(7, 6, 8, 9))
    assert not Median(5, 4, 6, 9).overlaps(Median(8, 7, 9, 9))


# --- routing ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("routing", [Routing.UNIFORM, Routing.SAME, Routing.SPREAD])
@pytest.mark.parametrize("tokens", [1, 64, 256])
def test_every_token_picks_eight_different_experts(routing, tokens):
    chosen = choose_experts(routing, tokens, 384, 8)
    assert chosen.shape == (tokens, 8)
    assert chosen.dtype == np.int32
    assert all(len(set(row)) == 8 for row in chosen.tolist())
    assert (chosen >= 0).all()
    assert (chosen < 384).all()


def test_the_extremes_read_the_fewest_and_the_most_experts():
    assert [distinct_experts(choose_experts(Routing.SAME, t, 384, 8)) for t in (1, 64, 256)] == [8, 8, 8]
    assert [distinct_experts(choose_experts(Routing.SPREAD, t, 384, 8)) for t in (1, 16, 64, 256)] == [8, 128, 384, 384]


def test_uniform_routing_picks_as_many_distinct_experts_as_expected():
    # E (1 - (1 - k/E)^t) = 384 (1 - (376/384)^64) = 283.8
    found = [distinct_experts(choose_experts(Routing.UNIFORM, 64, 384, 8, seed=seed)) for seed in range(50)]
    assert abs(sum(found) / 50 - 283.8) < 3


def test_the_same_seed_draws_the_same_experts():
    assert (choose_experts(Routing.UNIFORM, 64, 384, 8) == choose_experts(Routing.UNIFORM, 64, 384, 8)).all()


def test_measured_routing_follows_the_counts():
    counts = [0.0] * 8 + [1.0] * 8 + [9.0] * 8
    chosen = choose_experts(Routing.MEASURED, 4000, 24, 1, counts)
    share = np.bincount(chosen.ravel(), minlength=24) / 4000
    assert share[:8].sum() == 0
    assert share[16:].sum() == pytest.approx(0.9, abs=0.02)


def test_counts_of_another_model_are_refused():
    with pytest.raises(CannotRunError, match="counts are of 3 experts, and 384"):
        choose_experts(Routing.MEASURED, 1, 384, 8, [1, 2, 3])
    with pytest.raises(CannotRunError, match="name 2 experts, and a token picks 3"):
        choose_experts(Routing.MEASURED, 1, 4, 3, [1, 2, 0, 0])


@pytest.mark.parametrize("text", ["[3, 0, 1.5]", '{"expert_counts": [3, 0, 1.5], "layer": 7}'])
def test_counts_are_a_list_or_an_object_around_one(tmp_path, text):
    (tmp_path / "c.json").write_text(text)
    assert read_counts(tmp_path / "c.json") == (3, 0, 1.5)


@pytest.mark.parametrize("text", ["", "{}", "[]", "[1, -1]", '[1, "2"]', "[true]", "[NaN]", "[1e99]", "[" * 100_000])
def test_other_files_of_counts_are_refused_by_name(tmp_path, text):
    (tmp_path / "c.json").write_text(text)
    with pytest.raises(CannotRunError, match=r"c\.json"):
        read_counts(tmp_path / "c.json")


# --- the document -----------------------------------------------------------------------------------------

DOCUMENT = BenchDocument(
    Kind.ALL_REDUCE,
    BenchMachine("cpu", "a processor", "0.32.0+cpu", "2.13.0", 1, ranks=2),
    (Row("all_reduce", "cpu_shm", "1 x 7168", 10, 9, 11, 20, skew=Skew(3, (0, 3), (3, 0))),),
    settings={"tokens": [1]},
    choices=(Choice(1, 14_336, 1, False, "cpu_shm", 10, True, "cpu_shm", 10),),
    summary={"x": 1.5},
    warnings=(Remark("eager_only", "no graphs"),),
)


def test_a_document_is_read_as_it_was_written(tmp_path):
    text = json.dumps(DOCUMENT.to_json_dict())
    (tmp_path / "d.json").write_text(text)
    assert read_document(tmp_path / "d.json") == DOCUMENT
    assert json.loads(text)["schema"] == "vllm_k25.bench/1"


def test_a_row_has_every_key_whatever_it_has_not():
    (row,) = DOCUMENT.to_json_dict()["rows"]
    assert row["floor_ns"] is None
    assert {"median_ns", "low_ns", "high_ns", "repeats", "bytes", "flops", "l2_flushed", "in_graph"} <= row.keys()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schema": "vllm_k25.breakdown/1"}, "schema"),
        ({"kind": "lunch"}, "kind"),
        ({"rows": [{"name": "x"}]}, "rows"),
        ({"rows": None}, "rows"),
        ({"machine": 7}, "machine"),
    ],
)
def test_other_documents_are_refused_with_the_field(change, message):
    with pytest.raises(DocumentError, match=message):
        parse_document({**DOCUMENT.to_json_dict(), **change})


@pytest.mark.parametrize("text", ["", "[]", "{", "[" * 10_000])
def test_files_that_are_no_document_are_refused(tmp_path, text):
    (tmp_path / "d.json").write_text(text)
    with pytest.raises(DocumentError):
        read_document(tmp_path / "d.json")
