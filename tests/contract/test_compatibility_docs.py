"""docs/compatibility.md says what the hook table and the trees say."""

from __future__ import annotations

import re

import compatibility
import pytest

from tests.contract.trees import releases, root_of
from vllm_k25_instrument.hooks.point import HookKind, HookPoint
from vllm_k25_instrument.hooks.releases import ABSENCES, MATRIX
from vllm_k25_instrument.hooks.table import HOOK_TABLE

pytestmark = pytest.mark.contract

WRITTEN = compatibility.DOCUMENT.read_text(encoding="utf-8")
COLUMNS = compatibility.columns_of(WRITTEN)


def test_the_document_is_what_its_generator_writes():
    assert compatibility.document(COLUMNS, compatibility.load_runs()) == WRITTEN


def test_its_columns_are_the_releases_of_the_matrix_and_its_rows_the_targets_of_the_table():
    assert tuple(COLUMNS) == MATRIX
    for cells in COLUMNS.values():
        assert list(cells) == [point.id for point in HOOK_TABLE]
        assert set(cells.values()) <= {"yes", "-"}


@pytest.mark.parametrize("release", [release for release in releases() if release in MATRIX])
def test_a_column_says_what_the_tree_says(release):
    root = root_of(release)
    if root is None:
        pytest.skip(f"vLLM {release} is not cached: python tools/fetch_vllm.py {release}")
    assert COLUMNS[release] == compatibility.column(release, root)


def test_a_target_that_is_not_there_would_be_shown_as_missing():
    release = next((r for r in MATRIX if root_of(r)), None)
    if release is None:
        pytest.skip("no vLLM is installed or cached")
    gone = HookPoint("layer", HookKind.LAYER, "vllm.v1.worker.worker_base", "WorkerBase.gone", layer=lambda a, k: 0)
    assert compatibility.column(release, root_of(release), [gone]) == {gone.id: "MISSING"}


def test_every_absence_is_shown_with_its_reason_and_no_hook_is_absent_without():
    for number, absence in enumerate(ABSENCES, 1):
        assert f"{number}. `{absence.what.removeprefix('vllm.')}`" in WRITTEN
    assert "(?)" not in WRITTEN
    assert re.search(r"- \(\d+\)", WRITTEN)
