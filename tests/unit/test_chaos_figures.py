"""The chaos suite's bookkeeping: what it calls lost, and the table it makes."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from tests.chaos.figures import FIGURES_VARIABLE, Figures, read, table
from tests.chaos.scenarios import SCENARIOS

SOUND = Figures("sigterm", requests=9, failed=4, failed_without_us=4, samples=1_204, lost_counted=3)


def test_sound_figures_pass_and_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FIGURES_VARIABLE, str(tmp_path / "figures"))
    SOUND.check()
    assert read((tmp_path / "figures").read_text().splitlines()) == {"sigterm": SOUND}


@pytest.mark.parametrize(
    "wrong", [{"requests": 0}, {"failed": 5}, {"lost_uncounted": 1}, {"leaks": ["/dev/shm/psm_1"]}], ids=str
)
def test_what_may_not_be_fails(wrong: dict[str, object], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(FIGURES_VARIABLE, raising=False)
    with pytest.raises(AssertionError):
        Figures(**(asdict(SOUND) | wrong)).check()


def test_every_scenario_is_a_row_and_the_last_run_counts() -> None:
    runs = [json.dumps(asdict(figures)) for figures in (Figures("sigterm", requests=1), SOUND)]
    rows = table(read(runs)).splitlines()[2:]
    assert len(rows) == len(SCENARIOS)
    (row,) = [row for row in rows if SCENARIOS["sigterm"] in row]
    assert row == "| SIGTERM to the server | 9 | 0 (4 failed; without the plugin 4) | 1,204 | 3 | 0 | 0 |"
    assert sum("not yet run" in row for row in rows) == len(SCENARIOS) - 1
