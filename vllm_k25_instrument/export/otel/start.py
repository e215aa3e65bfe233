"""The way in: OpenTelemetry is imported when somebody asks for it, and not before."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

from vllm_k25_instrument.export.otel.errors import OtlpError

if TYPE_CHECKING:
    from vllm_k25_instrument.export.otel.push import Pusher

_OPTIONAL: Final = ("opentelemetry", "grpc", "google", "requests")


def open_pusher(path: Path, *, ranges: bool = False, history: bool = False) -> Pusher:
    """A pusher of the rings at `path` (as for InstanceFollower), set up from the ``OTEL_*`` variables; not yet running.

    `ranges` adds a child span for every range; `history` also pushes the samples that the rings hold already. Raises
    OtlpError where packages are missing or a variable is wrong.
    """
    try:
        from vllm_k25_instrument.export.otel.push import Pusher

        return Pusher(path, ranges=ranges, history=history)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in _OPTIONAL:
            raise
        raise OtlpError(
            f"OTLP needs the OpenTelemetry packages (no module {error.name}): pip install 'vllm-k25-instrument[otel]'"
        ) from None
