#!/usr/bin/env python3
"""Write the source patches of a vLLM release from the hook table.

    python tools/fetch_vllm.py --matrix
    python tools/make_patches.py              every release of the matrix (hooks/releases.py), from the cache
    python tools/make_patches.py 0.34.0       another one
    python tools/make_patches.py --check      write nothing; exit 1 where patches/ is not what the table says

A patch marks the functions that the plugin's hooks would wrap, with one decorator line each: ``@k25("all_reduce")``.
Which functions those are is read from the release's syntax trees: the table's targets, and of a family of classes every
subclass that defines the method. Same tree, same table, same bytes.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import importlib
import pkgutil
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]

from fetch_vllm import tree as cached_tree  # noqa: E402
from source_tree import ClassId, Module, SourceTree  # noqa: E402

from vllm_k25_instrument import hooks  # noqa: E402
from vllm_k25_instrument.hooks.patcher import exists_in  # noqa: E402
from vllm_k25_instrument.hooks.point import HookPoint  # noqa: E402
from vllm_k25_instrument.hooks.releases import MATRIX  # noqa: E402
from vllm_k25_instrument.hooks.table import HOOK_TABLE  # noqa: E402
from vllm_k25_instrument.patching.unified import lines_of  # noqa: E402

PATCHES = ROOT / "patches"
CONTEXT = 2

PLUGINS = "vllm.plugins"
WORKER_BASE = "vllm.v1.worker.worker_base"
IMPORT = "from vllm.plugins import k25"

ENTRY = """
try:
    from vllm_k25_instrument.patched import k25, k25_start
except Exception:  # not installed, or unfit: vLLM goes on without it

    def k25(hook: str) -> Callable[[Any], Any]:
        return lambda function: function

    def k25_start() -> None:
        pass

"""
"""What vLLM's plugins module gets: the decorator, which without our package leaves every function as it is."""

ABOUT = {
    "entry": "Where the marks come from, where a process and a worker start. Nothing without vllm-k25-instrument.",
    "steps": "Mark the model runner's step, and what frames the model in it.",
    "collectives": "Mark the collectives, and the paths that an all-reduce takes.",
    "moe": "Mark the routing, the routed experts and the shared experts of mixture-of-experts layers.",
    "mla": "Mark multi-head latent attention: decode and prefill of every backend.",
    "attention": "Mark attention other than MLA: the kernel work of every backend.",
    "speculation": "Mark the drafting of tokens.",
    "graphs": "Mark the capture, the replay, the memory and the end of CUDA graphs.",
}
"""The patches of a series, in order: the file of the hook table, and what the patch does."""

NOT_WRAPPED = ("abstractmethod", "staticmethod", "classmethod", "property", "overload")


class PatchError(Exception):
    """No patch can be made of this tree, and why."""


@dataclass(frozen=True, slots=True)
class Mark:
    """One function to mark. `line` is where the decorator goes, 0 for the first line; `function` its qualified name."""

    point: HookPoint
    module: str
    function: str
    line: int
    indent: int
    rebinds: bool = False
    """The module imports the function and calls it by that name: the name is bound again, below the imports."""


@dataclass(frozen=True, slots=True)
class Insertion:
    """Lines that go before line `line` (0 is the first) of a file."""

    line: int
    text: str


def marks_of(tree: SourceTree, version: str) -> dict[str, list[Mark]]:
    """What each file of the hook table comes to in this tree. Raises PatchError where the tree lacks a target."""
    taken: set[tuple[str, str]] = set()
    found: dict[str, list[Mark]] = {}
    missing = []
    for point in HOOK_TABLE:
        if not exists_in(point, version):
            continue
        marks = list(_marks(tree, point))
        if not marks and not _is_abstract(tree, point):
            missing.append(point.id)
        for mark in marks:
            if (mark.module, mark.function) not in taken:
                taken.add((mark.module, mark.function))
                found.setdefault(group_of(point), []).append(mark)
    if missing:
        raise PatchError(f"vLLM {version} lacks targets that the hook table says it has: {', '.join(missing)}")
    return found


def group_of(point: HookPoint) -> str:
    """The file of the hook table that a point stands in."""
    return _GROUPS[id(point)]


def _groups() -> dict[int, str]:
    groups: dict[int, str] = {}
    for info in pkgutil.iter_modules(hooks.__path__):
        if info.name in ABOUT:
            module = importlib.import_module(f"{hooks.__name__}.{info.name}")
            for name, value in vars(module).items():
                if name.endswith("_POINTS"):
                    groups |= {id(point): info.name for point in value}
    strays = [point.id for point in HOOK_TABLE if id(point) not in groups]
    if strays:
        raise PatchError(f"no patch is named for {', '.join(strays)}: name its file in ABOUT")
    return groups


def _marks(tree: SourceTree, point: HookPoint) -> Iterator[Mark]:
    owner, _, name = point.target.rpartition(".")
    if not owner:
        yield from _function_mark(tree, point)
        return
    for root in sorted(tree.resolve(point.module, owner), key=lambda c: (c.module, c.qualname)):
        for cls in tree.family(root) if point.subclasses else [root]:
            node = tree.method(cls, name)
            if node is not None and not _decorators(node) & set(NOT_WRAPPED):
                yield Mark(point, cls.module, f"{cls.qualname}.{name}", _first_line(node), node.col_offset)


def _function_mark(tree: SourceTree, point: HookPoint) -> Iterator[Mark]:
    module = tree.module(point.module)
    if module is None:
        return
    node = module.functions.get(point.target)
    if node is not None:
        yield Mark(point, module.name, point.target, _first_line(node), node.col_offset)
    elif point.target in module.imports:
        yield Mark(point, module.name, point.target, _end_of_imports(module.tree), 0, rebinds=True)


def _is_abstract(tree: SourceTree, point: HookPoint) -> bool:
    """Whether the class only says that the method must be there, and no class of this tree defines it."""
    owner, _, name = point.target.rpartition(".")
    return any(tree.method(cls, name) is not None for cls in tree.resolve(point.module, owner)) if owner else False


def _decorators(node: ast.FunctionDef) -> set[str]:
    return {ast.unparse(one).partition("(")[0].rpartition(".")[2] for one in node.decorator_list}


def _first_line(node: ast.FunctionDef) -> int:
    return min([node.lineno, *(one.lineno for one in node.decorator_list)]) - 1


# --- where lines go ----------------------------------------------------------------------------------------


def _end_of_imports(tree: ast.Module) -> int:
    """The line after the last import at the top of a module."""
    ends = [node.end_lineno or 0 for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    if not ends:
        raise PatchError("a module without imports")
    return ends[-1]


def import_line(module: Module) -> int:
    """Where the import of the decorator belongs: where isort would put it, among the module's own of vLLM's."""
    ours = IMPORT.split()[1]
    after = None
    for node in module.tree.body:
        if not isinstance(node, ast.ImportFrom):
            continue
        if node.level and after is not None:
            return after
        if node.level or node.module == ours or ((node.module or "").startswith("vllm.") and str(node.module) > ours):
            return node.lineno - 1
        if (node.module or "").partition(".")[0] == "vllm":
            after = node.end_lineno
    return after if after is not None else _end_of_imports(module.tree)


def insertions(module: Module, marks: Sequence[Mark]) -> list[Insertion]:
    """The lines that put `marks` into a module, which gets the decorator's import with them."""
    imported = import_line(module)
    if any(mark.line < imported for mark in marks):
        raise PatchError(f"{module.name} has a mark above its imports")
    own = [
        node
        for node in module.tree.body
        if isinstance(node, ast.Import | ast.ImportFrom) and "vllm" in ast.unparse(node)
    ]
    lines = [Insertion(imported, f"{IMPORT}\n" if own else f"\n{IMPORT}\n")]
    for mark in marks:
        if mark.rebinds:
            lines.append(Insertion(mark.line, f'\n{mark.function} = k25("{mark.point.name}")({mark.function})\n'))
        else:
            lines.append(Insertion(mark.line, f'{" " * mark.indent}@k25("{mark.point.name}")\n'))
    return lines


def entry_insertions(tree: SourceTree) -> dict[str, list[Insertion]]:
    """The first patch: the decorator, the start of a process in `load_general_plugins`, the start of a worker."""
    plugins = tree.module(PLUGINS)
    loader = plugins.functions.get("load_general_plugins") if plugins is not None else None
    flags = [node for node in ast.walk(loader) if isinstance(node, ast.Assign)] if loader is not None else []
    flags = [node for node in flags if ast.unparse(node) == "plugins_loaded = True"]
    worker = tree.method(ClassId(WORKER_BASE, "WorkerBase"), "__init__") if tree.module(WORKER_BASE) else None
    base = tree.module(WORKER_BASE)
    known = plugins is not None and {"Any", "Callable"} <= plugins.imports.keys()  # what ENTRY is annotated with
    if plugins is None or not known or len(flags) != 1 or worker is None or base is None:
        raise PatchError(f"{PLUGINS} or {WORKER_BASE} is not what it was")
    return {
        PLUGINS: [
            Insertion(_end_of_imports(plugins.tree), ENTRY.removesuffix("\n")),
            Insertion(flags[0].end_lineno or 0, f"{' ' * flags[0].col_offset}k25_start()\n"),
        ],
        WORKER_BASE: [
            Insertion(import_line(base), f"{IMPORT}\n"),
            Insertion(_first_line(worker), f'{" " * worker.col_offset}@k25("worker")\n'),
        ],
    }


def inserted(text: str, lines: Sequence[Insertion]) -> str:
    """`text` with the lines put in. Two at one place keep their order."""
    old = lines_of(text)
    new: list[str] = []
    done = 0
    for one in sorted(lines, key=lambda i: i.line):
        new += old[done : one.line]
        new.append(one.text)
        done = one.line
    return "".join([*new, *old[done:]])


# --- the series --------------------------------------------------------------------------------------------


def series_of(tree: SourceTree, version: str) -> dict[str, str]:
    """The patches of a tree, by file name, in the order to apply them in. Raises PatchError."""
    by_group = marks_of(tree, version)
    wanted: dict[str, list[Insertion]] = {}
    texts: dict[str, str] = {}
    series = {}
    groups = [group for group in ABOUT if group == "entry" or group in by_group]
    for number, group in enumerate(groups, 1):
        new: dict[str, list[Insertion]] = entry_insertions(tree) if group == "entry" else {}
        for mark in by_group.get(group, ()):
            module = tree.module(mark.module)
            assert module is not None
            marks = [one for one in by_group[group] if one.module == mark.module]
            new[mark.module] = insertions(module, marks)
        diffs = []
        for name in sorted(new):
            module = tree.module(name)
            assert module is not None
            known = wanted.setdefault(name, [])
            known += [one for one in new[name] if one not in known]
            before, after = texts.get(name, module.text), inserted(module.text, known)
            compile(after, str(module.path), "exec", dont_inherit=True)
            texts[name] = after
            diffs.append(diff_of(module.path.relative_to(tree.root.parent).as_posix(), before, after))
        heading = f"{ABOUT[group]}\n\nvLLM {version}, {number}/{len(groups)}, made by tools/make_patches.py.\n\n"
        series[f"{number:04d}-{group}.patch"] = heading + "".join(diffs)
    return series


def diff_of(path: str, before: str, after: str) -> str:
    """A unified diff as git writes it, with the class that a hunk is in."""
    lines = lines_of(before)
    out = [f"diff --git a/{path} b/{path}\n"]
    for line in difflib.unified_diff(lines, lines_of(after), f"a/{path}", f"b/{path}", n=CONTEXT):
        hunk = re.match(r"@@ -(\d+)", line)
        if not line.endswith("\n"):
            raise PatchError(f"{path} is to be changed at an end that has no line feed")
        out.append(f"{line.rstrip()} {_enclosing(lines, int(hunk[1]))}".rstrip() + "\n" if hunk else line)
    return "".join(out)


def _enclosing(lines: Sequence[str], start: int) -> str:
    for line in reversed(lines[: start - 1]):
        if re.match(r"(?:class|def|async def) ", line):
            return line.strip()[:70]
    return ""


_GROUPS = _groups()


def differences(version: str, series: dict[str, str]) -> list[str]:
    """Names of the files of `patches/<version>` that are not what they should be."""
    folder = PATCHES / version
    there = {path.name: path.read_text(encoding="utf-8") for path in folder.glob("*.patch")}
    return sorted(name for name in {*there, *series} if there.get(name) != series.get(name))


def write(version: str, series: dict[str, str]) -> None:
    """Make `patches/<version>` what it should be."""
    folder = PATCHES / version
    folder.mkdir(parents=True, exist_ok=True)
    for path in folder.glob("*.patch"):
        if path.name not in series:
            path.unlink()
    for name, text in series.items():
        (folder / name).write_text(text, encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("versions", nargs="*", metavar="VERSION")
    parser.add_argument("--check", action="store_true", help="write nothing")
    parser.add_argument("--tree", type=Path, help="the release's folder `vllm` (default: in the cache)")
    arguments = parser.parse_args()
    if arguments.tree and len(arguments.versions) != 1:
        parser.error("--tree is of one release: name it")
    failed = False
    for version in arguments.versions or MATRIX:
        root = arguments.tree or cached_tree(version)
        try:
            if not root.is_dir():
                raise PatchError(f"no tree in {root}: python tools/fetch_vllm.py {version}")
            series = series_of(SourceTree(root), version)
        except PatchError as error:
            failed = True
            print(f"[patches] {version}: {error}", file=sys.stderr, flush=True)
            continue
        stale = differences(version, series)
        failed |= arguments.check and bool(stale)
        if not arguments.check:
            write(version, series)
        lines = sum(text.count("\n+") - text.count("\n+++") for text in series.values())
        state = ("differs: " + ", ".join(stale)) if arguments.check and stale else "written" if stale else "up to date"
        print(f"[patches] {version}: {len(series)} patches, {lines} lines, {state}", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
