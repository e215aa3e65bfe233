"""`vllm-k25 report` on real ring files: what it prints, what it writes, how it exits."""

import json

import pytest
import typer
from typer.testing import CliRunner

from tests.unit.test_report_rings import open_rank, write_server
from vllm_k25_instrument.commands.report import report
from vllm_k25_instrument.model import GraphMode, Phase
from vllm_k25_instrument.ring import ring_file_name

app = typer.Typer()
app.command()(report)


def run(*arguments, env=None):
    return CliRunner().invoke(app, [str(argument) for argument in arguments], env=env)


@pytest.fixture
def server(tmp_path):
    folder = tmp_path / "rings" / "instance"
    ranks = write_server(folder, world=2, batches=(1, 64), steps=3)
    for rank in ranks:
        rank.write(4, Phase.MIXED, GraphMode.PIECEWISE)
    return folder


def test_an_instance_folder_is_shown_as_tables_and_exits_with_0(server):
    result = run(server)
    assert result.exit_code == 0, result.stderr
    assert "decode · batch 64 · full graph" in result.stdout
    assert "mixed · batch 4 · piecewise graph" in result.stdout
    assert "decode 96 steps, 6 sampled" in result.stdout
    assert "unattributed" in result.stdout
    assert "step p99" in result.stdout
    assert result.stderr == ""


def test_a_ring_directory_stands_for_its_instance(server):
    assert "decode · batch 1" in run(server.parent).stdout


def test_the_default_is_the_configured_ring_directory(server):
    result = run(env={"K25_RING_DIR": str(server.parent)})
    assert result.exit_code == 0, result.stderr
    assert "2 of 2 ranks" in result.stdout


def test_a_single_ring_of_two_is_reported_as_incomplete(server):
    result = run(server / ring_file_name(1))
    assert result.exit_code == 3
    assert "1 of 2 ranks" in result.stdout
    assert "INCOMPLETE" in result.stdout
    assert "[ranks_missing]" in result.stderr


def test_json_on_standard_output_is_json_and_nothing_else(server):
    (server / "rank-00002.ring").write_bytes(b"\0" * 5000)
    result = run(server, "--json", "-")
    document = json.loads(result.stdout)
    assert document["schema"] == "vllm_k25.breakdown/1"
    assert [w["code"] for w in document["warnings"]] == ["ring_unreadable"]
    assert document["complete"] is False
    assert "rank-00002.ring: not a ring file" in result.stderr
    assert result.exit_code == 3


def test_json_to_a_file_leaves_the_table_on_standard_output(server, tmp_path):
    result = run(server, "--json", tmp_path / "out.json")
    assert json.loads((tmp_path / "out.json").read_text())["ranks"] == {"found": [0, 1], "expected": 2}
    assert "decode · batch 1" in result.stdout


def test_markdown_on_standard_output_is_markdown_and_nothing_else(server):
    result = run(server, "--markdown", "-")
    assert result.stdout.startswith("# Step breakdown: moonshotai/Kimi-K2.5\n")
    assert "| `all_reduce` |" in result.stdout


def test_html_is_written_as_a_page(server, tmp_path):
    assert run(server, "--html", tmp_path / "page.html").exit_code == 0
    assert (tmp_path / "page.html").read_text().startswith("<!doctype html>")


def test_only_one_document_can_go_to_standard_output(server):
    result = run(server, "--json", "-", "--markdown", "-")
    assert result.exit_code == 2
    assert "give one of them a file" in result.stderr


def test_a_filter_leaves_the_groups_asked_for(server):
    document = json.loads(run(server, "--json", "-", "--phase", "decode", "--batch", "64").stdout)
    assert {(group["phase"], group["batch"]) for group in document["groups"]} == {("decode", "64")}


def test_a_filter_that_leaves_nothing_says_what_there_is(server):
    result = run(server, "--phase", "prefill")
    assert result.exit_code == 1
    assert "there are decode batch 1, decode batch 64, mixed batch 4" in result.stderr
    assert result.stdout == ""


def test_a_batch_that_is_no_label_is_wrong_usage(server):
    result = run(server, "--batch", "17")
    assert result.exit_code == 2
    assert "not one of 1, 4, 16, 64, 256, +Inf" in result.stderr.replace("│", "").replace("\n", " ").replace("  ", " ")


def test_infinity_may_be_written_without_its_sign(server):
    assert run(server, "--batch", "inf").exit_code == 1


def test_a_path_that_is_not_there_is_named_with_the_remedy(tmp_path):
    result = run(tmp_path / "nowhere")
    assert result.exit_code == 2
    assert f"{tmp_path / 'nowhere'}: no such file or directory: start vLLM with K25_INSTRUMENT=1" in result.stderr


def test_a_directory_without_rings_is_named_with_the_remedy(tmp_path):
    result = run(tmp_path)
    assert result.exit_code == 2
    assert "no rings here" in result.stderr


def test_a_file_that_is_no_ring_leaves_nothing_to_report(tmp_path):
    (tmp_path / "notes.txt").write_text("hello" * 100)
    result = run(tmp_path / "notes.txt")
    assert result.exit_code == 1
    assert "not a ring file" in result.stderr
    assert result.stdout == ""


def test_rings_without_a_sample_leave_nothing_to_report(tmp_path):
    rank = open_rank(tmp_path, 0, 1)
    result = run(tmp_path, "--json", "-")
    assert rank.writer.path.exists()
    assert result.exit_code == 1
    assert "THE SERVER IS ALIVE BUT NO STEP HAS BEEN RECORDED" in result.stderr
    assert result.stdout == ""


def test_a_file_that_cannot_be_written_is_named(server, tmp_path):
    result = run(server, "--html", tmp_path / "missing" / "page.html")
    assert result.exit_code == 2
    assert "page.html: cannot be written: No such file or directory" in result.stderr


def test_a_wrong_setting_is_one_line(tmp_path):
    result = run(env={"K25_SAMPLE_EVERY": "none"})
    assert result.exit_code == 2
    assert "K25_SAMPLE_EVERY='none'" in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1
