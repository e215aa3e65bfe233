"""What a tree of vLLM says of a hook's target, read from its syntax; nothing of the tree is imported."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

_ALIAS = re.compile(r"\b(\w+) as (\w+)")
_CLASS = re.compile(r"^class (\w+)\(([^)]*)\)", re.MULTILINE)


@dataclass(frozen=True)
class Definition:
    """A function where it is defined: module, class ("" for a function of the module), and its syntax."""

    module: str
    owner: str
    node: ast.FunctionDef | ast.AsyncFunctionDef

    @property
    def where(self) -> str:
        return f"{self.module}:{self.owner + '.' if self.owner else ''}{self.node.name}"

    @property
    def parameters(self) -> list[str]:
        """Names by position; what can be given by keyword only is not among them."""
        arguments = self.node.args
        return [argument.arg for argument in (*arguments.posonlyargs, *arguments.args)]

    @property
    def keywords(self) -> list[str]:
        """Names that can be given by keyword."""
        arguments = self.node.args
        return [argument.arg for argument in (*arguments.args, *arguments.kwonlyargs)]

    def annotation(self, position: int) -> str:
        """Annotation of a parameter, "" where it has none."""
        arguments = self.node.args
        annotation = [*arguments.posonlyargs, *arguments.args][position].annotation
        return ast.unparse(annotation) if annotation else ""

    @property
    def decorators(self) -> list[str]:
        return [ast.unparse(decorator) for decorator in self.node.decorator_list]

    @property
    def is_plain(self) -> bool:
        """A function that a wrapper gets ``self`` from: no static or class method, no property, no coroutine."""
        return isinstance(self.node, ast.FunctionDef) and not any(
            name in ("staticmethod", "classmethod", "property") or name.endswith((".setter", "cached_property"))
            for name in self.decorators
        )


class VllmTree:
    """The Python files of one release, under the folder `vllm`."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._parsed: dict[str, ast.Module | None] = {}
        self._calls: dict[str, frozenset[str]] = {}

    @cached_property
    def texts(self) -> dict[str, str]:
        """Source by module."""
        texts = {}
        for path in sorted(self.root.rglob("*.py")):
            parts = ("vllm", *path.relative_to(self.root).with_suffix("").parts)
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            texts[name] = path.read_text(encoding="utf-8", errors="replace")
        return texts

    def parsed(self, module: str) -> ast.Module | None:
        """Syntax of a module, None where there is no such module."""
        if module not in self._parsed:
            text = self.texts.get(module)
            self._parsed[module] = None if text is None else ast.parse(text)
        return self._parsed[module]

    # --- classes and functions ---------------------------------------------------------------------------

    def find_class(self, module: str, name: str) -> tuple[str, ast.ClassDef] | None:
        """The class that `name` is in `module`: defined there, or imported from another module of vLLM."""
        found = self._find(module, name)
        return (found[0], found[1]) if found and isinstance(found[1], ast.ClassDef) else None

    def find_function(self, module: str, target: str) -> Definition | None:
        """The function or method that ``function`` or ``Class.method`` is, own, imported or inherited."""
        owner, _, name = target.rpartition(".")
        if not owner:
            found = self._find(module, name)
            is_function = found and isinstance(found[1], (ast.FunctionDef, ast.AsyncFunctionDef))
            return Definition(found[0], "", found[1]) if is_function else None
        cls = self.find_class(module, owner)
        return self._method(cls, name) if cls else None

    def family(self, module: str, name: str) -> list[tuple[str, ast.ClassDef]]:
        """A class and all that inherit from it anywhere in the tree."""
        root = self.find_class(module, name)
        if root is None:
            return []
        found = {(root[0], root[1].name): root}
        todo = [root]
        while todo:
            parent_module, parent = todo.pop()
            for child in self._children.get((parent_module, parent.name), ()):
                key = (child[0], child[1].name)
                if key not in found:
                    found[key] = child
                    todo.append(child)
        return list(found.values())

    def overrides(self, module: str, target: str) -> list[Definition]:
        """Every definition of a method in the family of its class."""
        owner, _, name = target.rpartition(".")
        return [
            Definition(where, cls.name, node)
            for where, cls in self.family(module, owner)
            if (node := _own_method(cls, name)) is not None
        ]

    def _method(self, cls: tuple[str, ast.ClassDef], name: str, depth: int = 0) -> Definition | None:
        own = _own_method(cls[1], name)
        if own is not None:
            return Definition(cls[0], cls[1].name, own)
        for base in cls[1].bases if depth < 12 else ():
            parent = self.find_class(cls[0], _last_name(base))
            found = self._method(parent, name, depth + 1) if parent else None
            if found is not None:
                return found
        return None

    def _find(self, module: str, name: str, depth: int = 0) -> tuple[str, ast.stmt] | None:
        tree = self.parsed(module)
        if tree is None or depth > 6:
            return None
        imported = None
        for node in _statements(tree.body):
            if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)) and node.name == name:
                return module, node
            if isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    if (alias.asname or alias.name) == name:
                        imported = (self._absolute(module, node), alias.name)
        return self._find(*imported, depth + 1) if imported else None

    def _absolute(self, module: str, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        is_package = (self.root / Path(*module.split(".")[1:]) / "__init__.py").is_file()
        parts = module.split(".")
        parts = parts[: len(parts) - node.level + int(is_package)]
        return ".".join([*parts, *([node.module] if node.module else [])])

    @cached_property
    def _children(self) -> dict[tuple[str, str], list[tuple[str, ast.ClassDef]]]:
        """Subclasses by (module, name) of the class that they name as a base; bases outside of vLLM are left out."""
        by_base_name: dict[str, list[tuple[str, str]]] = {}
        aliases: dict[str, set[str]] = {}
        for module, text in self.texts.items():
            for name, alias in _ALIAS.findall(text):
                aliases.setdefault(name, {name}).add(alias)
            for match in _CLASS.finditer(text):
                for base in re.findall(r"[\w.]+", re.sub(r"\[[^]]*\]", "", match[2])):
                    by_base_name.setdefault(base.rpartition(".")[2], []).append((module, match[1]))
        return _Children(self, by_base_name, aliases)

    def with_text(self, module: str, text: str) -> VllmTree:
        """The same tree with another text of one module."""
        other = VllmTree(self.root)
        other.texts = {**self.texts, module: text}
        other._parsed = {name: tree for name, tree in self._parsed.items() if name != module}
        other._calls = {name: calls for name, calls in self._calls.items() if name != module}
        return other

    # --- calls and attributes ----------------------------------------------------------------------------

    def calls(self, module: str) -> frozenset[str]:
        """What is called in a module, as written: ``self.device_communicator.all_reduce``."""
        if module not in self._calls:
            tree = self.parsed(module)
            nodes = ast.walk(tree) if tree else ()
            self._calls[module] = frozenset(ast.unparse(node.func) for node in nodes if isinstance(node, ast.Call))
        return self._calls[module]

    def modules(self, pattern: str) -> list[str]:
        """Modules whose name matches a regular expression."""
        return [module for module in self.texts if re.fullmatch(pattern, module)]

    def assigned(self, module: str, owner: str) -> set[str]:
        """Attributes that the class or one of its bases in vLLM has: assigned to self, or in the class's body."""
        cls = self.find_class(module, owner)
        return self._assigned(cls) if cls else set()

    def _assigned(self, cls: tuple[str, ast.ClassDef], depth: int = 0) -> set[str]:
        names: set[str] = set()
        for node in ast.walk(cls[1]):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _last_name(node.value) == "self":
                names.add(node.attr)
        for node in cls[1].body:
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                names.add(node.name)
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                names.add(node.target.id)
            elif isinstance(node, ast.Assign):
                names.update(target.id for target in node.targets if isinstance(target, ast.Name))
        for base in cls[1].bases if depth < 12 else ():
            parent = self.find_class(cls[0], _last_name(base))
            if parent:
                names |= self._assigned(parent, depth + 1)
        return names


class _Children(dict):
    """Looked up base by base, so that only modules are parsed that may hold a subclass."""

    def __init__(
        self, tree: VllmTree, by_base_name: dict[str, list[tuple[str, str]]], aliases: dict[str, set[str]]
    ) -> None:
        super().__init__()
        self._tree, self._by_base_name, self._aliases = tree, by_base_name, aliases

    def get(self, key, default=()):
        if key not in self:
            module, name = key
            found = []
            named = (c for alias in self._aliases.get(name, {name}) for c in self._by_base_name.get(alias, ()))
            for where, child in dict.fromkeys(named):
                cls = self._tree.find_class(where, child)
                if cls is None or cls[0] != where:
                    continue
                bases = (self._tree.find_class(where, _last_name(base)) for base in cls[1].bases)
                if any(base is not None and (base[0], base[1].name) == (module, name) for base in bases):
                    found.append(cls)
            self[key] = found
        return self[key]


def _statements(body: list[ast.stmt]):
    """Statements of a module, those under ``if`` and ``try`` included."""
    for node in body:
        yield node
        if isinstance(node, ast.If):
            yield from _statements([*node.body, *node.orelse])
        elif isinstance(node, ast.Try):
            handlers = [statement for handler in node.handlers for statement in handler.body]
            yield from _statements([*node.body, *handlers, *node.orelse])


def _own_method(cls: ast.ClassDef, name: str) -> ast.FunctionDef | ast.AsyncFunctionDef | None:
    found = [n for n in cls.body if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef)) and n.name == name]
    return found[-1] if found else None


def _last_name(node: ast.expr) -> str:
    while isinstance(node, ast.Subscript):
        node = node.value
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")
