"""The one error of this room."""

from __future__ import annotations


class BenchError(Exception):
    """A micro-benchmark that cannot run, or has failed. The message is one line, with the remedy."""
