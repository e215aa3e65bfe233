"""From a kernel's name, and from what it ran inside of, to a category: the first rule that hits."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple, Self

from vllm_k25_instrument.analysis.capture import ActivityKind
from vllm_k25_instrument.analysis.names import MAX_NAME, KernelName, Spelling, take_apart
from vllm_k25_instrument.analysis.rules import BUILT_IN, Rule, read_rules
from vllm_k25_instrument.model import Category

NO_RULE: Final = "none"
"""The rule of a verdict where none hit: category `other`, or `memory` for a copy or fill."""

_CATEGORY_NAMES: Final = frozenset(map(str, Category))

MAX_REMEMBERED: Final = 1 << 17
"""Verdicts kept. A capture has a few thousand pairs of name and context; damaged files have no bound of their own."""


class Verdict(NamedTuple):
    """What a kernel's time was spent on, and the id of the rule that says so."""

    category: Category
    rule: str


@dataclass(frozen=True, slots=True)
class Explanation:
    """A verdict with its reasons: the name as the rules saw it, and what of it each condition found."""

    name: str
    verdict: Verdict
    comment: str
    function: str
    inside: str
    cut: bool
    matched: dict[str, str]

    @property
    def rule_hit(self) -> bool:
        """Whether any rule speaks for the verdict."""
        return self.verdict.rule != NO_RULE


class Classifier:
    """Applies rules in their order. Verdicts are remembered, so a second question costs a look-up.

    An instance serves one thread at a time.
    """

    def __init__(self, rules: Sequence[Rule], spelling: Spelling, *, mla_model: bool = False) -> None:
        """`mla_model`: attention kernels whose names do not say so belong to MLA (see `for_names`)."""
        self._rules = tuple(rules)
        self._spelling = spelling
        self._mla_model = mla_model
        self._by_kind = {kind: tuple(rule for rule in rules if kind in rule.kinds) for kind in ActivityKind}
        self._contexts = [rule.compiled["context"] for rule in rules if rule.context]
        self._verdicts: dict[tuple[str, tuple[str, ...], ActivityKind], Verdict] = {}
        self._telling: dict[str, bool] = {}

    @classmethod
    def load(cls, extra_rules: Path | None = None) -> Self:
        """The rules that come with the package, preceded by those of `extra_rules`. Raises RulesError."""
        built_in = read_rules(BUILT_IN)
        if extra_rules is None:
            return cls(built_in.rules, Spelling(built_in.spelling))
        extra = read_rules(extra_rules)
        return cls((*extra.rules, *built_in.rules), Spelling({**built_in.spelling, **extra.spelling}))

    @property
    def rules(self) -> tuple[Rule, ...]:
        """The rules in the order in which they are tried."""
        return self._rules

    def for_names(self, names: Iterable[str]) -> Self:
        """The classifier for a capture with these kernel names.

        Softmax attention is MLA in all layers of a model or in none. So where any name can only be MLA's (its cache
        writer, say), the `attention` kernels of that capture are `mla_attention`, whatever they are called; but for
        the recurrent kernels of hybrid models.
        """
        mla = any(
            (rule := self._hit(take_apart(name, self._spelling), (), ActivityKind.KERNEL)) and rule.mla
            for name in names
        )
        return type(self)(self._rules, self._spelling, mla_model=mla)

    def classify(self, name: str, context: Sequence[str] = (), kind: ActivityKind = ActivityKind.KERNEL) -> Verdict:
        """The category of GPU work. Never raises, whatever the text.

        `context`: the names of the ranges and CPU operators around it, innermost first.
        """
        key = (name, tuple(entry for entry in context if self._tells(entry)) if context else (), kind)
        verdict = self._verdicts.get(key)
        if verdict is None:
            if len(self._verdicts) >= MAX_REMEMBERED:
                self._verdicts.clear()
            verdict = self._verdicts[key] = self._decide(take_apart(name, self._spelling), key[1], kind)
        return verdict

    def explain(self, name: str, context: Sequence[str] = (), kind: ActivityKind = ActivityKind.KERNEL) -> Explanation:
        """The verdict on a name with the reasons for it."""
        parts = take_apart(name, self._spelling)
        entries = tuple(context)
        rule = self._hit(parts, entries, kind)
        matched: dict[str, str] = {}
        for key, pattern in rule.compiled.items() if rule else ():
            texts = entries if key == "context" else (_text(parts, key),)
            found = next((match for text in texts if (match := pattern.search(text))), None)
            if found is not None:
                matched[key] = found.group()
        return Explanation(
            name=name,
            verdict=self._decide(parts, entries, kind),
            comment=rule.comment if rule else "no rule hit",
            function=parts.function_words,
            inside=parts.inside_words,
            cut=parts.cut,
            matched=matched,
        )

    def _tells(self, entry: str) -> bool:
        """Whether any rule listens to this context: most do not, and would make a key of each step."""
        tells = self._telling.get(entry)
        if tells is None:
            if len(self._telling) >= MAX_REMEMBERED:
                self._telling.clear()
            text = entry[:MAX_NAME]
            tells = self._telling[entry] = any(pattern.search(text) for pattern in self._contexts)
        return tells

    def _decide(self, parts: KernelName, context: Sequence[str], kind: ActivityKind) -> Verdict:
        rule = self._hit(parts, context, kind)
        if rule is None:
            is_copy = kind in (ActivityKind.MEMCPY, ActivityKind.MEMSET)
            return Verdict(Category.MEMORY if is_copy else Category.OTHER, NO_RULE)
        category = rule.category
        if category is None:
            category = _named_category(rule, context)
        elif category is Category.ATTENTION and self._mla_model and rule.mla is not False:
            category = Category.MLA_ATTENTION
        return Verdict(category, rule.id)

    def _hit(self, parts: KernelName, context: Sequence[str], kind: ActivityKind) -> Rule | None:
        for rule in self._by_kind[kind]:
            if _holds(rule, parts, context):
                return rule
        return None


def _holds(rule: Rule, parts: KernelName, context: Sequence[str]) -> bool:
    for key, pattern in rule.compiled.items():
        if key == "context":
            if not any(pattern.search(entry[:MAX_NAME]) for entry in context):
                return False
        elif (pattern.search(_text(parts, key)) is None) is (key != "unless"):
            return False
    return True


def _text(parts: KernelName, key: str) -> str:
    if key == "function":
        return parts.function_words
    return parts.inside_words if key == "inside" else parts.all_words


def _named_category(rule: Rule, context: Sequence[str]) -> Category:
    """The category that the innermost matching context names; `other` where it names none that exists."""
    pattern: re.Pattern[str] = rule.compiled["context"]
    named = next(match["category"] for entry in context if (match := pattern.search(entry[:MAX_NAME])))
    return Category(named) if named in _CATEGORY_NAMES else Category.OTHER
