"""The category of every activity of a capture: each name is asked once in each context that it ran in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from vllm_k25_instrument.analysis.capture import ActivityKind, Annotations, Capture, Int8, Int32, Int64
from vllm_k25_instrument.analysis.classify import Classifier
from vllm_k25_instrument.analysis.exposure import CATEGORY_CODE, NO_CATEGORY

MAX_CONTEXT: Final = 64
"""Enclosing ranges looked at, innermost first. Real ones are a dozen deep."""

NO_CONTEXT: Final = -1


@dataclass(frozen=True, slots=True)
class Categories:
    """`code` per activity indexes ``exposure.CATEGORIES`` (-1: an opaque graph). `rule` indexes `rules`."""

    code: Int8
    rule: Int32
    rules: tuple[str, ...]


def categorise(capture: Capture, classifier: Classifier) -> Categories:
    """Ask `classifier` for every activity of `capture`; context wins over names where it says more."""
    activities = capture.activities
    kernels = np.unique(activities.name[activities.kind == ActivityKind.KERNEL]).tolist()
    classifier = classifier.for_names([capture.names[name] for name in kernels])
    contexts = _Contexts(capture.annotations, activities.annotation)
    # One number for each distinct (kind, name, context).
    keys = (activities.name.astype(np.int64) * (len(contexts) + 1) + contexts.of_activity + 1) * len(
        ActivityKind
    ) + activities.kind
    distinct, first, inverse = np.unique(keys, return_index=True, return_inverse=True)
    codes = np.empty(len(distinct), np.int8)
    rule_of = np.empty(len(distinct), np.int32)
    rules: dict[str, int] = {}
    for place, row in enumerate(first.tolist()):
        kind = ActivityKind(int(activities.kind[row]))
        if kind is ActivityKind.GRAPH:
            codes[place], rule = NO_CATEGORY, ""
        else:
            names = [capture.names[name] for name in contexts.chain(int(contexts.of_activity[row]))]
            verdict = classifier.classify(capture.names[int(activities.name[row])], names, kind)
            codes[place], rule = CATEGORY_CODE[verdict.category], verdict.rule
        rule_of[place] = rules.setdefault(rule, len(rules))
    at = inverse.reshape(-1)
    return Categories(code=codes[at], rule=rule_of[at], rules=tuple(rules))


class _Contexts:
    """Enclosing ranges by name: two ranges of one name inside ranges of the same names are one context."""

    def __init__(self, annotations: Annotations, used: Int32) -> None:
        self._parent: list[int] = []
        self._name: list[int] = []
        of_annotation = np.full(len(annotations) + 1, NO_CONTEXT, np.int64)  # the last place serves "no annotation"
        known: dict[tuple[int, int], int] = {}
        for row in _outermost_first(annotations.parent, used):
            parent = int(annotations.parent[row])
            key = (int(of_annotation[parent]) if parent >= 0 else NO_CONTEXT, int(annotations.name[row]))
            context = known.get(key)
            if context is None:
                context = known[key] = len(self._name)
                self._parent.append(key[0])
                self._name.append(key[1])
            of_annotation[row] = context
        self.of_activity: Int64 = of_annotation[used]

    def __len__(self) -> int:
        return len(self._name)

    def chain(self, context: int) -> list[int]:
        """Indices of names, innermost first."""
        names: list[int] = []
        while context != NO_CONTEXT and len(names) < MAX_CONTEXT:
            names.append(self._name[context])
            context = self._parent[context]
        return names


def _outermost_first(parent: Int32, used: Int32) -> list[int]:
    """The annotations in `used` and all that enclose them, each after its parent.

    A parent comes before its children in the table, so that the order of the table will do.
    """
    needed = np.zeros(len(parent), np.bool_)
    rows = np.unique(used[used >= 0])
    while len(rows):
        needed[rows] = True
        above = parent[rows]
        above = np.unique(above[above >= 0])
        rows = above[~needed[above]]
    ordered: list[int] = np.flatnonzero(needed).tolist()
    return ordered
