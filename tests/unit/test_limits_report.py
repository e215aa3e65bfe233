"""The limits beside what was measured: on real rings, in the terminal, in Markdown and in JSON."""

import json
from collections import Counter

import pytest
from rich.console import Console
from typer.testing import CliRunner

from tests.kimi_k25 import kimi_k25_config
from tests.unit.test_report_rings import US, open_rank, write_server
from vllm_k25_instrument.cli import app
from vllm_k25_instrument.limits.batches import Batches, Calls, least_load, loads_of, read_measured
from vllm_k25_instrument.limits.errors import LimitsError
from vllm_k25_instrument.limits.floors import Load, Sharding, decode_floors, mean_floors
from vllm_k25_instrument.limits.machine import make_machine
from vllm_k25_instrument.limits.report import LimitsTable, find_limits, limits_markdown
from vllm_k25_instrument.model import Category, GraphMode, Phase, RankCoordinates, batch_label, size_label
from vllm_k25_instrument.report.digest import GroupKey
from vllm_k25_instrument.report.rings import read_rings
from vllm_k25_instrument.ring import open_rings

DECODE_64 = GroupKey(Phase.DECODE, "64", GraphMode.FULL)


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(kimi_k25_config()))
    return path


def machine(config, **changes):
    options = {"gpu": "rtx-pro-6000", "model": "", "context": 2000, "sharding": Sharding.of(8)}
    return make_machine(config=config, **{**options, **changes})


def limits_of(folder, on):
    readers, errors = open_rings(folder)
    made = read_rings(readers, errors)
    return find_limits(made.breakdown, read_measured(readers), on)


def printed(renderable):
    console = Console(width=200, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(renderable)
    return console.export_text()


@pytest.fixture
def rings(tmp_path):
    folder = tmp_path / "instance"
    ranks = write_server(folder, world=8, batches=(1,), steps=2)
    for rank in ranks:
        rank.write(17)
        rank.write(64)
        rank.write(4, Phase.MIXED, GraphMode.PIECEWISE)
    return folder


def test_floors_are_of_the_batches_that_the_samples_really_had(rings, config):
    on = machine(config)
    limits = limits_of(rings, on)
    group = next(group for group in limits.groups if group.key == DECODE_64)
    assert group.known
    assert (group.requests, group.tokens) == (40.5, 40.5)  # 17 and 64
    each = [decode_floors(on.shape, on.sharding, Load(n, n, 2000), on.gpu, on.link)["moe_experts"].ns for n in (17, 64)]
    row = next(row for row in group.rows if row.name == "moe_experts")
    assert row.floor.ns == pytest.approx(sum(each) / 2)


def test_a_category_stands_as_many_times_above_its_floor_as_its_exposed_time_is_longer(rings, config):
    limits = limits_of(rings, machine(config))
    group = limits.groups[0]
    readers, errors = open_rings(rings)
    groups = [g for g in read_rings(readers, errors).breakdown.groups if g.key == group.key]
    exposed = sum(g.categories["all_reduce"].exclusive_ns / g.steps for g in groups) / 8
    row = next(row for row in group.rows if row.name == "all_reduce")
    assert row.measured_ns == pytest.approx(exposed)
    assert row.times == pytest.approx(exposed / (123 * 2398.13), rel=1e-4)


def test_what_need_not_move_has_no_floor(rings, config):
    rows = {row.name: row for row in limits_of(rings, machine(config)).groups[0].rows}
    for name in ("moe_routing", "sampling", "input_preparation"):
        assert rows[name].floor is None
        assert rows[name].times is None
        assert rows[name].to_json_dict() == {"measured_ns": round(rows[name].measured_ns)}


def test_the_floors_of_a_step_add_up(rings, config):
    for group in limits_of(rings, machine(config)).groups:
        assert group.step.floor.ns == pytest.approx(sum(row.floor.ns for row in group.rows if row.floor))
        assert group.step.measured_ns == pytest.approx(sum(row.measured_ns for row in group.rows))


def test_only_decode_steps_have_floors_and_the_others_are_named(rings, config):
    limits = limits_of(rings, machine(config))
    assert {group.key.phase for group in limits.groups} == {Phase.DECODE}
    assert limits.notes[0].startswith("Without floors: mixed batch 4;")


def test_a_time_below_its_floor_is_named_as_what_cannot_be(rings, config):
    # 568 us of unattributed time in these steps, where the projections alone take 2,166 us
    limits = limits_of(rings, machine(config))
    assert limits.groups[0].rows[-1].times < 1
    assert limits.notes[1].startswith("Measured below the floor: unattributed, moe_experts, mla_attention.")
    assert limits.to_json_dict()["notes"] == list(limits.notes)


def test_the_floor_of_a_category_that_nobody_hooked_is_part_of_what_is_left_over(tmp_path, config):
    rank = open_rank(tmp_path / "one", 0, 1)
    rank.write(1, ranges=[(Category.MLA_ATTENTION, US, 500 * US, "", 0, -1, 0)], duration_ns=9000 * US)
    on = machine(config, sharding=Sharding.of(8))
    (group,) = limits_of(tmp_path / "one", on).groups
    rows = {row.name: row for row in group.rows}
    assert set(rows) == {"mla_attention", "unattributed"}
    own = mean_floors({Load(1, 1, 2000): 1.0}, on.shape, on.sharding, on.gpu, None)
    together = own["unattributed"].ns + own["moe_experts"].ns + own["moe_shared_experts"].ns
    assert rows["unattributed"].floor.ns == pytest.approx(together)


def test_without_samples_the_smallest_batch_of_the_label_is_taken_so_that_it_stays_a_floor():
    assert [least_load(label, 10).requests for label in ("1", "4", "64", "256", "+Inf")] == [1, 2, 17, 65, 257]
    loads, known = loads_of({}, DECODE_64, 10)
    assert (loads, known) == ({Load(17, 17, 10): 1.0}, False)
    loads, known = loads_of({DECODE_64: Batches()}, DECODE_64, 10)
    assert not known


def test_the_table_names_the_assumptions_and_the_bounds(rings, config):
    text = printed(LimitsTable(limits_of(rings, machine(config))))
    assert "decode · batch 64 · full graph  mean 40.5 requests, 40.5 tokens a step" in text
    assert "as if routing were uniform" in text
    assert "Requests attend to 2,000 tokens each (--context), of 70,272 bytes." in text
    assert "123 all-reduces over pcie5x16 (63.0 GB/s each way, 1 µs a hop)" in text
    assert "2.4 µs straight to all others, 14.4 µs around a ring" in text
    line = next(line for line in text.splitlines() if "moe_experts" in line)
    assert "829.4" in line
    assert "memory" in line


def test_markdown_has_a_table_per_group(rings, config):
    text = limits_markdown(limits_of(rings, machine(config)))
    assert text.count("| category | measured µs/step | floor µs/step | times floor |") == 2
    assert "| `moe_routing` |" in text


def test_json_has_schema_machine_assumptions_and_a_floor_per_category(rings, config):
    document = limits_of(rings, machine(config)).to_json_dict()
    assert json.loads(json.dumps(document)) == document
    assert document["schema"] == "vllm_k25.limits/1"
    assert document["gpu"]["memory_bytes_per_second"] == 1792e9
    assert document["link"]["name"] == "pcie5x16"
    assert (document["tensor_parallel"], document["context"]) == (8, 2000)
    experts = document["groups"][0]["categories"]["moe_experts"]
    assert experts["bytes"] == 1_486_356_480
    assert experts["floor_ns"] == 829_440  # 1,486,356,480 bytes / 1792 GB/s
    assert experts["bound"] == "memory"


def test_pipeline_stages_have_no_floors_since_their_layers_are_unknown(tmp_path):
    place = RankCoordinates(pp_size=2, tp_size=1)
    open_rank(tmp_path, 0, 1, coordinates=place).write(1)
    readers, _ = open_rings(tmp_path)
    with pytest.raises(LimitsError, match="no floors for 2 pipeline stages"):
        read_measured(readers).known_sharding()


def test_a_model_that_would_not_fit_the_gpu_is_refused(config):
    # 75.9 GB on a card of 24
    with pytest.raises(LimitsError, match=r"holds 24 GB and a rank of 8 would need 75\.9 GB of weights"):
        machine(config, gpu="rtx-4090")


@pytest.mark.parametrize(
    ("changes", "option"), [({"context": None}, "--context"), ({"config": None}, "--config"), ({"gpu": "x"}, "--gpu")]
)
def test_a_missing_option_is_named(config, changes, option):
    with pytest.raises(LimitsError, match=option):
        make_machine(
            **{
                "gpu": "rtx-pro-6000",
                "config": config,
                "model": "moonshotai/Kimi-K2.5",
                "context": 1,
                "sharding": Sharding.of(8),
                **changes,
            }
        )


def test_a_model_that_is_served_from_a_folder_needs_no_config_option(config):
    assert machine(None, model=str(config.parent)).shape.layers == 61


def report(*arguments):
    return CliRunner().invoke(app, ["report", *(str(argument) for argument in arguments)])


def test_report_adds_the_limits_to_table_markdown_and_json(rings, config, tmp_path):
    options = ("--gpu", "rtx-pro-6000", "--config", config, "--context", "2000")
    result = report(rings, *options)
    assert result.exit_code == 0, result.stderr
    assert "Physical limits" in result.stdout
    result = report(rings, *options, "--batch", "64", "--json", tmp_path / "b.json", "--markdown", "-")
    assert "## Physical limits" in result.stdout
    document = json.loads((tmp_path / "b.json").read_text())
    assert document["schema"] == "vllm_k25.breakdown/1"
    assert [group["batch"] for group in document["limits"]["groups"]] == ["64"]


def test_report_without_a_gpu_has_no_limits(rings, tmp_path):
    assert "Physical limits" not in report(rings).stdout
    report(rings, "--json", tmp_path / "b.json")
    assert "limits" not in json.loads((tmp_path / "b.json").read_text())


def test_report_says_which_option_the_limits_lack(rings):
    result = report(rings, "--gpu", "rtx-pro-6000")
    assert result.exit_code == 2
    assert "--gpu needs --config" in result.stderr
    assert result.stdout == ""


def test_the_samples_batches_and_all_reduces_are_counted_as_one_by_one(tmp_path):
    ranks = write_server(tmp_path, world=2, batches=(1, 17, 64, 300), steps=3)
    ranks[0].write(4, Phase.MIXED, GraphMode.PIECEWISE)
    readers, _ = open_rings(tmp_path)
    steps, reduces = Counter(), {}
    for reader in readers:
        for sample in reader.samples():
            key = GroupKey(sample.phase, batch_label(sample.requests), sample.graph_mode)
            steps[key, sample.requests, sample.tokens] += 1
            for r in sample.ranges:
                if r.category is Category.ALL_REDUCE:
                    calls = reduces.setdefault((key, r.detail, size_label(r.bytes)), Calls())
                    calls.add(1, r.duration_ns)
    groups = read_measured(readers).groups
    assert steps == Counter({(key, *at): n for key, group in groups.items() for at, n in group.steps.items()})
    assert reduces == {(key, *at): calls for key, group in groups.items() for at, calls in group.all_reduces.items()}
