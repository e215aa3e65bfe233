"""A vLLM that has renamed two methods we hook: what its user sees. docs/upgrading.md tells the same."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from tests.e2e.conftest import DATA
from vllm_k25_instrument.demo.server import CPU_SETUP_PATH
from vllm_k25_instrument.demo.tiny_model import write_tiny_k25
from vllm_k25_instrument.instances import find_rings
from vllm_k25_instrument.model import Category, Phase, category_exclusive_ns
from vllm_k25_instrument.report.caveats import CaveatCode
from vllm_k25_instrument.report.rings import read_rings
from vllm_k25_instrument.ring import RingReader, open_rings

pytestmark = pytest.mark.e2e

ROOT = Path(__file__).parents[2]
RULES = ROOT / "deploy" / "prometheus" / "rules.yml"

# All that there is of one hook, and one target of five of another.
RENAMED = "forward_mqa=forward_latent,_update_states=_refresh_states"

OFFLINE = """
import sys
from vllm import LLM, SamplingParams
if __name__ == "__main__":
    llm = LLM(
        sys.argv[1], enforce_eager=True, max_model_len=256, max_num_seqs=4, dtype="bfloat16",
        kv_cache_memory_bytes=64 << 20,
    )
    params = SamplingParams(max_tokens=16, temperature=0, ignore_eos=True)
    outputs = llm.generate(["hello", "the time of a step goes to"], params)
    print("TOKENS", [len(output.outputs[0].token_ids) for output in outputs])
    from prometheus_client import generate_latest
    print(generate_latest().decode())
"""


@dataclass(frozen=True)
class Upgraded:
    """What a run on the renamed vLLM left."""

    output: str
    log: str
    ring: RingReader

    def attached(self, hook: str) -> float:
        """The metric `vllm_k25_hook_attached` of a hook."""
        (value,) = re.findall(rf'^vllm_k25_hook_attached{{hook="{hook}",rank="0"}} (\S+)$', self.output, re.MULTILINE)
        return float(value)

    def missing(self) -> list[str]:
        """Our warnings of hooks without a target."""
        return re.findall(r"K25: (vLLM .* has no target for hook .*)", self.log)


@pytest.fixture(scope="module")
def upgraded(tmp_path_factory: pytest.TempPathFactory) -> Upgraded:
    folder = tmp_path_factory.mktemp("upgraded")
    model = write_tiny_k25(folder / "tiny", "text")
    script = folder / "offline.py"
    script.write_text(OFFLINE)
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(DATA / "renaming"), str(CPU_SETUP_PATH)]),
        "RENAMED_IN_VLLM": RENAMED,
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "K25_INSTRUMENT": "1",
        "K25_SAMPLE_EVERY": "1",
        "K25_RING_DIR": str(folder / "rings"),
    }
    command = [sys.executable, "-P", str(script), str(model)]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert run.returncode == 0, run.stderr[-3000:]
    (ring,), errors = open_rings(find_rings(folder / "rings"))
    assert errors == []
    return Upgraded(run.stdout, run.stdout + run.stderr, ring)


def test_vllm_serves_as_before(upgraded: Upgraded) -> None:
    assert "TOKENS [16, 16]" in upgraded.output


def test_a_warning_names_each_hook_that_has_lost_a_target_and_no_other(upgraded: Upgraded) -> None:
    lines = upgraded.missing()
    assert len(lines) == 2, upgraded.log
    (decode,) = [line for line in lines if "mla_decode" in line]
    (inputs,) = [line for line in lines if "input_preparation" in line]
    assert "hook mla_decode (vllm.v1.attention.backend:MLAAttentionImpl.forward_mqa is gone)" in decode
    assert (
        "hook input_preparation in one place (vllm.v1.worker.gpu_model_runner:GPUModelRunner._update_states" in inputs
    )
    assert all("its time will show as unattributed" in line for line in lines)


def test_the_ring_and_the_metric_say_which_hook_is_not_attached(upgraded: Upgraded) -> None:
    hooks = upgraded.ring.identity.hooks
    assert hooks["mla_decode"] == "missing"
    assert upgraded.attached("mla_decode") == 0
    for still_there in ("step", "mla_prefill", "moe_experts", "input_preparation"):
        assert hooks[still_there] == "attached"
        assert upgraded.attached(still_there) == 1


def test_the_rest_is_measured_and_still_adds_up(upgraded: Upgraded) -> None:
    decode = [sample for sample in upgraded.ring.samples() if sample.phase is Phase.DECODE]
    assert len(decode) >= 14
    for sample in decode:
        categories = [item.category for item in sample.ranges]
        assert Category.MLA_ATTENTION not in categories
        assert categories.count(Category.MOE_EXPERTS) == 3
        exclusive = category_exclusive_ns(sample)
        assert sum(exclusive.values()) == sample.duration_ns
        assert exclusive[Category.UNATTRIBUTED] > 0


def test_the_report_names_it(upgraded: Upgraded) -> None:
    messages = {caveat.code: caveat.message for caveat in read_rings([upgraded.ring]).caveats}
    assert "(rank 0: mla_decode)" in messages[CaveatCode.HOOK_MISSING]


def test_an_alert_follows_from_the_metric(upgraded: Upgraded, tmp_path: Path) -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed (Debian package: prometheus)")
    now = upgraded.attached("mla_decode")
    labels = 'instance="node-1", job="vllm", rank="0"'
    fires = {"eval_time": "3h", "exp_samples": []}
    for alert in ("K25HookMissingAfterUpgrade", "K25CoreHookMissing"):
        fires["exp_samples"].append(
            {
                "labels": f'ALERTS{{alertname="{alert}", alertstate="firing", hook="mla_decode", '
                'instance="node-1", job="vllm", severity="warning"}',
                "value": 1,
            }
        )
    test = {
        "rule_files": [str(RULES)],
        "evaluation_interval": "1m",
        "tests": [
            {
                "interval": "1m",
                "input_series": [
                    # An hour before the upgrade, and after it what the upgraded server has exported.
                    {"series": f'vllm_k25_hook_attached{{hook="mla_decode", {labels}}}', "values": f"1x60 {now:g}x120"},
                    {"series": f'vllm_k25_hook_attached{{hook="mla_prefill", {labels}}}', "values": "1x181"},
                ],
                "promql_expr_test": [
                    {"expr": 'ALERTS{alertstate="firing", hook!=""}', **fires},
                    {"expr": 'ALERTS{alertstate="firing", hook!=""}', "eval_time": "1h", "exp_samples": []},
                ],
            }
        ],
    }
    path = tmp_path / "upgrade_test.yml"
    path.write_text(yaml.safe_dump(test))
    run = subprocess.run([promtool, "test", "rules", str(path)], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
