"""Device memory: buffers whose values can be checked, and the pools of PyTorch's caching allocator.

Blocks are not split and not merged: an allocation takes the smallest cached block that is large enough, or reserves a
new one. That keeps the figures exact and their order that of the real allocator.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import Any

from tests.sim.errors import OutOfMemoryError

PoolId = tuple[int, int]
DEFAULT_POOL: PoolId = (0, 0)


class Buffer:
    """A piece of device memory holding one integer, which stands for its contents."""

    __slots__ = ("__weakref__", "_free", "contents", "name", "nbytes", "pool", "readers", "writers")

    def __init__(self, name: str, nbytes: int, pool: PoolId, contents: int) -> None:
        self.name = name
        self.nbytes = nbytes
        self.pool = pool
        self.contents = contents
        self.readers = 0
        self.writers = 0

    def free(self) -> None:
        """Give the memory back to its pool; happens by itself when nobody holds the buffer."""
        self._free()

    def __repr__(self) -> str:
        return f"<Buffer {self.name}={self.contents}>"


@dataclass
class Pool:
    use_count: int = 0
    reserved: int = 0
    allocated: int = 0
    cached: list[int] = field(default_factory=list)


class Memory:
    """The caching allocator, and what graphs take beside it."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.graphs = 0
        self.pools: dict[PoolId, Pool] = {DEFAULT_POOL: Pool(use_count=1)}
        self.recording: list[PoolId] = []
        self.outside_pool_during_capture = 0
        self.peak_allocated = 0
        self.peak_reserved = 0
        self._next_pool = 0

    # --- figures ---------------------------------------------------------------------------------------------

    @property
    def allocated(self) -> int:
        return sum(pool.allocated for pool in self.pools.values())

    @property
    def reserved(self) -> int:
        return sum(pool.reserved for pool in self.pools.values())

    @property
    def free(self) -> int:
        return self.total - self.reserved - self.graphs

    # --- allocations -----------------------------------------------------------------------------------------

    def allocate(self, nbytes: int, pool_id: PoolId, name: str = "", contents: int = 0) -> Buffer:
        pool = self.pools[pool_id]
        block = min((size for size in pool.cached if size >= nbytes), default=0)
        if block:
            pool.cached.remove(block)
        else:
            self._reserve(nbytes, pool)
            block = nbytes
        pool.allocated += block
        self.peak_allocated = max(self.peak_allocated, self.allocated)
        self.peak_reserved = max(self.peak_reserved, self.reserved)
        buffer = Buffer(name, nbytes, pool_id, contents)
        buffer._free = weakref.finalize(buffer, self._release, pool, block)
        buffer._free.atexit = False
        return buffer

    def empty_cache(self) -> None:
        """Give back what the default pool and the pools of dead graphs hold without need."""
        for pool_id, pool in list(self.pools.items()):
            if pool_id == DEFAULT_POOL or pool.use_count == 0:
                pool.reserved -= sum(pool.cached)
                pool.cached.clear()
                if pool_id != DEFAULT_POOL and not pool.reserved:
                    del self.pools[pool_id]

    def take_for_graph(self, nbytes: int) -> None:
        """Memory that the driver takes for an instantiated graph, outside of PyTorch's allocator."""
        if nbytes > self.free:
            raise MemoryError
        self.graphs += nbytes

    def _reserve(self, nbytes: int, pool: Pool) -> None:
        if nbytes > self.free:
            self.empty_cache()
        if nbytes > self.free:
            raise OutOfMemoryError(
                f"CUDA out of memory. Tried to allocate {nbytes} bytes. GPU 0 has a total capacity of {self.total} "
                f"bytes of which {self.free} bytes is free."
            )
        pool.reserved += nbytes

    @staticmethod
    def _release(pool: Pool, block: int) -> None:
        pool.allocated -= block
        pool.cached.append(block)

    # --- pools of graphs -------------------------------------------------------------------------------------

    def new_pool_id(self, *, user_created: bool) -> PoolId:
        self._next_pool += 1
        return (0, self._next_pool) if user_created else (self._next_pool, 0)

    def begin_recording(self, pool_id: PoolId) -> None:
        """As `beginAllocateToPool`: the pool serves the allocations of a capture that begins."""
        pool = self.pools.get(pool_id)
        if pool is None:
            pool = self.pools[pool_id] = Pool()
        elif pool.use_count <= 0:
            raise RuntimeError(
                "it->second->use_count > 0 INTERNAL ASSERT FAILED, please report a bug to PyTorch. "
                "The pool's last graph is gone, but the pool is not"
            )
        pool.use_count += 1
        if pool_id in self.recording:
            raise RuntimeError("beginAllocateToPool: already recording to mempool_id")
        self.recording.append(pool_id)

    def end_recording(self, pool_id: PoolId) -> None:
        """As `endAllocateToPool`. PyTorch calls it after a successful `cudaStreamEndCapture` only."""
        if pool_id not in self.recording:
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
        self.recording.remove(pool_id)

    def release(self, pool_id: PoolId) -> None:
        """As `releasePool`: one graph less uses the pool."""
        self.pools[pool_id].use_count -= 1

    def stats(self) -> dict[str, Any]:
        return {
            "allocated_bytes.all.current": self.allocated,
            "allocated_bytes.all.peak": self.peak_allocated,
            "reserved_bytes.all.current": self.reserved,
            "reserved_bytes.all.peak": self.peak_reserved,
        }
