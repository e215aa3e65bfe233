"""Where time marks come from: one small protocol between the recorder and the hardware."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from time import perf_counter_ns
from typing import Protocol, TypeVar

Mark = TypeVar("Mark")


class Device(Protocol[Mark]):
    """Takes marks on the current stream and tells, later, how far apart they are."""

    def mark(self) -> Mark:
        """A mark on the stream that is current. Never synchronises; becomes a node of a graph that is captured."""

    def completed(self, mark: Mark) -> bool:
        """Whether the device has passed the mark. Never waits; not to be asked while capturing."""

    def offsets_ns(self, start: Mark, marks: Sequence[Mark]) -> list[int]:
        """Nanoseconds from `start` to each of `marks`, all of them completed.

        All from one origin, so that differences of offsets add up exactly however coarse the device's clock is.
        """

    def may_mark(self) -> bool:
        """Whether a mark may be taken now: not in a capture that we were not told to instrument."""

    def begin(self) -> None:
        """A step, or a graph, begins on the stream that is current: it is stream 0 from here on."""

    def stream(self) -> int:
        """A small number for the current stream; 0 is the main one."""

    def release(self, marks: Iterable[Mark]) -> None:
        """Nobody will ask about these marks again."""


class HostClock:
    """The CPU platform: work is done when the call returns, so a mark is the monotonic clock."""

    mark = staticmethod(perf_counter_ns)

    def completed(self, mark: int) -> bool:
        return True

    def offsets_ns(self, start: int, marks: Sequence[int]) -> list[int]:
        return [mark - start for mark in marks]

    def may_mark(self) -> bool:
        return True

    def begin(self) -> None:
        pass

    def stream(self) -> int:
        return 0

    def release(self, marks: Iterable[int]) -> None:
        pass
