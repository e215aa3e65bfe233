"""docs/limits.md says what the code computes."""

import re
from pathlib import Path

import pytest

from tests.kimi_k25 import kimi_k25_config
from vllm_k25_instrument.limits.floors import Load, Sharding, decode_floors
from vllm_k25_instrument.limits.gpus import find_gpu
from vllm_k25_instrument.limits.model_shape import model_shape

PAGE = (Path(__file__).parents[2] / "docs" / "limits.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(("batch", "column"), [(1, 1), (64, 2), (256, 3)])
def test_the_table_of_kimi_k25_is_the_computed_one(batch, column):
    gpu = find_gpu("rtx-pro-6000")
    shape = model_shape(kimi_k25_config(), "k25")
    floors = decode_floors(shape, Sharding.of(8), Load(batch, batch, 4096), gpu, gpu.link("pcie5x16", 8))
    computed = {name: floor.ns / 1e3 for name, floor in floors.items()}
    computed["step"] = sum(computed.values())
    table = re.search(r"<!-- k25.*?-->\n(.*?)\n<!-- /k25 -->", PAGE, re.S)
    rows = [[cell.strip(" `") for cell in line.strip("|").split("|")] for line in table[1].splitlines()[2:]]
    assert {row[0]: row[column] for row in rows} == {name: f"{us:,.0f}" for name, us in computed.items()}
