"""Hooks attach when a module arrives, pass everything through, and cost nothing but themselves when they fail."""

from __future__ import annotations

import importlib
import inspect
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import wrapt

from tests.simulated import decode
from tests.unit.test_recorder import Bench, range_point
from vllm_k25_instrument.hooks.patcher import Patcher
from vllm_k25_instrument.hooks.point import HookKind, HookPoint, HookState
from vllm_k25_instrument.model import HOOKED_CATEGORIES, Category


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


class Modules:
    """Modules that a test writes, for the patcher to wait for."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.names: list[str] = []

    def write(self, name: str, source: str) -> str:
        (self.folder / f"{name}.py").write_text(textwrap.dedent(source))
        self.names.append(name)
        importlib.invalidate_caches()
        return name

    def load(self, name: str) -> ModuleType:
        return importlib.import_module(name)


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Modules]:
    folder = tmp_path / "modules"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))
    written = Modules(folder)
    yield written
    for name in written.names:
        sys.modules.pop(name, None)


def point(module: str, target: str, category: Category = Category.MOE_EXPERTS, **fields: Any) -> HookPoint:
    return HookPoint("moe_experts", HookKind.RANGE, module, target, category=category, **fields)


def patcher(bench: Bench, *points: HookPoint, **options: Any) -> Patcher:
    made = Patcher(
        points,
        bench.recorder,
        vllm_version=options.pop("vllm_version", "0.32.0"),
        categories=options.pop("categories", frozenset(HOOKED_CATEGORIES)),
    )
    made.install()
    return made


ENGINE = """
class Engine:
    def forward(self, q, k, *, output_block_scale=None):
        "Documented."
        return ("ok", q, k, output_block_scale)

    @staticmethod
    def static(x):
        return x

def function(x):
    return x + 1
"""


def test_a_module_is_patched_when_it_arrives_and_not_imported_before(bench: Bench, modules: Modules) -> None:
    name = modules.write("k25_engine_a", ENGINE)
    p = point(name, "Engine.forward")
    made = patcher(bench, p)
    assert name not in sys.modules
    assert made.states[p] is HookState.WAITING

    engine = modules.load(name)
    assert made.states[p] is HookState.ATTACHED
    assert engine.Engine().forward(1, k=2, output_block_scale=7) == ("ok", 1, 2, 7)


def test_a_module_that_is_there_already_is_patched_at_once(bench: Bench, modules: Modules) -> None:
    engine = modules.load(modules.write("k25_engine_b", ENGINE))
    p = point("k25_engine_b", "function")
    assert patcher(bench, p).states[p] is HookState.ATTACHED
    bench.recorder.begin_step(decode())
    assert engine.function(1) == 2
    bench.recorder.end_step()
    assert [r.category for r in bench.only_sample().ranges] == [Category.MOE_EXPERTS]


def test_name_signature_and_documentation_stay(bench: Bench, modules: Modules) -> None:
    engine = modules.load(modules.write("k25_engine_c", ENGINE))
    before = inspect.signature(engine.Engine.forward)
    patcher(bench, point("k25_engine_c", "Engine.forward"))
    forward = engine.Engine.forward
    assert (inspect.signature(forward), forward.__name__, forward.__doc__) == (before, "forward", "Documented.")


@pytest.mark.parametrize("target", ["Engine.gone", "Gone.forward", "gone", "Engine.static", "Engine"])
def test_a_target_that_is_gone_or_no_function_is_missing_and_nothing_breaks(
    bench: Bench, modules: Modules, target: str
) -> None:
    name = modules.write(f"k25_engine_d_{target.replace('.', '_')}", ENGINE)
    p = point(name, target)
    made = patcher(bench, p)
    engine = modules.load(name)
    assert made.states[p] is HookState.MISSING
    assert engine.Engine().forward(1, 2)[0] == "ok"
    assert engine.Engine.static(3) == 3


def test_a_second_installation_changes_nothing(bench: Bench, modules: Modules) -> None:
    engine = modules.load(modules.write("k25_engine_e", ENGINE))
    p = point("k25_engine_e", "Engine.forward")
    patcher(bench, p)
    wrapped = engine.Engine.forward
    patcher(bench, p)
    assert engine.Engine.forward is wrapped


def test_hooks_of_other_versions_and_unwanted_categories_stay_away(bench: Bench, modules: Modules) -> None:
    engine = modules.load(modules.write("k25_engine_f", ENGINE))
    original = engine.Engine.forward
    newer = point("k25_engine_f", "Engine.forward", versions=">=0.33")
    unwanted = point("k25_engine_f", "function", category=Category.SAMPLING)
    made = patcher(bench, newer, unwanted, categories=frozenset({Category.MOE_EXPERTS}))
    assert made.states == {newer: HookState.NOT_IN_VERSION, unwanted: HookState.OFF}
    assert engine.Engine.forward is original


def test_a_build_from_source_counts_as_the_newest_version(bench: Bench, modules: Modules) -> None:
    modules.load(modules.write("k25_engine_g", ENGINE))
    newer = point("k25_engine_g", "Engine.forward", versions=">=0.33")
    assert patcher(bench, newer, vllm_version="dev").states[newer] is HookState.ATTACHED


FAMILY = """
from abc import ABC, abstractmethod
from typing import Generic, TypeVar

T = TypeVar("T")

class Root(ABC, Generic[T]):
    @abstractmethod
    def forward(self, x): ...

class Common(Root[T], Generic[T]):
    def forward(self, x):
        return ("common", x)

class Early(Common[int]):
    def forward(self, x):
        return ("early", *super().forward(x))

class Inherits(Common[int]):
    pass
"""


def test_every_subclass_is_hooked_also_those_defined_later(bench: Bench, modules: Modules) -> None:
    family = modules.load(modules.write("k25_family_a", FAMILY))
    patcher(bench, point("k25_family_a", "Root.forward", subclasses=True))

    class Late(family.Early):  # type: ignore[name-defined, misc]
        def forward(self, x: int) -> Any:
            return ("late", *super().forward(x))

    bench.recorder.begin_step(decode())
    assert Late().forward(1) == ("late", "early", "common", 1)
    assert family.Early().forward(2) == ("early", "common", 2)
    assert family.Inherits().forward(3) == ("common", 3)
    bench.recorder.end_step()
    # One range per call, however many of the classes on the way are hooked.
    assert len(bench.only_sample().ranges) == 3


def test_an_abstract_root_stays_abstract(bench: Bench, modules: Modules) -> None:
    family = modules.load(modules.write("k25_family_b", FAMILY))
    patcher(bench, point("k25_family_b", "Root.forward", subclasses=True))
    with pytest.raises(TypeError, match="abstract"):
        family.Root()


def test_a_subclass_hook_of_the_family_still_runs(bench: Bench, modules: Modules) -> None:
    name = modules.write(
        "k25_family_c",
        """
        class Root:
            seen = []
            def __init_subclass__(cls, tag=None, **kwargs):
                super().__init_subclass__(**kwargs)
                cls.seen.append((cls.__name__, tag))
            def forward(self):
                return 1
        """,
    )
    family = modules.load(name)
    patcher(bench, point(name, "Root.forward", subclasses=True), point(name, "Root.forward", subclasses=True))

    class Child(family.Root, tag="x"):  # type: ignore[name-defined, misc, call-arg]
        def forward(self) -> int:
            return 2

    assert family.Root.seen == [("Child", "x")]
    assert Child().forward() == 2


def test_a_function_that_another_plugin_wraps_is_hooked_in_either_order(bench: Bench, modules: Modules) -> None:
    def louder(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        return (*wrapped(*args, **kwargs), type(instance).__name__)

    name = modules.write("k25_engine_h", ENGINE)
    engine = modules.load(name)
    wrapt.wrap_function_wrapper(engine, "Engine.forward", louder)
    p = point(name, "Engine.forward")
    made = patcher(bench, p)
    assert made.states[p] is HookState.ATTACHED
    wrapt.wrap_function_wrapper(engine, "Engine.forward", louder)

    bench.recorder.begin_step(decode())
    assert engine.Engine().forward(1, 2) == ("ok", 1, 2, None, "Engine", "Engine")
    bench.recorder.end_step()
    assert len(bench.only_sample().ranges) == 1

    made.quiet(p)
    bench.recorder.begin_step(decode())
    assert engine.Engine().forward(1, 2) == ("ok", 1, 2, None, "Engine", "Engine")
    bench.recorder.end_step()
    assert bench.samples()[-1].ranges == ()


def test_a_quiet_hook_is_as_good_as_gone(bench: Bench, modules: Modules) -> None:
    engine = modules.load(modules.write("k25_engine_i", ENGINE))
    original = engine.Engine.forward
    p = point("k25_engine_i", "Engine.forward")
    made = patcher(bench, p)
    made.quiet(p)
    assert engine.Engine.forward is original
    assert made.states_by_name() == {"moe_experts": "quiet"}


def test_a_hook_is_quiet_where_one_of_its_targets_is(bench: Bench, modules: Modules) -> None:
    modules.load(modules.write("k25_engine_t", ENGINE))
    modules.load(modules.write("k25_engine_u", ENGINE))
    failing, working = point("k25_engine_t", "Engine.forward"), point("k25_engine_u", "Engine.forward")
    made = patcher(bench, failing, working)
    assert made.states_by_name() == {"moe_experts": "attached"}
    made.quiet(failing)
    assert made.states[working] is HookState.ATTACHED
    assert made.states_by_name() == {"moe_experts": "quiet"}


def test_uninstalling_puts_every_original_back(bench: Bench, modules: Modules) -> None:
    family = modules.load(modules.write("k25_family_d", FAMILY))
    originals = (family.Common.forward, family.Early.forward)
    made = patcher(bench, point("k25_family_d", "Root.forward", subclasses=True))
    assert (family.Common.forward, family.Early.forward) != originals
    made.uninstall()
    assert (family.Common.forward, family.Early.forward) == originals


MOE = """
import torch

class MLP(torch.nn.Module):
    def forward(self, x):
        return x * 2

class SharedExperts(torch.nn.Module):
    def __init__(self, layer, moe_config=None):
        super().__init__()
        self._layer = layer

    def forward(self, x):
        return self._layer(x)
"""


def test_shared_experts_are_timed_and_dense_layers_of_the_same_class_are_not(bench: Bench, modules: Modules) -> None:
    moe = modules.load(modules.write("k25_moe_a", MOE))
    shared = HookPoint(
        "moe_shared_experts",
        HookKind.SHARED_EXPERTS,
        "k25_moe_a",
        "SharedExperts.__init__",
        category=Category.MOE_SHARED_EXPERTS,
        detail=lambda args, kwargs: type(args[0]).__name__,
        shared_experts=lambda args, kwargs: args[1],
    )
    patcher(bench, shared)
    experts, dense = moe.SharedExperts(moe.MLP()), moe.MLP()
    bench.recorder.begin_step(decode())
    assert experts(torch.ones(1)).item() == 2
    assert dense(torch.ones(1)).item() == 2
    bench.recorder.end_step()
    assert [(r.category, r.detail) for r in bench.only_sample().ranges] == [(Category.MOE_SHARED_EXPERTS, "MLP")]


class Tower(torch.nn.Module):
    """A model whose part is hooked, for the compiler to trace."""

    def __init__(self) -> None:
        super().__init__()
        self.part = torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return work(self.part(x)) + 1


def work(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@pytest.mark.parametrize("recording", [False, True])
def test_hooks_neither_break_nor_guard_a_compiled_graph(bench: Bench, recording: bool) -> None:
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    this = sys.modules[__name__]
    p = range_point(Category.MOE_EXPERTS, detail=lambda args, kwargs: f"{args}")
    p = HookPoint("moe_experts", HookKind.RANGE, __name__, "work", category=p.category, detail=p.detail)
    made = patcher(bench, p)
    try:
        assert work is this.work
        tower = Tower()
        expected = tower(torch.ones(2, 4))
        if recording:
            bench.recorder.begin_step(decode())
        compiled = torch.compile(tower, backend=backend, fullgraph=True)
        for _ in range(2):
            assert torch.equal(compiled(torch.ones(2, 4)), expected)
            # A guard on our state would compile again now.
            if bench.recorder.in_step:
                bench.recorder.end_step()
            else:
                bench.recorder.begin_step(decode())
        assert len(graphs) == 1
    finally:
        made.uninstall()
        torch.compiler.reset()
