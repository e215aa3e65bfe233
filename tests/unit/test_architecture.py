"""Imports point one way: model knows nobody, and what a worker loads knows nothing of the tools."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import vllm_k25_instrument
from tests.samples import run_python

PACKAGE = "vllm_k25_instrument"
SOURCE = Path(vllm_k25_instrument.__file__).parent
TOOLS = (
    "alignment",
    "export",
    "report",
    "analysis",
    "bench",
    "campaign",
    "commands",
    "cli",
    "demo",
    "doctor",
    "limits",
    "patching",
    "whatif",
)
LIBRARIES_OF_TOOLS = ("prometheus_client", "rich", "typer", "jinja2", "opentelemetry")


def module_name(path: Path) -> str:
    parts = path.relative_to(SOURCE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {
    module_name(path): ast.parse(path.read_text(encoding="utf-8"))
    for path in SOURCE.rglob("*.py")
    if "cpu_setup" not in path.parts
}


def imports(tree: ast.AST, *, lazy: bool) -> set[str]:
    """Dotted names that a module imports; with `lazy` those inside functions too."""
    found: set[str] = set()
    todo = [tree]
    while todo:
        for node in ast.iter_child_nodes(todo.pop()):
            if isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, "imports are absolute"
                found |= {f"{node.module}.{alias.name}" for alias in node.names}
            elif isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING":
                continue
            elif lazy or not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
                todo.append(node)
    return found


def within(names: set[str], *rooms: str) -> set[str]:
    """Those of `names` that are in one of these rooms of the package (`hooks`, `hooks.patcher`)."""
    roots = [f"{PACKAGE}.{room}" for room in rooms]
    return {name for name in names if any(name == root or name.startswith(f"{root}.") for root in roots)}


def modules_of(*rooms: str) -> list[str]:
    return sorted(within(set(MODULES), *rooms))


def loaded_with(module: str) -> set[str]:
    """Modules of the package that importing `module` loads."""
    seen: set[str] = set()
    todo = [module]
    while todo:
        name = todo.pop()
        while name not in MODULES and "." in name:
            name = name.rpartition(".")[0]
        if name in MODULES and name not in seen:
            seen.add(name)
            todo += imports(MODULES[name], lazy=False)
    return seen


def test_the_model_imports_nothing_of_the_package():
    assert not {name for name in imports(MODULES[f"{PACKAGE}.model"], lazy=True) if name.startswith(PACKAGE)}


def test_the_names_of_the_hooks_import_nothing_of_the_package():
    assert not {name for name in imports(MODULES[f"{PACKAGE}.hooks.names"], lazy=True) if name.startswith(PACKAGE)}


@pytest.mark.parametrize("module", modules_of("hooks", "recorder", "worker", "ring", "totals", "markers", "instances"))
def test_what_a_worker_loads_imports_no_tool_not_even_lazily(module):
    names = imports(MODULES[module], lazy=True)
    assert not within(names, *TOOLS)
    assert not {name for name in names if name.split(".")[0] in LIBRARIES_OF_TOOLS}


@pytest.mark.parametrize("module", ["plugin", "worker", "hooks.table", "hooks.patcher", "recorder.recorder"])
def test_nothing_that_a_worker_loads_leads_to_a_tool(module):
    loaded = loaded_with(f"{PACKAGE}.{module}")
    assert f"{PACKAGE}.model" in loaded or module == "plugin"
    assert not within(loaded, *TOOLS)


@pytest.mark.parametrize("module", modules_of("recorder"))
def test_the_recorder_knows_of_the_hooks_what_a_point_is_and_no_more(module):
    names = within(imports(MODULES[module], lazy=True), "hooks")
    assert not names - within(names, "hooks.point", "hooks.names")


@pytest.mark.parametrize("module", modules_of("export", "report", "analysis", "limits", "whatif"))
def test_what_shows_knows_nothing_of_what_measures(module):
    names = imports(MODULES[module], lazy=True)
    assert not within(names, "hooks.patcher", "hooks.wrappers", "hooks.table", "recorder", "worker", "plugin")


@pytest.mark.parametrize("module", modules_of("ring", "totals", "instances", "liveness", "settings"))
def test_the_storage_knows_nothing_of_what_measures_or_shows(module):
    assert not within(imports(MODULES[module], lazy=True), "hooks", "recorder", "worker", "plugin", *TOOLS)


def test_the_plugin_loads_nothing_of_the_package_but_its_logger():
    assert loaded_with(f"{PACKAGE}.plugin") == {f"{PACKAGE}.plugin", f"{PACKAGE}.log"}


def test_these_rules_are_about_modules_that_exist():
    for room in ("hooks", "recorder", "export", "report", "worker", "plugin", "ring", "totals", "markers"):
        assert modules_of(room), room


def test_every_command_starts_without_numpy_and_other_libraries_that_take_their_time():
    heavy = ("numpy", "torch", "vllm", "prometheus_client", "opentelemetry", "grpc", "ray")
    result = run_python(
        "import sys\n"
        "from typer.testing import CliRunner\n"
        "from vllm_k25_instrument.cli import app\n"
        "assert CliRunner().invoke(app, ['--help']).exit_code == 0\n"
        f"print(*sorted(set(sys.modules) & {set(heavy)!r}))"
    )
    assert (result.returncode, result.stdout.split()) == (0, []), result.stderr
