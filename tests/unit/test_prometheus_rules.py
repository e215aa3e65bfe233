"""The rules are those that promtool accepts, their tests pass and would notice, and what they ask for exists."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.exposition import CLOSED_LABELS, FAMILIES

FOLDER = Path(__file__).parents[2] / "deploy" / "prometheus"
RULES = [rule for group in yaml.safe_load((FOLDER / "rules.yml").read_text())["groups"] for rule in group["rules"]]
ALERTS = {rule["alert"]: rule for rule in RULES if "alert" in rule}
RECORDED = {rule["record"] for rule in RULES if "record" in rule}
TESTS = yaml.safe_load((FOLDER / "rules_test.yml").read_text())["tests"]
QUESTIONS = [question for test in TESTS for question in test["promql_expr_test"]]

LASTING = {"K25SlowRank", "K25WaitingDominates", "K25RanksNotComparable"}
"""Alerts whose tests are of a state that lasts from beginning to end, with nothing before it."""


@pytest.fixture(scope="module")
def promtool():
    """The program of the Debian package `prometheus`; CI has it, elsewhere its absence skips the test."""
    path = shutil.which("promtool")
    if path is None:
        reason = "promtool is not installed (Debian package: prometheus)"
        if os.environ.get("CI") == "true":
            pytest.fail(reason)
        pytest.skip(reason)

    def run(*arguments):
        return subprocess.run([path, *arguments], capture_output=True, text=True, check=False, timeout=120)

    return run


@pytest.fixture
def changed(tmp_path):
    """A copy of the rules with one of them changed, its tests beside it; yields the path of the tests."""

    def change(name, **fields):
        document = yaml.safe_load((FOLDER / "rules.yml").read_text())
        for group in document["groups"]:
            for rule in group["rules"]:
                if name in (rule.get("alert"), rule.get("record")):
                    rule.update(fields)
        (tmp_path / "rules.yml").write_text(yaml.safe_dump(document))
        return shutil.copy(FOLDER / "rules_test.yml", tmp_path)

    return change


def test_the_rules_are_valid(promtool):
    run = promtool("check", "rules", str(FOLDER / "rules.yml"))
    assert run.returncode == 0, run.stdout + run.stderr
    assert f"{len(RULES)} rules found" in run.stdout


def test_the_example_configuration_is_valid_and_finds_the_rules(promtool):
    run = promtool("check", "config", str(FOLDER / "prometheus.yml"))
    assert run.returncode == 0, run.stdout + run.stderr
    assert f"{len(RULES)} rules found" in run.stdout


def test_the_rules_fire_when_they_should_and_only_then(promtool):
    run = promtool("test", "rules", str(FOLDER / "rules_test.yml"))
    assert run.returncode == 0, run.stdout + run.stderr


@pytest.mark.parametrize("alert", ALERTS)
def test_an_alert_that_never_fires_is_noticed(promtool, changed, alert):
    run = promtool("test", "rules", changed(alert, expr="vector(1) > 2"))
    assert run.returncode != 0
    assert alert in run.stdout + run.stderr


@pytest.mark.parametrize("alert", sorted(set(ALERTS) - LASTING))
def test_an_alert_that_fires_at_once_is_noticed(promtool, changed, alert):
    run = promtool("test", "rules", changed(alert, **{"for": "0s"}))
    assert run.returncode != 0
    assert alert in run.stdout + run.stderr


def test_every_alert_says_what_is_wrong_and_what_to_do():
    for name, rule in ALERTS.items():
        assert re.fullmatch("K25[A-Za-z]+", name)
        assert set(rule["annotations"]) - {"dashboard"} == {"summary", "description", "runbook"}, name
        assert all(rule["annotations"].values()), name
        assert rule["labels"]["severity"] in {"info", "warning", "critical"}, name
        assert len(rule["annotations"]["runbook"]) > 100, name


def test_every_alert_has_a_case_in_which_it_fires_and_a_case_in_which_nothing_does():
    fired = {
        name for q in QUESTIONS for s in q["exp_samples"] for name in re.findall(r'alertname="(\w+)"', s["labels"])
    }
    assert fired == set(ALERTS)
    assert {"expr": "ALERTS", "eval_time": "4h", "exp_samples": []} in QUESTIONS


def test_every_metric_that_is_asked_for_exists():
    exposed = {f"{name}{suffix}" for name in FAMILIES for suffix in ("", "_sum", "_count", "_bucket")}
    for text in [rule["expr"] for rule in RULES] + [s["series"] for test in TESTS for s in test["input_series"]]:
        for name in re.findall(r"[a-z_:]*vllm_k25_[a-z0-9_:]+", text):
            assert name in exposed | RECORDED, name


def test_every_label_value_that_is_asked_for_can_occur():
    for rule in RULES:
        for label, values in re.findall(r'(\w+)(?:=~?|!=)"([^"]+)"', rule["expr"]):
            if label in CLOSED_LABELS:
                assert all(CLOSED_LABELS[label].fullmatch(value) for value in values.split("|")), (label, values)
