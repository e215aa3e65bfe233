"""A vLLM tree read as source: its classes, what they derive from, what they define. Nothing is imported."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

Function = ast.FunctionDef | ast.AsyncFunctionDef
Scope = ast.Module | ast.ClassDef | ast.If | ast.Try | ast.With
_MAX_HOPS = 16
_HEAD = re.compile(r"\bclass\s+\w+\s*\([^:]*?\)\s*:|\b\w+ as \w+|^\w+ = [\w.]+(?: if .* else [\w.]+)?$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class ClassId:
    """A class: the dotted name of its module, and its qualified name in there."""

    module: str
    qualname: str


@dataclass(eq=False)
class Module:
    """One source file. `classes` by qualified name; `imports` by local name: (module, attribute, "" for the module)."""

    name: str
    path: Path
    is_package: bool
    text: str
    tree: ast.Module = field(init=False)

    def __post_init__(self) -> None:
        self.tree = ast.parse(self.text, filename=str(self.path))

    @cached_property
    def classes(self) -> dict[str, ast.ClassDef]:
        return dict(_classes(self.tree, ""))

    @cached_property
    def functions(self) -> dict[str, Function]:
        return {node.name: node for node in _statements(self.tree) if isinstance(node, Function)}

    @cached_property
    def imports(self) -> dict[str, tuple[str, str]]:
        found: dict[str, tuple[str, str]] = {}
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    found[alias.asname or alias.name.partition(".")[0]] = (
                        alias.name if alias.asname else alias.name.partition(".")[0],
                        "",
                    )
            elif isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    found[alias.asname or alias.name] = (self._absolute(node), alias.name)
        return found

    @cached_property
    def stars(self) -> list[str]:
        """Modules that this one imports everything from."""
        return [
            self._absolute(node)
            for node in ast.walk(self.tree)
            if isinstance(node, ast.ImportFrom) and node.names[0].name == "*"
        ]

    @cached_property
    def aliases(self) -> dict[str, list[ast.expr]]:
        """What names of the module stand for: ``Base = A if here else B`` is both."""
        found: dict[str, list[ast.expr]] = {}
        for node in _statements(self.tree):
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                values = [node.value]
                if isinstance(node.value, ast.IfExp):
                    values = [node.value.body, node.value.orelse]
                names = [value for value in values if isinstance(value, ast.Name | ast.Attribute)]
                found.setdefault(node.targets[0].id, []).extend(names)
        return found

    def _absolute(self, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        package = self.name.split(".")
        package = package[: len(package) - node.level + self.is_package]
        return ".".join([*package, *(node.module or "").split(".")]).rstrip(".")


class SourceTree:
    """The folder `vllm` of a release."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._modules: dict[str, Module | None] = {}
        self._families: dict[ClassId, list[ClassId]] = {}

    @cached_property
    def texts(self) -> dict[str, str]:
        """Source by module, to the byte."""
        paths = sorted(self.root.rglob("*.py"))
        return {_name_of(path, self.root): path.read_bytes().decode("utf-8") for path in paths}

    def with_text(self, module: str, text: str) -> SourceTree:
        """The same tree with another text of one module."""
        other = SourceTree(self.root)
        other.texts = {**self.texts, module: text}
        other._modules = {name: known for name, known in self._modules.items() if name != module}
        other._heads = {**self._heads, module: _head(text)}
        return other

    def module(self, name: str) -> Module | None:
        """The module of that dotted name; None where the tree has none."""
        if name not in self._modules:
            self._modules[name] = self._read(name)
        return self._modules[name]

    def family(self, root: ClassId) -> list[ClassId]:
        """`root` and all classes of the tree that derive from it, by module and position."""
        if root not in self._families:
            self._families[root] = self._find_family(root)
        return self._families[root]

    def _find_family(self, root: ClassId) -> list[ClassId]:
        known = {root}
        names = {root.qualname.rpartition(".")[2]}
        examined: set[tuple[str, frozenset[str]]] = set()
        while True:
            before = (len(known), len(names))
            pattern = re.compile(rf"\b(?:{'|'.join(sorted(map(re.escape, names)))})\b")
            for name, text in self._heads.items():
                found = frozenset(pattern.findall(text))
                if not found or (name, found) in examined:
                    continue
                module = self.module(name)
                if module is None:
                    continue
                grown = len(known)
                names |= {local for local, (_, attribute) in module.imports.items() if attribute in found}
                names |= {
                    local
                    for local, values in module.aliases.items()
                    if any(self._resolve(module, value) & known for value in values)
                }
                for qualname, node in module.classes.items():
                    if any(self._resolve(module, base) & known for base in node.bases):
                        known.add(ClassId(name, qualname))
                        names.add(node.name)
                if len(known) == grown:
                    examined.add((name, found))
            if (len(known), len(names)) == before:
                break
            if len(known) != before[0]:
                examined.clear()
        return sorted(known, key=lambda c: (c.module, self.node(c).lineno))

    def resolve(self, module: str, dotted: str) -> set[ClassId]:
        """The classes that a dotted name may stand for in a module."""
        here = self.module(module)
        return set() if here is None else self._resolve(here, ast.parse(dotted, mode="eval").body)

    def method(self, cls: ClassId, name: str) -> Function | None:
        """The function `name` that the class itself defines, the last where there are several."""
        found = None
        for node in _statements(self.node(cls)):
            if isinstance(node, Function) and node.name == name:
                found = node
        return found

    def bases(self, cls: ClassId) -> list[ClassId]:
        """The classes of the tree that a class names as its bases, in order."""
        module = self._known(cls.module)
        return [
            base
            for expression in self.node(cls).bases
            for base in sorted(self._resolve(module, expression), key=lambda c: (c.module, c.qualname))
        ]

    def function(self, module: str, name: str) -> tuple[str, Function] | None:
        """The function that `name` is in `module`, and the module that defines it: that one, or one it imports from."""
        for _ in range(_MAX_HOPS):
            here = self.module(module)
            if here is None:
                return None
            if name in here.functions:
                return module, here.functions[name]
            if name not in here.imports:
                return None
            module, name = here.imports[name]
        return None

    def node(self, cls: ClassId) -> ast.ClassDef:
        """A class's syntax."""
        return self._known(cls.module).classes[cls.qualname]

    def _known(self, name: str) -> Module:
        module = self.module(name)
        assert module is not None
        return module

    @cached_property
    def _heads(self) -> dict[str, str]:
        """Of each module what can make a class: bases, renaming imports, assignments. Parsing them all takes long."""
        return {name: head for name, text in self.texts.items() if (head := _head(text))}

    def _read(self, name: str) -> Module | None:
        text = self.texts.get(name)
        if text is None:
            return None
        relative = Path(*name.split(".")[1:])
        package = self.root / relative / "__init__.py"
        is_package = package.is_file()
        return Module(name, package if is_package else self.root / f"{relative}.py", is_package, text)

    def _resolve(self, module: Module, expression: ast.expr, hops: int = 0) -> set[ClassId]:
        while isinstance(expression, ast.Subscript):  # a generic base, with its arguments
            expression = expression.value
        if isinstance(expression, ast.Name):
            return self._look_up(module, expression.id, hops)
        if isinstance(expression, ast.Attribute):
            prefix = ast.unparse(expression.value)
            for owner in self._modules_meant(module, prefix):
                return self._look_up(owner, expression.attr, hops + 1)
            return {
                ClassId(c.module, f"{c.qualname}.{expression.attr}")
                for c in self._resolve(module, expression.value, hops + 1)
            }
        return set()

    def _modules_meant(self, module: Module, dotted: str) -> Iterator[Module]:
        first, _, rest = dotted.partition(".")
        if first not in module.imports:
            return
        source, attribute = module.imports[first]
        base = f"{source}.{attribute}" if attribute else source
        found = self.module(f"{base}.{rest}" if rest else base)
        if found is not None:
            yield found

    def _look_up(self, module: Module, name: str, hops: int) -> set[ClassId]:
        if hops > _MAX_HOPS:
            return set()
        if name in module.classes:
            return {ClassId(module.name, name)}
        if name in module.imports:
            source, attribute = module.imports[name]
            owner = self.module(source)
            return self._look_up(owner, attribute, hops + 1) if owner is not None and attribute else set()
        found: set[ClassId] = set()
        for value in module.aliases.get(name, ()):
            found |= self._resolve(module, value, hops + 1)
        for star in module.stars:
            owner = self.module(star)
            if owner is not None and not found:
                found = self._look_up(owner, name, hops + 1)
        return found


def _name_of(path: Path, root: Path) -> str:
    parts = path.relative_to(root.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _head(text: str) -> str:
    return "\n".join(_HEAD.findall(text))


def _statements(scope: Scope) -> Iterator[ast.stmt]:
    """The statements of a module or class body, those under ``if``, ``try`` and ``with`` included, in order."""
    for node in ast.iter_child_nodes(scope):
        if isinstance(node, ast.ExceptHandler):
            yield from (inner for child in node.body for inner in _flattened(child))
        elif isinstance(node, ast.stmt):
            yield from _flattened(node)


def _flattened(node: ast.stmt) -> Iterator[ast.stmt]:
    if isinstance(node, ast.If | ast.Try | ast.With):
        yield from _statements(node)
    else:
        yield node


def _classes(scope: ast.AST, prefix: str) -> Iterator[tuple[str, ast.ClassDef]]:
    for node in ast.iter_child_nodes(scope):
        if isinstance(node, ast.ClassDef):
            yield f"{prefix}{node.name}", node
            yield from _classes(node, f"{prefix}{node.name}.")
        elif isinstance(node, ast.FunctionDef):
            yield from _classes(node, f"{prefix}{node.name}.<locals>.")
        elif isinstance(node, ast.stmt | ast.ExceptHandler):
            yield from _classes(node, prefix)
