"""The classifier's rules: what a rule is, and reading a file of them. The format is described in `rules.toml`."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib import resources
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

from vllm_k25_instrument.analysis.capture import ActivityKind
from vllm_k25_instrument.model import Category
from vllm_k25_instrument.plain_text import one_line

BUILT_IN: Final = Path(str(resources.files("vllm_k25_instrument.analysis") / "rules.toml"))

MAX_RULES: Final = 1 << 20
"""Characters of a rules file; ours has 30,000."""

_NAME_CONDITIONS: Final = ("function", "inside", "name", "unless")
_CONDITIONS: Final = (*_NAME_CONDITIONS, "context")
_KEYS: Final = ("id", "category", "comment", "kind", "mla", *_CONDITIONS)
FROM_CONTEXT: Final = "from_context"
"""The `category` of a rule whose `context` names the category itself, in a group ``(?P<category>…)``."""

_KINDS: Final[Mapping[str, tuple[ActivityKind, ...]]] = {
    "kernel": (ActivityKind.KERNEL,),
    "copy_or_fill": (ActivityKind.MEMCPY, ActivityKind.MEMSET),
    "graph": (ActivityKind.GRAPH,),
}


class RulesError(Exception):
    """A rules file that cannot be used. One line: the file, the line in it, what is wrong."""

    def __init__(self, path: Path, line: int, reason: str) -> None:
        super().__init__(one_line(f"{path}:{line}: {reason}"))
        self.path = path
        self.line = line
        self.reason = reason


@dataclass(frozen=True)
class Rule:
    """One rule. It hits where all of its conditions hold; each condition is a list of regular expressions, one of which
    must be found (`unless`: none may).

    `function`, `inside`, `name` and `unless` look at a kernel's name in words (see `rules.toml`), `context` at each
    enclosing range or operator. `category` is None where the context names it. `mla`: True, a model with this kernel
    attends through MLA; False, the kernel never is MLA's, whatever the model; None, the name does not say.
    """

    id: str
    category: Category | None
    comment: str = ""
    kinds: tuple[ActivityKind, ...] = (ActivityKind.KERNEL,)
    function: tuple[str, ...] = ()
    inside: tuple[str, ...] = ()
    name: tuple[str, ...] = ()
    unless: tuple[str, ...] = ()
    context: tuple[str, ...] = ()
    mla: bool | None = None

    @cached_property
    def needs_name(self) -> bool:
        """Whether the rule looks at the name at all."""
        return bool(self.function or self.inside or self.name or self.unless)

    @cached_property
    def compiled(self) -> Mapping[str, re.Pattern[str]]:
        """One regular expression per condition that the rule has."""
        return {key: _any_of(patterns) for key in _CONDITIONS if (patterns := getattr(self, key))}


@dataclass(frozen=True, slots=True)
class RuleSet:
    """The rules of a file in their order, and the spellings it adds (a variant -> the spelling rules use)."""

    rules: tuple[Rule, ...]
    spelling: Mapping[str, str]


def read_rules(path: Path = BUILT_IN) -> RuleSet:
    """Read a rules file.

    Raises RulesError, with the line, for what is no TOML, an unknown key or category, a regular expression that does
    not compile, a rule without conditions, or two rules of one id.
    """
    try:
        with path.open(encoding="utf-8") as file:
            text = file.read(MAX_RULES + 1)
    except OSError as error:
        raise RulesError(path, 1, f"cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise RulesError(path, 1, f"is not UTF-8 text (byte {error.start})") from error
    if len(text) > MAX_RULES:
        raise RulesError(path, 1, f"is longer than {MAX_RULES:,} characters: no rules file is")
    try:
        tables = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        where = re.search(r"at line (\d+)", str(error))
        line = int(where[1]) if where else text.count("\n") + 1
        raise RulesError(path, line, f"not valid TOML: {str(error).split(' (at ')[0]}") from error
    except RecursionError as error:
        raise RulesError(path, 1, "not valid TOML: nested too deeply") from error
    return _Reader(path, text).read(tables)


class _Reader:
    """Checks the tables of one file, and knows on which line each of them stands."""

    def __init__(self, path: Path, text: str) -> None:
        self._path = path
        self._lines = text.splitlines()
        headers = [n for n, line in enumerate(self._lines) if re.match(r"\s*\[\[\s*rule\s*\]\]", line)]
        self._spans = list(pairwise([*headers, len(self._lines)]))

    def read(self, tables: Mapping[str, Any]) -> RuleSet:
        for key in tables:
            if key not in ("rule", "spelling"):
                raise self._error(f"unknown table or key {key!r}: a rules file has [[rule]] and [spelling]", None, key)
        entries = tables.get("rule", [])
        if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
            raise self._error("'rule' must be an array of tables: write [[rule]]", None, "rule")
        rules = tuple(self._rule(index, entry) for index, entry in enumerate(entries))
        seen: set[str] = set()
        for index, rule in enumerate(rules):
            if rule.id in seen:
                raise self._error(f"two rules have the id {rule.id!r}", index, "id")
            seen.add(rule.id)
        return RuleSet(rules, dict(self._spelling(tables.get("spelling", {}))))

    def _spelling(self, table: Any) -> Iterator[tuple[str, str]]:
        if not isinstance(table, dict):
            raise self._error("'spelling' must be a table", None, "spelling")
        for word, variants in table.items():
            for variant in self._strings(None, word, variants):
                yield variant, word

    def _rule(self, index: int, entry: Mapping[str, Any]) -> Rule:
        identity = entry.get("id")
        if not isinstance(identity, str) or not identity:
            raise self._error("a rule needs an id", index, "id")
        for key in entry:
            if key not in _KEYS:
                raise self._error(f"rule {identity!r}: unknown key {key!r}: known are {', '.join(_KEYS)}", index, key)
        conditions = {key: self._patterns(index, identity, key, entry[key]) for key in _CONDITIONS if key in entry}
        kind = entry.get("kind", "kernel")
        if kind not in (*_KINDS, "any"):
            raise self._error(
                f"rule {identity!r}: kind {kind!r} is not one of {', '.join((*_KINDS, 'any'))}", index, "kind"
            )
        if not any(key in conditions for key in ("function", "inside", "name", "context")) and kind in (
            "kernel",
            "any",
        ):
            raise self._error(
                f"rule {identity!r} has no condition: give function, inside, name or context", index, "id"
            )
        comment, mla = entry.get("comment", ""), entry.get("mla")
        if not isinstance(comment, str):
            raise self._error(f"rule {identity!r}: comment must be text", index, "comment")
        if not isinstance(mla, bool | None):
            raise self._error(f"rule {identity!r}: mla must be true or false", index, "mla")
        return Rule(
            id=identity,
            category=self._category(index, identity, entry, conditions),
            comment=comment,
            kinds=tuple(ActivityKind) if kind == "any" else _KINDS[kind],
            mla=mla,
            **conditions,
        )

    def _category(
        self, index: int, identity: str, entry: Mapping[str, Any], conditions: Mapping[str, Sequence[str]]
    ) -> Category | None:
        category = entry.get("category")
        if category == FROM_CONTEXT:
            if not any("(?P<category>" in pattern for pattern in conditions.get("context", ())):
                reason = f"rule {identity!r}: category {FROM_CONTEXT!r} needs a context with a group (?P<category>…)"
                raise self._error(reason, index, "category")
            return None
        if category not in list(Category):
            known = ", ".join(Category)
            raise self._error(f"rule {identity!r}: category {category!r} is not one of {known}", index, "category")
        return Category(category)

    def _patterns(self, index: int, identity: str, key: str, value: Any) -> tuple[str, ...]:
        patterns = self._strings(index, key, value)
        for pattern in patterns:
            try:
                re.compile(pattern)
            except re.error as error:
                reason = f"rule {identity!r}: {key} {pattern!r} is not a regular expression: {error}"
                raise self._error(reason, index, pattern) from error
        return patterns

    def _strings(self, index: int | None, key: str, value: Any) -> tuple[str, ...]:
        values = [value] if isinstance(value, str) else value
        if not isinstance(values, list) or not values or not all(isinstance(v, str) and v for v in values):
            raise self._error(f"{key!r} must be text, or a list of texts", index, key)
        return tuple(values)

    def _error(self, reason: str, index: int | None, text: str) -> RulesError:
        """The error at the first line of rule `index` (None: of the file) that holds `text`."""
        start, end = (0, len(self._lines)) if index is None or index >= len(self._spans) else self._spans[index]
        for number in range(start, end):
            if text in self._lines[number]:
                return RulesError(self._path, number + 1, reason)
        return RulesError(self._path, start + 1, reason)


def _any_of(patterns: Sequence[str]) -> re.Pattern[str]:
    return re.compile("|".join(f"(?:{pattern})" for pattern in patterns))
