"""`vllm-k25 whatif`: what a change would leave of a step, by exposed time, and when it is not to be said."""

import json

import pytest
from typer.testing import CliRunner

from tests.breakdowns import breakdown
from tests.kimi_k25 import kimi_k25_config
from tests.unit.test_report_rings import US, open_rank, write_server
from vllm_k25_instrument.cli import app
from vllm_k25_instrument.model import Category, GraphMode, Phase
from vllm_k25_instrument.report.compare import Side
from vllm_k25_instrument.whatif import Change, Evidence, Kind, Speculation, WhatIfError, what_if

MS = 1_000_000


def run(*arguments):
    return CliRunner().invoke(app, ["whatif", *(str(argument) for argument in arguments)])


def document(groups, *, source="ring", complete=True):
    """`groups`: (phase, batch, rank, steps, {category: exclusive of all steps, ns}, the rest)."""
    with_mode = [(phase, batch, "full", *others) for phase, batch, *others in groups]
    return breakdown(with_mode, source=source, complete=complete)


# A decode step of 12.1 ms, as Kimi-K2.5's at batch 1 on eight cards over PCIe.
K25 = {
    "all_reduce": 6_200_000,
    "moe_experts": 2_000_000,
    "moe_routing": 300_000,
    "moe_shared_experts": 500_000,
    "mla_attention": 1_000_000,
    "sampling": 200_000,
}


def k25(phase="decode", batch="1", rest=1_900_000, **options):
    return document([(phase, batch, 0, 1, K25, rest)], **options)


def predicted(made, *texts, **options):
    changes = [Change.parse(category, text) for category, text in texts]
    return what_if(Side.of("k25", made), changes, **options)


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(kimi_k25_config()))
    return path


def floors(config):
    return ("--gpu", "rtx-pro-6000", "--config", config, "--context", "2000")


def test_all_reduces_in_half_the_time_leave_9_of_12_1_ms():
    (group,) = predicted(k25(), (Category.ALL_REDUCE, "x0.5")).predictions
    assert group.measured_ns == 12_100_000
    assert group.predicted_ns == 12_100_000 - 3_100_000
    assert group.speedup == pytest.approx(12.1 / 9.0)


def test_what_does_not_change_stays_as_it_is_and_the_rows_add_up_to_the_step():
    (group,) = predicted(k25(), (Category.ALL_REDUCE, "x0"), (Category.MOE_EXPERTS, "x2")).predictions
    rows = {row.name: row for row in group.rows}
    assert rows["all_reduce"].predicted_ns == 0
    assert rows["moe_experts"].predicted_ns == 4_000_000
    for name in ("moe_routing", "mla_attention", "sampling", "unattributed"):
        assert rows[name].predicted_ns == rows[name].measured_ns
        assert rows[name].reason == ""
    assert group.predicted_ns == 12_100_000 - 6_200_000 + 2_000_000


def test_ranks_are_averaged():
    made = document([("decode", "1", rank, 2, {"all_reduce": ns}, 1000) for rank, ns in ((0, 4000), (1, 8000))])
    (group,) = predicted(made, (Category.ALL_REDUCE, "x0.5")).predictions
    # per step 2,000 and 4,000 of all-reduce, 500 of the rest
    assert (group.measured_ns, group.predicted_ns) == (3500, 2000)


@pytest.mark.parametrize("text", ["x0.5", "X0.5", "\u00d70.5", " x.5 "])
def test_a_factor_is_written_with_a_cross(text):
    assert Change.parse(Category.ALL_REDUCE, text) == Change(Category.ALL_REDUCE, Kind.FACTOR, 0.5)


@pytest.mark.parametrize("text", ["0.5", "x-1", "x", "xinf", "xnan", "x1e3", "half", "", "path=", "path=warp"])
def test_anything_else_is_refused(text):
    with pytest.raises(WhatIfError):
        Change.parse(Category.ALL_REDUCE, text)


def test_only_all_reduces_have_a_path():
    with pytest.raises(WhatIfError, match=r"allowed are floor, x0\.5"):
        Change.parse(Category.MOE_EXPERTS, "path=pynccl")


def test_a_floor_without_a_gpu_is_refused_with_what_it_takes():
    made = predicted(k25(), (Category.MOE_EXPERTS, "floor"))
    assert made.predictions == ()
    assert made.refused[0][1] == "a floor needs --gpu, --config and --context"


def test_a_category_that_was_not_measured_cannot_change():
    made = predicted(document([("decode", "1", 0, 1, {"sampling": 5}, 5)]), (Category.ALL_REDUCE, "x0.5"))
    assert made.refused[0][1] == "there is no all_reduce in these steps"


def test_experts_at_their_floor_leave_829_us_of_2_ms(tmp_path, config):
    saved = tmp_path / "breakdown.json"
    saved.write_text(json.dumps(k25()))
    result = run(saved, "--moe", "floor", *floors(config), "--tp", "8", "--json", "-")
    assert result.exit_code == 0, result.stderr
    made = json.loads(result.stdout)
    assert made["schema"] == "vllm_k25.whatif/1"
    (group,) = made["groups"]
    assert group["categories"]["moe_experts"]["predicted_ns"] == 829_440
    assert group["step_ns"] == {"measured": 12_100_000, "predicted": 12_100_000 - 2_000_000 + 829_440}
    assert any("upper bound of the gain" in line for line in made["assumptions"])
    assert any("as if routing were uniform" in line for line in made["assumptions"])


def test_a_category_below_its_floor_is_left_alone_and_says_so(tmp_path, config):
    saved = tmp_path / "breakdown.json"
    saved.write_text(json.dumps(document([("decode", "1", 0, 1, {"moe_experts": 500_000}, 0)])))
    made = json.loads(run(saved, "--moe", "floor", *floors(config), "--tp", "8", "--json", "-").stdout)
    row = made["groups"][0]["categories"]["moe_experts"]
    assert row["predicted_ns"] == 500_000
    assert row["reason"] == "already below its floor of 829.4 µs"


def test_three_drafts_read_3_88_times_the_experts_and_give_3_2_tokens(tmp_path, config):
    saved = tmp_path / "breakdown.json"
    saved.write_text(json.dumps(k25()))
    result = run(saved, "--spec-decode", "2.2", *floors(config), "--tp", "8", "--json", "-")
    assert result.exit_code == 0, result.stderr
    (group,) = json.loads(result.stdout)["groups"]
    times = {name: row["predicted_ns"] for name, row in group["categories"].items()}
    # 4 tokens read 384 (1 - (47/48)^4) = 384 x 428,735 / 5,308,416 = 31.01382 experts instead of 8
    assert times["moe_experts"] == pytest.approx(2_000_000 * 31.01382 / 8, abs=1)
    assert times["mla_attention"] == 1_000_000  # the cache is read once per request, and that is what takes the time
    assert times["moe_shared_experts"] == 500_000
    assert times["unattributed"] == 1_900_000
    assert times["sampling"] == 4 * 200_000
    # 3 more tokens of 14,336 bytes through 63.015 GB/s, 2 x 7/8 of them, 123 times
    assert times["all_reduce"] == pytest.approx(6_200_000 + 123 * 3 * 14_336 * 1.75 / 63.015, abs=100)
    assert group["tokens_per_request"] == 3.2
    assert group["time_per_output_token_ns"]["predicted"] == round(sum(times.values()) / 3.2)
    assert group["speedup"] == pytest.approx(12_100_000 / (sum(times.values()) / 3.2), rel=1e-3)


def test_a_drafter_costs_what_it_is_said_to():
    speculation = Speculation.of(1.5, draft_us=400)
    assert (speculation.drafts, speculation.draft_ns) == (2, 400_000)
    assert "the drafter takes 400.0 µs a step" in speculation.assumptions[0]
    assert "the drafter's own time is not in it" in Speculation.of(1).assumptions[0]


def test_no_more_drafts_are_accepted_than_verified():
    with pytest.raises(WhatIfError, match="of 2 drafts 0 to 2 are accepted"):
        Speculation.of(2.5, 2)


def test_drafts_need_floors():
    made = what_if(Side.of("k25", k25()), (), Speculation.of(1), Evidence())
    assert made.refused[0][1] == "a floor needs --gpu, --config and --context"


def test_with_floors_only_decode_steps_are_predicted(tmp_path, config):
    saved = tmp_path / "breakdown.json"
    both = document([("decode", "1", 0, 1, K25, 0), ("prefill", "1", 0, 1, K25, 0)])
    saved.write_text(json.dumps(both))
    made = json.loads(run(saved, "--moe", "floor", *floors(config), "--tp", "8", "--json", "-").stdout)
    assert [group["phase"] for group in made["groups"]] == ["decode"]
    assert made["refused"] == []
    made = json.loads(run(saved, "--moe", "x0.5", "--json", "-").stdout)
    assert [group["phase"] for group in made["groups"]] == ["decode", "prefill"]


def two_paths(folder, *, other_bytes=14_336):
    """One rank: eager steps whose 4 all-reduces take custom's 1,125 us, full-graph ones take pynccl's 78 us."""
    rank = open_rank(folder, 0, 1)

    def reduces(path, us, nbytes):
        return [(Category.ALL_REDUCE, at * 2000 * US, us * US, path, at, -1, nbytes) for at in range(4)]

    rank.write(1, graph=GraphMode.NONE, ranges=reduces("custom", 1125, 14_336), duration_ns=10 * MS)
    rank.write(1, graph=GraphMode.FULL, ranges=reduces("pynccl", 78, other_bytes), duration_ns=10 * MS)
    return rank


def test_another_path_takes_its_measured_mean_at_that_size(tmp_path):
    two_paths(tmp_path / "instance")
    result = run(tmp_path / "instance", "--all-reduce", "path=pynccl", "--json", "-")
    assert result.exit_code == 0, result.stderr
    eager, full = json.loads(result.stdout)["groups"]
    assert eager["graph_mode"] == "none"
    assert eager["categories"]["all_reduce"]["measured_ns"] == 4 * 1_125_000
    assert eager["categories"]["all_reduce"]["predicted_ns"] == 4 * 78_000
    assert eager["step_ns"] == {"measured": 10 * MS, "predicted": 10 * MS - 4 * (1_125_000 - 78_000)}
    assert eager["categories"]["all_reduce"]["reason"] == "pynccl: 78.0 µs up to 16384 bytes"
    assert full["step_ns"] == {"measured": 10 * MS, "predicted": 10 * MS}


def test_a_path_that_was_never_measured_at_that_size_is_refused_with_a_remedy(tmp_path):
    two_paths(tmp_path / "instance", other_bytes=1_000_000)
    result = run(tmp_path / "instance", "--all-reduce", "path=pynccl")
    assert result.exit_code == 3
    assert "refused: decode batch 1, eager: path pynccl was not measured at messages up to 16384 bytes" in result.stderr
    assert "measured paths: custom, pynccl" in result.stderr
    assert "run a server that takes it at this size, or give a factor" in result.stderr
    result = run(tmp_path / "instance", "--all-reduce", "path=quick_reduce")
    assert result.exit_code == 1
    assert "nothing could be predicted" in result.stderr


def test_counters_since_start_tell_a_paths_mean_where_all_its_calls_were_of_one_size(tmp_path):
    rank = open_rank(tmp_path / "instance", 0, 1)
    rank.write(1, ranges=[(Category.ALL_REDUCE, 0, 1125 * US, "custom", 0, -1, 14_336)], duration_ns=2 * MS)
    rank.writer.totals.add_all_reduces(1, [70_000, 90_000], [14_336, 14_336])  # pynccl's place in the closed set
    (group,) = json.loads(run(tmp_path / "instance", "--all-reduce", "path=pynccl", "--json", "-").stdout)["groups"]
    assert group["categories"]["all_reduce"]["predicted_ns"] == 80_000
    rank.writer.totals.add_all_reduces(1, [900_000], [1_000_000])
    assert run(tmp_path / "instance", "--all-reduce", "path=pynccl").exit_code == 1


def test_a_json_file_does_not_tell_paths_apart(tmp_path):
    saved = tmp_path / "breakdown.json"
    saved.write_text(json.dumps(k25()))
    result = run(saved, "--all-reduce", "path=pynccl")
    assert result.exit_code == 1
    assert "path=pynccl needs the rings" in result.stderr


def test_the_table_says_what_is_won_and_what_is_assumed(tmp_path):
    write_server(tmp_path / "instance", world=2, batches=(64,), steps=2)
    result = run(tmp_path / "instance", "--all-reduce", "x0.5", "--mla", "x0.9")
    assert result.exit_code == 0, result.stderr
    assert "decode · batch 64 · full graph  step" in result.stdout
    assert "a second of 64.0 requests" in result.stdout
    assert "Predicted step = measured step" in result.stdout
    assert "all_reduce takes 0.5 times as long as measured." in result.stdout


def test_missing_ranks_make_it_incomplete(tmp_path):
    write_server(tmp_path / "instance", world=2, found=(0,))
    assert run(tmp_path / "instance", "--all-reduce", "x0.5").exit_code == 3


def test_a_trace_is_predicted_too_and_keeps_its_idle_time():
    (group,) = predicted(k25(source="torch-trace"), (Category.ALL_REDUCE, "x0.5")).predictions
    assert [row.name for row in group.rows][-1] == "idle"
    assert group.predicted_ns == 9_000_000


def test_other_batches_can_be_left_out(tmp_path):
    saved = tmp_path / "breakdown.json"
    saved.write_text(json.dumps(document([("decode", batch, 0, 1, K25, 0) for batch in ("1", "64", "+Inf")])))
    for label in ("64", "+Inf"):
        made = json.loads(run(saved, "--moe", "x0.5", "--batch", label, "--json", "-").stdout)
        assert [group["batch"] for group in made["groups"]] == [label]
    result = run(saved, "--moe", "x0.5", "--batch", "16")
    assert result.exit_code == 1
    assert "no steps of this batch; there are" in result.stderr


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ((), "nothing changes"),
        (("--all-reduce", "fast"), "allowed are floor, x0.5"),
        (("--all-reduce", "path=warp"), "no such path; known are custom, pynccl"),
        (("--spec-decode", "3", "--drafts", "2"), "of 2 drafts 0 to 2 are accepted"),
        (("--moe", "floor", "--gpu", "rtx-pro-6000", "--tp", "8"), "--gpu needs --config"),
        (("--moe", "floor", "--gpu", "abacus", "--config", "CONFIG", "--context", "1", "--tp", "8"), "--gpu abacus"),
        (("--moe", "floor", "--gpu", "h200", "--config", "CONFIG", "--context", "1"), "give it with --tp"),
    ],
)
def test_wrong_usage_exits_with_2_and_says_what_to_do(tmp_path, config, options, said):
    saved = tmp_path / "breakdown.json"
    saved.write_text(json.dumps(k25()))
    result = run(saved, *(config if option == "CONFIG" else option for option in options))
    assert result.exit_code == 2
    assert said in result.stderr


@pytest.mark.parametrize("text", ["{", '{"schema": "other"}', '{"schema": "vllm_k25.breakdown/1", "groups": 1}'])
def test_a_file_that_is_no_breakdown_exits_with_2(tmp_path, text):
    saved = tmp_path / "breakdown.json"
    saved.write_text(text)
    result = run(saved, "--moe", "x0.5")
    assert result.exit_code == 2
    assert "breakdown.json" in result.stderr


def test_nothing_at_the_path_exits_with_2(tmp_path):
    assert run(tmp_path / "nowhere", "--moe", "x0.5").exit_code == 2


def test_a_prefill_only_breakdown_has_no_floors_and_is_refused(tmp_path, config):
    saved = tmp_path / "breakdown.json"
    saved.write_text(json.dumps(k25(phase=str(Phase.PREFILL))))
    result = run(saved, "--moe", "floor", *floors(config), "--tp", "8")
    assert result.exit_code == 1
    assert "only decode steps have floors" in result.stderr
