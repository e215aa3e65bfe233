"""What our logger does where logging itself fails."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator

import pytest

from vllm_k25_instrument.log import logger


class Refusing(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        raise RuntimeError("a filter of the user's")


@pytest.fixture
def refusing() -> Iterator[Refusing]:
    made = Refusing()
    logger.addFilter(made)
    yield made
    logger.removeFilter(made)


def broken(*_: object, **__: object) -> float:
    raise ValueError("no time")


def test_a_line_says_where_it_was_written(caplog: pytest.LogCaptureFixture) -> None:
    logger.warning("K25: here")
    (record,) = caplog.records
    assert (record.filename, record.funcName) == ("test_log.py", "test_a_line_says_where_it_was_written")


def test_a_filter_that_raises_costs_the_line(refusing: Refusing, caplog: pytest.LogCaptureFixture) -> None:
    logger.warning("K25: lost")
    logger.exception("K25: lost too", exc_info=ValueError("kept from vLLM"))
    logger.removeFilter(refusing)
    logger.warning("K25: there")
    assert [record.getMessage() for record in caplog.records] == ["K25: there"]


def test_a_clock_that_raises_costs_the_line(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(time, "time", broken)
        patched.setattr(time, "time_ns", broken)
        logger.error("K25: lost")
    assert caplog.records == []
