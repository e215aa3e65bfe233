"""docs/measured-on-gpu.md is what its generator makes of the measurements, and claims nothing that nobody has run."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from tests.gpu.catalogue import CHECKS, SCHEMA

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def tool():
    spec = importlib.util.spec_from_file_location("measured_on_gpu", ROOT / "tools" / "measured_on_gpu.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def measurement(**checks):
    results = {
        name: {"status": status, "reason": "because\nof | that", "figures": {"main_us": 299.5}, "seconds": 1.0}
        for name, status in checks.items()
    }
    environment = {
        "gpu": "NVIDIA X",
        "torch": "2.9.0",
        "commit": "abc",
        "driver_cuda": "13.0",
        "cuda_of_torch": "12.8",
    }
    return {
        "schema": SCHEMA,
        "measured_at": "2026-01-31T10:00:00+00:00",
        "environment": environment,
        "checks": results,
    }


def rows(text):
    return {
        check.name: line
        for check in CHECKS
        for line in text.splitlines()
        if line.startswith("|") and f"(`{check.name}`)" in line
    }


def test_the_document_is_what_the_generator_makes(tool):
    assert tool.DOCUMENT.read_text(encoding="utf-8") == tool.document(tool.load(tool.MEASUREMENTS))
    assert tool.main(["--check"]) == 0


def test_without_a_measurement_every_row_says_that_nobody_has_run_it(tool):
    found = rows(tool.document([]))
    assert set(found) == {check.name for check in CHECKS}
    assert all(line.endswith("| not yet run on a GPU |") for line in found.values())
    assert "passed" not in tool.document([])


def test_a_row_shows_each_machines_result_and_figures(tool):
    one, two = measurement(side_streams="passed", nvtx_log="not available"), measurement(side_streams="failed")
    text = tool.document([one, two])
    found = rows(text)
    assert found["side_streams"].endswith("| passed: main_us 299.5 | **failed**: main_us 299.5 |")
    assert found["nvtx_log"].endswith("| not yet run on a GPU | not yet run on a GPU |")
    assert "| 1 | NVIDIA X | 13.0, 12.8 | 2.9.0 | 2026-01-31 | abc |" in text
    assert "- `side_streams`, failed: because of \\| that" in text


def test_a_json_of_another_schema_is_refused_with_its_name(tool, tmp_path):
    (tmp_path / "old.json").write_text(json.dumps({**measurement(), "schema": 0}))
    with pytest.raises(tool.SchemaError, match=r"old\.json has schema 0"):
        tool.load(tmp_path)


def test_measurements_are_listed_oldest_first(tool, tmp_path):
    newer = {**measurement(), "measured_at": "2026-02-01T10:00:00+00:00"}
    (tmp_path / "a.json").write_text(json.dumps(newer))
    (tmp_path / "b.json").write_text(json.dumps(measurement()))
    assert [loaded["measured_at"][:10] for loaded in tool.load(tmp_path)] == ["2026-01-31", "2026-02-01"]
