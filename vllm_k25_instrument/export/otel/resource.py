"""Who it is that the metrics and spans are about: the server instance, as OpenTelemetry's resource attributes."""

from __future__ import annotations

from typing import Final

from opentelemetry.sdk.resources import OTELResourceDetector, Resource

from vllm_k25_instrument.model import RankIdentity

SERVICE_NAME: Final = "vllm-k25"


class Resources:
    """Makes the resource of a server. ``OTEL_SERVICE_NAME`` and ``OTEL_RESOURCE_ATTRIBUTES`` have precedence."""

    def __init__(self) -> None:
        self._of_sdk = Resource.create()
        self._of_user = OTELResourceDetector().detect()

    def of(self, identity: RankIdentity) -> Resource:
        """The resource of the server that this rank belongs to: the same for all its ranks."""
        size = identity.coordinates
        ours: dict[str, str | int] = {
            "service.name": SERVICE_NAME,
            "service.instance.id": identity.instance,
            "vllm.version": identity.vllm_version,
            "vllm.model": identity.model,
            "vllm_k25.version": identity.plugin_version,
            "vllm_k25.tp_size": size.tp_size,
            "vllm_k25.pp_size": size.pp_size,
            "vllm_k25.dp_size": size.dp_size,
        }
        known = Resource({name: value for name, value in ours.items() if value != ""})
        return self._of_sdk.merge(known).merge(self._of_user)
