"""What one test leaves behind must not decide what the next one sees."""

from __future__ import annotations

import logging

import pytest


@pytest.fixture(autouse=True)
def our_log_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Importing vLLM, which tests of its kernels do, cuts the `vllm` loggers off from the root that pytest listens at."""
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
