"""A server with a slow rank, watched as in production: the exporter, a real Prometheus with the configuration and the
rules in deploy/prometheus, and every question that a dashboard or a rule asks.

The rules are those that are deployed but for how long an alert waits (`for`), and intervals are short.
"""

from __future__ import annotations

import itertools
import math
import subprocess
import threading
import time
import urllib.parse
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests import dashboards
from tests.e2e.conftest import PROMPTS, SLOW, Running
from tests.e2e.prometheus import Prometheus, eventually, program, running_prometheus
from tests.export_rings import EXPORT
from tests.promql import operands

pytestmark = pytest.mark.e2e

RULES = Path(__file__).parents[2] / "deploy" / "prometheus"
SCRAPE_SECONDS = 3
FOR_SECONDS = 6
UNDER_LOAD_SECONDS = 60
JOBS = ("vllm-k25", "vllm")

THE_HOUR_BEFORE = (
    '1.5 *\navg_over_time(instance_phase:vllm_k25_step_duration_seconds:p99_rate5m{phase="decode"}[1h] offset 15m)'
)
WITHOUT_DATA = {
    ("rules.yml", "K25DecodeStepSlower", THE_HOUR_BEFORE): "compares with the hour before: needs 15 minutes of history",
}
"""What has no answer here, and why: the file, the panel or the rule, the query or the part of the expression.

Nothing else may be empty, and none of this may have data. deploy/grafana/README.md has the same table.
"""


@dataclass(frozen=True)
class Watched:
    """A Prometheus after a minute of load; `begin` and `end` are of the load, in Unix seconds."""

    prometheus: Prometheus
    exporter: str
    begin: float
    end: float
    fired_after: float

    def has_data(self, expression: str, *, instant: bool) -> bool:
        """Whether there is a number in the answer, at the end of the load or within it."""
        if instant:
            series = self.prometheus.ask("query", query=expression, time=self.end)["result"]
            values = [one["value"] for one in series]
        else:
            series = self.prometheus.ask(
                "query_range", query=expression, start=self.begin, end=self.end, step=SCRAPE_SECONDS
            )["result"]
            values = [value for one in series for value in one["values"]]
        return any(not math.isnan(float(value)) for _, value in values)

    def options(self, series: str, label: str) -> list[str]:
        """The values of a label, as a variable of a dashboard lists them."""
        parameters: dict[str, Any] = {"match[]": series, "start": self.begin, "end": self.end}
        return list(self.prometheus.ask(f"label/{label}/values", **parameters))


class Load:
    """Requests, one at a time and several at once, until it is stopped."""

    def __init__(self, running: Running) -> None:
        self._running = running
        self._stop = threading.Event()
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._send, daemon=True)
        self._thread.start()

    def _send(self) -> None:
        try:
            for concurrency in itertools.cycle((1, 3, 8)):
                if self._stop.is_set():
                    break
                self._running.client.complete_all([*PROMPTS] * 2, concurrency, max_tokens=12)
        except Exception as error:
            self._error = error

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()
        if self._error is not None:
            raise self._error


def rules_with_short_waits(file: Path) -> str:
    """A copy of the deployed rules that fire after seconds. Expressions, labels and annotations are untouched."""
    document = yaml.safe_load((RULES / "rules.yml").read_text())
    for group in document["groups"]:
        for rule in group["rules"]:
            if "alert" in rule:
                rule["for"] = f"{FOR_SECONDS}s"
    file.write_text(yaml.safe_dump(document))
    return str(file)


def configuration(rules: str, targets: dict[str, str]) -> dict[str, Any]:
    """The deployed configuration with the addresses of this test, and in a hurry."""
    config: dict[str, Any] = yaml.safe_load((RULES / "prometheus.yml").read_text())
    assert tuple(job["job_name"] for job in config["scrape_configs"]) == JOBS
    for job in config["scrape_configs"]:
        job["static_configs"] = [{"targets": [targets[job["job_name"]]]}]
    config["rule_files"] = [rules]
    config["global"] = dict.fromkeys(("scrape_interval", "scrape_timeout", "evaluation_interval"), f"{SCRAPE_SECONDS}s")
    return config


def expected_to_be_empty(file: str) -> set[tuple[str, str, str]]:
    return {what for what in WITHOUT_DATA if what[0] == file}


def firing(prometheus: Prometheus, alert: str) -> list[dict[str, str]]:
    """The labels of each of its instances that fires."""
    alerts = prometheus.ask("alerts")["alerts"]
    return [one["labels"] for one in alerts if one["labels"]["alertname"] == alert and one["state"] == "firing"]


@pytest.fixture(scope="module")
def exporter(slowed: Running) -> Iterator[str]:
    """Address of ``vllm-k25 export`` on the server's rings."""
    program("prometheus")
    command = [*EXPORT, str(slowed.ring_dir), "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    yield urllib.parse.urlsplit(process.stdout.readline().rpartition(" at ")[2].strip()).netloc
    process.terminate()
    assert process.wait(10) == 0


@pytest.fixture(scope="module")
def watched(slowed: Running, exporter: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    folder = tmp_path_factory.mktemp("watched")
    targets = dict(zip(JOBS, (exporter, urllib.parse.urlsplit(slowed.server.url).netloc), strict=True))
    config = configuration(rules_with_short_waits(folder / "rules.yml"), targets)
    with running_prometheus(config, folder) as prometheus:
        load = Load(slowed)
        begin = time.time()
        eventually(lambda: firing(prometheus, "K25SlowRank"), "K25SlowRank fires", timeout=2 * UNDER_LOAD_SECONDS)
        fired = time.time()
        time.sleep(max(0.0, begin + UNDER_LOAD_SECONDS - fired))
        end = time.time()
        load.stop()
        yield Watched(prometheus, exporter, begin, end, fired - begin)


def test_the_alert_names_the_slow_rank_and_no_other(watched: Watched) -> None:
    (rule,) = [
        rule
        for group in watched.prometheus.ask("rules")["groups"]
        for rule in group["rules"]
        if rule["name"] == "K25SlowRank"
    ]
    assert rule["duration"] == FOR_SECONDS
    assert watched.fired_after >= FOR_SECONDS
    query = 'ALERTS{alertname="K25SlowRank", alertstate="firing"}'
    series = watched.prometheus.ask("query", query=query, time=watched.end)["result"]
    assert [(one["metric"]["rank"], one["metric"]["instance"], one["metric"]["job"]) for one in series] == [
        (str(SLOW), watched.exporter, "vllm-k25")
    ]
    # Somebody is to blame, so the alert for when nobody is stays quiet.
    assert not watched.has_data('ALERTS{alertname="K25WaitingDominates", alertstate="firing"}', instant=True)


def test_both_targets_are_scraped_and_the_same_metric_is_not_there_twice(watched: Watched) -> None:
    def up() -> bool:  # on a busy machine a scrape may take longer than it has
        targets = watched.prometheus.ask("targets")["activeTargets"]
        states = {one["labels"]["job"]: (one["health"], one["lastError"]) for one in targets}
        return states == dict.fromkeys(JOBS, ("up", ""))

    eventually(up, "both targets are up")
    assert watched.options('{__name__=~"vllm_k25_.*"}', "job") == ["vllm-k25"]
    assert watched.has_data('count({__name__=~"vllm:.*", job="vllm"})', instant=True)


@pytest.mark.parametrize("instant", [True, False])
def test_an_answer_without_a_number_is_none(watched: Watched, instant: bool) -> None:
    for nothing in ('vllm_k25_steps_total{rank="99"}', "vector(0) / 0", 'rate(vllm_k25_steps_total{rank="99"}[1m])'):
        assert not watched.has_data(nothing, instant=instant)
    assert eventually(lambda: watched.has_data("vllm_k25_steps_total", instant=instant), "there is a number")


@pytest.mark.parametrize("name", dashboards.NAMES)
def test_every_query_of_a_dashboard_returns_data(watched: Watched, name: str) -> None:
    dashboard = dashboards.load(name)
    values: dict[str, Any] = {}
    options: dict[str, list[str]] = {}

    def asked(expression: str, **scoped: Any) -> str:
        return dashboards.interpolated(expression, {**values, **scoped}, SCRAPE_SECONDS, SCRAPE_SECONDS)

    for variable in dashboards.variables(dashboard):
        series, label = dashboards.label_values(variable["query"]["query"])
        options[variable["name"]] = found = watched.options(asked(series), label)
        assert found, f"nothing to choose from: {variable['name']}"
        values[variable["name"]] = dashboards.chosen(variable, found)

    empty = set()
    for query in dashboards.queries(dashboard):
        repeats = [{query.repeat: [value]} for value in options[query.repeat]] if query.repeat else [{}]
        for scoped in repeats:
            expression = asked(query.expression, **scoped)
            if not watched.has_data(expression, instant=query.instant):
                print(f"no data: {name}, panel {query.panel}:\n{expression}")
                empty.add((f"{name}.json", str(query.panel), query.ref_id))
    assert empty == expected_to_be_empty(f"{name}.json")

    for annotation in dashboard["annotations"]["list"]:
        assert watched.has_data(asked(annotation["expr"]), instant=False), annotation["name"]


def test_every_rule_finds_what_it_looks_at(watched: Watched) -> None:
    rules = [rule for group in yaml.safe_load((RULES / "rules.yml").read_text())["groups"] for rule in group["rules"]]
    empty = set()
    for rule in rules:
        name = rule.get("alert") or rule["record"]
        # What an alert compares has data in good days too; the comparison itself has not.
        parts = operands(rule["expr"]) if "alert" in rule else [rule["expr"], rule["record"]]
        empty |= {("rules.yml", name, part) for part in parts if not watched.has_data(part, instant=True)}
    assert empty == expected_to_be_empty("rules.yml")


def test_what_has_no_answer_here_is_told_to_users() -> None:
    text = (dashboards.FOLDER.parent / "README.md").read_text()
    for (file, name, _), why in WITHOUT_DATA.items():
        assert f"| `{file}` | `{name}` | {why} |" in text


def test_prometheus_itself_has_no_complaint_about_the_rules(watched: Watched) -> None:
    for group in watched.prometheus.ask("rules")["groups"]:
        for rule in group["rules"]:
            assert (rule["health"], rule.get("lastError", "")) == ("ok", ""), rule["name"]
