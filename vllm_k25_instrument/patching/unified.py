"""Unified diffs, applied to the letter: every line where the diff says it is, or not at all.

Tools that apply diffs look elsewhere when a hunk does not fit, which in a file with ten methods of one name finds the
wrong one. These diffs are of one release, whose lines are where they are.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

_HUNK: Final = re.compile(r"@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@")


class DiffError(ValueError):
    """A text that is no unified diff of existing files. The message is one line."""


class HunkError(ValueError):
    """A hunk that does not fit. `number` counts from 1, `line` is where it should have been (from 1)."""

    def __init__(self, number: int, line: int) -> None:
        super().__init__(f"hunk {number} does not fit at line {line}")
        self.number = number
        self.line = line


@dataclass(frozen=True, slots=True)
class Hunk:
    """Lines of a file before and after, with their ends; `start` is the first one's number before, from 0."""

    start: int
    new_start: int
    old: tuple[str, ...]
    new: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class FileDiff:
    """What a diff does to one file; `path` has no ``a/`` or ``b/``."""

    path: str
    hunks: tuple[Hunk, ...]

    def reversed(self) -> FileDiff:
        """What undoes it."""
        return FileDiff(self.path, tuple(Hunk(h.new_start, h.start, h.new, h.old) for h in self.hunks))

    def apply(self, text: str) -> str:
        """The file's text afterwards. Raises HunkError."""
        lines = lines_of(text)
        after: list[str] = []
        done = 0
        for number, hunk in enumerate(self.hunks, 1):
            end = hunk.start + len(hunk.old)
            if hunk.start < done or tuple(lines[hunk.start : end]) != hunk.old:
                raise HunkError(number, hunk.start + 1)
            after += [*lines[done : hunk.start], *hunk.new]
            done = end
        return "".join([*after, *lines[done:]])


def lines_of(text: str) -> list[str]:
    """The lines of a text with their ends. Only a line feed ends one: `str.splitlines` knows ten more."""
    lines = text.split("\n")
    return [*(f"{line}\n" for line in lines[:-1]), *([lines[-1]] if lines[-1] else [])]


def parse(text: str) -> list[FileDiff]:
    """The files of a unified diff, in order; text around them is left out. Raises DiffError."""
    files: list[FileDiff] = []
    lines = lines_of(text)
    at = 0
    while at < len(lines):
        if not lines[at].startswith("--- "):
            at += 1
            continue
        old = _path(lines, at, "--- a/")
        if _path(lines, at + 1, "+++ b/") != old:
            raise DiffError(f"line {at + 1}: a file that is made, removed or renamed")
        at += 2
        hunks = []
        while at < len(lines) and (heading := _HUNK.match(lines[at])):
            hunk, at = _hunk(lines, at, heading)
            hunks.append(hunk)
        if not hunks:
            raise DiffError(f"line {at + 1}: {old} has no hunks")
        if at < len(lines) and lines[at][0] in " +-\\" and not lines[at].startswith("--- "):
            raise DiffError(f"line {at + 1}: outside of any hunk")
        files.append(FileDiff(old, tuple(hunks)))
    return files


def _path(lines: Sequence[str], at: int, prefix: str) -> str:
    line = lines[at] if at < len(lines) else ""
    path = line.removeprefix(prefix).rstrip("\n")
    if not line.startswith(prefix) or path.startswith("/") or ".." in path.split("/"):
        raise DiffError(f"line {at + 1}: not '{prefix}PATH'")
    return path


def _hunk(lines: Sequence[str], at: int, heading: re.Match[str]) -> tuple[Hunk, int]:
    start, old_count, new_start, new_count = (int(number or 1) for number in heading.groups())
    first = at + 1
    old: list[str] = []
    new: list[str] = []
    at += 1
    while len(old) < old_count or len(new) < new_count:
        line = lines[at] if at < len(lines) else ""
        if line[:1] not in (" ", "-", "+") or line[-1:] != "\n":
            raise DiffError(f"line {at + 1}: the hunk of line {first} ends too early")
        if line[0] != "+":
            old.append(line[1:])
        if line[0] != "-":
            new.append(line[1:])
        at += 1
    if (len(old), len(new)) != (old_count, new_count):
        raise DiffError(f"line {first}: the hunk has more lines than it says")
    return Hunk(start - 1, new_start - 1, tuple(old), tuple(new)), at
