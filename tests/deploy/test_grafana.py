"""The dashboards are what the code writes, what Grafana takes, and ask for what exists."""

from __future__ import annotations

import copy
import json
import re
import subprocess
import sys
from itertools import combinations

import pytest
import yaml

from tests import dashboards
from tests.deploy.deployments import DEPLOY, load
from tests.deploy.grafana_types import HERE, GrafanaTypes
from tests.exposition import CLOSED_LABELS, FAMILIES
from vllm_k25_instrument.model import LIVE_CATEGORIES
from vllm_k25_instrument.palette import CATEGORY_COLORS

BOARDS = {name: dashboards.load(name) for name in dashboards.NAMES}
QUERIES = {name: [query.expression for query in dashboards.queries(board)] for name, board in BOARDS.items()}
PANELS = [
    pytest.param(panel, id=f"{name}-{panel['id']}")
    for name, board in BOARDS.items()
    for panel in dashboards.panels(board)
]
RULES = [rule for group in load(DEPLOY / "prometheus" / "rules.yml")["groups"] for rule in group["rules"]]
ALERTS = {rule["alert"]: rule for rule in RULES if "alert" in rule}


def test_there_are_the_four_dashboards():
    assert dashboards.NAMES == ("all-reduce", "fleet", "overview", "ranks")


def test_the_files_are_what_the_generator_writes(module):
    module("grafana_foundation_sdk", "grafana-foundation-sdk")
    result = subprocess.run(
        [sys.executable, DEPLOY / "grafana" / "generate.py", "--check"], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("name", dashboards.NAMES)
def test_the_sdks_model_reads_a_dashboard_and_loses_nothing(module, name):
    """Panels' options and Prometheus' queries have models of their own there: a field that is none would be gone."""
    module("grafana_foundation_sdk", "grafana-foundation-sdk")
    from grafana_foundation_sdk.cog.encoder import JSONEncoder
    from grafana_foundation_sdk.cog.plugins import register_default_plugins
    from grafana_foundation_sdk.models.dashboard import Dashboard

    register_default_plugins()
    read = json.loads(JSONEncoder().encode(Dashboard.from_json(copy.deepcopy(BOARDS[name]))))
    assert list(_lost(BOARDS[name], read, name)) == []


def _lost(before, after, path):
    """Where `after` has not what `before` has; it may have defaults beside it."""
    if isinstance(before, dict) and isinstance(after, dict):
        for key, value in before.items():
            yield from _lost(value, after.get(key), f"{path}/{key}")
    elif isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        for index, (one, other) in enumerate(zip(before, after, strict=True)):
            yield from _lost(one, other, f"{path}/{index}")
    elif before != after:
        yield path


@pytest.fixture(scope="module")
def types(request):
    return GrafanaTypes.installed_in(request.config.cache.mkdir("grafana-schema"))


def test_grafanas_own_types_have_no_complaint(types):
    assert types.complaints(BOARDS) == []


def _misspell(panel):
    panel["fieldConfig"]["defaults"]["unti"] = panel["fieldConfig"]["defaults"].pop("unit")


def _unknown_option(panel):
    panel["options"]["legend"]["position"] = "bottom"


def _no_such_mode(panel):
    panel["options"]["tooltip"]["mode"] = "several"


def _no_such_style(panel):
    panel["fieldConfig"]["defaults"]["custom"]["drawStyle"] = "wavy"


def _number_as_text(panel):
    panel["gridPos"]["w"] = "12"


def _no_options(panel):
    del panel["options"]["legend"]


def test_grafanas_own_types_find_what_is_wrong(types):
    damages = (_misspell, _unknown_option, _no_such_mode, _no_such_style, _number_as_text, _no_options)
    damaged = {}
    for damage in damages:
        board = copy.deepcopy(BOARDS["overview"])
        board["panels"] = [next(panel for panel in board["panels"] if panel["type"] == "timeseries")]
        damage(board["panels"][0])
        damaged[damage.__name__] = board
    complaints = types.complaints(damaged)
    assert len(complaints) == len(damages), complaints


def test_the_types_are_of_the_grafana_in_the_compose_file():
    schema = json.loads((HERE / "package.json").read_text())["dependencies"]["@grafana/schema"]
    assert f"grafana/grafana:{schema}" in (DEPLOY / "compose" / "compose.yml").read_text()


def test_uids_and_ids_are_unique():
    assert {name: board["uid"] for name, board in BOARDS.items()} == {name: f"vllm-k25-{name}" for name in BOARDS}
    assert len({board["title"] for board in BOARDS.values()}) == len(BOARDS)
    for board in BOARDS.values():
        ids = [panel["id"] for panel in board["panels"]]
        assert len(ids) == len(set(ids))


@pytest.mark.parametrize("name", dashboards.NAMES)
def test_no_panel_stands_on_another_or_beyond_the_edge(name):
    places = [panel["gridPos"] for panel in BOARDS[name]["panels"]]
    assert all(place["x"] >= 0 and place["x"] + place["w"] <= 24 for place in places)
    for one, other in combinations(places, 2):
        beside = one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
        assert beside or one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"], (one, other)


@pytest.mark.parametrize("panel", PANELS)
def test_a_panel_says_what_it_shows_in_which_unit_and_from_where(panel):
    assert panel["title"]
    assert len(panel["description"]) > 40
    assert panel["fieldConfig"]["defaults"]["unit"]
    source = {"type": "prometheus", "uid": "${datasource}"}
    assert panel["datasource"] == source
    assert panel["targets"]
    assert all(target["datasource"] == source for target in panel["targets"])


@pytest.mark.parametrize("name", dashboards.NAMES)
def test_every_variable_is_used_and_defined_before_it_is(name):
    board = BOARDS[name]
    defined = {"datasource"}
    for variable in dashboards.variables(board):
        assert set(_variables_in(variable["query"]["query"])) <= defined, variable["name"]
        defined.add(variable["name"])
    assert {"model", "instance"} <= defined
    asked = [*QUERIES[name], *(one["expr"] for one in board["annotations"]["list"])]
    used = {found for text in asked for found in _variables_in(text)}
    used |= {found for variable in dashboards.variables(board) for found in _variables_in(variable["query"]["query"])}
    assert used == defined - {"datasource"}


def _variables_in(text):
    return [found for found in re.findall(r"\$(\w+)", text) if found not in {"__rate_interval", "1"}]


@pytest.mark.parametrize("name", dashboards.NAMES)
def test_what_is_asked_for_exists(name):
    suffixes = {"histogram": ("_bucket", "_sum", "_count"), "summary": ("_sum", "_count")}
    exposed = {f"{family}{suffix}" for family, (kind, _) in FAMILIES.items() for suffix in suffixes.get(kind, ("",))}
    texts = [*QUERIES[name], *(variable["query"]["query"] for variable in dashboards.variables(BOARDS[name]))]
    for text in texts:
        assert set(re.findall(r"vllm_k25_[a-z0-9_]+", text)) <= exposed
        for label, value in re.findall(r'(\w+)=~?"([^"$]+)"', text):
            if label in CLOSED_LABELS:
                assert CLOSED_LABELS[label].fullmatch(value), (label, value)


def test_the_families_of_the_metrics_are_all_on_some_dashboard():
    text = json.dumps(BOARDS)
    assert [family for family in FAMILIES if family not in text] == []


@pytest.mark.parametrize(("name", "panel_id"), [("overview", 21), ("overview", 41), ("overview", 42), ("ranks", 31)])
def test_categories_have_the_colours_that_they_have_everywhere(name, panel_id):
    (panel,) = [panel for panel in dashboards.panels(BOARDS[name]) if panel["id"] == panel_id]
    shown = {
        override["matcher"]["options"]: override["properties"][0]["value"]["fixedColor"]
        for override in panel["fieldConfig"]["overrides"]
    }
    assert shown == {category: CATEGORY_COLORS[category] for category in LIVE_CATEGORIES}


@pytest.mark.parametrize("panel", PANELS)
def test_a_dashed_line_is_where_the_alert_begins(panel):
    named = re.search(r"The dashed line is where (\w+) begins", panel["description"])
    custom = panel["fieldConfig"]["defaults"].get("custom", {})
    assert (custom.get("thresholdsStyle", {}).get("mode") == "dashed") == (named is not None)
    if named is not None:
        limit = panel["fieldConfig"]["defaults"]["thresholds"]["steps"][-1]["value"]
        assert re.search(rf"> {limit}(?!\d)", ALERTS[named[1]]["expr"])


@pytest.mark.parametrize("alert", [name for name, rule in ALERTS.items() if "dashboard" in rule["annotations"]])
def test_an_alert_leads_to_a_panel_that_is_there(alert):
    link = ALERTS[alert]["annotations"]["dashboard"]
    match = re.fullmatch(
        r"/d/vllm-k25-(?P<name>[a-z-]+)\?viewPanel=panel-(?P<id>\d+)&var-instance=\{\{ \$labels\.instance \}\}", link
    )
    assert match is not None
    assert int(match["id"]) in {panel["id"] for panel in dashboards.panels(BOARDS[match["name"]])}


def test_only_the_alert_that_has_no_server_has_no_panel():
    assert [name for name, rule in ALERTS.items() if "dashboard" not in rule["annotations"]] == ["K25MetricsAbsent"]


def test_grafana_in_the_compose_file_finds_the_dashboards_and_their_prometheus():
    mounts = load(DEPLOY / "compose" / "compose.yml")["services"]["grafana"]["volumes"]
    assert "../grafana/dashboards:/var/lib/grafana/dashboards:ro" in mounts
    providers = yaml.safe_load((DEPLOY / "compose" / "grafana" / "providers" / "dashboards.yml").read_text())
    assert providers["providers"][0]["options"]["path"] == "/var/lib/grafana/dashboards"
    sources = yaml.safe_load((DEPLOY / "compose" / "grafana" / "datasources" / "prometheus.yml").read_text())
    assert [source["type"] for source in sources["datasources"]] == ["prometheus"]


def test_variables_are_replaced_as_grafana_does():
    expression = 'rate(a{b=~"$b", c="$c"}[$__rate_interval]) / label_replace(d, "e", "$1", "f", "(.+)")'
    values = {"b": ["10.0.0.1:9425", "+Inf"], "c": "decode"}
    assert dashboards.interpolated(expression, values, scrape_seconds=15, step_seconds=15) == (
        r'rate(a{b=~"(10\\.0\\.0\\.1:9425|\\+Inf)", c="decode"}[60s]) / label_replace(d, "e", "$1", "f", "(.+)")'
    )
    assert dashboards.interpolated("a[$__rate_interval]", {}, scrape_seconds=15, step_seconds=300) == "a[315s]"
