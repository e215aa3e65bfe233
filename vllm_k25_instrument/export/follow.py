"""Which server's rings to export: the one that lives, also after a restart."""

from __future__ import annotations

from pathlib import Path

from vllm_k25_instrument.instances import Instance, find_rings
from vllm_k25_instrument.log import logger


class InstanceFollower:
    """Finds the rings below a path, and stays with a server for as long as it lives.

    Of several living servers the newest is taken, and kept until it ends: two servers side by side must not take turns
    in one set of series. A path that is itself an instance's folder, or a ring, is never left.
    """

    def __init__(self, path: Path) -> None:
        """`path`: a ring directory, an instance's folder or a ring; need not exist yet."""
        self._path = path
        self._current: Path | None = None

    def __call__(self) -> Path:
        """The folder (or ring) to read now. Raises FileNotFoundError where there are no rings, other OSErrors."""
        current = self._current
        if current is not None and current != self._path and Instance(current).alive:
            return current
        found = find_rings(self._path)
        if found != current:
            logger.info("K25: reading %s", found)
            self._current = found
        return found
