"""Models of other families than Kimi-K2.5's, in a real engine: every layer that has a hook is in its category."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.tiny_families import LAYERS, write_family
from vllm_k25_instrument.demo.server import CPU_SETUP_PATH
from vllm_k25_instrument.instances import find_rings
from vllm_k25_instrument.model import Category, Phase, category_exclusive_ns
from vllm_k25_instrument.report.caveats import CaveatCode
from vllm_k25_instrument.report.rings import read_rings
from vllm_k25_instrument.ring import open_rings

pytestmark = pytest.mark.e2e

OFFLINE = """
import sys
from vllm import LLM, SamplingParams
if __name__ == "__main__":
    llm = LLM(
        sys.argv[1], load_format="dummy", enforce_eager=True, max_model_len=256, max_num_seqs=4, dtype="bfloat16",
        kv_cache_memory_bytes=64 << 20,
    )
    llm.generate(["hello", "the time of a step goes to"], SamplingParams(max_tokens=16, temperature=0, ignore_eos=True))
"""

ATTENTION = {Category.ATTENTION: LAYERS}
MOE = {Category.MOE_EXPERTS: LAYERS, Category.MOE_ROUTING: LAYERS}
DEEPSEEK = {
    Category.MLA_ATTENTION: LAYERS,
    Category.MOE_EXPERTS: LAYERS - 1,
    Category.MOE_ROUTING: LAYERS - 1,
    Category.MOE_SHARED_EXPERTS: LAYERS - 1,
}
UNQUANTIZED, FP8 = "CPUUnquantizedExperts", "CPUExpertsFp8"


@pytest.mark.parametrize(
    ("family", "expected", "experts"),
    [
        ("llama", ATTENTION, ""),
        pytest.param("qwen3_moe", ATTENTION | MOE, UNQUANTIZED, marks=pytest.mark.slow),
        ("qwen3_moe_fp8", ATTENTION | MOE, FP8),
        pytest.param("mixtral", ATTENTION | MOE, UNQUANTIZED, marks=pytest.mark.slow),
        pytest.param("deepseek_v3", DEEPSEEK, UNQUANTIZED, marks=pytest.mark.slow),
        pytest.param("deepseek_v3_fp8", DEEPSEEK, FP8, marks=pytest.mark.slow),
    ],
)
def test_what_has_a_hook_is_in_its_category(
    tmp_path: Path, family: str, expected: dict[Category, int], experts: str
) -> None:
    model = write_family(tmp_path / family, family)
    script = tmp_path / "offline.py"
    script.write_text(OFFLINE)
    environment = {
        **os.environ,
        "PYTHONPATH": str(CPU_SETUP_PATH),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "K25_INSTRUMENT": "1",
        "K25_SAMPLE_EVERY": "1",
        "K25_RING_DIR": str(tmp_path / "rings"),
    }
    run = subprocess.run(
        [sys.executable, "-P", str(script), str(model)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    (ring,), errors = open_rings(find_rings(tmp_path / "rings"))
    assert errors == []
    decode = [s for s in ring.samples() if s.phase is Phase.DECODE]
    assert len(decode) >= 15
    for s in decode:
        found = Counter(r.category for r in s.ranges)
        assert found.pop(Category.INPUT_PREPARATION) > 0
        assert found == expected | {Category.SAMPLING: 1}
        assert sum(category_exclusive_ns(s).values()) == s.duration_ns
        assert {r.detail for r in s.ranges if r.category is Category.MOE_EXPERTS} == ({experts} if experts else set())
        for category in expected:
            layers = [r.layer for r in s.ranges if r.category is category]
            assert layers == list(range(LAYERS))[-len(layers) :], category
    # Nothing is suspected that this model does not have.
    assert CaveatCode.HOOK_NEVER_FIRED not in {caveat.code for caveat in read_rings([ring]).caveats}
