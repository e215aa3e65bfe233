"""The parts of an expression of PromQL, as far as the rules here need it."""

from __future__ import annotations

import re
from typing import Final

_BETWEEN: Final = re.compile(
    r"(?:==|!=|>=|<=|>|<)(?:\s*bool\b)?|\b(?:and|or|unless)\b(?:\s*(?:on|ignoring)\s*\([^)]*\))?"
)
_NUMBER: Final = re.compile(r"[0-9.]+")
_ABSENT: Final = re.compile(r"absent\((.+)\)", re.DOTALL)


def operands(expression: str) -> list[str]:
    """What an alert compares and combines, without the comparison: ``a > 0.5 and on (x) b < c`` is a, b and c.

    Numbers are left out; of ``absent(a)``, which has nothing where all is well, it is a.
    """
    found: list[str] = []
    depth, begin, at, quote = 0, 0, 0, ""
    while at < len(expression):
        letter = expression[at]
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "\"'":
            quote = letter
        elif letter in "([{":
            depth += 1
        elif letter in ")]}":
            depth -= 1
        elif depth == 0 and (between := _BETWEEN.match(expression, at)):
            found.append(expression[begin:at])
            begin = at = between.end()
            continue
        at += 1
    parts = [part.strip() for part in [*found, expression[begin:]]]
    return [absent[1] if (absent := _ABSENT.fullmatch(part)) else part for part in parts if not _NUMBER.fullmatch(part)]
