"""Functions that vLLM's own source marks: the hooks' wrappers, put where the mark is, and never twice."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from tests.samples import run_python
from tests.simulated import decode
from tests.unit.test_patcher import Modules, modules, point
from tests.unit.test_plugin import CONSTRUCT, PLATFORM, WORKER_BASE, directory, run, stand_in
from tests.unit.test_recorder import Bench
from vllm_k25_instrument.hooks import marks
from vllm_k25_instrument.hooks.patcher import Patcher
from vllm_k25_instrument.hooks.point import HookKind, HookPoint, HookState
from vllm_k25_instrument.instances import list_instances
from vllm_k25_instrument.model import HOOKED_CATEGORIES, Category
from vllm_k25_instrument.patched import k25
from vllm_k25_instrument.ring import open_rings

__all__ = ["directory", "modules", "stand_in"]


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


@pytest.fixture(autouse=True)
def fresh_marks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The instrument is on, and nothing has been marked in this process so far."""
    monkeypatch.setenv("K25_INSTRUMENT", "1")
    monkeypatch.setattr(marks._Marks, "known", [])
    monkeypatch.setattr(marks._Marks, "listener", None)
    yield
    marks.listen(None)


ENGINE = """
    from vllm_k25_instrument.patched import k25

    class Engine:
        @k25("moe_experts")
        def forward(self, x, *, scale=None):
            "Documented."
            return ("engine", x, scale)

        def unmarked(self):
            return 1

    class Special(Engine):
        @k25("moe_experts")
        def forward(self, x, *, scale=None):
            return ("special", *super().forward(x, scale=scale))

    @k25("moe_routing")
    def route(x):
        return x + 1
"""


def patcher(bench: Bench, *points: HookPoint, **options: Any) -> Patcher:
    made = Patcher(
        points,
        bench.recorder,
        vllm_version="0.32.0",
        categories=options.pop("categories", frozenset(HOOKED_CATEGORIES)),
        **options,
    )
    made.install()
    return made


def family(module: str) -> HookPoint:
    return point(module, "Engine.forward", subclasses=True)


def routing(module: str) -> HookPoint:
    return HookPoint("moe_routing", HookKind.RANGE, module, "route", category=Category.MOE_ROUTING)


def ranges_of(bench: Bench, engine: ModuleType) -> list[Category]:
    """One step in which everything is called once."""
    bench.recorder.begin_step(decode())
    assert engine.Engine().forward(1, scale=2) == ("engine", 1, 2)
    assert engine.Special().forward(3) == ("special", "engine", 3, None)
    assert engine.route(4) == 5
    bench.recorder.end_step()
    return [r.category for r in bench.samples()[-1].ranges]


EXPECTED = [Category.MOE_EXPERTS, Category.MOE_EXPERTS, Category.MOE_ROUTING]


@pytest.mark.parametrize("first", ["the source", "the patcher"])
@pytest.mark.parametrize("replaces", [False, True])
def test_marked_functions_are_ranges_once_each_with_or_without_the_plugin(
    bench: Bench, modules: Modules, first: str, replaces: bool
) -> None:
    name = modules.write(f"k25_marked_{len(first)}_{replaces}", ENGINE)
    points = family(name), routing(name)
    if first == "the source":
        engine = modules.load(name)
        made = patcher(bench, *points, replaces=replaces)
    else:
        made = patcher(bench, *points, replaces=replaces)
        engine = modules.load(name)
    assert made.states == dict.fromkeys(points, HookState.ATTACHED)
    assert ranges_of(bench, engine) == EXPECTED
    assert made._replaced == []


def test_without_the_plugin_what_is_not_marked_stays_as_it_is_and_is_missing(bench: Bench, modules: Modules) -> None:
    engine = modules.load(modules.write("k25_marked_b", ENGINE))
    unmarked = point("k25_marked_b", "Engine.unmarked")
    original = engine.Engine.unmarked
    made = patcher(bench, unmarked, family("k25_marked_b"), replaces=False)
    made.retry()
    assert engine.Engine.unmarked is original
    assert made.states[unmarked] is HookState.MISSING
    assert made.states_by_name() == {"moe_experts": "attached"}


def test_with_the_plugin_subclasses_that_no_patch_knows_are_hooked_too(bench: Bench, modules: Modules) -> None:
    engine = modules.load(modules.write("k25_marked_c", ENGINE))
    patcher(bench, family("k25_marked_c"))

    class Foreign(engine.Engine):  # type: ignore[name-defined, misc]
        def forward(self, x: int) -> int:
            return x

    bench.recorder.begin_step(decode())
    assert Foreign().forward(7) == 7
    bench.recorder.end_step()
    assert [r.category for r in bench.only_sample().ranges] == [Category.MOE_EXPERTS]


def test_off_a_mark_leaves_the_function_the_object_that_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    def function() -> None:
        pass

    for switch in ("0", "", "off"):
        monkeypatch.setenv("K25_INSTRUMENT", switch)
        assert k25("step")(function) is function
        assert k25("worker")(function) is function
    assert marks._Marks.known == []


def test_what_cannot_be_marked_is_left_as_it_is(caplog: pytest.LogCaptureFixture) -> None:
    refusing = type("Refusing", (), {"__slots__": (), "__call__": lambda self: 1})()
    listened: list[marks.Mark] = []

    def failing(mark: marks.Mark) -> None:
        listened.append(mark)
        raise RuntimeError("no")

    marks.listen(failing)
    with caplog.at_level("ERROR", logger="vllm.k25_instrument"):
        assert k25("step")(refusing) is refusing
    assert len(listened) == 1
    assert "is not marked; vLLM goes on without it" in caplog.text


def test_until_there_is_a_recorder_a_marked_function_is_itself(bench: Bench, modules: Modules) -> None:
    engine = modules.load(modules.write("k25_marked_d", ENGINE))
    assert engine.Special().forward(1) == ("special", "engine", 1, None)
    assert (engine.Engine.forward.__name__, engine.Engine.forward.__doc__) == ("forward", "Documented.")
    assert engine.Engine.forward.__qualname__ == "Engine.forward"


def test_unwanted_categories_quiet_points_and_an_uninstalled_patcher_leave_no_wrapper(
    bench: Bench, modules: Modules
) -> None:
    engine = modules.load(modules.write("k25_marked_e", ENGINE))
    experts, route = family("k25_marked_e"), routing("k25_marked_e")
    made = patcher(bench, experts, route, categories=frozenset({Category.MOE_EXPERTS}), replaces=False)
    assert made.states == {experts: HookState.ATTACHED, route: HookState.OFF}
    assert ranges_of(bench, engine) == EXPECTED[:2]
    made.quiet(experts)
    assert made.states[experts] is HookState.QUIET
    assert ranges_of(bench, engine) == []
    made.uninstall()
    again = patcher(bench, family("k25_marked_e"), routing("k25_marked_e"), replaces=False)
    assert ranges_of(bench, engine) == EXPECTED
    again.uninstall()
    assert ranges_of(bench, engine) == []


def test_a_mark_of_a_hook_that_is_not_known_is_named_and_vllm_goes_on(
    bench: Bench, modules: Modules, caplog: pytest.LogCaptureFixture
) -> None:
    engine = modules.load(modules.write("k25_marked_f", ENGINE))
    with caplog.at_level("WARNING", logger="vllm.k25_instrument"):
        caplog.clear()
        made = patcher(bench, routing("k25_marked_f"), replaces=False)
    assert "k25_marked_f.Engine.forward for hook moe_experts, which is not known here" in caplog.text
    assert list(made.states.values()) == [HookState.ATTACHED]
    assert ranges_of(bench, engine) == EXPECTED[2:]


SHARED = """
    import torch
    from vllm_k25_instrument.patched import k25

    class MLP(torch.nn.Module):
        def forward(self, x):
            return x * 2

    class SharedExperts(torch.nn.Module):
        @k25("moe_shared_experts")
        def __init__(self, layer):
            super().__init__()
            self._layer = layer

        def forward(self, x):
            return self._layer(x)
"""


@pytest.mark.parametrize("replaces", [False, True])
def test_shared_experts_are_timed_and_dense_layers_are_not(bench: Bench, modules: Modules, replaces: bool) -> None:
    name = modules.write(f"k25_marked_shared_{replaces}", SHARED)
    shared = HookPoint(
        "moe_shared_experts",
        HookKind.SHARED_EXPERTS,
        name,
        "SharedExperts.__init__",
        category=Category.MOE_SHARED_EXPERTS,
        shared_experts=lambda args, kwargs: args[1],
    )
    patcher(bench, shared, replaces=replaces)
    moe = modules.load(name)
    experts, dense = moe.SharedExperts(moe.MLP()), moe.MLP()
    bench.recorder.begin_step(decode())
    assert experts(torch.ones(1)).item() == 2
    assert dense(torch.ones(1)).item() == 2
    bench.recorder.end_step()
    assert [r.category for r in bench.only_sample().ranges] == [Category.MOE_SHARED_EXPERTS]


class Tower(torch.nn.Module):
    """A model whose part is marked, for the compiler to trace."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.part(x) + 1

    @k25("moe_experts")
    def unbound(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def part(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2


@pytest.mark.parametrize("recording", [False, True])
def test_marks_neither_break_nor_guard_a_compiled_graph(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, recording: bool
) -> None:
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    monkeypatch.setattr(Tower, "part", k25("moe_experts")(Tower.part))
    made = patcher(bench, point(__name__, "Tower.part", detail=lambda args, kwargs: f"{args}"), replaces=False)
    assert list(made.states.values()) == [HookState.ATTACHED]
    try:
        tower = Tower()
        expected = tower(torch.ones(2, 4))
        if recording:
            bench.recorder.begin_step(decode())
        compiled = torch.compile(tower, backend=backend, fullgraph=True)
        for _ in range(2):
            assert torch.equal(compiled(torch.ones(2, 4)), expected)
            if bench.recorder.in_step:
                bench.recorder.end_step()
            else:
                bench.recorder.begin_step(decode())
        assert len(graphs) == 1
    finally:
        made.uninstall()
        torch.compiler.reset()


# --- what a process gets -------------------------------------------------------------------------------------


def source_with(start: str) -> str:
    marked = WORKER_BASE.replace("    def __init__", '    @k25("worker")\n    def __init__')
    return f"from vllm_k25_instrument.patched import k25, k25_start\n{start}\n{marked}"


def patched_stand_in(stand_in: Path) -> None:
    (stand_in / "vllm" / "v1" / "worker" / "worker_base.py").write_text(source_with(""))
    assert (stand_in / "vllm" / "platforms.py").read_text() == PLATFORM


WHO = """
from vllm_k25_instrument import plugin
import sys
worker = plugin._Process.worker
print(worker is not None and worker.patcher._replaces, sum(name.startswith("wrapt.importer") for name in sys.modules))
"""


@pytest.mark.parametrize(
    ("starts", "replaces"),
    [
        ("k25_start()", "False"),
        ("k25_start(); k25_start()", "False"),
        ("k25_start(); register()", "True"),
        ("register(); k25_start()", "True"),
        ("pass", "False"),
    ],
)
def test_a_patched_vllm_instruments_its_worker_and_the_plugin_adds_its_hooks(
    directory: Path, stand_in: Path, starts: str, replaces: str
) -> None:
    patched_stand_in(stand_in)
    code = f"""
        from vllm_k25_instrument.patched import k25_start
        from vllm_k25_instrument.plugin import register
        {starts}
        {textwrap.indent(CONSTRUCT, " " * 8).strip()}
        {textwrap.indent(WHO, " " * 8).strip()}
        print(worker is not None and worker.ring.path.name)
    """
    printed, _ = run(code, directory, PYTHONPATH=str(stand_in))
    assert printed[0].split()[0] == replaces
    if starts == "pass":  # nobody called load_general_plugins
        assert printed[1] == "False"
        return
    assert printed[1] == "rank-00001.ring"
    (instance,) = list_instances(directory)
    assert len(open_rings(instance.path)[0]) == 1


def test_off_a_patched_vllm_loads_nothing_but_the_entry(stand_in: Path) -> None:
    patched_stand_in(stand_in)
    result = run_python(
        "import sys\n"
        "import vllm.v1.worker.worker_base as base\n"
        "from vllm_k25_instrument.patched import k25_start\n"
        "k25_start()\n"
        "print(hasattr(base.WorkerBase.__init__, '__wrapped__'))\n"
        "print(sorted(name for name in sys.modules if name.startswith('vllm_k25')))\n"
        "print(sorted({'torch', 'wrapt', 'pydantic', 'numpy', 'rich'} & set(sys.modules)))\n",
        PYTHONPATH=str(stand_in),
        K25_INSTRUMENT="0",
    )
    assert result.stdout.splitlines() == [
        "False",
        str([f"vllm_k25_instrument{name}" for name in ("", ".log", ".patched", ".plugin")]),
        "[]",
    ], result.stderr
