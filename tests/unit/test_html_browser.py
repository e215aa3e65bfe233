"""The page in a real headless Chromium: no error, nothing that scrolls sideways, on a desk and on a phone."""

import pytest
from typer.testing import CliRunner

from tests.chromium import browser, find_chromium
from tests.traces import Call, HostRange, Rank, Work, document, encode
from tests.unit.test_report_rings import write_server
from vllm_k25_instrument.cli import app

CHROMIUM = find_chromium()

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium: apt-get install chromium")

LONG = "void at::native::" + "a_very_long_name_that_has_no_space_in_it" * 12 + "<4, int>(int)"


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """Eight ranks of which one is missing, two streams, names of 500 characters."""
    folder = tmp_path_factory.mktemp("run")
    for number in range(7):
        calls, ranges = [], []
        for step in range(12):
            at = 1_000_000 + 500_000 * step
            ranges.append(HostRange("execute_context_0(0)_generation_64(64)", at, 20_000))
            work = [
                Work("ncclDevKernel_AllReduce_Sum_bf16_RING_LL(x)", at + 30_000 + n * 20_000, 15_000, 20)
                for n in range(10)
            ]
            work += [
                Work("void marlin_moe_wna16::Marlin<1l, 2l>(int4 const*)", at + 40_000 + n * 20_000, 12_000)
                for n in range(10)
            ]
            work.append(Work(LONG, at + 260_000, 30_000))
            calls.append(Call("cudaGraphLaunch", at + 5_000, 10_000, tuple(work)))
        rank = Rank(tuple(calls), tuple(ranges), rank=number, world_size=8, pid=100 + number)
        (folder / f"rank-{number}.json").write_bytes(encode(document([rank])))
    made = folder / "page.html"
    result = CliRunner().invoke(app, ["analyze", str(folder), "--html", str(made), "--per-rank"])
    assert result.exit_code == 3, result.stderr
    return made


@pytest.fixture(scope="module")
def ring_page(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rings")
    write_server(folder, world=8, batches=(1, 64), steps=3, slowest=5)
    made = folder / "page.html"
    CliRunner().invoke(app, ["report", str(folder), "--html", str(made)])
    return made


@pytest.fixture(scope="module")
def chromium(tmp_path_factory):
    with browser(CHROMIUM, tmp_path_factory.mktemp("profile")) as running:
        yield running


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [390, 768, 1400])
@pytest.mark.parametrize("which", ["page", "ring_page"])
def test_the_page_fits_its_window_and_has_no_error(request, chromium, which, width, dark):
    chromium.show(request.getfixturevalue(which), width=width, dark=dark)
    assert chromium.errors == []
    assert chromium.evaluate("innerWidth") == width
    assert chromium.evaluate("document.documentElement.scrollWidth") == width
    background = chromium.evaluate("getComputedStyle(document.body).backgroundColor")
    lightness = sum(int(value) for value in background.removeprefix("rgb(").removesuffix(")").split(","))
    assert (lightness < 200) is dark


def test_the_page_shows_bars_the_timeline_the_kernels_and_the_warnings(chromium, page):
    chromium.show(page, width=1400)
    titles = chromium.evaluate("[...document.querySelectorAll('h2')].map(e => e.textContent).join('|')")
    for title in (
        "Incomplete",
        "decode · batch 64 · full graph",
        "In words",
        "One step as it ran",
        "Ranks",
        "Top kernels",
    ):
        assert title in titles
    assert chromium.evaluate("document.querySelectorAll('svg rect').length") > 7 * 3 + 20
    lanes = chromium.evaluate("[...document.querySelectorAll('.lanes.tall div')].map(e => e.textContent).join('|')")
    assert lanes == "stream 7|stream 20"
    assert chromium.evaluate("document.querySelectorAll('details').length") >= 7


def test_every_bar_of_the_timeline_lies_inside_its_picture(chromium, page):
    chromium.show(page, width=390)
    outside = chromium.evaluate(
        "[...document.querySelectorAll('svg')].flatMap(svg => [...svg.querySelectorAll('rect')].filter(rect => "
        "rect.getBoundingClientRect().right > svg.getBoundingClientRect().right + 1)).length"
    )
    assert outside == 0


def test_text_can_be_read_on_its_ground(chromium, page):
    """WCAG's contrast of 4.5 to 1 for the text of tables and captions, light and dark."""
    for dark in (False, True):
        chromium.show(page, width=1400, dark=dark)
        worst = chromium.evaluate(_CONTRAST)
        assert worst >= 4.5


_CONTRAST = """
(() => {
  const parse = text => text.match(/[\\d.]+/g).map(Number);
  const part = v => (v /= 255) <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
  const luminance = ([r, g, b]) => 0.2126 * part(r) + 0.7152 * part(g) + 0.0722 * part(b);
  const ground = e => {
    for (; e; e = e.parentElement) {
      const c = parse(getComputedStyle(e).backgroundColor);
      if (c.length < 4 || c[3] > 0) return c;
    }
    return [255, 255, 255];
  };
  const seen = [...document.querySelectorAll('h1, h2, p, dt, dd, th, td, li, summary, .axis span, .lanes div, code')]
    .filter(e => e.textContent.trim());
  return Math.min(...seen.map(e => {
    const [a, b] = [luminance(parse(getComputedStyle(e).color)), luminance(ground(e))].sort((x, y) => y - x);
    return (a + 0.05) / (b + 0.05);
  }));
})()
"""
