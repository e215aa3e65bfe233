"""The hook table against the vLLM that is installed."""

from __future__ import annotations

import json
import logging
import re
from collections import Counter
from pathlib import Path

import pytest

from tests.samples import run_python
from vllm_k25_instrument import worker
from vllm_k25_instrument.doctor import _vllm_version
from vllm_k25_instrument.hooks.names import HOOK_INDEX, HOOK_NAMES
from vllm_k25_instrument.hooks.patcher import Patcher, exists_in, version_matches
from vllm_k25_instrument.hooks.point import HookKind, HookPoint
from vllm_k25_instrument.hooks.resolve import installed_vllm, target_exists
from vllm_k25_instrument.hooks.table import HOOK_TABLE, READ_VLLM, TESTED_VLLM
from vllm_k25_instrument.model import HOOKED_CATEGORIES, Category
from vllm_k25_instrument.totals import MAX_HOOKS

ROOT = installed_vllm()
VERSION = _vllm_version() if ROOT else ""

pytestmark = [pytest.mark.contract, pytest.mark.skipif(ROOT is None, reason="vLLM is not installed here")]

EXPECTED = [point for point in HOOK_TABLE if exists_in(point, VERSION)]


# --- the table itself --------------------------------------------------------------------------------------


def test_every_hook_has_a_name_of_the_closed_set_and_every_name_a_hook():
    assert {point.name for point in HOOK_TABLE} == set(HOOK_NAMES)
    assert [HOOK_INDEX[name] for name in HOOK_NAMES] == list(range(len(HOOK_NAMES)))
    assert len(HOOK_NAMES) == len(set(HOOK_NAMES)) <= MAX_HOOKS


def test_a_name_outside_the_closed_set_is_refused():
    with pytest.raises(ValueError, match="closed set"):
        HookPoint("new_hook", HookKind.LAYER, "vllm.x", "f")


@pytest.mark.parametrize(
    ("kind", "category"),
    [
        (HookKind.RANGE, None),
        (HookKind.SHARED_EXPERTS, None),
        (HookKind.LAYER, Category.SAMPLING),
        (HookKind.STEP, Category.SAMPLING),
    ],
)
def test_a_range_has_a_category_and_nothing_else_has_one(kind, category):
    with pytest.raises(ValueError, match="category"):
        HookPoint("layer", kind, "vllm.x", "f", category=category)


def test_no_target_is_hooked_twice_in_one_version():
    assert max(Counter(point.id for point in HOOK_TABLE).values()) == 1


def test_every_hooked_category_has_a_hook():
    assert {point.category for point in HOOK_TABLE if point.category} == set(HOOKED_CATEGORIES)


@pytest.mark.parametrize("point", HOOK_TABLE, ids=lambda point: point.id)
def test_a_hook_point_has_what_its_kind_needs(point):
    assert re.fullmatch(r"vllm(\.\w+)+", point.module)
    assert re.fullmatch(r"(\w+\.)?\w+", point.target)
    assert (point.path is not None) == (point.kind is HookKind.PATH)
    assert point.kind is not HookKind.LAYER or point.layer is not None
    assert not point.subclasses or "." in point.target
    assert (point.shared_experts is not None) == (point.kind is HookKind.SHARED_EXPERTS)


def test_a_hook_that_a_version_has_outgrown_has_a_target_in_the_newest():
    assert {point.name for point in HOOK_TABLE if exists_in(point, "999")} == set(HOOK_NAMES)


# --- against the installed vLLM ----------------------------------------------------------------------------


def test_the_installed_vllm_is_one_that_the_suite_is_for():
    assert version_matches(VERSION, TESTED_VLLM), f"vLLM {VERSION} is not in {TESTED_VLLM}"
    assert version_matches(VERSION, READ_VLLM)


@pytest.mark.parametrize("point", EXPECTED, ids=lambda point: point.id)
def test_a_target_of_this_version_is_in_its_source(point):
    assert ROOT is not None
    assert target_exists(point, ROOT)


def test_a_target_that_does_not_exist_is_not_found():
    assert ROOT is not None
    for module, target in (
        ("vllm.no.such.module", "f"),
        ("vllm.v1.worker.gpu_model_runner", "GPUModelRunner.no_such_method"),
        ("vllm.v1.worker.gpu_model_runner", "NoSuchClass.execute_model"),
        ("vllm.v1.worker.gpu_model_runner", "no_such_function"),
    ):
        assert not target_exists(HookPoint("step", HookKind.STEP, module, target), ROOT), (module, target)


LOOK_AT_RUN_TIME = """if True:
    import importlib, inspect, json, logging, sys
    logging.disable(logging.CRITICAL)
    from vllm_k25_instrument.hooks.table import HOOK_TABLE
    def look(point):
        try:
            owner = importlib.import_module(point.module)
        except Exception as error:
            return f"not imported: {type(error).__name__}: {error}"
        *path, name = point.target.split(".")
        for part in path:
            owner = getattr(owner, part, None)
        target = getattr(owner, name, None)
        if not inspect.isfunction(target):
            return f"no function: {target!r}"
        if path and not point.subclasses and name not in vars(owner):
            return "only inherited"
        return list(inspect.signature(target).parameters)
    wanted = set(json.loads(sys.argv[1]))
    result = {point.id: look(point) for point in HOOK_TABLE if point.id in wanted}
    print("RESULT " + json.dumps(result))
"""

# What their hardware or an optional package brings; everything else must import on any machine.
NOT_EVERYWHERE = ("deepep", "flashinfer", "aiter", "custom_all_reduce", "quick_all_reduce", "symm_mem", "pynccl")


@pytest.fixture(scope="module")
def at_run_time():
    """Parameters of each target as imported in a process of its own, or why there are none."""
    result = run_python(LOOK_AT_RUN_TIME, json.dumps([point.id for point in EXPECTED]))
    lines = [line for line in result.stdout.splitlines() if line.startswith("RESULT ")]
    assert lines, result.stderr[-2_000:]
    return json.loads(lines[-1].removeprefix("RESULT "))


def test_every_target_whose_module_imports_here_is_a_plain_function(at_run_time):
    wrong = {
        point: found
        for point, found in at_run_time.items()
        if isinstance(found, str)
        and not (found.startswith("not imported") and any(name in point for name in NOT_EVERYWHERE))
    }
    assert wrong == {}
    assert sum(isinstance(found, list) for found in at_run_time.values()) > len(EXPECTED) // 2


# The arguments that hooks read by position, with self at 0.
READ_BY_POSITION = {
    "GPUModelRunner.execute_model": {1: "scheduler_output"},
    "FusedMoEMethodBase.apply": {1: "layer"},
    "FusedMoEMethodBase.apply_monolithic": {1: "layer"},
    "MLAAttentionImpl.forward_mqa": {4: "layer"},
    "SharedExperts.__init__": {1: "layer"},
    "PyNcclCommunicator.all_reduce": {2: "out_tensor"},
}


def test_the_arguments_that_hooks_read_are_where_they_look_for_them(at_run_time):
    checked = set()
    for id_, parameters in at_run_time.items():
        target = id_.partition(":")[2]
        if isinstance(parameters, list):
            for position, name in READ_BY_POSITION.get(target, {}).items():
                assert parameters[position] == name, (id_, parameters)
                checked.add(target)
    assert checked >= set(READ_BY_POSITION) - {"PyNcclCommunicator.all_reduce"}


# --- versions ----------------------------------------------------------------------------------------------


class NoRecorder:
    """Nothing is recorded: only the states are looked at. With CUDA graphs, so that their hooks are wanted too."""

    graphs = object()


def states(points, version, categories=frozenset(HOOKED_CATEGORIES)):
    return Patcher(points, NoRecorder(), vllm_version=version, categories=categories).states  # type: ignore[arg-type]


def test_a_point_outside_its_versions_is_reported_as_such_and_is_not_waited_for():
    old = HookPoint("layer", HookKind.LAYER, "vllm.gone", "f", versions="<0.20")
    new = HookPoint("layer", HookKind.LAYER, "vllm.to_come", "f", versions=">=99")
    always = HookPoint("layer", HookKind.LAYER, "vllm.here", "f")
    assert states((old, new, always), VERSION) == {old: "not_in_version", new: "not_in_version", always: "waiting"}


def test_in_the_installed_version_every_point_of_the_table_is_waited_for_or_of_another_version():
    found = states(HOOK_TABLE, VERSION)
    assert {point for point, state in found.items() if state == "waiting"} == set(EXPECTED)
    assert {state for point, state in found.items() if point not in EXPECTED} <= {"not_in_version"}


def test_a_category_that_is_not_asked_for_is_off():
    found = states(HOOK_TABLE, VERSION, frozenset({Category.ALL_REDUCE}))
    off = {point for point, state in found.items() if state == "off"}
    assert off == {point for point in HOOK_TABLE if point.category not in (None, Category.ALL_REDUCE)}


@pytest.mark.parametrize("version", ["", "dev", "not a version"])
def test_a_version_that_cannot_be_read_counts_as_the_newest(version):
    found = states(HOOK_TABLE, version)
    assert set(found.values()) <= {"waiting", "not_in_version"}
    assert {p for p, state in found.items() if state == "waiting"} == {p for p in HOOK_TABLE if exists_in(p, "999")}


@pytest.mark.parametrize("version", ["0.32.0", "0.32.0rc1", "0.32.1.dev7+gabc", "0.32.0+cpu", "0.32.0.post1"])
def test_builds_and_previews_of_a_version_count_as_that_version(version):
    assert version_matches(version, TESTED_VLLM)
    assert not version_matches(version, "<0.32")


@pytest.mark.parametrize(
    ("version", "level", "says"),
    [("99.0.0", "WARNING", "is not known"), ("", "WARNING", "of unknown version"), ("0.28.0", "INFO", "are known")],
)
def test_the_log_says_how_well_a_version_is_known(monkeypatch, caplog, version, level, says):
    logger = logging.getLogger("k25-test")
    monkeypatch.setattr(worker, "logger", logger)
    with caplog.at_level("INFO", logger.name):
        worker.say_how_well_known(version)
    (record,) = caplog.records
    assert record.levelname == level
    assert says in record.getMessage()


def test_the_tested_version_is_not_talked_about(monkeypatch, caplog):
    logger = logging.getLogger("k25-test")
    monkeypatch.setattr(worker, "logger", logger)
    with caplog.at_level("INFO", logger.name):
        worker.say_how_well_known(VERSION)
    assert caplog.records == []


# --- what else we assume of vLLM -----------------------------------------------------------------------------


def source_of(module):
    assert ROOT is not None
    return Path(ROOT, *module.split(".")[1:]).with_suffix(".py").read_text(encoding="utf-8")


def test_vllm_still_reads_the_variable_that_hands_ours_to_ray_workers():
    assert '"VLLM_RAY_EXTRA_ENV_VAR_PREFIXES_TO_COPY"' in source_of("vllm.envs")


def test_vllm_still_calls_its_api_servers_what_the_plugin_looks_for():
    assert re.search(r'name=f"ApiServer', source_of("vllm.v1.utils"))


def test_vllm_still_constructs_workers_from_the_class_that_the_plugin_watches():
    source = source_of("vllm.v1.worker.worker_base")
    constructor = source[source.index("class WorkerBase") :]
    for attribute in ("self.vllm_config", "self.local_rank", "self.rank"):
        assert f"{attribute} = " in constructor
