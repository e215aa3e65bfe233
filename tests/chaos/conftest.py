"""The servers of the chaos suite: started as those of the end-to-end tests are."""

from __future__ import annotations

import pytest

pytest.register_assert_rewrite("tests.chaos.lab", "tests.chaos.figures", "tests.chaos.traffic")

from tests.e2e.conftest import launch, nvtx_logger, tiny_model  # noqa: E402

__all__ = ["launch", "nvtx_logger", "tiny_model"]
