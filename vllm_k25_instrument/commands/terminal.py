"""Standard output and standard error, on which text stays text."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Final

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from vllm_k25_instrument.plain_text import without_controls

STDOUT: Final = Path("-")
"""What stands for standard output where a command takes a file."""

PIPE_WIDTH: Final = 200
"""Columns of a table that goes to a file or a pipe, which has no width of its own."""

FRAME_WIDTH: Final = 120
"""The same of a frame of the live view."""


class Terminal(Console):
    """A console that takes no orders from what it prints.

    Names of kernels, models and files come from outside: rich's markup and emoji codes in them mean nothing, and
    control characters are replaced. `pipe_width` is the width where this is no terminal; `soft_wrap` leaves long lines
    to the terminal, as messages are.
    """

    def __init__(self, *, stderr: bool = False, soft_wrap: bool = False, pipe_width: int = PIPE_WIDTH) -> None:
        super().__init__(stderr=stderr, soft_wrap=soft_wrap, markup=False, emoji=False, highlight=False)
        if not self.is_terminal:
            self.width = pipe_width

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """As rich has it, without control characters but the console's own."""
        for segment in super().render(renderable, options):
            if segment.control or segment.text.isprintable():
                yield segment
            else:
                yield Segment(without_controls(segment.text), segment.style)


def messages() -> Terminal:
    """Standard error, for lines of whatever length."""
    return Terminal(stderr=True, soft_wrap=True)
