"""What a tree of vLLM says of a hook's target, read from its syntax; nothing of the tree is imported."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from pathlib import Path

from source_tree import ClassId, Function, SourceTree


@dataclass(frozen=True)
class Definition:
    """A function where it is defined: module, class ("" for a function of the module), and its syntax."""

    module: str
    owner: str
    node: Function

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
    """The Python files of one release, under the folder `vllm`: its functions, and what is called where."""

    def __init__(self, root: Path, source: SourceTree | None = None) -> None:
        self.root = root
        self._source = source or SourceTree(root)
        self._calls: dict[str, frozenset[str]] = {}

    @property
    def texts(self) -> dict[str, str]:
        """Source by module."""
        return self._source.texts

    def with_text(self, module: str, text: str) -> VllmTree:
        """The same tree with another text of one module."""
        other = VllmTree(self.root, self._source.with_text(module, text))
        other._calls = {name: calls for name, calls in self._calls.items() if name != module}
        return other

    def parsed(self, module: str) -> ast.Module | None:
        """Syntax of a module, None where there is no such module."""
        found = self._source.module(module)
        return found.tree if found else None

    # --- classes and functions ---------------------------------------------------------------------------

    def find_class(self, module: str, name: str) -> ClassId | None:
        """The class that `name` is in `module`: defined there, or imported from another module of vLLM."""
        return min(self._source.resolve(module, name), key=lambda c: (c.module, c.qualname), default=None)

    def find_function(self, module: str, target: str) -> Definition | None:
        """The function or method that ``function`` or ``Class.method`` is, own, imported or inherited."""
        owner, _, name = target.rpartition(".")
        if not owner:
            found = self._source.function(module, name)
            return Definition(found[0], "", found[1]) if found else None
        cls = self.find_class(module, owner)
        for definer in self._lineage(cls) if cls else ():
            node = self._source.method(definer, name)
            if node is not None:
                return Definition(definer.module, definer.qualname, node)
        return None

    def family(self, module: str, name: str) -> list[tuple[str, ast.ClassDef]]:
        """A class and all that inherit from it anywhere in the tree, with their modules."""
        root = self.find_class(module, name)
        members = self._source.family(root) if root else []
        return [(cls.module, self._source.node(cls)) for cls in members]

    def overrides(self, module: str, target: str) -> list[Definition]:
        """Every definition of a method in the family of its class."""
        owner, _, name = target.rpartition(".")
        root = self.find_class(module, owner)
        return [
            Definition(cls.module, cls.qualname, node)
            for cls in (self._source.family(root) if root else ())
            if (node := self._source.method(cls, name)) is not None
        ]

    def _lineage(self, cls: ClassId) -> list[ClassId]:
        """A class and those that it inherits from, the nearest first, bases in their order."""
        found = {cls: None}
        for base in self._source.bases(cls):
            found |= dict.fromkeys(self._lineage(base))
        return list(found)

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
        lineage = self._lineage(cls) if cls else ()
        return {name for one in lineage for name in _assigned(self._source.node(one))}


def _assigned(cls: ast.ClassDef) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(cls):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self":
            names.add(node.attr)
    for node in cls.body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            names.add(node.name)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names.add(node.target.id)
        elif isinstance(node, ast.Assign):
            names.update(target.id for target in node.targets if isinstance(target, ast.Name))
    return names
