"""The README says what the code says."""

from __future__ import annotations

import re
from pathlib import Path

from tests.chaos.scenarios import SCENARIOS
from vllm_k25_instrument.settings import settings_table

README = Path(__file__).parents[2] / "README.md"


def test_the_table_of_settings_is_the_generated_one() -> None:
    match = re.search(r"<!-- settings.*?-->\n(.*?)\n<!-- /settings -->", README.read_text(), re.S)
    assert match is not None
    assert match.group(1) == settings_table()


def test_the_reliability_table_has_the_scenarios_of_the_chaos_suite() -> None:
    match = re.search(r"<!-- reliability.*?-->\n(.*?)\n<!-- /reliability -->", README.read_text(), re.S)
    assert match is not None
    shown = [row.split(" | ")[0].removeprefix("| ") for row in match.group(1).splitlines()[2:]]
    assert len(shown) == len(SCENARIOS)
    for title, scenario in zip(shown, SCENARIOS.values(), strict=True):
        assert title == scenario or title.startswith(f"{scenario} (")


def test_every_metric_of_the_table_exists_and_no_other() -> None:
    from vllm_k25_instrument.export import families

    source = Path(families.__file__).read_text()
    named = set(re.findall(r"`(vllm_k25_\w+)`", README.read_text().split("## Metrics")[1].split("## Trouble")[0]))
    for name in named:
        assert name.removeprefix("vllm_k25_").removesuffix("_total").removesuffix("_info") in source, name
