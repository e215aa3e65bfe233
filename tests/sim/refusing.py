"""How the tests of the simulator say that the device refuses."""

from __future__ import annotations

from typing import Any

import pytest


def refused(error: type[Exception], message: str) -> Any:
    """The block under it is refused with `error`, whose text has `message`; the refusal may come at its end."""
    return pytest.raises(error, match=message)
