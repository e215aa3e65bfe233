"""Does a hook point's target exist in a vLLM tree? Read from the source, so that nothing of it is imported.

Many of vLLM's modules import only where their hardware is; their source can be read anywhere.
"""

from __future__ import annotations

import ast
import importlib.util
import re
from functools import lru_cache
from pathlib import Path
from typing import Final

from vllm_k25_instrument.hooks.point import HookPoint

_VERSION: Final = re.compile(r"^__version__\s*=[^'\"\n]*['\"]([^'\"\n]+)['\"]", re.MULTILINE)


def installed_vllm() -> Path | None:
    """Folder of the installed vLLM package; None where there is none. Does not import it."""
    try:
        spec = importlib.util.find_spec("vllm")
    except (ImportError, ValueError):
        return None
    return Path(spec.origin).parent if spec is not None and spec.origin else None


def version_of(vllm_root: Path) -> str:
    """The version that a vLLM package says it is, read from its `_version.py`; "" where it does not say."""
    try:
        text = (vllm_root / "_version.py").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    found = _VERSION.search(text)
    return found[1] if found else ""


def target_exists(point: HookPoint, vllm_root: Path) -> bool:
    """Whether the module defines the target: the function, or the class with the method (its own or inherited)."""
    classes, functions = _definitions(vllm_root, point.module)
    owner, _, method = point.target.rpartition(".")
    if not owner:
        # A name that the module imports is looked up there at run time all the same.
        return method in functions
    return _has_method(vllm_root, classes, owner, method)


def _has_method(vllm_root: Path, classes: dict[str, ast.ClassDef], name: str, method: str, depth: int = 0) -> bool:
    definition = classes.get(name)
    if definition is None or depth > 8:
        return False
    if any(isinstance(node, ast.FunctionDef) and node.name == method for node in definition.body):
        return True
    return any(
        _has_method(vllm_root, classes, base, method, depth + 1)
        for base in (_base_name(node) for node in definition.bases)
        if base in classes
    )


def _base_name(node: ast.expr) -> str:
    while isinstance(node, ast.Subscript):
        node = node.value
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


@lru_cache(maxsize=256)
def _definitions(vllm_root: Path, module: str) -> tuple[dict[str, ast.ClassDef], frozenset[str]]:
    """Classes by name (imported ones of vLLM's included) and names of functions of one module of the tree."""
    source = _source_file(vllm_root, module)
    if source is None:
        return {}, frozenset()
    tree = ast.parse(source.read_text(encoding="utf-8"), filename=str(source))
    classes: dict[str, ast.ClassDef] = {}
    functions: set[str] = set()
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            classes[node.name] = node
        elif isinstance(node, ast.FunctionDef):
            functions.add(node.name)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and (node.module or "").startswith("vllm."):
            functions.update(alias.asname or alias.name for alias in node.names)
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and node.level == 0 and (node.module or "").startswith("vllm."):
            wanted = {alias.asname or alias.name: alias.name for alias in node.names}
            used = {_base_name(base) for definition in classes.values() for base in definition.bases}
            if used & wanted.keys():
                imported, _ = _definitions(vllm_root, str(node.module))
                classes.update({local: imported[name] for local, name in wanted.items() if name in imported})
    return classes, frozenset(functions)


def _source_file(vllm_root: Path, module: str) -> Path | None:
    relative = Path(*module.split(".")[1:])
    for candidate in (vllm_root / relative.with_suffix(".py"), vllm_root / relative / "__init__.py"):
        if candidate.is_file():
            return candidate
    return None
