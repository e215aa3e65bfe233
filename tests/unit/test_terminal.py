"""The line that moves on a terminal: it shows while it is open, however that ends, and never elsewhere."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from vllm_k25_instrument.commands.terminal import MovingLine


def console(*, terminal: bool) -> Console:
    return Console(file=io.StringIO(), force_terminal=terminal, width=80)


def written(to: Console) -> str:
    assert isinstance(to.file, io.StringIO)
    return to.file.getvalue()


def test_on_a_terminal_it_says_what_goes_on() -> None:
    screen = console(terminal=True)
    line = MovingLine(screen)
    with line.shown():
        assert line.showing
        line.update("loading [the] weights")
    assert not line.showing
    assert "loading [the] weights" in written(screen)


def test_after_an_error_inside_it_shows_no_more() -> None:
    line = MovingLine(console(terminal=True))
    with pytest.raises(RuntimeError, match="inside"), line.shown():
        raise RuntimeError("inside")
    assert not line.showing


def test_elsewhere_it_writes_nothing() -> None:
    log = console(terminal=False)
    line = MovingLine(log)
    with line.shown():
        assert not line.showing
        line.update("loading the weights")
    assert written(log) == ""
