"""The patches against the vLLM releases that they are for: they fit, they compile, and they mark what the hooks wrap.

Trees that are not installed come from `python tools/fetch_vllm.py --matrix`.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import textwrap
from dataclasses import dataclass, fields
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace

import make_patches
import pytest
from source_tree import SourceTree

from tests.contract.trees import INSTALLED, WHOLE_MATRIX, root_of
from tests.samples import run_python
from vllm_k25_instrument.hooks.marks import Mark
from vllm_k25_instrument.hooks.patcher import Patcher
from vllm_k25_instrument.hooks.point import HookPoint
from vllm_k25_instrument.hooks.releases import MATRIX
from vllm_k25_instrument.hooks.resolve import installed_vllm
from vllm_k25_instrument.hooks.table import HOOK_TABLE
from vllm_k25_instrument.model import HOOKED_CATEGORIES
from vllm_k25_instrument.patching.replace import bring_to
from vllm_k25_instrument.patching.series import (
    FileState,
    PatchError,
    TreeState,
    load_series,
    release_of,
    releases,
    tree_state,
)

pytestmark = pytest.mark.contract

PINNED = INSTALLED.partition("+")[0]


def root_or_skip(release: str) -> Path:
    root = root_of(release)
    if root is None:
        reason = f"vLLM {release} is not cached: python tools/fetch_vllm.py {release}"
        if WHOLE_MATRIX or release == PINNED:
            pytest.fail(reason)
        pytest.skip(reason)
    return root


@lru_cache(maxsize=1)
def tree_at(root: Path) -> SourceTree:
    return SourceTree(root)


def marks(root: Path, release: str) -> list[make_patches.Mark]:
    return [mark for group in make_patches.marks_of(tree_at(root), release).values() for mark in group]


def test_every_release_of_the_matrix_has_its_patches() -> None:
    assert releases() == list(MATRIX)
    assert PINNED in MATRIX


@pytest.mark.parametrize("release", MATRIX)
def test_a_series_fits_its_release_compiles_and_comes_off_again(release: str, tmp_path: Path) -> None:
    original = root_or_skip(release)
    series = load_series(release)
    root = tmp_path / "vllm"
    for path in ["vllm/_version.py", *series.paths]:
        (root.parent / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(original.parent / path, root.parent / path)
    assert release_of(root) == release

    assert tree_state(series.examine(root)) is TreeState.NOT_APPLIED
    assert bring_to(root, series.examine(root), FileState.PATCHED) == series.paths
    assert tree_state(series.examine(root)) is TreeState.APPLIED
    for path in series.paths:
        text = (root.parent / path).read_text(encoding="utf-8")
        compile(text, path, "exec", dont_inherit=True)
        assert "k25" in text
    bring_to(root, series.examine(root), FileState.CLEAN)
    for path in series.paths:
        assert (root.parent / path).read_bytes() == (original.parent / path).read_bytes()


def test_git_takes_the_patches_too(tmp_path: Path) -> None:
    root = root_or_skip(PINNED)
    git = shutil.which("git")
    if git is None:
        pytest.skip("git is not installed")
    series = load_series(PINNED)
    ours = tmp_path / "ours" / "vllm"
    theirs = tmp_path / "theirs" / "vllm"
    for path in series.paths:
        for copy in (ours, theirs):
            (copy.parent / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(root.parent / path, copy.parent / path)
    bring_to(ours, series.examine(ours), FileState.PATCHED)
    for patch in sorted((make_patches.PATCHES / PINNED).glob("*.patch")):
        subprocess.run([git, "apply", patch], cwd=theirs.parent, check=True)
    for path in series.paths:
        assert (theirs.parent / path).read_bytes() == (ours.parent / path).read_bytes()


@pytest.mark.parametrize("release", MATRIX if WHOLE_MATRIX else (PINNED,))
def test_the_patches_are_what_the_hook_table_says(release: str) -> None:
    root = root_or_skip(release)
    stale = make_patches.differences(release, make_patches.series_of(tree_at(root), release))
    assert stale == [], f"python tools/make_patches.py {release}"


@pytest.mark.parametrize("release", MATRIX if WHOLE_MATRIX else (PINNED,))
def test_a_mark_finds_its_point_in_the_table_by_the_name_of_its_function(release: str) -> None:
    """Where it finds another's, of V1's runner for V2's, that one does the same."""
    patcher = Patcher(
        HOOK_TABLE,
        SimpleNamespace(graphs=object()),  # type: ignore[arg-type] (nothing is recorded)
        vllm_version=release,
        categories=frozenset(HOOKED_CATEGORIES),
    )
    for mark in marks(root_or_skip(release), release):

        def function() -> None:
            pass

        function.__module__, function.__qualname__ = mark.module, mark.function
        function.__name__ = mark.function.rpartition(".")[2]
        found = patcher._point_of(Mark(mark.point.name, function))
        assert found is not None, mark
        assert behaviour(found) == behaviour(mark.point), mark


def behaviour(point: HookPoint) -> dict[str, object]:
    """What a point does, whatever module it is about."""
    named = {field.name: getattr(point, field.name) for field in fields(point)}
    return {
        name: getattr(value, "__code__", value)
        for name, value in named.items()
        if name not in ("module", "versions", "target")
    } | {"method": point.target.rpartition(".")[2]}


# --- what the plugin wraps in the installed vLLM, and what the patches mark ----------------------------------

WRAPPED = """if True:
    import importlib, json, logging, sys
    from types import SimpleNamespace
    logging.disable(logging.CRITICAL)
    from vllm_k25_instrument.hooks.patcher import Patcher
    from vllm_k25_instrument.hooks.table import HOOK_TABLE
    from vllm_k25_instrument.model import HOOKED_CATEGORIES
    from vllm_k25_instrument.hooks import patcher
    patcher.wrap = lambda function, point, recorder: (lambda *args: function(*args))
    recorder = SimpleNamespace(graphs=object())
    made = Patcher(HOOK_TABLE, recorder, vllm_version=sys.argv[1], categories=frozenset(HOOKED_CATEGORIES))
    made.install()
    imported = []
    for name in json.loads(sys.argv[2]):
        try:
            importlib.import_module(name)
        except Exception:
            continue
        imported.append(name)
    made.retry()
    wrapped = []
    for owner, name, original, wrapper in made._replaced:
        module = owner.__name__ if not isinstance(owner, type) else owner.__module__
        target = name if not isinstance(owner, type) else f"{owner.__qualname__}.{name}"
        wrapped.append([module, target, wrapper.__k25_hook__.name])
    print("RESULT " + json.dumps([imported, wrapped]))
"""


@dataclass(frozen=True, order=True)
class Wrapped:
    module: str
    function: str
    hook: str


def test_the_patches_mark_what_the_plugin_wraps_and_nothing_else() -> None:
    root = root_or_skip(PINNED)
    assert root == installed_vllm()
    planned = {Wrapped(mark.module, mark.function, mark.point.name) for mark in marks(root, PINNED)}
    result = run_python(WRAPPED, PINNED, json.dumps(sorted({one.module for one in planned})))
    lines = [line for line in result.stdout.splitlines() if line.startswith("RESULT ")]
    assert lines, result.stderr[-2_000:]
    imported, found = json.loads(lines[-1].removeprefix("RESULT "))
    wrapped = {Wrapped(*one) for one in found}
    assert len(imported) > 60, "most of vLLM's modules import without a GPU"
    # A class inside a function is there when the function has run; the plugin's watch over subclasses gets it then.
    assert wrapped == {one for one in planned if one.module in imported and "<locals>" not in one.function}
    assert len(wrapped) > 120


# --- the generator -------------------------------------------------------------------------------------------

SOURCES = {
    "base.py": """
        import abc
        class Root(abc.ABC):
            @abc.abstractmethod
            def forward(self): ...
        class Common(Root):
            @decorated
            def forward(self): ...
        """,
    "again.py": "from vllm.base import Common as Renamed\n",
    "star.py": "from vllm.again import *\n",
    "deep/__init__.py": "from ..base import Root as R\nfrom . import inner as other\n",
    "deep/inner.py": """
        import vllm.again as a
        from vllm.deep import R
        if True:
            class Conditional(R):
                def forward(self): ...
        class ByModule(a.Renamed):
            if True:
                def forward(self): ...
        Alias = ByModule if R else R
        class ByAlias(Alias[int]):
            def forward(self): ...
        def maker():
            class Local(ByAlias):
                def forward(self): ...
        class Static(R):
            @staticmethod
            def forward(): ...
        class Root:
            def forward(self): ...
        """,
    "starred.py": """
        from vllm.star import *
        class Starred(Renamed):
            async def other(self): ...
            def forward(self): ...
        class Stranger(Unknown):
            def forward(self): ...
        """,
}


def test_families_are_found_through_imports_aliases_packages_and_functions(tmp_path: Path) -> None:
    root = tmp_path / "vllm"
    for name, text in SOURCES.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(textwrap.dedent(text))
    (root / "__init__.py").touch()
    tree = SourceTree(root)
    point = SimpleNamespace(module="vllm.base", target="Root.forward", subclasses=True, name="layer")
    found = [(mark.module, mark.function) for mark in make_patches._marks(tree, point)]  # type: ignore[arg-type]
    assert found == [
        ("vllm.base", "Common.forward"),
        ("vllm.deep.inner", "Conditional.forward"),
        ("vllm.deep.inner", "ByModule.forward"),
        ("vllm.deep.inner", "ByAlias.forward"),
        ("vllm.deep.inner", "maker.<locals>.Local.forward"),
        ("vllm.starred", "Starred.forward"),
    ]
    text = make_patches.inserted(
        tree.module("vllm.base").text,  # type: ignore[union-attr]
        make_patches.insertions(tree.module("vllm.base"), list(make_patches._marks(tree, point))[:1]),  # type: ignore[arg-type]
    )
    assert text.count("from vllm.plugins import k25\n") == 1
    assert '    @k25("layer")\n    @decorated\n    def forward' in text


def test_a_tree_that_lacks_a_target_gets_no_patches(tmp_path: Path) -> None:
    root = tmp_path / "vllm"
    root.mkdir()
    (root / "__init__.py").touch()
    with pytest.raises(make_patches.PatchError, match=r"lacks targets .*GPUModelRunner\.execute_model"):
        make_patches.series_of(SourceTree(root), PINNED)


def test_the_package_finds_the_patches_of_the_checkout() -> None:
    assert load_series(PINNED).release == PINNED
    with pytest.raises(PatchError, match=r"no patches for vLLM 0\.1\.0"):
        load_series("0.1.0")
