"""The errors of this room."""

from __future__ import annotations


class BenchError(Exception):
    """A micro-benchmark has failed. The message is one line, with the remedy."""


class CannotRunError(BenchError):
    """It cannot run on this machine, or was asked for what does not exist."""
