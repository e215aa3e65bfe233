"""The settings: each wrong value is one line that says what is allowed."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.samples import ROOT
from vllm_k25_instrument.instances import INSTANCE_VARIABLE, default_ring_directory
from vllm_k25_instrument.model import HOOKED_CATEGORIES, Category
from vllm_k25_instrument.settings import (
    Metrics,
    Settings,
    SettingsError,
    load_settings,
    settings_table,
    unknown_variables,
)

VARIABLES = [f"K25_{name.upper()}" for name in Settings.model_fields]


@pytest.fixture(autouse=True)
def no_variables(monkeypatch):
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


def load(monkeypatch, **variables):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    return load_settings()


def refused(monkeypatch, **variables):
    with pytest.raises(SettingsError) as caught:
        load(monkeypatch, **variables)
    line = str(caught.value)
    assert "\n" not in line
    return line


def test_without_variables_the_plugin_is_off_and_everything_has_its_default():
    settings = load_settings()
    assert settings.instrument is False
    assert settings.ring_dir == default_ring_directory()
    assert settings.sample_every == 16
    assert settings.categories == frozenset(HOOKED_CATEGORIES)
    assert settings.nvtx is True
    assert settings.metrics is Metrics.AUTO
    assert (settings.export_host, settings.export_port) == ("127.0.0.1", 9425)


@pytest.mark.parametrize("name", VARIABLES)
def test_a_variable_set_to_nothing_counts_as_not_set(monkeypatch, name):
    assert load(monkeypatch, **{name: ""}) == load_settings()


# --- wrong values ------------------------------------------------------------------------------------------


BOOLEAN = "must be 1 or 0 (or true, false, yes, no, on, off)"


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("K25_INSTRUMENT", "maybe", BOOLEAN),
        ("K25_INSTRUMENT", "2", BOOLEAN),
        ("K25_NVTX", "nvtx", BOOLEAN),
        ("K25_RING_SAMPLES", "many", "must be a whole number from 16 to 1000000"),
        ("K25_RING_SAMPLES", "15", "must be a whole number from 16 to 1000000"),
        ("K25_RING_SAMPLES", "1000001", "must be a whole number from 16 to 1000000"),
        ("K25_RING_BYTES", "64 MiB", "must be a whole number from 65536 to 17179869184"),
        ("K25_RING_BYTES", "65535", "must be a whole number from 65536 to 17179869184"),
        ("K25_RING_BYTES", "1e9", "must be a whole number from 65536 to 17179869184"),
        ("K25_RING_KEEP", "-1", "must be a whole number from 0 to 1000"),
        ("K25_SAMPLE_EVERY", "0", "must be a whole number from 1 to 1000000"),
        ("K25_SAMPLE_EVERY", "1.5", "must be a whole number from 1 to 1000000"),
        ("K25_SAMPLE_EVERY", "never", "must be a whole number from 1 to 1000000"),
        ("K25_METRICS", "on", "must be one of: auto, off"),
        ("K25_METRICS", "OFF", "must be one of: auto, off"),
        ("K25_EXPORT_PORT", "65536", "must be a whole number from 0 to 65535"),
        ("K25_EXPORT_PORT", "http", "must be a whole number from 0 to 65535"),
    ],
)
def test_a_wrong_value_is_one_line_with_variable_value_and_what_is_allowed(monkeypatch, name, value, allowed):
    assert refused(monkeypatch, **{name: value}) == f"{name}={value!r}: {allowed}"


def test_unknown_categories_are_named_beside_those_allowed(monkeypatch):
    line = refused(monkeypatch, K25_CATEGORIES="sampling,all_reduces, moe")
    assert line.startswith(
        "K25_CATEGORIES='sampling,all_reduces, moe': unknown all_reduces, moe; allowed: all, all_red"
    )
    assert all(category in line for category in HOOKED_CATEGORIES)
    assert "unattributed" not in line


@pytest.mark.parametrize("value", [",", " ", " , "])
def test_no_category_at_all_is_refused(monkeypatch, value):
    assert "none named; allowed: all, " in refused(monkeypatch, K25_CATEGORIES=value)


def test_categories_that_hooks_cannot_produce_are_refused(monkeypatch):
    assert "unknown norm, unattributed" in refused(monkeypatch, K25_CATEGORIES="unattributed,norm")


def test_a_ring_directory_in_the_home_of_nobody_is_refused(monkeypatch):
    line = refused(monkeypatch, K25_RING_DIR="~no-such-user/rings")
    assert line.startswith("K25_RING_DIR='~no-such-user/rings': must be the path of a directory")


def test_several_wrong_values_are_all_said_in_one_line(monkeypatch):
    line = refused(monkeypatch, K25_SAMPLE_EVERY="0", K25_METRICS="no", K25_NVTX="?")
    assert line.count(";") == 2
    assert all(name in line for name in ("K25_SAMPLE_EVERY='0'", "K25_METRICS='no'", "K25_NVTX='?'"))


def test_a_monstrous_value_is_shown_shortened_and_on_one_line(monkeypatch):
    line = refused(monkeypatch, K25_SAMPLE_EVERY="1\n" * 10_000)
    assert len(line) < 200
    assert line.endswith("…: must be a whole number from 1 to 1000000")


def test_wrong_overrides_read_like_wrong_variables():
    with pytest.raises(SettingsError, match=r"^K25_EXPORT_PORT=70000: must be a whole number from 0 to 65535$"):
        load_settings(export_port=70_000)


@pytest.mark.parametrize(
    "name", [name for name, field in Settings.model_fields.items() if field.annotation not in (str, Path)]
)
def test_what_is_allowed_can_be_said_of_every_setting_that_can_be_wrong(monkeypatch, name):
    line = refused(monkeypatch, **{f"K25_{name.upper()}": "\x01?"})
    assert re.search(r"must be|allowed:", line)
    assert "input should" not in line.lower()


# --- right values ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", ["1", "true", "True", "YES", "on"])
def test_on_may_be_said_in_several_ways(monkeypatch, value):
    assert load(monkeypatch, K25_INSTRUMENT=value).instrument is True


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("ring_samples", (16, 1_000_000)),
        ("ring_bytes", (65_536, 16 << 30)),
        ("ring_keep", (0, 1_000)),
        ("sample_every", (1, 1_000_000)),
        ("export_port", (0, 65_535)),
    ],
)
def test_the_ends_of_a_range_are_allowed(monkeypatch, name, values):
    for value in values:
        assert getattr(load(monkeypatch, **{f"K25_{name.upper()}": str(value)}), name) == value


@pytest.mark.parametrize(
    ("value", "categories"),
    [
        ("all", HOOKED_CATEGORIES),
        (" all ", HOOKED_CATEGORIES),
        ("sampling,all", HOOKED_CATEGORIES),
        ("sampling", [Category.SAMPLING]),
        (" all_reduce , moe_experts,", [Category.ALL_REDUCE, Category.MOE_EXPERTS]),
    ],
)
def test_categories_are_a_list_or_all(monkeypatch, value, categories):
    assert load(monkeypatch, K25_CATEGORIES=value).categories == frozenset(categories)


def test_a_ring_directory_is_the_same_for_processes_in_other_working_directories(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert load(monkeypatch, K25_RING_DIR="rings/here").ring_dir == tmp_path / "rings" / "here"
    monkeypatch.setenv("HOME", str(tmp_path))
    assert load(monkeypatch, K25_RING_DIR="~/rings").ring_dir == tmp_path / "rings"


def test_settings_cannot_be_changed_afterwards():
    with pytest.raises(Exception, match="frozen"):
        load_settings().sample_every = 1


# --- unknown variables -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("K25_SAMPLE_EVRY", "K25_SAMPLE_EVERY"),
        ("K25_RINGS_DIR", "K25_RING_DIR"),
        ("K25_INSTRUMENTS", "K25_INSTRUMENT"),
        ("K25_EXPORTPORT", "K25_EXPORT_PORT"),
        ("K25_XYZ", None),
        ("K25_", None),
    ],
)
def test_an_unknown_variable_is_shown_with_the_setting_it_may_have_been_meant_to_be(name, meant):
    assert unknown_variables([name]) == {name: meant}


def test_our_own_variables_and_those_of_others_are_not_unknown():
    environ = [
        *VARIABLES,
        INSTANCE_VARIABLE,
        "K25_DEMO_OPAQUE_OPS",
        "K25_DEMO_WHATEVER",
        "PATH",
        "XK25_A",
        "VLLM_K25_A",
    ]
    assert unknown_variables(environ) == {}
    assert unknown_variables(dict.fromkeys(environ, "1")) == {}


def test_a_name_that_is_read_in_whatever_case_is_not_unknown(monkeypatch):
    assert load(monkeypatch, K25_Sample_Every="3").sample_every == 3
    assert unknown_variables(["K25_Sample_Every"]) == {}


# --- documentation -----------------------------------------------------------------------------------------


def test_every_setting_is_documented_in_the_table_in_one_row():
    heading, rule, *rows = settings_table().splitlines()
    assert heading.startswith("| variable |")
    assert rule == "|---|---|---|"
    assert [row.split("|")[1].strip(" `") for row in rows] == VARIABLES
    for row in rows:
        _, _, default, meaning, _ = (cell.strip() for cell in row.split("|"))
        assert default
        assert len(meaning) > 20


def test_the_table_shows_the_defaults_as_one_would_set_them():
    table = settings_table()
    for part in (
        "| `K25_INSTRUMENT` | `0` |",
        "| `K25_NVTX` | `1` |",
        "| `K25_CATEGORIES` | `all` |",
        "| `K25_METRICS` | `auto` |",
        "| `K25_SAMPLE_EVERY` | `16` |",
    ):
        assert part in table
    assert str(default_ring_directory()) not in table


def test_the_table_is_printed_by_the_module():
    result = subprocess.run(
        [sys.executable, "-m", "vllm_k25_instrument.settings"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert result.stdout == settings_table() + "\n"
