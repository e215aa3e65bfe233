"""Where time marks come from: one small protocol between the recorder and the hardware."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter_ns
from typing import Protocol, TypeVar

Mark = TypeVar("Mark")


class Device(Protocol[Mark]):
    """Takes marks on the current stream and tells, later, how far apart they are."""

    def mark(self) -> Mark:
        """A mark on the stream that is current. Never synchronises."""

    def completed(self, mark: Mark) -> bool:
        """Whether the device has passed the mark. Never waits; not to be asked while capturing."""

    def offsets_ns(self, start: Mark, marks: Sequence[Mark]) -> list[int]:
        """Nanoseconds from `start` to each of `marks`, all of them completed.

        All from one origin, so that differences of offsets add up exactly however coarse the device's clock is.
        """

    def is_capturing(self) -> bool:
        """Whether the current stream is being captured into a graph (an invalidated capture counts)."""

    def stream(self) -> int:
        """A small number for the current stream; 0 is the main one."""


class HostClock:
    """The CPU platform: work is done when the call returns, so a mark is the monotonic clock."""

    mark = staticmethod(perf_counter_ns)

    def completed(self, mark: int) -> bool:
        return True

    def offsets_ns(self, start: int, marks: Sequence[int]) -> list[int]:
        return [mark - start for mark in marks]

    def is_capturing(self) -> bool:
        return False

    def stream(self) -> int:
        return 0
