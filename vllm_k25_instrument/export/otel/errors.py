"""What keeps the exporter from pushing over OTLP."""

from __future__ import annotations


class OtlpError(Exception):
    """Nothing can be pushed as asked. The message is one line: what is wrong, and what to do."""
