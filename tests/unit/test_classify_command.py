"""`vllm-k25 classify`."""

from __future__ import annotations

import json

import pytest
import typer
from typer.testing import CliRunner

from vllm_k25_instrument.commands.classify import classify


@pytest.fixture
def run():
    app = typer.Typer()
    app.command()(classify)
    return lambda *arguments, stdin=None: CliRunner().invoke(app, list(arguments), input=stdin)


def test_a_name_is_explained_with_the_rule_and_what_it_found(run):
    result = run("void vllm::cross_device_reduce_1stage<__nv_bfloat16, 8>(int)")
    assert result.exit_code == 0
    assert result.output.startswith("all_reduce")
    assert "rule all-reduce-custom: function has 'cross device reduce'" in result.output


def test_json_has_one_object_per_name(run):
    result = run("--json", "reshape_and_cache_kernel_flash", "void marlin_moe_wna16::Marlin<1125899906909960l, 562...")
    first, second = map(json.loads, result.output.splitlines())
    assert (first["category"], first["rule"], first["cut"]) == ("kv_cache", "kv-cache", False)
    assert (second["category"], second["cut"]) == ("moe_experts", True)
    assert second["function"] == "marlin moe wna16::marlin"


def test_names_come_from_standard_input_and_from_a_file(run, tmp_path):
    file = tmp_path / "names.txt"
    file.write_bytes(b"fused_moe_kernel\n\nflash_fwd_kernel_\xff\n")
    assert [line.split()[0] for line in run("-", stdin="rms_norm_kernel\n").output.splitlines()[:1]] == ["norm"]
    assert run("--file", "-", stdin="rms_norm_kernel\n").output == run("rms_norm_kernel").output
    rows = [json.loads(line) for line in run("--file", str(file), "--json").output.splitlines()]
    assert [row["category"] for row in rows] == ["moe_experts", "attention"]


def test_a_context_wins_over_the_name(run):
    result = run("--json", "--context", "moe_shared_experts DeepseekV2MLP L3", "nvjet_tst_64x8_64x16_4x1_v_bz_TNT")
    row = json.loads(result.output)
    assert (row["category"], row["rule"]) == ("moe_shared_experts", "k25-range")


def test_a_name_without_a_rule_is_other_and_the_exit_code_says_so(run):
    result = run("k_7f3a", "fused_moe_kernel")
    assert result.exit_code == 1
    assert "other" in result.output
    assert "no rule hit" in result.output


def test_rules_of_ones_own_are_used(run, tmp_path):
    mine = tmp_path / "mine.toml"
    mine.write_text("[[rule]]\nid = 'mine'\ncategory = 'rope'\nfunction = '^k 7f3a'\n")
    result = run("--rules", str(mine), "--json", "k_7f3a")
    assert result.exit_code == 0
    assert json.loads(result.output)["rule"] == "mine"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "name a kernel, or give --file FILE"),
        (("--file", "/nowhere/names.txt"), "/nowhere/names.txt: cannot be read: No such file"),
        (("--rules", "/nowhere/rules.toml", "k"), "/nowhere/rules.toml:1: cannot be read"),
    ],
)
def test_wrong_usage_is_one_line_and_exit_two(run, arguments, said):
    result = run(*arguments)
    assert result.exit_code == 2
    assert said in result.output
    assert "Traceback" not in result.output
