"""Standard output and standard error, on which text stays text."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from vllm_k25_instrument.plain_text import without_controls

if TYPE_CHECKING:
    from rich.progress import Progress

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


class MovingLine:
    """On a terminal, a line that says what is going on and for how long; elsewhere nothing."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._progress: Progress | None = None

    @contextmanager
    def shown(self) -> Iterator[None]:
        """While this is open, the line shows."""
        if not self._console.is_terminal:
            yield
            return
        from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

        columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
        with Progress(*columns, console=self._console, transient=True) as progress:
            progress.add_task("starting", total=None)
            self._progress = progress
            try:
                yield
            finally:
                self._progress = None

    @property
    def showing(self) -> bool:
        """Whether what `update` says is seen."""
        return self._progress is not None

    def update(self, text: str) -> None:
        """Say what is going on now."""
        if self._progress is not None:
            self._progress.update(self._progress.task_ids[0], description=text)


def messages() -> Terminal:
    """Standard error, for lines of whatever length."""
    return Terminal(stderr=True, soft_wrap=True)
