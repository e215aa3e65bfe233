"""The package's logger: a child of vLLM's, so that our lines look and go like the server's own."""

from __future__ import annotations

import contextlib
import logging
from typing import Any, Final


class _NeverRaising(logging.Logger):
    """A line that cannot be logged is lost.

    Handlers swallow their errors, but a filter or a record factory of the user's does not, nor does whatever somebody
    has put in the place of `time.time`; and most of our lines are written where an error is being kept from vLLM.
    """

    def _log(self, *args: Any, **kwargs: Any) -> None:
        kwargs["stacklevel"] = kwargs.get("stacklevel", 1) + 1  # this frame is not the caller's
        with contextlib.suppress(Exception):
            super()._log(*args, **kwargs)


logger: Final = logging.getLogger("vllm.k25_instrument")
logger.__class__ = _NeverRaising
