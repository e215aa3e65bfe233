"""Text from outside (a ring, a trace, a file's name, a collector's answer) made harmless to show."""

from __future__ import annotations

from typing import Final
from unicodedata import category

REPLACEMENT: Final = "\ufffd"


def without_controls(text: str) -> str:
    """`text` without what a terminal would obey: controls, marks that turn the writing direction, halves of characters.

    Each is replaced by one character; line ends stay.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c == "\n" or category(c) == "Zs" else REPLACEMENT for c in text)


def one_line(text: object) -> str:
    """`text` on one line, and nothing in it that a terminal would obey: damaged files speak through error messages."""
    return without_controls(" ".join(str(text).split()))
