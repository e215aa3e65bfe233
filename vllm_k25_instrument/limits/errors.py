"""The one error of this room."""

from __future__ import annotations


class LimitsError(ValueError):
    """A floor that cannot be computed. The message says what is missing and what to do about it."""
