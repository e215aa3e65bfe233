"""What one test leaves behind must not decide what the next one sees."""

from __future__ import annotations

import logging

import pytest


@pytest.fixture(autouse=True)
def our_log_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests of vLLM's kernels import vLLM, which sets its own logger up, and ours below it; pytest hears the root."""
    vllm = logging.getLogger("vllm")
    monkeypatch.setattr(vllm, "propagate", True)
    vllm.setLevel(logging.NOTSET)
