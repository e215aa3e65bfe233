"""Kernel names as profilers print them, brought into one readable form for the classifier's rules.

A profiler prints a kernel demangled (``void ns::kernel<4, Functor>(int, Functor)``), mangled (``_ZN2ns6kernelILi4E…``,
usual on ROCm), short (``kernel``), or cut (``void ns::kernel<4, at...``). Rules see the same words in all four.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Final

MAX_NAME: Final = 8_192
"""Characters of a name that are looked at. Real ones reach 6,000; the bound keeps damaged files from costing time."""
MAX_WORD: Final = 128
"""Characters of a word in it that rules see."""

_ANONYMOUS = re.compile(
    r"(?:\(anonymous namespace\)|<unnamed>|\{anonymous\}|`anonymous namespace'|_GLOBAL__N_\d*)(?:::)?"
)
# No search below takes more than a bounded number of steps from any place: damaged names are 8,192 of one character.
_CUT = re.compile(r"(?<!\s)\s*(?:\.\.\.|…)\s*$")
_SUFFIX = re.compile(r"(?:\s{0,8}\[clone [^\]]{0,512}\]|\.kd){1,8}\s*$")
_ENTITIES: Final = (("&lt;", "<"), ("&gt;", ">"), ("&amp;", "&"))

_LOWER_UPPER = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
_ACRONYM_WORD = re.compile(r"(?<=[A-Z])(?=[A-Z][a-z])")
_LONG_WORD = re.compile(rf"([a-z0-9]{{{MAX_WORD}}})[a-z0-9]+")
_NOT_WORD = re.compile(r"[^a-z0-9:]+")
_STRAY_COLON = re.compile(r"(?<!:):(?!:)|:{3,}")
_AROUND_COLONS = re.compile(r" *:: *")


class Spelling:
    """One spelling for words that kernels spell in several ways: `TopK`, `top_k`, `topk`."""

    def __init__(self, variants: Mapping[str, str]) -> None:
        """`variants`: a way to write it, in lower-case words -> the way the rules write it."""
        self._variants = dict(variants)
        alternatives = sorted(map(re.escape, self._variants), key=len, reverse=True)
        self._pattern = re.compile(rf"\b(?:{'|'.join(alternatives)})\b") if alternatives else None

    def words(self, text: str) -> str:
        """`text` in lower-case words: camelCase and underscores become spaces, ``::`` stays."""
        text = _ACRONYM_WORD.sub(" ", _LOWER_UPPER.sub(" ", text)).lower()
        # Rules look for words around others, which in one long word takes its length squared.
        text = _LONG_WORD.sub(r"\1", text)
        text = _AROUND_COLONS.sub("::", _STRAY_COLON.sub(" ", _NOT_WORD.sub(" ", text))).strip()
        if self._pattern is None:
            return text
        return self._pattern.sub(lambda match: self._variants[match.group()], text)


@dataclass(frozen=True)
class KernelName:
    """A name taken apart. `function` and `inside` are as written; `words` bring them into the rules' form.

    `function`: the qualified name without return type, template arguments and parameters. `inside`: the text of the
    template arguments and parameters. `cut`: the profiler cut the name off.
    """

    function: str
    inside: str
    cut: bool
    spelling: Spelling

    @cached_property
    def function_words(self) -> str:
        """The function's name in words."""
        return self.spelling.words(self.function)

    @cached_property
    def inside_words(self) -> str:
        """Template arguments and parameters in words."""
        return self.spelling.words(self.inside)

    @cached_property
    def all_words(self) -> str:
        """The whole name in words."""
        return f"{self.function_words} {self.inside_words}".strip()


def take_apart(name: str, spelling: Spelling) -> KernelName:
    """Split a kernel's name of any of the four forms. Never raises: what is no name is a function without arguments."""
    text = name[:MAX_NAME].strip()
    cut = len(name) > MAX_NAME or _CUT.search(text) is not None
    text = _SUFFIX.sub("", _CUT.sub("", text))
    for entity, character in _ENTITIES:
        text = text.replace(entity, character)
    if text.startswith(("_Z", "__Z")):
        function, inside = _mangled(text)
    else:
        function, inside = _demangled(_ANONYMOUS.sub("", text))
    return KernelName(function, inside, cut, spelling)


# --- demangled -------------------------------------------------------------------------------------------


def _demangled(text: str) -> tuple[str, str]:
    """Function and the rest, by brackets: what is outside of ``<>`` before the first ``(`` is the function."""
    outside: list[str] = []
    inside: list[str] = []
    depth = 0
    for index, character in enumerate(text):
        if character == "<" and not _is_operator(text, index):
            depth += 1
            inside.append(" ")
        elif character == ">" and depth and not _is_operator(text, index):
            depth -= 1
        elif depth:
            inside.append(character)
        elif character == "(" and outside and not text.startswith("()", index) and _looks_like_code(text):
            inside.append(text[index:])
            break
        else:
            outside.append(character)
    written = "".join(outside)
    # ``void f``: the return type goes. Names with spaces that are no code (``Memcpy HtoD``) stay whole.
    function = written.rsplit(None, 1)[-1] if written.strip() and _looks_like_code(text) else written
    return function, "".join(inside)


def _looks_like_code(text: str) -> bool:
    """Whether spaces separate a return type from a name, rather than the words of a title."""
    return not text.lower().startswith(("memcpy", "memset", "[", "copy ", "fill "))


def _is_operator(text: str, index: int) -> bool:
    """Whether ``<`` or ``>`` at `index` belongs to ``->``, ``operator<`` or the like rather than to a template."""
    return (text[index] == ">" and text[index - 1 : index] == "-") or text[max(0, index - 8) : index] == "operator"


# --- mangled (Itanium) -----------------------------------------------------------------------------------

_NUMBER = re.compile(r"\d+")
_IDENTIFIER = re.compile(r"[A-Za-z_$][\w$.]*")
_BUILTIN_LITERAL = re.compile(r"L([a-z])(n?\d+)E")
_ENUM_VALUE = re.compile(r"n?\d{1,32}(?=E)")
_SUBSTITUTION = re.compile(r"S(?:[0-9A-Z]*_|[tabsiod])|T[0-9]*_")


def _mangled(text: str) -> tuple[str, str]:
    """Function and the identifiers of its arguments, without a grammar: enough for words, and robust against cuts.

    The Itanium ABI writes an identifier as its length and its text. Everything else (types, qualifiers,
    back-references) is single letters, which rules have no use for; literals are told apart, since their digits are no
    lengths. https://itanium-cxx-abi.github.io/cxx-abi/abi.html#mangling
    """
    names: list[str] = []
    inside: list[str] = []
    position = text.index("Z") + 1
    in_function = True
    nested = False
    while position < len(text):
        if match := _BUILTIN_LITERAL.match(text, position):
            inside.append(match[2])
            in_function = False
            position = match.end()
            continue
        if text.startswith("L", position) and not text.startswith("L_Z", position) and not in_function:
            value = _enum_literal(text, position)
            if value is not None:
                identifiers, position = value
                inside.extend(identifiers)
                continue
        if match := _NUMBER.match(text, position):
            identifier = text[match.end() : match.end() + int(match[0])] if len(match[0]) <= 5 else ""
            if not _IDENTIFIER.fullmatch(identifier):
                position = match.end()
                continue
            position = match.end() + len(identifier)
            if not in_function:
                inside.append(identifier)
            elif not identifier.startswith("_GLOBAL__N_"):
                names.append(identifier)
            # Outside of ``N…E`` there is only one name; what follows are parameters.
            in_function = in_function and nested
            continue
        if match := _SUBSTITUTION.match(text, position):
            position = match.end()
            continue
        if text[position] == "N" and not names and in_function:
            nested = True
        elif text[position] in "IE" and names:
            in_function = False
        position += 1
    return "::".join(names), " ".join(inside)


def _enum_literal(text: str, start: int) -> tuple[list[str], int] | None:
    """``L <type> <value> E`` with a named type: its identifiers and value, and where it ends; None where it is none."""
    identifiers: list[str] = []
    position = start + 1
    if text.startswith("N", position):
        position += 1
    while position < len(text):
        if match := _SUBSTITUTION.match(text, position):
            position = match.end()
        elif (match := _ENUM_VALUE.match(text, position)) and identifiers and text[position - 1 : position] == "E":
            return [*identifiers, match[0]], match.end() + 1
        elif match := _NUMBER.match(text, position):
            identifier = text[match.end() : match.end() + int(match[0])] if len(match[0]) <= 5 else ""
            if _IDENTIFIER.fullmatch(identifier) and len(identifier) == int(match[0]) and not _is_value(text, match):
                identifiers.append(identifier)
                position = match.end() + len(identifier)
            elif identifiers and text.startswith("E", match.end()):
                return [*identifiers, match[0]], match.end() + 1
            else:
                return None
        elif text.startswith("E", position) and identifiers:
            position += 1
        else:
            return None
    return None


def _is_value(text: str, number: re.Match[str]) -> bool:
    """Whether digits are a literal's value (``…E1E``) rather than the length of an identifier that begins with E."""
    follows = text[number.end() + 1 : number.end() + 2]
    return text.startswith("E", number.end()) and not follows.islower()
