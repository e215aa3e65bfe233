"""The package's logger: a child of vLLM's, so that our lines look and go like the server's own."""

from __future__ import annotations

import logging
from typing import Final

logger: Final = logging.getLogger("vllm.k25_instrument")
