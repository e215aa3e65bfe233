"""The servers of the chaos suite: started as those of the end-to-end tests are."""

from __future__ import annotations

from tests.e2e.conftest import launch, nvtx_logger, tiny_model

__all__ = ["launch", "nvtx_logger", "tiny_model"]
