"""Functions that vLLM's own, patched source has marked for us (`patches/`), and what is put into them.

A marked function calls whatever its mark holds: itself, until a worker's patcher puts a wrapper there, the same that a
hook would put around it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Final

Function = Callable[..., Any]

HOOK_MARK: Final = "__k25_hook__"
"""Attribute of a function that is taken care of: the patcher wraps no function twice."""


class Mark:
    """One marked function. `hook` is the hook's name, `function` vLLM's own."""

    __slots__ = ("function", "hook", "marked", "put")

    def __init__(self, hook: str, function: Function) -> None:
        self.hook = hook
        self.function = function
        self.marked, self.put = _marked(function)
        setattr(self.marked, HOOK_MARK, self)

    def remove(self) -> None:
        """Have the function call nothing but itself again."""
        self.put(self.function)


def _marked(function: Function) -> tuple[Function, Callable[[Function], None]]:
    """A function that calls `function` until another is put in its place, and what puts it there.

    What it calls is in a closure rather than in an attribute: the compiler reads through it, and it costs less.
    """
    called = function

    @functools.wraps(function)
    def marked(*args: Any, **kwargs: Any) -> Any:
        return called(*args, **kwargs)

    def put(other: Function) -> None:
        nonlocal called
        called = other

    return marked, put


if "_Marks" not in globals():  # what has been marked stays known when the module is reloaded

    class _Marks:
        """The marks of this process, and who wants to hear of more."""

        known: list[Mark] = []  # noqa: RUF012 (one per process)
        listener: Callable[[Mark], None] | None = None


def add(mark: Mark) -> None:
    """Note a function that vLLM's source marks."""
    _Marks.known.append(mark)
    if _Marks.listener is not None:
        _Marks.listener(mark)


def listen(listener: Callable[[Mark], None] | None) -> None:
    """Have `listener` called with every mark there is and every one to come; None: nobody listens any more."""
    _Marks.listener = listener
    if listener is not None:
        for mark in list(_Marks.known):
            listener(mark)
