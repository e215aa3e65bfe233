"""The same breakdown as a table, as Markdown and as a page: the same figures, readable, and safe."""

import io
import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest
from rich.console import Console

from tests.unit.test_report_rings import open_rank, read, write_server
from vllm_k25_instrument.hooks.names import HOOK_NAMES
from vllm_k25_instrument.model import Category
from vllm_k25_instrument.palette import CATEGORY_COLORS, category_color
from vllm_k25_instrument.report.bars import cells_of, segments, ticks
from vllm_k25_instrument.report.figures import batch_text, calls, microseconds
from vllm_k25_instrument.report.html import to_html
from vllm_k25_instrument.report.markdown import to_markdown
from vllm_k25_instrument.report.subject import ordinal
from vllm_k25_instrument.report.table import ReportTable
from vllm_k25_instrument.report.view import group_views


def as_text(renderable, width=200):
    console = Console(file=io.StringIO(), width=width)
    console.print(renderable)
    return console.file.getvalue()


@pytest.fixture
def two(tmp_path):
    write_server(tmp_path, world=2, steps=4)
    return read(tmp_path)


@pytest.fixture
def eight(tmp_path):
    write_server(tmp_path, world=8, steps=4, slowest=5)
    return read(tmp_path)


def test_shares_of_each_rank_and_of_the_mean_add_up_to_one(eight):
    (view,) = group_views(eight.breakdown, eight.slowest)
    for rank in view.ranks:
        assert sum(row.cells[rank].share for row in view.rows) == pytest.approx(1, abs=1e-12)
    assert sum(row.mean.share for row in view.rows) == pytest.approx(1, abs=1e-12)
    assert sum(row.mean.exclusive_ns for row in view.rows) == pytest.approx(view.step_mean_ns, abs=1)


def test_what_is_unattributed_is_taken_apart_by_position_and_marked_as_inferred(eight):
    (view,) = group_views(eight.breakdown, eight.slowest)
    names = ["between_all_reduce_and_attention", "between_layers_and_sampling", "unnamed"]
    assert [row.name for row in view.inferred] == names
    rest = view.rows[-1]
    for rank in view.ranks:
        parts = sum(row.cells[rank].exclusive_ns for row in view.inferred)
        assert parts == pytest.approx(rest.cells[rank].exclusive_ns)
    for document in (as_text(ReportTable(eight)), to_markdown(eight), to_html(eight)):
        for row in view.inferred:
            assert f"≈ {row.name}" in document
            assert microseconds(row.mean.exclusive_ns) in document
        assert "inferred by position" in document
    group = eight.breakdown.to_json_dict()["groups"][0]
    assert list(group["between_ns"]) == names[:2]
    assert sum(group["between_ns"].values()) < group["unattributed_ns"]


def test_where_a_hook_is_missing_nothing_is_inferred(tmp_path):
    hooks = dict.fromkeys(HOOK_NAMES, "attached") | {"moe_experts": "missing"}
    rank = open_rank(tmp_path, 0, 1, hooks=hooks)
    rank.write()
    report = read(tmp_path)
    assert "between_" not in as_text(ReportTable(report)) + to_markdown(report) + to_html(report)
    assert "between_ns" not in report.breakdown.to_json_dict()["groups"][0]


def test_few_ranks_have_a_column_each_and_the_slowest_is_marked(tmp_path):
    for n in range(2):
        rank = open_rank(tmp_path, n, 2, slow_us=700.0 * n)
        for _ in range(3):
            rank.write()
    text = as_text(ReportTable(read(tmp_path)))
    assert re.search(r"rank 0 .*rank 1 ◀", text)
    assert "Slowest rank 1:" in text


def test_many_ranks_show_their_mean_and_their_spread(eight):
    text = as_text(ReportTable(eight))
    assert "over ranks" in text
    assert "rank 7" not in text
    assert "Slowest rank 5" in text


def test_many_ranks_have_a_column_each_when_asked(eight):
    text = as_text(ReportTable(eight, per_rank=True))
    assert all(f"rank {rank}" in text for rank in range(8))


@pytest.mark.parametrize("per_rank", [False, True])
@pytest.mark.parametrize("width", [80, 100, 120, 200])
def test_no_figure_is_cut_off_by_the_edge_of_the_screen(eight, width, per_rank):
    text = as_text(ReportTable(eight, per_rank=per_rank), width)
    assert "…" not in text
    (view,) = group_views(eight.breakdown, eight.slowest)
    for row in view.rows:
        assert microseconds(row.mean.exclusive_ns if not per_rank else row.cells[7].exclusive_ns) in text


def test_the_table_says_what_its_percentages_are_of(two):
    assert "% is of the step's duration and uses exclusive time" in as_text(ReportTable(two))


def test_table_markdown_and_page_agree_on_every_figure(two):
    (view,) = group_views(two.breakdown, two.slowest)
    documents = as_text(ReportTable(two)), to_markdown(two), to_html(two)
    for row in view.rows:
        for cell in row.cells.values():
            assert all(microseconds(cell.exclusive_ns) in document for document in documents)
        if row.measured:
            assert all(microseconds(row.mean.sum_ns) in document for document in documents)
    for step in view.step_rows:
        for value in step.values.values():
            assert all(microseconds(value) in document for document in documents)


def test_every_row_of_a_markdown_table_has_as_many_cells_as_its_head(eight):
    for per_rank in (False, True):
        rows = [line for line in to_markdown(eight, per_rank=per_rank).splitlines() if line.startswith("|")]
        assert len(rows) > 8
        assert len({row.count("|") for row in rows}) == 1


class _Balance(HTMLParser):
    VOID = frozenset({"meta", "br"})

    def __init__(self):
        super().__init__()
        self.open = []
        self.links = []

    def handle_starttag(self, tag, attrs):
        self.links += [value for name, value in attrs if name in ("src", "href", "xlink:href")]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        assert tag == "line"

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_the_page_is_well_formed_and_loads_nothing(eight):
    page = to_html(eight)
    parser = _Balance()
    parser.feed(page)
    assert parser.open == []
    assert parser.links == []
    assert "<script" not in page
    assert "url(" not in page
    assert "http" not in page
    assert "prefers-color-scheme: dark" in page


def test_the_page_has_a_bar_for_each_category_and_rank(eight):
    (view,) = group_views(eight.breakdown, eight.slowest)
    assert to_html(eight).count("<rect ") == sum(len(segments(view, rank)) for rank in view.ranks) == 8 * 8


def test_text_from_outside_stays_text(two):
    hostile = replace(two, subject=replace(two.subject, model="<script>alert(1)</script>|*x*"))
    assert "<script>" not in to_html(hostile)
    assert "&lt;script&gt;" in to_html(hostile)
    assert r"\<script\>" in to_markdown(hostile)
    assert r"\|\*x\*" in to_markdown(hostile)
    assert "<script>alert(1)</script>|*x*" in as_text(ReportTable(hostile))


def test_warnings_are_at_the_top_of_page_and_markdown(tmp_path):
    write_server(tmp_path, world=8, found=range(7), steps=1)
    report = read(tmp_path)
    page, text = to_html(report), to_markdown(report)
    assert page.index("ranks_missing") < page.index("<section>")
    assert "Incomplete" in page
    assert text.index("ranks_missing") < text.index("## decode")
    assert "**Incomplete: see the warnings.**" in text


def test_a_category_that_one_rank_does_not_have_is_a_dash_there_and_not_a_zero(tmp_path):
    first, second = open_rank(tmp_path, 0, 2), open_rank(tmp_path, 1, 2)
    first.write(ranges=[(Category.SAMPLING, 0, 400, "", -1, -1, 0)], duration_ns=1000)
    second.write(ranges=[(Category.ALL_REDUCE, 0, 500, "", -1, -1, 0)], duration_ns=1000)
    line = next(line for line in to_markdown(read(tmp_path)).splitlines() if "`sampling`" in line)
    assert line.split("|")[2:4] == [" 0.4 (40.0) ", " - "]


def test_one_rank_alone_makes_a_page_and_a_table_without_a_verdict(tmp_path):
    open_rank(tmp_path, 0, 1).write()
    report = read(tmp_path)
    assert "slowest" not in as_text(ReportTable(report)).lower()
    assert "rank 0" in to_html(report)


def test_every_category_has_its_own_colour():
    assert set(CATEGORY_COLORS) == set(Category)
    assert len(set(CATEGORY_COLORS.values())) == len(Category)
    assert all(re.fullmatch("#[0-9a-f]{6}", color) for color in CATEGORY_COLORS.values())
    assert category_color("not a category") == CATEGORY_COLORS[Category.OTHER]


@pytest.mark.parametrize(
    ("label", "text"),
    [
        ("1", "1 request"),
        ("4", "2-4 requests"),
        ("64", "17-64 requests"),
        ("256", "65-256 requests"),
        ("+Inf", "more than 256 requests"),
    ],
)
def test_a_batch_label_is_explained(label, text):
    assert batch_text(label) == text


@pytest.mark.parametrize(("n", "text"), [(1, "1st"), (2, "2nd"), (3, "3rd"), (11, "11th"), (16, "16th"), (22, "22nd")])
def test_ordinals(n, text):
    assert ordinal(n) == text


def test_calls_are_whole_where_they_are():
    assert (calls(122.0), calls(121.94)) == ("122", "121.9")


def test_cells_of_a_bar_add_up_to_its_length():
    cells = cells_of({"a": 50.4, "b": 30.3, "c": 19.3}, 100, 37)
    assert sum(cells.values()) == 37
    assert cells_of({"a": 25}, 100, 40) == {"a": 10}
    assert cells_of({"a": 1}, 0, 40) == {"a": 0}
    assert sum(cells_of({"a": 150, "b": -5}, 100, 40).values()) >= 40


@pytest.mark.parametrize("length", [1, 900, 12_513_600, 30_349_300, 5e9])
def test_an_axis_has_a_handful_of_round_ticks(length):
    marks = ticks(length)
    assert 4 <= len(marks) <= 14
    assert marks[0] == 0
    assert marks[-1] <= length
